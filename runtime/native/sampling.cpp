#include <nanobind/nanobind.h>
void bind_sampling(nanobind::module_&) {}

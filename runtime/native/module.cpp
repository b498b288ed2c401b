// Python bindings of the CPU kernels. The binding checks shapes and dtypes; kernels assert.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_probes(nb::module_& m);
void bind_program(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_top_rows(nb::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of the optimc runtime.";
    bind_probes(m);
    bind_program(m);
    bind_sampling(m);
    bind_top_rows(m);
}

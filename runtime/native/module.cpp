// Python bindings of the CPU kernels. The binding checks shapes and dtypes; kernels assert.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_sampling(nb::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of the optimc runtime.";
    bind_sampling(m);
}

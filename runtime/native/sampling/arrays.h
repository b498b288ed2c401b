// Arrays that cross to Python and back, and what every binding of the sampling kernels checks of them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "require.h"

namespace optimc {

namespace nb = nanobind;

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Row = Vector<float>;

template <typename T>
using Output = nb::ndarray<nb::numpy, T>;

template <typename T>
Output<T> make_output(std::vector<T>&& values, std::initializer_list<std::size_t> shape) {
    auto owned = std::make_unique<std::vector<T>>(std::move(values));
    T* data = owned->data();
    nb::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Output<T>(data, shape, owner);
}

template <typename T>
void require_length(const Vector<T>& values, std::size_t length, const char* name) {
    require(values.shape(0) == length, std::string(name) + ": length " + std::to_string(values.shape(0)) + ", want " +
                                           std::to_string(length));
}

inline std::int32_t checked_vocab(std::size_t size) {
    require(size > 0 && size < (1u << 30), "the vocabulary must be in [1, 2^30)");
    return static_cast<std::int32_t>(size);
}

}  // namespace optimc

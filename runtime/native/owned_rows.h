// Arrays that Python owns.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <memory>

namespace optimc {

template <typename T>
nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<2>> owned_rows(std::unique_ptr<T[]> values, std::size_t rows,
                                                                    std::size_t width) {
    const nanobind::capsule owner(values.get(), [](void* held) noexcept { delete[] static_cast<T*>(held); });
    return {values.release(), {rows, width}, owner};
}

}  // namespace optimc

// Python face of `top_rows`, for executors whose heads run elsewhere.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "owned_rows.h"
#include "require.h"
#include "sampling/top_rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace optimc {

namespace {

using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

nb::tuple python_top_rows(const Matrix& logits, std::int32_t count) {
    const std::size_t rows = logits.shape(0), vocab = logits.shape(1);
    require(vocab > 0 && vocab < (1u << 30), "the vocabulary must be in [1, 2^30)");
    require(count >= 1 && static_cast<std::size_t>(count) <= vocab,
            std::to_string(count) + " candidates of " + std::to_string(vocab));
    const std::size_t each = static_cast<std::size_t>(count);
    auto ids = std::make_unique_for_overwrite<std::int32_t[]>(rows * each);
    auto logprobs = std::make_unique_for_overwrite<float[]>(rows * each);
    {
        nb::gil_scoped_release release;
        top_rows(logits.data(), static_cast<std::int64_t>(rows), static_cast<std::int32_t>(vocab), count, ids.get(),
                 logprobs.get());
    }
    return nb::make_tuple(owned_rows(std::move(ids), rows, each), owned_rows(std::move(logprobs), rows, each));
}

}  // namespace

}  // namespace optimc

void bind_top_rows(nb::module_& m) {
    m.def("top_rows", &optimc::python_top_rows, "logits"_a.noconvert(), "count"_a,
          "Ids and log-probabilities [M, count] of the likeliest candidates of each row of logits [M, V'], likeliest "
          "first.");
}

// The sampling kernels one by one, each beside its scalar reference, for tests.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "require.h"
#include "sampling/arrays.h"
#include "sampling/cutoff.h"
#include "sampling/draw.h"
#include "sampling/philox.h"
#include "sampling/row_max.h"
#include "sampling/sample_row.h"
#include "sampling/softmax.h"

using namespace nanobind::literals;

namespace optimc {

namespace {

std::int32_t vocab_of(const Row& row) { return checked_vocab(row.shape(0)); }

void bind_all(nb::module_& m) {
    const auto bind_max = [&m](const char* name, auto kernel) {
        m.def(
            name,
            [kernel](Row row) {
                const RowMax best = kernel(row.data(), vocab_of(row));
                return std::tuple(best.value, best.token, best.has_nan);
            },
            "row"_a.noconvert());
    };
    bind_max("row_max", row_max);
    bind_max("row_max_reference", row_max_reference);

    const auto bind_weights = [&m](const char* name, auto kernel) {
        m.def(
            name,
            [kernel](Row row, float max, float temperature) {
                std::vector<float> weights(row.shape(0));
                kernel(row.data(), vocab_of(row), max, temperature, weights.data());
                return make_output(std::move(weights), {row.shape(0)});
            },
            "row"_a.noconvert(), "max"_a, "temperature"_a);
    };
    bind_weights("softmax_weights", softmax_weights);
    bind_weights("softmax_weights_reference", softmax_weights_reference);

    const auto bind_sum = [&m](const char* name, auto kernel) {
        m.def(
            name, [kernel](Row row, float max) { return kernel(row.data(), vocab_of(row), max); },
            "row"_a.noconvert(), "max"_a);
    };
    bind_sum("log_sum_exp", log_sum_exp);
    bind_sum("log_sum_exp_reference", log_sum_exp_reference);

    const auto bind_count = [&m](const char* name, auto kernel) {
        m.def(
            name,
            [kernel](Row row, float max, std::int32_t count) {
                const std::int32_t vocab = vocab_of(row);
                require(1 <= count && count <= vocab, "count must be in [1, vocab]");
                const Cutoff cutoff = kernel(row.data(), vocab, max, count);
                return std::tuple(cutoff.distance, cutoff.token);
            },
            "row"_a.noconvert(), "max"_a, "count"_a);
    };
    bind_count("cutoff_by_count", [](const float* row, std::int32_t vocab, float max, std::int32_t count) {
        RowScratch scratch;
        scratch.reserve(vocab);
        return cutoff_by_count(row, vocab, max, count, {scratch.tokens.data(), scratch.blocks.data(), scratch.sums.data()});
    });
    bind_count("cutoff_by_count_reference", cutoff_by_count_reference);

    m.def(
        "cutoff_by_mass",
        [](Row row, Row weights, float max, float temperature, float share) {
            const std::int32_t vocab = vocab_of(row);
            require_length(weights, row.shape(0), "weights");
            require(0 < share && share < 1, "share must be in (0, 1)");
            RowScratch scratch;
            scratch.reserve(vocab);
            const Cutoff cutoff =
                cutoff_by_mass(row.data(), weights.data(), vocab, max, temperature, share,
                               {scratch.tokens.data(), scratch.blocks.data(), scratch.sums.data()});
            return std::tuple(cutoff.distance, cutoff.token);
        },
        "row"_a.noconvert(), "weights"_a.noconvert(), "max"_a, "temperature"_a, "share"_a);
    m.def(
        "cutoff_by_mass_reference",
        [](Row row, Row weights, float max, float share) {
            require_length(weights, row.shape(0), "weights");
            const Cutoff cutoff = cutoff_by_mass_reference(row.data(), weights.data(), vocab_of(row), max, share);
            return std::tuple(cutoff.distance, cutoff.token);
        },
        "row"_a.noconvert(), "weights"_a.noconvert(), "max"_a, "share"_a);

    m.def(
        "draw",
        [](Row weights, double uniform) {
            const std::int32_t vocab = vocab_of(weights);
            std::vector<double> sums(static_cast<std::size_t>(draw_blocks(vocab)));
            return draw(weights.data(), vocab, uniform, sums.data());
        },
        "weights"_a.noconvert(), "uniform"_a);
    m.def(
        "draw_reference",
        [](Row weights, double uniform) { return draw_reference(weights.data(), vocab_of(weights), uniform); },
        "weights"_a.noconvert(), "uniform"_a);
    m.def("philox4x32", philox4x32, "counter"_a, "key"_a);
    m.def("uniform_at", uniform_at, "seed"_a, "position"_a);
}

}  // namespace

}  // namespace optimc

void bind_sampling_kernels(nanobind::module_& m) { optimc::bind_all(m); }

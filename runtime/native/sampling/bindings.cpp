// Python face of the sampling kernels: checks shapes, dtypes and ids, releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "sampling/cutoff.h"
#include "sampling/draw.h"
#include "sampling/philox.h"
#include "sampling/row_max.h"
#include "sampling/sample_row.h"
#include "sampling/softmax.h"
#include "sampling/top_logits.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace optimc {

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Row = Vector<float>;

template <typename T>
using Output = nb::ndarray<nb::numpy, T>;

void require(bool ok, const std::string& message) {
    if (!ok) throw nb::value_error(message.c_str());
}

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

// Row r owns ids[start[r]:start[r + 1]].
struct Ragged {
    const std::int64_t* start;
    const std::int32_t* ids;

    std::span<const std::int32_t> row(std::size_t r) const {
        return {ids + start[r], static_cast<std::size_t>(start[r + 1] - start[r])};
    }
};

Ragged check_ragged(const Vector<std::int64_t>& start, const Vector<std::int32_t>& ids, std::size_t rows,
                    std::int32_t vocab, const char* name) {
    require_length(start, rows + 1, name);
    const std::int64_t* offsets = start.data();
    require(offsets[0] == 0 && offsets[rows] == static_cast<std::int64_t>(ids.shape(0)) &&
                std::is_sorted(offsets, offsets + rows + 1),
            std::string(name) + ": start must rise from 0 to the number of ids");
    const bool in_range = std::all_of(ids.data(), ids.data() + ids.shape(0),
                                      [=](std::int32_t id) { return 0 <= id && id < vocab; });
    require(in_range, std::string(name) + ": ids must be in [0, " + std::to_string(vocab) + ")");
    return {offsets, ids.data()};
}

void check_params(const RowParams& params, std::int32_t vocab, std::size_t row) {
    const bool ok = params.temperature >= 0 && params.top_k >= 0 && params.top_p > 0 && params.top_p <= 1 &&
                    params.min_p >= 0 && params.min_p <= 1 && params.repetition_penalty > 0 &&
                    params.num_logprobs >= -1 && params.num_logprobs <= vocab;
    require(ok, "row " + std::to_string(row) + ": sampling parameters out of range");
}

using SampleResult = std::tuple<Output<std::uint8_t>, Output<std::int32_t>, Output<float>, Output<std::int32_t>,
                                Output<float>>;

SampleResult sample_rows(Matrix logits, Vector<float> temperature, Vector<std::int32_t> top_k, Vector<float> top_p,
                         Vector<float> min_p, Vector<float> repetition_penalty, Vector<float> presence_penalty,
                         Vector<float> frequency_penalty, Vector<std::uint64_t> seed, Vector<std::uint64_t> position,
                         Vector<std::int32_t> num_logprobs, Vector<std::int64_t> seen_start,
                         Vector<std::int32_t> seen_ids, Vector<std::int32_t> seen_counts,
                         Vector<std::int64_t> bias_start, Vector<std::int32_t> bias_ids, Vector<float> bias_values,
                         Vector<std::int64_t> banned_start, Vector<std::int32_t> banned_ids) {
    const std::size_t rows = logits.shape(0);
    require(logits.shape(1) > 0 && logits.shape(1) < (1u << 30), "logits: vocabulary must be in [1, 2^30)");
    const auto vocab = static_cast<std::int32_t>(logits.shape(1));
    require_length(temperature, rows, "temperature");
    require_length(top_k, rows, "top_k");
    require_length(top_p, rows, "top_p");
    require_length(min_p, rows, "min_p");
    require_length(repetition_penalty, rows, "repetition_penalty");
    require_length(presence_penalty, rows, "presence_penalty");
    require_length(frequency_penalty, rows, "frequency_penalty");
    require_length(seed, rows, "seed");
    require_length(position, rows, "position");
    require_length(num_logprobs, rows, "num_logprobs");
    require_length(seen_counts, seen_ids.shape(0), "seen_counts");
    require_length(bias_values, bias_ids.shape(0), "bias_values");
    const Ragged seen = check_ragged(seen_start, seen_ids, rows, vocab, "seen");
    const Ragged bias = check_ragged(bias_start, bias_ids, rows, vocab, "bias");
    const Ragged banned = check_ragged(banned_start, banned_ids, rows, vocab, "banned");

    std::vector<RowParams> params;
    params.reserve(rows);
    std::size_t width = 0;
    for (std::size_t r = 0; r < rows; ++r) {
        const auto seen_row = seen.row(r);
        const auto bias_row = bias.row(r);
        params.push_back({
            .temperature = temperature.data()[r],
            .top_k = top_k.data()[r],
            .top_p = top_p.data()[r],
            .min_p = min_p.data()[r],
            .repetition_penalty = repetition_penalty.data()[r],
            .presence_penalty = presence_penalty.data()[r],
            .frequency_penalty = frequency_penalty.data()[r],
            .seed = seed.data()[r],
            .position = position.data()[r],
            .seen_tokens = seen_row,
            .seen_counts = {seen_counts.data() + seen.start[r], seen_row.size()},
            .bias_tokens = bias_row,
            .biases = {bias_values.data() + bias.start[r], bias_row.size()},
            .banned_tokens = banned.row(r),
            .num_logprobs = num_logprobs.data()[r],
        });
        check_params(params.back(), vocab, r);
        width = std::max(width, static_cast<std::size_t>(std::max(0, params.back().num_logprobs)));
    }

    std::vector<std::uint8_t> status(rows);
    std::vector<std::int32_t> tokens(rows);
    std::vector<float> logprobs(rows);
    std::vector<std::int32_t> top_tokens(rows * width);
    std::vector<float> top_logprobs(rows * width);
    {
        nb::gil_scoped_release release;
        thread_local RowScratch scratch;
        scratch.reserve(vocab);
        for (std::size_t r = 0; r < rows; ++r) {
            const RowResult result{&tokens[r], &logprobs[r], top_tokens.data() + r * width,
                                   top_logprobs.data() + r * width};
            const float* row = logits.data() + r * static_cast<std::size_t>(vocab);
            status[r] = static_cast<std::uint8_t>(sample_row(row, vocab, params[r], scratch, result));
        }
    }
    return {make_output(std::move(status), {rows}), make_output(std::move(tokens), {rows}),
            make_output(std::move(logprobs), {rows}), make_output(std::move(top_tokens), {rows, width}),
            make_output(std::move(top_logprobs), {rows, width})};
}

std::int32_t vocab_of(const Row& row) {
    require(row.shape(0) > 0 && row.shape(0) < (1u << 30), "row: length must be in [1, 2^30)");
    return static_cast<std::int32_t>(row.shape(0));
}

// The kernels one by one, each beside its scalar reference, for tests.
void bind_kernels(nb::module_& m) {
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

void bind_sampling(nb::module_& m) {
    m.attr("STATUS_OK") = static_cast<int>(optimc::RowStatus::ok);
    m.attr("STATUS_NAN") = static_cast<int>(optimc::RowStatus::nan);
    m.attr("STATUS_EMPTY") = static_cast<int>(optimc::RowStatus::empty);
    m.def("sample_rows", optimc::sample_rows, "logits"_a.noconvert(), nb::kw_only(), "temperature"_a.noconvert(),
          "top_k"_a.noconvert(), "top_p"_a.noconvert(), "min_p"_a.noconvert(), "repetition_penalty"_a.noconvert(),
          "presence_penalty"_a.noconvert(), "frequency_penalty"_a.noconvert(), "seed"_a.noconvert(),
          "position"_a.noconvert(), "num_logprobs"_a.noconvert(), "seen_start"_a.noconvert(),
          "seen_ids"_a.noconvert(), "seen_counts"_a.noconvert(), "bias_start"_a.noconvert(),
          "bias_ids"_a.noconvert(), "bias_values"_a.noconvert(), "banned_start"_a.noconvert(),
          "banned_ids"_a.noconvert());
    optimc::bind_kernels(m);
}

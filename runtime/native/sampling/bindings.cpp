// Python face of sampling: checks shapes, dtypes and ids, releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "require.h"
#include "sampling/arrays.h"
#include "sampling/row_state.h"
#include "sampling/sample_row.h"
#include "sampling/sample_tree.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace optimc {

namespace {

using Masks = nb::ndarray<const std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::vector<std::int32_t> checked_ids(const Vector<std::int32_t>& ids, std::int32_t vocab, const char* name) {
    const std::span<const std::int32_t> given(ids.data(), ids.shape(0));
    const bool in_range = std::all_of(given.begin(), given.end(), [=](std::int32_t id) { return 0 <= id && id < vocab; });
    require(in_range, std::string(name) + ": ids must be in [0, " + std::to_string(vocab) + ")");
    return {given.begin(), given.end()};
}

void make_state(RowState* place, std::size_t vocab_size, float temperature, std::int32_t top_k, float top_p, float min_p,
                float repetition_penalty, float presence_penalty, float frequency_penalty, std::uint64_t seed,
                std::int32_t num_logprobs, Vector<std::int32_t> bias_ids, Vector<float> bias_values,
                Vector<std::int32_t> stop_ids, std::uint64_t min_tokens) {
    const std::int32_t vocab = checked_vocab(vocab_size);
    require_length(bias_values, bias_ids.shape(0), "bias_values");
    const RowParams fixed{
        .temperature = temperature,
        .top_k = top_k,
        .top_p = top_p,
        .min_p = min_p,
        .repetition_penalty = repetition_penalty,
        .presence_penalty = presence_penalty,
        .frequency_penalty = frequency_penalty,
        .seed = seed,
        .position = 0,
        .seen_tokens = {},
        .seen_counts = {},
        .bias_tokens = {},
        .biases = {},
        .banned_tokens = {},
        .num_logprobs = num_logprobs,
    };
    const bool ok = temperature >= 0 && top_k >= 0 && top_p > 0 && top_p <= 1 && min_p >= 0 && min_p <= 1 &&
                    repetition_penalty > 0 && num_logprobs >= -1 && num_logprobs <= vocab;
    require(ok, "sampling parameters out of range");
    new (place) RowState(vocab, fixed, checked_ids(bias_ids, vocab, "bias_ids"),
                         {bias_values.data(), bias_values.data() + bias_values.shape(0)},
                         checked_ids(stop_ids, vocab, "stop_ids"), min_tokens);
}

void remember(RowState& state, Vector<std::int32_t> prompt) {
    const std::vector<std::int32_t> ids = checked_ids(prompt, state.vocab(), "prompt");
    state.remember(ids.data(), ids.size());
}

void accept(RowState& state, std::int32_t token) {
    require(0 <= token && token < state.vocab(), "token: must be in [0, " + std::to_string(state.vocab()) + ")");
    state.accept(token);
}

Output<std::int32_t> copy_of(std::span<const std::int32_t> values) {
    return make_output(std::vector<std::int32_t>(values.begin(), values.end()), {values.size()});
}

// (logprob of the chosen token, [(id, logprob) of the likeliest])
using LogprobReport = std::tuple<float, std::vector<std::pair<std::int32_t, float>>>;
RowState& state_at(const nb::typed<nb::list, RowState>& states, std::size_t index, std::int32_t vocab) {
    if (!nb::isinstance<RowState>(states[index])) throw nb::type_error("states: every item must be a RowState");
    RowState& state = *nb::inst_ptr<RowState>(states[index]);
    require(state.vocab() == vocab, "row " + std::to_string(index) + ": logits have " + std::to_string(vocab) +
                                        " columns, its state " + std::to_string(state.vocab()));
    return state;
}

// Passes over a row of logits, roughly.
std::size_t passes_of(const RowParams& params) { return params.temperature > 0 || params.num_logprobs >= 0 ? 10 : 1; }

// Editing a copy of the row by its mask.
constexpr std::size_t kMaskPasses = 3;

// The mask of each row, nullptr for rows without one; empty if no row has one.
std::vector<RowMask> checked_masks(const std::optional<Masks>& masks, const std::optional<Vector<std::int32_t>>& mask_of,
                                   std::size_t rows, std::int32_t vocab) {
    require(masks.has_value() == mask_of.has_value(), "masks and mask_of must be given together");
    if (!masks) return {};
    require_length(*mask_of, rows, "mask_of");
    const std::size_t words = mask_words(vocab);
    require(masks->shape(1) == words, "masks: " + std::to_string(masks->shape(1)) + " words a row, want " +
                                          std::to_string(words));
    const auto count = static_cast<std::int64_t>(masks->shape(0));
    std::vector<RowMask> of_rows(rows, nullptr);
    for (std::size_t r = 0; r < rows; ++r) {
        const std::int32_t mask = mask_of->data()[r];
        require(-1 <= mask && mask < count, "mask_of: row " + std::to_string(r) + " names mask " + std::to_string(mask) +
                                                " of " + std::to_string(count));
        if (mask >= 0) of_rows[r] = masks->data() + static_cast<std::size_t>(mask) * words;
    }
    return of_rows;
}

// A tenth of a millisecond's work is worth letting go of the interpreter; for less, getting it back, which may take as
// long as whoever takes it likes, costs more.
bool is_long(std::size_t passes, std::int32_t vocab) {
    return passes * static_cast<std::size_t>(vocab) > std::size_t{1} << 20;
}

LogprobReport report_of(float logprob, const std::int32_t* top_tokens, const float* top_logprobs, std::size_t count) {
    LogprobReport report{logprob, {}};
    std::get<1>(report).reserve(count);
    for (std::size_t n = 0; n < count; ++n) std::get<1>(report).emplace_back(top_tokens[n], top_logprobs[n]);
    return report;
}

// (row, status) of the first row that has no token
using Failure = std::pair<std::size_t, int>;
using SampleResult = std::tuple<std::vector<std::int32_t>, std::vector<std::optional<LogprobReport>>,
                                std::optional<Failure>>;

SampleResult sample_rows(Matrix logits, nb::typed<nb::list, RowState> states, std::optional<Masks> masks,
                         std::optional<Vector<std::int32_t>> mask_of) {
    const std::size_t rows = logits.shape(0);
    const std::int32_t vocab = checked_vocab(logits.shape(1));
    require(states.size() == rows, std::to_string(rows) + " rows of logits for " + std::to_string(states.size()) +
                                       " states");
    const std::vector<RowMask> allowed = checked_masks(masks, mask_of, rows, vocab);
    std::vector<const RowParams*> params(rows);
    std::size_t width = 0;
    std::size_t passes = allowed.size() * kMaskPasses;
    bool wants_logprobs = false;
    for (std::size_t r = 0; r < rows; ++r) {
        params[r] = &state_at(states, r, vocab).params();
        wants_logprobs |= params[r]->num_logprobs >= 0;
        passes += passes_of(*params[r]);
        width = std::max(width, static_cast<std::size_t>(std::max(0, params[r]->num_logprobs)));
    }

    std::vector<std::int32_t> tokens(rows);
    std::vector<float> logprobs(rows);
    std::vector<std::int32_t> top_tokens(rows * width);
    std::vector<float> top_logprobs(rows * width);
    std::optional<Failure> failure;
    {
        std::optional<nb::gil_scoped_release> release;
        if (is_long(passes, vocab)) release.emplace();
        thread_local RowScratch scratch;
        scratch.reserve(vocab);
        for (std::size_t r = 0; r < rows && !failure; ++r) {
            const RowResult result{&tokens[r], &logprobs[r], top_tokens.data() + r * width,
                                   top_logprobs.data() + r * width};
            const float* row = logits.data() + r * static_cast<std::size_t>(vocab);
            const RowMask mask = allowed.empty() ? nullptr : allowed[r];
            const RowStatus status = sample_row(row, vocab, *params[r], mask, scratch, result);
            if (status != RowStatus::ok) failure = {r, static_cast<int>(status)};
        }
    }

    std::vector<std::optional<LogprobReport>> reports(wants_logprobs && !failure ? rows : 0);
    for (std::size_t r = 0; r < reports.size(); ++r) {
        if (params[r]->num_logprobs < 0) continue;
        reports[r] = report_of(logprobs[r], top_tokens.data() + r * width, top_logprobs.data() + r * width,
                               static_cast<std::size_t>(params[r]->num_logprobs));
    }
    return {std::move(tokens), std::move(reports), failure};
}

using TreeReports = std::vector<std::vector<std::optional<LogprobReport>>>;
using SampleTreesResult = std::tuple<std::vector<std::vector<std::int32_t>>, std::vector<std::vector<std::int32_t>>,
                                     std::vector<std::int64_t>, TreeReports, std::vector<int>>;

SampleTreesResult sample_trees(Matrix logits, nb::typed<nb::list, RowState> states,
                               const std::vector<std::int32_t>& first_rows, const std::vector<std::int32_t>& counts,
                               Vector<std::int32_t> parents, Vector<std::int64_t> tokens, float epsilon, float delta, std::optional<Masks> masks,
                               std::optional<Vector<std::int32_t>> mask_of) {
    const auto rows = static_cast<std::int64_t>(logits.shape(0));
    const std::int32_t vocab = checked_vocab(logits.shape(1));
    const std::size_t sequences = states.size();
    require(first_rows.size() == sequences && counts.size() == sequences,
            "first_rows and counts: lengths " + std::to_string(first_rows.size()) + " and " +
                std::to_string(counts.size()) + ", want " + std::to_string(sequences));
    require_length(parents, logits.shape(0), "parents");
    require_length(tokens, logits.shape(0), "tokens");
    require(epsilon >= 0 && epsilon <= 1 && delta >= 0, "epsilon must be in [0, 1], delta at least 0");
    const std::vector<RowMask> allowed = checked_masks(masks, mask_of, logits.shape(0), vocab);
    std::vector<RowState*> checked(sequences);
    std::vector<TreeRows> trees(sequences);
    std::size_t passes = allowed.size() * kMaskPasses;
    bool wants_logprobs = false;
    for (std::size_t s = 0; s < sequences; ++s) {
        const std::int64_t first = first_rows[s];
        const std::int32_t count = counts[s];
        require(first >= 0 && count >= 1 && first + count <= rows,
                "sequence " + std::to_string(s) + " has rows outside the logits");
        const std::int32_t* of_rows = parents.data() + first;
        for (std::int32_t query = 1; query < count; ++query) {
            require(0 <= of_rows[query] && of_rows[query] < query, "parents must stand before their children");
        }
        checked[s] = &state_at(states, s, vocab);
        const RowParams& params = checked[s]->params();
        wants_logprobs |= params.num_logprobs >= 0;
        passes += passes_of(params) * static_cast<std::size_t>(count);
        trees[s] = {.logits = logits.data() + first * vocab,
                    .vocab = vocab,
                    .count = count,
                    .parents = of_rows,
                    .tokens = tokens.data() + first,
                    .allowed = allowed.empty() ? nullptr : allowed.data() + first};
    }

    std::vector<TreeResult> results(sequences);
    {
        std::optional<nb::gil_scoped_release> release;
        if (is_long(passes, vocab)) release.emplace();
        thread_local RowScratch scratch;
        scratch.reserve(vocab);
        for (std::size_t s = 0; s < sequences; ++s) {
            results[s] = sample_tree(trees[s], *checked[s], {epsilon, delta}, scratch);
        }
    }

    std::vector<std::vector<std::int32_t>> emitted(sequences);
    std::vector<std::vector<std::int32_t>> paths(sequences);
    std::vector<std::int64_t> last_rows(sequences);
    std::vector<int> statuses(sequences);
    TreeReports reports(wants_logprobs ? sequences : 0);
    for (std::size_t s = 0; s < sequences; ++s) {
        TreeResult& result = results[s];
        const std::int32_t num_logprobs = checked[s]->params().num_logprobs;
        if (wants_logprobs) reports[s].resize(result.emitted.size());
        for (std::size_t n = 0; num_logprobs >= 0 && n < result.emitted.size(); ++n) {
            const auto width = static_cast<std::size_t>(num_logprobs);
            reports[s][n] = report_of(result.logprobs[n], result.top_tokens.data() + n * width,
                                      result.top_logprobs.data() + n * width, width);
        }
        last_rows[s] = first_rows[s] + (result.path.empty() ? 0 : result.path.back());
        statuses[s] = static_cast<int>(result.status);
        emitted[s] = std::move(result.emitted);
        paths[s] = std::move(result.path);
    }
    return {std::move(emitted), std::move(paths), std::move(last_rows), std::move(reports), std::move(statuses)};
}

}  // namespace

}  // namespace optimc

void bind_sampling_kernels(nb::module_& m);

void bind_sampling(nb::module_& m) {
    m.attr("STATUS_OK") = static_cast<int>(optimc::RowStatus::ok);
    m.attr("STATUS_NAN") = static_cast<int>(optimc::RowStatus::nan);
    m.attr("STATUS_EMPTY") = static_cast<int>(optimc::RowStatus::empty);
    nb::class_<optimc::RowState>(m, "RowState")
        .def("__init__", optimc::make_state, "vocab_size"_a, nb::kw_only(), "temperature"_a, "top_k"_a = 0,
             "top_p"_a = 1.0f, "min_p"_a = 0.0f, "repetition_penalty"_a = 1.0f, "presence_penalty"_a = 0.0f,
             "frequency_penalty"_a = 0.0f, "seed"_a = 0, "num_logprobs"_a = -1, "bias_ids"_a.noconvert(),
             "bias_values"_a.noconvert(), "stop_ids"_a.noconvert(), "min_tokens"_a = 0)
        .def("remember", optimc::remember, "prompt"_a.noconvert())
        .def("accept", optimc::accept, "token"_a)
        .def_prop_ro("position", [](const optimc::RowState& state) { return state.params().position; })
        .def_prop_ro("seen_ids",
                     [](const optimc::RowState& state) { return optimc::copy_of(state.params().seen_tokens); },
                     nb::rv_policy::move)
        .def_prop_ro("seen_counts",
                     [](const optimc::RowState& state) { return optimc::copy_of(state.params().seen_counts); },
                     nb::rv_policy::move);
    m.def("sample_rows", optimc::sample_rows, "logits"_a.noconvert(), "states"_a, "masks"_a.noconvert() = nb::none(),
          "mask_of"_a.noconvert() = nb::none());
    m.def("sample_trees", optimc::sample_trees, "logits"_a.noconvert(), "states"_a, "first_rows"_a, "counts"_a,
          "parents"_a.noconvert(), "tokens"_a.noconvert(), "epsilon"_a = 0.0f,
          "delta"_a = 0.0f, "masks"_a.noconvert() = nb::none(), "mask_of"_a.noconvert() = nb::none());
    bind_sampling_kernels(m);
}

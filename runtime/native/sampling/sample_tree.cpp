#include "sampling/sample_tree.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <limits>

namespace optimc {

namespace {

// The first child of `query` that guessed `token`; 0, which is nobody's child, if none did.
std::int32_t child_of(const TreeRows& rows, std::int32_t query, std::int32_t token) {
    for (std::int32_t child = query + 1; child < rows.count; ++child) {
        if (rows.parents[child] == query && rows.tokens[child] == token) return child;
    }
    return 0;
}

// The likeliest of the query's guesses that is typical of its row, or -1.
std::int32_t typical_token(const TreeRows& rows, std::int32_t query, const RowParams& params,
                           TypicalAcceptance typical, RowScratch& scratch) {
    const auto is_child = [&](std::int32_t other) { return rows.parents[other] == query; };
    std::int32_t child = query + 1;
    while (child < rows.count && !is_child(child)) ++child;
    if (child == rows.count) return -1;

    const float* row = rows.logits + static_cast<std::size_t>(query) * static_cast<std::size_t>(rows.vocab);
    const RowSpread spread = row_spread(row, rows.vocab, params, rows.allowed_after(query), scratch);
    if (spread.status != RowStatus::ok) return -1;  // sampling says why
    const double least = std::min<double>(typical.epsilon, typical.delta * std::exp(-spread.entropy)) * spread.total;
    std::int32_t best = -1;
    for (; child < rows.count; ++child) {
        const std::int64_t token = rows.tokens[child];
        if (!is_child(child) || token < 0 || token >= rows.vocab) continue;
        const float weight = scratch.weights[static_cast<std::size_t>(token)];
        if (weight <= least) continue;
        if (best < 0 || weight > scratch.weights[static_cast<std::size_t>(best)]) best = static_cast<std::int32_t>(token);
    }
    return best;
}

}  // namespace

TreeResult sample_tree(const TreeRows& rows, RowState& state, TypicalAcceptance typical, RowScratch& scratch) {
    assert(rows.count >= 1);
    TreeResult result;
    const std::int32_t num_logprobs = state.params().num_logprobs;
    const auto width = static_cast<std::size_t>(std::max(0, num_logprobs));
    std::int32_t query = 0;
    do {
        const float* row = rows.logits + static_cast<std::size_t>(query) * static_cast<std::size_t>(rows.vocab);
        const RowParams& params = state.params();
        const std::size_t place = result.emitted.size();
        if (num_logprobs >= 0) {
            result.logprobs.resize(place + 1);
            result.top_tokens.resize((place + 1) * width);
            result.top_logprobs.resize((place + 1) * width);
        }
        std::int32_t token = -1;
        float unused = 0;
        const RowResult chosen{&token, num_logprobs >= 0 ? &result.logprobs[place] : &unused,
                               result.top_tokens.data() + place * width, result.top_logprobs.data() + place * width};
        if (typical.epsilon > 0 && params.temperature > 0) {
            token = typical_token(rows, query, params, typical, scratch);
        }
        if (token >= 0) {
            report_token(row, rows.vocab, num_logprobs, chosen);
        } else {
            result.status = sample_row(row, rows.vocab, params, rows.allowed_after(query), scratch, chosen);
            if (result.status != RowStatus::ok) break;
        }
        state.accept(token);
        result.emitted.push_back(token);
        query = state.is_stop(token) ? 0 : child_of(rows, query, token);
        if (query > 0) result.path.push_back(query);
    } while (query > 0);
    return result;
}

}  // namespace optimc

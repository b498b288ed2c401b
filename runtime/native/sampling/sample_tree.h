// Verifies one sequence's tree of guesses: from the root down, each query's row of logits gives a token, and the walk
// goes on at the child that guessed it.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling/row_state.h"
#include "sampling/sample_row.h"

namespace optimc {

struct TreeRows {
    const float* logits;  // [count, vocab], the root's row first
    std::int32_t vocab;
    std::int32_t count;
    const std::int32_t* parents;  // [count] queries before their children; the root's is not read
    const std::int64_t* tokens;   // [count] what each query guessed; the root's is not read
    const RowMask* allowed;       // [count], or nullptr: every token may follow everywhere

    RowMask allowed_after(std::int32_t query) const { return allowed == nullptr ? nullptr : allowed[query]; }
};

// Typical acceptance (2401.10774) of rows that are sampled, not greedy: a guess is taken, instead of sampling, if its
// probability exceeds min(epsilon, delta * exp(-entropy)) and top_k, top_p and min_p do not leave it out. Lossy.
// Epsilon 0: exact, what is emitted is what sampling token by token emits.
struct TypicalAcceptance {
    float epsilon;
    float delta;
};

struct TreeResult {
    std::vector<std::int32_t> emitted;
    std::vector<std::int32_t> path;  // queries entered below the root; emitted[n] is of path[n - 1]'s row
    RowStatus status = RowStatus::ok;  // of the row that stopped the walk
    // With num_logprobs n >= 0, per emitted token as in RowResult: one, and n.
    std::vector<float> logprobs;
    std::vector<std::int32_t> top_tokens;
    std::vector<float> top_logprobs;
};

// Every emitted token is accepted by `state` before the next is chosen; the walk ends at a stop token.
TreeResult sample_tree(const TreeRows& rows, RowState& state, TypicalAcceptance typical, RowScratch& scratch);

}  // namespace optimc

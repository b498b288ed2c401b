// One sequence's side of sampling, kept from step to step: its parameters, its output position, and the tokens that
// penalties look at.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sampling/sample_row.h"

namespace optimc {

class RowState {
public:
    // `fixed` holds what never changes: its spans are ignored, its position is 0.
    RowState(std::int32_t vocab, const RowParams& fixed, std::vector<std::int32_t> bias_tokens,
             std::vector<float> biases, std::vector<std::int32_t> stop_tokens, std::uint64_t min_tokens)
        : vocab_(vocab),
          params_(fixed),
          bias_tokens_(std::move(bias_tokens)),
          biases_(std::move(biases)),
          stop_tokens_(std::move(stop_tokens)),
          min_tokens_(min_tokens) {
        assert(bias_tokens_.size() == biases_.size());
        params_.bias_tokens = bias_tokens_;
        params_.biases = biases_;
        update();
    }

    // The spans point into this object.
    RowState(const RowState&) = delete;
    RowState& operator=(const RowState&) = delete;

    // From now on the row's tokens are remembered; those of the prompt count as seen, but not as output.
    void remember(const std::int32_t* prompt, std::size_t size) {
        remembers_ = true;
        for (std::size_t n = 0; n < size; ++n) slot_of(prompt[n]);
        update();
    }

    // `token` was emitted at the current position. O(1).
    void accept(std::int32_t token) {
        assert(0 <= token && token < vocab_);
        ++params_.position;
        if (remembers_) ++seen_counts_[slot_of(token)];
        update();
    }

    std::int32_t vocab() const { return vocab_; }

    // Whether `token` ends the output. Before min_tokens it cannot be chosen.
    bool is_stop(std::int32_t token) const {
        return std::find(stop_tokens_.begin(), stop_tokens_.end(), token) != stop_tokens_.end();
    }

    // What the next draw depends on; valid until `remember` or `accept`.
    const RowParams& params() const { return params_; }

private:
    std::size_t slot_of(std::int32_t token) {
        const auto [place, is_new] = slots_.try_emplace(token, seen_tokens_.size());
        if (is_new) {
            seen_tokens_.push_back(token);
            seen_counts_.push_back(0);
        }
        return place->second;
    }

    void update() {
        params_.seen_tokens = seen_tokens_;
        params_.seen_counts = seen_counts_;
        params_.banned_tokens = params_.position < min_tokens_ ? std::span<const std::int32_t>(stop_tokens_)
                                                               : std::span<const std::int32_t>();
    }

    std::int32_t vocab_;
    RowParams params_;
    std::vector<std::int32_t> bias_tokens_;
    std::vector<float> biases_;
    std::vector<std::int32_t> stop_tokens_;
    std::uint64_t min_tokens_;  // no stop token before this position
    bool remembers_ = false;
    std::vector<std::int32_t> seen_tokens_;  // distinct
    std::vector<std::int32_t> seen_counts_;
    std::unordered_map<std::int32_t, std::size_t> slots_;  // of a token in the two above
};

}  // namespace optimc

#include "sampling/sample_row.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <limits>

#include "sampling/cutoff.h"
#include "sampling/draw.h"
#include "sampling/philox.h"
#include "sampling/row_max.h"
#include "sampling/softmax.h"
#include "sampling/top_logits.h"

namespace optimc {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

bool is_edited(const RowParams& params) {
    return !params.seen_tokens.empty() || !params.bias_tokens.empty() || !params.banned_tokens.empty();
}

void edit(const RowParams& params, float* logits) {
    assert(params.seen_tokens.size() == params.seen_counts.size());
    for (std::size_t n = 0; n < params.seen_tokens.size(); ++n) {
        float& logit = logits[params.seen_tokens[n]];
        const std::int32_t count = params.seen_counts[n];
        logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
        if (count > 0) logit -= params.presence_penalty + params.frequency_penalty * static_cast<float>(count);
    }
    for (std::size_t n = 0; n < params.bias_tokens.size(); ++n) logits[params.bias_tokens[n]] += params.biases[n];
    for (std::int32_t token : params.banned_tokens) logits[token] = -kInfinity;
}

// Leaves the tokens whose bits are set.
void apply_mask(RowMask allowed, std::int32_t vocab, float* logits) {
    constexpr auto ruled_out = std::bit_cast<std::uint32_t>(-kInfinity);
    for (std::int32_t start = 0; start < vocab; start += 32) {
        const std::uint32_t word = allowed[start / 32];
        if (word == ~std::uint32_t{0}) continue;
        const std::int32_t count = std::min(32, vocab - start);
        for (std::int32_t bit = 0; bit < count; ++bit) {
            // Without a branch, which would be guessed wrong half the time.
            const std::uint32_t keep = 0 - (word >> bit & 1u);
            float& logit = logits[start + bit];
            logit = std::bit_cast<float>((std::bit_cast<std::uint32_t>(logit) & keep) | (ruled_out & ~keep));
        }
    }
}

// The limit of the softmax as some logits grow without bound: they share everything, the others get nothing.
void resolve_infinities(float* logits, std::int32_t vocab) {
    for (std::int32_t i = 0; i < vocab; ++i) logits[i] = logits[i] == kInfinity ? 0 : -kInfinity;
}

// Sets those of scratch.weights, which `logits` have given, to 0 that top_k, top_p or min_p leave out.
void drop_unlikely(const float* logits, std::int32_t vocab, float max, const RowParams& params, RowScratch& scratch) {
    float* weights = scratch.weights.data();
    const CutoffScratch cutoff_scratch{scratch.tokens.data(), scratch.blocks.data(), scratch.sums.data()};
    if (0 < params.top_k && params.top_k < vocab) {
        drop_beyond(logits, vocab, max, cutoff_by_count(logits, vocab, max, params.top_k, cutoff_scratch), weights);
    }
    Cutoff cutoff;
    if (params.top_p < 1) {
        cutoff = cutoff_by_mass(logits, weights, vocab, max, params.temperature, params.top_p, cutoff_scratch);
    }
    if (params.min_p > 0) {
        // Likelihood at least min_p of the likeliest's, said as a distance between logits.
        const float distance = -params.temperature * std::log(params.min_p);
        if (distance < cutoff.distance) cutoff = {distance, std::numeric_limits<std::int32_t>::max()};
    }
    if (cutoff.distance < kInfinity) drop_beyond(logits, vocab, max, cutoff, weights);
}

std::int32_t draw_token(const float* logits, std::int32_t vocab, float max, const RowParams& params,
                        RowScratch& scratch) {
    softmax_weights(logits, vocab, max, params.temperature, scratch.weights.data());
    drop_unlikely(logits, vocab, max, params, scratch);
    return draw(scratch.weights.data(), vocab, uniform_at(params.seed, params.position), scratch.sums.data());
}

struct EditedRow {
    RowStatus status;
    const float* logits;  // the row itself, or its edited copy in the scratch
    RowMax best;          // of `logits`
    float raw_max;        // of the row itself
};

EditedRow edit_row(const float* logits, std::int32_t vocab, const RowParams& params, RowMask allowed,
                   RowScratch& scratch) {
    const RowMax raw = row_max(logits, vocab);
    EditedRow edited{RowStatus::ok, logits, raw, raw.value};
    if (raw.has_nan) {
        edited.status = RowStatus::nan;
        return edited;
    }
    if (allowed != nullptr || is_edited(params)) {
        std::copy_n(logits, vocab, scratch.logits.data());
        edit(params, scratch.logits.data());
        if (allowed != nullptr) apply_mask(allowed, vocab, scratch.logits.data());
        edited.logits = scratch.logits.data();
        edited.best = row_max(edited.logits, vocab);
    }
    if (edited.best.value == -kInfinity) edited.status = RowStatus::empty;
    return edited;
}

struct FiniteRow {
    const float* logits;
    float max;  // finite
};

// `logits` is the row that `edited` was made of.
FiniteRow finite_row(const EditedRow& edited, const float* logits, std::int32_t vocab, RowScratch& scratch) {
    if (edited.best.value < kInfinity) return {edited.logits, edited.best.value};
    if (edited.logits == logits) std::copy_n(logits, vocab, scratch.logits.data());
    resolve_infinities(scratch.logits.data(), vocab);
    return {scratch.logits.data(), 0};
}

void report_logprobs(const float* logits, std::int32_t vocab, float max, std::int32_t count, RowResult result) {
    double normalizer = 0;
    if (max == kInfinity) {
        normalizer = std::log(static_cast<double>(std::count(logits, logits + vocab, kInfinity)));
    } else {
        normalizer = log_sum_exp(logits, vocab, max);
    }
    const auto logprob = [=](std::int32_t token) {
        const double distance = logits[token] == max ? 0 : static_cast<double>(max) - logits[token];
        return static_cast<float>(-distance - normalizer);
    };
    *result.logprob = logprob(*result.token);
    if (count == 0) return;
    top_logits(logits, vocab, count, result.top_tokens);
    for (std::int32_t n = 0; n < count; ++n) result.top_logprobs[n] = logprob(result.top_tokens[n]);
}

}  // namespace

void RowScratch::reserve(std::int32_t vocab) {
    const auto size = static_cast<std::size_t>(vocab);
    if (logits.size() >= size) return;
    logits.resize(size);
    weights.resize(size);
    tokens.resize(size);
    blocks.resize(2 * static_cast<std::size_t>(cutoff_blocks(vocab)));
    sums.resize(static_cast<std::size_t>(std::max(kCutoffBins, draw_blocks(vocab))));
}

RowStatus sample_row(const float* logits, std::int32_t vocab, const RowParams& params, RowMask allowed,
                     RowScratch& scratch, RowResult result) {
    const EditedRow edited = edit_row(logits, vocab, params, allowed, scratch);
    if (edited.status != RowStatus::ok) return edited.status;
    *result.token = edited.best.token;
    if (params.temperature > 0) {
        const FiniteRow finite = finite_row(edited, logits, vocab, scratch);
        *result.token = draw_token(finite.logits, vocab, finite.max, params, scratch);
    }
    if (params.num_logprobs >= 0) report_logprobs(logits, vocab, edited.raw_max, params.num_logprobs, result);
    return RowStatus::ok;
}

void report_token(const float* logits, std::int32_t vocab, std::int32_t num_logprobs, RowResult result) {
    if (num_logprobs >= 0) report_logprobs(logits, vocab, row_max(logits, vocab).value, num_logprobs, result);
}

RowSpread row_spread(const float* logits, std::int32_t vocab, const RowParams& params, RowMask allowed,
                     RowScratch& scratch) {
    assert(params.temperature > 0);
    const EditedRow edited = edit_row(logits, vocab, params, allowed, scratch);
    if (edited.status != RowStatus::ok) return {edited.status, 0, 0};
    const FiniteRow finite = finite_row(edited, logits, vocab, scratch);
    float* weights = scratch.weights.data();
    softmax_weights(finite.logits, vocab, finite.max, params.temperature, weights);
    double total = 0;
    double surprise = 0;  // of each token beside the likeliest's, weighted
    for (std::int32_t i = 0; i < vocab; ++i) {
        if (weights[i] == 0) continue;
        total += weights[i];
        surprise += static_cast<double>(weights[i]) * (finite.max - finite.logits[i]);
    }
    drop_unlikely(finite.logits, vocab, finite.max, params, scratch);
    return {RowStatus::ok, total, std::log(total) + surprise / (params.temperature * total)};
}

}  // namespace optimc

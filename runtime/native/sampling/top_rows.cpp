#include "sampling/top_rows.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <numeric>

#include "sampling/instruction_sets.h"
#include "sampling/row_max.h"
#include "sampling/softmax.h"

namespace optimc {

namespace {

constexpr std::int32_t kBlock = 128;
constexpr std::int32_t kLanes = 16;

// The largest of kBlock numbers, none of them a NaN.
OPTIMC_EACH_INSTRUCTION_SET
float block_max(const float* block) {
    float lanes[kLanes];
    for (std::int32_t j = 0; j < kLanes; ++j) lanes[j] = block[j];
    for (std::int32_t i = kLanes; i < kBlock; i += kLanes) {
        for (std::int32_t j = 0; j < kLanes; ++j) lanes[j] = lanes[j] > block[i + j] ? lanes[j] : block[i + j];
    }
    float best = lanes[0];
    for (std::int32_t j = 1; j < kLanes; ++j) best = std::max(best, lanes[j]);
    return best;
}

// As `top_logits`, but blocks that hold none of them are passed over whole.
void top_of_row(const float* logits, std::int32_t vocab, std::int32_t count, std::int32_t* ids) {
    std::int32_t size = 0;
    for (std::int32_t start = 0; start < vocab; start += kBlock) {
        const std::int32_t end = std::min(vocab, start + kBlock);
        const bool is_full = size == count;
        if (is_full && end - start == kBlock && !(block_max(logits + start) > logits[ids[count - 1]])) continue;
        for (std::int32_t i = start; i < end; ++i) {
            // A logit equal to the last one stays behind it, being of a higher id.
            if (size == count && !(logits[i] > logits[ids[count - 1]])) continue;
            std::int32_t place = size < count ? size++ : count - 1;
            for (; place > 0 && logits[i] > logits[ids[place - 1]]; --place) ids[place] = ids[place - 1];
            ids[place] = i;
        }
    }
}

}  // namespace

void top_rows(const float* logits, std::int64_t rows, std::int32_t vocab, std::int32_t count, std::int32_t* ids,
              float* logprobs) {
    assert(1 <= count && count <= vocab);
    for (std::int64_t row = 0; row < rows; ++row, logits += vocab, ids += count, logprobs += count) {
        const RowMax max = row_max(logits, vocab);
        if (max.has_nan || !std::isfinite(max.value)) {
            std::iota(ids, ids + count, 0);
            std::fill(logprobs, logprobs + count, -std::numeric_limits<float>::infinity());
            continue;
        }
        top_of_row(logits, vocab, count, ids);
        const double normaliser = log_sum_exp(logits, vocab, max.value);
        for (std::int32_t i = 0; i < count; ++i) {
            logprobs[i] = static_cast<float>(logits[ids[i]] - max.value - normaliser);
        }
    }
}

}  // namespace optimc

// The units attention counts in, and the form of results that wait to be merged.
#pragma once

#include <cstdint>

#include "kernels/kv_layout.h"

namespace optimc {

// Keys that share one step of the online softmax, and keys of a split, which is one online softmax. Both count from the
// sequence's first token.
constexpr int kChunkKeys = 64;
constexpr int kSplitKeys = 256;

// Query rows (query and head) an item works on at a time: many enough that a chunk is read and widened once for many
// tiles, few enough that all of it stays in a private cache.
constexpr int kBlockRows = 96;

// A partial result is one row over one split: `attention_width` weighted values, the largest score, the sum of the
// weights. Those of an item follow each other, row by row, for each row split by split.
static constexpr int attention_width(int head_dim) { return static_cast<int>(kv_round_up(head_dim, 32)); }
static constexpr std::int64_t attention_partial_floats(int head_dim) { return attention_width(head_dim) + 16; }

}  // namespace optimc

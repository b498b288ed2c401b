// Paged attention of one layer: rotates queries and keys, writes keys and values to the pool and attends to the pool.
//
// Every token's result is a function of its query and the keys and values it sees, in the order of its sequence, and of
// nothing else: keys are taken in chunks of 64 and splits of 256 counted from the sequence's first token, each split is an
// online softmax of its own and splits are merged in order, however work is shared out. So chunked prefill, batch mates,
// prefix hits and the number of threads change no bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace optimc {

struct AttentionSpec {
    int num_heads;
    int num_kv_heads;
    int head_dim;
    float scale;
    float softcap;        // 0: none
    std::int64_t window;  // keys a query sees, itself included; 0: all
    int rotary_dim;       // leading dimensions of a head that are rotated; 0: none
    bool interleaved;     // pairs are (0, 1), (2, 3), ... instead of (i, i + rotary_dim / 2)

    bool operator==(const AttentionSpec&) const = default;
};

struct AttentionCall {
    AttentionSpec spec;
    ConstRows q;  // [T, H * D] before rotation
    ConstRows k;  // [T, Hkv * D] before rotation
    ConstRows v;  // [T, Hkv * D]
    // [T, rotary_dim]: rotary_dim / 2 cosines, then as many sines, of each token's position. Unused without rotation.
    ConstRows rotation;
    Rows out;  // [T, H * D]
    KvLayer cache;
    const StepLayout* step;
};

// A piece of a step's attention that one thread does alone: queries [query_begin, query_end) of one sequence (counted from
// the sequence's first token of this step), the query heads of one key/value head, keys of splits [split_begin, split_end).
struct AttentionItem {
    std::int32_t sequence;
    std::int32_t kv_head;
    std::int32_t query_begin;
    std::int32_t query_end;
    std::int32_t split_begin;
    std::int32_t split_end;
    std::int64_t partial;  // index of the first partial result, or -1: the item covers all splits and writes `out`
};

}  // namespace optimc

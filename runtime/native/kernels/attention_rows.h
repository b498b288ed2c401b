// The query rows an item works on at a time: their queries, what they see, and their running softmax.
#pragma once

#include "kernels/attention_chunk.h"
#include "kernels/attention_rotate.h"
#include "kernels/attention_state.h"

namespace optimc::OPTIMC_ISA {

// Everything lies in scratch. `width` is attention_width(D), so lanes beside a head's dimensions are there and hold 0.
struct QueryRows {
    int count;
    int width;
    float* queries;      // [rows, width], rotated and scaled; times the channels' scales, if keys have such. If chunks
                         // are multiplied in pairs: cells, the first width / 2 of a row
    float* query_sums;   // [rows]: sum of the row's query, for 4-bit keys; times the channels' minimums
    float* scores;       // [rows, 64]: of the current chunk; then weights, or cells of weights, the first 32 of a row
    float* values;       // [rows, width]: weighted values of the current split
    float* weight_sums;  // [rows, 16]: sums of weights, lane by lane
    float* offsets;      // [rows, 16]: sums of weight * minimum, lane by lane, for 4-bit values
    float* largest;      // [rows]
    float* next_largest; // [rows]: with the current chunk
    float* factors;      // [rows]: what the current chunk does to earlier sums
    float* all_values;   // [rows, width]: over the splits so far
    float* all_largest;  // [rows]
    float* all_sums;     // [rows]
    int* begin;          // [rows]: keys the row sees, see VisibleKeys
    int* end;            // [rows]
    ChunkCopy copy;
};

// Lays the parts out in `scratch`, each at a multiple of 64 bytes; returns the bytes they need. `scratch` may be
// nullptr.
inline std::size_t place_rows(int head_dim, std::byte* scratch, QueryRows& rows) {
    const std::size_t width = static_cast<std::size_t>(attention_width(head_dim));
    std::size_t used = 0;
    const auto take = [&](std::size_t floats) {
        std::byte* at = scratch == nullptr ? nullptr : scratch + used;
        used += (4 * floats + 63) / 64 * 64;
        return (float*)at;
    };
    rows.width = static_cast<int>(width);
    rows.queries = take(kBlockRows * width);
    rows.query_sums = take(kBlockRows);
    rows.scores = take(kBlockRows * kChunkKeys);
    rows.values = take(kBlockRows * width);
    rows.weight_sums = take(kBlockRows * kLanes);
    rows.offsets = take(kBlockRows * kLanes);
    rows.largest = take(kBlockRows);
    rows.next_largest = take(kBlockRows);
    rows.factors = take(kBlockRows);
    rows.all_values = take(kBlockRows * width);
    rows.all_largest = take(kBlockRows);
    rows.all_sums = take(kBlockRows);
    rows.begin = (int*)take(kBlockRows);
    rows.end = (int*)take(kBlockRows);
    rows.copy.keys = take(static_cast<std::size_t>(head_dim) * kChunkKeys);
    rows.copy.values = take(kChunkKeys * width);
    rows.copy.scales = take(4 * kChunkKeys);
    return used;
}

// With a scale s and a minimum m per channel, q . k = q . (code * s + m) = (q * s) . code + q . m: the query takes them in
// once, so that scores need no more than the codes.
inline void take_in_channels(const KvLayer& cache, int kv_head, int r, const QueryRows& rows) {
    float* query = rows.queries + r * rows.width;
    const std::int64_t channels = static_cast<std::int64_t>(kv_head) * cache.head_dim;
    Vec total = zero();
    for (int d = 0; d < cache.head_dim; d += kLanes) {
        const int count = cache.head_dim - d < kLanes ? cache.head_dim - d : kLanes;
        const Vec q = load(query + d);
        if (cache.key_minimums != nullptr) {
            total = fma(q, load_first(cache.key_minimums + channels + d, count), total);
        }
        store(query + d, q * load_first(cache.key_scales + channels + d, count));
    }
    rows.query_sums[r] = sum(total);
}

// Rotate and scale the query of row `r`, which is head `head` of token `token`.
inline void load_query(const AttentionCall& call, std::int64_t token, int head, int r, const QueryRows& rows) {
    const AttentionSpec& spec = call.spec;
    float* query = rows.queries + r * rows.width;
    const float* q = call.q.data + token * call.q.stride + head * spec.head_dim;
    if (spec.rotary_dim > 0) {
        rotate(spec, q, call.rotation.data + token * call.rotation.stride, query);
    } else {
        for (int d = 0; d < spec.head_dim; ++d) query[d] = q[d];
    }
    for (int d = spec.head_dim; d < rows.width; ++d) query[d] = 0.0f;
    Vec total = zero();
    for (int d = 0; d < rows.width; d += kLanes) {
        const Vec scaled = load(query + d) * broadcast(spec.scale);
        store(query + d, scaled);
        total = total + scaled;
    }
    rows.query_sums[r] = sum(total);
    if (call.cache.has_channel_keys()) {
        take_in_channels(call.cache, head / (spec.num_heads / spec.num_kv_heads), r, rows);
    }
    if (multiplies_pairs(call.cache.type)) narrow_row(query, rows.width);
}

inline void clear_split(const QueryRows& rows) {
    for (int r = 0; r < rows.count; ++r) {
        rows.largest[r] = -__builtin_inff();
        store(rows.weight_sums + r * kLanes, zero());
        store(rows.offsets + r * kLanes, zero());
        for (int d = 0; d < rows.width; d += kLanes) store(rows.values + r * rows.width + d, zero());
    }
}

// The row's state over the split just done, its values complete.
inline RowState end_split(const QueryRows& rows, int r, bool has_minimums, float* weight_sum) {
    float* values = rows.values + r * rows.width;
    if (has_minimums) {
        const Vec offset = broadcast(sum(load(rows.offsets + r * kLanes)));
        for (int d = 0; d < rows.width; d += kLanes) store(values + d, load(values + d) + offset);
    }
    *weight_sum = sum(load(rows.weight_sums + r * kLanes));
    return {values, rows.largest + r, weight_sum};
}

}  // namespace optimc::OPTIMC_ISA

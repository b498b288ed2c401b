// One chunk of keys and some query rows: scores, one step of the online softmax, weighted values.
#pragma once

#include "kernels/attention_rows.h"

namespace optimc::OPTIMC_ISA {

// Keys of the chunk that row `r` sees, counted from the chunk's first.
struct ChunkKeys {
    int begin;
    int end;

    bool none() const { return begin >= end; }
};

inline ChunkKeys keys_in_chunk(const QueryRows& rows, int r, int chunk_first) {
    const int begin = rows.begin[r] - chunk_first, end = rows.end[r] - chunk_first;
    return {begin < 0 ? 0 : begin, end > kChunkKeys ? kChunkKeys : end};
}

// The first and last key any of the rows [first, last) sees.
inline ChunkKeys keys_of_any(const QueryRows& rows, int first, int last, int chunk_first) {
    ChunkKeys any{kChunkKeys, 0};
    for (int r = first; r < last; ++r) {
        const ChunkKeys keys = keys_in_chunk(rows, r, chunk_first);
        if (keys.none()) continue;
        if (keys.begin < any.begin) any.begin = keys.begin;
        if (keys.end > any.end) any.end = keys.end;
    }
    return any;
}

// Lanes of group `g` outside `keys` become `other`. What they held does not matter, NaN included.
inline Vec only_visible(const ChunkKeys& keys, int g, Vec x, Vec other) {
    const int begin = keys.begin - g * kKeyGroup, end = keys.end - g * kKeyGroup;
    if (end < kKeyGroup) x = first(end, x, other);
    if (begin > 0) x = first(begin, other, x);
    return x;
}

// Products become scores in place; the largest goes to next_largest. With channel keys the query holds the scales.
template <KvType type>
inline void finish_scores(const AttentionSpec& spec, bool channel_keys, const Chunk& chunk, const QueryRows& rows, int r,
                          const ChunkKeys& keys) {
    float* scores = rows.scores + r * kChunkKeys;
    const Vec cap = broadcast(spec.softcap), inverse = broadcast(spec.softcap > 0.0f ? 1.0f / spec.softcap : 0.0f);
    const Vec query_sum = broadcast(rows.query_sums[r]);
    Vec best = broadcast(-__builtin_inff());
    for (int g = keys.begin / kKeyGroup; g * kKeyGroup < keys.end; ++g) {
        const int at = g * kKeyGroup;
        Vec x = load(scores + at);
        if constexpr (type == KvType::int8) {
            if (!channel_keys) x = x * load(chunk.scales[g].key_scales);
        }
        if constexpr (type == KvType::int4) {
            x = channel_keys ? x + query_sum
                             : fma(x, load(chunk.scales[g].key_scales), load(chunk.scales[g].key_minimums) * query_sum);
        }
        if (spec.softcap > 0.0f) x = cap * tanh(x * inverse);
        x = only_visible(keys, g, x, broadcast(-__builtin_inff()));
        store(scores + at, x);
        best = max(best, x);
    }
    const float chunk_largest = largest(best);
    rows.next_largest[r] = chunk_largest > rows.largest[r] ? chunk_largest : rows.largest[r];
}

// Scores become weights in place, already times the scale of the value they go with. Of a pair of keys the row may see
// one: the other's weight is 0.
template <KvType type>
inline void weigh_scores(const Chunk& chunk, const QueryRows& rows, int r, const ChunkKeys& keys) {
    float* scores = rows.scores + r * kChunkKeys;
    const Vec top = broadcast(rows.next_largest[r]), factor = broadcast(rows.factors[r]);
    Vec total = zero(), offset = zero();
    for (int g = keys.begin / kKeyGroup; g * kKeyGroup < keys.end; ++g) {
        const int at = g * kKeyGroup;
        Vec weight = exp(load(scores + at) - top);
        total = total + weight;
        if constexpr (type == KvType::int4) {
            offset = offset + only_visible(keys, g, weight * load(chunk.scales[g].value_minimums), zero());
        }
        if constexpr (kv_has_scales(type)) {
            weight = weight * load(chunk.scales[g].value_scales);
            if constexpr (multiplies_pairs(type)) weight = only_visible(keys, g, weight, zero());
        }
        store(scores + at, weight);
    }
    if constexpr (multiplies_pairs(type)) narrow_row(scores, kChunkKeys);
    float* sums = rows.weight_sums + r * kLanes;
    store(sums, fma(load(sums), factor, total));
    if constexpr (type == KvType::int4) {
        float* offsets = rows.offsets + r * kLanes;
        store(offsets, fma(load(offsets), factor, offset));
    }
    rows.largest[r] = rows.next_largest[r];
}

// values = values * factor + weights times values of the chunk, for a tile of rows. A row meets exactly the keys it
// sees, in order: those that all rows of the tile see together, those before and after row by row.
template <class Values>
inline void weigh_values(const Chunk& chunk, const QueryRows& rows, int first, int count, int width) {
    constexpr int terms = Values::kTerms;
    const Values matrix{chunk.values};
    ChunkKeys common{0, kChunkKeys};
    for (int r = first; r < first + count; ++r) {
        const ChunkKeys keys = keys_in_chunk(rows, r, chunk.first);
        if (keys.begin > common.begin) common.begin = keys.begin;
        if (keys.end < common.end) common.end = keys.end;
    }
    common.begin = (common.begin + terms - 1) / terms * terms;
    common.end = common.end / terms * terms;
    const auto steps = [&](int r, const auto& source, int begin, int end) {
        if (begin >= end) return;
        weigh_tile<1>(rows.scores + r * kChunkKeys, source, begin, end, rows.factors + r, rows.values + r * rows.width,
                      rows.width, width);
        rows.factors[r] = 1.0f;
    };
    const auto alone = [&](int r, int begin, int end) {
        if (begin >= end) return;
        if constexpr (terms == 1) {
            steps(r, matrix, begin, end);
        } else {
            if (begin % 2 != 0) steps(r, HalfOf<Values, true>{chunk.values}, begin / 2, begin / 2 + 1);
            steps(r, matrix, (begin + 1) / 2, end / 2);
            if (end % 2 != 0) steps(r, HalfOf<Values, false>{chunk.values}, end / 2, end / 2 + 1);
        }
    };
    if (common.none()) {
        for (int r = first; r < first + count; ++r) {
            const ChunkKeys keys = keys_in_chunk(rows, r, chunk.first);
            alone(r, keys.begin, keys.end);
        }
        return;
    }
    for (int r = first; r < first + count; ++r) alone(r, keys_in_chunk(rows, r, chunk.first).begin, common.begin);
    with_rows(count, [&]<int tile>() {
        weigh_tile<tile>(rows.scores + first * kChunkKeys, matrix, common.begin / terms, common.end / terms,
                         rows.factors + first, rows.values + first * rows.width, rows.width, width);
    });
    for (int r = first; r < first + count; ++r) {
        rows.factors[r] = 1.0f;
        alone(r, common.end, keys_in_chunk(rows, r, chunk.first).end);
    }
}

// Rows [first, last) are taken in tiles of nearly equal height.
struct Tiles {
    int first;
    int last;
    int count;

    Tiles(int from, int to) : first(from), last(to), count((to - from + kTileRows - 1) / kTileRows) {}
    int begin(int tile) const { return first + (last - first) * tile / count; }
};

// `type` is the cache's.
template <KvType type, bool copied>
inline void attend_chunk(const AttentionCall& call, const Chunk& chunk, const QueryRows& rows, int first, int last) {
    using Form = ChunkForm<type, copied>;
    const Tiles tiles(first, last);
    const typename Form::Keys keys{chunk.keys, chunk.key_row_bytes};
    const int steps = (call.spec.head_dim + Form::Keys::kTerms - 1) / Form::Keys::kTerms;
    for (int t = 0; t < tiles.count; ++t) {
        const int begin = tiles.begin(t), count = tiles.begin(t + 1) - begin;
        const ChunkKeys any = keys_of_any(rows, begin, begin + count, chunk.first);
        if (any.none()) continue;
        with_rows(count, [&]<int tile>() {
            score_tile<tile>(rows.queries + begin * rows.width, rows.width, steps, keys, any.begin / kKeyGroup,
                             (any.end + kKeyGroup - 1) / kKeyGroup, rows.scores + begin * kChunkKeys);
        });
    }
    for (int r = first; r < last; ++r) {
        const ChunkKeys seen = keys_in_chunk(rows, r, chunk.first);
        rows.next_largest[r] = rows.largest[r];
        if (!seen.none()) {
            finish_scores<type>(call.spec, call.cache.has_channel_keys(), chunk, rows, r, seen);
        }
    }
    for (int r = first; r < last; r += kLanes) {
        const int n = last - r < kLanes ? last - r : kLanes;
        store_first(rows.factors + r, exp(load_first(rows.largest + r, n) - load_first(rows.next_largest + r, n)), n);
    }
    for (int r = first; r < last; ++r) {
        const ChunkKeys seen = keys_in_chunk(rows, r, chunk.first);
        if (!seen.none()) weigh_scores<type>(chunk, rows, r, seen);
    }
    const int width = kv_value_width(type, call.spec.head_dim);
    for (int t = 0; t < tiles.count; ++t) {
        weigh_values<typename Form::Values>(chunk, rows, tiles.begin(t), tiles.begin(t + 1) - tiles.begin(t), width);
    }
}

}  // namespace optimc::OPTIMC_ISA

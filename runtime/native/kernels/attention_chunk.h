// The keys and values of one chunk, made ready for tiles.
#pragma once

#include "kernels/attention_keys.h"
#include "kernels/attention_pairs.h"

namespace optimc::OPTIMC_ISA {

constexpr int kChunkGroups = kChunkKeys / kKeyGroup;

// Scales and minimums of the 16 keys of a group and of their values, those that the cache's blocks have.
struct GroupScales {
    const float* key_scales;
    const float* value_scales;
    const float* key_minimums;
    const float* value_minimums;
};

// Only keys [begin, end) of the chunk are there; lanes beside them hold anything.
struct Chunk {
    int first;  // index of the chunk's first key
    int begin;
    int end;
    bool copied;  // `keys` and `values` point to a ChunkCopy, else into the cache; see ChunkForm
    const std::uint8_t* keys[kChunkGroups];
    std::int64_t key_row_bytes;
    const std::uint8_t* values[kChunkKeys];
    GroupScales scales[kChunkGroups];
};

// Memory for a chunk that is not read where it lies.
struct ChunkCopy {
    float* keys;    // [D, 64], or cells [ceil(D / 2), 64]
    float* values;  // [64, Dp], or cells [32, Dp]
    float* scales;  // [4, 64]: scales of keys, of values, minimums of keys, of values
};

// One key/value head of a layer.
struct CacheHead {
    const KvLayer& layer;
    KvParts parts;
    int head;

    const std::uint8_t* of_block(std::int64_t block) const { return kv_head(layer, parts, block, head); }
};

// Start to fetch what will be read next. Hardware follows long streams by itself and only needs their beginnings; it
// is of no use for a quantized head of a few lines. GCC drops calls of a function that only fetches, unless it is
// always inlined.
[[gnu::always_inline]] inline void fetch_group(const CacheHead& cache, const std::uint8_t* head, int offset,
                                               const std::uint8_t* keys, const std::uint8_t* values) {
    constexpr int line = 64;
    if (!kv_has_scales(cache.layer.type) || cache.parts.head_bytes > 128 * line) {
        for (int i = 0; i < 2; ++i) {
            __builtin_prefetch(keys + i * line, 0, 2);
            __builtin_prefetch(values + i * line, 0, 2);
        }
    } else if (offset == 0) {
        for (int at = 0; at < cache.parts.head_bytes; at += line) __builtin_prefetch(head + at, 0, 2);
    }
}

// Sixteen keys that lie beside each other.
inline void place_group(const CacheHead& cache, const std::uint8_t* head, int offset, int group, Chunk& chunk) {
    const KvType type = cache.layer.type;
    chunk.keys[group] = head + offset * (type == KvType::int4 ? 1 : kv_type_bits(type) / 8);
    const std::int64_t row_bytes = kv_value_row_bytes(type, cache.layer.head_dim);
    const std::uint8_t* values = head + cache.parts.values + offset * row_bytes;
    for (int i = 0; i < kKeyGroup; ++i) chunk.values[group * kKeyGroup + i] = values + i * row_bytes;
    const auto scales = [&](std::int64_t part) { return (const float*)(head + part) + offset; };
    chunk.scales[group] = {scales(cache.parts.key_scales), scales(cache.parts.value_scales),
                           scales(cache.parts.key_minimums), scales(cache.parts.value_minimums)};
    fetch_group(cache, head, offset, chunk.keys[group], values);
}

// One key, wherever it lies.
inline float key_element(const CacheHead& cache, const std::uint8_t* head, int offset, int d) {
    const std::int64_t row_bytes = kv_key_row_bytes(cache.layer.type, cache.layer.block_size);
    switch (cache.layer.type) {
        case KvType::float32: return ((const float*)(head + d * row_bytes))[offset];
        case KvType::int8: return static_cast<float>(((const std::int8_t*)(head + d * row_bytes))[offset]);
        case KvType::int4: return static_cast<float>(head[(d >> 1) * row_bytes + offset] >> (d & 1 ? 4 : 0) & 15);
        case KvType::bfloat16: break;
    }
    const std::uint32_t bits = static_cast<std::uint32_t>(((const std::uint16_t*)(head + d * row_bytes))[offset]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline void place_key(const CacheHead& cache, const std::uint8_t* head, int offset, int at, Chunk& chunk,
                      const ChunkCopy& copy) {
    const KvType type = cache.layer.type;
    const int head_dim = cache.layer.head_dim;
    if (multiplies_pairs(type)) {
        for (int d = 0; d < head_dim; d += 2) {
            const float second = d + 1 < head_dim ? key_element(cache, head, offset, d + 1) : 0.0f;
            copy.keys[d / 2 * kChunkKeys + at] = cell_of(key_element(cache, head, offset, d), second);
        }
    } else {
        for (int d = 0; d < head_dim; ++d) copy.keys[d * kChunkKeys + at] = key_element(cache, head, offset, d);
    }
    chunk.values[at] = head + cache.parts.values + offset * kv_value_row_bytes(type, cache.layer.head_dim);
    const auto copy_scale = [&](int row, std::int64_t part) {
        copy.scales[row * kChunkKeys + at] = ((const float*)(head + part))[offset];
    };
    const bool own_keys = !cache.layer.has_channel_keys();
    if (kv_has_scales(type)) {
        if (own_keys) copy_scale(0, cache.parts.key_scales);
        copy_scale(1, cache.parts.value_scales);
    }
    if (kv_has_minimums(type)) {
        if (own_keys) copy_scale(2, cache.parts.key_minimums);
        copy_scale(3, cache.parts.value_minimums);
    }
}

template <KvType type>
inline void copy_keys(const Chunk& chunk, int group, int head_dim, float* keys) {
    float* columns = keys + group * kKeyGroup;
    const KeyMatrix<type> matrix{chunk.keys, chunk.key_row_bytes};
    if constexpr (multiplies_pairs(type)) {
        const KeyPairs<type> pairs{chunk.keys, chunk.key_row_bytes};
        for (int i = 0; i < head_dim / 2; ++i) store_cells(columns + i * kChunkKeys, pairs.load(i, false, group));
        if (head_dim % 2 != 0) {
            store_cells(columns + head_dim / 2 * kChunkKeys, first_halves(matrix.load(head_dim - 1, false, group)));
        }
        return;
    }
    for (int d = 0; d < head_dim; ++d) store(columns + d * kChunkKeys, matrix.load(d, (d & 1) != 0, group));
}

template <KvType type>
inline void copy_values(Chunk& chunk, int width, float* values) {
    const int vectors = width / kLanes;
    if constexpr (multiplies_pairs(type)) {
        const ValuePairs<type> pairs{chunk.values};
        for (int j = chunk.begin / 2; 2 * j < chunk.end; ++j) {
            float* row = values + j * width;
            const bool first = 2 * j >= chunk.begin, second = 2 * j + 1 < chunk.end;
            for (int v = 0; v < vectors; ++v) {
                store_cells(row + v * kLanes, first && second ? pairs.load(j, false, v)
                                              : first         ? pairs.template load_half<false>(j, v)
                                                              : pairs.template load_half<true>(j, v));
            }
            chunk.values[2 * j] = (const std::uint8_t*)row;
        }
        return;
    }
    const ValueMatrix<type> matrix{chunk.values};
    for (int key = chunk.begin; key < chunk.end; ++key) {
        float* row = values + key * width;
        for (int v = 0; v < vectors; ++v) store(row + v * kLanes, matrix.load(key, false, v));
        chunk.values[key] = (const std::uint8_t*)row;
    }
}

// Whether chunks of a list without gaps are used where they lie. `copy_all`: see read_chunk. Cells of an odd last
// dimension need a 0 beside it, which the cache does not hold.
inline bool reads_in_place(const KvLayer& layer, bool copy_all) {
    if (layer.block_size % kKeyGroup != 0) return false;
    if (multiplies_pairs(layer.type) && layer.head_dim % 2 != 0) return false;
    return !(copy_all && layer.type != KvType::float32);
}

// Fill `chunk` with keys [chunk_first + begin, chunk_first + end) of a query's list. `causal`: see VisibleKeys.
// `copy_all`: the chunk is used often enough for widening its elements once to pay.
inline void read_chunk(const CacheHead& cache, const StepSequence& sequence, int query, bool causal, int chunk_first,
                       int begin, int end, bool copy_all, const ChunkCopy& copy, Chunk& chunk) {
    const KvLayer& layer = cache.layer;
    chunk.first = chunk_first;
    chunk.begin = begin;
    chunk.end = end;
    chunk.key_row_bytes = kv_key_row_bytes(layer.type, layer.block_size);
    bool gathered[kChunkGroups] = {};
    const int first_group = begin / kKeyGroup, last_group = (end - 1) / kKeyGroup;
    bool copied = !reads_in_place(layer, copy_all);
    for (int g = first_group; g <= last_group; ++g) {
        const bool in_context = chunk_first + (g + 1) * kKeyGroup <= sequence.context;
        gathered[g] = layer.block_size % kKeyGroup != 0 || !(causal || in_context);
        copied |= gathered[g];
    }
    for (int g = first_group; g <= last_group; ++g) {
        const int from = g == first_group && gathered[g] ? begin : g * kKeyGroup;
        const int to = (g + 1) * kKeyGroup < end ? (g + 1) * kKeyGroup : end;
        KeyWalk walk(sequence, query, causal, layer.block_size, chunk_first + from);
        if (!gathered[g]) {
            place_group(cache, cache.of_block(walk.block), walk.offset, g, chunk);
            if (!copied) continue;
            switch (layer.type) {
                case KvType::float32: copy_keys<KvType::float32>(chunk, g, layer.head_dim, copy.keys); break;
                case KvType::bfloat16: copy_keys<KvType::bfloat16>(chunk, g, layer.head_dim, copy.keys); break;
                case KvType::int8: copy_keys<KvType::int8>(chunk, g, layer.head_dim, copy.keys); break;
                case KvType::int4: copy_keys<KvType::int4>(chunk, g, layer.head_dim, copy.keys); break;
            }
            continue;
        }
        const float* scales = copy.scales + g * kKeyGroup;
        chunk.scales[g] = {scales, scales + kChunkKeys, scales + 2 * kChunkKeys, scales + 3 * kChunkKeys};
        for (int at = from; at < to; ++at) {
            place_key(cache, cache.of_block(walk.block), walk.offset, at, chunk, copy);
            if (at + 1 < to) walk.next();
        }
    }
    chunk.copied = copied;
    if (!copied) return;
    const int width = kv_value_width(layer.type, layer.head_dim);
    switch (layer.type) {
        case KvType::float32: break;
        case KvType::bfloat16: copy_values<KvType::bfloat16>(chunk, width, copy.values); break;
        case KvType::int8: copy_values<KvType::int8>(chunk, width, copy.values); break;
        case KvType::int4: copy_values<KvType::int4>(chunk, width, copy.values); break;
    }
    chunk.key_row_bytes = kChunkKeys * sizeof(float);
    for (int g = first_group; g <= last_group; ++g) chunk.keys[g] = (const std::uint8_t*)(copy.keys + g * kKeyGroup);
}

}  // namespace optimc::OPTIMC_ISA

// Where a block of one layer's cache holds what.
//
// A block is Hkv heads one after another; a head is
//     keys      [D][S], transposed: neighbours are the keys of neighbouring slots
//               4 bits: [ceil(D / 2)][S] bytes, dimension 2i in the low half of a byte and 2i + 1 in its high half
//     values    [S][Dp], Dp being D padded to whole loads
//               4 bits: [S][Dp / 2] bytes; byte 16b + i holds dimension 32b + i in its low half and 32b + 16 + i in its
//               high half
//     float32 [S] each, as the type needs them: scales of keys, scales of values, minimums of keys, minimums of values
// With 8 bits x = code * scale, -127 <= code <= 127; with 4 bits x = code * scale + minimum, 0 <= code <= 15; one scale
// per slot and head. Keys may have one scale per head and channel instead, which lies with the layer: then a block has
// neither scales nor minimums of keys, and codes saturate. Parts begin at multiples of 64 bytes if blocks hold whole
// groups of 16 slots, of 4 bytes otherwise.
//
// Functions are static because kernels call them: each instruction set needs its own copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace optimc {

// Kernels keep a head on their stack.
constexpr int kMaxHeadDim = 512;
// Keys that are scored together. Where S is a multiple, they are read where they lie.
constexpr int kKeyGroup = 16;

static constexpr std::int64_t kv_round_up(std::int64_t count, std::int64_t unit) {
    return (count + unit - 1) / unit * unit;
}

static constexpr int kv_type_bits(KvType type) {
    return type == KvType::float32 ? 32 : type == KvType::bfloat16 ? 16 : type == KvType::int8 ? 8 : 4;
}
static constexpr bool kv_has_scales(KvType type) { return type == KvType::int8 || type == KvType::int4; }
static constexpr bool kv_has_minimums(KvType type) { return type == KvType::int4; }

// Dp: elements from one slot's values to the next.
static constexpr int kv_value_width(KvType type, int head_dim) {
    return static_cast<int>(kv_round_up(head_dim, type == KvType::int4 ? 32 : 16));
}
static constexpr std::int64_t kv_value_row_bytes(KvType type, int head_dim) {
    return static_cast<std::int64_t>(kv_value_width(type, head_dim)) * kv_type_bits(type) / 8;
}
// Rows of the matrix of keys, and bytes from one to the next.
static constexpr int kv_key_rows(KvType type, int head_dim) {
    return type == KvType::int4 ? (head_dim + 1) / 2 : head_dim;
}
static constexpr std::int64_t kv_key_row_bytes(KvType type, int block_size) {
    return type == KvType::int4 ? block_size : static_cast<std::int64_t>(block_size) * kv_type_bits(type) / 8;
}

// Bytes from a head's start to its parts; keys are at 0. Parts a type does not have are empty.
struct KvParts {
    std::int64_t values;
    std::int64_t key_scales;
    std::int64_t value_scales;
    std::int64_t key_minimums;
    std::int64_t value_minimums;
    std::int64_t head_bytes;
};

static constexpr KvParts kv_parts(KvType type, int block_size, int head_dim, bool channel_keys) {
    const std::int64_t unit = block_size % kKeyGroup == 0 ? 64 : 4;
    const std::int64_t scales = kv_has_scales(type) ? kv_round_up(4 * block_size, unit) : 0;
    const std::int64_t minimums = kv_has_minimums(type) ? scales : 0;
    KvParts parts{};
    parts.values = kv_round_up(kv_key_rows(type, head_dim) * kv_key_row_bytes(type, block_size), unit);
    parts.key_scales = parts.values + kv_round_up(block_size * kv_value_row_bytes(type, head_dim), unit);
    parts.value_scales = parts.key_scales + (channel_keys ? 0 : scales);
    parts.key_minimums = parts.value_scales + scales;
    parts.value_minimums = parts.key_minimums + (channel_keys ? 0 : minimums);
    parts.head_bytes = parts.value_minimums + minimums;
    return parts;
}
static constexpr KvParts kv_parts(const KvLayer& layer) {
    return kv_parts(layer.type, layer.block_size, layer.head_dim, layer.has_channel_keys());
}

static constexpr std::int64_t kv_block_bytes(KvType type, int block_size, int num_kv_heads, int head_dim,
                                             bool channel_keys) {
    return num_kv_heads * kv_parts(type, block_size, head_dim, channel_keys).head_bytes;
}

// The start of one head of one block.
static inline std::uint8_t* kv_head(const KvLayer& layer, const KvParts& parts, std::int64_t block, int kv_head) {
    return layer.data + (block * layer.num_kv_heads + kv_head) * parts.head_bytes;
}

}  // namespace optimc

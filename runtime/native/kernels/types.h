// What kernels work on: plain descriptions of memory somebody else owns. One set of types for all instruction sets.
//
// Letters: M rows (tokens), C input features, N output features, G features per quantization group, H query heads,
// Hkv key/value heads, D head dim, S slots per block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace optimc {

// Output features are stored in panels of 32; the last one is padded with rows of zero weights.
constexpr int kPanelRows = 32;

// Features of a group as stored: a multiple of 8. Static, as kernels call it: each instruction set needs its own copy.
static constexpr std::int64_t padded_group(std::int64_t count) { return (count + 7) / 8 * 8; }

// Features of a row of groups of `group`, the last perhaps smaller, each padded.
static constexpr std::int64_t padded_features(std::int64_t features, std::int64_t group) {
    return features / group * padded_group(group) + padded_group(features % group);
}

// A linear weight [N, C] in integer codes: w[n, c] = (code - zero) * scale. See optimc/plan/cpu_program.py for bytes.
//
// Panel after panel; in a panel group after group; a group is
//     scales   32 x float16, or 32 x float32 if wide_scales
//     zeros    32 x uint8, if has_zeros
//     codes    4 bits: for every 8 features, 2 x 64 bytes: for 16 rows 4 bytes each, byte j holding the code of feature j
//              in its low half and of feature 4 + j in its high half;
//              8 bits: for every 4 features, 2 x 64 bytes: for 16 rows 4 bytes each, byte j the code of feature j
// The features of a group are padded to a multiple of 8. All groups but the last hold `group` features.
struct IntWeight {
    const std::uint8_t* data;
    std::int64_t outputs;   // N as stored, before padding to panels
    std::int64_t features;  // C
    std::int64_t group;     // G
    int bits;               // 4 or 8: how codes are stored
    bool has_zeros;
    bool wide_scales;
    int zero_point;  // of every group, if !has_zeros

    std::int64_t panels() const { return (outputs + kPanelRows - 1) / kPanelRows; }
    std::int64_t groups() const { return (features + group - 1) / group; }
    // Features of group g, without and with padding.
    std::int64_t group_features(std::int64_t g) const {
        return g + 1 < groups() ? group : features - (groups() - 1) * group;
    }
    std::int64_t padded_features() const { return optimc::padded_features(features, group); }
    std::int64_t group_header_bytes() const { return kPanelRows * ((wide_scales ? 4 : 2) + (has_zeros ? 1 : 0)); }
    std::int64_t code_bytes(std::int64_t padded_count) const { return padded_count * kPanelRows * bits / 8; }
    std::int64_t panel_bytes() const { return groups() * group_header_bytes() + code_bytes(padded_features()); }
};

// A linear weight [N, C] in floating point: for every panel and feature, the elements of its 32 rows.
enum class FloatType { float32, bfloat16, float16 };

struct FloatWeight {
    const void* data;
    std::int64_t outputs;
    std::int64_t features;
    FloatType type;

    std::int64_t panels() const { return (outputs + kPanelRows - 1) / kPanelRows; }
};

// Activations in 8 bits, symmetric, one scale per row and group: x[m, c] = codes[m, c'] * scales[m, g].
// Groups are laid out and padded as in the weight they meet; padding holds code 0.
struct QuantizedRows {
    std::int8_t* codes;    // [M, padded C]
    float* scales;         // [M, groups]
    std::int32_t* sums;    // [M, groups]: sum of the group's codes
    std::int64_t stride;   // padded C
    std::int64_t groups;
};

// float32 rows of `width` elements, `stride` elements apart.
struct Rows {
    float* data;
    std::int64_t stride;
};
struct ConstRows {
    const float* data;
    std::int64_t stride;
};

// How a gate acts on the value beside it.
enum class Gate { none, silu, gelu, gelu_tanh, relu, sigmoid };

// What happens to a product before it is stored: out[m, n] = residual[m, n] + (product[m, n] + bias[n]), each if present.
// With a gate, panels alternate gate and up: panel 2i holds gate rows 32i.., panel 2i + 1 the up rows of the same
// outputs, and out[m, n] = act(gate[m, n]) * up[m, n]; there is no residual. N counts outputs after the gate.
struct Epilogue {
    Rows out;
    std::int64_t outputs;  // N, unpadded
    const float* bias;     // padded to panels as the weight, or nullptr
    ConstRows residual;    // data nullptr: none
    Gate gate;
};

// A norm over the last `width` elements, `heads` times per row.
struct Norm {
    const float* weight;  // [width]
    const float* bias;    // [width] or nullptr
    float epsilon;
    std::int64_t width;
    std::int64_t heads;
    bool centred;  // LayerNorm subtracts the mean; RMSNorm does not
};

enum class KvType { float32, bfloat16, int8, int4 };

// The cache of one layer: P blocks, each [Hkv] x (keys, values, scales). See kernels/kv_layout.h for offsets.
struct KvLayer {
    std::uint8_t* data;
    std::int64_t num_blocks;
    int block_size;  // S
    int num_kv_heads;
    int head_dim;
    KvType type;
    // With 8 or 4 bits: one scale and, with 4 bits, one minimum per channel of the keys, [Hkv, D], measured at build time
    // and the same for every slot. nullptr: the keys of a slot have their own, as its values always do.
    const float* key_scales = nullptr;
    const float* key_minimums = nullptr;

    constexpr bool has_channel_keys() const { return key_scales != nullptr; }
};

// One step's sequences, shared by all layers. Token t of sequence b sees the context_len[b] tokens in the pool and of this
// step's tokens those its mask allows. See optimc_runtime/executor/base.py, StepPlan.
struct StepLayout {
    std::int64_t num_tokens;     // T
    std::int64_t num_sequences;  // B
    const std::int64_t* positions;    // [T]
    const std::int64_t* slots;        // [T]
    const std::int32_t* query_start;  // [B + 1]
    const std::int32_t* context_len;  // [B]
    const std::int32_t* block_table;  // [B, table_width]
    std::int64_t table_width;
    const std::uint8_t* tree_mask;  // [T, mask_width] or nullptr for causal
    std::int64_t mask_width;
};

}  // namespace optimc

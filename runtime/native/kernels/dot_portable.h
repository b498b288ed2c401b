// Tiles of integer products in GCC's and Clang's vector types, which become whatever the machine has.
//
// A 32-bit word of codes holds four bytes of one weight row. Masks and shifts turn it into two 16-bit lanes, one code
// of four bits each, without moving data between lanes; activations are laid out to match. A product of a code and an
// activation is at most 15 * 127, so a 16-bit lane takes sixteen of them before sums are widened. Codes of 8 bits are
// split into two of 4.
#pragma once

#include "kernels/weight_group.h"

namespace optimc::OPTIMC_ISA {

constexpr int kTileRows = 4;

typedef std::int16_t Shorts __attribute__((vector_size(16)));
typedef std::int32_t Words __attribute__((vector_size(16)));
constexpr int kWords = 4;  // weight rows in a vector

constexpr int kBlock = 32;  // features between widenings

// The activations of a block as the codes of a word meet them: for every 4 features, features 0 and 2, then 1 and 3.
template <int R>
struct BlockOfRows {
    Words pairs[R][kBlock / 2];
};

template <int R>
inline void lay_out(BlockOfRows<R>& block, const std::int8_t* x, std::int64_t stride, std::int64_t features) {
    for (int r = 0; r < R; ++r) {
        const std::int8_t* codes = x + r * stride;
        for (std::int64_t i = 0; i < features; i += 4) {
            for (int odd = 0; odd < 2; ++odd) {
                const std::uint32_t low = static_cast<std::uint16_t>(codes[i + odd]);
                const std::uint32_t high = static_cast<std::uint16_t>(codes[i + odd + 2]);
                block.pairs[r][i / 2 + odd] = Words{} + static_cast<std::int32_t>(low | high << 16);
            }
        }
    }
}

inline Words load_words(const std::uint8_t* p) {
    Words words;
    std::memcpy(&words, p, sizeof words);
    return words;
}

// The sum of the two 16-bit lanes of each word.
inline Words widen(Shorts pairs) {
    const Words words = (Words)pairs;
    return ((words << 16) >> 16) + (words >> 16);
}

// Adds to acc[R] the products of the block with the weight rows in the word at p.
template <int R, int Bits>
inline void dot_block(Words (&acc)[R], const std::uint8_t* p, const BlockOfRows<R>& block, std::int64_t features) {
    const Words low_half = Words{} + 0x000f000f;
    Shorts low[R] = {};
    Shorts high[R] = {};  // of 8-bit codes
    for (std::int64_t i = 0; i < features; i += 32 / Bits, p += 4 * kPanelRows) {
        const Words words = load_words(p);
        const Shorts nibbles[4] = {(Shorts)(words & low_half), (Shorts)((words >> 8) & low_half),
                                   (Shorts)((words >> 4) & low_half), (Shorts)((words >> 12) & low_half)};
        for (int r = 0; r < R; ++r) {
            const Words* x = &block.pairs[r][i / 2];
            low[r] += nibbles[0] * (Shorts)x[0];
            low[r] += nibbles[1] * (Shorts)x[1];
            if constexpr (Bits == 4) {
                low[r] += nibbles[2] * (Shorts)x[2];
                low[r] += nibbles[3] * (Shorts)x[3];
            } else {
                high[r] += nibbles[2] * (Shorts)x[0];
                high[r] += nibbles[3] * (Shorts)x[1];
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        acc[r] += widen(low[r]);
        if constexpr (Bits == 8) acc[r] += widen(high[r]) << 4;
    }
}

// sums[R][32] = products of rows `row`.. with the panel at `data`.
template <int R, int Bits>
void dot_tile(const PanelLayout& layout, const std::uint8_t* data, const QuantizedRows& x, std::int64_t row,
              const Ahead& ahead, float* sums) {
    const std::int8_t* codes = x.codes + row * x.stride;
    const float* x_scales = x.scales + row * x.groups;
    const std::int32_t* x_sums = x.sums + row * x.groups;
    for (int i = 0; i < R * kPanelRows; ++i) sums[i] = 0;

    BlockOfRows<R> block;
    for (std::int64_t g = 0; g < x.groups; ++g) {
        const WeightGroup group = layout.group(data, g);
        ahead.prefetch(data, layout.header_bytes);
        Words acc[kPanelRows / kWords][R];
        for (int n = 0; n < kPanelRows; ++n) {
            const std::int32_t zero = layout.has_zeros ? group.zeros[n] : layout.zero_point;
            for (int r = 0; r < R; ++r) acc[n / kWords][r][n % kWords] = -zero * x_sums[r * x.groups + g];
        }
        for (std::int64_t i = 0; i < group.features; i += kBlock) {
            const std::int64_t count = group.features - i < kBlock ? group.features - i : kBlock;
            lay_out<R>(block, codes + i, x.stride, count);
            const std::uint8_t* p = group.codes + i * kPanelRows * Bits / 8;
            ahead.prefetch(p, count * kPanelRows * Bits / 8);
            for (int n = 0; n < kPanelRows; n += kWords) dot_block<R, Bits>(acc[n / kWords], p + 4 * n, block, count);
        }
        for (int n = 0; n < kPanelRows; n += kLanes) {
            const Vec scale = layout.scales(group, n);
            for (int r = 0; r < R; ++r) {
                std::int32_t products[kLanes];
                for (int i = 0; i < kLanes; ++i) products[i] = acc[(n + i) / kWords][r][i % kWords];
                float* total = sums + r * kPanelRows + n;
                store(total, fma(load_i32(products), scale * broadcast(x_scales[r * x.groups + g]), load(total)));
            }
        }
        codes += group.features;
        data = group.next;
    }
}

}  // namespace optimc::OPTIMC_ISA

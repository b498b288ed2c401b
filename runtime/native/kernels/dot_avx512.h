// Tiles of integer products with AVX-512 VNNI: up to six rows of activations by a panel, all sums in registers, 4-bit
// codes unpacked on the way, which costs nothing beside the products.
#pragma once

#include "kernels/weight_group.h"

namespace optimc::OPTIMC_ISA {

constexpr int kTileRows = 6;
constexpr int kHalves = 2;  // of a panel, sixteen rows each

// Four signed codes at offset kAt of row `row` % 3 from x, rows `stride` apart, in every lane. Assembly, to have one
// address register for three rows.
template <int kAt>
inline __m512i broadcast4(const std::int8_t* x, std::int64_t stride, int row) {
    __m512i codes;
    if (row % 3 == 0) {
        asm("vpbroadcastd %c2(%1), %0" : "=v"(codes) : "r"(x), "i"(kAt));
    } else if (row % 3 == 1) {
        asm("vpbroadcastd %c2(%1,%3), %0" : "=v"(codes) : "r"(x), "i"(kAt), "r"(stride));
    } else {
        asm("vpbroadcastd %c2(%1,%3,2), %0" : "=v"(codes) : "r"(x), "i"(kAt), "r"(stride));
    }
    return codes;
}

// The products of four features; x[i] points into row 3 * i. A row's codes are loaded once for both halves: a product
// that loads its own needs as many loads as there are products, and then loads are what a tile waits for. Assembly,
// since g++ 12 moves the accumulators through memory around the intrinsic.
template <int kAt, int R>
inline void dot4_rows(__m512i (&sums)[R][kHalves], const __m512i (&codes)[kHalves], const std::int8_t* const* x,
                      std::int64_t stride) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const __m512i features = broadcast4<kAt>(x[r / 3], stride, r);
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
            asm("vpdpbusd %2, %1, %0" : "+v"(sums[r][h]) : "v"(codes[h]), "v"(features));
        }
    }
}

// The empty assembly keeps g++ from loading once per use, which costs a tenth while weights come from memory.
inline void load_codes(__m512i (&codes)[kHalves], const std::uint8_t* p, const Ahead& ahead) {
#pragma GCC unroll 2
    for (int h = 0; h < kHalves; ++h) {
        codes[h] = _mm512_loadu_si512(p + 64 * h);
        asm volatile("" : "+v"(codes[h]));
    }
    ahead.prefetch(p);
    ahead.prefetch(p + 64);
}

// The products of the next eight features.
template <int Bits, int R>
inline void dot8_rows(__m512i (&sums)[R][kHalves], const std::uint8_t* p, const Ahead& ahead,
                      const std::int8_t* const* x, std::int64_t stride) {
    __m512i codes[kHalves];
    load_codes(codes, p, ahead);
    if constexpr (Bits == 4) {
        const __m512i low_half = _mm512_set1_epi8(15);
        __m512i nibbles[kHalves];
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) nibbles[h] = _mm512_and_si512(codes[h], low_half);
        dot4_rows<0>(sums, nibbles, x, stride);
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) nibbles[h] = _mm512_and_si512(_mm512_srli_epi32(codes[h], 4), low_half);
        dot4_rows<4>(sums, nibbles, x, stride);
    } else {
        dot4_rows<0>(sums, codes, x, stride);
        load_codes(codes, p + 128, ahead);
        dot4_rows<4>(sums, codes, x, stride);
    }
}

// sums[R][32] = products of rows `row`.. with the panel at `data`.
template <int R, int Bits>
void dot_tile(const PanelLayout& panel, const std::uint8_t* data, const QuantizedRows& x, std::int64_t row,
              const Ahead& weights_ahead, float* sums) {
    // Copies, so that no store can change them.
    const PanelLayout layout = panel;
    const Ahead ahead = weights_ahead;
    const std::int64_t groups = layout.groups;
    const std::int64_t stride = x.stride;
    const std::int8_t* codes[(R + 2) / 3];
#pragma GCC unroll 2
    for (int i = 0; i < (R + 2) / 3; ++i) codes[i] = x.codes + (row + 3 * i) * stride;
    const float* x_scales = x.scales + row * groups;
    const std::int32_t* x_sums = x.sums + row * groups;
    __m512 total[R][kHalves];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) total[r][0] = total[r][1] = _mm512_setzero_ps();

    for (std::int64_t g = 0; g < groups; ++g, ++x_scales, ++x_sums) {
        const WeightGroup group = layout.group(data, g);
        __m512i acc[R][kHalves];
        if (layout.has_zeros) {
#pragma GCC unroll 2
            for (int h = 0; h < kHalves; ++h) {
                const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group.zeros + 16 * h));
                const __m512i minus_zeros = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_cvtepu8_epi32(bytes));
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r)
                    acc[r][h] = _mm512_mullo_epi32(minus_zeros, _mm512_set1_epi32(x_sums[r * groups]));
            }
        } else {
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
                acc[r][0] = acc[r][1] = _mm512_set1_epi32(-layout.zero_point * x_sums[r * groups]);
        }
        ahead.prefetch(data, layout.header_bytes);
        const std::uint8_t* p = group.codes;
        // A do-while loop here makes g++ 12 copy every accumulator.
        for (const std::int8_t* end = codes[0] + group.features; codes[0] < end; p += 32 * Bits) {
            dot8_rows<Bits>(acc, p, ahead, codes, stride);
#pragma GCC unroll 2
            for (int i = 0; i < (R + 2) / 3; ++i) codes[i] += 8;
        }
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) {
            const __m512 scale = layout.scales(group, 16 * h).v;
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const __m512 product_scale = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[r * groups]));
                total[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][h]), product_scale, total[r][h]);
            }
        }
        data = p;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int h = 0; h < kHalves; ++h) _mm512_store_ps(sums + r * kPanelRows + 16 * h, total[r][h]);
}

}  // namespace optimc::OPTIMC_ISA

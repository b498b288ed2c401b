// Tiles of integer products with AVX-512 VNNI: up to six rows of activations by a panel of weights, all sums in registers.
#pragma once

#include "kernels/weight_group.h"

namespace optimc::OPTIMC_ISA {

constexpr int kTileRows = 6;

typedef std::int32_t FourCodes __attribute__((may_alias, aligned(1)));

// Adds to each lane the products of its four unsigned codes with the four signed codes at x. Assembly, since g++ 12 moves
// the accumulators through memory around the intrinsic.
inline void dot4(__m512i& sums, __m512i codes, const std::int8_t* x) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(*reinterpret_cast<const FourCodes*>(x)));
}

inline __m512i load_codes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }

// Adds the products of four features: codes of panel rows 0..15 and 16..31, activations at offset `at` of each row.
template <int R>
inline void dot4_rows(__m512i (&sums)[R][2], __m512i first, __m512i second, const std::int8_t* const (&x)[R],
                      std::int64_t at) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        dot4(sums[r][0], first, x[r] + at);
        dot4(sums[r][1], second, x[r] + at);
    }
}

// sums[R][32] = products of rows `row`.. with the panel at `data`.
template <int R, int Bits>
void dot_tile(const IntWeight& weight, const std::uint8_t* data, const QuantizedRows& x, std::int64_t row, float* sums) {
    const std::int8_t* codes[R];
    const float* x_scales = x.scales + row * x.groups;
    const std::int32_t* x_sums = x.sums + row * x.groups;
    __m512 total[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        codes[r] = x.codes + (row + r) * x.stride;
        total[r][0] = total[r][1] = _mm512_setzero_ps();
    }
    const __m512i low_half = _mm512_set1_epi8(15);

    std::int64_t at = 0;
    for (std::int64_t g = 0; g < x.groups; ++g, ++x_scales, ++x_sums) {
        const WeightGroup group = open_group(weight, data, g);
        __m512i acc[R][2];
        if (weight.has_zeros) {
#pragma GCC unroll 2
            for (int h = 0; h < 2; ++h) {
                const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group.zeros + 16 * h));
                const __m512i minus_zero = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_cvtepu8_epi32(bytes));
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r)
                    acc[r][h] = _mm512_mullo_epi32(minus_zero, _mm512_set1_epi32(x_sums[r * x.groups]));
            }
        } else {
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r)
                acc[r][0] = acc[r][1] = _mm512_set1_epi32(-weight.zero_point * x_sums[r * x.groups]);
        }
        const std::uint8_t* p = group.codes;
        for (const std::int64_t end = at + group.features; at < end; at += 8) {
            if constexpr (Bits == 4) {
                const __m512i first = load_codes(p);
                const __m512i second = load_codes(p + 64);
                p += 128;
                dot4_rows<R>(acc, _mm512_and_si512(first, low_half), _mm512_and_si512(second, low_half), codes, at);
                dot4_rows<R>(acc, _mm512_and_si512(_mm512_srli_epi32(first, 4), low_half),
                             _mm512_and_si512(_mm512_srli_epi32(second, 4), low_half), codes, at + 4);
            } else {
                dot4_rows<R>(acc, load_codes(p), load_codes(p + 64), codes, at);
                dot4_rows<R>(acc, load_codes(p + 128), load_codes(p + 192), codes, at + 4);
                p += 256;
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
            const __m512 scale = load_scales(weight, group, 16 * h).v;
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                const __m512 product_scale = _mm512_mul_ps(scale, _mm512_set1_ps(x_scales[r * x.groups]));
                total[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][h]), product_scale, total[r][h]);
            }
        }
        data = group.next;
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        _mm512_storeu_ps(sums + r * kPanelRows, total[r][0]);
        _mm512_storeu_ps(sums + r * kPanelRows + 16, total[r][1]);
    }
}

}  // namespace optimc::OPTIMC_ISA

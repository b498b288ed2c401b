// Tiles of integer products with AVX2: unsigned by signed bytes, pairs summed in 16 bits.
//
// A pair of 4-bit codes adds at most 2 * 15 * 127 to a 16-bit sum, so eight pairs fit before sums are widened. Codes of
// 8 bits would not fit once: they are split into two of 4.
#pragma once

#include "kernels/weight_group.h"

namespace optimc::OPTIMC_ISA {

constexpr int kTileRows = 4;

inline __m256i broadcast4(const std::int8_t* x) {
    std::int32_t four;
    std::memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

// Adds the products of codes below 16 with the four activations at x; pairs of products per 16-bit lane. The empty
// assembly keeps g++ from reordering sums until the accumulators no longer fit the registers.
inline void dot_pairs(__m256i& sums, __m256i codes, __m256i x) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x));
    asm("" : "+x"(sums));
}

// Adds to acc[R][16] the products of up to 32 features with the 16 panel rows at p.
template <int R>
inline void dot_4bit(__m256i (&acc)[R][2], const std::uint8_t* p, const std::int8_t* x, std::int64_t stride,
                     std::int64_t features) {
    const __m256i low_half = _mm256_set1_epi8(15);
    __m256i pairs[R][2];
    for (int r = 0; r < R; ++r) pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (std::int64_t i = 0; i < features; i += 8, p += 128) {
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
        const __m256i first_low = _mm256_and_si256(first, low_half);
        const __m256i second_low = _mm256_and_si256(second, low_half);
        for (int r = 0; r < R; ++r) {
            const __m256i four = broadcast4(x + r * stride + i);
            dot_pairs(pairs[r][0], first_low, four);
            dot_pairs(pairs[r][1], second_low, four);
        }
        const __m256i first_high = _mm256_and_si256(_mm256_srli_epi16(first, 4), low_half);
        const __m256i second_high = _mm256_and_si256(_mm256_srli_epi16(second, 4), low_half);
        for (int r = 0; r < R; ++r) {
            const __m256i four = broadcast4(x + r * stride + i + 4);
            dot_pairs(pairs[r][0], first_high, four);
            dot_pairs(pairs[r][1], second_high, four);
        }
    }
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) acc[r][h] = _mm256_add_epi32(acc[r][h], _mm256_madd_epi16(pairs[r][h], ones));
}

// The same for 8-bit codes and the 8 panel rows at p.
template <int R>
inline void dot_8bit(__m256i (&acc)[R], const std::uint8_t* p, const std::int8_t* x, std::int64_t stride,
                     std::int64_t features) {
    const __m256i low_half = _mm256_set1_epi8(15);
    __m256i low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (std::int64_t i = 0; i < features; i += 4, p += 128) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const __m256i codes_low = _mm256_and_si256(codes, low_half);
        const __m256i codes_high = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low_half);
        for (int r = 0; r < R; ++r) {
            const __m256i four = broadcast4(x + r * stride + i);
            dot_pairs(low[r], codes_low, four);
            dot_pairs(high[r], codes_high, four);
        }
    }
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i sixteens = _mm256_set1_epi16(16);
    for (int r = 0; r < R; ++r) {
        const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(low[r], ones), _mm256_madd_epi16(high[r], sixteens));
        acc[r] = _mm256_add_epi32(acc[r], sum);
    }
}

// sums[R][32] = products of rows `row`.. with the panel at `data`.
template <int R, int Bits>
void dot_tile(const PanelLayout& layout, const std::uint8_t* data, const QuantizedRows& x, std::int64_t row,
              const Ahead& ahead, float* sums) {
    constexpr int kWidth = Bits == 4 ? 2 : 1;  // vectors of 8 panel rows at a time
    constexpr int kBlock = 32;                 // features between widenings
    const std::int8_t* codes = x.codes + row * x.stride;
    const float* x_scales = x.scales + row * layout.groups;
    const std::int32_t* x_sums = x.sums + row * layout.groups;
    for (int i = 0; i < R * kPanelRows; ++i) sums[i] = 0;

    for (std::int64_t g = 0; g < layout.groups; ++g) {
        const WeightGroup group = layout.group(data, g);
        if (ahead.distance > 0) ahead.prefetch(data, layout.header_bytes);
        for (int n = 0; n < kPanelRows; n += 8 * kWidth) {
            __m256i acc[R][kWidth];
            if (layout.has_zeros) {
                for (int w = 0; w < kWidth; ++w) {
                    const auto* bytes = reinterpret_cast<const __m128i*>(group.zeros + n + 8 * w);
                    const __m256i zeros = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes));
                    for (int r = 0; r < R; ++r)
                        acc[r][w] = _mm256_mullo_epi32(zeros, _mm256_set1_epi32(-x_sums[r * layout.groups + g]));
                }
            } else {
                for (int r = 0; r < R; ++r)
                    for (int w = 0; w < kWidth; ++w)
                        acc[r][w] = _mm256_set1_epi32(-layout.zero_point * x_sums[r * layout.groups + g]);
            }
            for (std::int64_t i = 0; i < group.features; i += kBlock) {
                const std::int64_t count = group.features - i < kBlock ? group.features - i : kBlock;
                const std::uint8_t* p = group.codes + i * kPanelRows * Bits / 8 + 4 * n;
                if (n == 0 && ahead.distance > 0) ahead.prefetch(p, count * kPanelRows * Bits / 8);
                if constexpr (Bits == 4) {
                    dot_4bit<R>(acc, p, codes + i, x.stride, count);
                } else {
                    dot_8bit<R>(reinterpret_cast<__m256i(&)[R]>(acc), p, codes + i, x.stride, count);
                }
            }
            for (int w = 0; w < kWidth; ++w) {
                const int at = n + 8 * w;
                const __m256 scale =
                    layout.wide_scales
                        ? _mm256_loadu_ps(reinterpret_cast<const float*>(group.scales) + at)
                        : _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group.scales + 2 * at)));
                for (int r = 0; r < R; ++r) {
                    float* total = sums + r * kPanelRows + at;
                    const __m256 product_scale = _mm256_mul_ps(scale, _mm256_set1_ps(x_scales[r * layout.groups + g]));
                    _mm256_storeu_ps(
                        total, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][w]), product_scale, _mm256_loadu_ps(total)));
                }
            }
        }
        codes += group.features;
        data = group.next;
    }
}

}  // namespace optimc::OPTIMC_ISA

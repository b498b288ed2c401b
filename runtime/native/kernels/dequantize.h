// Integer weights back to float32, a stretch of features of one panel at a time.
#pragma once

#include "kernels/weight_group.h"

namespace optimc::OPTIMC_ISA {

// (word >> kShift) & kMask for the 16 words at p, as float32. A word holds codes of one weight row.
template <int kShift, std::int32_t kMask>
inline Vec load_field(const std::uint8_t* p) {
#if defined(OPTIMC_AVX512)
    const __m512i words = _mm512_srli_epi32(_mm512_loadu_si512(p), kShift);
    return {_mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(kMask)))};
#elif defined(OPTIMC_AVX2)
    const __m256i mask = _mm256_set1_epi32(kMask);
    const __m256i lo = _mm256_srli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), kShift);
    const __m256i hi = _mm256_srli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)), kShift);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(lo, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(hi, mask))};
#else
    return each_part([&](int i) {
        Ints words;
        std::memcpy(&words, p + 16 * i, sizeof words);
        return __builtin_convertvector((words >> kShift) & kMask, Floats);
    });
#endif
}

// out[i][16], rows kPanelRows apart, = (code - zero) * scale for those features i, from kFeature on, that the words at
// p hold.
template <int kBits, int kFeature = 0>
inline void dequantize_words(const std::uint8_t* p, Vec scale, Vec zeros, float* out) {
    if constexpr (kFeature < 32 / kBits) {
        // Of 4-bit codes features 0..3 are the low halves of the bytes and 4..7 the high halves.
        constexpr int kShift = kFeature % 4 * 8 + kFeature / 4 * 4;
        const Vec codes = load_field<kShift, (1 << kBits) - 1>(p);
        store(out + kFeature * kPanelRows, (codes - zeros) * scale);
        dequantize_words<kBits, kFeature + 1>(p, scale, zeros, out);
    }
}

// out[features][32] = (code - zero) * scale for the panel's rows and features begin.. of the group; both counts are
// multiples of 8.
template <int kBits>
inline void dequantize(const PanelLayout& layout, const WeightGroup& group, std::int64_t begin, std::int64_t features,
                       float* out) {
    for (int n = 0; n < kPanelRows; n += kLanes) {
        const Vec scale = layout.scales(group, n);
        const Vec zeros = layout.zeros(group, n);
        const std::uint8_t* p = group.codes + begin * kPanelRows * kBits / 8 + 4 * n;
        for (std::int64_t i = 0; i < features; i += 32 / kBits, p += 4 * kPanelRows)
            dequantize_words<kBits>(p, scale, zeros, out + i * kPanelRows + n);
    }
}

}  // namespace optimc::OPTIMC_ISA

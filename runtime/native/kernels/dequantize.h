// Integer weights back to float32, a stretch of features of one panel at a time.
#pragma once

#include "kernels/weight_group.h"

namespace optimc::OPTIMC_ISA {

// (word >> shift) & mask for the 16 words at p, as float32. A word holds codes of one weight row.
inline Vec load_field(const std::uint8_t* p, int shift, std::int32_t mask) {
#if defined(OPTIMC_AVX512)
    const __m512i words = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(mask)))};
#elif defined(OPTIMC_AVX2)
    const __m128i count = _mm_cvtsi32_si128(shift);
    const __m256i wanted = _mm256_set1_epi32(mask);
    const __m256i lo = _mm256_srl_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), count);
    const __m256i hi = _mm256_srl_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)), count);
    return {_mm256_cvtepi32_ps(_mm256_and_si256(lo, wanted)), _mm256_cvtepi32_ps(_mm256_and_si256(hi, wanted))};
#else
    std::int32_t fields[kLanes];
    std::memcpy(fields, p, sizeof fields);
    for (std::int32_t& field : fields) field = field >> shift & mask;
    return load_i32(fields);
#endif
}

// out[features][32] = (code - zero) * scale for the panel's rows and features begin.. of the group; both counts are
// multiples of 8.
inline void dequantize(const PanelLayout& layout, const WeightGroup& group, std::int64_t begin, std::int64_t features,
                       float* out) {
    const std::int64_t stretch = 32 / layout.bits;  // features in a word
    const std::int32_t mask = (1 << layout.bits) - 1;
    for (int n = 0; n < kPanelRows; n += kLanes) {
        const Vec scale = layout.scales(group, n);
        const Vec zeros = layout.zeros(group, n);
        const std::uint8_t* p = group.codes + begin * kPanelRows * layout.bits / 8 + 4 * n;
        for (std::int64_t i = 0; i < features; i += stretch, p += 4 * kPanelRows) {
            for (int j = 0; j < stretch; ++j) {
                // Of 4-bit codes features 0..3 are the low halves of the bytes and 4..7 the high halves.
                const int shift = j % 4 * 8 + j / 4 * 4;
                store(out + (i + j) * kPanelRows + n, (load_field(p, shift, mask) - zeros) * scale);
            }
        }
    }
}

}  // namespace optimc::OPTIMC_ISA

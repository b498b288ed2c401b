// Sixteen float32 lanes, the same interface on every instruction set. Included by kernels only, which are compiled once
// per set with OPTIMC_ISA naming the set's namespace.
//
// Kernels written with it compute the same value for an element whatever tile or thread it falls into: each function
// below rounds the same way every time, and no sum is reordered behind the caller's back.
//
// Kernels must not call inline functions of the standard library: the linker may keep the copy compiled for another
// instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(OPTIMC_AVX512) || defined(OPTIMC_AVX2)
#include <immintrin.h>
#endif

namespace optimc::OPTIMC_ISA {

constexpr int kLanes = 16;

#if defined(OPTIMC_AVX512)

struct Vec {
    __m512 v;
};

inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once where the set has it, twice otherwise.
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// b where either is NaN; so is min.
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
// The larger of two magnitudes, |a| and |b|; NaN counts as larger than infinity, so it is never lost.
inline Vec larger_size(Vec a, Vec b) {
    const __m512i size = _mm512_set1_epi32(0x7fffffff);
    return {_mm512_castsi512_ps(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a.v), size),
                                                 _mm512_and_si512(_mm512_castps_si512(b.v), size)))};
}
inline Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
// To the nearest integer, ties to even.
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a < b ? x : y in each lane; false where either is NaN.
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), y.v, x.v)};
}
// a is NaN ? x : y in each lane.
inline Vec where_nan(Vec a, Vec x, Vec y) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), y.v, x.v)};
}
inline __mmask16 lanes_below(int n) { return static_cast<__mmask16>((1u << n) - 1); }
// Lanes below n from a, the others from b; n in [0, 16].
inline Vec first(int n, Vec a, Vec b) { return {_mm512_mask_blend_ps(lanes_below(n), b.v, a.v)}; }
// Lanes below n loaded, the others 0; nothing beyond is read.
inline Vec load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes_below(n), p)}; }
inline void store_first(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, lanes_below(n), a.v); }
// 2^n * a for integral n in [-126, 127].
inline Vec scale_by_power(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline Vec load_bf16(const std::uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline Vec load_f16(const std::uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline Vec load_i8(const std::int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline Vec load_u8(const std::uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline Vec load_i32(const std::int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
// Integral values in [-128, 127].
inline void store_i8(std::int8_t* p, Vec a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// The sum of all lanes, always in the same order.
inline float sum(Vec a) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
inline float largest(Vec a) { return _mm512_reduce_max_ps(a.v); }
// Of lanes that are magnitudes; NaN if there is one.
inline float largest_size(Vec a) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_castps_si512(a.v)))));
}
// Lane i of the result is combine over all lanes of vectors[i]: transposed on the way, so that none waits for another.
template <class Combine>
inline __m512i combine_sixteen(const __m512i (&vectors)[kLanes], Combine combine) {
    __m512i pairs[8], fours[4], eights[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m512i a = vectors[2 * i], b = vectors[2 * i + 1];
        pairs[i] = combine(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m512i a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = combine(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    const auto join = [&](__m512i a, __m512i b) {
        return combine(_mm512_shuffle_i32x4(a, b, 0b10001000), _mm512_shuffle_i32x4(a, b, 0b11011101));
    };
    for (int i = 0; i < 2; ++i) eights[i] = join(fours[2 * i], fours[2 * i + 1]);
    return join(eights[0], eights[1]);
}
// `largest_size` of each.
inline Vec largest_sizes(const Vec (&sizes)[kLanes]) {
    __m512i bits[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) bits[i] = _mm512_castps_si512(sizes[i].v);
    const auto larger = [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); };
    return {_mm512_castsi512_ps(combine_sixteen(bits, larger))};
}
// Integers that are stored as 8 bits, and their sum lane by lane.
struct CodeSum {
    __m512i lanes = _mm512_setzero_si512();

    // Stores the integers nearest to a, ties to even; they must lie in [-127, 127].
    void store_i8(std::int8_t* p, Vec a) {
        const __m512i codes = _mm512_cvtps_epi32(a.v);
        _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(codes));
        lanes = _mm512_add_epi32(lanes, codes);
    }
};
// sums[i] = all that went into codes[i].
inline void store_sums(std::int32_t* sums, const CodeSum (&codes)[kLanes]) {
    __m512i lanes[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) lanes[i] = codes[i].lanes;
    const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
    _mm512_storeu_si512(sums, combine_sixteen(lanes, add));
}

#elif defined(OPTIMC_AVX2)

struct Vec {
    __m256 lo, hi;
};

inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline Vec broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Vec abs(Vec a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline __m256 larger_size(__m256 a, __m256 b) {
    const __m256i size = _mm256_set1_epi32(0x7fffffff);
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a), size),
                                                _mm256_and_si256(_mm256_castps_si256(b), size)));
}
inline Vec larger_size(Vec a, Vec b) { return {larger_size(a.lo, b.lo), larger_size(a.hi, b.hi)}; }
inline Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline Vec round(Vec a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
inline Vec where_nan(Vec a, Vec x, Vec y) {
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))};
}
// A mask with the lanes below n set, for lanes `from`..`from + 7`.
inline __m256i lanes_below(int n, int from) {
    const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(from));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
}
inline Vec first(int n, Vec a, Vec b) {
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(lanes_below(n, 0))),
            _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(lanes_below(n, 8)))};
}
inline Vec load_first(const float* p, int n) {
    return {_mm256_maskload_ps(p, lanes_below(n, 0)), _mm256_maskload_ps(p + 8, lanes_below(n, 8))};
}
inline void store_first(float* p, Vec a, int n) {
    _mm256_maskstore_ps(p, lanes_below(n, 0), a.lo);
    _mm256_maskstore_ps(p + 8, lanes_below(n, 8), a.hi);
}
inline __m256 power_of_two(__m256 n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
inline Vec scale_by_power(Vec a, Vec n) {
    return {_mm256_mul_ps(a.lo, power_of_two(n.lo)), _mm256_mul_ps(a.hi, power_of_two(n.hi))};
}
inline __m256 widen_bf16(const std::uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Vec load_bf16(const std::uint16_t* p) { return {widen_bf16(p), widen_bf16(p + 8)}; }
inline Vec load_f16(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline Vec load_i8(const std::int8_t* p) {
    const __m128i all = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(all, all)))};
}
inline Vec load_u8(const std::uint8_t* p) {
    const __m128i all = _mm_loadu_si128((const __m128i*)p);
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(all, all)))};
}
inline Vec load_i32(const std::int32_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)p)),
            _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i*)(p + 8)))};
}
inline void store_i8(std::int8_t* p, Vec a) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)), 0b11011000);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
inline float sum(Vec a) {
    const __m256 half = _mm256_add_ps(a.lo, a.hi);
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
inline float largest(Vec a) {
    const __m256 half = _mm256_max_ps(a.lo, a.hi);
    const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}
inline float largest_size(Vec a) {
    const __m256i half = _mm256_max_epi32(_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi));
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0b01001110));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0b10110001));
    return _mm_cvtss_f32(_mm_castsi128_ps(most));
}

#else

// GCC's and Clang's vector types: they become whatever the machine has, without intrinsics. Four lanes each, for which
// SSE2 and NEON have registers; compilers keep wider ones in memory there.
typedef float Floats __attribute__((vector_size(16)));
typedef std::int32_t Ints __attribute__((vector_size(16)));

struct Vec {
    Floats part[4];
};

// f(i) for each part.
template <class Function>
inline Vec each_part(Function f) {
    return {f(0), f(1), f(2), f(3)};
}
// Lanes of part i that are below n.
inline Ints lanes_below(int n, int i) { return Ints{0, 1, 2, 3} + 4 * i < n; }

inline Vec load(const float* p) {
    Vec a;
    std::memcpy(&a, p, sizeof a);
    return a;
}
inline void store(float* p, Vec a) { std::memcpy(p, &a, sizeof a); }
inline Vec broadcast(float x) {
    return each_part([&](int) { return Floats{x, x, x, x}; });
}
inline Vec operator+(Vec a, Vec b) {
    return each_part([&](int i) { return a.part[i] + b.part[i]; });
}
inline Vec operator-(Vec a, Vec b) {
    return each_part([&](int i) { return a.part[i] - b.part[i]; });
}
inline Vec operator*(Vec a, Vec b) {
    return each_part([&](int i) { return a.part[i] * b.part[i]; });
}
inline Vec operator/(Vec a, Vec b) {
    return each_part([&](int i) { return a.part[i] / b.part[i]; });
}
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec max(Vec a, Vec b) {
    return each_part([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
inline Vec min(Vec a, Vec b) {
    return each_part([&](int i) { return a.part[i] < b.part[i] ? a.part[i] : b.part[i]; });
}
inline Vec abs(Vec a) {
    return each_part([&](int i) { return (Floats)((Ints)a.part[i] & 0x7fffffff); });
}
inline Vec larger_size(Vec a, Vec b) {
    return each_part([&](int i) {
        const Ints x = (Ints)a.part[i] & 0x7fffffff;
        const Ints y = (Ints)b.part[i] & 0x7fffffff;
        return (Floats)(x > y ? x : y);
    });
}
inline Vec sqrt(Vec a) {
    return each_part([&](int i) {
        const Floats p = a.part[i];
        return Floats{__builtin_sqrtf(p[0]), __builtin_sqrtf(p[1]), __builtin_sqrtf(p[2]), __builtin_sqrtf(p[3])};
    });
}
inline Vec round(Vec a) {
    // Adding and taking away 1.5 * 2^23 leaves the nearest integer, ties to even, for |a| < 2^22; larger magnitudes
    // are clipped or integral where this is used.
    const Vec magic = broadcast(12582912.0f);
    const Vec rounded = (a + magic) - magic;
    const Vec size = abs(a);
    return each_part([&](int i) { return size.part[i] < 4194304.0f ? rounded.part[i] : a.part[i]; });
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return each_part([&](int i) { return a.part[i] < b.part[i] ? x.part[i] : y.part[i]; });
}
inline Vec where_nan(Vec a, Vec x, Vec y) {
    return each_part([&](int i) { return a.part[i] != a.part[i] ? x.part[i] : y.part[i]; });
}
inline Vec first(int n, Vec a, Vec b) {
    return each_part([&](int i) { return lanes_below(n, i) ? a.part[i] : b.part[i]; });
}
inline Vec load_first(const float* p, int n) {
    float lanes[kLanes] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
}
inline void store_first(float* p, Vec a, int n) {
    float lanes[kLanes];
    store(lanes, a);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}
inline Vec scale_by_power(Vec a, Vec n) {
    return each_part([&](int i) {
        const Ints exponent = (__builtin_convertvector(n.part[i], Ints) + 127) << 23;
        return a.part[i] * (Floats)exponent;
    });
}
// Sixteen integers of any width as float32.
template <class Integer>
inline Vec convert(const Integer* p) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(p[i]);
    return load(lanes);
}
inline Vec load_bf16(const std::uint16_t* p) {
    std::uint32_t bits[kLanes];
    for (int i = 0; i < kLanes; ++i) bits[i] = static_cast<std::uint32_t>(p[i]) << 16;
    Vec a;
    std::memcpy(&a, bits, sizeof a);
    return a;
}
// IEEE binary16 to binary32 moves the fraction by 13 bits and raises the exponent by 112. A subnormal is first given
// the exponent of 2^-14, whose value then is taken away; infinities and NaN have all bits of the exponent set.
inline Vec load_f16(const std::uint16_t* p) {
    std::uint32_t bits[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        bits[i] = static_cast<std::uint32_t>(p[i] & 0x7fff) << 13 | static_cast<std::uint32_t>(p[i] & 0x8000) << 16;
    }
    Vec a;
    std::memcpy(&a, bits, sizeof a);
    return each_part([&](int i) {
        const Ints size = (Ints)a.part[i] & 0x7fffffff;
        const Ints sign = (Ints)a.part[i] ^ size;
        const Floats normal = (Floats)(size + (112 << 23));
        const Floats subnormal = (Floats)(size + (113 << 23)) - 6.103515625e-5f;
        const Ints value = (Ints)(size < (1 << 23) ? subnormal : normal);
        return (Floats)(value | sign | ((size >= (31 << 23)) & 0x7f800000));
    });
}
inline Vec load_i8(const std::int8_t* p) { return convert(p); }
inline Vec load_u8(const std::uint8_t* p) { return convert(p); }
inline Vec load_i32(const std::int32_t* p) { return convert(p); }
inline void store_i8(std::int8_t* p, Vec a) {
    float lanes[kLanes];
    store(lanes, a);
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<std::int8_t>(lanes[i]);
}
inline float sum(Vec a) {
    const Floats quarter = (a.part[0] + a.part[2]) + (a.part[1] + a.part[3]);
    return (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
}
inline float largest(Vec a) {
    const Vec low = max(a, {a.part[2], a.part[3], a.part[2], a.part[3]});
    const Vec lower = max(low, {low.part[1], low.part[1], low.part[1], low.part[1]});
    const Floats four = lower.part[0];
    const float left = four[0] > four[2] ? four[0] : four[2];
    const float right = four[1] > four[3] ? four[1] : four[3];
    return left > right ? left : right;
}

inline float largest_size(Vec a) {
    std::int32_t bits[kLanes];
    std::memcpy(bits, &a, sizeof bits);
    std::int32_t most = bits[0];
    for (int i = 1; i < kLanes; ++i) most = bits[i] > most ? bits[i] : most;
    float value;
    std::memcpy(&value, &most, sizeof value);
    return value;
}

#endif

inline Vec zero() { return broadcast(0.0f); }

#if !defined(OPTIMC_AVX512)

inline Vec largest_sizes(const Vec (&sizes)[kLanes]) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = largest_size(sizes[i]);
    return load(lanes);
}

struct CodeSum {
    Vec lanes = zero();

    void store_i8(std::int8_t* p, Vec a) {
        const Vec code = round(a);
        lanes = lanes + code;  // exact: integers far below 2^24
        OPTIMC_ISA::store_i8(p, code);
    }
};

inline void store_sums(std::int32_t* sums, const CodeSum (&codes)[kLanes]) {
    for (int i = 0; i < kLanes; ++i) sums[i] = static_cast<std::int32_t>(sum(codes[i].lanes));
}

#endif

}  // namespace optimc::OPTIMC_ISA

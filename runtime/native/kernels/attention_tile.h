// The products of attention: a few query rows with 16 to 64 columns at a time, one chain of multiply-adds per element.
//
// Scores are q [rows, D] times keys [D, keys]; results are p [rows, keys] times values [keys, D]. Elements of the
// cache are widened in registers. How many rows and columns are taken at a time changes no bit of any element.
//
// A chain takes its terms one by one, or in pairs (kernels/attention_pairs.h). The matrices below say how many
// a step of theirs takes, how a step's columns are loaded, and how they are multiplied and added.
#pragma once

#include "kernels/attention_units.h"
#include "kernels/kv_layout.h"
#include "kernels/vec.h"

namespace optimc::OPTIMC_ISA {

// Rows of a tile, and how many vectors of columns go with `rows` rows: accumulators must fit the registers, and there
// must be enough of them to hide the latency of a multiply-add.
#if defined(OPTIMC_AVX512)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int) { return 4; }
#elif defined(OPTIMC_AVX2)
constexpr int kTileRows = 6;
constexpr int tile_vectors(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }
#else
constexpr int kTileRows = 2;
constexpr int tile_vectors(int rows) { return rows == 1 ? 2 : 1; }
#endif

// Low or high halves of 16 bytes.
inline Vec load_halves(const std::uint8_t* p, bool high) {
#if defined(OPTIMC_AVX512)
    const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm512_cvtepi32_ps(high ? _mm512_srli_epi32(both, 4) : _mm512_and_si512(both, _mm512_set1_epi32(15)))};
#elif defined(OPTIMC_AVX2)
    const __m128i both = _mm_loadu_si128((const __m128i*)p);
    const __m128i half = _mm_and_si128(high ? _mm_srli_epi16(both, 4) : both, _mm_set1_epi8(15));
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(half)),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(half, half)))};
#else
    std::uint8_t half[kLanes];
    for (int i = 0; i < kLanes; ++i) half[i] = high ? p[i] >> 4 : p[i] & 15;
    return load_u8(half);
#endif
}

template <KvType type>
inline Vec load_elements(const std::uint8_t* p) {
    if constexpr (type == KvType::float32) return load((const float*)p);
    if constexpr (type == KvType::bfloat16) return load_bf16((const std::uint16_t*)p);
    if constexpr (type == KvType::int8) return load_i8((const std::int8_t*)p);
}

// sum + factor * column.
inline Vec multiply_add_step(float factor, Vec column, Vec sum) { return fma(broadcast(factor), column, sum); }

// Keys of one chunk: row d, 16 neighbouring keys of group g.
template <KvType type>
struct KeyMatrix {
    static constexpr int kTerms = 1;

    const std::uint8_t* const* groups;  // where each group's dimension 0 lies
    std::int64_t row_bytes;

    Vec load(int d, bool odd, int group) const {
        if constexpr (type == KvType::int4) return load_halves(groups[group] + (d >> 1) * row_bytes, odd);
        else return load_elements<type>(groups[group] + d * row_bytes);
    }
};

// Values of one chunk: row `key`, 16 neighbouring dimensions. For 4 bits `vector` may be odd only if `first` is even.
template <KvType type>
struct ValueMatrix {
    static constexpr int kTerms = 1;

    const std::uint8_t* const* rows;

    Vec load(int key, bool, int vector) const {
        if constexpr (type == KvType::int4) return load_halves(rows[key] + (vector >> 1) * 16, (vector & 1) != 0);
        else return load_elements<type>(rows[key] + vector * kLanes * kv_type_bits(type) / 8);
    }
};

// sums[r][v] += chain over steps k in [begin, end) of a[r, k] * b[k, first + v]. For 4-bit keys `begin` is even.
template <int rows, int vectors, class Matrix>
[[gnu::always_inline]] inline void multiply_add(Vec (&sums)[rows][vectors], const float* a, std::int64_t a_stride,
                                                const Matrix& b, int first, int begin, int end) {
    const auto step = [&](int k, bool odd) __attribute__((always_inline)) {
        decltype(b.load(k, odd, first)) columns[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; ++v) columns[v] = b.load(k, odd, first + v);
#pragma GCC unroll 6
        for (int r = 0; r < rows; ++r) {
            const float factor = a[r * a_stride + k];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) sums[r][v] = multiply_add_step(factor, columns[v], sums[r][v]);
        }
    };
    int k = begin;
    for (; k + 1 < end; k += 2) {
        step(k, false);
        step(k + 1, true);
    }
    if (k < end) step(k, false);
}

// scores[r][16 g ...] = q [rows, steps] times the keys of groups [begin, end).
template <int rows, class Keys>
inline void score_tile(const float* q, std::int64_t q_stride, int steps, const Keys& keys, int begin, int end,
                       float* scores) {
    const auto columns = [&]<int vectors>(int group) __attribute__((always_inline)) {
        Vec sums[rows][vectors] = {};
        multiply_add(sums, q, q_stride, keys, group, 0, steps);
        for (int r = 0; r < rows; ++r) {
            for (int v = 0; v < vectors; ++v) store(scores + r * kChunkKeys + (group + v) * kLanes, sums[r][v]);
        }
    };
    constexpr int most = tile_vectors(rows);
    int group = begin;
    for (; group + most <= end; group += most) columns.template operator()<most>(group);
    if constexpr (most > 2) {
        for (; group + 2 <= end; group += 2) columns.template operator()<2>(group);
    }
    for (; group < end; ++group) columns.template operator()<1>(group);
}

// values[r] [width] = values[r] * factors[r] + weights [rows, steps] times the values of steps [begin, end).
template <int rows, class Values>
inline void weigh_tile(const float* weights, const Values& matrix, int begin, int end, const float* factors,
                       float* values, std::int64_t stride, int width) {
    const auto columns = [&]<int vectors>(int vector) __attribute__((always_inline)) {
        Vec sums[rows][vectors];
#pragma GCC unroll 6
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) {
                sums[r][v] = load(values + r * stride + (vector + v) * kLanes) * broadcast(factors[r]);
            }
        }
        multiply_add(sums, weights, kChunkKeys, matrix, vector, begin, end);
#pragma GCC unroll 6
        for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) store(values + r * stride + (vector + v) * kLanes, sums[r][v]);
        }
    };
    constexpr int most = tile_vectors(rows);
    const int vectors = width / kLanes;
    int vector = 0;
    for (; vector + most <= vectors; vector += most) columns.template operator()<most>(vector);
    if constexpr (most > 2) {
        for (; vector + 2 <= vectors; vector += 2) columns.template operator()<2>(vector);
    }
    for (; vector < vectors; ++vector) columns.template operator()<1>(vector);
}

// Calls f.operator()<rows>() for a number of rows known only now, 1 to kTileRows.
template <class F>
[[gnu::always_inline]] inline void with_rows(int rows, const F& f) {
    switch (rows) {
        case 1: return f.template operator()<1>();
        case 2: return f.template operator()<2>();
#if defined(OPTIMC_AVX512) || defined(OPTIMC_AVX2)
        case 3: return f.template operator()<3>();
        case 4: return f.template operator()<4>();
        case 5: return f.template operator()<5>();
        case 6: return f.template operator()<6>();
#endif
    }
}

}  // namespace optimc::OPTIMC_ISA

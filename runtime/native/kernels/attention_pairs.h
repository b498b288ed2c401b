// Products of attention in pairs of bfloat16: two terms of a chain at a time, summed in float32.
//
// A cell is 32 bits wide and holds two neighbours of a chain as bfloat16, the first in the low half: dimensions 2k and
// 2k + 1 of a query or a key, the weights or values of keys 2j and 2j + 1 of a chunk. Elements of the cache are
// bfloat16 already, or codes of at most 8 bits, so their cells are exact but for subnormal numbers, which count as 0;
// queries and weights are rounded. Which neighbours meet depends on their index alone, and the instruction rounds in
// one way whatever the mode of the processor: no tile changes a bit.
#pragma once

#include "kernels/attention_tile.h"

namespace optimc::OPTIMC_ISA {

// Whether chunks of a cache of this type are multiplied in pairs. float32 stays float32.
constexpr bool multiplies_pairs([[maybe_unused]] KvType type) {
#if defined(OPTIMC_BF16)
    return type != KvType::float32;
#else
    return false;
#endif
}

// The cell of two numbers that are bfloat16 already.
inline float cell_of(float first, float second) {
    std::uint32_t low, high;
    std::memcpy(&low, &first, sizeof low);
    std::memcpy(&high, &second, sizeof high);
    const std::uint32_t bits = low >> 16 | (high & 0xffff0000u);
    float cell;
    std::memcpy(&cell, &bits, sizeof cell);
    return cell;
}

#if defined(OPTIMC_BF16)

struct Cells {
    __m512i v;
};

// sum + the products of both halves.
inline Vec multiply_add_step(float cell, Cells column, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)column.v, (__m512bh)_mm512_set1_ps(cell))};
}

inline void store_cells(float* p, Cells a) { _mm512_storeu_si512(p, a.v); }

// Sixteen cells of sixteen pairs of float32, which are rounded.
inline Cells narrow_pairs(const float* p) {
    return {(__m512i)_mm512_cvtne2ps_pbh(load(p + kLanes).v, load(p).v)};
}
// In place: x [n] becomes cells [n / 2]; n is a multiple of 32.
inline void narrow_row(float* x, int n) {
    for (int i = 0; i < n; i += 2 * kLanes) store_cells(x + i / 2, narrow_pairs(x + i));
}

// Of elements that are bfloat16 numbers in float32.
inline Cells first_halves(Vec a) { return {_mm512_srli_epi32(_mm512_castps_si512(a.v), 16)}; }
inline Cells second_halves(Vec a) { return {_mm512_castps_si512(a.v)}; }
inline Cells join(Vec a, Vec b) {
    constexpr int or_and = 0xf8;
    return {_mm512_ternarylogic_epi32(first_halves(a).v, second_halves(b).v, _mm512_set1_epi32(-65536), or_and)};
}
inline Cells join_bf16(const std::uint8_t* a, const std::uint8_t* b) {
    const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
    const __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
    return {_mm512_or_si512(first, _mm512_slli_epi32(second, 16))};
}

// Keys of one chunk as cells: pair of dimensions k, 16 neighbouring keys of group g. D is even.
template <KvType type>
struct KeyPairs {
    static constexpr int kTerms = 2;

    const std::uint8_t* const* groups;
    std::int64_t row_bytes;

    Cells load(int k, bool, int group) const {
        if constexpr (type == KvType::int4) {
            const std::uint8_t* p = groups[group] + k * row_bytes;
            return join(load_halves(p, false), load_halves(p, true));
        } else {
            const std::uint8_t* p = groups[group] + 2 * k * row_bytes;
            if constexpr (type == KvType::bfloat16) return join_bf16(p, p + row_bytes);
            else return join(load_elements<type>(p), load_elements<type>(p + row_bytes));
        }
    }
};

// Keys that were copied as cells.
struct CopiedKeyPairs {
    static constexpr int kTerms = 2;

    const std::uint8_t* const* groups;
    std::int64_t row_bytes;

    Cells load(int k, bool, int group) const { return {_mm512_loadu_si512(groups[group] + k * row_bytes)}; }
};

// Values of one chunk as cells: keys 2j and 2j + 1, 16 neighbouring dimensions.
template <KvType type>
struct ValuePairs {
    static constexpr int kTerms = 2;

    const std::uint8_t* const* rows;

    Cells load(int j, bool, int vector) const {
        if constexpr (type == KvType::bfloat16) {
            return join_bf16(rows[2 * j] + vector * 2 * kLanes, rows[2 * j + 1] + vector * 2 * kLanes);
        } else {
            return join(of_key(2 * j, vector), of_key(2 * j + 1, vector));
        }
    }
    template <bool second>
    Cells load_half(int j, int vector) const {
        if constexpr (second) return second_halves(of_key(2 * j + 1, vector));
        else return first_halves(of_key(2 * j, vector));
    }
    Vec of_key(int key, int vector) const { return ValueMatrix<type>{rows}.load(key, false, vector); }
};

// Values that were copied as cells; rows[2j] is where those of pair j lie.
struct CopiedValuePairs {
    static constexpr int kTerms = 2;

    const std::uint8_t* const* rows;

    Cells load(int j, bool, int vector) const { return {_mm512_loadu_si512(rows[2 * j] + vector * 4 * kLanes)}; }
    template <bool second>
    Cells load_half(int j, int vector) const {
        return {_mm512_and_si512(load(j, false, vector).v, _mm512_set1_epi32(second ? -65536 : 65535))};
    }
};

#else

// What other sets mention and never use.
template <KvType type>
struct KeyPairs;
template <KvType type>
struct ValuePairs;
inline void narrow_row(float*, int) {}

#endif

// One half of the cells of values in pairs; the other half is 0, whatever value lies there: it may be NaN.
template <class Pairs, bool second>
struct HalfOf {
    const std::uint8_t* const* rows;

    auto load(int j, bool, int vector) const { return Pairs{rows}.template load_half<second>(j, vector); }
};

// How tiles see a chunk of a cache of `type`, where it lies or copied.
template <KvType type, bool copied, bool pairs = multiplies_pairs(type)>
struct ChunkForm {
    static constexpr KvType element = copied ? KvType::float32 : type;
    using Keys = KeyMatrix<element>;
    using Values = ValueMatrix<element>;
};

#if defined(OPTIMC_BF16)
template <KvType type>
struct ChunkForm<type, false, true> {
    using Keys = KeyPairs<type>;
    using Values = ValuePairs<type>;
};
template <KvType type>
struct ChunkForm<type, true, true> {
    using Keys = CopiedKeyPairs;
    using Values = CopiedValuePairs;
};
#endif

}  // namespace optimc::OPTIMC_ISA

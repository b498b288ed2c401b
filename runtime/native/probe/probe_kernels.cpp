// Compiled once per instruction set. Empty assembly keeps values in registers and loops in place.
#include "probe/probe_kernels.h"

#include "kernels/vec.h"

namespace optimc {

namespace OPTIMC_ISA {

namespace {

// Enough chains that none waits for its own last result: latency times operations begun per cycle is at most 10.
constexpr int kChains = 12;

#if defined(OPTIMC_AVX512)
using Words = __m512i;
inline Words load_words(const std::byte* p) { return _mm512_loadu_si512(p); }
inline Words mix(Words a, Words b) { return _mm512_or_si512(a, b); }
constexpr std::int64_t kInt8Products = 64;
inline void multiply(Words& sums, Words a, Words b) {
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}
#elif defined(OPTIMC_AVX2)
using Words = __m256i;
inline Words load_words(const std::byte* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline Words mix(Words a, Words b) { return _mm256_or_si256(a, b); }
constexpr std::int64_t kInt8Products = 32;
// Pairs summed in 16 bits; kernels widen those now and then, which comes on top.
inline void multiply(Words& sums, Words a, Words b) {
    Words pairs;
    asm volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(pairs) : "x"(a), "x"(b));
}
#else
typedef std::uint64_t Words __attribute__((vector_size(16)));
inline Words load_words(const std::byte* p) {
    Words words;
    std::memcpy(&words, p, sizeof words);
    return words;
}
inline Words mix(Words a, Words b) { return a | b; }
constexpr std::int64_t kInt8Products = 8;
// Products of 16-bit lanes, the narrowest that every machine multiplies.
inline void multiply(Words& sums, Words a, Words b) {
    typedef std::int16_t Lanes __attribute__((vector_size(16)));
    sums = (Words)((Lanes)sums + (Lanes)a * (Lanes)b);
#if defined(__x86_64__)
    asm volatile("" : "+x"(sums));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(sums));
#endif
}
#endif

std::uint64_t read(const std::byte* data, std::size_t bytes) {
    constexpr std::size_t kAtOnce = 8 * sizeof(Words);
    Words seen[8] = {};
    for (std::size_t at = 0; at + kAtOnce <= bytes; at += kAtOnce) {
#pragma GCC unroll 8
        for (std::size_t i = 0; i < 8; ++i) seen[i] = mix(seen[i], load_words(data + at + i * sizeof(Words)));
    }
    std::uint64_t all = 0;
    for (const Words& words : seen) {
        std::uint64_t parts[sizeof(Words) / 8];
        std::memcpy(parts, &words, sizeof words);
        for (std::uint64_t part : parts) all |= part;
    }
    return all;
}

float multiply_int8(std::int64_t rounds) {
    Words sums[kChains] = {};
    Words a = {}, b = {};
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int chain = 0; chain < kChains; ++chain) multiply(sums[chain], a, b);
    }
    Words all = sums[0];
    for (const Words& each : sums) all = mix(all, each);
    std::uint8_t first;
    std::memcpy(&first, &all, 1);
    return first;
}

#if defined(OPTIMC_AVX512)
using Floats = __m512;
inline void multiply_add(Floats& sums, Floats a, Floats b) {
    sums = _mm512_fmadd_ps(a, b, sums);
    asm volatile("" : "+v"(sums));
}
#elif defined(OPTIMC_AVX2)
using Floats = __m256;
inline void multiply_add(Floats& sums, Floats a, Floats b) {
    sums = _mm256_fmadd_ps(a, b, sums);
    asm volatile("" : "+x"(sums));
}
#else
typedef float Floats __attribute__((vector_size(16)));
inline void multiply_add(Floats& sums, Floats a, Floats b) {
    sums += a * b;
#if defined(__x86_64__)
    asm volatile("" : "+x"(sums));
#elif defined(__aarch64__)
    asm volatile("" : "+w"(sums));
#endif
}
#endif

float multiply_float(std::int64_t rounds) {
    Floats sums[kChains] = {};
    Floats a = {}, b = {};
    for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int chain = 0; chain < kChains; ++chain) multiply_add(sums[chain], a, b);
    }
    float all = 0.0f;
    for (const Floats& each : sums) {
        float first;
        std::memcpy(&first, &each, sizeof first);
        all += first;
    }
    return all;
}

constexpr ProbeKernels kTable = {
    .read = read,
    .multiply_int8 = multiply_int8,
    .multiply_float = multiply_float,
    .int8_ops = 2 * kChains * kInt8Products,
    .float_ops = 2 * kChains * static_cast<std::int64_t>(sizeof(Floats) / sizeof(float)),
};

}  // namespace

}  // namespace OPTIMC_ISA

const ProbeKernels* OPTIMC_ISA_TABLE() { return &OPTIMC_ISA::kTable; }

}  // namespace optimc

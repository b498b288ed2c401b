// Loops that do nothing but what they are named for, as fast as an instruction set goes: what no kernel of it beats.
#pragma once

#include <cstddef>
#include <cstdint>

namespace optimc {

struct ProbeKernels {
    // The sum of `bytes` bytes at `data`, multiples of 512, so that nobody leaves out reading them.
    std::uint64_t (*read)(const std::byte* data, std::size_t bytes);
    // `rounds` rounds of products that do not wait for each other; something that depends on them all.
    float (*multiply_int8)(std::int64_t rounds);
    float (*multiply_float)(std::int64_t rounds);
    // Multiplications and additions, each counted, of one round.
    std::int64_t int8_ops;
    std::int64_t float_ops;
};

const ProbeKernels* probe_portable();
const ProbeKernels* probe_avx2();
const ProbeKernels* probe_avx512();

}  // namespace optimc

// What this machine does at best: bytes read and operations done per second, all threads together.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa/instruction_set.h"
#include "probe/probe_kernels.h"

namespace optimc {

// The loops of a set; those of avx512 for avx512_bf16 and amx, whose own products no loop here makes.
const ProbeKernels& probe_kernels_of(InstructionSet set);

// Bytes per second in the best of `rounds` rounds, in each of which every thread reads its own equal part of `bytes`
// bytes again and again until it has read kLeastBytes or all once.
double read_bandwidth(const std::byte* data, std::size_t bytes, int threads, int rounds, InstructionSet set);

// Operations per second in the best of as many short spells as fit into `seconds`.
double peak_int8_ops(int threads, double seconds, InstructionSet set);
double peak_float_ops(int threads, double seconds, InstructionSet set);

}  // namespace optimc

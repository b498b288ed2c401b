// Which kernels this machine runs. Chosen when a program is loaded, never when the module is built.
#pragma once

#include <string>
#include <vector>

namespace optimc {

enum class InstructionSet { portable, avx2, avx512, avx512_bf16, amx };

// "portable", "avx2", "avx512", "avx512_bf16", "amx".
const char* name_of(InstructionSet set);

// The sets this machine can run, the one to choose last. amx means tiles of 8-bit integers, which the system must grant,
// and what avx512 needs; avx512_bf16 means products of bfloat16 and what avx512 needs; avx512 means F, BW, DQ, VL, VNNI
// and what avx2 needs; avx2 means AVX2, FMA and F16C.
std::vector<InstructionSet> supported_instruction_sets();

// The set named by the environment variable OPTIMC_ISA, else the fastest supported one.
// Throws std::invalid_argument if the name is unknown or this machine lacks the set.
InstructionSet choose_instruction_set();

// As above for a given name; an empty one means the fastest.
InstructionSet choose_instruction_set(const std::string& name);

}  // namespace optimc

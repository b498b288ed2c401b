// From an instruction set to its kernels.
#pragma once

#include "isa/instruction_set.h"
#include "kernels/kernels.h"

namespace optimc {

// Throws std::invalid_argument if the set was not compiled in.
const Kernels& kernels_of(InstructionSet set);

}  // namespace optimc

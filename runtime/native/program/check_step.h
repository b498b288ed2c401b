// Whether a step stays inside the program that is to run it. The kernels take every index as it comes.
#pragma once

#include <cstdint>

#include "program/op.h"

namespace optimc {

struct StepLimits {
    std::int64_t capacity;    // most tokens of a step
    std::int64_t vocabulary;  // token ids are below
    std::int64_t num_blocks;  // of the KV pool
    std::int64_t block_size;  // slots
};

// Throws std::invalid_argument naming the first index that reaches outside. That arrays are as long as `step` says was
// checked before.
void check_step(const Step& step, const StepLimits& limits);

}  // namespace optimc

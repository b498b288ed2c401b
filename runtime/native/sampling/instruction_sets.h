// Kernels marked with this are compiled for AVX-512 and AVX2 as well as for the baseline; the loader picks one when the
// module is loaded. All compute the same bits: no fused multiply-add (the build sets -ffp-contract=off), same order of
// sums.
#pragma once

#include <cstddef>  // defines __GLIBC__, whose loader resolves the choice

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define OPTIMC_EACH_INSTRUCTION_SET __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define OPTIMC_EACH_INSTRUCTION_SET
#endif

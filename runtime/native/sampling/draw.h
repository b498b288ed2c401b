// One draw from unnormalised weights by inversion of their running sum, in id order.
#pragma once

#include <cstdint>

namespace optimc {

constexpr std::int32_t kDrawBlock = 256;

constexpr std::int32_t draw_blocks(std::int32_t vocab) { return (vocab + kDrawBlock - 1) / kDrawBlock; }

// The token whose share of the sum contains `uniform` in [0, 1). Weights are >= 0, not all 0; tokens of weight 0 are
// never drawn. `block_sums` is scratch for draw_blocks(vocab) sums.
std::int32_t draw(const float* weights, std::int32_t vocab, double uniform, double* block_sums);
std::int32_t draw_reference(const float* weights, std::int32_t vocab, double uniform);

}  // namespace optimc

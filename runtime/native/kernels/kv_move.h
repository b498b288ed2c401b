// Copying slots of the cache, after a tree of guesses was accepted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/types.h"

namespace optimc {

// Bytes of scratch `kv_move` needs for `count` slots.
std::size_t kv_move_scratch(const KvLayer& layer, std::int64_t count);

// Copy slots src[i] to dst[i], keys, values and scales of all heads, as if all were read before any is written.
// Destinations must differ from each other.
void kv_move(const KvLayer& layer, const std::int64_t* src, const std::int64_t* dst, std::int64_t count,
             std::byte* scratch);

// Bytes of one slot of a layer, all heads: keys, values, and their scales where the cache has them per token.
std::size_t kv_slot_bytes(const KvLayer& layer);

// Copy one slot's bytes to `out`.
void kv_read_slot(const KvLayer& layer, std::int64_t slot, std::byte* out);

}  // namespace optimc

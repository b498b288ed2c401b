// What the attention kernels compute, element by element and in double precision.
#pragma once

#include <vector>

#include "kernels/attention.h"

namespace optimc::reference {

// One head of one token after rotation, [D].
std::vector<float> rotated(const AttentionCall& call, const ConstRows& rows, std::int64_t token, int head);

// Key or value of a slot as the cache holds it, [D].
std::vector<double> cached_key(const KvLayer& layer, std::int64_t slot, int kv_head);
std::vector<double> cached_value(const KvLayer& layer, std::int64_t slot, int kv_head);

// Attention of every token to the cache, which must hold this step's keys and values already: [T, H * D].
std::vector<float> attention(const AttentionCall& call);

}  // namespace optimc::reference

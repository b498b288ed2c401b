// The parts of one group of a panel of integer weights.
#pragma once

#include "kernels/types.h"
#include "kernels/vec.h"

namespace optimc::OPTIMC_ISA {

struct WeightGroup {
    const std::uint8_t* scales;
    const std::uint8_t* zeros;  // nullptr if the weight has none
    const std::uint8_t* codes;
    std::int64_t features;  // padded
    const std::uint8_t* next;
};

// Group g of the panel, which begins at `data`.
inline WeightGroup open_group(const IntWeight& weight, const std::uint8_t* data, std::int64_t g) {
    WeightGroup group;
    group.features = IntWeight::padded(weight.group_features(g));
    group.scales = data;
    group.zeros = weight.has_zeros ? data + kPanelRows * (weight.wide_scales ? 4 : 2) : nullptr;
    group.codes = data + weight.group_header_bytes();
    group.next = group.codes + weight.code_bytes(group.features);
    return group;
}

// Scales of the panel's rows i..i + 15.
inline Vec load_scales(const IntWeight& weight, const WeightGroup& group, int i) {
    if (weight.wide_scales) return load(reinterpret_cast<const float*>(group.scales) + i);
    return load_f16(reinterpret_cast<const std::uint16_t*>(group.scales) + i);
}

// Zeros of the panel's rows i..i + 15.
inline Vec load_zeros(const IntWeight& weight, const WeightGroup& group, int i) {
    return group.zeros == nullptr ? broadcast(static_cast<float>(weight.zero_point)) : load_u8(group.zeros + i);
}

}  // namespace optimc::OPTIMC_ISA

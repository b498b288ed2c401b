// How panels of integer weights are read: group after group. See kernels/types.h for the bytes.
#pragma once

#include "kernels/types.h"
#include "kernels/vec.h"

namespace optimc::OPTIMC_ISA {

// One group of a panel.
struct WeightGroup {
    const std::uint8_t* scales;
    const std::uint8_t* zeros;  // meaningless if the weight has none
    const std::uint8_t* codes;
    std::int64_t features;  // padded
    const std::uint8_t* next;
};

// What all panels of a weight have in common, worked out once.
struct PanelLayout {
    std::int64_t groups;
    std::int64_t features;  // of a group, padded
    std::int64_t last_features;
    std::int64_t header_bytes;
    std::int64_t panel_bytes;
    int bits;
    std::int32_t zero_point;
    bool has_zeros;
    bool wide_scales;

    explicit PanelLayout(const IntWeight& weight)
        : groups(weight.groups()),
          features(padded_group(weight.group)),
          last_features(padded_group(weight.group_features(groups - 1))),
          header_bytes(weight.group_header_bytes()),
          panel_bytes(weight.panel_bytes()),
          bits(weight.bits),
          zero_point(weight.zero_point),
          has_zeros(weight.has_zeros),
          wide_scales(weight.wide_scales) {}

    // Group g, which begins at `data`.
    WeightGroup group(const std::uint8_t* data, std::int64_t g) const {
        const std::int64_t count = g + 1 < groups ? features : last_features;
        const std::uint8_t* codes = data + header_bytes;
        return {data, codes - kPanelRows, codes, count, codes + count * kPanelRows * bits / 8};
    }
    // Scales and zeros of the panel's rows i..i + 15.
    Vec scales(const WeightGroup& group, int i) const {
        if (wide_scales) return load(reinterpret_cast<const float*>(group.scales) + i);
        return load_f16(reinterpret_cast<const std::uint16_t*>(group.scales) + i);
    }
    Vec zeros(const WeightGroup& group, int i) const {
        return has_zeros ? load_u8(group.zeros + i) : broadcast(static_cast<float>(zero_point));
    }
};

// Asks the second-level cache for weights `distance` bytes ahead, not beyond `end`. Hardware fetches ahead by itself,
// but only to the end of a page, and starts anew in the next. It pays only if every line is asked for.
struct Ahead {
    std::int64_t distance;
    const std::uint8_t* end;

    void prefetch(const std::uint8_t* p) const {
        const std::uint8_t* wanted = p + distance;
        __builtin_prefetch(wanted < end ? wanted : end, 0, 2);
    }
    void prefetch(const std::uint8_t* p, std::int64_t bytes) const {
        for (std::int64_t i = 0; i < bytes; i += 64) prefetch(p + i);
    }
};

}  // namespace optimc::OPTIMC_ISA

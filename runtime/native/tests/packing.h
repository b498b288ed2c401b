// Integer weights for tests: plain codes, scales and zeros, and their panels.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "kernels/types.h"

namespace optimc::test {

// Memory that ends where it says, so that a sanitizer sees reads beyond.
struct PackedWeight {
    std::vector<std::uint8_t> bytes;
    IntWeight weight;
};

struct PlainWeight {
    std::int64_t outputs;
    std::int64_t features;
    std::int64_t group;
    int bits;
    bool has_zeros;
    bool wide_scales;
    int zero_point;
    std::vector<std::uint8_t> codes;  // [outputs, features]
    std::vector<float> scales;        // [outputs, groups], of float16 precision unless wide
    std::vector<std::uint8_t> zeros;  // [outputs, groups], if has_zeros

    std::int64_t groups() const { return (features + group - 1) / group; }
};

inline PlainWeight random_weight(std::int64_t outputs, std::int64_t features, std::int64_t group, int bits,
                                 bool has_zeros, bool wide_scales, std::mt19937& random) {
    PlainWeight plain{outputs, features, group, bits, has_zeros, wide_scales, 1 << (bits - 1), {}, {}, {}};
    const auto below = [&](unsigned n) { return static_cast<unsigned>(random() % n); };
    for (std::int64_t i = 0; i < outputs * features; ++i) {
        plain.codes.push_back(static_cast<std::uint8_t>(below(8) == 0 ? (1u << bits) - 1 : below(1u << bits)));
    }
    for (std::int64_t i = 0; i < outputs * plain.groups(); ++i) {
        const unsigned steps = wide_scales ? 1u << 23 : 1u << 10;  // between a power of two and the next
        const float fraction = 1 + static_cast<float>(below(steps)) / static_cast<float>(steps);
        plain.scales.push_back(fraction / static_cast<float>(64u << below(4)));
        if (has_zeros) plain.zeros.push_back(static_cast<std::uint8_t>(below(1u << bits)));
    }
    return plain;
}

// Bits of a positive, normal float16 that the value equals.
inline std::uint16_t float16_bits(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<std::uint16_t>((bits >> 13) - (112u << 10));
}

inline PackedWeight pack(const PlainWeight& plain) {
    PackedWeight packed;
    IntWeight& weight = packed.weight;
    weight = {nullptr,   plain.outputs,   plain.features,    plain.group,
              plain.bits, plain.has_zeros, plain.wide_scales, plain.has_zeros ? 0 : plain.zero_point};
    packed.bytes.reserve(static_cast<std::size_t>(weight.panels() * weight.panel_bytes()));
    const auto append = [&](const void* value, std::size_t size) {
        const auto* bytes = static_cast<const std::uint8_t*>(value);
        packed.bytes.insert(packed.bytes.end(), bytes, bytes + size);
    };
    for (std::int64_t panel = 0; panel < weight.panels(); ++panel) {
        for (std::int64_t g = 0; g < weight.groups(); ++g) {
            const auto at = [&](std::int64_t r) {
                return static_cast<std::size_t>((panel * kPanelRows + r) * weight.groups() + g);
            };
            const auto is_padding = [&](std::int64_t r) { return panel * kPanelRows + r >= plain.outputs; };
            for (int r = 0; r < kPanelRows; ++r) {
                const float scale = is_padding(r) ? 0 : plain.scales[at(r)];
                const std::uint16_t half = is_padding(r) ? 0 : float16_bits(scale);
                if (plain.wide_scales) {
                    append(&scale, 4);
                } else {
                    append(&half, 2);
                }
            }
            for (int r = 0; plain.has_zeros && r < kPanelRows; ++r) {
                const std::uint8_t zero = is_padding(r) ? 0 : plain.zeros[at(r)];
                append(&zero, 1);
            }
            // Padding codes are not zero: nothing may depend on them.
            const auto code = [&](std::int64_t r, std::int64_t i) -> std::uint8_t {
                const std::int64_t largest = (1 << plain.bits) - 1;
                if (is_padding(r) || i >= weight.group_features(g)) return static_cast<std::uint8_t>(largest);
                return plain.codes[static_cast<std::size_t>((panel * kPanelRows + r) * plain.features +
                                                            g * plain.group + i)];
            };
            const std::int64_t padded = padded_group(weight.group_features(g));
            for (std::int64_t i = 0; i < padded; i += 32 / plain.bits) {
                for (int r = 0; r < kPanelRows; ++r) {
                    for (int j = 0; j < 4; ++j) {
                        const int byte = plain.bits == 8 ? code(r, i + j) : code(r, i + j) | code(r, i + 4 + j) << 4;
                        const auto stored = static_cast<std::uint8_t>(byte);
                        append(&stored, 1);
                    }
                }
            }
        }
    }
    weight.data = packed.bytes.data();
    return packed;
}

}  // namespace optimc::test

// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
// A draw is a pure function of (seed, position): no state, so batch mates, preemption and threads cannot change it.
#pragma once

#include <array>
#include <cstdint>

namespace optimc {

using PhiloxBlock = std::array<std::uint32_t, 4>;

inline PhiloxBlock philox4x32(PhiloxBlock counter, std::array<std::uint32_t, 2> key) {
    constexpr std::uint64_t multiplier_0 = 0xD2511F53u;
    constexpr std::uint64_t multiplier_1 = 0xCD9E8D57u;
    constexpr std::uint32_t weyl_0 = 0x9E3779B9u;
    constexpr std::uint32_t weyl_1 = 0xBB67AE85u;
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t product_0 = multiplier_0 * counter[0];
        const std::uint64_t product_1 = multiplier_1 * counter[2];
        counter = {static_cast<std::uint32_t>(product_1 >> 32) ^ counter[1] ^ key[0],
                   static_cast<std::uint32_t>(product_1),
                   static_cast<std::uint32_t>(product_0 >> 32) ^ counter[3] ^ key[1],
                   static_cast<std::uint32_t>(product_0)};
        key[0] += weyl_0;
        key[1] += weyl_1;
    }
    return counter;
}

// Uniform in [0, 1) with 53 random bits, for output position `position` of the sequence seeded with `seed`.
inline double uniform_at(std::uint64_t seed, std::uint64_t position) {
    const PhiloxBlock block =
        philox4x32({static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32), 0, 0},
                   {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
    const std::uint64_t bits = (static_cast<std::uint64_t>(block[0]) << 32) | block[1];
    return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace optimc

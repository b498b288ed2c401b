// Random floating-point weights in panels, for tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/reference/float_elements.h"
#include "kernels/types.h"

namespace optimc::test {

class TestFloatWeight {
public:
    // Rows of padding are 0, as the packer leaves them.
    TestFloatWeight(FloatType type, std::int64_t outputs, std::int64_t features, unsigned seed)
        : weight_{nullptr, outputs, features, type},
          data_(static_cast<std::size_t>(weight_.panels() * kPanelRows * features) * reference::element_bytes(type)) {
        weight_.data = data_.data();
        std::mt19937 generator(seed);
        std::normal_distribution<float> normal(0, 0.1f);
        for (std::int64_t panel = 0; panel < weight_.panels(); ++panel)
            for (std::int64_t c = 0; c < features; ++c)
                for (std::int64_t n = 0; n < kPanelRows && panel * kPanelRows + n < outputs; ++n)
                    set((panel * features + c) * kPanelRows + n, normal, generator);
    }
    TestFloatWeight(const TestFloatWeight&) = delete;
    TestFloatWeight& operator=(const TestFloatWeight&) = delete;

    const FloatWeight& get() const { return weight_; }

private:
    void set(std::int64_t index, std::normal_distribution<float>& normal, std::mt19937& generator) {
        const float value = normal(generator);
        std::uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        if (weight_.type == FloatType::float32) {
            std::memcpy(&data_[static_cast<std::size_t>(index) * 4], &value, 4);
            return;
        }
        // bfloat16 is a float32 cut off; float16 keeps the sign and takes exponents from 2^-8 to 2^-1.
        std::uint16_t half = static_cast<std::uint16_t>(bits >> 16);
        if (weight_.type == FloatType::float16) {
            half = static_cast<std::uint16_t>((half & 0x8000) | (7 + generator() % 8) << 10 | generator() % 1024);
        }
        std::memcpy(&data_[static_cast<std::size_t>(index) * 2], &half, 2);
    }

    FloatWeight weight_;
    std::vector<std::uint8_t> data_;
};

}  // namespace optimc::test

// Rows for tests: reproducible values, and a mark in the gaps between rows that kernels must leave alone.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "kernels/types.h"

namespace optimc::test {

class TestRows {
public:
    TestRows(std::int64_t rows, std::int64_t width, std::int64_t gap = 0)
        : rows_(rows), width_(width), stride_(width + gap),
          values_(static_cast<std::size_t>(rows * stride_ + kTail), kMark) {
        for (std::int64_t r = 0; r < rows_; ++r)
            for (std::int64_t c = 0; c < width_; ++c) at(r, c) = 0;
    }

    // Normally distributed values.
    static TestRows random(std::int64_t rows, std::int64_t width, std::int64_t gap, unsigned seed, float scale = 1) {
        TestRows result(rows, width, gap);
        std::mt19937 generator(seed);
        std::normal_distribution<float> normal(0, scale);
        for (std::int64_t r = 0; r < rows; ++r)
            for (std::int64_t c = 0; c < width; ++c) result.at(r, c) = normal(generator);
        return result;
    }

    float& at(std::int64_t row, std::int64_t column) {
        return values_[static_cast<std::size_t>(row * stride_ + column)];
    }
    Rows rows() { return {values_.data(), stride_}; }
    ConstRows const_rows() const { return {values_.data(), stride_}; }
    // Everything, gaps included.
    const std::vector<float>& all() const { return values_; }

    bool gaps_intact() const {
        for (std::size_t i = 0; i < values_.size(); ++i) {
            const auto place = static_cast<std::int64_t>(i);
            if ((place / stride_ >= rows_ || place % stride_ >= width_) && values_[i] != kMark) return false;
        }
        return true;
    }

private:
    static constexpr float kMark = -7777;
    static constexpr std::int64_t kTail = 32;

    std::int64_t rows_, width_, stride_;
    std::vector<float> values_;
};

}  // namespace optimc::test

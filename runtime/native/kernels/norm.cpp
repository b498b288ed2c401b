// RMSNorm and LayerNorm with the residual additions around them. A head is read once or twice for its statistics and
// once more to be scaled.
#include <cassert>

#include "kernels/declarations.h"
#include "kernels/vec.h"

namespace optimc::OPTIMC_ISA {

namespace {

// Independent sums, so that an addition need not wait for the one before it.
constexpr int kSums = 4;

// The elements of one head: x + before, or x alone.
struct Head {
    const float* x;
    const float* before;

    Vec read(std::int64_t i, int count) const {
        const Vec value = load_first(x + i, count);
        return before == nullptr ? value : value + load_first(before + i, count);
    }
    Vec read(std::int64_t i) const { return before == nullptr ? load(x + i) : load(x + i) + load(before + i); }
};

// The sum of (element - mean), or of its square, over `width` elements, in an order that depends on `width` alone.
template <bool kSquared>
float total(const Head& head, std::int64_t width, float mean) {
    const auto term = [mean](Vec value) {
        const Vec centred = value - broadcast(mean);
        return kSquared ? centred * centred : centred;
    };
    Vec sums[kSums] = {zero(), zero(), zero(), zero()};
    std::int64_t i = 0;
    for (; i + kSums * kLanes <= width; i += kSums * kLanes) {
#pragma GCC unroll 4
        for (int s = 0; s < kSums; ++s) sums[s] = sums[s] + term(head.read(i + s * kLanes));
    }
    for (; i + kLanes <= width; i += kLanes) sums[0] = sums[0] + term(head.read(i));
    if (i < width) {
        const int count = static_cast<int>(width - i);
        sums[1] = sums[1] + first(count, term(head.read(i, count)), zero());
    }
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// Where a head's results go, and what is added to them.
struct Target {
    const float* after;
    float* out;
};

Vec scaled(const Norm& norm, Vec value, Vec mean, Vec scale, Vec weight, Vec bias) {
    if (norm.centred) value = value - mean;
    value = value * scale * weight;
    return norm.bias == nullptr ? value : value + bias;
}

void norm_head(const Norm& norm, const Head& head, const Target& target) {
    const float width = static_cast<float>(norm.width);
    const float mean = norm.centred ? total<false>(head, norm.width, 0.0f) / width : 0.0f;
    const float variance = total<true>(head, norm.width, mean) / width;
    const Vec scales = broadcast(1.0f / __builtin_sqrtf(variance + norm.epsilon));
    const Vec means = broadcast(mean);
    std::int64_t i = 0;
    for (; i + kLanes <= norm.width; i += kLanes) {
        const Vec bias = norm.bias == nullptr ? zero() : load(norm.bias + i);
        const Vec value = scaled(norm, head.read(i), means, scales, load(norm.weight + i), bias);
        store(target.out + i, target.after == nullptr ? value : load(target.after + i) + value);
    }
    if (i < norm.width) {
        const int count = static_cast<int>(norm.width - i);
        const Vec bias = norm.bias == nullptr ? zero() : load_first(norm.bias + i, count);
        Vec value = scaled(norm, head.read(i, count), means, scales, load_first(norm.weight + i, count), bias);
        if (target.after != nullptr) value = load_first(target.after + i, count) + value;
        store_first(target.out + i, value, count);
    }
}

void store_sum(const Head& head, std::int64_t width, float* sum) {
    std::int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(sum + i, head.read(i));
    if (i < width) {
        const int count = static_cast<int>(width - i);
        store_first(sum + i, head.read(i, count), count);
    }
}

const float* row_of(ConstRows rows, std::int64_t row, std::int64_t offset) {
    return rows.data == nullptr ? nullptr : rows.data + row * rows.stride + offset;
}

}  // namespace

void norm(const Norm& norm, ConstRows x, ConstRows before, ConstRows after, Rows sum, Rows out, std::int64_t row_begin,
          std::int64_t row_end) {
    assert(norm.width > 0 && norm.heads > 0);
    for (std::int64_t row = row_begin; row < row_end; ++row) {
        for (std::int64_t h = 0; h < norm.heads; ++h) {
            const std::int64_t offset = h * norm.width;
            Head head = {row_of(x, row, offset), row_of(before, row, offset)};
            if (sum.data != nullptr) {
                // Read back from here on: x or before may be what was just overwritten.
                float* stored = sum.data + row * sum.stride + offset;
                store_sum(head, norm.width, stored);
                head = {stored, nullptr};
            }
            norm_head(norm, head, {row_of(after, row, offset), out.data + row * out.stride + offset});
        }
    }
}

}  // namespace optimc::OPTIMC_ISA

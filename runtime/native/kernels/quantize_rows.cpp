// Activations to 8 bits, one scale per row and group, or one for all.
#include "kernels/declarations.h"
#include "kernels/vec.h"

namespace optimc::OPTIMC_ISA {

namespace {

// Below this a group counts as zero: its scale would be subnormal, and the reciprocal infinite.
constexpr float kSmallest = 127 * 1.17549435e-38f;
constexpr float kLargest = 3.40282347e+38f;

// `count` (at most 16) features from `begin` on, zeros behind them.
inline Vec take(const float* x, const std::int32_t* permutation, std::int64_t begin, int count) {
    if (permutation == nullptr) return load_first(x + begin, count);
    float taken[kLanes] = {};
    for (int i = 0; i < count; ++i) taken[i] = x[permutation[begin + i]];
    return load(taken);
}

struct GroupCodes {
    float scale;
    std::int32_t sum;
};

// What a group's numbers are divided by: its own largest magnitude over 127, or a scale from outside.
template <bool kFixed>
struct Divisor {
    float scale;
    Vec factor;

    Divisor(float most, float fixed_scale)
        : scale(kFixed ? fixed_scale : most / 127.0f), factor(broadcast(kFixed ? fixed_scale : 127.0f / most)) {}

    // Multiplying by the reciprocal moves a quotient by an ulp at most: a code differs from round(x / scale) only where
    // both neighbours are as near. With a scale from outside the code is what every backend computes, saturated.
    Vec code(Vec x) const {
        if constexpr (kFixed) return max(broadcast(-127.0f), min(broadcast(127.0f), round(x / factor)));
        else return round(x * factor);
    }
};

// Whether a group has codes at all, given its largest magnitude; otherwise they are 0 and `scale` says why.
template <bool kFixed>
bool has_codes(float most, float& scale) {
    if (most <= kLargest && (kFixed || most >= kSmallest)) return true;
    scale = most < kSmallest ? 0.0f : __builtin_nanf("");
    return false;
}

// A group of whole vectors that lie side by side: what nearly all groups are.
template <bool kFixed>
GroupCodes quantize_whole(const float* x, std::int64_t count, float fixed_scale, std::int8_t* codes) {
    Vec size = zero();
    for (std::int64_t i = 0; i < count; i += kLanes) size = larger_size(size, load(x + i));
    const float most = largest_size(size);
    const Divisor<kFixed> divisor(most, fixed_scale);
    GroupCodes result = {divisor.scale, 0};
    if (!has_codes<kFixed>(most, result.scale)) {
        for (std::int64_t i = 0; i < count; i += kLanes) store_i8(codes + i, zero());
        return result;
    }
    Vec total = zero();
    for (std::int64_t i = 0; i < count; i += kLanes) {
        const Vec code = divisor.code(load(x + i));
        total = total + code;
        store_i8(codes + i, code);
    }
    result.sum = static_cast<std::int32_t>(sum(total));
    return result;
}

// Any group: `count` features from `begin` on, `padded` with padding.
template <bool kFixed>
GroupCodes quantize_group(const float* x, const std::int32_t* permutation, std::int64_t begin, std::int64_t count,
                          std::int64_t padded, float fixed_scale, std::int8_t* codes) {
    Vec size = zero();
    for (std::int64_t i = 0; i < count; i += kLanes) {
        size = larger_size(size, take(x, permutation, begin + i, count - i < kLanes ? static_cast<int>(count - i) : kLanes));
    }
    const float most = largest_size(size);
    const Divisor<kFixed> divisor(most, fixed_scale);
    GroupCodes result = {divisor.scale, 0};
    if (!has_codes<kFixed>(most, result.scale)) {
        std::memset(codes, 0, static_cast<std::size_t>(padded));
        return result;
    }
    Vec total = zero();
    for (std::int64_t i = 0; i < padded; i += kLanes) {
        const std::int64_t left = count - i;
        const Vec value = take(x, permutation, begin + i, left < kLanes ? static_cast<int>(left) : kLanes);
        const Vec code = divisor.code(value);
        total = total + code;
        if (padded - i >= kLanes) {
            store_i8(codes + i, code);
        } else {
            std::int8_t last[kLanes];
            store_i8(last, code);
            std::memcpy(codes + i, last, 8);
        }
    }
    result.sum = static_cast<std::int32_t>(sum(total));
    return result;
}

// Sixteen whole groups side by side: no reduction waits for another, and two divisions serve them all. Returns false,
// having written nothing, if one of them has no codes.
bool quantize_sixteen(const float* x, std::int64_t group, std::int8_t* codes, float* scales, std::int32_t* sums) {
    Vec sizes[kLanes];
    for (int g = 0; g < kLanes; ++g) {
        sizes[g] = zero();
        for (std::int64_t i = 0; i < group; i += kLanes) sizes[g] = larger_size(sizes[g], load(x + g * group + i));
    }
    const Vec most = largest_sizes(sizes);
    float each[kLanes];
    store(each, most);
    bool usable = true;
    for (int g = 0; g < kLanes; ++g) usable &= each[g] >= kSmallest && each[g] <= kLargest;
    if (!usable) return false;
    float factors[kLanes];
    store(factors, broadcast(127.0f) / most);
    store(scales, most / broadcast(127.0f));
    CodeSum totals[kLanes];
    for (int g = 0; g < kLanes; ++g) {
        const Vec factor = broadcast(factors[g]);
        CodeSum total;
        for (std::int64_t i = g * group; i < (g + 1) * group; i += kLanes) {
            total.store_i8(codes + i, load(x + i) * factor);
        }
        totals[g] = total;
    }
    store_sums(sums, totals);
    return true;
}

template <bool kFixed>
void quantize_range(ConstRows x, std::int64_t features, std::int64_t group, const std::int32_t* permutation,
                    float fixed_scale, const QuantizedRows& out, std::int64_t row_begin, std::int64_t row_end) {
    for (std::int64_t row = row_begin; row < row_end; ++row) {
        const float* values = x.data + row * x.stride;
        std::int8_t* codes = out.codes + row * out.stride;
        std::int64_t g = 0;
        if (!kFixed && permutation == nullptr && group % kLanes == 0) {
            for (; (g + kLanes) * group <= features; g += kLanes) {
                const std::int64_t at = row * out.groups + g;
                if (!quantize_sixteen(values + g * group, group, codes, out.scales + at, out.sums + at)) break;
                codes += kLanes * group;
            }
        }
        for (; g < out.groups; ++g) {
            const std::int64_t begin = g * group;
            const std::int64_t count = features - begin < group ? features - begin : group;
            const std::int64_t padded = padded_group(count);
            const GroupCodes result =
                permutation == nullptr && count % kLanes == 0
                    ? quantize_whole<kFixed>(values + begin, count, fixed_scale, codes)
                    : quantize_group<kFixed>(values, permutation, begin, count, padded, fixed_scale, codes);
            out.scales[row * out.groups + g] = result.scale;
            out.sums[row * out.groups + g] = result.sum;
            codes += padded;
        }
    }
}

}  // namespace

void quantize_rows(ConstRows x, std::int64_t features, std::int64_t group, const std::int32_t* permutation,
                   float fixed_scale, const QuantizedRows& out, std::int64_t row_begin, std::int64_t row_end) {
    const auto run = fixed_scale > 0.0f ? quantize_range<true> : quantize_range<false>;
    run(x, features, group, permutation, fixed_scale, out, row_begin, row_end);
}

}  // namespace optimc::OPTIMC_ISA

// The expression evaluator: a row in chunks of columns that stay in the L1 cache, one loop per step and chunk.
#include "kernels/elementwise.h"

#include <cassert>

#include "kernels/declarations.h"
#include "kernels/vec_math.h"

namespace optimc::OPTIMC_ISA {

namespace {

constexpr int kChunk = 128;

// out[i] = f(a[i]) for i < count, rounded up to whole vectors.
template <class Function>
void map(float* out, const float* a, int count, Function f) {
    for (int i = 0; i < count; i += kLanes) store(out + i, f(load(a + i)));
}
template <class Function>
void map(float* out, const float* a, const float* b, int count, Function f) {
    for (int i = 0; i < count; i += kLanes) store(out + i, f(load(a + i), load(b + i)));
}

// The C library, lane by lane.
template <class Function>
Vec by_lane(Vec a, Function f) {
    float lanes[kLanes];
    store(lanes, a);
    for (float& lane : lanes) lane = f(lane);
    return load(lanes);
}

Vec power(Vec a, Vec b) {
    float base[kLanes], exponent[kLanes];
    store(base, a);
    store(exponent, b);
    for (int i = 0; i < kLanes; ++i) base[i] = __builtin_powf(base[i], exponent[i]);
    return load(base);
}

// Unlike `exp`, infinite where float32 overflows, and from e^88.3 on.
Vec full_exp(Vec x) { return where_less(broadcast(88.3f), x, broadcast(__builtin_inff()), exp(x)); }

// log(1 + e^x).
Vec softplus(Vec x) {
    const Vec tail = by_lane(exp(zero() - abs(x)), [](float e) { return __builtin_log1pf(e); });
    return max(zero(), x) + tail;
}

Vec negated(Vec x) { return broadcast(-0.0f) - x; }

// `source` where it can be read in whole vectors, else a copy in `buffer`, padded with zeros.
const float* readable(const float* source, int count, float* buffer) {
    if (count % kLanes == 0) return source;
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(buffer + i, load(source + i));
    store(buffer + i, load_first(source + i, count - i));
    return buffer;
}

// Applies a step that is neither input nor constant.
void apply(ElementwiseOp op, const float* a, const float* b, int count, float* out) {
    switch (op) {
        case ElementwiseOp::add: return map(out, a, b, count, [](Vec x, Vec y) { return x + y; });
        case ElementwiseOp::sub: return map(out, a, b, count, [](Vec x, Vec y) { return x - y; });
        case ElementwiseOp::mul: return map(out, a, b, count, [](Vec x, Vec y) { return x * y; });
        case ElementwiseOp::div: return map(out, a, b, count, [](Vec x, Vec y) { return x / y; });
        // NaN on either side stays NaN.
        case ElementwiseOp::min: return map(out, a, b, count, [](Vec x, Vec y) { return where_nan(x, x, min(x, y)); });
        case ElementwiseOp::max: return map(out, a, b, count, [](Vec x, Vec y) { return where_nan(x, x, max(x, y)); });
        case ElementwiseOp::pow: return map(out, a, b, count, power);
        case ElementwiseOp::neg: return map(out, a, count, negated);
        case ElementwiseOp::abs: return map(out, a, count, [](Vec x) { return abs(x); });
        case ElementwiseOp::sqrt: return map(out, a, count, [](Vec x) { return sqrt(x); });
        case ElementwiseOp::reciprocal: return map(out, a, count, [](Vec x) { return broadcast(1.0f) / x; });
        case ElementwiseOp::exp: return map(out, a, count, full_exp);
        case ElementwiseOp::log:
            return map(out, a, count, [](Vec x) { return by_lane(x, [](float v) { return __builtin_logf(v); }); });
        case ElementwiseOp::sigmoid: return map(out, a, count, sigmoid);
        case ElementwiseOp::silu: return map(out, a, count, silu);
        case ElementwiseOp::tanh: return map(out, a, count, tanh);
        case ElementwiseOp::erf: return map(out, a, count, erf);
        case ElementwiseOp::gelu: return map(out, a, count, gelu);
        case ElementwiseOp::gelu_tanh: return map(out, a, count, gelu_tanh);
        case ElementwiseOp::relu: return map(out, a, count, [](Vec x) { return max(zero(), x); });
        case ElementwiseOp::softplus: return map(out, a, count, softplus);
        case ElementwiseOp::sin:
            return map(out, a, count, [](Vec x) { return by_lane(x, [](float v) { return __builtin_sinf(v); }); });
        case ElementwiseOp::cos:
            return map(out, a, count, [](Vec x) { return by_lane(x, [](float v) { return __builtin_cosf(v); }); });
        case ElementwiseOp::rows:
        case ElementwiseOp::vector:
        case ElementwiseOp::constant: break;
    }
    assert(false);
}

// What steps came to in one chunk; constants are filled in once.
struct Values {
    const float* of[kMaxElementwiseSteps];
    alignas(64) float buffers[kMaxElementwiseSteps][kChunk];
};

bool is_square(const ElementwiseStep* steps, const ElementwiseStep& step) {
    return step.op == ElementwiseOp::pow && steps[step.b].op == ElementwiseOp::constant && steps[step.b].value == 2.0f;
}

// Columns [column, column + count) of a row; count is at most kChunk.
void evaluate(const Elementwise& e, std::int64_t row, std::int64_t column, int count, Values& values) {
    const ElementwiseStep* steps = e.steps.data();
    const int last = static_cast<int>(e.steps.size()) - 1;
    float* out = e.out.data + row * e.out.stride + column;
    const bool whole = count % kLanes == 0;
    for (int i = 0; i <= last; ++i) {
        const ElementwiseStep& step = steps[i];
        float* buffer = i == last && whole ? out : values.buffers[i];
        if (step.op == ElementwiseOp::rows) {
            const ConstRows& input = e.inputs.data()[step.a];
            values.of[i] = readable(input.data + row * input.stride + column, count, buffer);
        } else if (step.op == ElementwiseOp::vector) {
            values.of[i] = readable(e.vectors.data()[step.a] + column, count, buffer);
        } else if (step.op == ElementwiseOp::constant) {
            values.of[i] = values.buffers[i];
        } else {
            const float* a = values.of[step.a];
            if (is_square(steps, step)) {
                apply(ElementwiseOp::mul, a, a, count, buffer);
            } else {
                apply(step.op, a, is_binary(step.op) ? values.of[step.b] : nullptr, count, buffer);
            }
            values.of[i] = buffer;
        }
    }
    const float* result = values.of[last];
    if (result == out) return;
    for (int i = 0; i < count; i += kLanes) {
        store_first(out + i, load(result + i), count - i < kLanes ? count - i : kLanes);
    }
}

}  // namespace

void elementwise(const Elementwise& expression, std::int64_t row_begin, std::int64_t row_end) {
    const int num_steps = static_cast<int>(expression.steps.size());
    assert(0 < num_steps && num_steps <= kMaxElementwiseSteps);
    Values values;
    for (int i = 0; i < num_steps; ++i) {
        const ElementwiseStep& step = expression.steps.data()[i];
        if (step.op != ElementwiseOp::constant) continue;
        for (float& element : values.buffers[i]) element = step.value;
    }
    for (std::int64_t row = row_begin; row < row_end; ++row) {
        for (std::int64_t column = 0; column < expression.width; column += kChunk) {
            const std::int64_t left = expression.width - column;
            evaluate(expression, row, column, left < kChunk ? static_cast<int>(left) : kChunk, values);
        }
    }
}

}  // namespace optimc::OPTIMC_ISA

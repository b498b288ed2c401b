#include <cmath>
#include <limits>

#include "kernels/reference/elementwise_reference.h"
#include "kernels/select.h"
#include "tests/check.h"
#include "tests/memory_edge.h"
#include "tests/test_rows.h"

namespace optimc::test {

namespace {

using Op = ElementwiseOp;

constexpr Op kBinary[] = {Op::add, Op::sub, Op::mul, Op::div, Op::min, Op::max, Op::pow};
constexpr Op kUnary[] = {Op::neg, Op::abs, Op::sqrt, Op::reciprocal, Op::exp, Op::log, Op::sigmoid, Op::silu,
                         Op::tanh, Op::erf, Op::gelu, Op::gelu_tanh, Op::relu, Op::softplus, Op::sin, Op::cos};

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

ElementwiseStep input(int i) { return {Op::rows, i, 0, 0}; }
ElementwiseStep vector_of(int i) { return {Op::vector, i, 0, 0}; }
ElementwiseStep number(float value) { return {Op::constant, 0, 0, value}; }
// Operand b of a unary step is never read: an index out of range proves it.
ElementwiseStep unary(Op op, int a) { return {op, a, -1, 0}; }
ElementwiseStep binary(Op op, int a, int b) { return {op, a, b, 0}; }

// An expression with what it reads.
struct Expression {
    Elementwise to(Rows out) {
        input_rows.clear();
        for (TestRows& rows : inputs) input_rows.push_back(rows.const_rows());
        vector_data.clear();
        for (TestRows& row : vectors) vector_data.push_back(row.rows().data);
        return {steps, input_rows, vector_data, width, out};
    }
    TestRows run(const Kernels& kernels, std::int64_t rows) {
        TestRows out(rows, width, 2);
        kernels.elementwise(to(out.rows()), 0, rows);
        return out;
    }

    std::int64_t width;
    std::vector<ElementwiseStep> steps;
    std::vector<TestRows> inputs;
    std::vector<TestRows> vectors;
    std::vector<ConstRows> input_rows;
    std::vector<const float*> vector_data;
};

// 3 ulp is 3.6e-7 of the result at most; gelu's bound is against its argument.
bool close(float got, double want, double argument) {
    if (std::isnan(want)) return std::isnan(got);
    if (std::isinf(static_cast<float>(want))) return got == static_cast<float>(want);
    return std::fabs(got - want) <= 4e-7 * std::fmax(std::fabs(want), std::fabs(argument)) + 1e-38;
}

void check_op(Op op, bool is_binary, const TestRows& a, const TestRows& b, std::int64_t width) {
    Expression e{width, {input(0)}, {a}, {}, {}, {}};
    if (is_binary) {
        e.steps = {input(0), input(1), binary(op, 0, 1)};
        e.inputs = {a, b};
    } else {
        e.steps.push_back(unary(op, 0));
    }
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows got = e.run(kernels_of(set), 3);
        for (std::int64_t r = 0; r < 3; ++r) {
            for (std::int64_t c = 0; c < width; ++c) {
                const double want = reference::evaluate(e.to(got.rows()), r, c);
                const float x = e.inputs[0].at(r, c);
                CHECK_MESSAGE(close(got.at(r, c), want, std::isfinite(x) ? x : 0),
                              std::string(name_of(set)) + " op " + std::to_string(static_cast<int>(op)) + " of " +
                                  std::to_string(x) + ": " + std::to_string(got.at(r, c)) + ", want " +
                                  std::to_string(want));
            }
        }
        CHECK_MESSAGE(got.gaps_intact(), name_of(set));
        for (std::int64_t c = 0; op == Op::neg && c < width; ++c) {
            const float x = e.inputs[0].at(0, c);
            if (!std::isnan(x)) CHECK_MESSAGE(std::signbit(got.at(0, c)) != std::signbit(x), name_of(set));
        }
    }
}

// (silu(input 0) * input 1 + vector 0) * 1.5
Expression gated(std::int64_t rows, std::int64_t width) {
    return {width,
            {input(0), unary(Op::silu, 0), input(1), binary(Op::mul, 1, 2), vector_of(0), binary(Op::add, 3, 4),
             number(1.5f), binary(Op::mul, 5, 6)},
            {TestRows::random(rows, width, 1, 1), TestRows::random(rows, width, 4, 2)},
            {TestRows::random(1, width, 0, 3)},
            {},
            {}};
}

}  // namespace

TEST("elementwise: every operation equals the reference at odd widths") {
    for (std::int64_t width : {1, 16, 31, 128, 129, 300}) {
        const TestRows a = TestRows::random(3, width, 2, 1, 3), b = TestRows::random(3, width, 5, 2);
        for (Op op : kBinary) check_op(op, true, a, b, width);
        for (Op op : kUnary) check_op(op, false, a, b, width);
    }
}

TEST("elementwise: NaN, infinities and zeros come out as IEEE arithmetic has them") {
    const float special[] = {0, -0.0f, kNaN, kInf, -kInf, 1, -1, 89, -89};
    TestRows a(3, 81), b(3, 81);
    for (std::int64_t r = 0; r < 3; ++r) {
        for (std::int64_t i = 0; i < 81; ++i) {
            a.at(r, i) = special[i / 9];
            b.at(r, i) = special[i % 9];
        }
    }
    for (Op op : kBinary) check_op(op, true, a, b, 81);
    for (Op op : kUnary) {
        // The gates of -infinity are NaN or huge, depending on how they are written; both stay visible.
        TestRows finite_left = a;
        if (op == Op::silu || op == Op::gelu || op == Op::gelu_tanh) {
            for (std::int64_t r = 0; r < 3; ++r)
                for (std::int64_t i = 36; i < 45; ++i) finite_left.at(r, i) = -88;
        }
        check_op(op, false, finite_left, b, 81);
    }
}

TEST("elementwise: expressions of rows, vectors and numbers equal the reference") {
    Expression e = gated(3, 150);
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows got = e.run(kernels_of(set), 3);
        for (std::int64_t r = 0; r < 3; ++r) {
            for (std::int64_t c = 0; c < 150; ++c) {
                // Sums of terms of size about 1 may cancel.
                CHECK_MESSAGE(close(got.at(r, c), reference::evaluate(e.to(got.rows()), r, c), 4), name_of(set));
            }
        }
    }
}

TEST("elementwise: a square is the product, whatever the sign") {
    Expression e{40, {input(0), number(2), binary(Op::pow, 0, 1)}, {TestRows::random(2, 40, 0, 5)}, {}, {}, {}};
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows got = e.run(kernels_of(set), 2);
        for (std::int64_t c = 0; c < 40; ++c) {
            const float x = e.inputs[0].at(1, c);
            CHECK_MESSAGE(got.at(1, c) == x * x, name_of(set));
        }
    }
}

TEST("elementwise: as many steps as allowed, and results that are an input, a vector or a number") {
    for (InstructionSet set : supported_instruction_sets()) {
        Expression e{37, {input(0)}, {TestRows::random(2, 37, 1, 6)}, {TestRows::random(1, 37, 0, 7)}, {}, {}};
        CHECK_MESSAGE(e.run(kernels_of(set), 2).at(1, 36) == e.inputs[0].at(1, 36), name_of(set));
        e.width = 32;
        CHECK_MESSAGE(e.run(kernels_of(set), 2).at(1, 31) == e.inputs[0].at(1, 31), name_of(set));
        e.steps = {vector_of(0)};
        CHECK_MESSAGE(e.run(kernels_of(set), 2).at(1, 30) == e.vectors[0].at(0, 30), name_of(set));
        e.steps = {number(2.5f)};
        CHECK_MESSAGE(e.run(kernels_of(set), 2).at(1, 3) == 2.5f, name_of(set));
        e.steps = {input(0), number(0.5f)};
        while (e.steps.size() < kMaxElementwiseSteps) {
            e.steps.push_back(binary(Op::add, static_cast<int>(e.steps.size()) - 1, 1));
        }
        float want = 0.5f;
        for (int i = 2; i < kMaxElementwiseSteps; ++i) want += 0.5f;
        CHECK_MESSAGE(e.run(kernels_of(set), 2).at(0, 9) == want, name_of(set));
    }
}

TEST("elementwise: bits do not depend on the range of rows, and a range writes its rows only") {
    Expression e = gated(9, 203);
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows whole = e.run(kernels_of(set), 9);
        TestRows parts(9, 203, 2);
        kernels_of(set).elementwise(e.to(parts.rows()), 3, 4);
        for (std::int64_t c = 0; c < 203; ++c) CHECK_MESSAGE(parts.at(2, c) == 0 && parts.at(4, c) == 0, name_of(set));
        kernels_of(set).elementwise(e.to(parts.rows()), 0, 3);
        kernels_of(set).elementwise(e.to(parts.rows()), 4, 9);
        CHECK_MESSAGE(parts.all() == whole.all(), name_of(set));
    }
}

TEST("elementwise: nothing is touched beyond the last column") {
    for (std::int64_t width : {1, 17, 127, 130}) {
        const auto size = static_cast<std::size_t>(width);
        Expression e = gated(1, width);
        MemoryEdge first(4 * size), second(4 * size), vector(4 * size), out(4 * size);
        const ConstRows inputs[] = {{first.copy(e.inputs[0].rows().data, size), width},
                                    {second.copy(e.inputs[1].rows().data, size), width}};
        const float* const vectors[] = {vector.copy(e.vectors[0].rows().data, size)};
        for (InstructionSet set : supported_instruction_sets()) {
            TestRows want = e.run(kernels_of(set), 1);
            auto* const got = out.last<float>(size);
            kernels_of(set).elementwise({e.steps, inputs, vectors, width, {got, width}}, 0, 1);
            for (std::int64_t c = 0; c < width; ++c) CHECK_MESSAGE(got[c] == want.at(0, c), name_of(set));
        }
    }
}

TEST("elementwise: the output may be one of the inputs") {
    for (std::size_t which : {0u, 1u}) {
        Expression e = gated(4, 140);
        for (InstructionSet set : supported_instruction_sets()) {
            TestRows apart = e.run(kernels_of(set), 4);
            Expression in_place = gated(4, 140);
            kernels_of(set).elementwise(in_place.to(in_place.inputs[which].rows()), 0, 4);
            for (std::int64_t r = 0; r < 4; ++r) {
                for (std::int64_t c = 0; c < 140; ++c) {
                    CHECK_MESSAGE(in_place.inputs[which].at(r, c) == apart.at(r, c), name_of(set));
                }
            }
            CHECK_MESSAGE(in_place.inputs[which].gaps_intact(), name_of(set));
        }
    }
}

}  // namespace optimc::test

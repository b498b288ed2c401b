#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/linear_float_reference.h"
#include "kernels/select.h"
#include "tests/check.h"
#include "tests/float_weight.h"
#include "tests/memory_edge.h"
#include "tests/test_rows.h"

namespace optimc::test {

namespace {

constexpr FloatType kTypes[] = {FloatType::float32, FloatType::bfloat16, FloatType::float16};
constexpr Gate kGates[] = {Gate::silu, Gate::gelu, Gate::gelu_tanh, Gate::relu, Gate::sigmoid};

// Accumulating 600 float32 products loses about sqrt(600) half ulps of the largest partial sum.
constexpr double kTolerance = 3e-6;

std::int64_t stored_outputs(std::int64_t outputs, Gate gate) {
    if (gate == Gate::none) return outputs;
    return (outputs + kPanelRows - 1) / kPanelRows * 2 * kPanelRows;
}

// A product with everything it reads, and its result.
struct Product {
    Product(FloatType type, std::int64_t m, std::int64_t n, std::int64_t c, Gate gate_, bool has_bias,
            bool has_residual)
        : rows(m), outputs(n), gate(gate_), weight(type, stored_outputs(n, gate_), c, 7),
          x(TestRows::random(m, c, 3, 8)), residual(TestRows::random(m, n, 4, 9)),
          bias(TestRows::random(1, weight.get().panels() * kPanelRows, 0, 10)), with_bias(has_bias),
          with_residual(has_residual) {}

    Epilogue epilogue(TestRows& out) {
        return {out.rows(), outputs, with_bias ? bias.rows().data : nullptr,
                with_residual ? residual.const_rows() : ConstRows{nullptr, 0}, gate};
    }
    TestRows empty() const { return TestRows(rows, outputs, 5); }
    TestRows expected() {
        TestRows out = empty();
        reference::linear_float(weight.get(), x.const_rows(), epilogue(out), rows);
        return out;
    }
    void run(const Kernels& kernels, TestRows& out, std::int64_t row_begin, std::int64_t row_end,
             std::int64_t panel_begin, std::int64_t panel_end) {
        kernels.linear_float(weight.get(), x.const_rows(), epilogue(out), row_begin, row_end, panel_begin, panel_end);
    }
    TestRows run(const Kernels& kernels) {
        TestRows out = empty();
        run(kernels, out, 0, rows, 0, weight.get().panels());
        return out;
    }

    std::int64_t rows, outputs;
    Gate gate;
    TestFloatWeight weight;
    TestRows x, residual, bias;
    bool with_bias, with_residual;
};

void check_against_reference(Product& product, const std::string& what) {
    const TestRows want = product.expected();
    for (InstructionSet set : supported_instruction_sets()) {
        const TestRows got = product.run(kernels_of(set));
        const double error = relative_error(got.all().data(), want.all().data(), got.all().size());
        CHECK_MESSAGE(error < kTolerance, std::string(name_of(set)) + " " + what + ": error " + std::to_string(error));
        CHECK_MESSAGE(got.gaps_intact(), std::string(name_of(set)) + " " + what + ": wrote between rows");
    }
}

}  // namespace

TEST("linear_float: equals the reference for every type, odd shapes and every number of rows in a tile") {
    for (FloatType type : kTypes) {
        for (std::int64_t n : {1, 31, 32, 33, 97}) {
            for (std::int64_t c : {1, 7, 576}) {
                for (std::int64_t m : {1, 2, 5}) {
                    Product product(type, m, n, c, Gate::none, true, true);
                    check_against_reference(product, "N " + std::to_string(n) + " C " + std::to_string(c));
                }
            }
        }
        for (std::int64_t m = 1; m <= 26; ++m) {
            Product product(type, m, 40, 33, Gate::none, false, false);
            check_against_reference(product, "M " + std::to_string(m));
        }
    }
}

TEST("linear_float: bias and residual are each optional") {
    for (bool bias : {false, true}) {
        for (bool residual : {false, true}) {
            Product product(FloatType::float32, 4, 70, 100, Gate::none, bias, residual);
            check_against_reference(product, "bias and residual");
        }
    }
}

TEST("linear_float: gates act on the panel before theirs") {
    for (Gate gate : kGates) {
        for (std::int64_t n : {1, 31, 64, 65}) {
            for (bool bias : {false, true}) {
                Product product(FloatType::bfloat16, 13, n, 96, gate, bias, false);
                check_against_reference(product, "gate " + std::to_string(static_cast<int>(gate)));
            }
        }
    }
}

TEST("linear_float: an output is one chain of multiply-adds over the features in order") {
    for (FloatType type : kTypes) {
        Product product(type, 14, 33, 300, Gate::none, false, false);
        const FloatWeight& weight = product.weight.get();
        for (InstructionSet set : supported_instruction_sets()) {
            TestRows got = product.run(kernels_of(set));
            for (std::int64_t m = 0; m < product.rows; ++m) {
                for (std::int64_t n = 0; n < product.outputs; ++n) {
                    float chain = 0;
                    for (std::int64_t c = 0; c < weight.features; ++c) {
                        const float a = product.x.at(m, c), w = reference::weight_element(weight, n, c);
                        chain = set == InstructionSet::portable ? a * w + chain : std::fma(a, w, chain);
                    }
                    CHECK_MESSAGE(got.at(m, n) == chain, name_of(set));
                }
            }
        }
    }
}

TEST("linear_float: bits depend neither on the batch nor on ranges of rows and panels") {
    for (FloatType type : kTypes) {
        for (Gate gate : {Gate::none, Gate::gelu}) {
            Product product(type, 29, 150, 77, gate, true, gate == Gate::none);
            const std::int64_t panels = product.weight.get().panels();
            const std::int64_t unit = gate == Gate::none ? 1 : 2;
            for (InstructionSet set : supported_instruction_sets()) {
                const Kernels& kernels = kernels_of(set);
                const TestRows whole = product.run(kernels);
                for (std::int64_t row_step : {1, 4, 13}) {
                    for (std::int64_t panel_step : {unit, 2 * unit}) {
                        TestRows parts = product.empty();
                        for (std::int64_t row = 0; row < product.rows; row += row_step) {
                            for (std::int64_t panel = 0; panel < panels; panel += panel_step) {
                                product.run(kernels, parts, row, std::min(row + row_step, product.rows), panel,
                                            std::min(panel + panel_step, panels));
                            }
                        }
                        CHECK_MESSAGE(parts.all() == whole.all(), name_of(set));
                    }
                }
            }
        }
    }
}

TEST("linear_float: a range writes its own rows and panels, nothing else") {
    Product product(FloatType::float32, 9, 120, 20, Gate::none, true, true);
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows whole = product.run(kernels_of(set));
        TestRows part = product.empty();
        product.run(kernels_of(set), part, 2, 7, 1, 3);
        for (std::int64_t m = 0; m < product.rows; ++m) {
            for (std::int64_t n = 0; n < product.outputs; ++n) {
                const bool inside = 2 <= m && m < 7 && 32 <= n && n < 96;
                CHECK_MESSAGE(part.at(m, n) == (inside ? whole.at(m, n) : 0.0f), name_of(set));
            }
        }
        CHECK_MESSAGE(part.gaps_intact(), name_of(set));
    }
}

TEST("linear_float: the output may lie where the residual is") {
    Product product(FloatType::bfloat16, 7, 50, 40, Gate::none, true, true);
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows apart = product.run(kernels_of(set));
        TestRows in_place = product.residual;
        Epilogue epilogue = product.epilogue(in_place);
        epilogue.residual = in_place.const_rows();
        kernels_of(set).linear_float(product.weight.get(), product.x.const_rows(), epilogue, 0, 7, 0, 2);
        for (std::int64_t m = 0; m < 7; ++m) {
            for (std::int64_t n = 0; n < 50; ++n) CHECK_MESSAGE(in_place.at(m, n) == apart.at(m, n), name_of(set));
        }
    }
}

TEST("linear_float: NaN and infinity in a row reach all of its outputs and no others") {
    for (float poison : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        Product product(FloatType::float16, 8, 40, 24, Gate::none, true, true);
        product.x.at(5, 11) = poison;
        for (InstructionSet set : supported_instruction_sets()) {
            TestRows got = product.run(kernels_of(set));
            for (std::int64_t m = 0; m < 8; ++m) {
                for (std::int64_t n = 0; n < 40; ++n) {
                    CHECK_MESSAGE(std::isfinite(got.at(m, n)) == (m != 5), name_of(set));
                }
            }
        }
    }
}

TEST("linear_float: nothing is touched beyond the weight, the last activation and the last output") {
    for (FloatType type : kTypes) {
        const std::int64_t n = 45, c = 19;
        Product product(type, 1, n, c, Gate::none, true, true);
        const std::size_t bytes = static_cast<std::size_t>(64 * c) * reference::element_bytes(type);
        MemoryEdge data(bytes), x(4 * c), bias(4 * 64), residual(4 * n), out(4 * n);
        FloatWeight weight = product.weight.get();
        weight.data = data.copy(static_cast<const char*>(weight.data), bytes);
        auto* const got = out.last<float>(n);
        const Epilogue epilogue = {{got, n}, n, bias.copy(product.bias.rows().data, 64),
                                   {residual.copy(product.residual.rows().data, n), n}, Gate::none};
        for (InstructionSet set : supported_instruction_sets()) {
            TestRows want = product.run(kernels_of(set));
            kernels_of(set).linear_float(weight, {x.copy(product.x.rows().data, c), c}, epilogue, 0, 1, 0, 2);
            for (std::int64_t i = 0; i < n; ++i) CHECK_MESSAGE(got[i] == want.at(0, i), name_of(set));
        }
    }
}

TEST("linear_float: an empty range does nothing") {
    Product product(FloatType::float32, 3, 40, 8, Gate::none, true, true);
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows out = product.empty();
        product.run(kernels_of(set), out, 1, 1, 0, 2);
        product.run(kernels_of(set), out, 0, 3, 1, 1);
        CHECK_MESSAGE(out.all() == product.empty().all(), name_of(set));
    }
}

}  // namespace optimc::test

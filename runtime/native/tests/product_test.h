// What every product with integer weights must show: its reference's values, and the same bits however it is cut.
#pragma once

#include <cstdlib>

#include "isa/instruction_set.h"
#include "kernels/kernels.h"
#include "kernels/select.h"
#include "tests/check.h"
#include "tests/int_shapes.h"
#include "tests/test_rows.h"

namespace optimc::test {

constexpr std::int64_t kProductRows = 67;

struct Ranges {
    std::int64_t row_begin, row_end, panel_begin, panel_end;
};

class Scratch {
public:
    explicit Scratch(const Kernels& kernels)
        : data_(static_cast<std::byte*>(std::aligned_alloc(64, (kernels.linear_int_exact_scratch() + 64) / 64 * 64))) {}
    ~Scratch() { std::free(data_); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    std::byte* data() const { return data_; }

private:
    std::byte* data_;
};

// reference(epilogue) computes all kProductRows rows, run(kernels, epilogue, ranges, scratch) a part of them.
template <class Reference, class Run>
void expect_product(const IntShape& shape, const IntWeight& weight, const std::string& what, Reference reference,
                    Run run) {
    const std::int64_t outputs = shape.outputs;
    const TestRows residual = TestRows::random(kProductRows, outputs, 5, 7);
    TestRows bias = TestRows::random(1, weight.panels() * kPanelRows, 0, 8);
    const auto epilogue = [&](TestRows& out) {
        return Epilogue{out.rows(), outputs, shape.bias ? bias.rows().data : nullptr,
                        shape.residual ? residual.const_rows() : ConstRows{nullptr, 0}, shape.gate};
    };
    TestRows want(kProductRows, outputs, 3);
    reference(epilogue(want));

    for (InstructionSet set : supported_instruction_sets()) {
        const Kernels& kernels = kernels_of(set);
        const std::string where = what + ", " + kernels.name;
        const Scratch scratch(kernels);
        // Row by row: what every other cut must repeat.
        TestRows alone(kProductRows, outputs, 3);
        for (std::int64_t m = 0; m < kProductRows; ++m) {
            run(kernels, epilogue(alone), {m, m + 1, 0, weight.panels()}, scratch.data());
        }
        CHECK_MESSAGE(alone.gaps_intact(), where + ": wrote beyond its rows");
        const double error = relative_error(alone.all().data(), want.all().data(), want.all().size());
        CHECK_MESSAGE(error < 1e-9 * weight.features + 3e-7, where + ": relative error " + std::to_string(error));

        const std::int64_t step = shape.gate == Gate::none ? 1 : 2;
        for (std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 16, 17, 64, 65}) {
            // Rows 1.. in one piece, panel by panel from the last.
            for (std::int64_t first : {0, 1}) {
                TestRows got(kProductRows, outputs, 3);
                const std::int64_t panels = first == 0 ? weight.panels() : step;
                for (std::int64_t panel = weight.panels() - panels; panel >= 0; panel -= panels) {
                    run(kernels, epilogue(got), {first, first + rows, panel, panel + panels}, scratch.data());
                }
                bool same = true;
                for (std::int64_t m = 0; m < kProductRows; ++m) {
                    const bool written = m >= first && m < first + rows;
                    for (std::int64_t n = 0; n < outputs; ++n) {
                        const float expected = written ? alone.at(m, n) : 0;
                        same = same && std::memcmp(&got.at(m, n), &expected, 4) == 0;
                    }
                }
                CHECK_MESSAGE(same, where + ": M = " + std::to_string(rows) + " differs from M = 1");
                CHECK_MESSAGE(got.gaps_intact(), where + ": wrote beyond its rows");
            }
        }
    }
}

}  // namespace optimc::test

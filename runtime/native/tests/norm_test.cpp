#include <cmath>
#include <limits>

#include "kernels/reference/norm_reference.h"
#include "kernels/select.h"
#include "tests/check.h"
#include "tests/memory_edge.h"
#include "tests/test_rows.h"

namespace optimc::test {

namespace {

// A few roundings of each element, and half an ulp from the mean of squares.
constexpr double kTolerance = 2e-6;

struct NormCase {
    NormCase(std::int64_t m, std::int64_t width, std::int64_t heads, bool centred, bool with_bias, float offset = 0)
        : rows(m), columns(width * heads), weight(TestRows::random(1, width, 0, 1)),
          bias(TestRows::random(1, width, 0, 2)), x(TestRows::random(m, columns, 3, 3)),
          before(TestRows::random(m, columns, 4, 4)), after(TestRows::random(m, columns, 5, 5)),
          norm{weight.rows().data, with_bias ? bias.rows().data : nullptr, 1e-5f, width, heads, centred} {
        for (std::int64_t r = 0; r < m; ++r)
            for (std::int64_t c = 0; c < columns; ++c) x.at(r, c) += offset;
    }

    TestRows empty() const { return TestRows(rows, columns, 6); }

    std::int64_t rows, columns;
    TestRows weight, bias, x, before, after;
    Norm norm;
};

constexpr ConstRows kNone = {nullptr, 0};
constexpr Rows kNoSum = {nullptr, 0};

void check_against_reference(NormCase& c, bool with_before, bool with_after, bool with_sum, const std::string& what) {
    const ConstRows before = with_before ? c.before.const_rows() : kNone;
    const ConstRows after = with_after ? c.after.const_rows() : kNone;
    TestRows want = c.empty(), want_sum = c.empty();
    reference::norm(c.norm, c.x.const_rows(), before, after, with_sum ? want_sum.rows() : kNoSum, want.rows(), c.rows);
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows got = c.empty(), got_sum = c.empty();
        kernels_of(set).norm(c.norm, c.x.const_rows(), before, after, with_sum ? got_sum.rows() : kNoSum, got.rows(), 0,
                             c.rows);
        const double error = relative_error(got.all().data(), want.all().data(), got.all().size());
        CHECK_MESSAGE(error < kTolerance, std::string(name_of(set)) + " " + what + ": error " + std::to_string(error));
        CHECK_MESSAGE(got_sum.all() == want_sum.all(), std::string(name_of(set)) + " " + what + ": sum");
        CHECK_MESSAGE(got.gaps_intact() && got_sum.gaps_intact(), std::string(name_of(set)) + " " + what + ": gaps");
    }
}

}  // namespace

TEST("norm: RMSNorm and LayerNorm equal the reference at odd widths") {
    for (bool centred : {false, true}) {
        for (std::int64_t width : {1, 7, 15, 16, 17, 64, 65, 100, 128, 576}) {
            for (bool bias : {false, true}) {
                NormCase c(3, width, 1, centred, bias);
                check_against_reference(c, false, false, false, "width " + std::to_string(width));
            }
        }
    }
}

TEST("norm: additions before and after, and the stored sum, are each optional") {
    for (int options = 0; options < 8; ++options) {
        for (bool centred : {false, true}) {
            NormCase c(4, 90, 1, centred, true);
            check_against_reference(c, options & 1, options & 2, options & 4, "options " + std::to_string(options));
        }
    }
}

TEST("norm: each head of a row has its own statistics") {
    for (std::int64_t width : {5, 64, 80}) {
        NormCase c(3, width, 4, false, false);
        for (std::int64_t i = 0; i < width; ++i) c.x.at(1, width + i) *= 1000;
        check_against_reference(c, false, false, false, "heads of " + std::to_string(width));
        check_against_reference(c, true, true, true, "heads with additions");
    }
}

TEST("norm: LayerNorm keeps its precision far from zero") {
    // In one pass, E[x^2] - E[x]^2 would leave nothing of a variance of 1 beside a mean of 1000.
    NormCase c(2, 300, 1, true, false, 1000);
    const ConstRows x = c.x.const_rows();
    TestRows want = c.empty();
    reference::norm(c.norm, x, kNone, kNone, kNoSum, want.rows(), c.rows);
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows got = c.empty();
        kernels_of(set).norm(c.norm, x, kNone, kNone, kNoSum, got.rows(), 0, c.rows);
        // The mean itself is known to half an ulp of 1000, 3e-5.
        CHECK_MESSAGE(relative_error(got.all().data(), want.all().data(), got.all().size()) < 1e-4, name_of(set));
    }
}

TEST("norm: a row of zeros gives the bias, not NaN") {
    for (bool centred : {false, true}) {
        NormCase c(1, 20, 1, centred, true);
        for (std::int64_t i = 0; i < 20; ++i) c.x.at(0, i) = 0;
        for (InstructionSet set : supported_instruction_sets()) {
            TestRows got = c.empty();
            kernels_of(set).norm(c.norm, c.x.const_rows(), kNone, kNone, kNoSum, got.rows(), 0, 1);
            for (std::int64_t i = 0; i < 20; ++i) CHECK_MESSAGE(got.at(0, i) == c.bias.at(0, i), name_of(set));
        }
    }
}

TEST("norm: NaN reaches its whole head and no other") {
    NormCase c(2, 40, 3, false, false);
    c.x.at(1, 45) = std::numeric_limits<float>::quiet_NaN();
    for (InstructionSet set : supported_instruction_sets()) {
        TestRows got = c.empty();
        kernels_of(set).norm(c.norm, c.x.const_rows(), kNone, kNone, kNoSum, got.rows(), 0, 2);
        for (std::int64_t r = 0; r < 2; ++r) {
            for (std::int64_t i = 0; i < 120; ++i) {
                CHECK_MESSAGE(std::isnan(got.at(r, i)) == (r == 1 && 40 <= i && i < 80), name_of(set));
            }
        }
    }
}

TEST("norm: bits do not depend on the range of rows, and a range writes its rows only") {
    for (bool centred : {false, true}) {
        NormCase c(7, 75, 2, centred, true);
        for (InstructionSet set : supported_instruction_sets()) {
            const Kernels& kernels = kernels_of(set);
            TestRows whole = c.empty(), whole_sum = c.empty(), parts = c.empty(), parts_sum = c.empty();
            const auto run = [&](TestRows& sum, TestRows& out, std::int64_t begin, std::int64_t end) {
                kernels.norm(c.norm, c.x.const_rows(), c.before.const_rows(), c.after.const_rows(), sum.rows(),
                             out.rows(), begin, end);
            };
            run(whole_sum, whole, 0, 7);
            run(parts_sum, parts, 2, 3);
            for (std::int64_t i = 0; i < c.columns; ++i) {
                CHECK_MESSAGE(parts.at(1, i) == 0 && parts.at(3, i) == 0 && parts_sum.at(3, i) == 0, name_of(set));
            }
            run(parts_sum, parts, 0, 2);
            run(parts_sum, parts, 3, 7);
            CHECK_MESSAGE(parts.all() == whole.all() && parts_sum.all() == whole_sum.all(), name_of(set));
        }
    }
}

TEST("norm: nothing is touched beyond the last element") {
    for (std::int64_t width : {1, 17, 63, 70}) {
        const auto size = static_cast<std::size_t>(width);
        NormCase c(1, width, 1, true, true);
        MemoryEdge x(4 * size), before(4 * size), after(4 * size), sum(4 * size), out(4 * size);
        MemoryEdge weight(4 * size), bias(4 * size);
        Norm norm = c.norm;
        norm.weight = weight.copy(c.norm.weight, size);
        norm.bias = bias.copy(c.norm.bias, size);
        for (InstructionSet set : supported_instruction_sets()) {
            TestRows want = c.empty(), want_sum = c.empty();
            kernels_of(set).norm(c.norm, c.x.const_rows(), c.before.const_rows(), c.after.const_rows(), want_sum.rows(),
                                 want.rows(), 0, 1);
            auto* const got = out.last<float>(size);
            auto* const got_sum = sum.last<float>(size);
            kernels_of(set).norm(norm, {x.copy(c.x.rows().data, size), width},
                                 {before.copy(c.before.rows().data, size), width},
                                 {after.copy(c.after.rows().data, size), width}, {got_sum, width}, {got, width}, 0, 1);
            for (std::int64_t i = 0; i < width; ++i) {
                CHECK_MESSAGE(got[i] == want.at(0, i) && got_sum[i] == want_sum.at(0, i), name_of(set));
            }
        }
    }
}

TEST("norm: out may be x, sum, before or after, and sum may be x or before") {
    NormCase c(3, 50, 2, true, true);
    for (InstructionSet set : supported_instruction_sets()) {
        const auto norm = kernels_of(set).norm;
        const auto same_values = [&](TestRows& a, TestRows& b) {
            for (std::int64_t r = 0; r < c.rows; ++r)
                for (std::int64_t i = 0; i < c.columns; ++i)
                    if (a.at(r, i) != b.at(r, i)) return false;
            return true;
        };
        TestRows want = c.empty(), want_sum = c.empty();
        const ConstRows x = c.x.const_rows(), before = c.before.const_rows(), after = c.after.const_rows();
        norm(c.norm, x, before, after, want_sum.rows(), want.rows(), 0, 3);

        TestRows out = c.x;
        norm(c.norm, out.const_rows(), before, after, kNoSum, out.rows(), 0, 3);
        CHECK_MESSAGE(same_values(out, want), std::string(name_of(set)) + ": out is x");
        out = c.empty();
        norm(c.norm, x, before, after, out.rows(), out.rows(), 0, 3);
        CHECK_MESSAGE(same_values(out, want), std::string(name_of(set)) + ": out is sum");
        out = c.before;
        norm(c.norm, x, out.const_rows(), after, kNoSum, out.rows(), 0, 3);
        CHECK_MESSAGE(same_values(out, want), std::string(name_of(set)) + ": out is before");
        out = c.after;
        norm(c.norm, x, before, out.const_rows(), kNoSum, out.rows(), 0, 3);
        CHECK_MESSAGE(same_values(out, want), std::string(name_of(set)) + ": out is after");
        for (TestRows sum : {c.x, c.before}) {
            const bool is_x = sum.all() == c.x.all();
            out = c.empty();
            norm(c.norm, is_x ? sum.const_rows() : x, is_x ? before : sum.const_rows(), after, sum.rows(), out.rows(), 0,
                 3);
            CHECK_MESSAGE(same_values(out, want) && same_values(sum, want_sum),
                          std::string(name_of(set)) + (is_x ? ": sum is x" : ": sum is before"));
        }
    }
}

}  // namespace optimc::test

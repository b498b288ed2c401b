#include "isa/instruction_set.h"
#include "kernels/reference/linear_int_reference.h"
#include "kernels/select.h"
#include "tests/check.h"
#include "tests/int_shapes.h"
#include "tests/product_test.h"
#include "tests/test_rows.h"

using namespace optimc;
using optimc::test::TestRows;

namespace {

// Random codes, extremes among them, as quantize_rows would lay them out.
struct Activations {
    std::vector<std::int8_t> codes;
    std::vector<float> scales;
    std::vector<std::int32_t> sums;
    QuantizedRows rows;

    Activations(std::int64_t count, const IntWeight& weight, unsigned seed) {
        std::mt19937 random(seed);
        for (std::int64_t m = 0; m < count; ++m) {
            for (std::int64_t g = 0; g < weight.groups(); ++g) {
                std::int32_t sum = 0;
                for (std::int64_t i = 0; i < padded_group(weight.group_features(g)); ++i) {
                    int code = static_cast<int>(random() % 255) - 127;
                    if (random() % 8 == 0) code = random() % 2 == 0 ? 127 : -127;
                    if (i >= weight.group_features(g)) code = 0;
                    codes.push_back(static_cast<std::int8_t>(code));
                    sum += code;
                }
                scales.push_back(static_cast<float>(random() % 1000) / 997);
                sums.push_back(sum);
            }
        }
        rows = {codes.data(), scales.data(), sums.data(), weight.padded_features(), weight.groups()};
    }
};

}  // namespace

TEST("linear_int matches its reference; rows, panels and M change no bit") {
    unsigned seed = 0;
    test::for_all_int_weights([&](const test::IntShape& shape, const test::PlainWeight& plain,
                                  const std::string& what) {
        const test::PackedWeight packed = test::pack(plain);
        const Activations x(test::kProductRows, packed.weight, ++seed);
        test::expect_product(
            shape, packed.weight, what,
            [&](const Epilogue& epilogue) {
                reference::linear_int(packed.weight, x.rows, epilogue, test::kProductRows);
            },
            [&](const Kernels& kernels, const Epilogue& epilogue, const test::Ranges& at, std::byte*) {
                kernels.linear_int(packed.weight, x.rows, epilogue, at.row_begin, at.row_end, at.panel_begin,
                                   at.panel_end);
            });
    });
}

TEST("linear_int: the largest codes fit every sum") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (int bits : {4, 8}) {
            constexpr std::int64_t kFeatures = 2048;
            test::PlainWeight plain{32, kFeatures, kFeatures, bits, false, true, 0, {}, {}, {}};
            plain.codes.assign(32 * kFeatures, static_cast<std::uint8_t>((1 << bits) - 1));
            plain.scales.assign(32, 1);
            const test::PackedWeight packed = test::pack(plain);
            for (int code : {127, -127}) {
                constexpr std::int64_t kRows = 20;  // tiles, and rows left over
                Activations x(kRows, packed.weight, 1);
                x.codes.assign(x.codes.size(), static_cast<std::int8_t>(code));
                x.scales.assign(kRows, 1);
                x.sums.assign(kRows, code * static_cast<std::int32_t>(kFeatures));
                TestRows out(kRows, 32);
                const Epilogue epilogue = {out.rows(), 32, nullptr, {nullptr, 0}, Gate::none};
                kernels_of(set).linear_int(packed.weight, x.rows, epilogue, 0, kRows, 0, 1);
                const auto want = static_cast<float>(kFeatures * code * ((1 << bits) - 1));
                for (std::int64_t m = 0; m < kRows; ++m)
                    for (std::int64_t n = 0; n < 32; ++n) CHECK(out.at(m, n) == want);
            }
        }
    }
}

TEST("linear_int: a poisoned group shows in its row only") {
    for (InstructionSet set : supported_instruction_sets()) {
        std::mt19937 random(4);
        const test::PackedWeight packed = test::pack(test::random_weight(32, 96, 32, 4, false, false, random));
        constexpr std::int64_t kRows = 18;
        Activations x(kRows, packed.weight, 1);
        x.scales[4] = NAN;
        TestRows out(kRows, 32);
        const Epilogue epilogue = {out.rows(), 32, nullptr, {nullptr, 0}, Gate::none};
        kernels_of(set).linear_int(packed.weight, x.rows, epilogue, 0, kRows, 0, 1);
        for (std::int64_t n = 0; n < 32; ++n) {
            for (std::int64_t m = 0; m < kRows; ++m) CHECK(std::isnan(out.at(m, n)) == (m == 1));
        }
    }
}

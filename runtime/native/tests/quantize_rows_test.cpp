#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "isa/instruction_set.h"
#include "kernels/reference/quantize_rows_reference.h"
#include "kernels/select.h"
#include "tests/check.h"
#include "tests/test_rows.h"

using namespace optimc;
using optimc::test::TestRows;

namespace {

struct Result {
    std::vector<std::int8_t> codes;
    std::vector<float> scales;
    std::vector<std::int32_t> sums;
    QuantizedRows rows;

    Result(std::int64_t count, std::int64_t features, std::int64_t group) {
        const std::int64_t groups = (features + group - 1) / group;
        const std::int64_t last = features - (groups - 1) * group;
        const std::int64_t stride = (groups - 1) * padded_group(group) + padded_group(last);
        codes.assign(static_cast<std::size_t>(count * stride), 99);
        scales.assign(static_cast<std::size_t>(count * groups), 99);
        sums.assign(static_cast<std::size_t>(count * groups), 99);
        rows = {codes.data(), scales.data(), sums.data(), stride, groups};
    }
};

const std::pair<std::int64_t, std::int64_t> kShapes[] = {{1, 1},    {5, 5},    {40, 8},    {100, 24},  {96, 32},
                                                         {70, 32},  {576, 64}, {300, 128}, {136, 136}, {1000, 1000},
                                                         {600, 32}, {1536, 32}, {1536, 64}};

// Codes may differ by one where x / scale is within an ulp of halfway; sums must match the codes that were written.
void expect_like_reference(const Kernels& kernels, const TestRows& x, std::int64_t count, std::int64_t features,
                           std::int64_t group, const std::int32_t* permutation, float fixed_scale = 0) {
    Result got(count, features, group);
    Result want(count, features, group);
    kernels.quantize_rows(x.const_rows(), features, group, permutation, fixed_scale, got.rows, 0, count);
    reference::quantize_rows(x.const_rows(), features, group, permutation, fixed_scale, want.rows, count);
    const std::string where = std::string(kernels.name) + ", features " + std::to_string(features) + ", group " +
                              std::to_string(group);
    CHECK_MESSAGE(std::memcmp(got.scales.data(), want.scales.data(), got.scales.size() * 4) == 0, "scales: " + where);
    std::size_t different = 0;
    for (std::size_t i = 0; i < got.codes.size(); ++i) {
        CHECK_MESSAGE(std::abs(got.codes[i] - want.codes[i]) <= 1, "codes: " + where);
        different += got.codes[i] != want.codes[i];
    }
    CHECK_MESSAGE(different <= got.codes.size() / 10000 + 1, "codes: " + where);
    for (std::int64_t m = 0; m < count; ++m) {
        const std::int8_t* codes = got.rows.codes + m * got.rows.stride;
        for (std::int64_t g = 0; g < got.rows.groups; ++g) {
            const std::int64_t begin = g * padded_group(group);
            const std::int64_t end = std::min(begin + padded_group(group), got.rows.stride);
            CHECK_MESSAGE(std::accumulate(codes + begin, codes + end, 0) == got.rows.sums[m * got.rows.groups + g],
                          "sums: " + where);
            const std::int64_t filled = std::min(group, features - g * group);
            for (std::int64_t i = begin + filled; i < end; ++i) CHECK_MESSAGE(codes[i] == 0, "padding: " + where);
        }
    }
}

}  // namespace

TEST("quantize_rows matches its reference, padding is zero") {
    for (InstructionSet set : supported_instruction_sets()) {
        unsigned seed = 0;
        for (const auto& [features, group] : kShapes) {
            const TestRows x = TestRows::random(7, features, 3, ++seed);
            expect_like_reference(kernels_of(set), x, 7, features, group, nullptr);
        }
    }
}

TEST("quantize_rows takes features in the order of a permutation") {
    for (InstructionSet set : supported_instruction_sets()) {
        std::mt19937 random(5);
        for (const auto& [features, group] : kShapes) {
            std::vector<std::int32_t> permutation(static_cast<std::size_t>(features));
            std::iota(permutation.begin(), permutation.end(), 0);
            std::shuffle(permutation.begin(), permutation.end(), random);
            const TestRows x = TestRows::random(5, features, 1, random());
            expect_like_reference(kernels_of(set), x, 5, features, group, permutation.data());
        }
    }
}

TEST("quantize_rows with a fixed scale matches its reference, in any order of features") {
    for (InstructionSet set : supported_instruction_sets()) {
        std::mt19937 random(6);
        for (const auto& [features, group] : kShapes) {
            std::vector<std::int32_t> permutation(static_cast<std::size_t>(features));
            std::iota(permutation.begin(), permutation.end(), 0);
            std::shuffle(permutation.begin(), permutation.end(), random);
            const TestRows x = TestRows::random(5, features, 3, random());
            for (float scale : {0.003f, 0.02f, 5.0f}) {
                expect_like_reference(kernels_of(set), x, 5, features, group, nullptr, scale);
                expect_like_reference(kernels_of(set), x, 5, features, group, permutation.data(), scale);
            }
        }
    }
}

TEST("quantize_rows with a fixed scale saturates, rounds ties to even, and leaves scales and zeros as they are") {
    for (InstructionSet set : supported_instruction_sets()) {
        const float values[24] = {0.25f, 0.75f, 1.25f, -0.25f, -0.75f, 63.5f, 63.75f, 3e38f, -64, -3e38f};
        const std::int8_t want[16] = {0, 2, 2, 0, -2, 127, 127, 127, -127, -127};
        for (std::int64_t features : {12, 16}) {  // a ragged group and whole vectors
            Result got(1, features, features);
            kernels_of(set).quantize_rows({values, 24}, features, features, nullptr, 0.5f, got.rows, 0, 1);
            CHECK(got.scales[0] == 0.5f);
            CHECK(std::memcmp(got.codes.data(), want, static_cast<std::size_t>(features)) == 0);
        }
        Result zeros(1, 16, 8);
        kernels_of(set).quantize_rows({values + 10, 24}, 12, 8, nullptr, 0.5f, zeros.rows, 0, 1);
        CHECK(zeros.scales[0] == 0.5f && zeros.scales[1] == 0.5f && zeros.sums[0] == 0 && zeros.sums[1] == 0);
    }
}

TEST("quantize_rows with a fixed scale shows what is not finite, in its group only") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (float poison : {NAN, INFINITY, -INFINITY}) {
            for (std::int64_t group : {16, 24}) {
                TestRows x = TestRows::random(1, 3 * group, 0, 3);
                x.at(0, group + 3) = poison;
                Result got(1, 3 * group, group);
                kernels_of(set).quantize_rows(x.const_rows(), 3 * group, group, nullptr, 0.1f, got.rows, 0, 1);
                CHECK(got.scales[0] == 0.1f && std::isnan(got.scales[1]) && got.scales[2] == 0.1f);
                for (std::int64_t i = 0; i < group; ++i) CHECK(got.codes[static_cast<std::size_t>(group + i)] == 0);
            }
        }
    }
}

TEST("quantize_rows rounds to the nearest even code") {
    for (InstructionSet set : supported_instruction_sets()) {
        const float values[8] = {127, 0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, -127};
        const std::int8_t want[8] = {127, 0, 2, 2, 0, -2, -2, -127};
        Result got(1, 8, 8);
        kernels_of(set).quantize_rows({values, 8}, 8, 8, nullptr, 0.0f, got.rows, 0, 1);
        CHECK(got.scales[0] == 1);
        for (std::size_t i = 0; i < 8; ++i) CHECK(got.codes[i] == want[i]);
    }
}

TEST("quantize_rows: zero, tiny and poisoned groups keep to themselves") {
    for (InstructionSet set : supported_instruction_sets()) {
        for (std::int64_t group : {24, 16}) {  // groups alone, and sixteen at a time
            constexpr std::int64_t kGroups = 40;
            TestRows x = TestRows::random(2, kGroups * group, 0, 3);
            for (std::int64_t i = 0; i < group; ++i) {
                x.at(0, i) = 0;
                x.at(0, group + i) = i % 2 == 0 ? 1e-40f : -1e-42f;
            }
            x.at(0, 2 * group + 15) = std::numeric_limits<float>::quiet_NaN();
            x.at(0, 3 * group) = std::numeric_limits<float>::infinity();
            x.at(0, 5 * group - 1) = -std::numeric_limits<float>::infinity();
            Result got(2, kGroups * group, group);
            kernels_of(set).quantize_rows(x.const_rows(), kGroups * group, group, nullptr, 0.0f, got.rows, 0, 2);
            CHECK(got.scales[0] == 0 && got.sums[0] == 0);
            CHECK(got.scales[1] == 0 && got.sums[1] == 0);
            for (std::int64_t i = 0; i < 2 * group; ++i) CHECK(got.rows.codes[i] == 0);
            for (std::size_t g = 2; g < 5; ++g) CHECK(std::isnan(got.scales[g]));
            for (std::size_t g = 5; g < 2 * kGroups; ++g) CHECK(got.scales[g] > 0);
        }
    }
}

TEST("quantize_rows writes its rows only") {
    for (InstructionSet set : supported_instruction_sets()) {
        const TestRows x = TestRows::random(4, 40, 0, 9);
        Result got(4, 40, 24);
        kernels_of(set).quantize_rows(x.const_rows(), 40, 24, nullptr, 0.0f, got.rows, 1, 3);
        for (std::int64_t m : {0, 3}) {
            for (std::int64_t i = 0; i < got.rows.stride; ++i) CHECK(got.rows.codes[m * got.rows.stride + i] == 99);
            CHECK(got.rows.scales[2 * m + 1] == 99 && got.rows.sums[2 * m] == 99);
        }
        CHECK(got.scales[2] != 99 && got.scales[5] != 99);
    }
}

#include <cstring>

#include "isa/instruction_set.h"
#include "kernels/reference/embed_reference.h"
#include "kernels/reference/float_elements.h"
#include "kernels/select.h"
#include "tests/check.h"
#include "tests/float_weight.h"
#include "tests/int_shapes.h"
#include "tests/test_rows.h"

using namespace optimc;
using optimc::test::TestRows;

TEST("embed_float equals its reference bit for bit") {
    constexpr std::int64_t kVocabulary = 13, kTokens = 5;
    const std::int64_t ids[kTokens] = {12, 0, 7, 7, 3};
    std::mt19937 random(2);
    for (InstructionSet set : supported_instruction_sets()) {
        for (FloatType type : {FloatType::float32, FloatType::bfloat16, FloatType::float16}) {
            for (std::int64_t features : {1, 16, 37, 576}) {
                const std::size_t size = reference::element_bytes(type);
                std::vector<std::uint8_t> table(static_cast<std::size_t>(kVocabulary * features) * size);
                for (std::size_t i = 0; i < table.size(); ++i) {
                    // Sign and exponent stay clear of infinities.
                    table[i] = static_cast<std::uint8_t>(i % size == size - 1 ? random() % 2 * 128 + 48 : random());
                }
                TestRows got(kTokens, features, 3), want(kTokens, features, 3);
                kernels_of(set).embed_float(table.data(), type, features, ids, 1.7f, got.rows(), 0, 2);
                kernels_of(set).embed_float(table.data(), type, features, ids, 1.7f, got.rows(), 2, kTokens);
                reference::embed_float(table.data(), type, features, ids, 1.7f, want.rows(), kTokens);
                CHECK(got.all() == want.all());
            }
        }
    }
}

TEST("embed_panels takes the rows that were packed, of every type and width") {
    const std::int64_t ids[] = {32, 0, 31, 7, 40};
    for (FloatType type : {FloatType::float32, FloatType::bfloat16, FloatType::float16}) {
        for (std::int64_t features : {1, 16, 37}) {
            const test::TestFloatWeight weight(type, 41, features, 4);
            const auto* bytes = static_cast<const std::uint8_t*>(weight.get().data);
            const std::size_t size = reference::element_bytes(type);
            std::vector<std::uint8_t> table(static_cast<std::size_t>(41 * features) * size);
            for (std::int64_t n = 0; n < 41; ++n) {
                for (std::int64_t c = 0; c < features; ++c) {
                    const std::int64_t from = ((n / kPanelRows) * features + c) * kPanelRows + n % kPanelRows;
                    std::memcpy(&table[static_cast<std::size_t>(n * features + c) * size],
                                &bytes[static_cast<std::size_t>(from) * size], size);
                }
            }
            TestRows want(5, features, 2);
            reference::embed_float(table.data(), type, features, ids, 0.3f, want.rows(), 5);
            for (InstructionSet set : supported_instruction_sets()) {
                TestRows got(5, features, 2);
                kernels_of(set).embed_panels(weight.get(), ids, 0.3f, got.rows(), 0, 5);
                CHECK_MESSAGE(got.all() == want.all(), name_of(set));
            }
        }
    }
}

TEST("embed_int equals its reference and the codes that were packed") {
    test::for_all_int_weights([](const test::IntShape& shape, const test::PlainWeight& plain, const std::string& what) {
        const test::PackedWeight packed = test::pack(plain);
        std::vector<std::int64_t> ids;
        for (std::int64_t n = plain.outputs - 1; n >= 0; n -= 3) ids.push_back(n);
        const auto tokens = static_cast<std::int64_t>(ids.size());
        TestRows want(tokens, shape.features, 2);
        reference::embed_int(packed.weight, ids.data(), 0.3f, want.rows(), tokens);
        for (std::int64_t m = 0; m < tokens; ++m) {
            for (std::int64_t c = 0; c < shape.features; ++c) {
                const std::int64_t n = ids[static_cast<std::size_t>(m)];
                const auto at = static_cast<std::size_t>(n * plain.groups() + c / plain.group);
                const int zero = plain.has_zeros ? plain.zeros[at] : plain.zero_point;
                const int code = plain.codes[static_cast<std::size_t>(n * plain.features + c)];
                const float value = static_cast<float>(code - zero) * plain.scales[at] * 0.3f;
                CHECK_MESSAGE(want.at(m, c) == value, what);
            }
        }
        for (InstructionSet set : supported_instruction_sets()) {
            TestRows got(tokens, shape.features, 2);
            kernels_of(set).embed_int(packed.weight, ids.data(), 0.3f, got.rows(), 0, tokens);
            CHECK_MESSAGE(got.all() == want.all(), what + ", " + name_of(set));
        }
    });
}

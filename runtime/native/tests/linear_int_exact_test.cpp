#include "kernels/reference/linear_int_reference.h"
#include "tests/product_test.h"

using namespace optimc;
using optimc::test::TestRows;

TEST("linear_int_exact matches its reference; rows, panels and M change no bit") {
    unsigned seed = 0;
    test::for_all_int_weights([&](const test::IntShape& shape, const test::PlainWeight& plain,
                                  const std::string& what) {
        const test::PackedWeight packed = test::pack(plain);
        const TestRows x = TestRows::random(test::kProductRows, shape.features, 3, ++seed);
        test::expect_product(
            shape, packed.weight, what,
            [&](const Epilogue& epilogue) {
                reference::linear_int_exact(packed.weight, x.const_rows(), epilogue, test::kProductRows);
            },
            [&](const Kernels& kernels, const Epilogue& epilogue, const test::Ranges& at, std::byte* scratch) {
                kernels.linear_int_exact(packed.weight, x.const_rows(), epilogue, at.row_begin, at.row_end,
                                         at.panel_begin, at.panel_end, scratch);
            });
    });
}

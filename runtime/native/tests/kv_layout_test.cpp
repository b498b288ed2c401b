#include "kernels/kv_layout.h"

#include "tests/check.h"

using namespace optimc;

TEST("a block of the cache takes the bytes its types say") {
    // [D][S] + [S][Dp] and the scales of 16 slots.
    CHECK(kv_block_bytes(KvType::float32, 16, 3, 64, false) == 3 * 2 * 16 * 64 * 4);
    CHECK(kv_block_bytes(KvType::bfloat16, 16, 3, 64, false) == 3 * 2 * 16 * 64 * 2);
    CHECK(kv_block_bytes(KvType::int8, 16, 3, 64, false) == 3 * (2 * 16 * 64 + 2 * 16 * 4));
    CHECK(kv_block_bytes(KvType::int4, 16, 3, 64, false) == 3 * (2 * 16 * 32 + 4 * 16 * 4));
    // Scales of channels lie elsewhere: a block keeps those of values.
    CHECK(kv_block_bytes(KvType::int8, 16, 3, 64, true) == 3 * (2 * 16 * 64 + 16 * 4));
    CHECK(kv_block_bytes(KvType::int4, 16, 3, 64, true) == 3 * (2 * 16 * 32 + 2 * 16 * 4));
    // Values are padded to whole loads, keys are not.
    CHECK(kv_block_bytes(KvType::float32, 16, 1, 24, false) == 16 * (24 + 32) * 4);
    CHECK(kv_block_bytes(KvType::int4, 16, 1, 80, false) == 16 * (40 + 48) + 4 * 16 * 4);
    // Odd block sizes waste at most the alignment of a float.
    CHECK(kv_block_bytes(KvType::int8, 5, 1, 64, false) == 2 * 5 * 64 + 2 * 5 * 4);
    CHECK(kv_block_bytes(KvType::int4, 1, 1, 7, false) == 4 + 16 + 4 * 4);
}

namespace {

void expect_parts_in_order(KvType type, bool channel_keys) {
    for (int block_size : {1, 2, 3, 4, 8, 16, 17, 32, 48, 64, 255, 256}) {
        for (int head_dim : {1, 5, 8, 24, 64, 80, 96, 128, 256}) {
            const KvParts parts = kv_parts(type, block_size, head_dim, channel_keys);
            const std::int64_t scales = kv_has_scales(type) ? 4 * block_size : 0;
            const std::int64_t minimums = kv_has_minimums(type) ? 4 * block_size : 0;
            CHECK(parts.values >= kv_key_rows(type, head_dim) * kv_key_row_bytes(type, block_size));
            CHECK(parts.key_scales >= parts.values + block_size * kv_value_row_bytes(type, head_dim));
            CHECK(parts.value_scales >= parts.key_scales + (channel_keys ? 0 : scales));
            CHECK(parts.key_minimums >= parts.value_scales + scales);
            CHECK(parts.value_minimums >= parts.key_minimums + (channel_keys ? 0 : minimums));
            CHECK(parts.head_bytes >= parts.value_minimums + minimums);
            const std::int64_t unit = block_size % 16 == 0 ? 64 : 4;
            for (std::int64_t part : {parts.values, parts.key_scales, parts.value_scales, parts.key_minimums,
                                      parts.value_minimums, parts.head_bytes}) {
                CHECK(part % unit == 0);
            }
            CHECK(kv_value_width(type, head_dim) % 16 == 0 && kv_value_width(type, head_dim) >= head_dim);
        }
    }
}

}  // namespace

TEST("parts of a block follow each other without overlap, aligned where blocks hold whole groups of slots") {
    for (KvType type : {KvType::float32, KvType::bfloat16, KvType::int8, KvType::int4}) {
        expect_parts_in_order(type, false);
        if (kv_has_scales(type)) expect_parts_in_order(type, true);
    }
}

#include "kernels/kv_move.h"

#include <cstring>
#include <numeric>
#include <random>

#include "kernels/kv_layout.h"
#include "kernels/reference/attention_reference.h"
#include "tests/attention_world.h"
#include "tests/check.h"

using namespace optimc;
using optimc::test::KeyChannels;
using optimc::test::KvKind;

namespace {

constexpr std::int64_t kSlots = 96;

// All slots' keys and values as the reference reads them: [slots][heads][2 D].
std::vector<std::vector<double>> contents(const KvLayer& layer) {
    std::vector<std::vector<double>> all;
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
        all.emplace_back();
        for (int head = 0; head < layer.num_kv_heads; ++head) {
            for (double x : reference::cached_key(layer, slot, head)) all.back().push_back(x);
            for (double x : reference::cached_value(layer, slot, head)) all.back().push_back(x);
        }
    }
    return all;
}

std::vector<std::vector<std::byte>> slot_bytes(const KvLayer& layer) {
    std::vector<std::vector<std::byte>> all;
    for (std::int64_t slot = 0; slot < kSlots; ++slot) {
        all.emplace_back(kv_slot_bytes(layer));
        kv_read_slot(layer, slot, all.back().data());
    }
    return all;
}

void expect_move(const KvKind& kind, int block_size, int head_dim, const std::vector<std::int64_t>& src,
                 const std::vector<std::int64_t>& dst) {
    const std::int64_t blocks = kSlots / block_size;
    const std::int64_t block_bytes = kv_block_bytes(kind.type, block_size, 2, head_dim, kind.channel_keys);
    std::vector<std::uint8_t> pool(static_cast<std::size_t>(blocks * block_bytes));
    const KeyChannels channels(kind.type, 2, head_dim);
    KvLayer layer{pool.data(), blocks, block_size, 2, head_dim, kind.type};
    if (kind.channel_keys) layer = channels.give(layer);
    std::mt19937 random(1);
    // Every float32 and every pair of bytes is a number of modest size.
    for (std::uint8_t& byte : pool) byte = static_cast<std::uint8_t>(random() % 60);
    const std::vector<std::vector<double>> before = contents(layer);
    std::vector<std::vector<std::byte>> want_bytes = slot_bytes(layer);
    const std::vector<std::vector<std::byte>> bytes_before = want_bytes;
    const std::int64_t count = static_cast<std::int64_t>(src.size());
    std::vector<std::byte> scratch(kv_move_scratch(layer, count));
    kv_move(layer, src.data(), dst.data(), count, scratch.data());
    std::vector<std::vector<double>> want = before;
    for (std::size_t i = 0; i < src.size(); ++i) want[dst[i]] = before[src[i]];
    for (std::size_t i = 0; i < src.size(); ++i) want_bytes[dst[i]] = bytes_before[src[i]];
    CHECK(slot_bytes(layer) == want_bytes);
    CHECK(contents(layer) == want);
    CHECK(src == dst || want != before);
}

}  // namespace

TEST("slots move as if all were read before any is written") {
    for (const KvKind& kind : optimc::test::kKvKinds) {
        for (int block_size : {1, 4, 8, 16, 32, 48}) {
            for (int head_dim : {7, 24, 64}) {
                expect_move(kind, block_size, head_dim, {7}, {3});
                expect_move(kind, block_size, head_dim, {5, 6}, {6, 5});
                expect_move(kind, block_size, head_dim, {40, 41, 42, 43}, {41, 42, 43, 44});
                expect_move(kind, block_size, head_dim, {50, 60, 95, 2}, {49, 50, 51, 52});
                expect_move(kind, block_size, head_dim, {9}, {9});
                expect_move(kind, block_size, head_dim, {30, 31, 32}, {31, 32, 30});
            }
        }
    }
}

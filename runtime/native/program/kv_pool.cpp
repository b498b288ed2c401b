#include "program/kv_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <system_error>

#include "kernels/kv_layout.h"
#include "kernels/kv_move.h"

namespace optimc {

namespace {

// Small enough that closing an engine does not wait. (A lower priority would make it wait: behind every busy process.)
constexpr std::size_t kPopulatedAtOnce = std::size_t{4} << 20;

std::int64_t bytes_of(const KvLayerShape& shape, int block_size) {
    return kv_block_bytes(shape.type, block_size, shape.num_kv_heads, shape.head_dim, shape.channel_keys);
}

}  // namespace

KvPool::KvPool(std::span<const KvLayerShape> layers, int block_size, std::int64_t num_blocks)
    : block_size_(block_size), num_blocks_(num_blocks) {
    std::int64_t total = 0;
    std::vector<std::int64_t> starts;
    for (const KvLayerShape& shape : layers) {
        starts.push_back(total);
        total += aligned(num_blocks * bytes_of(shape, block_size));
    }
    memory_ = allocate_aligned(total, Pages::huge);
    for (std::size_t i = 0; i < layers.size(); ++i) {
        layers_.push_back({
            .data = reinterpret_cast<std::uint8_t*>(memory_.get()) + starts[i],
            .num_blocks = num_blocks,
            .block_size = block_size,
            .num_kv_heads = layers[i].num_kv_heads,
            .head_dim = layers[i].head_dim,
            .type = layers[i].type,
        });
    }
}

KvPool::~KvPool() {
    // A child that was forked has the pool, but not the thread to wait for.
    if (populating_.joinable() && process_ != getpid()) populating_.detach();
}

void KvPool::populate() {
#ifdef MADV_POPULATE_WRITE
    if (populating_.joinable()) return;
    process_ = getpid();
    const auto work = [this](const std::stop_token& stop) {
        const std::size_t length = memory_.get_deleter().length;
        for (std::size_t begin = 0; begin < length; begin += kPopulatedAtOnce) {
            if (stop.stop_requested()) return;
            if (madvise(memory_.get() + begin, std::min(kPopulatedAtOnce, length - begin), MADV_POPULATE_WRITE) != 0) {
                return;  // an older kernel, or no memory: steps find out when they touch it
            }
        }
        is_populated_.store(true, std::memory_order_release);
    };
    try {
        populating_ = std::jthread(work);
    } catch (const std::system_error&) {
    }
#endif
}

std::int64_t KvPool::block_bytes(std::span<const KvLayerShape> layers, int block_size) {
    std::int64_t total = 0;
    for (const KvLayerShape& shape : layers) total += bytes_of(shape, block_size);
    return total;
}

void KvPool::move(std::span<const std::int64_t> source, std::span<const std::int64_t> target) {
    const auto count = static_cast<std::int64_t>(source.size());
    std::size_t most = 0;
    for (const KvLayer& layer : layers_) most = std::max(most, kv_move_scratch(layer, count));
    const auto scratch = std::make_unique_for_overwrite<std::byte[]>(most);
    for (const KvLayer& layer : layers_) kv_move(layer, source.data(), target.data(), count, scratch.get());
}

std::vector<std::byte> KvPool::read_slot(std::int64_t slot) const {
    std::vector<std::byte> bytes;
    for (const KvLayer& layer : layers_) {
        const std::size_t begin = bytes.size();
        bytes.resize(begin + kv_slot_bytes(layer));
        kv_read_slot(layer, slot, bytes.data() + begin);
    }
    return bytes;
}

}  // namespace optimc

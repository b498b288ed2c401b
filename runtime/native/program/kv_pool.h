// The paged KV cache of all layers.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "kernels/types.h"
#include "program/workspace.h"

namespace optimc {

struct KvLayerShape {
    int num_kv_heads;
    int head_dim;
    KvType type;
    bool channel_keys;  // keys have one scale per head and channel, given by `set_key_channels`
};

class KvPool {
  public:
    // P blocks of S slots for every layer. Memory is the system's until it is touched. Throws std::bad_alloc.
    KvPool(std::span<const KvLayerShape> layers, int block_size, std::int64_t num_blocks);
    ~KvPool();

    // Bytes of one block over all layers, scales included.
    static std::int64_t block_bytes(std::span<const KvLayerShape> layers, int block_size);

    // Scales and minimums [Hkv, D] of a layer with channel keys, before anything is stored in it; minimums with 4 bits
    // only. The arrays must outlive the pool.
    void set_key_channels(std::size_t index, const float* scales, const float* minimums) {
        layers_[index].key_scales = scales;
        layers_[index].key_minimums = minimums;
    }

    const KvLayer& layer(std::size_t index) const { return layers_[index]; }
    std::size_t num_layers() const { return layers_.size(); }
    std::int64_t num_blocks() const { return num_blocks_; }
    int block_size() const { return block_size_; }

    // Copy slots in every layer, as if all were read before any is written.
    void move(std::span<const std::int64_t> source, std::span<const std::int64_t> target);

    // Begin to have the system provide all memory, on a thread of its own, so that steps do not wait for it page
    // by page. Ends with the pool. Without Linux 5.14, or a thread to be had, nothing happens.
    void populate();
    // Whether `populate` was called and all memory is there.
    bool is_populated() const { return is_populated_.load(std::memory_order_acquire); }

    // What one slot holds in every layer, one after another.
    std::vector<std::byte> read_slot(std::int64_t slot) const;

  private:
    std::vector<KvLayer> layers_;
    int block_size_;
    std::int64_t num_blocks_;
    AlignedBytes memory_;
    std::atomic<bool> is_populated_ = false;
    std::jthread populating_;  // after the memory: it ends first
    pid_t process_ = 0;        // whose thread that is
};

}  // namespace optimc

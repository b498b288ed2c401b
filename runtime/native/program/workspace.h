// Where a program's buffers lie: one arena shared by all threads, a small private copy of some buffers for each thread,
// and scratch for kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/types.h"

namespace optimc {

constexpr std::int64_t kAlignment = 64;

inline std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// With at most this many rows every thread computes quantized activations for itself: cheaper than waiting for others.
constexpr std::int64_t kReplicatedRows = 4;

enum class RowsKind { tokens, logits };

struct FloatBuffer {
    RowsKind rows;
    std::int64_t width;
    std::int64_t offset;  // bytes into the arena

    std::int64_t bytes(std::int64_t capacity) const {
        return capacity * width * static_cast<std::int64_t>(sizeof(float));
    }
};

struct QuantizedBuffer {
    RowsKind rows;
    std::int64_t features;
    std::int64_t group;
    int terms;  // 2: rows are followed by as many that hold what rounding them left
    std::int64_t offset;
    bool replicable;              // every operation that writes it writes nothing else
    std::int64_t replica_offset;  // bytes into a thread's private part

    std::int64_t groups() const { return (features + group - 1) / group; }
    std::int64_t padded_features() const { return optimc::padded_features(features, group); }
    std::int64_t bytes(std::int64_t capacity) const {
        return aligned(terms * capacity * padded_features()) + 2 * aligned(terms * capacity * groups() * 4);
    }
    QuantizedRows at(std::byte* base, std::int64_t capacity, int term) const;
};

// Columns of a float buffer.
struct View {
    int buffer;
    std::int64_t column;
    std::int64_t width;
};

struct FreeAligned {
    std::size_t length = 0;  // of the mapping, whole pages
    void operator()(std::byte* memory) const;
};
using AlignedBytes = std::unique_ptr<std::byte[], FreeAligned>;

// Huge pages spare the processor walks of its page table, and make memory resident two megabytes at a time.
enum class Pages { small, huge };

// Zeroed memory that the system provides when it is touched, in the pages asked for if it is large enough to have them.
// Throws std::bad_alloc.
AlignedBytes allocate_aligned(std::int64_t bytes, Pages pages);

class Workspace {
  public:
    // Lays out replicas; `scratch_bytes` per thread. Throws std::bad_alloc.
    Workspace(std::vector<FloatBuffer> floats, std::vector<QuantizedBuffer> quantized, std::int64_t capacity,
              std::int64_t arena_bytes, int threads, std::int64_t scratch_bytes);

    const FloatBuffer& buffer(const View& view) const { return floats_[static_cast<std::size_t>(view.buffer)]; }
    const QuantizedBuffer& quantized(int index) const { return quantized_[static_cast<std::size_t>(index)]; }

    Rows rows(const View& view) const;
    ConstRows const_rows(const View& view) const;
    // The copy of a quantized buffer that `thread` uses in a step with `rows` rows; `term` counts from 0.
    QuantizedRows quantized_rows(int index, std::int64_t rows, int thread, int term = 0) const;
    int threads() const { return threads_; }
    bool is_replicated(int index, std::int64_t rows) const {
        return quantized(index).replicable && rows <= kReplicatedRows;
    }
    std::byte* scratch(int thread) const { return private_.get() + thread * private_bytes_ + replica_bytes_; }
    // What buffers lie in. Whoever holds it may read their last contents after the workspace is gone.
    std::shared_ptr<const std::byte[]> arena() const { return arena_; }
    // Room for the partial results of attention, shared by all threads; grows between steps, never within one.
    float* partials() const { return partials_.get(); }
    void reserve_partials(std::int64_t count);

  private:
    std::vector<FloatBuffer> floats_;
    std::vector<QuantizedBuffer> quantized_;
    std::int64_t capacity_;
    int threads_;
    std::int64_t replica_bytes_ = 0;
    std::int64_t private_bytes_ = 0;
    std::shared_ptr<std::byte[]> arena_;
    AlignedBytes private_;
    std::int64_t num_partials_ = 0;
    std::unique_ptr<float[]> partials_;
};

}  // namespace optimc

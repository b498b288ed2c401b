// A program ready to run: its operations, the memory they work in and the threads that do it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "program/check_step.h"
#include "program/kv_pool.h"
#include "program/op.h"

namespace optimc {

class Program {
  public:
    struct Parts {
        std::vector<std::unique_ptr<Op>> ops;
        std::vector<FloatBuffer> floats;
        std::vector<QuantizedBuffer> quantized;
        std::int64_t capacity;  // most rows of a step
        std::int64_t arena_bytes;
        View logits;
        std::int64_t vocabulary = 0;  // rows of the embedding: token ids are below
    };

    // Throws std::bad_alloc.
    Program(Parts parts, std::unique_ptr<KvPool> pool, const Kernels& kernels, int threads);

    // Run one step; `check_step` has seen it. The logits lie in `memory` and stay valid until the next step.
    ConstRows execute(const Step& step);
    std::shared_ptr<const std::byte[]> memory() const { return workspace_.arena(); }

    KvPool& pool() { return *pool_; }
    const Kernels& kernels() const { return kernels_; }
    int threads() const { return team_.size(); }
    std::int64_t capacity() const { return capacity_; }
    StepLimits limits() const { return {capacity_, vocabulary_, pool_->num_blocks(), pool_->block_size()}; }
    // V, the elements of a row of logits.
    std::int64_t logits_width() const { return logits_.width; }

  private:
    std::vector<std::unique_ptr<Op>> ops_;
    std::int64_t capacity_;
    View logits_;
    std::int64_t vocabulary_;
    std::unique_ptr<KvPool> pool_;
    const Kernels& kernels_;
    Workspace workspace_;
    ThreadTeam team_;
};

}  // namespace optimc

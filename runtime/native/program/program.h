// A program ready to run: its operations, the memory they work in and the threads that do it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "program/check_step.h"
#include "program/kv_pool.h"
#include "program/op.h"

namespace optimc {

// The Medusa heads: operations of their own on the same workspace, run between steps.
struct Heads {
    std::vector<std::unique_ptr<Op>> ops;
    std::vector<View> inputs;  // hidden states [N, d] are copied to each
    View logits;               // [N * count, V'], row n * count + k being head k's for row n
    std::int64_t count;        // K
};

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
        std::optional<View> hidden;   // [R, d] what the output head multiplies
        std::optional<Heads> heads;
    };

    // Throws std::bad_alloc.
    Program(Parts parts, std::unique_ptr<KvPool> pool, const Kernels& kernels, int threads);

    // Run one step; `check_step` has seen it. The logits lie in `memory` and stay valid until the next step.
    ConstRows execute(const Step& step);
    // What the last step's output head multiplied, in `memory` too; there while no other step has run.
    const std::optional<View>& hidden() const { return hidden_; }
    ConstRows hidden_rows() const { return workspace_.const_rows(*hidden_); }

    // The heads' logits for N rows: hidden states [N, d] and root tokens [N], with 1 <= N and N * count <= capacity.
    // Throws std::invalid_argument for a token outside the vocabulary.
    ConstRows draft(const float* hidden, const std::int64_t* tokens, std::int64_t rows);
    const std::optional<Heads>& heads() const { return heads_; }

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
    std::optional<View> hidden_;
    std::optional<Heads> heads_;
    std::unique_ptr<KvPool> pool_;
    const Kernels& kernels_;
    Workspace workspace_;
    ThreadTeam team_;
};

}  // namespace optimc

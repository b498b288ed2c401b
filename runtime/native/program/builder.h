// Puts a program together from the pieces a plan describes. Whatever does not fit together throws std::invalid_argument
// naming the piece; nothing a plan says can make an operation reach outside its memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "kernels/attention.h"
#include "program/ops/linear_op.h"
#include "program/ops/row_ops.h"
#include "program/program.h"

namespace optimc {

struct Vector {
    const float* data;
    std::int64_t length;
};

struct Permutation {
    const std::int32_t* data;
    std::int64_t length;
};

using Weight = std::variant<IntWeight, FloatWeight, Table, Vector, Permutation>;

// What an attention operation says beside its views.
struct AttentionOptions {
    AttentionSpec spec;
    int layer;
    bool logits_rows_only;
};

class Builder {
  public:
    // The pool is made at once: P blocks of S slots. `capacity` is the most rows a step may have.
    Builder(std::vector<KvLayerShape> layers, int block_size, std::int64_t num_blocks, std::int64_t capacity,
            std::int64_t arena_bytes);

    // What a layer with channel keys needs before its attention: scales and, with 4 bits, minimums [heads, dim].
    void kv_key_channels(int layer, std::int64_t heads, std::int64_t dim, const float* scales, const float* minimums);

    // Each returns the index by which operations name it. `bytes` is what the tensor holds.
    int add_int_weight(const IntWeight& weight, std::int64_t bytes);
    int add_float_weight(const FloatWeight& weight, std::int64_t bytes);
    int add_table(const Table& table, std::int64_t bytes);
    int add_vector(const Vector& vector);
    int add_permutation(const Permutation& permutation);

    // Buffers are numbered as they are added, both kinds together.
    int add_float_buffer(RowsKind rows, std::int64_t width, std::int64_t offset);
    int add_quantized_buffer(RowsKind rows, std::int64_t features, std::int64_t group, int terms,
                             std::int64_t offset);

    // Operations run in the order they are added. Views and quantized buffers are given by buffer index.
    void embed(int table, float scale, View out);
    void norm(View x, int weight, std::optional<int> bias, float epsilon, std::int64_t heads, bool centred,
              std::optional<View> before, std::optional<View> after, std::optional<View> sum, std::optional<View> out,
              std::optional<int> quantized, std::optional<int> permutation, std::optional<float> quantized_scale);
    void quantize(View x, int quantized, std::optional<int> permutation, std::optional<float> scale);
    void linear(std::variant<View, int> x, int weight, std::optional<int> bias, std::optional<View> residual, Gate gate,
                View out);
    void rotation(int frequencies, float scale, View out);
    void attention(const AttentionOptions& options, View q, View k, View v, std::optional<View> rotation, View out);
    void elementwise(std::vector<ElementwiseStep> steps, std::vector<View> inputs, std::vector<int> vectors, View out);
    void gather_rows(View x, View out);
    void permute(View x, int permutation, View out);

    // Operations added from here on are the heads'. Hidden states are copied to each of `inputs` before they run; then
    // `logits`, a whole float buffer of kind `logits`, has `count` rows for each of those. Heads neither attend nor
    // gather rows nor know positions.
    void begin_heads(const std::vector<View>& inputs, int logits, std::int64_t count);

    // The program; the builder is spent. `logits` must be a whole float buffer of kind `logits`, `hidden` columns of
    // one.
    std::unique_ptr<Program> finish(int logits, std::optional<View> hidden, const Kernels& kernels, int threads);

  private:
    struct BufferRef {
        bool is_float;
        int index;
    };

    // An attention operation that waits for the number of threads.
    struct PendingAttention {
        AttentionSpec spec;
        KvLayer cache;
        View q, k, v;
        std::optional<View> rotation;
        View out;
        bool logits_rows_only;
    };

    template <typename T>
    const T& weight_as(int index, const char* kind) const;
    const float* vector_data(int index, std::int64_t length) const;
    const std::int32_t* permutation_data(std::optional<int> index, std::int64_t length) const;
    const BufferRef& buffer(int index, bool is_float) const;
    void add_buffer(bool is_float, std::size_t index, std::int64_t offset, std::int64_t bytes);
    // The view with its buffer's index among float buffers; it has `width` columns and rows of kind `rows`.
    View resolve(View given, std::int64_t width, RowsKind rows) const;
    std::optional<View> resolve(std::optional<View> given, std::int64_t width, RowsKind rows) const;
    RowsKind rows_of(const View& given) const;
    // The index among quantized buffers, of rows of kind `rows` and `features` features.
    int resolve_quantized(int given, std::int64_t features, RowsKind rows) const;
    // A static scale of quantized buffer `target`, as kernels take it: 0 without one.
    float fixed_scale(int target, std::optional<float> scale) const;
    // The whole of a float buffer of kind `logits`.
    View answer(int given) const;
    void require_no_heads(const char* what) const;
    template <typename T>
    void add_op(T op);

    std::vector<KvLayerShape> layers_;
    std::unique_ptr<KvPool> pool_;
    std::vector<Weight> weights_;
    std::vector<BufferRef> buffers_;
    std::vector<bool> layer_used_;
    std::vector<PendingAttention> attentions_;
    Program::Parts parts_;
};

}  // namespace optimc

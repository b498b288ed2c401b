// A cache, some sequences and the steps that run them, for tests of the attention kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "isa/instruction_set.h"
#include "kernels/attention_plan.h"
#include "kernels/kernels.h"

namespace optimc::test {

// What a cache can hold: a type, and with scales whose they are for keys.
struct KvKind {
    KvType type;
    bool channel_keys;
};
inline constexpr KvKind kKvKinds[] = {{KvType::float32, false}, {KvType::bfloat16, false}, {KvType::int8, false},
                                      {KvType::int4, false},    {KvType::int8, true},      {KvType::int4, true}};

// Scales and minimums [heads, dim] of channels, between a quarter of what normally distributed keys need and four times
// that; no two alike.
struct KeyChannels {
    std::vector<float> scales, minimums;

    KeyChannels(KvType type, int heads, int dim);
    // The layer with channel keys; it reads this.
    KvLayer give(KvLayer layer) const;
};

struct AttentionShape {
    KvKind kind = {KvType::float32, false};
    int block_size = 16;
    int kv_heads = 2;
    int group = 2;  // query heads of a key/value head
    int head_dim = 64;
    std::int64_t window = 0;
    float softcap = 0;
    int rotary_dim = 0;
    bool interleaved = false;

    AttentionSpec spec() const;
    std::string name() const;
};

// The inputs of some tokens of one sequence: q [n, H * D], k and v [n, Hkv * D].
struct AttentionTokens {
    std::vector<float> q, k, v;

    AttentionTokens() = default;
    AttentionTokens(const AttentionShape& shape, int count, unsigned seed);
    // Token `index` of `other` joins at the end.
    void append(const AttentionShape& shape, const AttentionTokens& other, int index);
};

// Tokens [begin, end) of a sequence, tokens before being in the cache. With `parents` they are nodes of a tree: token
// begin + i follows token begin + parents[i], or the context if that is -1.
struct AttentionPart {
    int sequence;
    int begin;
    int end;
    std::vector<int> parents = {};
};

using AttentionItems = std::function<std::vector<std::vector<AttentionItem>>(const StepLayout&)>;

class AttentionWorld {
  public:
    // The pool is full of `garbage`: 0xff is NaN in every float of every type.
    AttentionWorld(const AttentionShape& shape, InstructionSet set, std::uint8_t garbage = 0xff);

    // Returns the sequence's index. Its blocks lie anywhere.
    int add(const AttentionTokens& tokens);

    // Slots of a tree's nodes are given out backwards.
    bool backwards = false;
    // Take items from last to first.
    bool last_first = false;

    // One step of these parts, shared out for `threads`: [T, H * D].
    std::vector<float> step(const std::vector<AttentionPart>& parts, int threads = 1);
    // The same with items of our own: each list is merged if it has several.
    std::vector<float> step_with(const std::vector<AttentionPart>& parts, const AttentionItems& items);
    // What the reference gives for the same parts, after their step.
    std::vector<float> reference(const std::vector<AttentionPart>& parts);

    const KvLayer& layer() const { return layer_; }
    std::int64_t slot(int sequence, int token) const;

  private:
    struct Step;
    void build(const std::vector<AttentionPart>& parts, Step& step) const;

    AttentionShape shape_;
    const Kernels& kernels_;
    std::vector<AttentionTokens> sequences_;
    std::vector<std::vector<std::int32_t>> blocks_;
    std::vector<std::int32_t> free_;
    std::vector<std::uint8_t> pool_;
    KeyChannels channels_;
    KvLayer layer_;
};

}  // namespace optimc::test

#include "tests/attention_world.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "kernels/attention_units.h"
#include "kernels/kv_layout.h"
#include "kernels/reference/attention_reference.h"
#include "kernels/select.h"

namespace optimc::test {

namespace {

constexpr std::int64_t kPoolTokens = 3000;

template <class T>
T* aligned(std::vector<T>& storage, std::size_t count) {
    storage.assign(count + 64 / sizeof(T), T{});
    return reinterpret_cast<T*>((reinterpret_cast<std::uintptr_t>(storage.data()) + 63) / 64 * 64);
}

}  // namespace

AttentionSpec AttentionShape::spec() const {
    return {kv_heads * group, kv_heads,   head_dim, 1.0f / std::sqrt(static_cast<float>(head_dim)), softcap, window,
            rotary_dim,       interleaved};
}

std::string AttentionShape::name() const {
    return "type " + std::to_string(static_cast<int>(kind.type)) + (kind.channel_keys ? " by channel S " : " S ") + std::to_string(block_size) + " heads " +
           std::to_string(kv_heads) + "x" + std::to_string(group) + " D " + std::to_string(head_dim) + " window " +
           std::to_string(window) + " softcap " + std::to_string(softcap) + " rotary " + std::to_string(rotary_dim) +
           (interleaved ? " interleaved" : "");
}

KeyChannels::KeyChannels(KvType type, int heads, int dim) {
    std::mt19937 random(5);
    std::uniform_real_distribution<float> power(-2, 2), shift(-1, 1);
    for (int i = 0; i < heads * dim; ++i) {
        const float reach = 3 * std::exp2(power(random));
        scales.push_back(type == KvType::int4 ? 2 * reach / 15 : reach / 127);
        minimums.push_back(type == KvType::int4 ? shift(random) - reach : 0);
    }
}

KvLayer KeyChannels::give(KvLayer layer) const {
    layer.key_scales = scales.data();
    if (layer.type == KvType::int4) layer.key_minimums = minimums.data();
    return layer;
}

AttentionTokens::AttentionTokens(const AttentionShape& shape, int count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal(0, 1);
    const std::size_t kv = static_cast<std::size_t>(count) * shape.kv_heads * shape.head_dim;
    for (std::size_t i = 0; i < kv * shape.group; ++i) q.push_back(2 * normal(generator));
    for (std::size_t i = 0; i < kv; ++i) k.push_back(normal(generator));
    for (std::size_t i = 0; i < kv; ++i) v.push_back(normal(generator));
}

void AttentionTokens::append(const AttentionShape& shape, const AttentionTokens& other, int index) {
    const std::size_t width = static_cast<std::size_t>(shape.kv_heads) * shape.head_dim;
    const auto row = [&](std::vector<float>& to, const std::vector<float>& from, std::size_t size) {
        to.insert(to.end(), from.begin() + index * size, from.begin() + (index + 1) * size);
    };
    row(q, other.q, width * shape.group);
    row(k, other.k, width);
    row(v, other.v, width);
}

AttentionWorld::AttentionWorld(const AttentionShape& shape, InstructionSet set, std::uint8_t garbage)
    : shape_(shape), kernels_(kernels_of(set)), channels_(shape.kind.type, shape.kv_heads, shape.head_dim) {
    const std::int64_t blocks = kPoolTokens / shape.block_size;
    const std::int64_t bytes = blocks * kv_block_bytes(shape.kind.type, shape.block_size, shape.kv_heads,
                                                       shape.head_dim, shape.kind.channel_keys);
    std::uint8_t* data = aligned(pool_, static_cast<std::size_t>(bytes));
    std::fill(data, data + bytes, garbage);
    layer_ = {data, blocks, shape.block_size, shape.kv_heads, shape.head_dim, shape.kind.type};
    if (shape.kind.channel_keys) layer_ = channels_.give(layer_);
    for (std::int32_t i = 0; i < blocks; ++i) free_.push_back(i);
    std::shuffle(free_.begin(), free_.end(), std::mt19937(7));
}

int AttentionWorld::add(const AttentionTokens& tokens) {
    const std::size_t count = tokens.k.size() / (static_cast<std::size_t>(shape_.kv_heads) * shape_.head_dim);
    const std::size_t blocks = (count + shape_.block_size - 1) / shape_.block_size;
    blocks_.emplace_back(free_.end() - static_cast<std::ptrdiff_t>(blocks), free_.end());
    free_.resize(free_.size() - blocks);
    sequences_.push_back(tokens);
    return static_cast<int>(sequences_.size()) - 1;
}

std::int64_t AttentionWorld::slot(int sequence, int token) const {
    return static_cast<std::int64_t>(blocks_[sequence][token / shape_.block_size]) * shape_.block_size +
           token % shape_.block_size;
}

// A step's arrays, and the call that uses them.
struct AttentionWorld::Step {
    std::vector<std::int64_t> positions, slots;
    std::vector<std::int32_t> query_start{0}, context_len, block_table;
    std::vector<std::uint8_t> tree_mask;
    AttentionTokens tokens;
    std::vector<float> rotation, out;
    StepLayout layout;
    AttentionCall call;
};

void AttentionWorld::build(const std::vector<AttentionPart>& parts, Step& step) const {
    std::size_t width = 1;
    std::int64_t longest = 0;
    bool tree = false;
    for (const AttentionPart& part : parts) {
        width = std::max(width, blocks_[part.sequence].size());
        longest = std::max<std::int64_t>(longest, part.end - part.begin);
        tree |= !part.parents.empty();
    }
    for (const AttentionPart& part : parts) {
        const int queries = part.end - part.begin;
        std::vector<std::vector<std::uint8_t>> masks;
        for (int i = 0; i < queries; ++i) {
            const int parent = part.parents.empty() ? i - 1 : part.parents[i];
            masks.push_back(parent < 0 ? std::vector<std::uint8_t>(longest) : masks[parent]);
            masks[i][i] = 1;
            step.tree_mask.insert(step.tree_mask.end(), masks[i].begin(), masks[i].end());
            step.positions.push_back(part.begin + std::count(masks[i].begin(), masks[i].end(), 1) - 1);
            const bool reversed = backwards && !part.parents.empty();
            step.slots.push_back(slot(part.sequence, reversed ? part.end - 1 - i : part.begin + i));
            step.tokens.append(shape_, sequences_[part.sequence], part.begin + i);
        }
        step.query_start.push_back(step.query_start.back() + queries);
        step.context_len.push_back(part.begin);
        std::vector<std::int32_t> table = blocks_[part.sequence];
        table.resize(width);
        step.block_table.insert(step.block_table.end(), table.begin(), table.end());
    }
    for (std::int64_t position : step.positions) {
        const int half = shape_.rotary_dim / 2;
        for (int i = 0; i < 2 * half; ++i) {
            const double angle = static_cast<double>(position) * std::pow(1e4, -(i % half) / static_cast<double>(half));
            step.rotation.push_back(static_cast<float>(i < half ? std::cos(angle) : std::sin(angle)));
        }
    }
    const std::int64_t tokens = static_cast<std::int64_t>(step.positions.size());
    const std::int64_t kv_width = static_cast<std::int64_t>(shape_.kv_heads) * shape_.head_dim;
    step.out.assign(static_cast<std::size_t>(tokens * kv_width * shape_.group), NAN);
    step.layout = {tokens,
                   static_cast<std::int64_t>(parts.size()),
                   step.positions.data(),
                   step.slots.data(),
                   step.query_start.data(),
                   step.context_len.data(),
                   step.block_table.data(),
                   static_cast<std::int64_t>(width),
                   tree ? step.tree_mask.data() : nullptr,
                   longest};
    step.call = {shape_.spec(),
                 {step.tokens.q.data(), kv_width * shape_.group},
                 {step.tokens.k.data(), kv_width},
                 {step.tokens.v.data(), kv_width},
                 {step.rotation.data(), shape_.rotary_dim},
                 {step.out.data(), kv_width * shape_.group},
                 layer_,
                 &step.layout};
}

std::vector<float> AttentionWorld::step(const std::vector<AttentionPart>& parts, int threads) {
    Step step;
    build(parts, step);
    AttentionPlan plan(shape_.spec(), threads, step.layout.num_tokens, step.layout.num_sequences);
    plan.fill(step.layout);
    std::vector<float> partials;
    std::vector<std::byte> scratch;
    float* partial = aligned(partials, static_cast<std::size_t>(plan.partial_floats()));
    std::byte* work = aligned(scratch, kernels_.attention_scratch(shape_.spec()));
    if (!plan.stores_inside()) kernels_.attention_store(step.call, 0, step.layout.num_tokens);
    for (std::size_t n = 0; n < plan.items().size(); ++n) {
        const std::size_t i = last_first ? plan.items().size() - 1 - n : n;
        const AttentionItem& item = plan.items()[i];
        if (plan.stores(i)) {
            kernels_.attention_store_head(step.call, step.layout.query_start[item.sequence],
                                          step.layout.query_start[item.sequence + 1], item.kv_head);
        }
        kernels_.attention_item(step.call, item, partial, work);
    }
    for (const AttentionMerge& merge : plan.merges()) {
        const std::int64_t count = static_cast<std::int64_t>(merge.count);
        kernels_.attention_merge(step.call, &plan.items()[merge.first], count, partial);
    }
    return step.out;
}

std::vector<float> AttentionWorld::step_with(const std::vector<AttentionPart>& parts, const AttentionItems& items) {
    Step step;
    build(parts, step);
    std::vector<std::byte> scratch;
    std::byte* work = aligned(scratch, kernels_.attention_scratch(shape_.spec()));
    kernels_.attention_store(step.call, 0, step.layout.num_tokens);
    for (std::vector<AttentionItem> list : items(step.layout)) {
        std::int64_t count = 0;
        for (AttentionItem& item : list) {
            item.partial = list.size() > 1 ? count : -1;
            const std::int64_t rows = (item.query_end - item.query_begin) * shape_.group;
            count += rows * (item.split_end - item.split_begin);
        }
        std::vector<float> partials;
        float* partial = aligned(partials, static_cast<std::size_t>(count * attention_partial_floats(shape_.head_dim)));
        for (const AttentionItem& item : list) kernels_.attention_item(step.call, item, partial, work);
        if (list.size() > 1) {
            kernels_.attention_merge(step.call, list.data(), static_cast<std::int64_t>(list.size()), partial);
        }
    }
    return step.out;
}

std::vector<float> AttentionWorld::reference(const std::vector<AttentionPart>& parts) {
    Step step;
    build(parts, step);
    return reference::attention(step.call);
}

}  // namespace optimc::test

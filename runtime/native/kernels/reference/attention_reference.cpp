#include "kernels/reference/attention_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/kv_layout.h"

namespace optimc::reference {

namespace {

template <class T>
T read(const std::uint8_t* data, std::int64_t index) {
    T value;
    std::memcpy(&value, data + index * static_cast<std::int64_t>(sizeof(T)), sizeof value);
    return value;
}

double widen_bf16(std::uint16_t half) {
    const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

struct Slot {
    const KvLayer& layer;
    KvParts parts;
    const std::uint8_t* head;
    std::int64_t offset;
    std::int64_t channels;  // of the head, among those of all heads

    Slot(const KvLayer& of, std::int64_t slot, int kv_head)
        : layer(of),
          parts(kv_parts(of)),
          head(optimc::kv_head(of, parts, slot / of.block_size, kv_head)),
          offset(slot % of.block_size),
          channels(static_cast<std::int64_t>(kv_head) * of.head_dim) {}

    double dequantized(double code, std::int64_t scales, std::int64_t minimums) const {
        if (!kv_has_scales(layer.type)) return code;
        const double scaled = code * read<float>(head + scales, offset);
        return kv_has_minimums(layer.type) ? scaled + read<float>(head + minimums, offset) : scaled;
    }
    double key(int d) const {
        const std::int64_t index = static_cast<std::int64_t>(d) * layer.block_size + offset;
        const std::int64_t pair = static_cast<std::int64_t>(d / 2) * layer.block_size + offset;
        const double code = layer.type == KvType::float32    ? read<float>(head, index)
                            : layer.type == KvType::bfloat16 ? widen_bf16(read<std::uint16_t>(head, index))
                            : layer.type == KvType::int8     ? read<std::int8_t>(head, index)
                                                             : head[pair] >> (d % 2 * 4) & 15;
        if (!layer.has_channel_keys()) return dequantized(code, parts.key_scales, parts.key_minimums);
        const double minimum = layer.key_minimums == nullptr ? 0.0 : layer.key_minimums[channels + d];
        return code * layer.key_scales[channels + d] + minimum;
    }
    double value(int d) const {
        const std::uint8_t* row = head + parts.values + offset * kv_value_row_bytes(layer.type, layer.head_dim);
        const double code = layer.type == KvType::float32    ? read<float>(row, d)
                            : layer.type == KvType::bfloat16 ? widen_bf16(read<std::uint16_t>(row, d))
                            : layer.type == KvType::int8     ? read<std::int8_t>(row, d)
                                                             : row[d / 32 * 16 + d % 16] >> (d % 32 / 16 * 4) & 15;
        return dequantized(code, parts.value_scales, parts.value_minimums);
    }
};

struct Key {
    std::int64_t slot;
    std::int64_t position;
};

// What query `query` of the sequence sees, without the window.
std::vector<Key> keys_of(const AttentionCall& call, std::int64_t sequence, std::int64_t query) {
    const StepLayout& step = *call.step;
    const std::int64_t first = step.query_start[sequence], size = call.cache.block_size;
    std::vector<Key> keys;
    for (std::int64_t i = 0; i < step.context_len[sequence]; ++i) {
        keys.push_back({step.block_table[sequence * step.table_width + i / size] * size + i % size, i});
    }
    for (std::int64_t j = 0; first + j < step.query_start[sequence + 1]; ++j) {
        const bool seen = step.tree_mask == nullptr ? j <= query
                                                    : step.tree_mask[(first + query) * step.mask_width + j] != 0;
        if (seen) keys.push_back({step.slots[first + j], step.positions[first + j]});
    }
    return keys;
}

std::vector<double> attend(const AttentionCall& call, const std::vector<Key>& keys, std::int64_t token, int head) {
    const AttentionSpec& spec = call.spec;
    const int kv_head = head / (spec.num_heads / spec.num_kv_heads);
    const std::vector<float> query = rotated(call, call.q, token, head);
    std::vector<double> scores;
    std::vector<std::vector<double>> values;
    for (const Key& key : keys) {
        if (spec.window > 0 && key.position <= call.step->positions[token] - spec.window) continue;
        const std::vector<double> k = cached_key(call.cache, key.slot, kv_head);
        double score = 0;
        for (int d = 0; d < spec.head_dim; ++d) score += static_cast<double>(query[d]) * k[d];
        score *= spec.scale;
        scores.push_back(spec.softcap > 0 ? spec.softcap * std::tanh(score / spec.softcap) : score);
        values.push_back(cached_value(call.cache, key.slot, kv_head));
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    std::vector<double> out(spec.head_dim);
    double sum = 0;
    for (std::size_t i = 0; i < scores.size(); ++i) {
        const double weight = std::exp(scores[i] - largest);
        sum += weight;
        for (int d = 0; d < spec.head_dim; ++d) out[d] += weight * values[i][d];
    }
    for (double& x : out) x /= sum;
    return out;
}

}  // namespace

std::vector<float> rotated(const AttentionCall& call, const ConstRows& rows, std::int64_t token, int head) {
    const AttentionSpec& spec = call.spec;
    const float* x = rows.data + token * rows.stride + head * spec.head_dim;
    std::vector<float> out(x, x + spec.head_dim);
    const float* table = call.rotation.data + token * call.rotation.stride;
    const int half = spec.rotary_dim / 2;
    for (int i = 0; i < half; ++i) {
        const int a = spec.interleaved ? 2 * i : i, b = spec.interleaved ? 2 * i + 1 : i + half;
        const double cosine = table[i], sine = table[half + i];
        out[a] = static_cast<float>(x[a] * cosine - x[b] * sine);
        out[b] = static_cast<float>(x[b] * cosine + x[a] * sine);
    }
    return out;
}

std::vector<double> cached_key(const KvLayer& layer, std::int64_t slot, int kv_head) {
    const Slot held(layer, slot, kv_head);
    std::vector<double> key(layer.head_dim);
    for (int d = 0; d < layer.head_dim; ++d) key[d] = held.key(d);
    return key;
}

std::vector<double> cached_value(const KvLayer& layer, std::int64_t slot, int kv_head) {
    const Slot held(layer, slot, kv_head);
    std::vector<double> value(layer.head_dim);
    for (int d = 0; d < layer.head_dim; ++d) value[d] = held.value(d);
    return value;
}

std::vector<float> attention(const AttentionCall& call) {
    const AttentionSpec& spec = call.spec;
    const StepLayout& step = *call.step;
    std::vector<float> out(static_cast<std::size_t>(step.num_tokens) * spec.num_heads * spec.head_dim);
    for (std::int64_t b = 0; b < step.num_sequences; ++b) {
        for (std::int64_t t = step.query_start[b]; t < step.query_start[b + 1]; ++t) {
            const std::vector<Key> keys = keys_of(call, b, t - step.query_start[b]);
            for (int head = 0; head < spec.num_heads; ++head) {
                const std::vector<double> row = attend(call, keys, t, head);
                std::copy(row.begin(), row.end(), out.begin() + (t * spec.num_heads + head) * spec.head_dim);
            }
        }
    }
    return out;
}

}  // namespace optimc::reference

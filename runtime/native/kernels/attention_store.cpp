// Keys are rotated, then keys and values are written to their slots in the cache's type.
#include "kernels/attention_rotate.h"
#include "kernels/declarations.h"
#include "kernels/kv_layout.h"

namespace optimc::OPTIMC_ISA {

namespace {

constexpr float kNan = __builtin_nanf("");
constexpr float kInfinity = __builtin_inff();

// To the nearest, ties to even; NaN stays NaN.
std::uint16_t narrow_bf16(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

// Zero for finite numbers, NaN if any of x [n] is infinite or NaN.
float not_finite(const float* x, int n) {
    Vec total = zero();
    for (int i = 0; i < n; i += kLanes) total = total + load_first(x + i, n - i < kLanes ? n - i : kLanes) * zero();
    return sum(total);
}

struct Quantized {
    float scale;  // NaN where x was not finite, so that it shows in every product
    float minimum;
};

// codes [n] are round(x / scale), saturated, as the bytes to store.
Quantized quantize_int8(const float* x, int n, std::uint8_t* codes) {
    Vec size = zero();
    for (int i = 0; i < n; i += kLanes) size = max(size, abs(load_first(x + i, n - i < kLanes ? n - i : kLanes)));
    const float scale = largest(size) / 127.0f + not_finite(x, n);
    const bool usable = scale > 0.0f && scale < kInfinity;
    for (int i = 0; i < n; i += kLanes) {
        const Vec part = load_first(x + i, n - i < kLanes ? n - i : kLanes);
        const Vec code = usable ? round(part / broadcast(scale)) : zero();
        store_i8((std::int8_t*)codes + i, max(broadcast(-127.0f), min(broadcast(127.0f), code)));
    }
    return {scale, 0.0f};
}

// codes [n] are round((x - minimum) / scale) in 0..15, one a byte.
Quantized quantize_int4(const float* x, int n, std::uint8_t* codes) {
    Vec low = broadcast(x[0]), high = low;
    for (int i = 0; i < n; i += kLanes) {
        const int count = n - i < kLanes ? n - i : kLanes;
        const Vec part = first(count, load_first(x + i, count), broadcast(x[0]));
        low = min(low, part);
        high = max(high, part);
    }
    const float minimum = -largest(zero() - low);
    const float range = (largest(high) - minimum) / 15.0f + not_finite(x, n);
    const bool usable = range > 0.0f && range < kInfinity;
    for (int i = 0; i < n; i += kLanes) {
        const Vec part = load_first(x + i, n - i < kLanes ? n - i : kLanes);
        const Vec code = usable ? round((part - broadcast(minimum)) / broadcast(range)) : zero();
        store_i8((std::int8_t*)codes + i, max(zero(), min(broadcast(15.0f), code)));
    }
    return {range < kInfinity ? range : kNan, minimum};
}

// codes [n] are round((x - minimum) / scale), each channel with its own, saturated to [low, high]. False, and all codes
// are 0, if x is not finite: who reads it has to be told another way.
bool quantize_channels(const float* x, int n, const float* scales, const float* minimums, float low, float high,
                       std::uint8_t* codes) {
    const bool usable = not_finite(x, n) == 0.0f;
    for (int i = 0; i < n; i += kLanes) {
        const int count = n - i < kLanes ? n - i : kLanes;
        const Vec scale = first(count, load_first(scales + i, count), broadcast(1.0f));
        const Vec minimum = minimums == nullptr ? zero() : load_first(minimums + i, count);
        const Vec code = usable ? round((load_first(x + i, count) - minimum) / scale) : zero();
        store_i8((std::int8_t*)codes + i, max(broadcast(low), min(broadcast(high), code)));
    }
    return usable;
}

// One head of one slot. Rows of keys and values hold D floats.
struct Slot {
    const KvLayer& layer;
    const KvParts& parts;
    std::uint8_t* head;
    std::int64_t offset;  // in the block
    int kv_head;

    float* scale(std::int64_t part) const { return (float*)(head + part) + offset; }
    const float* of_channels(const float* all) const {
        return all == nullptr ? nullptr : all + static_cast<std::int64_t>(kv_head) * layer.head_dim;
    }
    std::uint8_t* value() const {
        return head + parts.values + offset * kv_value_row_bytes(layer.type, layer.head_dim);
    }
    // Write rows [0, count) of the column that is the slot's key.
    template <class T, class Element>
    void write_key(int count, const Element& element) const {
        T* column = (T*)head + offset;
        const std::int64_t stride = layer.block_size;
        for (int row = 0; row < count; ++row) column[row * stride] = element(row);
    }
};

void store_float32(const Slot& slot, const float* key, const float* value) {
    const int dim = slot.layer.head_dim;
    slot.write_key<float>(dim, [&](int d) { return key[d]; });
    std::memcpy(slot.value(), value, static_cast<std::size_t>(dim) * sizeof(float));
}

void store_bfloat16(const Slot& slot, const float* key, const float* value) {
    const int dim = slot.layer.head_dim;
    slot.write_key<std::uint16_t>(dim, [&](int d) { return narrow_bf16(key[d]); });
    std::uint16_t* out = (std::uint16_t*)slot.value();
    for (int d = 0; d < dim; ++d) out[d] = narrow_bf16(value[d]);
}

// Codes of a key, and its scale where it has one of its own. Returns what the scale of the slot's value is multiplied
// by: NaN for a key that is not finite but has no scale to show it, else 1.
template <class Dynamic>
float quantize_key(const Slot& slot, const float* key, float low, float high, const Dynamic& dynamic,
                   std::uint8_t* codes) {
    const int dim = slot.layer.head_dim;
    if (slot.layer.has_channel_keys()) {
        const bool finite = quantize_channels(key, dim, slot.of_channels(slot.layer.key_scales),
                                              slot.of_channels(slot.layer.key_minimums), low, high, codes);
        return finite ? 1.0f : kNan;
    }
    const Quantized k = dynamic(key, dim, codes);
    *slot.scale(slot.parts.key_scales) = k.scale;
    if (kv_has_minimums(slot.layer.type)) *slot.scale(slot.parts.key_minimums) = k.minimum;
    return 1.0f;
}

void store_int8(const Slot& slot, const float* key, const float* value) {
    const int dim = slot.layer.head_dim;
    std::uint8_t codes[kMaxHeadDim + kLanes];
    const float shown = quantize_key(slot, key, -127.0f, 127.0f, quantize_int8, codes);
    slot.write_key<std::uint8_t>(dim, [&](int d) { return codes[d]; });
    *slot.scale(slot.parts.value_scales) = quantize_int8(value, dim, codes).scale * shown;
    std::memcpy(slot.value(), codes, static_cast<std::size_t>(dim));
}

void store_int4(const Slot& slot, const float* key, const float* value) {
    const int dim = slot.layer.head_dim;
    std::uint8_t codes[kMaxHeadDim + 2 * kLanes];
    const float shown = quantize_key(slot, key, 0.0f, 15.0f, quantize_int4, codes);
    if (dim % 2 != 0) codes[dim] = 0;
    slot.write_key<std::uint8_t>((dim + 1) / 2, [&](int i) {
        return static_cast<std::uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    });
    const Quantized v = quantize_int4(value, dim, codes);
    const int width = kv_value_width(KvType::int4, dim);
    for (int d = dim; d < width; ++d) codes[d] = 0;
    std::uint8_t* out = slot.value();
    for (int from = 0; from < width; from += 32) {
        for (int i = 0; i < 16; ++i) {
            out[from / 2 + i] = static_cast<std::uint8_t>(codes[from + i] | codes[from + 16 + i] << 4);
        }
    }
    *slot.scale(slot.parts.value_scales) = v.scale * shown;
    *slot.scale(slot.parts.value_minimums) = v.minimum;
}

}  // namespace

void attention_store_head(const AttentionCall& call, std::int64_t token_begin, std::int64_t token_end, int kv_head) {
    const KvLayer& layer = call.cache;
    const KvParts parts = kv_parts(layer);
    alignas(64) float rotated[kMaxHeadDim];
    for (std::int64_t t = token_begin; t < token_end; ++t) {
        const std::int64_t block = call.step->slots[t] / layer.block_size;
        const Slot slot{layer, parts, optimc::kv_head(layer, parts, block, kv_head),
                        call.step->slots[t] - block * layer.block_size, kv_head};
        const float* key = call.k.data + t * call.k.stride + kv_head * layer.head_dim;
        const float* value = call.v.data + t * call.v.stride + kv_head * layer.head_dim;
        if (call.spec.rotary_dim > 0) {
            rotate(call.spec, key, call.rotation.data + t * call.rotation.stride, rotated);
            key = rotated;
        }
        switch (layer.type) {
            case KvType::float32: store_float32(slot, key, value); break;
            case KvType::bfloat16: store_bfloat16(slot, key, value); break;
            case KvType::int8: store_int8(slot, key, value); break;
            case KvType::int4: store_int4(slot, key, value); break;
        }
    }
}

void attention_store(const AttentionCall& call, std::int64_t token_begin, std::int64_t token_end) {
    for (int head = 0; head < call.spec.num_kv_heads; ++head) attention_store_head(call, token_begin, token_end, head);
}

}  // namespace optimc::OPTIMC_ISA

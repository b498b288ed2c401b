#include "kernels/kv_move.h"

#include <cstring>

#include "kernels/kv_layout.h"

namespace optimc {

namespace {

void read_part(std::uint8_t* at, std::byte* packed, std::size_t bytes) { std::memcpy(packed, at, bytes); }

// One head of one slot between the cache and `packed`, in the same order both ways.
struct SlotBytes {
    const KvLayer& layer;
    KvParts parts = kv_parts(layer);
    std::int64_t element = layer.type == KvType::int4 ? 1 : kv_type_bits(layer.type) / 8;
    std::int64_t key_rows = kv_key_rows(layer.type, layer.head_dim);
    std::int64_t key_row_bytes = kv_key_row_bytes(layer.type, layer.block_size);
    std::int64_t value_bytes = kv_value_row_bytes(layer.type, layer.head_dim);
    bool own_keys = !layer.has_channel_keys();  // scales of keys lie in the block

    std::int64_t size() const {
        const std::int64_t of_slot = own_keys ? 2 * sizeof(float) : sizeof(float);
        return key_rows * element + value_bytes + (kv_has_scales(layer.type) ? of_slot : 0) +
               (kv_has_minimums(layer.type) ? of_slot : 0);
    }

    template <class Copy>
    void each(std::int64_t slot, int head, std::byte* packed, Copy copy) const {
        const std::int64_t offset = slot % layer.block_size;
        std::uint8_t* base = kv_head(layer, parts, slot / layer.block_size, head);
        const auto part = [&](std::uint8_t* at, std::int64_t bytes) {
            copy(at, packed, static_cast<std::size_t>(bytes));
            packed += bytes;
        };
        for (std::int64_t row = 0; row < key_rows; ++row) part(base + row * key_row_bytes + offset * element, element);
        part(base + parts.values + offset * value_bytes, value_bytes);
        if (kv_has_scales(layer.type)) {
            if (own_keys) part(base + parts.key_scales + 4 * offset, 4);
            part(base + parts.value_scales + 4 * offset, 4);
        }
        if (kv_has_minimums(layer.type)) {
            if (own_keys) part(base + parts.key_minimums + 4 * offset, 4);
            part(base + parts.value_minimums + 4 * offset, 4);
        }
    }
};

}  // namespace

std::size_t kv_move_scratch(const KvLayer& layer, std::int64_t count) {
    return static_cast<std::size_t>(SlotBytes{layer}.size() * count);
}

std::size_t kv_slot_bytes(const KvLayer& layer) {
    return static_cast<std::size_t>(SlotBytes{layer}.size() * layer.num_kv_heads);
}

void kv_read_slot(const KvLayer& layer, std::int64_t slot, std::byte* out) {
    const SlotBytes bytes{layer};
    for (int head = 0; head < layer.num_kv_heads; ++head) bytes.each(slot, head, out + head * bytes.size(), read_part);
}

void kv_move(const KvLayer& layer, const std::int64_t* src, const std::int64_t* dst, std::int64_t count,
             std::byte* scratch) {
    const SlotBytes slot{layer};
    for (int head = 0; head < layer.num_kv_heads; ++head) {
        for (std::int64_t i = 0; i < count; ++i) {
            slot.each(src[i], head, scratch + i * slot.size(), read_part);
        }
        for (std::int64_t i = 0; i < count; ++i) {
            slot.each(dst[i], head, scratch + i * slot.size(),
                      [](std::uint8_t* at, std::byte* packed, std::size_t bytes) { std::memcpy(at, packed, bytes); });
        }
    }
}

}  // namespace optimc

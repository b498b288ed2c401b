// Rows of a table by token id, as float32.
#include <cassert>

#include "kernels/declarations.h"
#include "kernels/weight_group.h"

namespace optimc::OPTIMC_ISA {

namespace {

inline Vec widen(const float* p) { return load(p); }

struct Bfloat16 {
    std::uint16_t bits;
};
inline Vec widen(const Bfloat16* p) { return load_bf16(&p->bits); }

struct Float16 {
    std::uint16_t bits;
};
inline Vec widen(const Float16* p) { return load_f16(&p->bits); }

template <class Element>
void embed_row(const Element* row, std::int64_t features, float scale, float* out) {
    const Vec factor = broadcast(scale);
    std::int64_t i = 0;
    for (; i + kLanes <= features; i += kLanes) store(out + i, widen(row + i) * factor);
    if (i == features) return;
    Element last[kLanes] = {};
    std::memcpy(last, row + i, static_cast<std::size_t>(features - i) * sizeof(Element));
    store_first(out + i, widen(last) * factor, static_cast<int>(features - i));
}

template <class Element>
void embed_rows(const void* table, std::int64_t features, const std::int64_t* ids, float scale, Rows out,
                std::int64_t row_begin, std::int64_t row_end) {
    for (std::int64_t row = row_begin; row < row_end; ++row) {
        embed_row(static_cast<const Element*>(table) + ids[row] * features, features, scale,
                  out.data + row * out.stride);
    }
}

// Rows of a weight in panels: an element every kPanelRows, sixteen of which are taken at a time.
template <class Element>
void embed_panel_rows(const FloatWeight& table, const std::int64_t* ids, float scale, Rows out, std::int64_t row_begin,
                      std::int64_t row_end) {
    const Vec factor = broadcast(scale);
    for (std::int64_t row = row_begin; row < row_end; ++row) {
        assert(ids[row] >= 0 && ids[row] < table.outputs);
        const std::int64_t panel = ids[row] / kPanelRows;
        const Element* source =
            static_cast<const Element*>(table.data) + panel * kPanelRows * table.features + ids[row] % kPanelRows;
        float* values = out.data + row * out.stride;
        for (std::int64_t i = 0; i < table.features; i += kLanes) {
            const int count = table.features - i < kLanes ? static_cast<int>(table.features - i) : kLanes;
            Element taken[kLanes] = {};
            for (int j = 0; j < count; ++j) taken[j] = source[(i + j) * kPanelRows];
            store_first(values + i, widen(taken) * factor, count);
        }
    }
}

float lane(Vec values, std::int64_t i) {
    float all[kLanes];
    store(all, values);
    return all[i];
}

}  // namespace

void embed_float(const void* table, FloatType type, std::int64_t features, const std::int64_t* ids, float scale, Rows out,
                 std::int64_t row_begin, std::int64_t row_end) {
    switch (type) {
        case FloatType::float32: return embed_rows<float>(table, features, ids, scale, out, row_begin, row_end);
        case FloatType::bfloat16: return embed_rows<Bfloat16>(table, features, ids, scale, out, row_begin, row_end);
        case FloatType::float16: return embed_rows<Float16>(table, features, ids, scale, out, row_begin, row_end);
    }
}

void embed_panels(const FloatWeight& table, const std::int64_t* ids, float scale, Rows out, std::int64_t row_begin,
                  std::int64_t row_end) {
    switch (table.type) {
        case FloatType::float32: return embed_panel_rows<float>(table, ids, scale, out, row_begin, row_end);
        case FloatType::bfloat16: return embed_panel_rows<Bfloat16>(table, ids, scale, out, row_begin, row_end);
        case FloatType::float16: return embed_panel_rows<Float16>(table, ids, scale, out, row_begin, row_end);
    }
}

void embed_int(const IntWeight& table, const std::int64_t* ids, float scale, Rows out, std::int64_t row_begin,
               std::int64_t row_end) {
    const PanelLayout layout(table);
    const std::int64_t stretch = 32 / table.bits;  // features in the 4 bytes a row has at a time
    for (std::int64_t row = row_begin; row < row_end; ++row) {
        assert(ids[row] >= 0 && ids[row] < table.outputs);
        const std::int64_t n = ids[row] % kPanelRows;
        const std::uint8_t* data = table.data + ids[row] / kPanelRows * layout.panel_bytes;
        float* values = out.data + row * out.stride;
        for (std::int64_t g = 0; g < layout.groups; ++g) {
            const WeightGroup group = layout.group(data, g);
            const int sixteen = static_cast<int>(n / kLanes * kLanes);
            const float row_scale = lane(layout.scales(group, sixteen), n % kLanes);
            const float row_zero = lane(layout.zeros(group, sixteen), n % kLanes);
            const std::int64_t features = table.group_features(g);
            for (std::int64_t i = 0; i < features; ++i) {
                const std::uint8_t* word = group.codes + i / stretch * 4 * kPanelRows + 4 * n;
                const int byte = word[i % 4];
                const int code = table.bits == 8 ? byte : i % 8 < 4 ? byte & 15 : byte >> 4;
                values[i] = (static_cast<float>(code) - row_zero) * row_scale * scale;
            }
            values += features;
            data = group.next;
        }
    }
}

}  // namespace optimc::OPTIMC_ISA

// Merge what several items found for the same queries.
#include "kernels/attention_state.h"
#include "kernels/declarations.h"

namespace optimc::OPTIMC_ISA {

void attention_merge(const AttentionCall& call, const AttentionItem* first, std::int64_t num_items,
                     const float* partials) {
    const int head_dim = call.spec.head_dim, width = attention_width(head_dim);
    const int group = call.spec.num_heads / call.spec.num_kv_heads;
    const std::int64_t unit = attention_partial_floats(head_dim);
    const std::int64_t tokens = call.step->query_start[first->sequence] + first->query_begin;
    const std::int64_t rows = static_cast<std::int64_t>(first->query_end - first->query_begin) * group;
    alignas(64) float values[kMaxHeadDim];
    float largest, sum;
    const RowState row{values, &largest, &sum};
    for (std::int64_t r = 0; r < rows; ++r) {
        clear_row(row, width);
        for (std::int64_t i = 0; i < num_items; ++i) {
            const std::int64_t splits = first[i].split_end - first[i].split_begin;
            const float* partial = partials + (first[i].partial + r * splits) * unit;
            for (std::int64_t s = 0; s < splits; ++s, partial += unit) {
                merge_split(row, partial, partial[width], partial[width + 1], width);
            }
        }
        const std::int64_t head = first->kv_head * group + r % group;
        finish_row(row, call.out.data + (tokens + r / group) * call.out.stride + head * head_dim, head_dim);
    }
}

}  // namespace optimc::OPTIMC_ISA

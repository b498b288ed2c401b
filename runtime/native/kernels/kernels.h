// The kernels of one instruction set: one signature each, whatever the set.
//
// No kernel allocates, locks or throws. A range [begin, end) of rows, panels or items is what one thread does; ranges of
// different threads never write the same element.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/types.h"

namespace optimc {

struct Kernels {
    const char* name;

    // codes = round(x / scale), scale = max|x| / 127 of the row's group (all codes 0 and scale 0 where the group is 0).
    // x [M, features], taken in the order `permutation` [features] gives, if not nullptr. NaN or infinity in a group makes
    // its scale NaN, so that it stays visible in every product. With `fixed_scale` above 0 every other group's scale is
    // that, and codes saturate.
    void (*quantize_rows)(ConstRows x, std::int64_t features, std::int64_t group, const std::int32_t* permutation,
                          float fixed_scale, const QuantizedRows& out, std::int64_t row_begin, std::int64_t row_end);

    // Products of 8-bit activations. Exact integer sums per group, groups added in order: the result of an element
    // depends on neither range.
    void (*linear_int)(const IntWeight& weight, const QuantizedRows& x, const Epilogue& epilogue,
                       std::int64_t row_begin, std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end);

    // Products of float32 activations x [M, features] (already in the order of the codes) with the dequantized weight.
    void (*linear_int_exact)(const IntWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t row_begin,
                             std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end,
                             std::byte* scratch);
    // Bytes of scratch `linear_int_exact` needs, 64-byte aligned, for each thread.
    std::size_t (*linear_int_exact_scratch)();

    // Products of float32 activations with a floating-point weight: one chain of multiply-adds over features in order.
    void (*linear_float)(const FloatWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t row_begin,
                         std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end);

    // out = after + norm(x + before); before and after are optional (data nullptr). sum = x + before, if its data is set.
    // out may be x or sum.
    void (*norm)(const Norm& norm, ConstRows x, ConstRows before, ConstRows after, Rows sum, Rows out,
                 std::int64_t row_begin, std::int64_t row_end);

    void (*elementwise)(const Elementwise& expression, std::int64_t row_begin, std::int64_t row_end);

    // out[m] = scale * row ids[m] of the table, a row-major [V, features] matrix.
    void (*embed_float)(const void* table, FloatType type, std::int64_t features, const std::int64_t* ids, float scale,
                        Rows out, std::int64_t row_begin, std::int64_t row_end);
    // The same from a linear weight [V, features] in panels, as a tied head has it.
    void (*embed_panels)(const FloatWeight& table, const std::int64_t* ids, float scale, Rows out,
                         std::int64_t row_begin, std::int64_t row_end);
    // The same from a quantized weight [V, features] in panels.
    void (*embed_int)(const IntWeight& table, const std::int64_t* ids, float scale, Rows out, std::int64_t row_begin,
                      std::int64_t row_end);

    // Rotate and store keys and values of tokens [begin, end) in their slots.
    void (*attention_store)(const AttentionCall& call, std::int64_t token_begin, std::int64_t token_end);
    // The same for one key/value head. A thread that has stored an item's keys may attend to them without a barrier.
    void (*attention_store_head)(const AttentionCall& call, std::int64_t token_begin, std::int64_t token_end,
                                 int kv_head);
    // Attend. `partials` receives the partial results of items that have them.
    void (*attention_item)(const AttentionCall& call, const AttentionItem& item, float* partials, std::byte* scratch);
    // Merge the partial results of an item's queries and heads over all their splits, in order, into `out`. `first` is
    // the item that holds split 0 of these queries; the others follow it.
    void (*attention_merge)(const AttentionCall& call, const AttentionItem* first, std::int64_t num_items,
                            const float* partials);
    // Bytes of scratch `attention_item` needs, 64-byte aligned, for each thread.
    std::size_t (*attention_scratch)(const AttentionSpec& spec);
};

// The tables; those of x86-64 exist in builds for it only. See kernels/select.h.
const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();

}  // namespace optimc

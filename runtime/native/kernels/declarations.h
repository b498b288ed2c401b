// The functions behind a `Kernels` table, in the namespace of the instruction set that is being compiled.
#pragma once

#include "kernels/kernels.h"

namespace optimc::OPTIMC_ISA {

void quantize_rows(ConstRows x, std::int64_t features, std::int64_t group, const std::int32_t* permutation,
                   float fixed_scale, const QuantizedRows& out, std::int64_t row_begin, std::int64_t row_end);
void linear_int(const IntWeight& weight, const QuantizedRows& x, const Epilogue& epilogue, std::int64_t row_begin,
                std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end);
void linear_int_exact(const IntWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t row_begin,
                      std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end, std::byte* scratch);
std::size_t linear_int_exact_scratch();
void linear_float(const FloatWeight& weight, ConstRows x, const Epilogue& epilogue, std::int64_t row_begin,
                  std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end);
void norm(const Norm& norm, ConstRows x, ConstRows before, ConstRows after, Rows sum, Rows out, std::int64_t row_begin,
          std::int64_t row_end);
void elementwise(const Elementwise& expression, std::int64_t row_begin, std::int64_t row_end);
void embed_float(const void* table, FloatType type, std::int64_t features, const std::int64_t* ids, float scale, Rows out,
                 std::int64_t row_begin, std::int64_t row_end);
void embed_panels(const FloatWeight& table, const std::int64_t* ids, float scale, Rows out, std::int64_t row_begin,
                  std::int64_t row_end);
void embed_int(const IntWeight& table, const std::int64_t* ids, float scale, Rows out, std::int64_t row_begin,
               std::int64_t row_end);
void attention_store(const AttentionCall& call, std::int64_t token_begin, std::int64_t token_end);
void attention_store_head(const AttentionCall& call, std::int64_t token_begin, std::int64_t token_end, int kv_head);
void attention_item(const AttentionCall& call, const AttentionItem& item, float* partials, std::byte* scratch);
void attention_merge(const AttentionCall& call, const AttentionItem* first, std::int64_t num_items,
                     const float* partials);
std::size_t attention_scratch(const AttentionSpec& spec);

}  // namespace optimc::OPTIMC_ISA

// The kernels of the instruction set being compiled, as a table.
#include "kernels/declarations.h"

namespace optimc {

namespace {

constexpr Kernels kTable = {
    .name = OPTIMC_ISA_NAME,
    .quantize_rows = OPTIMC_ISA::quantize_rows,
    .linear_int = OPTIMC_ISA::linear_int,
    .linear_int_exact = OPTIMC_ISA::linear_int_exact,
    .linear_int_exact_scratch = OPTIMC_ISA::linear_int_exact_scratch,
    .linear_float = OPTIMC_ISA::linear_float,
    .norm = OPTIMC_ISA::norm,
    .elementwise = OPTIMC_ISA::elementwise,
    .embed_float = OPTIMC_ISA::embed_float,
    .embed_panels = OPTIMC_ISA::embed_panels,
    .embed_int = OPTIMC_ISA::embed_int,
    .attention_store = OPTIMC_ISA::attention_store,
    .attention_store_head = OPTIMC_ISA::attention_store_head,
    .attention_item = OPTIMC_ISA::attention_item,
    .attention_merge = OPTIMC_ISA::attention_merge,
    .attention_scratch = OPTIMC_ISA::attention_scratch,
};

}  // namespace

const Kernels* OPTIMC_ISA_TABLE() { return &kTable; }

}  // namespace optimc

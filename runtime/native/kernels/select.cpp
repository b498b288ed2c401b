#include "kernels/select.h"

#include <stdexcept>
#include <string>

namespace optimc {

#if defined(OPTIMC_X86_KERNELS)
namespace avx512_bf16 {

// Of kernels/attention_item.cpp, compiled once more.
void attention_item(const AttentionCall& call, const AttentionItem& item, float* partials, std::byte* scratch);

}  // namespace avx512_bf16

namespace amx {

// Of kernels/linear_int_amx.cpp.
void linear_int(const IntWeight& weight, const QuantizedRows& x, const Epilogue& epilogue, std::int64_t row_begin,
                std::int64_t row_end, std::int64_t panel_begin, std::int64_t panel_end);

}  // namespace amx

namespace {

// Those of avx512 but for the products of attention.
const Kernels* kernels_avx512_bf16() {
    static const Kernels table = [] {
        Kernels kernels = *kernels_avx512();
        kernels.name = "avx512_bf16";
        kernels.attention_item = avx512_bf16::attention_item;
        return kernels;
    }();
    return &table;
}

// Those of avx512 but for products with integer weights, whose bits are the same.
const Kernels* kernels_amx() {
    static const Kernels table = [] {
        Kernels kernels = *kernels_avx512();
        kernels.name = "amx";
        kernels.linear_int = amx::linear_int;
        return kernels;
    }();
    return &table;
}

}  // namespace
#endif

const Kernels& kernels_of(InstructionSet set) {
    switch (set) {
        case InstructionSet::portable: return *kernels_portable();
#if defined(OPTIMC_X86_KERNELS)
        case InstructionSet::avx2: return *kernels_avx2();
        case InstructionSet::avx512: return *kernels_avx512();
        case InstructionSet::avx512_bf16: return *kernels_avx512_bf16();
        case InstructionSet::amx: return *kernels_amx();
#else
        default: break;
#endif
    }
    throw std::invalid_argument(std::string("no kernels for ") + name_of(set) + " in this build");
}

}  // namespace optimc

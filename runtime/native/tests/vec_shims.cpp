// Compiled once per instruction set, as the kernels are.
#include "tests/vec_shims.h"

#include "kernels/vec_math.h"

namespace optimc::test {

namespace {

namespace isa = OPTIMC_ISA;
using isa::Vec;
using isa::load;
using isa::store;

template <Vec (*function)(Vec)>
void unary(const float* a, float* out) {
    store(out, function(load(a)));
}

template <Vec (*function)(Vec, Vec)>
void binary(const float* a, const float* b, float* out) {
    store(out, function(load(a), load(b)));
}

template <auto load_elements, class Element>
void widen(const Element* p, float* out) {
    store(out, load_elements(p));
}

Vec same(Vec a) { return a; }

constexpr VecShims kTable = {
    .copy = unary<same>,
    .abs = unary<isa::abs>,
    .sqrt = unary<isa::sqrt>,
    .round = unary<isa::round>,
    .exp = unary<isa::exp>,
    .sigmoid = unary<isa::sigmoid>,
    .silu = unary<isa::silu>,
    .tanh = unary<isa::tanh>,
    .erf = unary<isa::erf>,
    .gelu = unary<isa::gelu>,
    .gelu_tanh = unary<isa::gelu_tanh>,
    .add = binary<[](Vec a, Vec b) { return a + b; }>,
    .sub = binary<[](Vec a, Vec b) { return a - b; }>,
    .mul = binary<[](Vec a, Vec b) { return a * b; }>,
    .div = binary<[](Vec a, Vec b) { return a / b; }>,
    .min = binary<isa::min>,
    .max = binary<isa::max>,
    .scale_by_power = binary<isa::scale_by_power>,
    .broadcast = [](float x, float* out) { store(out, isa::broadcast(x)); },
    .fma = [](const float* a, const float* b, const float* c, float* out) {
        store(out, isa::fma(load(a), load(b), load(c)));
    },
    .where_less = [](const float* a, const float* b, const float* x, const float* y, float* out) {
        store(out, isa::where_less(load(a), load(b), load(x), load(y)));
    },
    .where_nan = [](const float* a, const float* x, const float* y, float* out) {
        store(out, isa::where_nan(load(a), load(x), load(y)));
    },
    .first = [](int n, const float* a, const float* b, float* out) { store(out, isa::first(n, load(a), load(b))); },
    .load_first = [](const float* p, int n, float* out) { store(out, isa::load_first(p, n)); },
    .store_first = [](float* p, const float* a, int n) { isa::store_first(p, load(a), n); },
    .load_bf16 = widen<isa::load_bf16>,
    .load_f16 = widen<isa::load_f16>,
    .load_i8 = widen<isa::load_i8>,
    .load_u8 = widen<isa::load_u8>,
    .load_i32 = widen<isa::load_i32>,
    .store_i8 = [](std::int8_t* p, const float* a) { isa::store_i8(p, load(a)); },
    .sum = [](const float* a) { return isa::sum(load(a)); },
    .largest = [](const float* a) { return isa::largest(load(a)); },
};

}  // namespace

const VecShims* OPTIMC_ISA_TABLE() { return &kTable; }

}  // namespace optimc::test

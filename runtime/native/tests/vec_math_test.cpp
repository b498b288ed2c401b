#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/reference/gate_reference.h"
#include "tests/check.h"
#include "tests/vec_shims.h"

namespace optimc::test {

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kTiny = 1e-40f;  // subnormal

template <class Test>
void for_each_set(Test test) {
    for (InstructionSet set : supported_instruction_sets()) test(vec_shims(set), std::string(name_of(set)));
}

float one(VecShims::Unary function, float x) {
    std::array<float, 16> in, out;
    in.fill(x);
    function(in.data(), out.data());
    return out[7];
}

// The spacing of float32 at `exact`.
double ulp(double exact) {
    int exponent;
    std::frexp(std::fmax(std::fabs(exact), std::numeric_limits<float>::min()), &exponent);
    return std::ldexp(1.0, exponent - 24);
}

// Calls visit(x, got) for float32 in [low, high]: evenly spaced bit patterns, then evenly spaced values.
template <class Visit>
void sweep(VecShims::Unary function, float low, float high, Visit visit) {
    std::array<float, 16> in, out;
    std::size_t filled = 0;
    const auto add = [&](float x) {
        if (!(low <= x && x <= high)) return;
        in[filled++] = x;
        if (filled < in.size()) return;
        filled = 0;
        function(in.data(), out.data());
        for (std::size_t i = 0; i < in.size(); ++i) visit(in[i], out[i]);
    };
    constexpr std::uint64_t kStride = 16381;  // prime, so that all low bits occur
    for (std::uint64_t bits = 0; bits < 1ull << 32; bits += kStride) {
        add(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
    }
    constexpr int kValues = 200000;
    for (int i = 0; i < kValues; ++i) add(low + (high - low) * static_cast<float>(i) / kValues);
}

// Largest error of `function`, each error divided by unit(x, exact).
template <class Exact, class Unit>
double worst_error(VecShims::Unary function, Exact exact, float low, float high, Unit unit) {
    double worst = 0;
    sweep(function, low, high, [&](float x, float got) {
        const double want = exact(static_cast<double>(x));
        const double error = std::fabs(got - want) / unit(x, want);
        if (!(error <= worst)) worst = error;
    });
    return worst;
}

double ulps(float, double exact) { return ulp(exact); }
double size_of(float x, double) { return std::fmax(std::fabs(static_cast<double>(x)), 1e-30); }

void check_below(double error, double bound, const std::string& what) {
    CHECK_MESSAGE(error <= bound, what + ": error " + std::to_string(error) + ", bound " + std::to_string(bound));
}

}  // namespace

TEST("vec_math: exp, sigmoid, silu, tanh and erf keep their bounds in ulps") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        const auto exp = [](double x) { return std::exp(x); };
        const auto tanh = [](double x) { return std::tanh(x); };
        const auto erf = [](double x) { return std::erf(x); };
        check_below(worst_error(vec.exp, exp, -87.3f, 88.3f, ulps), 2, name + " exp");
        check_below(worst_error(vec.sigmoid, reference::sigmoid, -87.3f, 100, ulps), 3, name + " sigmoid");
        check_below(worst_error(vec.silu, reference::silu, -87.3f, 100, ulps), 3, name + " silu");
        check_below(worst_error(vec.tanh, tanh, -20, 20, ulps), 3, name + " tanh");
        check_below(worst_error(vec.erf, erf, -6, 6, ulps), 3, name + " erf");
    });
}

TEST("vec_math: both gelus are within 2e-7 of their argument's size") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        check_below(worst_error(vec.gelu, reference::gelu, -30, 30, size_of) * 1e7, 2, name + " gelu, in 1e-7");
        check_below(worst_error(vec.gelu_tanh, reference::gelu_tanh, -30, 30, size_of) * 1e7, 2,
                    name + " gelu_tanh, in 1e-7");
    });
}

TEST("vec_math: exp ends at both sides") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        CHECK_MESSAGE(one(vec.exp, 0) == 1 && one(vec.exp, -0.0f) == 1, name);
        CHECK_MESSAGE(one(vec.exp, kTiny) == 1 && one(vec.exp, -kTiny) == 1, name);
        for (float x : {-87.4f, -88.0f, -1e4f, -3e38f, -kInf}) CHECK_MESSAGE(one(vec.exp, x) == 0, name);
        const float largest = one(vec.exp, 88.3f);
        CHECK_MESSAGE(std::isfinite(largest), name);
        for (float x : {88.4f, 89.0f, 1e4f, 3e38f, kInf}) CHECK_MESSAGE(one(vec.exp, x) == largest, name);
    });
}

TEST("vec_math: NaN stays NaN, infinities saturate, subnormals and zeros survive") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        for (auto function : {vec.exp, vec.sigmoid, vec.silu, vec.tanh, vec.erf, vec.gelu, vec.gelu_tanh}) {
            CHECK_MESSAGE(std::isnan(one(function, kNaN)), name);
        }
        for (auto function : {vec.tanh, vec.erf}) {
            CHECK_MESSAGE(one(function, kInf) == 1 && one(function, -kInf) == -1, name);
            CHECK_MESSAGE(one(function, 3e38f) == 1 && one(function, -3e38f) == -1, name);
            CHECK_MESSAGE(one(function, 0) == 0, name);
            CHECK_MESSAGE(std::fabs(one(function, kTiny) - kTiny) <= 0.2f * kTiny, name);
        }
        CHECK_MESSAGE(one(vec.sigmoid, kInf) == 1 && one(vec.sigmoid, -kInf) < 1e-38f, name);
        CHECK_MESSAGE(one(vec.sigmoid, 0) == 0.5f && one(vec.sigmoid, kTiny) == 0.5f, name);
        for (auto function : {vec.silu, vec.gelu, vec.gelu_tanh}) {
            CHECK_MESSAGE(one(function, kInf) == kInf, name);
            CHECK_MESSAGE(one(function, 3e38f) == 3e38f, name);
            // What the clamp of exp leaves of the left tail vanishes beside any sum it could enter.
            CHECK_MESSAGE(std::fabs(one(function, -1000)) < 1e-30f, name);
            CHECK_MESSAGE(one(function, 0) == 0, name);
            CHECK_MESSAGE(std::fabs(one(function, kTiny) - kTiny / 2) <= 1e-44f, name);
        }
    });
}

}  // namespace optimc::test

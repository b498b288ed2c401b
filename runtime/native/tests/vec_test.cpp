#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "kernels/reference/float_elements.h"
#include "tests/check.h"
#include "tests/memory_edge.h"
#include "tests/vec_shims.h"

namespace optimc::test {

namespace {

using Lanes = std::array<float, 16>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// Equal in every bit, NaN equal to NaN.
bool same(float a, float b) {
    return (std::isnan(a) && std::isnan(b)) || std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

bool same(const Lanes& a, const Lanes& b) {
    for (std::size_t i = 0; i < a.size(); ++i)
        if (!same(a[i], b[i])) return false;
    return true;
}

template <class Function>
Lanes each(Function f) {
    Lanes lanes;
    for (std::size_t i = 0; i < lanes.size(); ++i) lanes[i] = f(i);
    return lanes;
}

template <class Function>
void expect_each(const Lanes& got, Function want, const std::string& what) {
    CHECK_MESSAGE(same(got, each(want)), what);
}

// Normally distributed values, or any bits at all: all exponents, NaN, infinities and subnormals.
Lanes random_lanes(std::mt19937& generator, bool any_bits) {
    std::normal_distribution<float> normal;
    return each([&](std::size_t) {
        return any_bits ? std::bit_cast<float>(static_cast<std::uint32_t>(generator())) : normal(generator);
    });
}

template <class Test>
void for_each_set(Test test) {
    for (InstructionSet set : supported_instruction_sets()) test(vec_shims(set), std::string(name_of(set)));
}

}  // namespace

TEST("vec: arithmetic rounds each lane as a scalar does") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        std::mt19937 generator(1);
        for (int trial = 0; trial < 2000; ++trial) {
            const Lanes a = random_lanes(generator, trial % 2), b = random_lanes(generator, trial % 2);
            const auto binary = [&](VecShims::Binary function, auto scalar, const char* what) {
                Lanes got;
                function(a.data(), b.data(), got.data());
                const Lanes want = each([&](std::size_t i) { return scalar(a[i], b[i]); });
                CHECK_MESSAGE(same(got, want), name + " " + what);
            };
            binary(vec.add, [](float x, float y) { return x + y; }, "add");
            binary(vec.sub, [](float x, float y) { return x - y; }, "sub");
            binary(vec.mul, [](float x, float y) { return x * y; }, "mul");
            binary(vec.div, [](float x, float y) { return x / y; }, "div");
            binary(vec.max, [](float x, float y) { return x > y ? x : y; }, "max");
            binary(vec.min, [](float x, float y) { return x < y ? x : y; }, "min");
            const auto unary = [&](VecShims::Unary function, auto scalar, const char* what) {
                Lanes got;
                function(a.data(), got.data());
                expect_each(got, [&](std::size_t i) { return scalar(a[i]); }, name + " " + what);
            };
            unary(vec.copy, [](float x) { return x; }, "load and store");
            unary(vec.abs, [](float x) { return std::fabs(x); }, "abs");
            unary(vec.sqrt, [](float x) { return std::sqrt(x); }, "sqrt");
        }
        Lanes got;
        vec.broadcast(2.5f, got.data());
        expect_each(got, [](std::size_t) { return 2.5f; }, name + " broadcast");
    });
}

TEST("vec: fma rounds once, in portable code twice") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        std::mt19937 generator(2);
        for (int trial = 0; trial < 2000; ++trial) {
            const bool any = trial % 2;
            const Lanes a = random_lanes(generator, any), b = random_lanes(generator, any);
            const Lanes c = random_lanes(generator, any);
            Lanes got;
            vec.fma(a.data(), b.data(), c.data(), got.data());
            const Lanes want = each([&](std::size_t i) {
                return name == "portable" ? a[i] * b[i] + c[i] : std::fma(a[i], b[i], c[i]);
            });
            CHECK_MESSAGE(same(got, want), name);
        }
    });
}

TEST("vec: round goes to the nearest integer, ties to even") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        const Lanes ties = {0.5f, 1.5f, 2.5f, 3.5f, -0.5f, -1.5f, -2.5f, 126.5f, -126.5f, 127.5f,
                            0.49999997f, 1e6f + 0.5f, 2097151.5f, -2097151.5f, kNaN, kInf};
        Lanes got;
        vec.round(ties.data(), got.data());
        for (std::size_t i = 0; i < ties.size(); ++i) {
            const float want = std::nearbyint(ties[i]);
            const bool both_nan = std::isnan(got[i]) && std::isnan(want);
            CHECK_MESSAGE(got[i] == want || both_nan, name + " " + std::to_string(ties[i]));
        }
        for (int base = -4000; base < 4000; base += 16) {
            const Lanes values = each([&](std::size_t i) { return (base + static_cast<int>(i)) / 16.0f; });
            vec.round(values.data(), got.data());
            for (std::size_t i = 0; i < values.size(); ++i) CHECK_MESSAGE(got[i] == std::nearbyint(values[i]), name);
        }
    });
}

TEST("vec: comparisons choose by lane; NaN is less than nothing") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        std::mt19937 generator(3);
        for (int trial = 0; trial < 2000; ++trial) {
            Lanes a = random_lanes(generator, trial % 2), b = random_lanes(generator, trial % 2);
            a[3] = b[3];
            a[4] = kNaN;
            b[5] = kNaN;
            const Lanes x = each([](std::size_t i) { return static_cast<float>(i); });
            const Lanes y = each([](std::size_t i) { return -static_cast<float>(i) - 1; });
            Lanes got;
            vec.where_less(a.data(), b.data(), x.data(), y.data(), got.data());
            expect_each(got, [&](std::size_t i) { return a[i] < b[i] ? x[i] : y[i]; }, name + " less");
            vec.where_nan(a.data(), x.data(), y.data(), got.data());
            expect_each(got, [&](std::size_t i) { return std::isnan(a[i]) ? x[i] : y[i]; }, name + " nan");
        }
    });
}

TEST("vec: partial loads and stores touch nothing beyond their lanes") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        MemoryEdge edge(64);
        const Lanes ones = each([](std::size_t i) { return static_cast<float>(i) + 1; });
        const Lanes twos = each([](std::size_t i) { return -static_cast<float>(i); });
        for (int n = 0; n <= 16; ++n) {
            const auto below = [n](std::size_t i) { return static_cast<int>(i) < n; };
            auto* const p = edge.last<float>(static_cast<std::size_t>(n));
            vec.store_first(p, ones.data(), n);
            Lanes got;
            vec.load_first(p, n, got.data());
            expect_each(got, [&](std::size_t i) { return below(i) ? ones[i] : 0.0f; }, name + " load_first");
            Lanes target = twos;
            vec.store_first(target.data(), ones.data(), n);
            const Lanes mixed = each([&](std::size_t i) { return below(i) ? ones[i] : twos[i]; });
            CHECK_MESSAGE(same(target, mixed), name + " store_first");
            vec.first(n, ones.data(), twos.data(), got.data());
            CHECK_MESSAGE(same(got, mixed), name + " first");
        }
    });
}

TEST("vec: half types widen exactly, all 65536 patterns") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        for (unsigned base = 0; base < 65536; base += 16) {
            std::array<std::uint16_t, 16> bits;
            for (unsigned i = 0; i < 16; ++i) bits[i] = static_cast<std::uint16_t>(base + i);
            Lanes got;
            vec.load_bf16(bits.data(), got.data());
            expect_each(got, [&](std::size_t i) { return reference::from_bfloat16(bits[i]); }, name + " bf16");
            vec.load_f16(bits.data(), got.data());
            expect_each(got, [&](std::size_t i) { return reference::from_float16(bits[i]); }, name + " f16");
        }
    });
}

TEST("vec: integers convert exactly both ways") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        for (int base = 0; base < 256; base += 16) {
            std::array<std::uint8_t, 16> unsigned_bytes;
            std::array<std::int8_t, 16> bytes, stored;
            for (int i = 0; i < 16; ++i) {
                unsigned_bytes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(base + i);
                bytes[static_cast<std::size_t>(i)] = static_cast<std::int8_t>(base + i - 128);
            }
            Lanes got;
            vec.load_u8(unsigned_bytes.data(), got.data());
            expect_each(got, [&](std::size_t i) { return static_cast<float>(unsigned_bytes[i]); }, name + " u8");
            vec.load_i8(bytes.data(), got.data());
            expect_each(got, [&](std::size_t i) { return static_cast<float>(bytes[i]); }, name + " i8");
            vec.store_i8(stored.data(), got.data());
            CHECK_MESSAGE(stored == bytes, name + " store_i8");
        }
        std::mt19937 generator(4);
        for (int trial = 0; trial < 1000; ++trial) {
            std::array<std::int32_t, 16> integers;
            for (std::int32_t& integer : integers) integer = static_cast<std::int32_t>(generator()) >> (trial % 24);
            Lanes got;
            vec.load_i32(integers.data(), got.data());
            expect_each(got, [&](std::size_t i) { return static_cast<float>(integers[i]); }, name + " i32");
        }
    });
}

TEST("vec: sum has one order on every set, largest is the largest") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        std::mt19937 generator(5);
        for (int trial = 0; trial < 1000; ++trial) {
            const Lanes a = random_lanes(generator, false);
            Lanes part = a;
            for (std::size_t width = 8; width >= 1; width /= 2)
                for (std::size_t i = 0; i < width; ++i) part[i] += part[i + width];
            CHECK_MESSAGE(same(vec.sum(a.data()), part[0]), name + " sum");
            float best = a[0];
            for (float x : a) best = std::fmax(best, x);
            CHECK_MESSAGE(same(vec.largest(a.data()), best), name + " largest");
        }
    });
}

TEST("vec: scale_by_power multiplies by a power of two exactly") {
    for_each_set([](const VecShims& vec, const std::string& name) {
        for (int n = -126; n <= 127; ++n) {
            const Lanes a = each([](std::size_t i) { return 0.7f + static_cast<float>(i) * 0.08f; });
            const Lanes exponents = each([&](std::size_t) { return static_cast<float>(n); });
            Lanes got;
            vec.scale_by_power(a.data(), exponents.data(), got.data());
            const Lanes want = each([&](std::size_t i) { return std::ldexp(a[i], n); });
            CHECK_MESSAGE(same(got, want), name + " 2^" + std::to_string(n));
        }
    });
}

}  // namespace optimc::test

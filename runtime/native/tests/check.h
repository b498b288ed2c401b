// The smallest test harness that does: named cases, checks that print what they saw, an exit status.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace optimc::test {

struct Case {
    std::string name;
    std::function<void()> run;
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

inline int& failures() {
    static int count = 0;
    return count;
}

struct Register {
    Register(const char* name, std::function<void()> run) { cases().push_back({name, std::move(run)}); }
};

inline void check(bool ok, const std::string& what, const char* file, int line) {
    if (ok) return;
    ++failures();
    std::printf("  %s:%d: %s\n", file, line, what.c_str());
}

// Largest |a - b| over n elements, relative to the largest |b|. NaN equals NaN, and is infinitely far from the rest.
inline double relative_error(const float* a, const float* b, std::size_t n) {
    double worst = 0, size = 1e-30;
    for (std::size_t i = 0; i < n; ++i) {
        if (std::isnan(a[i]) != std::isnan(b[i])) return INFINITY;
        if (std::isnan(a[i])) continue;
        worst = std::fmax(worst, std::fabs(static_cast<double>(a[i]) - b[i]));
        size = std::fmax(size, std::fabs(static_cast<double>(b[i])));
    }
    return worst / size;
}

}  // namespace optimc::test

#define OPTIMC_CONCAT2(a, b) a##b
#define OPTIMC_CONCAT(a, b) OPTIMC_CONCAT2(a, b)
// TEST("fires once") { ... }
#define TEST(name)                                                               \
    static void OPTIMC_CONCAT(test_body_, __LINE__)();                           \
    static const optimc::test::Register OPTIMC_CONCAT(test_register_, __LINE__)( \
        name, OPTIMC_CONCAT(test_body_, __LINE__));                              \
    static void OPTIMC_CONCAT(test_body_, __LINE__)()
#define CHECK(condition) optimc::test::check((condition), #condition, __FILE__, __LINE__)
#define CHECK_MESSAGE(condition, message) optimc::test::check((condition), (message), __FILE__, __LINE__)

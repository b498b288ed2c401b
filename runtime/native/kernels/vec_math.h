// Transcendental functions on sixteen lanes, for kernels. An ulp is the spacing of float32 at the exact result; bounds
// hold on every instruction set wherever that result is neither subnormal nor infinite. NaN stays NaN.
#pragma once

#include "kernels/vec.h"

namespace optimc::OPTIMC_ISA {

// e^x within 2 ulp; 0 below -87.3 (where the result would be subnormal), at most e^88.3 above.
inline Vec exp(Vec x) {
    // The constants come first: of two operands one of which is NaN, max and min return the second.
    const Vec clamped = min(broadcast(88.3f), max(broadcast(-87.3f), x));
    const Vec n = round(clamped * broadcast(1.44269504f));
    // ln 2 in two parts (Cody and Waite): the first has trailing zeros, so that n times it is exact.
    const Vec r = fma(n, broadcast(-1.42860677e-6f), fma(n, broadcast(-0.693145752f), clamped));
    Vec p = broadcast(1.0f / 5040);
    p = fma(p, r, broadcast(1.0f / 720));
    p = fma(p, r, broadcast(1.0f / 120));
    p = fma(p, r, broadcast(1.0f / 24));
    p = fma(p, r, broadcast(1.0f / 6));
    p = fma(p, r, broadcast(0.5f));
    p = fma(p, r, broadcast(1.0f));
    p = fma(p, r, broadcast(1.0f));
    return where_less(x, broadcast(-87.3f), zero(), scale_by_power(p, n));
}

// Within 3 ulp.
inline Vec sigmoid(Vec x) { return broadcast(1.0f) / (broadcast(1.0f) + exp(zero() - x)); }

// x * sigmoid(x) within 3 ulp.
inline Vec silu(Vec x) { return x / (broadcast(1.0f) + exp(zero() - x)); }

// Within 3 ulp: the Taylor series up to |x| = 0.5, where the exponential form would cancel, that form beyond.
inline Vec tanh(Vec x) {
    const Vec size = abs(x);
    const Vec squared = x * x;
    Vec p = broadcast(21844.0f / 6081075);
    p = fma(p, squared, broadcast(-1382.0f / 155925));
    p = fma(p, squared, broadcast(62.0f / 2835));
    p = fma(p, squared, broadcast(-17.0f / 315));
    p = fma(p, squared, broadcast(2.0f / 15));
    p = fma(p, squared, broadcast(-1.0f / 3));
    const Vec near = fma(p * squared, x, x);
    const Vec decay = exp(broadcast(-2.0f) * size);
    const Vec far = (broadcast(1.0f) - decay) / (broadcast(1.0f) + decay);
    const Vec signed_far = where_less(x, zero(), zero() - far, far);
    return where_less(size, broadcast(0.5f), near, signed_far);
}

// erf(x) for |x| < 1: x times a polynomial in x^2, fitted for the smallest relative error.
inline Vec erf_near(Vec x) {
    const Vec squared = x * x;
    Vec p = broadcast(7.85386096e-5f);
    p = fma(p, squared, broadcast(-8.01019351e-4f));
    p = fma(p, squared, broadcast(5.18832767e-3f));
    p = fma(p, squared, broadcast(-2.68538119e-2f));
    p = fma(p, squared, broadcast(0.112835851f));
    p = fma(p, squared, broadcast(-0.376126258f));
    p = fma(p, squared, broadcast(1.12837917f));
    return p * x;
}

// 1 - erf(size) for size >= 1: e^(-size^2) times a polynomial in t = 1 / (1 + 0.4 size), fitted like the other.
inline Vec erfc_far(Vec size) {
    const Vec t = broadcast(1.0f) / fma(broadcast(0.4f), size, broadcast(1.0f));
    Vec p = broadcast(-0.117608789f);
    p = fma(p, t, broadcast(0.247287484f));
    p = fma(p, t, broadcast(4.18742068e-3f));
    p = fma(p, t, broadcast(0.215385579f));
    p = fma(p, t, broadcast(0.198053011f));
    p = fma(p, t, broadcast(0.226810168f));
    p = fma(p, t, broadcast(0.225619382f));
    return p * t * exp(zero() - size * size);
}

// Within 3 ulp.
inline Vec erf(Vec x) {
    const Vec size = abs(x);
    const Vec far = broadcast(1.0f) - erfc_far(size);
    return where_less(size, broadcast(1.0f), erf_near(x), where_less(x, zero(), zero() - far, far));
}

// x * Phi(x), exact form. Error below 2e-7 |x|; the left tail, where 1 + erf would cancel, is half of erfc.
inline Vec gelu(Vec x) {
    const Vec half = broadcast(0.5f);
    const Vec scaled = x * broadcast(0.707106781f);
    const Vec size = abs(scaled);
    const Vec tail = half * erfc_far(size);
    const Vec far = where_less(x, zero(), tail, broadcast(1.0f) - tail);
    return x * where_less(size, broadcast(1.0f), fma(half, erf_near(scaled), half), far);
}

// The tanh approximation of GELU, as x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)). Error below 2e-7 |x|.
inline Vec gelu_tanh(Vec x) {
    const Vec inner = fma(x * x, broadcast(-0.0713548163f), broadcast(-1.59576912f));
    return x / (broadcast(1.0f) + exp(x * inner));
}

}  // namespace optimc::OPTIMC_ISA

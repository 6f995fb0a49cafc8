// IEEE float32 as the CPU computes it. CuPy compiles with -ftz=true, which flushes subnormal numbers in compiled
// arithmetic and comparisons; PTX written out keeps them, and never contracts two roundings into one.
#pragma once
#include "types.cuh"

DEVICE float ieee_add(float a, float b) {
    float r;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

DEVICE float ieee_sub(float a, float b) {
    float r;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

DEVICE float ieee_mul(float a, float b) {
    float r;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

DEVICE float ieee_fma(float a, float b, float c) {
    float r;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(a), "f"(b), "f"(c));
    return r;
}

DEVICE float ieee_div(float a, float b) {
    float r;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// Minimum and maximum, of subnormal numbers too; NaN if either is, and of +0 and -0 either.
DEVICE float ieee_min(float a, float b) {
    float r;
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
#else
    asm("{.reg .pred nan;\nsetp.nan.f32 nan, %1, %2;\nmin.f32 %0, %1, %2;\n@nan mov.b32 %0, 0x7fffffff;}"
        : "=&f"(r) : "f"(a), "f"(b));
#endif
    return r;
}

DEVICE float ieee_max(float a, float b) {
    float r;
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
#else
    asm("{.reg .pred nan;\nsetp.nan.f32 nan, %1, %2;\nmax.f32 %0, %1, %2;\n@nan mov.b32 %0, 0x7fffffff;}"
        : "=&f"(r) : "f"(a), "f"(b));
#endif
    return r;
}

// Compiled signs flush subnormal numbers, too.
DEVICE float absolute(float x) { return __int_as_float(magnitude(x)); }

DEVICE float negated(float x) { return __int_as_float(__float_as_int(x) ^ 0x80000000); }

DEVICE bool is_finite(float x) { return magnitude(x) < 0x7f800000; }

// Integers in the order of the floats, with -0 equal to +0.
DEVICE int order(float x) {
    int bits = __float_as_int(x);
    return bits >= 0 ? bits : -int(bits & 0x7fffffff);
}

// x / 127, rounded once, of 0 and of magnitudes with bits between these: every mantissa was compared. What is not
// finite becomes NaN.
constexpr u32 OVER_127_FROM = 63 << 23, OVER_127_END = 253 << 23;

DEVICE float over_127(float x) {
    constexpr float PART = 1.f / 127;
    const float near = x * PART;
    return fmaf(fmaf(-127, near, x), PART, near);
}

// x / 127, rounded once, of any magnitude.
DEVICE float ieee_over_127(float x) {
    return u32(__float_as_int(x)) - OVER_127_FROM < OVER_127_END - OVER_127_FROM ? over_127(x) : ieee_div(x, 127);
}

// 1 / d, and 0 where that is not finite: the reference leaves the codes undefined there, and the stored scale is 0.
DEVICE float inverse(float d) {
    float r;
    asm("rcp.rn.f32 %0, %1;" : "=f"(r) : "f"(d));
    return is_finite(r) ? r : 0;
}

DEVICE float ieee_sqrt(float x) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// The nearest integer, halves to even, of x below 2^22; greater ones stay that great, with their sign, and NaN is NaN. (By two
// additions: the pipe of the instruction that rounds has a quarter of their width.)
DEVICE float nearest_integer(float x) { return ieee_sub(ieee_add(x, 12582912.f), 12582912.f); }

// The integer below 2 x, of x below 2^21.
DEVICE int floor_of_twice(float x) {
    float r;
    asm("fma.rm.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(x), "f"(2.f), "f"(12582912.f));
    return __float_as_int(r) - 0x4b400000;
}

// a < b; false for NaN.
DEVICE bool ieee_less(float a, float b) {
    u32 r;
    asm("{.reg .pred less;\nsetp.lt.f32 less, %1, %2;\nselp.u32 %0, 1, 0, less;}" : "=r"(r) : "f"(a), "f"(b));
    return r;
}

// x, and 0 where it overflowed.
DEVICE float finite(float x) { return is_finite(x) ? x : 0; }

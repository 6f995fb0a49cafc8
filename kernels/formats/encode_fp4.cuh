// Floats to E2M1 codes and the scale of a block, bit for bit as the references in cuquant/formats/mxfp4.py and nvfp4.py.
// Two threads per 32 elements: of mxfp4 each has bytes of its own, of nvfp4 a scale.
#pragma once
#include "encode.cuh"

// Codes of numbers whose scale is twice `half`: how many of the middles between neighbouring magnitudes they are above,
// but none whose number overflows. Bits of numbers from 0 on are ordered as they are, subnormal ones included.
DEVICE void nearest_e2m1(const float (&x)[MINE], float half, u32 (&q)[MINE]) {
    constexpr float MIDDLES[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5, 7, 10}, NEXT[7] = {1, 2, 3, 4, 6, 8, 12};
    u32 limits[7];
#pragma unroll
    for (int i = 0; i < 7; i++) {
        const bool taken = magnitude(half) && is_finite(ieee_mul(NEXT[i], half));
        limits[i] = taken ? __float_as_int(ieee_mul(MIDDLES[i], half)) : 0x7f800000;
    }
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        q[j] = 0;
#pragma unroll
        for (int i = 0; i < 7; i++) q[j] += magnitude(x[j]) > limits[i];
        if (q[j] && __float_as_int(x[j]) < 0) q[j] |= 8;
    }
}

// Unsigned E4M3 of a number from 0 to 448, rounded as ggml does.
DEVICE u32 ue4m3_of(float x) {
    if (x < 0x1p-6f) return min(int(ieee_add(ieee_mul(x, 512), 0.5f)), 7);
    const int code = ((__float_as_int(x) + (1 << 19)) >> 20) - ((127 - 7) << 3);
    return code >= 0x78 ? 0x7e : code;
}

// A thread's half of 32 elements, part `part` of a block, to its place; false where an element is no number or beyond
// the greatest scale.
template <class F>
DEVICE bool encode_e2m1(const float (&x)[MINE], int part, int half, u8* block) {
    u32 bits = 0, q[MINE];
#pragma unroll
    for (int j = 0; j < MINE; j++) bits = max(bits, magnitude(x[j]));
    if constexpr (F::SCALING == E8M0) {
        bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
        // In float64 and rounded, as the reference; conversions flush subnormal numbers.
        const double peak = bits < 0x00800000 ? bits * 0x1p-149 : double(__int_as_float(bits));
        const int e = bits ? int(floorf(float(log2(peak)))) + 125 : 0;
        nearest_e2m1(x, F::half_of(e & 0xff), q);
        if (half == 0) block[0] = u8(e);
    } else {
        const u32 d = bits < 0x7f800000 ? ue4m3_of(ieee_div(__int_as_float(bits), 6)) : 0;
        nearest_e2m1(x, F::half_of(d), q);
        block[part * 2 + half] = u8(d);
    }
    u8* const to = block + F::CODES_AT + part * 16 + half * 8;
#pragma unroll
    for (int j = 0; j < 8; j++) to[j] = u8(q[j] | q[j + 8] << 4);
    return F::SCALING == E8M0 ? bits < 0x7f800000 : __int_as_float(bits) <= 2688.f;
}

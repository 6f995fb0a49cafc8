// Floats to the bit planes and the scale of a k-bit block, bit for bit as the reference in cuquant/formats/kbit.py.
// Two threads per block, as in encode.cuh.
#pragma once
#include "encode.cuh"

// What all blocks are compared with: in shared memory, one bank each, so that lanes never wait for each other.
struct Thresholds {
    float value[32];  // 2^BITS - 1 means of neighbouring entries, ascending, then infinity
};

// E4M4 of a number from 0 on: to nearest even, saturating. Adding 2^9, whose last bit is worth 2^-14, rounds to the
// step of the subnormal codes.
DEVICE u32 e4m4_of(float x) {
    const u32 bits = __float_as_int(x), odd = bits >> 19 & 1;
    const u32 normal = ((bits + 0x3ffff + odd) >> 19) - ((127 - 11) << 4);
    const u32 subnormal = __float_as_int(ieee_add(x, 512.f)) - 0x44000000;
    return min(x < 0x1p-10f ? subnormal : normal, 255u);
}

// Elements over d, rounded to nearest; what is below 2^-99 counts as 0. With 1 / d rounded to nearest a quotient's
// remainder corrects it, and is exact unless it is too small for a normal number.
DEVICE void divide(const float (&x)[MINE], float d, float (&v)[MINE]) {
    const float inverse = ieee_div(1, d);
    float least = 1;
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        const float q = x[j] * inverse;
        v[j] = __fmaf_rn(__fmaf_rn(-q, d, x[j]), inverse, q);
        least = fminf(least, fabsf(v[j]));
    }
    if (least >= 0x1p-40f) return;
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        v[j] = ieee_div(x[j], d);
        if (fabsf(v[j]) < 0x1p-99f) v[j] = 0;
    }
}

// How many thresholds v is above.
template <int BITS>
DEVICE int nearest(float v, const Thresholds& thresholds) {
    int q = 0;
#pragma unroll
    for (int step = 1 << (BITS - 1); step; step /= 2)
        if (v > thresholds.value[q + step - 1]) q += step;
    return q;
}

// Bit 0 of eight nibbles, together in a byte.
DEVICE u32 byte_of(u32 nibbles) {
    u32 t = nibbles & 0x11111111;
    t = (t | t >> 3) & 0x03030303;
    t = (t | t >> 6) & 0x000f000f;
    return (t | t >> 12) & 0xff;
}

// A thread's half of a block to its place; false where the block's scale cannot hold its magnitude, or an element is
// no number. With `decoded` elements are divided by what the scale reads as, else by the greatest magnitude itself.
template <class F>
DEVICE bool encode_lookup(const float (&x)[MINE], int half, u8* to, const Thresholds& thresholds, bool decoded) {
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < MINE; j++) bits = max(bits, magnitude(x[j]));
    bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
    const float peak = __int_as_float(bits);
    const u32 stored = F::SCALING == E4M4 ? e4m4_of(peak) : float_to_half(peak);
    float v[MINE];
    divide(x, fmaxf(decoded ? F::scale(stored) : peak, 1e-8f), v);
    u32 low[2] = {}, fifth[2] = {};
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        const u32 q = nearest<F::BITS>(v[j], thresholds);
        low[j / 8] |= (F::BITS == 5 ? q & 15 : q) << j % 8 * 4;
        if constexpr (F::BITS == 5) fifth[j / 8] |= q >> 4 << j % 8 * 4;
    }
#pragma unroll
    for (int p = 0; p < F::BITS; p++)
#pragma unroll
        for (int run = 0; run < 2; run++)
            to[p * 4 + run * 2 + half] = u8(byte_of(p == 4 ? fifth[run] : low[run] >> p));
    if (half == 0) F::store_scale_bits(to, stored);
    return F::SCALING == E4M4 ? peak <= 31.5f : (stored & 0x7c00) != 0x7c00;
}

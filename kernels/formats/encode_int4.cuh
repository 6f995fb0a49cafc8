// Floats to int4 groups of any size, bit for bit as the reference in cuquant/formats/int4.py. A few lanes of a warp
// take a group, each 16 weights at a time, which become 8 bytes: byte j of a group has codes 2 j and 2 j + 1.
//
//     group   | scale | zero | lane 0 | lane 1 | ... | lane 0 | lane 1 | ...    zero: of asymmetric groups, a byte
#pragma once
#include "encode.cuh"

// Scale of the weights from `low` to `high`; +0 of zeros of both signs. Not finite where a weight is not.
template <bool ASYMMETRIC>
DEVICE float int4_scale(float low, float high) {
    const float scale =
        ASYMMETRIC ? ieee_div(ieee_sub(high, low), 15) : ieee_max(ieee_div(high, 7), ieee_mul(low, -0.125f));
    return ieee_add(scale, 0);
}

// x / scale to the nearest integer, ties to even; with `inverse`, 1 / scale or 0 where the scale is. A remainder
// corrects the quotient to the one that is rounded once, as scales have 11 bits; what is flushed on the way is far
// below 1/2. Adding 3 * 2^22 rounds to integers.
DEVICE int rounded_quotient(float x, float scale, float inverse) {
    const float q = x * inverse;
    return __float_as_int(__fmaf_rn(__fmaf_rn(-q, scale, x), inverse, q) + 12582912.f) - 0x4b400000;
}

// x / scale to the nearest integer, of x with 11 bits at most, as the scale has: over each other they are halves of odd
// integers, or 2^-12 away from those. With 768 added, in steps of 2^-14, a quotient's error is gone.
DEVICE int rounded_quotient_of_half(float x, float inverse) {
    return __float_as_int(__fmaf_rn(x, inverse, 768.f) + 12582912.f) - (0x4b400000 + 768);
}

// What is added to such quotients, from 0 to 15.
template <bool ASYMMETRIC>
DEVICE int int4_zero(float low, float scale, float inverse) {
    return ASYMMETRIC ? min(max(rounded_quotient(-low, scale, inverse), 0), 15) : 8;
}

// 16 codes, of the weights in order from the lowest bits on.
DEVICE void int4_codes(const float (&x)[MINE], int dtype, float scale, float inverse, int zero, u32 (&words)[2]) {
    words[0] = words[1] = 0;
#pragma unroll
    for (int j = MINE - 2; j >= 0; j -= 2) {
        int q[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            q[i] = dtype == FLOAT32 ? rounded_quotient(x[j + i], scale, inverse)
                                    : rounded_quotient_of_half(x[j + i], inverse);
        words[j / 8] = pack_nibbles(q[0] + zero, q[1] + zero, words[j / 8]);
    }
}

// Stores eight bytes of codes.
DEVICE void store_int4(u8* to, const u32 (&words)[2]) {
    if (reinterpret_cast<u64>(to) % 2 == 0) {
        store_u32(to, words[0]);
        store_u32(to + 4, words[1]);
    } else {
#pragma unroll
        for (int byte = 0; byte < 8; byte++) to[byte] = u8(words[byte / 4] >> byte % 4 * 8);
    }
}

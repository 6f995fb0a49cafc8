// Floats to int4 groups of any size, bit for bit as the reference in cuquant/formats/int4.py. A few lanes of a warp take
// a group, each 16 weights at a time, which become 8 bytes: byte j of a group has codes 2 j and 2 j + 1.
//
//     group   | scale | zero | lane 0 | lane 1 | ... | lane 0 | lane 1 | ...    zero: of asymmetric groups, a byte
#pragma once
#include "encode.cuh"

// Scale of the weights from `low` to `high`; +0 of zeros of both signs. Not finite where a weight is not.
template <bool ASYMMETRIC>
DEVICE float int4_scale(float low, float high) {
    const float scale = ASYMMETRIC ? ieee_div(ieee_sub(high, low), 15) : ieee_max(ieee_div(high, 7), ieee_div(low, -8));
    return ieee_add(scale, 0);
}

// x / scale to the nearest integer, ties to even, and 0 where the scale is.
DEVICE float rounded_quotient(float x, float scale) { return scale > 0 ? rintf(ieee_div(x, scale)) : 0; }

// What is added to such quotients, from 0 to 15.
template <bool ASYMMETRIC>
DEVICE float int4_zero(float low, float scale) {
    return ASYMMETRIC ? fminf(fmaxf(rounded_quotient(-low, scale), 0), 15) : 8;
}

// Eight bytes of 16 codes.
DEVICE void store_int4(const float (&x)[MINE], float scale, float zero, u8* to) {
    u32 words[2] = {};
#pragma unroll
    for (int j = 0; j < MINE; j++) {
        const float q = fminf(fmaxf(rounded_quotient(x[j], scale) + zero, 0), 15);
        words[j / 8] |= u32(__float2int_rz(q)) << j % 8 * 4;
    }
    if (reinterpret_cast<u64>(to) % 2 == 0) {
        store_u32(to, words[0]);
        store_u32(to + 4, words[1]);
    } else {
#pragma unroll
        for (int byte = 0; byte < 8; byte++) to[byte] = u8(words[byte / 4] >> byte % 4 * 8);
    }
}

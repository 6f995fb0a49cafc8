// Floats to int4 groups of any size, bit for bit as the reference in cuquant/formats/int4.py. A few lanes of a warp
// take a group, each 16 weights at a time, which become 8 bytes: byte j of a group has codes 2 j and 2 j + 1.
//
//     group   | scale | zero | lane 0 | lane 1 | ... | lane 0 | lane 1 | ...    zero: of asymmetric groups, a byte
#pragma once
#include "encode.cuh"

// x / BY, rounded once: a remainder corrects the quotient, which with the rounded reciprocal it does exactly (Markstein, 1990)
// where it is a normal number itself. Fewer than half as many instructions as a division; NaN of infinity.
template <int BY>
DEVICE float divided(float x) {
    if (ieee_less(absolute(x), 1e-20f)) return ieee_div(x, BY);
    const float q = x * (1.f / BY);
    return __fmaf_rn(__fmaf_rn(-float(BY), q, x), 1.f / BY, q);
}

// Scale of the weights from `low` to `high`; +0 of zeros of both signs. Not finite where a weight is not.
template <bool ASYMMETRIC>
DEVICE float int4_scale(float low, float high) {
    const float scale =
        ASYMMETRIC ? divided<15>(ieee_sub(high, low)) : ieee_max(divided<7>(high), ieee_mul(low, -0.125f));
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

// Stores a group of one piece a lane to byte `at` of `words_to`, by whole warps. Words begin with `shift` bytes of the lane
// before, or of the group's `header`: codes are that far from them.
//
//     |..hh|habc|defg|h...|    lane 0 stores what is before the first word, the last lane what is left behind the last one
template <int HEADER>
DEVICE void store_group(u32* words_to, int at, u32 header, const u32 (&words)[2], int lane, int lanes) {
    const int codes = at + HEADER, shift = codes % 4;
    const u32 theirs = __shfl_up_sync(~0u, words[1], 1), before = lane ? theirs : header << (32 - 8 * HEADER);
    u32* const to = words_to + codes / 4 + 2 * lane;
    to[0] = __funnelshift_l(before, words[0], 8 * shift), to[1] = __funnelshift_l(words[0], words[1], 8 * shift);
    u8* const edge = lane ? reinterpret_cast<u8*>(to + 2) : reinterpret_cast<u8*>(words_to) + at;
    const u32 left = lane ? __funnelshift_l(words[1], 0, 8 * shift) : header;
    const int count = lane == 0 ? HEADER - shift : lane + 1 == lanes ? shift : 0;
#pragma unroll
    for (int byte = 0; byte < 3; byte++)
        if (byte < count) edge[byte] = u8(left >> 8 * byte);
}

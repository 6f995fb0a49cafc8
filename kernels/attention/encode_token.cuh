// A vector of one token and head to codes and a scale, and back, bit for bit as cuquant/kv/codes.py: by one warp, whose
// lane l has the eight numbers from 8 l on.
#pragma once
#include "../core/ieee.cuh"
#include "../core/ptx.cuh"

constexpr int UNIT = 8;

DEVICE void load_unit(const void* array, s64 row, int dtype, int dim, int lane, float (&x)[UNIT]) {
#pragma unroll
    for (int e = 0; e < UNIT; e++) x[e] = lane * UNIT < dim ? load_float(array, row + lane * UNIT + e, dtype) : 0;
}

DEVICE void divide(float (&x)[UNIT], const float* by, int dim, int lane) {
    if (lane * UNIT < dim)
#pragma unroll
        for (int e = 0; e < UNIT; e++) x[e] = ieee_div(x[e], by[lane * UNIT + e]);
}

// Hadamard's transform of the 32 numbers of four lanes.
DEVICE void rotate_unit(float (&x)[UNIT], int lane) {
#pragma unroll
    for (int step = 1; step < UNIT; step *= 2)
#pragma unroll
        for (int e = 0; e < UNIT; e++)
            if (e % (2 * step) < step) {
                const float a = x[e], b = x[e + step];
                x[e] = ieee_add(a, b), x[e + step] = ieee_sub(a, b);
            }
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
            const float other = __shfl_xor_sync(~0u, x[e], step);
            x[e] = lane & step ? ieee_sub(other, x[e]) : ieee_add(x[e], other);
        }
#pragma unroll
    for (int e = 0; e < UNIT; e++) x[e] = ieee_mul(x[e], 0.17677669529663687f);  // 1 / sqrt(32) in float32
}

// The number of the largest magnitude, the first of several; NaN if there is one.
DEVICE float extreme_of(const float (&x)[UNIT], int lane) {
    u64 key = 0;  // magnitude, then the place from the end, then the sign
#pragma unroll
    for (int e = 0; e < UNIT; e++) {
        const u32 bits = __float_as_int(x[e]);
        const u64 own = u64(bits & 0x7fffffff) << 32 | u32(0xffff - (lane * UNIT + e)) << 1 | bits >> 31;
        key = own > key ? own : key;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const u64 other = __shfl_xor_sync(~0u, key, step);
        key = other > key ? other : key;
    }
    return __int_as_float(u32(key >> 32) | u32(key & 1) << 31);
}

// To float16, magnitudes rounded up.
DEVICE u16 away_from_zero(float x) {
    const u16 nearest = float_to_half(x);
    return nearest + (magnitude(half_to_float(nearest)) < magnitude(x) && magnitude(x) <= 0x7f800000);
}

// Codes at `to`, `bits` bytes of each lane, and the scale; float16 numbers for 16 bits.
DEVICE void encode(const float (&x)[UNIT], int bits, int dim, int lane, u8* to, u16* scale) {
    const bool own = lane * UNIT < dim;
    if (bits == 16) {
        u16* const halves = reinterpret_cast<u16*>(to) + lane * UNIT;
        if (own)
#pragma unroll
            for (int e = 0; e < UNIT; e++) halves[e] = float_to_half(x[e]);
        return;
    }
    const int least = -(1 << (bits - 1));
    const u16 stored = away_from_zero(ieee_div(extreme_of(x, lane), float(least)));
    if (lane == 0) *scale = stored;
    if (!own) return;
    const float step = half_to_float(stored);
    u64 packed = 0;
#pragma unroll
    for (int e = 0; e < UNIT; e++) {
        const float quotient = ieee_div(x[e], step);
        int q = magnitude(quotient) > 0x7f800000 ? 0 : int(rintf(fminf(fmaxf(quotient, -300.f), 300.f)));
        q = min(max(q, least), -1 - least);
        packed |= u64(u32(bits == 8 ? q : q - least) & ((1u << bits) - 1)) << (bits * e);
    }
#pragma unroll 1
    for (int i = 0; i < bits; i++) to[lane * bits + i] = u8(packed >> (8 * i));
}

// The numbers of codes, exact products, or float16 numbers; zeros beyond `dim`.
DEVICE void decode(const u8* from, const u16* scale, int bits, int dim, int lane, float (&x)[UNIT]) {
    const bool own = lane * UNIT < dim;
    from += lane * bits;
    u64 packed = 0;
    if (own && bits < 16)
        for (int i = 0; i < bits; i++) packed |= u64(from[i]) << (8 * i);
    const float step = bits < 16 ? half_to_float(*scale) : 0;
#pragma unroll
    for (int e = 0; e < UNIT; e++) {
        const int code = int(packed >> (bits * e)) & ((1 << bits) - 1);
        if (bits == 16)
            x[e] = own ? half_to_float(reinterpret_cast<const u16*>(from)[e]) : 0;
        else
            x[e] = own ? float(bits == 8 ? int(s8(code)) : code - (1 << (bits - 1))) * step : 0;
    }
}

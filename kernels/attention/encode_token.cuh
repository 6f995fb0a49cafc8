// A vector of one token and head to codes and a scale, and back, bit for bit as cuquant/kv/codes.py: by one warp, whose
// lane l has the eight numbers from 8 l on.
#pragma once
#include "../core/ieee.cuh"
#include "../core/ptx.cuh"
#include "cache.cuh"

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
    for (int e = 0; e < UNIT; e++) x[e] = ieee_mul(x[e], ROTATED);
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

// Eight codes of as many bits, which are as many bytes. Of 2, 4 and 8 bits they lie at a multiple of their size, as rows are
// whole numbers of eights.
DEVICE u64 load_codes(const u8* from, int bits) {
    if (bits == 8) return *reinterpret_cast<const u64*>(from);
    if (bits == 4) return *reinterpret_cast<const u32*>(from);
    if (bits == 2) return *reinterpret_cast<const u16*>(from);
    return from[0] | u32(from[1]) << 8 | u32(from[2]) << 16;
}

DEVICE void store_codes(u8* to, int bits, u64 codes) {
    if (bits == 8)
        *reinterpret_cast<u64*>(to) = codes;
    else if (bits == 4)
        *reinterpret_cast<u32*>(to) = u32(codes);
    else if (bits == 2)
        *reinterpret_cast<u16*>(to) = u16(codes);
    else
        to[0] = u8(codes), to[1] = u8(codes >> 8), to[2] = u8(codes >> 16);
}

// Codes at `to`, `bits` bytes of each lane, and the scale; float16 numbers for 16 bits.
DEVICE void encode(const float (&x)[UNIT], int bits, int dim, int lane, u8* to, u16* scale) {
    const bool own = lane * UNIT < dim;
    if (bits == 16) {
        auto two = [&](int e) { return float_to_half(x[e]) | u32(float_to_half(x[e + 1])) << 16; };
        if (own) reinterpret_cast<uint4*>(to)[lane] = make_uint4(two(0), two(2), two(4), two(6));
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
    store_codes(to + lane * bits, bits, packed);
}

// A lane's part of what encode leaves: eight codes and the scale, or eight float16 numbers; zeros beyond `dim`.
struct Stored {
    u64 codes;
    uint4 halves;
    u16 scale;
};

DEVICE Stored load_stored(const u8* from, const u16* scale, int bits, int dim, int lane) {
    const bool own = lane * UNIT < dim;
    Stored s = {};
    if (bits == 16) {
        if (own) s.halves = reinterpret_cast<const uint4*>(from)[lane];
    } else {
        s.scale = *scale;
        if (own) s.codes = load_codes(from + lane * bits, bits);
    }
    return s;
}

// Its numbers: of codes exact products.
DEVICE void decode(const Stored& s, int bits, int dim, int lane, float (&x)[UNIT]) {
    const u32 words[4] = {s.halves.x, s.halves.y, s.halves.z, s.halves.w};
    const float step = lane * UNIT < dim ? half_to_float(s.scale) : 0;
#pragma unroll
    for (int e = 0; e < UNIT; e++) {
        const int code = int(s.codes >> (bits * e)) & ((1 << bits) - 1);
        if (bits == 16)
            x[e] = half_to_float(u16(words[e / 2] >> (e % 2 * 16)));
        else
            x[e] = float(bits == 8 ? int(s8(code)) : code - (1 << (bits - 1))) * step;
    }
}

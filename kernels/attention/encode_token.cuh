// A vector of one token and head to codes and a scale, and back, bit for bit as cuquant/kv/codes.py: by a group of a warp's
// lanes, whose lane l has the eight numbers from 8 l on. Groups of a warp come here together.
#pragma once
#include "../core/ieee.cuh"
#include "../core/ptx.cuh"
#include "cache.cuh"

constexpr int UNIT = 8;

// Lanes that have a vector: a power of two of them, four or more.
struct Group {
    int width, first, lane;  // of the warp's lanes the first, and this one from there on

    DEVICE explicit Group(int width) : width(width), first(threadIdx.x % WARP / width * width), lane(threadIdx.x % width) {}
};

// A lane's numbers of a vector as they are given; zeros beyond `dim`. Where they are is known before they may be asked for, and
// they may be asked for long before they are needed.
struct Numbers {
    u64 from;      // their address
    int words;     // of 16 bytes, that are there
    bool aligned;  // these, of all vectors that are asked for
    uint4 raw[2];

    // Numbers of the first of some vectors that are so many bytes apart.
    DEVICE Numbers(const void* array, s64 first, int dtype, s64 apart, int dim, int lane) {
        words = lane * UNIT >= dim ? 0 : dtype == FLOAT32 ? 2 : 1;
        from = reinterpret_cast<u64>(array) + (first + lane * UNIT) * (dtype == FLOAT32 ? 4 : 2);
        aligned = (from | apart) % 16 == 0;
        asm volatile("" : "+l"(from), "+r"(words));  // worked out here
        raw[0] = raw[1] = make_uint4(0, 0, 0, 0);
    }

    DEVICE void ask() {
        const uint4* const at = reinterpret_cast<const uint4*>(from);
        if (aligned) {
            if (words > 0) raw[0] = at[0];
            if (words > 1) raw[1] = at[1];
        } else {
            if (words > 0) raw[0] = gathered(from);
            if (words > 1) raw[1] = gathered(from + 16);
        }
    }

    DEVICE void take(int dtype, float (&x)[UNIT]) const {
        const u32 w[8] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w, raw[1].x, raw[1].y, raw[1].z, raw[1].w};
        const auto half = [&](int e) { return u16(w[e / 2] >> e % 2 * 16); };
        if (dtype == FLOAT32)
#pragma unroll
            for (int e = 0; e < UNIT; e++) x[e] = __int_as_float(w[e]);
        else if (dtype == FLOAT16)
#pragma unroll
            for (int e = 0; e < UNIT; e++) x[e] = half_to_float(half(e));
        else
#pragma unroll
            for (int e = 0; e < UNIT; e++) x[e] = bfloat_to_float(half(e));
    }

private:
    static __device__ __noinline__ uint4 gathered(u64 from) {
        const u16* const halves = reinterpret_cast<const u16*>(from);
        u32 w[4];
        for (int k = 0; k < 4; k++) w[k] = halves[2 * k] | u32(halves[2 * k + 1]) << 16;
        return make_uint4(w[0], w[1], w[2], w[3]);
    }
};

DEVICE void divide(float (&x)[UNIT], const float* by, int dim, int lane) {
    if (lane * UNIT >= dim) return;
    float own[UNIT];  // all asked for before the first is needed
#pragma unroll
    for (int e = 0; e < UNIT; e++) own[e] = by[lane * UNIT + e];
#pragma unroll
    for (int e = 0; e < UNIT; e++) x[e] = ieee_div(x[e], own[e]);
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
    for (int step = 1; step < 4; step *= 2) {
        const float sign = lane & step ? -1 : 1;
#pragma unroll
        for (int e = 0; e < UNIT; e++)
            x[e] = ieee_fma(x[e], sign, __shfl_xor_sync(~0u, x[e], step));
    }
#pragma unroll
    for (int e = 0; e < UNIT; e++) x[e] = ieee_mul(x[e], ROTATED);
}

// The number of the largest magnitude, the first of several.
DEVICE float first_extreme(const float (&x)[UNIT], Group group) {
    float own = x[0];
#pragma unroll
    for (int e = 1; e < UNIT; e++) own = magnitude(x[e]) > magnitude(own) ? x[e] : own;
    u32 most = magnitude(own);
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) {
        const u32 other = __shfl_xor_sync(~0u, most, step);
        if (step < group.width) most = max(most, other);
    }
    const u32 there = __ballot_sync(~0u, magnitude(own) == most) & ~0u << group.first;
    return __shfl_sync(~0u, own, __ffs(there) - 1);
}

// The number of the largest magnitude; NaN if there is one. Mostly it is the greatest or the least number: they seldom have
// the same magnitude.
DEVICE float extreme_of(const float (&x)[UNIT], Group group) {
    float high = x[0], low = x[0];
#pragma unroll
    for (int e = 1; e < UNIT; e++) high = ieee_max(high, x[e]), low = ieee_min(low, x[e]);
#pragma unroll
    for (int step = WARP / 2; step; step /= 2) {
        const int apart = step & (group.width - 1);  // of no other lane's, or of another of the group
        high = ieee_max(high, __shfl_xor_sync(~0u, high, apart)), low = ieee_min(low, __shfl_xor_sync(~0u, low, apart));
    }
    const float opposite = negated(low);
    if (__any_sync(~0u, high == opposite)) return first_extreme(x, group);
    return high > opposite ? high : low;
}

// Rounds to float16, magnitudes up.
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

// Codes at `to`, `bits` bytes of each lane, and the scale; float16 numbers for 16 bits, which are the same for a warp.
DEVICE void encode(const float (&x)[UNIT], int bits, int dim, Group group, u8* to, u16* scale) {
    const int lane = group.lane;
    const bool own = lane * UNIT < dim;
    if (bits == 16) {
        auto two = [&](int e) { return float_to_half(x[e]) | u32(float_to_half(x[e + 1])) << 16; };
        if (own) reinterpret_cast<uint4*>(to)[lane] = make_uint4(two(0), two(2), two(4), two(6));
        return;
    }
    const u16 stored = away_from_zero(ieee_mul(extreme_of(x, group), -power_of_two(1 - bits)));
    if (lane == 0) *scale = stored;
    if (!own) return;
    // Of finite numbers no quotient is below the least code, as the scale is not too small; above there is one code less.
    const float step = half_to_float(stored), least = -power_of_two(bits - 1), most = -1 - least;
    float q[UNIT];
    if (is_finite(step) && magnitude(step)) {
        // x / step, rounded once, wherever that is not near 0. It is no tie of float32 numbers, as step has 11 digits and x 24,
        // and at least 2^-36 of it away from one: further than the sum of a first quotient and what that lacks.
        const float part = about_inverse(step);
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
            const float near = x[e] * part;
            q[e] = fminf(fmaf(fmaf(-near, step, x[e]), part, near), most);
        }
    } else {
        // Of numbers too small for any step the quotient is infinite, of others undefined: as the reference's codes.
#pragma unroll
        for (int e = 0; e < UNIT; e++) {
            const bool falls = (__float_as_int(x[e]) ^ __float_as_int(step)) < 0;
            q[e] = magnitude(step) || !magnitude(x[e]) ? 0 : falls ? least : most;
        }
    }
    // Rounded, halves to even, and the least code as 0, in the last bits of a float: four such add up to a word with all their
    // codes, and with what the bits above these, which are always the same, amount to.
    constexpr u32 ABOVE = 0x4b400000;
    const float lift = __int_as_float(ABOVE) - least;
    const u32 unit = 1u << bits, surplus = ABOVE * (1 + unit * (1 + unit * (1 + unit)));
    u32 words[2];
#pragma unroll
    for (int w = 0; w < 2; w++) {
        u32 sum = 0;
#pragma unroll
        for (int e = UNIT / 2 - 1; e >= 0; e--) sum = sum * unit + __float_as_int(q[w * UNIT / 2 + e] + lift);
        words[w] = sum - surplus;
        if (bits == 8) words[w] ^= 0x80808080;  // twos' complement
    }
    const u64 packed = words[0] | u64(words[1]) << 4 * bits;
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

// A lane's stored numbers as floats: codes times the scale, which are exact products.
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

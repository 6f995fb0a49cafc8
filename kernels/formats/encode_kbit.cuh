// Floats to the bit planes and the scale of a k-bit block, bit for bit as the reference in cuquant/formats/kbit.py.
// Two threads per block, as in encode.cuh.
#pragma once
#include "encode.cuh"

// What all blocks are compared with.
struct Thresholds {
    float value[32];  // 2^BITS - 1 means of neighbouring entries, ascending, then infinity
};

// How many thresholds a number is above, in shared memory. The numbers from -1 to 1 are divided into equal steps. A
// number is above the thresholds of the steps before its own, whatever the roundings, since numbers' steps grow with
// them; it is compared with what its own step holds, if no step holds more than one. Codebooks with closer entries, and
// numbers beyond 1, which a stored scale that was rounded down makes, need a search. An access is to 32 banks, one word
// each, so that lanes never wait for each other (of 5 bits, two).
template <int BITS>
struct Levels {
    static constexpr int STEPS = BITS == 5 ? 64 : 32, LAST = (1 << BITS) - 1;

    float thresholds[32];
    float own[STEPS];   // a step's threshold; infinity if it has none
    u32 before[STEPS];  // thresholds of the steps before
    bool crowded[STEPS / WARP];

    // Four times the step of a number from -1 to 1, in the last bits of a float whose last bit is worth 1.
    static DEVICE u32 step_of(float v) {
        return __float_as_int(__fmaf_rn(v, 2 * STEPS - 1, 12582912.f + 2 * STEPS)) & (STEPS - 1) * 4;
    }

    // By the first warps of a block; they have no barrier in between, and none behind.
    DEVICE void fill(const Thresholds& given) {
        const int lane = threadIdx.x % WARP, step = threadIdx.x * 4;
        const float value = given.value[lane];
        const int its = lane < LAST ? step_of(value) : STEPS * 4;
        int count = 0;
#pragma unroll
        for (int more = (LAST + 1) / 2; more; more /= 2)
            if (__shfl_sync(~0u, its, count + more - 1) < step) count += more;
        const float first = __shfl_sync(~0u, value, count);
        const bool has_one = __shfl_sync(~0u, its, count) == step;
        const bool has_two = __shfl_sync(~0u, its, min(count + 1, LAST)) == step;
        own[threadIdx.x] = has_one ? first : __int_as_float(0x7f800000);
        before[threadIdx.x] = count;
        const bool any = __any_sync(~0u, has_two);
        if (lane == 0) crowded[threadIdx.x / WARP] = any;
        if (threadIdx.x < WARP) thresholds[lane] = value;
    }

    DEVICE bool is_crowded() const { return crowded[0] || crowded[STEPS / WARP - 1]; }

    DEVICE u32 of(float v) const {
        const u32 at = step_of(v);
        const float threshold = *reinterpret_cast<const float*>(reinterpret_cast<const u8*>(own) + at);
        const u32 count = *reinterpret_cast<const u32*>(reinterpret_cast<const u8*>(before) + at);
        return count + (u32(__float_as_int(threshold - v)) >> 31);
    }

    DEVICE u32 searched(float v) const {
        int q = 0;
#pragma unroll
        for (int more = (LAST + 1) / 2; more; more /= 2)
            if (v > thresholds[q + more - 1]) q += more;
        return q;
    }
};

// E4M4 of a number from 0 on: to nearest even, saturating. Adding 2^9, whose last bit is worth 2^-14, rounds to the
// step of the subnormal codes.
DEVICE u32 e4m4_of(float x) {
    const u32 bits = __float_as_int(x), odd = bits >> 19 & 1;
    const u32 normal = ((bits + 0x3ffff + odd) >> 19) - ((127 - 11) << 4);
    const u32 subnormal = __float_as_int(ieee_add(x, 512.f)) - 0x44000000;
    return min(x < 0x1p-10f ? subnormal : normal, 255u);
}

// x / d rounded to nearest, with 1 / d rounded to nearest: a quotient's remainder corrects it, and is exact unless it
// is too small for a normal number.
DEVICE float quotient(float x, float d, float inverse) {
    const float q = x * inverse;
    return __fmaf_rn(__fmaf_rn(-q, d, x), inverse, q);
}

// Elements over d, rounded to nearest; what is below 2^-99 counts as 0. Float16 numbers over each other, or over a
// scale, are further from the middle between two floats than an error in the 46th bit.
DEVICE void divide(float (&x)[MINE], float d, int dtype) {
    const float inverse = ieee_div(1, d), small = d * 0x1p-40f;
    if (dtype == FLOAT16) {
        const float rest = __fmaf_rn(-d, inverse, 1) * inverse;
#pragma unroll
        for (int j = 0; j < MINE; j++) x[j] = __fmaf_rn(x[j], inverse, x[j] * rest);
        return;
    }
    float least = small;
#pragma unroll
    for (int j = 0; j < MINE; j++) least = fminf(least, fabsf(x[j]));
    if (least == small) {
#pragma unroll
        for (int j = 0; j < MINE; j++) x[j] = quotient(x[j], d, inverse);
    } else {
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const bool is_small = fabsf(x[j]) < small;
            const float v = quotient(is_small ? x[j] * 0x1p32f : x[j], d, inverse);
            x[j] = !is_small ? v : fabsf(v) < 0x1p-67f ? 0 : v * 0x1p-32f;
        }
    }
}

// Bits of a word, those that `mask` has and those `by` bits higher, changed for each other.
DEVICE u32 swapped(u32 word, int by, u32 mask) {
    const u32 other = (word ^ word >> by) & mask;
    return word ^ other ^ other << by;
}

// Bytes of the planes of eight codes of four bits each, byte p of plane p, from eight nibbles. In the number of a bit,
// from the highest one on, s of a slot and p of a plane and j of an element, the swaps do
//
//     s2 s1 s0 p1 p0  ->  p1 s1 s0 s2 p0  ->  p1 p0 s0 s2 s1
//
// so that slot s has element slot_of(s).
DEVICE constexpr int element_of(int slot) { return (slot & 1) << 2 | slot >> 1; }

DEVICE u32 planes_of(u32 nibbles) { return swapped(swapped(nibbles, 14, 0x0000cccc), 7, 0x00aa00aa); }

// A thread's codes of 16 numbers, as bytes of bit planes, to their places.
template <int BITS, class Levels>
DEVICE void store_planes(const float (&v)[MINE], int half, u8* to, const Levels& levels, bool search) {
#pragma unroll
    for (int run = 0; run < 2; run++) {
        u32 nibbles = 0, fifth = 0;
#pragma unroll
        for (int slot = 7; slot >= 0; slot--) {
            const int j = element_of(slot);
            const u32 q = search ? levels.searched(v[run * 8 + j]) : levels.of(v[run * 8 + j]);
            nibbles = nibbles * 16 + (BITS == 5 ? q & 15 : q);
            if constexpr (BITS == 5) fifth |= q >> 4 << j;
        }
        const u32 planes = planes_of(nibbles);
#pragma unroll
        for (int p = 0; p < BITS; p++) to[p * 4 + run * 2 + half] = u8(p == 4 ? fifth : planes >> p * 8);
    }
}

// The same of 2 bits, of numbers and what they are compared with. Of the three differences' signs the one in the middle
// is plane 1, and plane 0 is set if their number is odd.
DEVICE void store_planes(const float (&v)[MINE], int half, u8* to, const float (&thresholds)[3]) {
    u32 planes[2] = {};
#pragma unroll
    for (int j = MINE - 1; j >= 0; j--) {
        u32 signs[3];
#pragma unroll
        for (int i = 0; i < 3; i++) signs[i] = __float_as_int(ieee_sub(thresholds[i], v[j]));
        planes[0] = __funnelshift_l(signs[0] ^ signs[1] ^ signs[2], planes[0], 1);
        planes[1] = __funnelshift_l(signs[1], planes[1], 1);
    }
#pragma unroll
    for (int byte = 0; byte < 4; byte++) to[byte * 2 + half] = u8(planes[byte / 2] >> byte % 2 * 8);
}

// What a float16 number is above just where it over d, rounded to nearest, is above t: d times the middle between t and
// the next float, rounded down. The middle has 25 bits, so that no quotient of float16 numbers is in it.
DEVICE float times(float t, float d) {
    const int bits = __float_as_int(t);
    const float step = ieee_sub(__int_as_float(bits + (bits < 0 ? -1 : 1)), t);
    float r;
    asm("fma.rm.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(t), "f"(d), "f"(ieee_mul(ieee_mul(step, 0.5f), d)));
    return r;
}

// A thread's half of a block with this peak to its place; false where the block's scale cannot hold its magnitude, or
// an element is no number. With `decoded` elements are divided by what the scale reads as, else by the greatest
// magnitude itself.
template <class F>
DEVICE bool encode_lookup(float (&x)[MINE], float peak, int dtype, int half, u8* to, const Thresholds& thresholds,
                          bool decoded) {
    peak = ieee_max(peak, __shfl_xor_sync(~0u, peak, 1));
    const u32 stored = F::SCALING == E4M4 ? e4m4_of(peak) : float_to_half(peak);
    const float d = fmaxf(decoded ? F::scale(stored) : peak, 1e-8f);
    if constexpr (F::BITS == 2) {
        if (dtype != FLOAT16) divide(x, d, dtype);
        float limits[3];
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const float given = thresholds.value[i];
            limits[i] = dtype == FLOAT16 ? times(given, d) : given;
        }
        store_planes(x, half, to, limits);
    } else {
        divide(x, d, dtype);
        __shared__ Levels<F::BITS> levels;
        if (threadIdx.x < levels.STEPS) levels.fill(thresholds);
        __syncthreads();
        if (decoded || levels.is_crowded())
            store_planes<F::BITS>(x, half, to, levels, true);
        else
            store_planes<F::BITS>(x, half, to, levels, false);
    }
    if (half == 0) F::store_scale_bits(to, stored);
    return F::SCALING == E4M4 ? peak <= 31.5f : (stored & 0x7c00) != 0x7c00;
}

// Floats to the codes and scales of a block, bit for bit as the reference in cuquant/formats. Two threads per block:
// of each 16 elements, whose codes of 4 bits share bytes, thread 0 has the first eight and thread 1 the others.
#pragma once
#include "../core/ieee.cuh"
#include "../core/ptx.cuh"

constexpr int MINE = 16;  // elements per thread

// What sets the scale of some elements: the least and the greatest, of +0 and -0 either, or 0 and the greatest
// magnitude; NaN if an element is.
struct Extent {
    float low, high;
};

// Minimum and maximum of pairs of float16 numbers, as ieee_min and ieee_max are of float32 ones.
#if __CUDA_ARCH__ >= 800
DEVICE u32 min_half2(u32 a, u32 b) {
    u32 r;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 max_half2(u32 a, u32 b) {
    u32 r;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 max_magnitude_half2(u32 a, u32 b) {
    u32 r;
    asm("{.reg .b32 x, y;\nabs.f16x2 x, %1;\nabs.f16x2 y, %2;\nmax.NaN.f16x2 %0, x, y;}" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
#endif

DEVICE void widen(const u32 (&pairs)[MINE / 2], float (&to)[MINE]) {
#pragma unroll
    for (int j = 0; j < MINE; j += 2) to[j] = low_to_float(pairs[j / 2]), to[j + 1] = high_to_float(pairs[j / 2]);
}

DEVICE Extent range_of(const float (&x)[MINE]) {
    Extent range = {x[0], x[0]};
#pragma unroll
    for (int j = 1; j < MINE; j++) range = {ieee_min(range.low, x[j]), ieee_max(range.high, x[j])};
    return range;
}

// The greatest magnitude; NaN if an element is.
DEVICE float peak_of(const float (&x)[MINE]) {
    u32 bits = 0;
#pragma unroll
    for (int j = 0; j < MINE; j++) bits = max(bits, magnitude(x[j]));
    return __int_as_float(bits);
}

// The least and the greatest of float16 numbers, two at a time.
DEVICE Extent range_of(const u32 (&pairs)[MINE / 2]) {
#if __CUDA_ARCH__ >= 800
    u32 low = pairs[0], high = low;
#pragma unroll
    for (int j = 1; j < MINE / 2; j++) low = min_half2(low, pairs[j]), high = max_half2(high, pairs[j]);
    return {ieee_min(low_to_float(low), high_to_float(low)), ieee_max(low_to_float(high), high_to_float(high))};
#else
    float x[MINE];
    widen(pairs, x);
    return range_of(x);
#endif
}

DEVICE float peak_of(const u32 (&pairs)[MINE / 2]) {
#if __CUDA_ARCH__ >= 800
    u32 peak = pairs[0];
#pragma unroll
    for (int j = 1; j < MINE / 2; j++) peak = max_magnitude_half2(peak, pairs[j]);
    return ieee_max(low_to_float(peak), high_to_float(peak));
#else
    float x[MINE];
    widen(pairs, x);
    return peak_of(x);
#endif
}

// The range, or without signs the peak, of elements, or of pairs of them.
template <bool SIGNED, class T>
DEVICE Extent extent_of(const T& x) {
    if constexpr (SIGNED) return range_of(x);
    return {0, peak_of(x)};
}

// rest << 16 | high's byte << 8 | low's byte.
DEVICE u32 pack_bytes(int low, int high, u32 rest) {
    u32 r;
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(high), "r"(low), "r"(rest));
    return r;
}

// rest << 8 | high << 4 | low, both brought to 0 .. 15.
DEVICE u32 pack_nibbles(int low, int high, u32 rest) {
    u32 r;
    asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(high), "r"(low), "r"(rest));
    return r;
}

// A thread's elements, of two bytes: eight that are here, and eight that are APART further, of addresses aligned to 16 bytes.
template <int APART>
DEVICE void load_pairs(const uint4* from, u32 (&to)[MINE / 2]) {
    const uint4 a = from[0], b = from[APART / 8];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// Such elements of any type, as numbers. What sets the scale of them. These are of addresses aligned to 16 bytes ...
template <int APART, bool SIGNED>
DEVICE Extent load_in_order(const void* x, s64 at, int dtype, float (&to)[MINE]) {
    if (dtype == FLOAT32) {
        const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(x) + at);
        const float4 parts[4] = {from[0], from[1], from[APART / 4], from[APART / 4 + 1]};
#pragma unroll
        for (int p = 0; p < 4; p++)
            to[p * 4] = parts[p].x, to[p * 4 + 1] = parts[p].y, to[p * 4 + 2] = parts[p].z, to[p * 4 + 3] = parts[p].w;
    } else {
        u32 pairs[MINE / 2];
        load_pairs<APART>(reinterpret_cast<const uint4*>(static_cast<const u16*>(x) + at), pairs);
        if (dtype == FLOAT16) {
            widen(pairs, to);
            return extent_of<SIGNED>(pairs);
        }
#pragma unroll
        for (int j = 0; j < MINE; j++) to[j] = bfloat_to_float(u16(pairs[j / 2] >> j % 2 * 16));
    }
    return extent_of<SIGNED>(to);
}

// ... and these of any.
template <int APART = 16, bool SIGNED = true>
DEVICE Extent load_elements(const void* x, s64 at, s64 row_stride, s64 column_stride, int dtype, float (&to)[MINE]) {
    const s64 row_bytes = row_stride * (dtype == FLOAT32 ? 4 : 2);
    if (column_stride == 1 && (reinterpret_cast<u64>(x) | row_bytes) % 16 == 0)
        return load_in_order<APART, SIGNED>(x, at, dtype, to);
#pragma unroll
    for (int j = 0; j < MINE; j++) to[j] = load_float(x, at + (j % 8 + j / 8 * APART) * column_stride, dtype);
    return extent_of<SIGNED>(to);
}

// Whether rows of so many elements lie one behind another, the first at an address aligned to 16 bytes. They are then
// one row: a 64-bit division is a function call. (One test: of what differs.)
DEVICE bool are_dense(const void* x, s64 row_stride, s64 column_stride, s64 elements) {
    return ((column_stride ^ 1) | (row_stride ^ elements) | reinterpret_cast<u64>(x) % 16) == 0;
}

// Whether the block's first element of this magnitude (in bits) is negative.
DEVICE bool first_is_negative(const float (&x)[MINE], int half, u32 wanted) {
    int first = 64;  // twice the element's number, + 1 if it is negative
#pragma unroll
    for (int j = MINE - 1; j >= 0; j--)
        if (magnitude(x[j]) == wanted) first = (j + j / 8 * 8 + half * 8) * 2 + (__float_as_int(x[j]) < 0);
    return min(first, __shfl_xor_sync(~0u, first, 1)) & 1;
}

struct Scales {
    float d, m;  // not finite where an element is not
};

// What blocks are not as their elements were.
struct Found {
    u64 first_bad;  // the lowest row that holds NaN or infinity or has a scale that overflows, if it is less than before
    u64 lost;       // sixteens of elements are added whose scale is too coarse for them
};

// Whether a float16 number has fewer steps of 2^-24 than a scale that is fine (Format.fine_from in cuquant/formats/base.py).
template <int FINE_FROM>
DEVICE bool is_coarse(u32 half) {
    return (half & 0x7fff) < FINE_FROM;
}

// The bits of the least float that is rounded to `steps` times 2^-24, to nearest even: half a step less, or just above that.
DEVICE constexpr u32 first_rounded_to(int steps) {
    const u32 halves = 2 * steps - 1;
    int top = 0;
    while (halves >> top > 1) top++;
    return (u32(127 - 25 + top) << 23 | (halves << (23 - top) & 0x7fffff)) + steps % 2;
}

// Whether a scale that is not 0 is rounded to such a number. (In two instructions: numbers without their sign, but twice as
// large, and 0 above all others.)
template <int FINE_FROM>
DEVICE bool becomes_coarse(float scale) {
    constexpr u32 FIRST_FINE = first_rounded_to(FINE_FROM);
    const u32 bits = __float_as_int(scale);
    return bits + bits - 1 < 2 * FIRST_FINE - 1;
}

// By whole warps: so many sixteens of each lane's that `counts`.
DEVICE void add_lost(Found* found, bool lost, bool counts, int sixteens = 1) {
    if (!__any_sync(~0u, lost)) return;  // nearly always
    const u32 lanes = __ballot_sync(~0u, lost && counts);
    if (lanes && found && threadIdx.x % WARP == 0) atomicAdd(&found->lost, u64(__popc(lanes) * sixteens));
}

// Whether numbers are not all 0, or, beside a minimum, all the same.
template <bool MINIMUM, int N>
DEVICE bool need_scale(const float (&x)[N]) {
    u32 any = 0;
#pragma unroll
    for (int j = 0; j < N; j++) any |= MINIMUM ? order(x[j]) ^ order(x[0]) : magnitude(x[j]);
    return any != 0;
}

// Codes of a thread's elements, of which this sets the scale, and the float32 scale and minimum of the block. A code of
// 4 bits may be 16 for 15.
template <class F>
DEVICE Scales encode(const float (&x)[MINE], Extent extent, int half, int (&q)[MINE]) {
    float high = ieee_max(extent.high, __shfl_xor_sync(~0u, extent.high, 1));
    float low = F::BITS == 8 ? 0 : ieee_min(extent.low, __shfl_xor_sync(~0u, extent.low, 1));
    if constexpr (F::BITS == 8) {
        float d = ieee_over_127(high);
        float inv = inverse(d);
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            // roundf: half away from zero; the greatest float below a half leaves 0.49999997 at 0. NaN becomes 0.
            float scaled = ieee_mul(x[j], inv);
            q[j] = __float2int_rz(scaled + copysignf(0.49999997f, scaled));
        }
        return {d, 0};
    } else if constexpr (F::HAS_MIN) {
        // Of +0 and -0 the first counts.
        if (__any_sync(~0u, !magnitude(low) || !magnitude(high))) {
            float zero = __int_as_float(u32(first_is_negative(x, half, 0)) << 31);
            low = magnitude(low) ? low : zero;
            high = magnitude(high) ? high : zero;
        }
        float d = ieee_div(ieee_sub(high, low), (1 << F::BITS) - 1), inv = inverse(d);
#pragma unroll  // the greatest code is 15 or 31 but for roundings, far from the next
        for (int j = 0; j < MINE; j++) q[j] = __float2int_rz(ieee_add(ieee_mul(ieee_sub(x[j], low), inv), 0.5f));
        return {d, low};
    } else {
        // Of equal magnitudes the first counts.
        const u32 below = magnitude(low), above = magnitude(high);
        bool negative = below > above;
        if (__any_sync(~0u, below == above)) {
            bool first = first_is_negative(x, half, above);
            negative = below == above ? first : negative;
        }
        // The reference starts from +0, so a block of -0 has the peak +0 (and the scale -0).
        float peak = negative ? low : high;
        float d = ieee_mul(magnitude(peak) ? peak : 0, -1.f / F::OFFSET), inv = inverse(d);
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            q[j] = __float2int_rz(ieee_add(ieee_mul(x[j], inv), F::OFFSET + 0.5f));
            if constexpr (F::BITS == 5) q[j] = min(q[j], 31);
        }
        return {d, 0};
    }
}

template <class F>
DEVICE Scales encode(const float (&x)[MINE], int half, int (&q)[MINE]) {
    return encode<F>(x, extent_of<F::BITS != 8>(x), half, q);
}

// A thread's codes, packed in order: of 4 bits the two of a byte together, else a byte each.
template <class F>
DEVICE void pack_codes(const int (&q)[MINE], u32 (&words)[4]) {
    if constexpr (F::BITS == 4) {
        words[0] = words[1] = words[2] = words[3] = 0;
#pragma unroll
        for (int j = 7; j >= 0; j--) words[j / 4] = pack_nibbles(q[j], q[j + 8], words[j / 4]);
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++)
            words[j] = pack_bytes(q[j * 4], q[j * 4 + 1], pack_bytes(q[j * 4 + 2], q[j * 4 + 3], 0));
    }
}

// Stores codes to their places in the block.
template <class F>
DEVICE void store_codes(u8* block, int half, u32 (&words)[4]) {
    u8* const to = block + F::CODES_AT + half * 8;
    if constexpr (F::HAS_FIFTH) {
        auto fifth = [&](int w) { return (words[w] >> 4 & 0x01010101) * 0x01020408 >> 24; };  // of byte k to bit k
        block[F::FIFTH_AT + half] = u8(fifth(0) | fifth(1) << 4);
        block[F::FIFTH_AT + half + 2] = u8(fifth(2) | fifth(3) << 4);
        for (int w = 0; w < 2; w++) words[w] = (words[w] & 0x0f0f0f0f) | (words[w + 2] & 0x0f0f0f0f) << 4;
    }
    store_u32(to, words[0]);
    store_u32(to + 4, words[1]);
    if constexpr (F::BITS == 8) {
        store_u32(to + 16, words[2]);
        store_u32(to + 20, words[3]);
    }
}

// Scale and minimum, or sum, of the block in float16.
template <class F>
DEVICE u32 scale_bits(const Scales& scales, const u32 (&words)[4]) {
    u32 bits = float_to_half(scales.d);
    if constexpr (F::HAS_SUM) {  // of the codes, times the scale before its rounding
        int sum = 0;
        for (int w = 0; w < 4; w++) sum = __dp4a(int(words[w]), 0x01010101, sum);
        sum += __shfl_xor_sync(~0u, sum, 1);
        bits |= u32(float_to_half(ieee_mul(float(sum), scales.d))) << 16;
    } else if constexpr (F::HAS_MIN) {
        bits |= u32(float_to_half(scales.m)) << 16;
    }
    return bits;
}

// The bytes of all threads, MOST at most, from shared memory to an address aligned to 16 bytes.
template <int MOST, int THREADS>
DEVICE void store_staged(u8* to, const u8* staged, int bytes) {
    __syncthreads();
    if (bytes % 16 == 0) {
        const int own = threadIdx.x * 16;
#pragma unroll
        for (int byte = 0; byte < MOST; byte += THREADS * 16)
            if (byte + own < bytes)
                *reinterpret_cast<uint4*>(to + byte + own) = *reinterpret_cast<const uint4*>(staged + byte + own);
    } else {
#pragma unroll 1
        for (int byte = threadIdx.x; byte < bytes; byte += THREADS) to[byte] = staged[byte];
    }
}

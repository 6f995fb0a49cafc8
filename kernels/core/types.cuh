// Integer types, float formats as bits, and a warp's coordinates. NVRTC has no <stdint.h>.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef long long s64;

#define DEVICE __device__ __forceinline__

constexpr int WARP = 32;

// What a format's codes are (core/codec.cuh), and how a block's scale is stored in the fragment layout (core/tile.cuh).
enum Coding { INTEGERS, CODEBOOK, SIGNED_CODEBOOK, MASKED_CODEBOOK, E2M1, PROCEDURE };
// The last four are integers that the group plane's float16 numbers multiply, a byte (but two NIBBLES) each: of blocks
// of 32 columns, or of every STEP of 16.
enum Scaling {
    UNSCALED, HALF, HALF_AND_MIN, HALF_AND_ZERO, E4M4, E8M0, E4M3, SINGLE, BYTES, BYTES_AND_MIN, STEP_BYTES,
    STEP_NIBBLES_AND_MIN
};

// Whether codes are looked up in a codebook, all of them or some.
template <class F>
constexpr bool LOOKED_UP =
    F::CODING == CODEBOOK || F::CODING == SIGNED_CODEBOOK || F::CODING == MASKED_CODEBOOK;

// Whether a lane's two words of the low plane lie together, as both blocks want both; else they are 128 bytes apart.
template <class F>
constexpr bool WORDS_TOGETHER = F::CODING == MASKED_CODEBOOK;

// Whether the group plane has scales themselves (float16, with zero points), not what integer scales are multiplied by.
template <class F>
constexpr bool GROUP_SCALES = F::GROUP_BYTES > 0 && F::SCALING < BYTES;

// A format whose scales share nothing over many columns: no group plane (core/tile.cuh).
struct Ungrouped {
    static constexpr int GROUP_BYTES = 0, GROUP_TILES = 1;
};

// Whether scales of integer codes are kept in the range that codes in subnormal numbers want, and the row plane has a
// factor for every row, which takes that back (core/tile.cuh). Without, a weight that float16 does not hold has its scales
// as they are.
#ifndef CUQUANT_ROW_FACTORS
#define CUQUANT_ROW_FACTORS 1
#endif
template <class F>
constexpr bool ROW_FACTORS = CUQUANT_ROW_FACTORS && F::CODING == INTEGERS;

// By how many bits integers of rows g + 8 stand higher in a register than those of rows g (core/places.cuh).
template <int BITS>
constexpr int HIGHER_OF = BITS == 8 ? 0 : BITS == 6 ? 4 : BITS;
template <class F>
constexpr int HIGHER = HIGHER_OF<F::BITS>;

// Whether the decode core multiplies codes by integer scales before their sums, which float16 holds exactly: codes of 2
// bits, scales of 4.
template <class F>
constexpr bool EXACT_PRODUCTS = F::SCALING == STEP_NIBBLES_AND_MIN;

// Records of the group plane for so many tiles along K.
template <class F>
DEVICE int groups_of(int tiles) {
    return (tiles + F::GROUP_TILES - 1) / F::GROUP_TILES;
}

// Element types of the arrays that a user hands over, numbered as cuquant/cuda/problem.py numbers them.
enum Dtype { FLOAT16 = 0, BFLOAT16 = 1, FLOAT32 = 2 };

// Bytes of so many lines of 128.
DEVICE constexpr int whole_lines(int bytes) { return (bytes + 127) / 128 * 128; }

// Blocks start at any even address.
DEVICE u32 load_u16(const u8* p) { return *reinterpret_cast<const u16*>(p); }

DEVICE u32 load_u32(const u8* p) { return load_u16(p) | load_u16(p + 2) << 16; }

// What an aligned word has before `end`, where an array may end within it, or null.
DEVICE u32 load_until(const u32* p, const u8* end) {
    if (!end || reinterpret_cast<const u8*>(p + 1) <= end) return *p;
    u32 word = 0;
#pragma unroll 1
    for (int b = int(end - reinterpret_cast<const u8*>(p)) - 1; b >= 0; b--)
        word = word << 8 | reinterpret_cast<const u8*>(p)[b];
    return word;
}

// Four bytes from any address, and eight, from the aligned words that hold some of them.
DEVICE u32 load_four(const u8* p, const u8* end) {
    const u32 shift = u32(reinterpret_cast<u64>(p)) % 4 * 8;
    const u32* const from = reinterpret_cast<const u32*>(p - shift / 8);
    return __funnelshift_r(from[0], load_until(from + (shift ? 1 : 0), end), shift);
}

DEVICE uint2 load_eight(const u8* p, const u8* end) {
    const u32 shift = u32(reinterpret_cast<u64>(p)) % 4 * 8;
    const u32* const from = reinterpret_cast<const u32*>(p - shift / 8);
    const u32 first = from[0], second = from[1], last = load_until(from + (shift ? 2 : 1), end);
    return make_uint2(__funnelshift_r(first, second, shift), __funnelshift_r(second, last, shift));
}

DEVICE void store_u16(u8* p, u32 bits) { *reinterpret_cast<u16*>(p) = u16(bits); }

DEVICE void store_u32(u8* p, u32 bits) { store_u16(p, bits), store_u16(p + 2, bits >> 16); }

DEVICE float half_to_float(u16 bits) {
    float value;
    asm("{.reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h;}" : "=f"(value) : "h"(bits));
    return value;
}

// One half of a pair; the instruction has both at hand.
DEVICE float low_to_float(u32 pair) {
    float value;
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(value) : "r"(pair));
    return value;
}

DEVICE float high_to_float(u32 pair) {
    float value;
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}" : "=f"(value) : "r"(pair));
    return value;
}

DEVICE u16 float_to_half(float value) {
    u16 bits;
    asm("{.reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h;}" : "=h"(bits) : "f"(value));
    return bits;
}

// A normal number, exponents from -126 to 127.
DEVICE float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// The bits of a float's magnitude, which are in the order of their numbers; NaN's are the greatest.
DEVICE u32 magnitude(float x) { return __float_as_int(x) & 0x7fffffff; }

DEVICE float bfloat_to_float(u16 bits) { return __int_as_float(u32(bits) << 16); }

// Round to nearest even; NaN keeps a set mantissa bit, which adding the rounding bias could carry away.
DEVICE u16 float_to_bfloat(float value) {
    u32 bits = __float_as_int(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return u16(bits >> 16 | 0x40);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Two numbers of a 16-bit type, each rounded once.
DEVICE u32 pack(float low, float high, int dtype) {
    u32 bits;
    if (dtype == FLOAT16) {
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
        bits = float_to_half(low) | u32(float_to_half(high)) << 16;
#endif
    } else {
#if __CUDA_ARCH__ >= 800
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
        bits = float_to_bfloat(low) | u32(float_to_bfloat(high)) << 16;
#endif
    }
    return bits;
}

// Eight float16 numbers, changed by the bits of signs.
DEVICE uint4 flip(uint4 v, uint4 signs) {
    return make_uint4(v.x ^ signs.x, v.y ^ signs.y, v.z ^ signs.z, v.w ^ signs.w);
}

DEVICE float load_float(const void* array, s64 index, int dtype) {
    if (dtype == FLOAT32) return static_cast<const float*>(array)[index];
    u16 bits = static_cast<const u16*>(array)[index];
    return dtype == FLOAT16 ? half_to_float(bits) : bfloat_to_float(bits);
}

DEVICE void store_float(void* array, s64 index, int dtype, float value) {
    if (dtype == FLOAT32)
        static_cast<float*>(array)[index] = value;
    else
        static_cast<u16*>(array)[index] = dtype == FLOAT16 ? float_to_half(value) : float_to_bfloat(value);
}

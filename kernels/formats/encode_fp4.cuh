// Floats to E2M1 codes and the scale of a block, bit for bit as the references in cuquant/formats/mxfp4.py and nvfp4.py.
// Two threads per 32 elements: of mxfp4 each has bytes of its own, of nvfp4 a scale.
#pragma once
#include "encode.cuh"

DEVICE float multiply_toward_zero(float a, float b) {
    float r;
    asm("mul.rz.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// A pair of float16 numbers, each rounded toward zero.
DEVICE u32 pack_toward_zero(float low, float high) {
    u32 r;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("{.reg .f16 low, high;\ncvt.rz.f16.f32 low, %1;\ncvt.rz.f16.f32 high, %2;\nmov.b32 %0, {low, high};}"
        : "=r"(r) : "f"(low), "f"(high));
#endif
    return r;
}

// The bits of a that the mask has, the others of b.
DEVICE u32 merged(u32 a, u32 b, u32 mask) { return (a & mask) | (b & ~mask); }

// Codes of elements below 16 times their scale: the nearest magnitude, of two equally near the smaller one,
// and 0 without a sign. `unit` is the float just below 2^-14 over the scale, so that a product, rounded toward zero, is
// the float just below 2^-14 times the number to be rounded: one at least as great as a middle between neighbours was
// above it. That holds if 1 over the scale is rounded to nearest, whichever E4M3 number the scale is: a scale's 4 bits
// and a middle's 3 leave the next float far enough away. Float16 numbers are then placed as E2M1's are, subnormal ones
// included (core/e2m1.cuh), in units of a quarter of their step,
//
//     bit   15 14 13 12 11 10  9  8  7 ...
//            s  0  0  o  e  e  m  .  .  .     o: set from 7 on, where the nearest is 6
//
// and one in bit 8 rounds what the lower bits hold. Nibble i of a word has element i / 2, or 8 + i / 2 if i is odd.
DEVICE void nearest_e2m1(const float (&x)[MINE], float unit, u32 (&words)[2]) {
#pragma unroll
    for (int w = 0; w < 2; w++) {
        u32 codes[2], signs[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            u32 pairs[2];
#pragma unroll
            for (int p = 0; p < 2; p++) {
                const float* const two = x + h * 8 + w * 4 + p * 2;
                pairs[p] = pack_toward_zero(multiply_toward_zero(two[0], unit), multiply_toward_zero(two[1], unit));
            }
            codes[h] = permute(pairs[0], pairs[1], 0x7531) + 0x01010101;
            signs[h] = permute(pairs[0], pairs[1], 0xfdb9);
        }
        u32 word = merged(codes[0] >> 1, codes[1] << 3, 0x0f0f0f0f);
        const u32 beyond = word & 0x88888888;
        word = (word | (beyond - (beyond >> 3))) & 0x77777777;
        words[w] = word | (merged(signs[0], signs[1], 0x0f0f0f0f) & (word + 0x77777777) & 0x88888888);
    }
}

// What e8m0_of takes for the exponent of a number, normal or not: floor(log2), where log2 is rounded to float32. Below
// 2^k by n times 2^(k - 24) it is 1.4427 n 2^-24 less than k, which rounding loses up to half the step of floats there,
// 2^(f - 24) if f is floor(log2) of their integer parts.
DEVICE int rounded_log2(u32 bits) {
    if (bits < 0x00800000) bits = __float_as_int(float(int(bits))) - (149 << 23);
    const int k = (int(bits) >> 23) - 126, below = 0x00800000 - (bits & 0x007fffff);
    int least = k > 0 ? k - 1 : -k, most = 177;  // 256 / 1.4427
    while (least > 1) least /= 2, most *= 2;
    return k - (!least || below > most / 256);
}

// The E8M0 byte of a block with this peak, in bits; below 2^-125 it wraps around.
DEVICE int e8m0_of(u32 bits) {
    const bool usual = bits >= 0x00800000 && (bits & 0x007fffff) < 0x007fff00;
    const int exponent = usual ? int(bits >> 23) - 127 : rounded_log2(bits);
    return bits ? exponent + 125 & 0xff : 0;
}

// Unsigned E4M3 of a sixth of a number from 0 to 2688, rounded as ggml does. A remainder corrects the quotient to the
// one that is rounded once, unless it is far below the least scale.
DEVICE u32 ue4m3_of_sixth(float peak) {
    const float sixth = peak * (1 / 6.f), x = __fmaf_rn(__fmaf_rn(-sixth, 6, peak), 1 / 6.f, sixth);
    if (x < 0x1p-6f) return min(int(ieee_add(ieee_mul(x, 512), 0.5f)), 7);
    const int code = ((__float_as_int(x) + (1 << 19)) >> 20) - ((127 - 7) << 3);
    return code >= 0x78 ? 0x7e : code;
}

// A thread's half of 32 elements whose scale is of this peak, part `part` of a block, to its place; false where an
// element is no number or beyond the greatest scale (`stored`).
template <class F>
DEVICE bool encode_e2m1(float (&x)[MINE], float peak, int part, int half, u8* block, u32& stored) {
    u32 words[2];
    float unit;
    if constexpr (F::SCALING == E8M0) {
        const int e = e8m0_of(__float_as_int(peak));
        if (half == 0) block[0] = u8(e);
        int exponent = min(e, 238);  // those that wrapped around: of numbers that become 0
        // `unit` might be subnormal; and a code whose number overflows, from 2^128 on, is none.
        if (peak >= 0x1p100f) {
            exponent = e - 64;
#pragma unroll
            for (int j = 0; j < MINE; j++) x[j] = fmaxf(fminf(x[j] * 0x1p-64f, 0x1.8p63f), -0x1.8p63f);
        }
        unit = __int_as_float((127 - 14 + 127 - exponent << 23) - 1);
    } else {
        const u32 d = stored = peak <= 2688.f ? ue4m3_of_sixth(peak) : 0;
        block[part * 2 + half] = u8(d);
        unit = d ? __int_as_float(__float_as_int(ieee_div(0x1p-15f, F::half_of(d))) - 1) : 0;
    }
    nearest_e2m1(x, unit, words);
    u8* const to = block + F::CODES_AT + part * 16 + half * 8;
#pragma unroll
    for (int byte = 0; byte < 8; byte++) to[byte] = u8(words[byte / 4] >> byte % 4 * 8);
    return F::SCALING == E8M0 ? is_finite(peak) : peak <= 2688.f;
}

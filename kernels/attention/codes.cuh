// Codes of keys and values as operands of tensor cores: pairs of float16 numbers, without a conversion.
//
// A unit is eight codes of one token, BITS bytes. Two units a and b become eight pairs (a_j, b_j): a code c, stored as
// c + OFFSET, is masked where it lies in the mantissa of a subnormal float16 number, which reads (c + OFFSET) * 2^n *
// 2^-24 with an n of its own for each j (`shift`). Powers of two leave with the queries (keys) or the sums (values).
//
// Which pairs depends on what the contraction runs over. Of keys a and b are units of one token: the order of
// channels within a product is free. Of values they are the same unit of two tokens.
#pragma once
#include "../core/ptx.cuh"

template <int BITS>
constexpr int OFFSET = BITS == 16 ? 0 : 1 << (BITS - 1);

// n of pair j.
template <int BITS>
DEVICE constexpr int shift(int j) {
    if (BITS == 4) return j % 2 * 4;
    if (BITS == 3) return j < 3 ? 3 * j : j < 6 ? 3 * j - 8 : 3 * j - 18;
    if (BITS == 2) return j < 5 ? 2 * j : 2 * j - 10;
    return 0;
}

// What codes lack: 2^24, but for float16 numbers.
template <int BITS>
constexpr float UNSCALE = BITS == 16 ? 1.f : 16777216.f;

DEVICE float exact_power(int n) { return __int_as_float((127 + n) << 23); }

// COUNT consecutive units of a token, from a shared address.
template <int BITS, int COUNT>
struct Units {
    // Units of 3 bytes have a word each, of which the lower three bytes count; pairs of 2-byte units share one.
    static constexpr int WORDS = BITS == 3 ? COUNT : (COUNT * BITS + 3) / 4;
    u32 w[WORDS];

    // `turn` flips bits of the number of a 16-byte piece (Layout::turn).
    DEVICE void load(u32 row, int first, u32 turn) {
        const u32 at = first * BITS;
        if constexpr (BITS == 3) {
            // Rows are whole words; units may start between them, always at the same place of all tokens.
            constexpr int UNALIGNED = COUNT % 4 == 0 ? 0 : COUNT % 2 == 0 ? 2 : 3;
            constexpr int MOST = (3 * COUNT + UNALIGNED + 3) / 4;
            u32 raw[MOST + 1] = {};
#pragma unroll
            for (int i = 0; i < MOST; i++)
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(raw[i]) : "r"(row + at / 4 * 4 + i * 4));
            if constexpr (UNALIGNED)
#pragma unroll
                for (int i = 0; i < MOST; i++) raw[i] = __funnelshift_r(raw[i], raw[i + 1], at % 4 * 8);
#pragma unroll
            for (int k = 0; k < COUNT; k++) w[k] = __funnelshift_r(raw[k * 24 / 32], raw[k * 24 / 32 + 1], k * 24 % 32);
        } else if constexpr (COUNT * BITS >= 16) {
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(w[i * 4]), "=r"(w[i * 4 + 1]), "=r"(w[i * 4 + 2]), "=r"(w[i * 4 + 3])
                             : "r"(row + ((at + i * 16) ^ turn)));
        } else if constexpr (COUNT * BITS == 8) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(row + (at ^ turn)));
        } else if constexpr (COUNT * BITS == 4) {
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(row + (at ^ turn)));
        } else {
            u16 half;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(row + (at ^ turn)));
            w[0] = half;
        }
    }
};

// Pairs of unit i of a and unit j of b.
template <int BITS, int COUNT>
DEVICE void pairs(const Units<BITS, COUNT>& a, int i, const Units<BITS, COUNT>& b, int j, u32 (&h)[8]) {
    if constexpr (BITS == 16) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            h[2 * k] = __byte_perm(a.w[4 * i + k], b.w[4 * j + k], 0x5410);
            h[2 * k + 1] = __byte_perm(a.w[4 * i + k], b.w[4 * j + k], 0x7632);
        }
    } else if constexpr (BITS == 8) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 x = __byte_perm(a.w[2 * i + k / 2], b.w[2 * j + k / 2], k % 2 ? 0x7632 : 0x5410);
            h[2 * k] = (x & 0x00ff00ff) ^ 0x00800080;
            h[2 * k + 1] = (x >> 8 & 0x00ff00ff) ^ 0x00800080;
        }
    } else if constexpr (BITS == 4) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const u32 x = __byte_perm(a.w[i], b.w[j], k ? 0x7632 : 0x5410), y = x >> 8;
            h[4 * k] = masked(x, 0x000f000f), h[4 * k + 1] = masked(x, 0x00f000f0);
            h[4 * k + 2] = masked(y, 0x000f000f), h[4 * k + 3] = masked(y, 0x00f000f0);
        }
    } else if constexpr (BITS == 3) {
        const u32 x = __byte_perm(a.w[i], b.w[j], 0x5410), y = __byte_perm(a.w[i], b.w[j], 0x6521), z = y >> 10;
        h[0] = masked(x, 0x00070007), h[1] = masked(x, 0x00380038), h[2] = masked(x, 0x01c001c0);
        h[3] = masked(y, 0x000e000e), h[4] = masked(y, 0x00700070), h[5] = masked(y, 0x03800380);
        h[6] = masked(z, 0x00070007), h[7] = masked(z, 0x00380038);
    } else {
        // Both halves of one word, as keys have them, are in place.
        const bool whole = &a == &b && i % 2 == 0 && j == i + 1;
        const u32 select = (i % 2 ? 0x32 : 0x10) | (j % 2 ? 0x7600 : 0x5400);
        const u32 x = whole ? a.w[i / 2] : __byte_perm(a.w[i / 2], b.w[j / 2], select), y = x >> 10;
        h[0] = masked(x, 0x00030003), h[1] = masked(x, 0x000c000c), h[2] = masked(x, 0x00300030);
        h[3] = masked(x, 0x00c000c0), h[4] = masked(x, 0x03000300);
        h[5] = masked(y, 0x00030003), h[6] = masked(y, 0x000c000c), h[7] = masked(y, 0x00300030);
    }
}

// Codes without their offset, exactly: both are multiples of 2^-24.
template <int BITS>
DEVICE void centre(u32 (&h)[8]) {
    if constexpr (BITS < 16)
#pragma unroll
        for (int j = 0; j < 8; j++) h[j] = sub_half2(h[j], (OFFSET<BITS> << shift<BITS>(j)) * 0x00010001u);
}

// E2M1 codes, floats of four bits (sign, two exponent bits, one mantissa bit), by their bits: W = E2M1[q] * d.
//
// A float16 number whose sign, lowest two exponent bits and highest mantissa bit are those of an E2M1 number is 2^-14
// times that number: the exponents' biases differ by 14, and subnormal numbers are subnormal there too. Each half of a
// word h of a lane (tile.cuh) has four codes, registers r = 0 .. 3, with signs s and the other bits m,
//
//     bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
//           s0 s2 s3 s1 m0 m0 m0 m1 m1 m1 m2 m2 m2 m3 m3 m3
//
// so that two of them need one shift and one mask at most. The others' signs and bits need different shifts, which one
// multiplication makes of what a mask has left of the word: nothing that it makes beside them reaches their places.
#pragma once
#include "tile.cuh"

template <class F>
struct E2m1Codes {
    static constexpr int TABLE_BYTES = 0;
    static constexpr bool SUMS = false;

    DEVICE E2m1Codes(const u16*, int) {}
    DEVICE void fill(int, int) {}
    static DEVICE void unit(u32 (&a)[4]) {}
    // What scales in float32 lack of those in float16 (tile.cuh).
    static DEVICE float unscale(int) { return F::SCALING == E8M0 ? 65536.f : 32768.f; }

    DEVICE void codes(const Tile<F>& tile, int h, u32 (&a)[4]) const {
        constexpr u32 SIGNS = 0x80008000, OTHERS = 0x0e000e00;
        const u32 word = tile.low[h];
        a[0] = masked(word, SIGNS | OTHERS);
        a[1] = masked(word << 3, SIGNS | OTHERS);
        a[2] = masked(masked(word, 0x40384038) * (2 + 64), SIGNS | OTHERS);
        a[3] = masked(masked(word, 0x20072007) * (4 + 512), SIGNS | OTHERS);
    }

    // The weights of step h in float16: exact, unless they are subnormal.
    DEVICE void weights(const Tile<F>& tile, int h, u32 (&a)[4]) const {
        codes(tile, h, a);
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = mul_half2(a[r], tile.scale_pair(h, r % 2));
    }
};

// Small codes to pairs of 16-bit floats by their bits, or by a table: one function for each way to do it, which
// kernels/ops/convert.cu holds side by side. A function whose result still lacks a factor or has an addend is called
// `uncorrected`; whoever uses it takes that back later, where it costs less: in a scale, or from a sum.
//
// A word has eight codes of four bits, nibbles 0 .. 7. Nibble r and nibble r + 4 are in different halves of the word,
// and the functions for bits make a pair of them:
//
//     bit        31  28 27  24 23  20 19  16 15  12 11   8 7    4 3    0
//     nibble     |  7  |  6  |  5  |  4  |  3  |  2  |  1  |  0  |
//     pair           3     2     1     0     3     2     1     0
#pragma once
#include "ptx.cuh"

// E2M1, floats of four bits: sign s, exponent e with the bias 1, mantissa m. They are taken from the highest nibble of
// each half, and `word << 4` brings the next pair there:
//
//     bit                       15 14 13 12 11 10  9  8  7  6 ...
//     half of the word           s  e  e  m  .  .  .  .  .  .      mask 0x8000 keeps s, 0x7000 the others
//     float16 (e at 14 .. 10)    s  0  0  0  e  e  m  0  0  0      others >> 5 - 2
//     bfloat16 (e at 14 .. 7)    s  0  0  0  0  0  0  e  e  m      others >> 8 - 2
//
// The exponent field now has the wrong bias: 15 in float16, so that numbers are 2^(1 - 15) = 2^-14 times what they
// should be, 127 in bfloat16, so 2^-126 times. That holds for e = 0 too, where the code 1 is 2^(1 - 1) / 2 = 1/2, and
// the same bits are the subnormal number 2^-14 / 2 or 2^-126 / 2. A multiplication is exact, and -0 stays -0.
DEVICE u32 e2m1_to_half2_uncorrected(u32 word) { return (word & 0x80008000) | (word & 0x70007000) >> 3; }

DEVICE u32 e2m1_to_half2(u32 word) { return mul_half2(e2m1_to_half2_uncorrected(word), 0x74007400); }  // 2^14

DEVICE u32 e2m1_to_bfloat2_uncorrected(u32 word) { return (word & 0x80008000) | (word & 0x70007000) >> 6; }

DEVICE u32 e2m1_to_bfloat2(u32 word) {
    return mul_bfloat2(e2m1_to_bfloat2_uncorrected(word), 0x7e807e80);  // 2^126
}

// U4, integers from 0 to 15, and U4B8, which have an offset of 8: the magic number. In the mantissa under the exponent
// of 1024, whose last bit is worth 1, a code reads as what is to be added:
//
//     bit                       15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
//     1024                       0  1  1  0  0  1  0  0  0  0  0  0  0  0  0  0      0x6400
//     1024 + q                   0  1  1  0  0  1  0  0  0  0  0  0  q  q  q  q      nibble 0 of each half
//     1024 + 16 q                0  1  1  0  0  1  0  0  q  q  q  q  0  0  0  0      nibble 1
//
// One LOP3 each; `word >> 8` brings nibbles 2 and 3. Subtracting is exact, for nibble 1 after a division by 16, with
// which it is one instruction: (1024 + 16 q) / 16 - (64 + offset).
DEVICE u32 u4_low_to_half2_uncorrected(u32 word) { return and_or(word, 0x000f000f, 0x64006400); }

DEVICE u32 u4_high_to_half2_uncorrected(u32 word) { return and_or(word, 0x00f000f0, 0x64006400); }

// 1024 + q to q - OFFSET, for codes q of up to ten bits.
template <int OFFSET>
DEVICE u32 corrected(u32 pair) {
    return sub_half2(pair, 0x64006400 + OFFSET * 0x00010001u);
}

// 1024 + 16 q to q - OFFSET.
template <int OFFSET>
DEVICE u32 corrected_16(u32 pair) {
    return fma_half2(pair, 0x2c002c00, (0xd400 + OFFSET * 16) * 0x00010001u);  // -(64 + OFFSET)
}

template <int OFFSET>
DEVICE u32 u4_low_to_half2(u32 word) {
    return corrected<OFFSET>(u4_low_to_half2_uncorrected(word));
}

template <int OFFSET>
DEVICE u32 u4_high_to_half2(u32 word) {
    return corrected_16<OFFSET>(u4_high_to_half2_uncorrected(word));
}

// INT8: a byte with its sign bit turned over is q + 128, and a byte permute puts it below the byte 0x64 of 1024.
//
//     byte of the word        3       2       1       0
//     pair 0                     2               0            0x64, byte 2, 0x64, byte 0
//     pair 1             3               1                    0x64, byte 3, 0x64, byte 1
DEVICE u32 int8_to_half2_uncorrected(u32 word, int pair) {  // 1024 + 128 + q
    return permute(word ^ 0x80808080, 0x64646464, pair ? 0x4341 : 0x4240);
}

DEVICE u32 int8_to_half2(u32 word, int pair) { return corrected<128>(int8_to_half2_uncorrected(word, pair)); }

// E2M1 by byte permutes, four codes at a time. Of a float16 number that is an E2M1 number the lower byte is 0; the
// upper bytes of the eight magnitudes are two words, and three bits of every code select one of them. Where a selector
// has its fourth bit set a permute repeats the sign of a byte, which gives the zeros. Pairs as above.
DEVICE void e2m1_to_half2_by_permutes(u32 word, u32 (&pairs)[4]) {
    constexpr u32 LOW = 0x3e3c3800, HIGH = 0x46444240;  // 0, 1/2, 1, 3/2; 2, 3, 4, 6
    const u32 magnitudes = masked(word, 0x77777777);
    const u32 first = permute(LOW, HIGH, magnitudes), second = permute(LOW, HIGH, magnitudes >> 16);
#pragma unroll
    for (int r = 0; r < 4; r++)
        pairs[r] = and_or(word << (12 - 4 * r), 0x80008000, permute(first, second, 0x4c08 + 0x1111 * r));
}

// Any 16 float16 numbers, by byte permutes: their lower and their upper bytes, four to a word. Three bits of a code
// select a byte of eight, the fourth one of the two halves of the table. Pairs are of neighbouring nibbles.
struct PermuteTable {
    u32 low[4], high[4];

    DEVICE explicit PermuteTable(const u16* values) {
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const u32 a = values[4 * w] | values[4 * w + 1] << 16, b = values[4 * w + 2] | values[4 * w + 3] << 16;
            low[w] = permute(a, b, 0x6420), high[w] = permute(a, b, 0x7531);
        }
    }

    DEVICE void convert(u32 word, u32 (&pairs)[4]) const {
        const u32 bits = masked(word, 0x77777777), halves = and_or(word >> 1, 0x44444444, 0x32103210);
#pragma unroll
        for (int four = 0; four < 2; four++) {
            const u32 at = bits >> 16 * four, half = halves >> 16 * four;
            const u32 lower = permute(permute(low[0], low[1], at), permute(low[2], low[3], at), half);
            const u32 upper = permute(permute(high[0], high[1], at), permute(high[2], high[3], at), half);
            pairs[2 * four] = permute(lower, upper, 0x5140), pairs[2 * four + 1] = permute(lower, upper, 0x7362);
        }
    }
};

// Any 16 float16 numbers, by a table in shared memory with a bank for each: lanes that read the same one get it at
// once, and no two of them ever wait for each other. Pairs as of bits. (Tables of pairs are in codebook.cuh.)
struct SharedTable {
    static constexpr int BYTES = 64;

    static DEVICE void fill(const u16* values, int thread) {
        if (thread < 16) reinterpret_cast<u32*>(dynamic_shared())[thread] = values[thread];
    }

    static DEVICE void convert(u32 word, u32 (&pairs)[4]) {
#pragma unroll
        for (int r = 0; r < 4; r++) pairs[r] = permute(load(word, 4 * r), load(word, 4 * r + 16), 0x5410);
    }

private:
    static DEVICE u32 load(u32 word, int from) {
        u32 value;
        asm("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared_address(dynamic_shared()) +
            masked(from < 2 ? word << (2 - from) : word >> (from - 2), 60)));
        return value;
    }
};

// Codes of keys and values as operands of tensor cores: pairs of float16 numbers, or bytes, without a conversion.
//
// A unit is eight codes of one token, BITS bytes. Two units a and b become eight pairs (a_j, b_j): a code c, stored as
// c + OFFSET, is masked where it lies in the mantissa of a subnormal float16 number, which reads (c + OFFSET) * 2^n *
// 2^-24 with an n of its own for each j (`shift`). Powers of two leave with the queries (keys) or the sums (values).
//
// Which pairs depends on what the contraction runs over. Of keys a and b are units of one token: the order of
// channels within a product is free. Of values they are the same unit of two tokens.
#pragma once
#include "../core/ptx.cuh"

// Channels in shared memory and in registers; those added count as 0.
constexpr int PADDED = CUQUANT_DIM <= 64 ? 64 : CUQUANT_DIM <= 128 ? 128 : 256;

constexpr int PAIRS = PADDED / 64;  // pairs of units that a lane has of a key, and units that it has of a value

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

// COUNT consecutive units of a token, from shared memory.
template <int BITS, int COUNT>
struct Units {
    // Pairs of 2-byte units share a word.
    static constexpr int WORDS = BITS == 3 ? COUNT : (COUNT * BITS + 3) / 4;
    // Units of 3 bytes may start between words, always at the same place of all tokens: words that they are in.
    static constexpr int UNALIGNED = COUNT % 4 == 0 ? 0 : COUNT % 2 == 0 ? 2 : 3;
    static constexpr int RAW = (3 * COUNT + UNALIGNED + 3) / 4;
    u32 w[WORDS];

    // From the row's address; `swizzle` flips bits of the number of a 16-byte piece (Layout::swizzle).
    template <bool APART>
    DEVICE void load(u32 row, int first, u32 swizzle) {
        const u32 at = first * BITS;
        if constexpr (BITS == 3)
            load_bytes<APART>(at, [&](int i) { return row + at / 4 * 4 + i * 4; });
        else
            load_words([&](int i) { return row + ((at + i * 16) ^ swizzle); });
    }

    // From the address of piece i of 16 bytes, or of all that there is.
    template <class F>
    DEVICE void load_words(F address) {
        static_assert(BITS != 3, "these are bytes");
        if constexpr (COUNT * BITS >= 16) {
#pragma unroll
            for (int i = 0; i < WORDS / 4; i++)
                asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(w[i * 4]), "=r"(w[i * 4 + 1]), "=r"(w[i * 4 + 2]), "=r"(w[i * 4 + 3])
                             : "r"(address(i)));
        } else if constexpr (COUNT * BITS == 8) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(address(0)));
        } else if constexpr (COUNT * BITS == 4) {
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[0]) : "r"(address(0)));
        } else {
            u16 half;
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(address(0)));
            w[0] = half;
        }
    }

    // Units of 3 bytes that start at byte `at` of a row, from the addresses of their words: one after the other, or
    // each in a word of its own (`place`).
    template <bool APART, class F>
    DEVICE void load_bytes(u32 at, F address) {
        u32 raw[RAW + 1] = {};
#pragma unroll
        for (int i = 0; i < RAW; i++) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(raw[i]) : "r"(address(i)));
        if constexpr (APART && COUNT == 2) {
            w[0] = __funnelshift_r(raw[0], raw[1], at % 4 * 8);
            w[1] = __funnelshift_rc(raw[0], raw[1], at % 4 * 8 + 16);
            return;
        }
        if constexpr (UNALIGNED)
#pragma unroll
            for (int i = 0; i < RAW; i++) raw[i] = __funnelshift_r(raw[i], raw[i + 1], at % 4 * 8);
#pragma unroll
        for (int k = 0; k < COUNT; k++)
            w[k] = !APART ? raw[k < RAW ? k : 0] : __funnelshift_r(raw[k * 24 / 32], raw[k * 24 / 32 + 1], k * 24 % 32);
    }

    // The byte of word u where unit u of 3 bytes starts, if apart.
    static DEVICE constexpr int place(int u) { return COUNT == 2 ? u : 0; }
};

// Words of bytes at, at + 1 and to, to + 1 of two others, the second of which has the numbers from 4 on.
DEVICE constexpr u32 bytes(int at, int to) { return at | (at + 1) << 4 | to << 8 | (to + 1) << 12; }

// How codes are picked out: as subnormal numbers, the same of complemented codes, or with the exponent of 1024.
enum Picked { MASKED, COMPLEMENTED, ABOVE_1024 };

// Pairs of units i and i + 1, i even, of a key (of 3 bits not apart), or of unit i of the values a and b.
template <Picked PICKED = MASKED, int BITS, int COUNT>
DEVICE void pairs(const Units<BITS, COUNT>& a, const Units<BITS, COUNT>& b, int i, u32 (&h)[8]) {
    const bool key = &a == &b;
    const int j = key ? i + 1 : i;
    constexpr u32 EXPONENT = PICKED == ABOVE_1024 ? 0x64006400 : 0;
    const auto codes = [](u32 x, u32 mask) {
        return PICKED == COMPLEMENTED ? masked_not(x, mask) : and_or(x, mask, EXPONENT);
    };
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
            h[2 * k] = (x & 0x00ff00ff) ^ (0x00800080 | EXPONENT);
            h[2 * k + 1] = (x >> 8 & 0x00ff00ff) ^ (0x00800080 | EXPONENT);
        }
    } else if constexpr (BITS == 4) {
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const u32 x = __byte_perm(a.w[i], b.w[j], k ? 0x7632 : 0x5410), y = x >> 8;
            h[4 * k] = codes(x, 0x000f000f), h[4 * k + 1] = codes(x, 0x00f000f0);
            h[4 * k + 2] = codes(y, 0x000f000f), h[4 * k + 3] = codes(y, 0x00f000f0);
        }
    } else if constexpr (BITS == 3) {
        const int word = key ? i * 3 / 4 : i, at = key ? i * 3 % 4 : a.place(i), to = key ? at + 3 : at + 4;
        const u32 low = a.w[word], high = key ? a.w[word + 1] : b.w[word];
        const u32 x = __byte_perm(low, high, bytes(at, to)), y = __byte_perm(low, high, bytes(at + 1, to + 1));
        const u32 z = y >> 10;
        h[0] = codes(x, 0x00070007), h[1] = codes(x, 0x00380038), h[2] = codes(x, 0x01c001c0);
        h[3] = codes(y, 0x000e000e), h[4] = codes(y, 0x00700070), h[5] = codes(y, 0x03800380);
        h[6] = codes(z, 0x00070007), h[7] = codes(z, 0x00380038);
    } else {
        // Both halves of one word, as keys have them, are in place.
        const u32 select = (i % 2 ? 0x32 : 0x10) | (j % 2 ? 0x7600 : 0x5400);
        const u32 x = key ? a.w[i / 2] : __byte_perm(a.w[i / 2], b.w[j / 2], select), y = x >> 10;
        h[0] = codes(x, 0x00030003), h[1] = codes(x, 0x000c000c), h[2] = codes(x, 0x00300030);
        h[3] = codes(x, 0x00c000c0), h[4] = codes(x, 0x03000300);
        h[5] = codes(y, 0x00030003), h[6] = codes(y, 0x000c000c), h[7] = codes(y, 0x00300030);
    }
}

// Values of 4 bits and less keep their offset: of every 16 tokens eight are complemented, with weights of the other
// sign, so that offsets all but cancel. What is left is in a sum of its own, `excess`.
template <int BITS>
constexpr bool BALANCED = BITS <= 4;

// Codes without their offset, exactly: both are multiples of 2^-24.
template <int BITS>
DEVICE void centre(u32 (&h)[8]) {
    if constexpr (BITS < 16 && !BALANCED<BITS>)
#pragma unroll
        for (int j = 0; j < 8; j++) h[j] = sub_half2(h[j], (OFFSET<BITS> << shift<BITS>(j)) * 0x00010001u);
}

// Codes picked ABOVE_1024 as what they are, exactly: less than 2^7, or those of 8 bits.
template <int BITS>
DEVICE void to_integers(u32 (&h)[8]) {
    // Float16's bits of integers below 2048.
    const auto half_of = [](int n) {
        int exponent = 0;
        while (n >> exponent > 1) exponent++;
        return u32(15 + exponent << 10 | (n << 10 - exponent & 0x3ff)) * 0x00010001u;
    };
    if constexpr (BITS < 16)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            constexpr int ONE = 15;
            const int n = shift<BITS>(j);
            h[j] = fma_half2(h[j], (ONE - n << 10) * 0x00010001u, half_of((1024 >> n) + OFFSET<BITS>) ^ 0x80008000);
        }
}

// Keys' codes are bytes where queries are integers: a product of 16 tokens and 32 channels takes two registers of four
// codes for each token, which lie in the same place of their bytes. In class c they are 2^(BITS c) times as large.
template <int BITS>
constexpr int CLASSES = BITS == 8 ? 1 : BITS == 2 ? 4 : 2;

// The registers of product m, of class m % CLASSES:
//
//   8 bits   words 2 m and 2 m + 1
//   4 bits   of two words the low, then the high nibbles
//   2 bits   of two words every fourth code, from the first, second, third, fourth on
//   3 bits   of four units of eight codes, in three words, codes 0 and 3, 1 and 4, 6 and 2, 7 and 5
template <int BITS, int COUNT>
DEVICE void codes_of_product(const Units<BITS, COUNT>& v, int m, u32& first, u32& second) {
    if constexpr (BITS == 3) {
        // Bytes 0, 1 and 2 of the units; codes 2 and 5 lie in two of them.
        const u32 a = v.w[m / 4 * 3], b = v.w[m / 4 * 3 + 1], c = v.w[m / 4 * 3 + 2];
        const u32 x = __byte_perm(__byte_perm(a, b, 0x0630), c, 0x5210);
        const u32 y = __byte_perm(__byte_perm(a, b, 0x0741), c, 0x6210);
        const u32 z = __byte_perm(__byte_perm(a, b, 0x0052), c, 0x7410);
        const u32 mask = m % 2 ? 0x38383838 : 0x07070707;
        if (m % 4 < 2)
            first = x & mask, second = y >> 1 & mask;
        else
            first = z >> 2 & mask, second = m % 2 ? (y >> 4 & 0x08080808) | (z << 4 & 0x30303030)
                                                  : (x >> 6 & 0x03030303) | (y << 2 & 0x04040404);
    } else {
        const int word = m / CLASSES<BITS> * 2;
        const u32 mask = BITS == 8 ? ~0u : ((1 << BITS) - 1 << m % CLASSES<BITS> * BITS) * 0x01010101u;
        first = v.w[word] & mask, second = v.w[word + 1] & mask;
    }
}

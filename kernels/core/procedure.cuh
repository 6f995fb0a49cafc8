// Codes that are steps of a walk (EXL3): a number is what a fixed procedure makes of 16 bits, those of a step and the ones
// before it.
//
// The 256 numbers of 16 x 16 weights are a ring of 256 steps of BITS bits. Of them a lane has eight in a row, its own:
// those of operand A, in the order
//
//     step j      0        1        2        3        4        5        6        7
//     register    a0 low   a0 high  a2 low   a2 high  a1 low   a1 high  a3 low   a3 high
//
// so that all that it lacks are the last bits of the lane before. A lane's words of a 16 x 64 tile are its own 8 BITS bits
// of steps h = 0..3 of tile.cuh, one after the other, the highest bit of a word first.
//
//     before | own bits of step h                 the window of step j: 16 bits up to BITS (j + 1) of its own
//     ...xxxx|xxxxxxxxxxxxxxxx...
//        `-- j = 0 --'
//
// The procedure is a multiplication. Its product's halves, some bits of which are replaced, are two float16 numbers whose
// sum counts; or (MUL1) the sum of its bytes does. (cuquant/formats/exl3.py)
#pragma once
#include "tile.cuh"

enum Generator { THREE_INST, MCG, MUL1 };

template <Generator GENERATOR>
struct Numbers {
    static constexpr bool HALVES = GENERATOR != MUL1;

    // Two float16 numbers whose sum a window stands for.
    static DEVICE u32 halves(u32 window) {
        const u32 product = GENERATOR == MCG ? window * 0xcbac1fed : window * 89226354 + 64248484;
        return and_xor(product, 0x8fff8fff, 0x3b603b60);
    }

    // What two windows stand for, in float16, rounded once.
    static DEVICE u32 pair(u32 first, u32 second) {
        if constexpr (HALVES) {
            return pack_sums(halves(first), halves(second));
        } else {
            // Under the exponent of 1024 an integer in the mantissa reads 1024 more.
            const u32 a = __dp4a(first * 0x83dcd12d, 0x01010101u, 0x6400u);
            const u32 b = __dp4a(second * 0x83dcd12d, 0x01010101u, 0x6400u);
            return fma_half2(__byte_perm(a, b, 0x5410), 0x1eee1eee, 0xc931c931);
        }
    }
};

template <class F>
struct Procedure {
    static constexpr int BITS = F::BITS, TABLE_BYTES = 0;
    static constexpr bool SUMS = false, HALVES = Numbers<F::GENERATOR>::HALVES;
    static_assert(BITS > 1, "16 bits reach into the lane before, but no further");
    static_assert(BITS != 7, "tiles have no place for three words of the high plane");

    int before;  // lane

    DEVICE Procedure(const u16*, int lane) : before((lane + WARP - 1) % WARP) {}
    DEVICE void fill(int, int) {}
    static DEVICE void unit(u32 (&a)[4]) {}
    static DEVICE float unscale(int) { return 1; }

    // The weights of step h in float16, rounded once: there is no scale.
    DEVICE void weights(const Tile<F>& tile, int h, u32 (&a)[4]) const {
        u32 w[8];
        windows(tile, h, w);
        a[0] = Numbers<F::GENERATOR>::pair(w[0], w[1]), a[2] = Numbers<F::GENERATOR>::pair(w[2], w[3]);
        a[1] = Numbers<F::GENERATOR>::pair(w[4], w[5]), a[3] = Numbers<F::GENERATOR>::pair(w[6], w[7]);
    }

    // The weights of step h as pairs that are not added: a register has both halves of one weight. Operand A of columns 2i
    // and 2i+1, and of 2i+8 and 2i+9, for an operand B that has every activation twice.
    DEVICE void halves(const Tile<F>& tile, int h, u32 (&a)[2][4]) const {
        u32 w[8];
        windows(tile, h, w);
#pragma unroll
        for (int j = 0; j < 8; j++) a[j % 4 / 2][j % 2 * 2 + j / 4] = Numbers<F::GENERATOR>::halves(w[j]);
    }

private:
    // 16 of 64 bits, from bit `from` on, below zeros: bytes of a word, some of which is shifted to the left first, as
    // multiplications do it, whose pipe has less to do.
    static DEVICE u32 field(u32 low, u32 high, int from) {
        if (from > 16) return field(__byte_perm(low, high, 0x5432), 0, from - 16);
        const int by = (8 - from % 8) % 8;
        return __byte_perm(low << by, 0, 0x4410 + (from + by) / 8 * 0x11);
    }

    // 16 bits of a lane's words, from the highest bit `at` on.
    static DEVICE u32 bits(const Tile<F>& tile, int at) {
        const int w = at / 32, from = at % 32;
        return from <= 16 ? field(tile.word(w), 0, 16 - from) : field(tile.word(w + 1), tile.word(w), 48 - from);
    }

    DEVICE void windows(const Tile<F>& tile, int h, u32 (&w)[8]) const {
        const int first = 8 * BITS * h, last = first + 8 * BITS - 16;
        // Before 16 bits of its own those of the lane before: bytes of a word of either, if they are in one.
        constexpr int APART = 24;
        const bool whole = first % 32 != APART, sent_whole = last % 32 != APART;
        const u32 own = whole ? tile.word(first / 32) : bits(tile, first);
        const u32 sent = sent_whole ? tile.word(last / 32) : bits(tile, last);
        const int own_at = whole ? 2 - first % 32 / 8 : 0, sent_at = sent_whole ? 2 - last % 32 / 8 : 0;
        const u32 start = __byte_perm(own, __shfl_sync(~0u, sent, before), 0x5410 + own_at * 0x11 + sent_at * 0x1100);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const int end = BITS * (j + 1);
            w[j] = end <= 16 ? field(start, 0, 16 - end) : bits(tile, first + end - 16);
        }
    }
};

// Where integer codes of 2 to 6 bits are in a lane's words of a tile (tile.cuh), so that few instructions make operand A
// of them: of a register's two codes the first is in the lower half of a word and the second at the same place of the
// upper half. A mask alone takes codes of rows g from bit 0 on, and codes of rows g + 8 from bit HIGHER on, where a
// subnormal float16 number, ten bits, holds them; from elsewhere a shift brings them there.
//
// Registers 0 .. 3 of a row's, in block b of 32 columns (n): steps 2b and 2b + 1, columns 2i and 2i + 8 of each. A half of
// a word, with row g's codes a b c d and row g + 8's A B C D, the highest bit on the left:
//
//     bits   word                          what it has
//     2      b                             D D d d B B b b C C c c A A a a
//     3      b                             y c c c B B B b b b A A A a a a       y, of block 0's word: D's of block 1
//            2, of both blocks             y C C C D D D d d d C C C d d d       bits 0 .. 5 and 9 .. 11 are block 0's
//     4      2b, 2b + 1                    B B B B b b b b A A A A a a a a
//     5      2b                            y b b b b b A A A A A a a a a a       y: D's of block 1, bit w in word w
//            2b + 1                        y C C C C C B B B B B c c c c c
//            4, of both blocks             y d d d d d D D D D D d d d d d       bits 0 .. 9 are block 0's
//     6      2b, 2b + 1, 4 + b             A A A A A A x x x x a a a a a a       (B and b; C and c)
//            x: d's first four bits in word 2b; D's last four in 2b + 1; D's first two and d's last two in 4 + b
#pragma once
#include "ptx.cuh"

template <int BITS>
struct Places {
    // BITS_ bits of a code, from bit AT on: in both halves of word WORD, from bit BIT on.
    struct Piece {
        int word, bit, bits, at;
    };

    static DEVICE int pieces(int h, int r) {
        const bool last = r == 3 && h % 2, of_block_1 = h / 2;
        if constexpr (BITS == 3) return last && of_block_1 ? 3 : 1;
        if constexpr (BITS == 5) return last && of_block_1 ? 5 : 1;
        if constexpr (BITS == 6) return h % 2 && r >= 2 ? 2 : 1;
        return 1;
    }

    // Piece k of the codes of register r at step h.
    static DEVICE Piece piece(int h, int r, int k) {
        const int b = h / 2, row8 = r % 2, n = h % 2 * 2 + r / 2;
        if constexpr (BITS == 2) return {b, 4 * (n / 2) + 2 * row8 + 8 * (n % 2), BITS, 0};
        if constexpr (BITS == 4) return {h, 4 * row8 + 8 * (n % 2), BITS, 0};
        if constexpr (BITS == 3) {
            if (n < 2) return {b, 6 * n + 3 * row8, BITS, 0};
            if (n == 2 && !row8) return {b, 12, BITS, 0};
            if (n == 2) return {2, b ? 12 : 3, BITS, 0};
            if (!row8) return {2, b ? 6 : 0, BITS, 0};
            if (b) return {k, 15, 1, k};
            return {2, 9, BITS, 0};
        }
        if constexpr (BITS == 5) {
            if (n == 3 && row8 && b) return {k, 15, 1, k};
            if (n == 3) return {4, b ? 10 : 5 * row8, BITS, 0};
            const int second = row8 ? n > 0 : n > 1;  // of the block's two words
            return {2 * b + second, row8 ? (n == 2 ? 10 : 5) : (n == 1 ? 10 : 0), BITS, 0};
        }
        if (n < 3) return {n < 2 ? 2 * b + n : 4 + b, 10 * row8, BITS, 0};
        if (!row8) return k ? Piece{4 + b, 8, 2, 4} : Piece{2 * b, 6, 4, 0};
        return k ? Piece{4 + b, 6, 2, 0} : Piece{2 * b + 1, 6, 4, 2};
    }

    // The codes of register r at step h as subnormal numbers. `word` gives a word.
    template <class Word>
    static DEVICE u32 masked(const Word& word, int h, int r) {
        if constexpr (BITS == 5)
            if (pieces(h, r) == 5) return of_five(word);
        u32 bits = 0;
#pragma unroll
        for (int k = 0; k < pieces(h, r); k++) {
            const Piece from = piece(h, r, k);
            const int to = (r % 2 ? HIGHER_OF<BITS> : 0) + from.at;
            const u32 own = word(from.word), moved = from.bit < to ? own << (to - from.bit) : own >> (from.bit - to);
            bits = and_or(moved, ((1 << from.bits) - 1) * 0x00010001 << to, bits);
        }
        return bits;
    }

    // Codes to their place, which has zeros, the register's second one 16 bits higher; and back. Words are the low
    // plane's, then the high one's.
    template <class Share>
    static DEVICE void put(Share& share, int h, int r, u32 codes) {
#pragma unroll
        for (int k = 0; k < pieces(h, r); k++) {
            const Piece to = piece(h, r, k);
            word_of(share, to.word) |= (codes >> to.at & ((1 << to.bits) - 1) * 0x00010001) << to.bit;
        }
    }

    template <class Share>
    static DEVICE u32 get(const Share& share, int h, int r) {
        u32 codes = 0;
#pragma unroll
        for (int k = 0; k < pieces(h, r); k++) {
            const Piece from = piece(h, r, k);
            codes |= (word_of(share, from.word) >> from.bit & ((1 << from.bits) - 1) * 0x00010001) << from.at;
        }
        return codes;
    }

private:
    // Bits 15 and 31 of word w to bits w + 5 and w + 21: as signs that a permute repeats in two bytes of either half.
    template <class Word>
    static DEVICE u32 of_five(const Word& word) {
        const u32 bits = ::masked(permute(word(0), word(3), SIGNS_OF_HALVES), 0x01200120);
        return and_or(word(2) >> 8, 0x00800080, and_or(permute(word(1), word(4), SIGNS_OF_HALVES), 0x02400240, bits));
    }

    template <class Share>
    static DEVICE auto& word_of(Share& share, int w) {
        constexpr int LOW = sizeof(share.low) / 4;
        return w < LOW ? share.low[w] : share.high[w - LOW];
    }
};

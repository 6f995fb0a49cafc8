// Codes as k-quants and IQ4 store them, and a lane's words of them.
#pragma once
#include "share.cuh"

// Codes of a few bits: bits BITS i and up of byte j belong to code SPAN i + j, and so on in runs of 8 / BITS SPAN codes;
// the first byte is byte AT of a block.
template <int BITS, int AT, int SPAN>
struct Field {
    static constexpr u32 MASK = (1 << BITS) - 1;
    static constexpr int RUN = 8 / BITS * SPAN;

    static DEVICE int byte_of(int code) { return AT + code / RUN * SPAN + code % SPAN; }
    static DEVICE int shift_of(int code) { return code % RUN / SPAN * BITS; }

    static DEVICE u32 get(const u8* block, int code) { return block[byte_of(code)] >> shift_of(code) & MASK; }

    // A code to its place; the others of its byte follow it.
    static DEVICE void put(u8* block, int code, u32 value) {
        u8& to = block[byte_of(code)];
        to = u8(shift_of(code) ? to | value << shift_of(code) : value);
    }

    // Codes of eight elements from `code` on, a byte each.
    static DEVICE uint2 eight(const u8* block, int code, const u8* end) {
        return codes_at(load_eight(block + byte_of(code), end), shift_of(code), MASK);
    }

    // Codes column + 2i, + 8, + 1, + 9: a lane's share of 16 columns, in the order of tile.cuh.
    static DEVICE u32 gather(const u8* block, int column, int i) {
        const u8* const from = block + byte_of(column) + 2 * i;
        return __byte_perm(load_u16(from), load_u16(from + 8), 0x5140) >> shift_of(column) & MASK * 0x01010101;
    }

    static DEVICE void scatter(u8* block, int column, int i, u32 codes) {
        u16* const to = reinterpret_cast<u16*>(block + byte_of(column) + 2 * i);
        const u32 bits = codes << shift_of(column);
        const u32 first = __byte_perm(bits, 0, 0x4420), last = __byte_perm(bits, 0, 0x4431);
        to[0] = u16(shift_of(column) ? to[0] | first : first);
        to[4] = u16(shift_of(column) ? to[4] | last : last);
    }
};

struct NoField {};

// Integer codes of F::BITS bits, the lower ones in F::Low, the others in F::High, and the words of a tile that they make
// (core/tile.cuh): element e of register 2 t + j is of row g + 8 j, column 2i + e + 8 t; byte t + 2 e of a gathered word.
template <class F>
struct Words {
    static constexpr int LOW = F::LOW_BYTES == 256 ? 2 : 4, HIGH = F::BITS - LOW;

    static DEVICE void gather(LaneShare<F>& share, const u8* block, int j, int part, int i) {
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int column = part * 64 + h * 16;
            share.low[low_word(h)] |= F::Low::gather(block, column, i) << low_shift(h, j);
            if constexpr (HIGH > 0) {
                const u32 codes = F::High::gather(block, column, i);
                const u32 pairs = (codes & PAIRS) | (codes >> (8 - HIGH) & PAIRS << HIGH);
                const u32 placed = pairs << LOW * (1 + j);
                share.high[high_word(h)] |= __funnelshift_l(placed, placed, turn_of<F::BITS>(h));
            }
        }
    }

    static DEVICE void scatter(const LaneShare<F>& share, u8* block, int j, int part, int i) {
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int column = part * 64 + h * 16;
            const u32 low = share.low[low_word(h)] >> low_shift(h, j);
            F::Low::scatter(block, column, i, low & ((1 << LOW) - 1) * 0x01010101);
            if constexpr (HIGH > 0) {
                const u32 word = share.high[high_word(h)];
                const u32 pairs = __funnelshift_r(word, word, turn_of<F::BITS>(h)) >> LOW * (1 + j);
                F::High::scatter(block, column, i, (pairs & PAIRS) | (pairs & PAIRS << HIGH) << (8 - HIGH));
            }
        }
    }

private:
    static constexpr u32 PAIRS = ((1 << HIGH) - 1) * 0x00010001;

    static DEVICE int low_word(int h) { return LOW == 2 ? h / 2 : h; }
    static DEVICE int low_shift(int h, int j) { return LOW == 2 ? 4 * (h % 2) + 2 * j : 4 * j; }
    static DEVICE int high_word(int h) { return HIGH == 2 ? h / 2 : 0; }
};

// Codes as k-quants and IQ4 store them, and a lane's words of them.
#pragma once
#include "../core/places.cuh"
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

// Integer codes of F::BITS bits, the lower ones in F::Low, the others in F::High, and a lane's words of them: byte
// t + 2 e of gathered codes is element e of register 2 t + j, of row g + 8 j, column 2i + e + 8 t.
template <class F>
struct Words {
    static constexpr int LOW = F::LOW_BYTES == 256 ? 2 : 4;
    static constexpr u32 PAIR = 0x00ff00ff;

    static DEVICE void gather(LaneShare<F>& share, const u8* block, int j, int part, int i) {
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int column = part * 64 + h * 16;
            u32 codes = F::Low::gather(block, column, i);
            if constexpr (F::HIGH_BYTES > 0) codes |= F::High::gather(block, column, i) << LOW;
            put_codes(share, h, j, codes);
        }
    }

    static DEVICE void scatter(const LaneShare<F>& share, u8* block, int j, int part, int i) {
#pragma unroll
        for (int h = 0; h < 4; h++) {
            const int column = part * 64 + h * 16;
            const u32 codes = get_codes(share, h, j);
            F::Low::scatter(block, column, i, codes & ((1 << LOW) - 1) * 0x01010101);
            if constexpr (F::HIGH_BYTES > 0)
                F::High::scatter(block, column, i, codes >> LOW & ((1 << F::BITS - LOW) - 1) * 0x01010101);
        }
    }

    static DEVICE void put_codes(LaneShare<F>& share, int h, int j, u32 codes) {
#pragma unroll
        for (int t = 0; t < 2; t++) Places<F::BITS>::put(share, h, 2 * t + j, codes >> 8 * t & PAIR);
    }

    static DEVICE u32 get_codes(const LaneShare<F>& share, int h, int j) {
        u32 codes = 0;
#pragma unroll
        for (int t = 0; t < 2; t++) codes |= Places<F::BITS>::get(share, h, 2 * t + j) << 8 * t;
        return codes;
    }
};

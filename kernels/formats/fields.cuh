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

    // The same of the four runs of 32 in half a block of 256, from `column` of each on, which go to bit `to`; each byte is read
    // once.
    static DEVICE void eights(const u8* block, int half, int column, const u8* end, uint2 (&codes)[4], int to = 0) {
        constexpr bool HALVES = RUN > 128;  // whether the halves share bytes
        const u8* const from = block + (HALVES ? 0 : half * (128 / RUN * SPAN)) + column;
        uint2 bytes[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int same = 0;
            while (byte_of(32 * same) != byte_of(32 * k)) same++;
            bytes[k] = same < k ? bytes[same] : load_eight(from + byte_of(32 * k), end);
            const uint2 own = codes_at(bytes[k], shift_of(32 * k) + (HALVES ? half * (128 / SPAN * BITS) : 0), MASK);
            codes[k].x |= own.x << to, codes[k].y |= own.y << to;
        }
    }

    // Of every 16 columns a lane has codes 2i, + 8, + 1 and + 9, in the order of tile.cuh: those of all columns, from bit `to`
    // of a byte each on. A byte is read once for all of its codes ...
    template <int STEPS>
    static DEVICE void gather(const u8* block, int i, u32 (&codes)[STEPS], int to = 0) {
        for_bytes<STEPS>([&](int step) {
            const u8* const from = block + byte_of(16 * step) + 2 * i;
            const u32 bytes = __byte_perm(load_u16(from), load_u16(from + 8), 0x5140);
#pragma unroll
            for (int k = 0; k < 8 / BITS; k++)
                codes[step + k * SPAN / 16] |= (bytes >> k * BITS & MASK * 0x01010101) << to;
        });
    }

    // ... and written once.
    template <int STEPS>
    static DEVICE void scatter(u8* block, int i, const u32 (&codes)[STEPS], int from = 0) {
        for_bytes<STEPS>([&](int step) {
            u32 bits = 0;
#pragma unroll
            for (int k = 0; k < 8 / BITS; k++)
                bits |= (codes[step + k * SPAN / 16] >> from & MASK * 0x01010101) << k * BITS;
            u8* const to = block + byte_of(16 * step) + 2 * i;
            store_u16(to, __byte_perm(bits, 0, 0x4420)), store_u16(to + 8, __byte_perm(bits, 0, 0x4431));
        });
    }

private:
    // Do `what` with the first 16 columns of each that share bytes.
    template <int STEPS, class Do>
    static DEVICE void for_bytes(const Do& what) {
        static_assert(16 * STEPS % RUN == 0 && SPAN % 16 == 0, "bytes have codes of these columns alone");
#pragma unroll
        for (int run = 0; run < 16 * STEPS / RUN; run++)
#pragma unroll
            for (int step = 0; step < SPAN / 16; step++) what(run * RUN / 16 + step);
    }
};

struct NoField {};

// Integer codes of F::BITS bits, the lower ones in F::Low, the others in F::High, and a lane's words of them: byte
// t + 2 e of gathered codes is element e of register 2 t + j, of row g + 8 j, column 2i + e + 8 t.
template <class F>
struct Words {
    static constexpr int LOW = F::LOW_BYTES == 256 ? 2 : 4;
    static constexpr u32 PAIR = 0x00ff00ff;

    // All tiles of a block.
    template <int PARTS>
    static DEVICE void gather(LaneShare<F> (&shares)[PARTS], const u8* block, int j, int i) {
        u32 codes[4 * PARTS] = {};
        F::Low::gather(block, i, codes);
        if constexpr (F::HIGH_BYTES > 0) F::High::gather(block, i, codes, LOW);
#pragma unroll
        for (int step = 0; step < 4 * PARTS; step++) put_codes(shares[step / 4], step % 4, j, codes[step]);
    }

    template <int PARTS>
    static DEVICE void scatter(const LaneShare<F> (&shares)[PARTS], u8* block, int j, int i) {
        u32 codes[4 * PARTS];
#pragma unroll
        for (int step = 0; step < 4 * PARTS; step++) codes[step] = get_codes(shares[step / 4], step % 4, j);
        F::Low::scatter(block, i, codes);
        if constexpr (F::HIGH_BYTES > 0) F::High::scatter(block, i, codes, LOW);
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

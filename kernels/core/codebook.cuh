// Codes that are looked up: W = values[q] * d, with 2^BITS float16 values.
//
// Codes that stand next to each other in operand A are one index, into a table in shared memory of the pairs of values
// that they stand for. COPIES lanes have a copy of it each, in banks of their own: with 32 copies no two lanes ever
// meet in a bank. (Byte permutes, eight values to an instruction pair, and shuffles are slower: the pipe of the former
// is busy with the codes' own extraction, and a shuffle brings one value where a load brings two or four.)
//
// A lane's codes of block b (the steps h = 2b and 2b + 1 of tile.cuh) are those of rows g + 8 j, j = 0, 1, at columns
// 2i, 2i + 1 (t = 0) and 2i + 8, 2i + 9 (t = 1). With m = 2 (h & 1) + t, the codes q and r of the two columns are a pair
//
//     q0 r0 q1 r1 q2 r2 ...    bit by bit, the lowest first
//
// of 2 BITS bits, with number p = 8b + 4j + m. A lane's words hold them one after the other, as many as fit whole; of
// 5 bits what is left, bits 30 and 31 of every word, is the last pair's (bits 2w, 2w + 1 in word w). Of 2 bits pairs
// j = 0 and j = 1 are next to each other, and looked up at once: byte m of word b. Of 3 bits pairs of step h = 0, 1, 2
// are in word h, a byte each, and above them the two bits that are left have a part of step 3's:
//
//     bit                      7        6        5   4   3   2   1   0
//     byte 2t + j of word h    2h + 1 and 2h     the pair of step h, j and t
//                              of step 3's
//
// Where the lower half of a codebook is its upper half with signs, backwards, codes of 5 bits are kept as a magnitude's
// code, 4 bits in pairs as above, and a sign: a table of 256 entries instead of 1024, which leaves room for a copy for
// every lane. The high plane has the signs of pair p at bits 15 - p and 31 - p, and no word anything left.
#pragma once
#include "tile.cuh"

// Where a row of the table is 256 bytes (BYTES), twice what the copies need, an index of 8 bits is a byte of an entry's
// address, and a byte permute brings it there (of 3 bits whatever the two highest are: every pair has four rows):
//
//     byte   3        2        1       0               + AT, a constant of the instruction that loads
//            of the window     index   lane's copy
//
// AT is where the table starts within the window of shared memory, or within 64 KB of it: whatever else a kernel has
// before the dynamic memory, up to AT bytes, the table starts there. A second table has the other half of the rows.
template <class F, int COPIES, bool SIGNED = false>
struct Codebook {
    static constexpr int BITS = F::BITS - SIGNED, PAIR_BITS = BITS == 2 ? 8 : 2 * BITS;  // of 2 bits two pairs
    static constexpr int ENTRY = BITS == 2 ? 8 : 4, STEP = COPIES * ENTRY;
    static constexpr int SHIFT = STEP == 256 ? 8 : STEP == 128 ? 7 : STEP == 64 ? 6 : STEP == 32 ? 5 : 4;
    static constexpr int USED = STEP < 128 ? STEP : 128;  // all banks: 8 bytes are read by half a warp at a time
    static_assert(1 << SHIFT == STEP, "16 to 256 bytes: stores are 16");
    static constexpr bool BYTES = STEP == 256 && PAIR_BITS <= 8;
    static constexpr int INDEX_BITS = BYTES ? 8 : PAIR_BITS;
    static constexpr int AT = BYTES ? 2048 : 0, TABLE_BYTES = AT + (STEP << INDEX_BITS);  // with what is before it
    static constexpr bool SUMS = false;

    u32 value;  // of code lane % 2^BITS, for the table
    u32 own;    // shared address of this lane's copy of the first entry, less AT

    // Bytes that two tables take, and from the first to the second.
    static constexpr int TWO_BYTES = BYTES ? TABLE_BYTES : 2 * TABLE_BYTES, APART = BYTES ? USED : TABLE_BYTES;

    // Ask for the values: early, before much else is on its way from memory. Its table is the first, or the second.
    DEVICE Codebook(const u16* values, int lane, int table = 0)
        : value(values[lane % (1 << BITS) + (SIGNED << BITS)]),
          own(shared_address(dynamic_shared()) + before() - AT + table * APART + lane % (USED / ENTRY) * ENTRY) {}

    // Make the table, by `threads` threads in whole warps, which must meet before it is used. A thread makes an entry
    // and stores its copies, 16 bytes at a time, in an order in which the threads of a warp meet different banks.
    DEVICE void fill(int thread, int threads, int table = 0) const {
        if (BYTES && before() > AT) asm volatile("trap;");
        u8* const first = dynamic_shared() + before() + table * APART;
        auto of = [&](u32 first, u32 second) {
            return __shfl_sync(~0u, value, first) | __shfl_sync(~0u, value, second) << 16;
        };
#pragma unroll 1
        for (int index = thread; index < 1 << INDEX_BITS; index += threads) {
            const u32 v = of(code(index, 0), code(index, 1));
            const u32 next = BITS == 2 ? of(code(index >> 4, 0), code(index >> 4, 1)) : v;
            uint4* const to = reinterpret_cast<uint4*>(first) + index * (STEP / 16);
#pragma unroll
            for (int c = 0; c < USED / 16; c++)
                to[(c + thread * USED / 128) % (USED / 16)] = make_uint4(v, next, v, next);
        }
    }

    static DEVICE void unit(u32 (&a)[4]) {}
    static DEVICE float unscale(int) { return 1; }

    // The values of step h.
    DEVICE void codes(const Tile<F>& tile, int h, u32 (&a)[4]) const {
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const int b = h / 2, m = h % 2 * 2 + t;
            if constexpr (BITS == 2) {
                look_up(tile.low[b], m, a[2 * t], a[2 * t + 1]);
            } else {
#pragma unroll
                for (int j = 0; j < 2; j++)
                    a[2 * t + j] = value_pair(tile, 8 * b + 4 * j + m);
            }
        }
    }

    // Look both pairs of a byte of a word up, where codes have 2 bits.
    DEVICE void look_up(u32 word, int byte, u32& first, u32& second) const {
        asm("ld.shared.v2.u32 {%0, %1}, [%2+%3];"
            : "=r"(first), "=r"(second) : "r"(address(word, 8 * byte)), "n"(AT));
    }

    // The weights of step h in float16, rounded once.
    DEVICE void weights(const Tile<F>& tile, int h, u32 (&a)[4]) const {
        codes(tile, h, a);
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = mul_half2(a[r], tile.scale_pair(h, r % 2));
    }

private:
    // The first or second code of a pair.
    static DEVICE u32 code(u32 pair, int e) {
        u32 q = 0;
#pragma unroll
        for (int p = 0; p < BITS; p++) q |= (pair >> (2 * p + e) & 1) << p;
        return q;
    }

    // From where the dynamic shared memory starts to the table.
    static DEVICE u32 before() { return BYTES ? (AT - shared_address(dynamic_shared())) % (1 << 16) : 0; }

    // Address of the entry for the index in these bits of a word, less AT. The mask first: shift and addition are one
    // instruction.
    DEVICE u32 address(u32 word, int from) const {
        if constexpr (BYTES) return __byte_perm(word, own, 0x7604 | from / 8 << 4);
        const u32 bits = masked(word, (1 << PAIR_BITS) - 1 << from);
        return own + (from < SHIFT ? bits << (SHIFT - from) : bits >> (from - SHIFT));
    }

    DEVICE u32 value_pair(const Tile<F>& tile, int p) const {
        u32 values;
        asm("ld.shared.u32 %0, [%1+%2];" : "=r"(values) : "r"(pair(tile, p)), "n"(AT));
        return SIGNED ? and_xor(tile.high[0] << p, 0x80008000, values) : values;
    }

    // The pairs of a step where codes have 3 bits, a byte each; above them may be others' bits.
    static DEVICE u32 step_of(const Tile<F>& tile, int h) {
        if (h < 3) return tile.word(h);
        const u32 first = masked(tile.word(0) >> 6, 0x03030303);
        return and_or(tile.word(2) >> 2, 0x30303030, and_or(tile.word(1) >> 4, 0x0c0c0c0c, first));
    }

    DEVICE u32 pair(const Tile<F>& tile, int p) const {
        if constexpr (BITS == 3) return address(step_of(tile, p / 8 * 2 + p % 4 / 2), 8 * (p % 2 * 2 + p / 4 % 2));
        constexpr int PER_WORD = 32 / PAIR_BITS, WORDS = F::LOW_BYTES / 128 + BITS % 2;
        if (p < PER_WORD * WORDS) return address(tile.word(p / PER_WORD), p % PER_WORD * PAIR_BITS);
        u32 last = tile.word(0) >> 30;
#pragma unroll
        for (int w = 1; w < WORDS; w++) last = and_or(tile.word(w) >> (30 - 2 * w), 3 << 2 * w, last);
        return address(last, 0);
    }
};

// A 16 x 64 tile of trellis indices: from rows of four storage tiles, in which 16 rows of W are next to each other, to the
// words of the fragment layout, in which columns are, and back.
//
// A lane has two rows of a storage tile, k and k + 1, with all 16 n. What changes places are bits of the number that an index
// has in the warp: which lane, which word and which bits of it. k5 k4 k3 ... are bits of k, n3 n2 n1 n0 of n, c those of an
// index; of 3 bits they are four, like those of 4.
//
//                                     lane              word     bits
//     4 bits, rows of storage         k4 k3 k5 k2 k1    k0 n3    n2 n1 n0 c1 c0
//     a word for each n0              k4 k3 k5 k2 k1    n0 n3    n2 n1 c1 c0 k0     within a lane
//     a word for each half of k       k4 k3 n0 k2 k1    k5 n3    n2 n1 c1 c0 k0     by a shuffle of half of the words
//     the fragment layout             n2 n1 n0 k2 k1    k5 n3    k4 k3 c1 c0 k0     halves, and bytes, by one of all each
//
//     2 bits, rows of storage         k4 k3 k5 k2 k1    k0       n3 n2 n1 n0 c
//     a word for each n0              k4 k3 k5 k2 k1    n0       n1 n2 n3 c k0
//     a word for each half of k       k4 k3 n0 k2 k1    k5       n1 n2 n3 c k0
//     the fragment layout             n2 n1 n0 k2 k1    k5       k4 k3 n3 c k0
#pragma once
#include "pairs.cuh"

template <class F>
struct TrellisTile {
    // What a lane loads: WORDS words of row `k_of(lane)` of the tile's 64, which are on 4 bytes, and on 16 of 4 bits.
    static constexpr int WORDS = F::BITS, SPREAD = F::BITS == 2 ? 2 : 4;

    static DEVICE int k_of(int lane) { return (lane >> 2 & 1) * 32 + (lane >> 4) * 16 + (lane >> 3 & 1) * 8 + lane % 4 * 2; }

    static DEVICE void load(const u8* rows, u32 (&words)[WORDS]) {
        if constexpr (F::BITS == 2) {
            const uint2 v = *reinterpret_cast<const uint2*>(rows);
            words[0] = v.x, words[1] = v.y;
        } else if constexpr (F::BITS == 4) {
            const uint4 v = *reinterpret_cast<const uint4*>(rows);
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        } else {
#pragma unroll
            for (int w = 0; w < 3; w++) words[w] = reinterpret_cast<const u32*>(rows)[w];
        }
    }

    static DEVICE void store(u8* rows, const u32 (&words)[WORDS]) {
        if constexpr (F::BITS == 2) {
            *reinterpret_cast<uint2*>(rows) = make_uint2(words[0], words[1]);
        } else if constexpr (F::BITS == 4) {
            *reinterpret_cast<uint4*>(rows) = make_uint4(words[0], words[1], words[2], words[3]);
        } else {
#pragma unroll
            for (int w = 0; w < 3; w++) reinterpret_cast<u32*>(rows)[w] = words[w];
        }
    }

    // Of lanes that have rows 2 lane and 2 lane + 1 of the tile's 64: of rows 4 r + lane % 4 of W the columns 8 (lane / 4) + e,
    // where `index_of` finds them.
    static DEVICE void to_rows(const u32 (&rows)[WORDS], u32 (&words)[SPREAD], int lane) {
        expand(rows, words);
#pragma unroll
        for (u32& word : words) {
            if constexpr (F::BITS == 2) {
                word = exchange_fields(word, 2, lane & 2, 4, 0x0f0f0f0f);
                word = exchange_fields(word, 1, lane & 1, 2, 0x33333333);
            } else {
                word = exchange_bytes(word, 2, lane & 2 ? 0x3715 : 0x6240);
                word = exchange_fields(word, 1, lane & 1, 4, 0x0f0f0f0f);
            }
        }
    }

    static DEVICE u32 index_of(const u32 (&words)[SPREAD], int r, int e) {
        const u32 word = words[F::BITS == 2 ? e % 2 : r / 2 * 2 + e % 2];
        return word >> (F::BITS == 2 ? 8 * r + e / 2 * 2 : r % 2 * 16 + e / 2 * 4) & F::MASK;
    }

    static DEVICE void to_share(const u32 (&rows)[WORDS], LaneShare<F>& share, int lane) {
        if constexpr (F::BITS == 2) {
            u32 words[2] = {rows[0], rows[1]};
            cross(words[0], words[1], 1, 0x55555555), cross(words[0], words[1], 2, 0x33333333);
            exchange_across(words[0], words[1], 4, lane & 4);
#pragma unroll
            for (u32& word : words) {
                word = exchange_bytes(swapped(word, 12, 0x0000f0f0), 16, lane & 16 ? 0x3715 : 0x6240);
                word = exchange_bytes(word, 8, lane & 8 ? 0x3726 : 0x5140);
            }
            share.low[0] = words[0], share.low[1] = words[1];
        } else {
            u32 pairs[4];  // n3 k5
            expand(rows, pairs);
#pragma unroll
            for (int j = 0; j < 2; j++) {
                u32 &first = pairs[2 * j], &second = pairs[2 * j + 1];
                cross(first, second, 1, 0x55555555), cross(first, second, 2, 0x33333333);
                cross(first, second, 4, 0x0f0f0f0f);
                exchange_across(first, second, 4, lane & 4);
            }
#pragma unroll
            for (u32& word : pairs) {
                word = exchange_bytes(word, 16, lane & 16 ? 0x3276 : 0x5410);
                word = exchange_bytes(word, 8, lane & 8 ? 0x3715 : 0x6240);
            }
            Pairs<F>::put_all(share, pairs);
        }
    }

    static DEVICE void from_share(const LaneShare<F>& share, u32 (&rows)[WORDS], int lane) {
        if constexpr (F::BITS == 2) {
            u32 words[2] = {share.low[0], share.low[1]};
#pragma unroll
            for (u32& word : words) {
                word = exchange_bytes(word, 8, lane & 8 ? 0x3175 : 0x6420);
                word = swapped(exchange_bytes(word, 16, lane & 16 ? 0x3715 : 0x6240), 12, 0x0000f0f0);
            }
            exchange_across(words[0], words[1], 4, lane & 4);
            cross(words[0], words[1], 2, 0x33333333), cross(words[0], words[1], 1, 0x55555555);
            rows[0] = words[0], rows[1] = words[1];
        } else {
            u32 pairs[4], none;
            Pairs<F>::get_all(share, pairs, none);
#pragma unroll
            for (u32& word : pairs) {
                word = exchange_bytes(word, 8, lane & 8 ? 0x3715 : 0x6240);
                word = exchange_bytes(word, 16, lane & 16 ? 0x3276 : 0x5410);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                u32 &first = pairs[2 * j], &second = pairs[2 * j + 1];
                exchange_across(first, second, 4, lane & 4);
                cross(first, second, 4, 0x0f0f0f0f);
                cross(first, second, 2, 0x33333333), cross(first, second, 1, 0x55555555);
            }
            compress(pairs, rows);
        }
    }

private:
    // Bytes of a lane's word (0 to 3) and of that of the lane whose number has another `bit` (4 to 7).
    static DEVICE u32 exchange_bytes(u32 word, int bit, u32 selector) {
        return permute(word, __shfl_xor_sync(~0u, word, bit), selector);
    }

    // Two rows of 16 indices, bits next to each other: of 2 bits as they are, of others as nibbles, of which word 2 j + e has
    // those of row k + e and n = 8 j and more. Of 3 bits the fourth ones become anything.
    static DEVICE void expand(const u32 (&rows)[WORDS], u32 (&nibbles)[SPREAD]) {
        if constexpr (F::BITS == 2) {
            nibbles[0] = rows[0], nibbles[1] = rows[1];
        } else if constexpr (F::BITS == 4) {
            nibbles[0] = rows[0], nibbles[2] = rows[1], nibbles[1] = rows[2], nibbles[3] = rows[3];
        } else {
            nibbles[0] = rows[0], nibbles[2] = __funnelshift_r(rows[0], rows[1], 24);
            nibbles[1] = __funnelshift_r(rows[1], rows[2], 16), nibbles[3] = rows[2] >> 8;
#pragma unroll
            for (u32& word : nibbles) {
                word = chosen(word, word << 4, 0x00000fff);
                word = chosen(word, word << 2, 0x003f003f);
                word = chosen(word, word << 1, 0x07070707);
            }
        }
    }

    static DEVICE void compress(const u32 (&nibbles)[SPREAD], u32 (&rows)[WORDS]) {
        if constexpr (F::BITS == 4) {
            rows[0] = nibbles[0], rows[1] = nibbles[2], rows[2] = nibbles[1], rows[3] = nibbles[3];
        } else {
            u32 eights[4];  // of 24 bits
#pragma unroll
            for (int w = 0; w < 4; w++) {
                const u32 sixes = chosen(nibbles[w], nibbles[w] >> 1, 0x07070707);
                const u32 twelves = chosen(sixes, sixes >> 2, 0x003f003f);
                eights[w] = chosen(twelves, twelves >> 4, 0x00000fff);
            }
            rows[0] = chosen(eights[0], eights[2] << 24, 0x00ffffff);
            rows[1] = chosen(eights[2] >> 8, eights[1] << 16, 0x0000ffff);
            rows[2] = chosen(eights[1] >> 16, eights[3] << 8, 0x000000ff);
        }
    }
};

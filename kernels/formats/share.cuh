// What one lane has of a tile of the fragment layout: the words that core/tile.cuh describes, and of the scales that of
// one block, row g + 8 j and block b for lane 4 g + 2 j + b: the order of the scale plane. Of the group plane it has two
// bytes, those from 2 i on of what a record has of the two rows (lane = 4 g + i); where that has scales, `scale` is for
// `peak` alone, of row g, or g + 8 where i is odd.
#pragma once
#include "../core/ieee.cuh"
#include "../core/ptx.cuh"

template <class F>
struct LaneShare {
    u32 low[F::LOW_BYTES / 128];
    u32 high[F::HIGH_BYTES ? F::HIGH_BYTES / 128 : 1];
    u32 scale;
    u32 group;
};

// All bits of the four lanes that share a row.
DEVICE u32 or_of_row(u32 bits) {
    bits |= __shfl_xor_sync(~0u, bits, 1);
    return bits | __shfl_xor_sync(~0u, bits, 2);
}

// Of a codebook, of which each lane has its `own` entry, that of the lane which the last five bits of byte j of some codes
// name; by the whole warp. (In shared memory an entry would have an address, of which the code is a part to be masked.)
DEVICE float entry_of(float own, u32 codes, int j) { return __shfl_sync(~0u, own, codes >> 8 * j); }

// The four lanes (i) that share a row have bits of the same four words: all bits of word i.
DEVICE u32 own_of_row(const u32* words, int i) {
    u32 mine[2];
#pragma unroll
    for (int w = 0; w < 2; w++) {
        const u32 theirs = __shfl_xor_sync(~0u, i < 2 ? words[2 + w] : words[w], 2);
        mine[w] = (i < 2 ? words[w] : words[2 + w]) | theirs;
    }
    const u32 theirs = __shfl_xor_sync(~0u, i % 2 ? mine[0] : mine[1], 1);
    return (i % 2 ? mine[1] : mine[0]) | theirs;
}

// Codes of a few bits, at bit `shift` of each of eight bytes, by themselves.
DEVICE uint2 codes_at(uint2 bytes, int shift, u32 mask) {
    return make_uint2(bytes.x >> shift & mask * 0x01010101, bytes.y >> shift & mask * 0x01010101);
}

// A byte of a bit plane to eight codes, a byte each: bit k to bit `to` of byte k.
DEVICE void add_plane(uint2& codes, u32 plane, int to) {
    codes.x |= (plane & 15) * (0x00204081 << to) & 0x01010101 << to;
    codes.y |= (plane >> 4 & 15) * (0x00204081 << to) & 0x01010101 << to;
}

// Bits of a word, those that `mask` has and those `by` bits higher, changed for each other.
DEVICE u32 swapped(u32 word, int by, u32 mask) {
    const u32 other = (word ^ word >> by) & mask;
    return word ^ other ^ other << by;
}

// Bytes of four bit planes of eight codes, byte p of plane p, from nibbles, and back. Codes 0 to 3 are the lower
// nibbles of the bytes and 4 to 7 the upper ones. In the number of a bit, from the highest one on, j of a code and p of
// a plane, the swaps do
//
//     j1 j0 j2 p1 p0  ->  p1 j0 j2 j1 p0  ->  p1 p0 j2 j1 j0
DEVICE u32 planes_of(u32 nibbles) { return swapped(swapped(nibbles, 14, 0x0000cccc), 7, 0x00aa00aa); }

DEVICE u32 nibbles_of(u32 planes) { return swapped(swapped(planes, 7, 0x00aa00aa), 14, 0x0000cccc); }

// A lane's words of the low plane (tile.cuh): 16 bytes at a time, or two words.
template <class F>
DEVICE void store_low(u8* tile, const LaneShare<F>& share, int lane) {
    if constexpr (F::LOW_BYTES == 256) {
#pragma unroll
        for (int w = 0; w < 2; w++)
            reinterpret_cast<u32*>(tile)[WORDS_TOGETHER<F> ? 2 * lane + w : w * 32 + lane] = share.low[w];
    } else {
#pragma unroll
        for (int part = 0; part < F::LOW_BYTES / 512; part++) {
            const u32* const words = share.low + part * 4;
            reinterpret_cast<uint4*>(tile + part * 512)[lane] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

template <class F>
DEVICE void load_low(LaneShare<F>& share, const u8* tile, int lane) {
    if constexpr (F::LOW_BYTES == 256) {
#pragma unroll
        for (int w = 0; w < 2; w++)
            share.low[w] = reinterpret_cast<const u32*>(tile)[WORDS_TOGETHER<F> ? 2 * lane + w : w * 32 + lane];
    } else {
#pragma unroll
        for (int part = 0; part < F::LOW_BYTES / 512; part++) {
            const uint4 v = reinterpret_cast<const uint4*>(tile + part * 512)[lane];
            u32* const words = share.low + part * 4;
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        }
    }
}

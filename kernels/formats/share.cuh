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

// Whether codes of a format are stored as bit planes.
template <class F>
constexpr bool HAS_PLANES = false;

// All bits of the four lanes that share a row.
DEVICE u32 or_of_row(u32 bits) {
    bits |= __shfl_xor_sync(~0u, bits, 1);
    return bits | __shfl_xor_sync(~0u, bits, 2);
}

// The entry of a codebook, of which each lane has its `own` entry, that the last five bits of byte j of some codes name; by
// the whole warp. (In shared memory an entry would have an address, of which the code is a part to be masked.)
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

// Bits of a word, those that `mask` has and those `by` bits higher, changed for each other.
DEVICE u32 swapped(u32 word, int by, u32 mask) {
    const u32 other = (word ^ word >> by) & mask;
    return word ^ other ^ other << by;
}

// Bits to other places. In the number of a bit, from the highest one on, the swaps do
//
//     v w x y z  ->  z w x y v  ->  z w v y x  ->  z w v x y
//
// and back.
DEVICE u32 with_last_first(u32 bits) {
    return swapped(swapped(swapped(bits, 15, 0x0000aaaa), 3, 0x0a0a0a0a), 1, 0x22222222);
}

DEVICE u32 with_first_last(u32 bits) {
    return swapped(swapped(swapped(bits, 1, 0x22222222), 3, 0x0a0a0a0a), 15, 0x0000aaaa);
}

// What a has beside `mask`, and b `by` bits lower in it, changed for each other.
DEVICE void cross(u32& a, u32& b, int by, u32 mask) {
    const u32 first = (a & mask) | (b << by & ~mask);
    b = (a >> by & mask) | (b & ~mask), a = first;
}

// Words from any address of shared memory; up to four bytes behind them are read.
template <int COUNT>
DEVICE void load_words(const u8* p, u32 (&words)[COUNT]) {
    const u32 shift = u32(reinterpret_cast<u64>(p)) % 4 * 8;
    const u32* const from = reinterpret_cast<const u32*>(p - shift / 8);
#pragma unroll
    for (int w = 0; w < COUNT; w++) words[w] = __funnelshift_r(from[w], from[w + 1], shift);
}

// A word of a and one of b, of lanes that differ in `bit` of their numbers alone, changed for each other: b of the lane
// without it for a of the lane with it.
DEVICE void exchange_across(u32& a, u32& b, int bit, bool has_bit) {
    const u32 theirs = __shfl_xor_sync(~0u, has_bit ? a : b, bit);
    (has_bit ? a : b) = theirs;
}

// Bits of two lanes' words that differ in `bit` of their numbers alone, changed for each other: those beside `mask` of the lane
// without it for those of the lane with it that are `by` lower.
DEVICE u32 exchange_fields(u32 word, int bit, bool has_bit, int by, u32 mask) {
    const u32 theirs = __shfl_xor_sync(~0u, word, bit);
    return chosen(word, __funnelshift_l(theirs, theirs, has_bit ? 32 - by : by), has_bit ? ~mask : mask);
}

// Each of the four lanes (i) that share a row has a word for each of them: word k becomes what lane k has for lane i.
DEVICE void exchange(u32 (&words)[4], int i) {
#pragma unroll
    for (int step = 2; step; step /= 2)
#pragma unroll
        for (int w = 0; w < 4; w++)
            if (!(w & step)) exchange_across(words[w], words[w | step], step, i & step);
}

// Byte i of word m to byte m of word i.
DEVICE void turn_bytes(u32 (&words)[4]) {
    u32 halves[4];
#pragma unroll
    for (int w = 0; w < 4; w++) halves[w] = permute(words[w / 2 * 2], words[w / 2 * 2 + 1], w % 2 ? 0x7362 : 0x5140);
#pragma unroll
    for (int w = 0; w < 4; w++) words[w] = permute(halves[w / 2], halves[2 + w / 2], w % 2 ? 0x7632 : 0x5410);
}

// Each of the four lanes has four bit planes of a block of 32 columns (words p), and wants of all four blocks the columns
// 8 m + 2 i and the next ones: bits 2 p and 2 p + 1 of byte m of word k are those of lane k's block. And back.
DEVICE void planes_to_pairs(u32 (&words)[4], int i) {
    cross(words[0], words[2], 4, 0x0f0f0f0f), cross(words[1], words[3], 4, 0x0f0f0f0f);
    cross(words[0], words[1], 2, 0x33333333), cross(words[2], words[3], 2, 0x33333333);
    exchange(words, i);
}

DEVICE void pairs_to_planes(u32 (&words)[4], int i) {
    exchange(words, i);
    cross(words[0], words[1], 2, 0x33333333), cross(words[2], words[3], 2, 0x33333333);
    cross(words[0], words[2], 4, 0x0f0f0f0f), cross(words[1], words[3], 4, 0x0f0f0f0f);
}

// The same of two planes: word b has, for j = 0, 1 in the lower and upper halves of byte m, what is of lane 2 j + b's block.
DEVICE u32 exchange_nibbles(u32 word, int i) { return exchange_fields(word, 2, i & 2, 4, 0x0f0f0f0f); }

DEVICE void planes_to_pairs(u32 (&words)[2], int i) {
    cross(words[0], words[1], 2, 0x33333333);
    words[0] = exchange_nibbles(words[0], i), words[1] = exchange_nibbles(words[1], i);
    exchange_across(words[0], words[1], 1, i % 2);
}

DEVICE void pairs_to_planes(u32 (&words)[2], int i) {
    exchange_across(words[0], words[1], 1, i % 2);
    words[0] = exchange_nibbles(words[0], i), words[1] = exchange_nibbles(words[1], i);
    cross(words[0], words[1], 2, 0x33333333);
}

// And of one plane: bits 2 m and 2 m + 1 of byte k.
DEVICE u32 plane_to_pairs(u32 plane, int i) {
    plane = swapped(swapped(plane, 12, 0x0000f0f0), 6, 0x00cc00cc);  // byte i, bits 2 m and 2 m + 1
    plane = permute(plane, __shfl_xor_sync(~0u, plane, 2), i < 2 ? 0x5410 : 0x3276);
    return permute(plane, __shfl_xor_sync(~0u, plane, 1), i % 2 ? 0x3715 : 0x6240);
}

DEVICE u32 pairs_to_plane(u32 pairs, int i) {
    pairs = permute(pairs, __shfl_xor_sync(~0u, pairs, 1), i % 2 ? 0x3715 : 0x6240);
    pairs = permute(pairs, __shfl_xor_sync(~0u, pairs, 2), i < 2 ? 0x5410 : 0x3276);
    return swapped(swapped(pairs, 6, 0x00cc00cc), 12, 0x0000f0f0);
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

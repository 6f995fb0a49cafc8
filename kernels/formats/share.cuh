// What one lane has of a tile of the fragment layout: the words that core/tile.cuh describes, and of the scales that of
// one block, row g + 8 j and block b for lane 4 g + 2 j + b: the order of the scale plane. Of the group plane it has two
// bytes, those from 2 i on of what a record has of the two rows (lane = 4 g + i).
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

// Bit j + k to bit 0 of byte k, for four bits of a plane's byte.
DEVICE u32 spread(u32 bits, int j) { return (bits >> j % 8 & 15) * 0x00204081 & 0x01010101; }

// A lane's words of the low plane: 16 bytes at a time, or two words apart.
template <int WORDS>
DEVICE void store_low(u8* tile, const u32 (&words)[WORDS], int lane) {
    if constexpr (WORDS == 2) {
#pragma unroll
        for (int w = 0; w < 2; w++) reinterpret_cast<u32*>(tile)[w * 32 + lane] = words[w];
    } else {
#pragma unroll
        for (int part = 0; part < WORDS / 4; part++)
            reinterpret_cast<uint4*>(tile + part * 512)[lane] =
                make_uint4(words[part * 4], words[part * 4 + 1], words[part * 4 + 2], words[part * 4 + 3]);
    }
}

template <int WORDS>
DEVICE void load_low(u32 (&words)[WORDS], const u8* tile, int lane) {
    if constexpr (WORDS == 2) {
#pragma unroll
        for (int w = 0; w < 2; w++) words[w] = reinterpret_cast<const u32*>(tile)[w * 32 + lane];
    } else {
#pragma unroll
        for (int part = 0; part < WORDS / 4; part++) {
            const uint4 v = reinterpret_cast<const uint4*>(tile + part * 512)[lane];
            words[part * 4] = v.x, words[part * 4 + 1] = v.y, words[part * 4 + 2] = v.z, words[part * 4 + 3] = v.w;
        }
    }
}

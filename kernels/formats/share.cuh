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

// Signs of W's columns, given to operand A: x can stay as it is, and no kernel before the product has to change it.
#pragma once
#include "tile.cuh"

// A lane's signs of a tile of 64 columns are one word, of [tile][lane % 4]: pair p = 2 h + t of columns, those of step h and
// half t (the picture is in tile.cuh), has its own at bits 15 - p and 31 - p. It is asked for a tile ahead.
template <bool SIGNED>
struct ColumnSigns {
    const u32* from;
    u32 now, next;

    // From `tile` on, in steps of `apart` tiles.
    DEVICE ColumnSigns(const u16* signs, int tile, int lane)
        : from(reinterpret_cast<const u32*>(signs) + tile * 4 + lane % 4), now(0), next(*from) {}

    // To the next tile, `apart` further on. (Behind the last word there is memory: cuquant/cuda/trellis.py.)
    DEVICE void advance(int apart) {
        now = next, from += apart * 4, next = *from;
    }

    DEVICE void apply(int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = and_xor(now << (2 * h + r / 2), 0x80008000, a[r]);
    }
};

template <>
struct ColumnSigns<false> {
    DEVICE ColumnSigns(const u16*, int, int) {}
    DEVICE void advance(int) {}
    DEVICE void apply(int, u32 (&)[4]) const {}
};

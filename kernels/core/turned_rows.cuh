// Rows times numbers for their columns (EXL3's suh), turned, to float16 rows over powers of two: a block has a row.
#pragma once
#include "turned.cuh"

constexpr int KEPT = 4;  // pieces of eight numbers of a row that a thread has at once

// The block's pieces of an array of float16 numbers from `first` on, zeros beyond.
DEVICE void fetch_pieces(const u16* from, int pieces, int first, uint4 (&to)[KEPT]) {
#pragma unroll
    for (int p = 0; p < KEPT; p++) {
        const int i = first + p * blockDim.x + threadIdx.x;
        to[p] = i < pieces ? reinterpret_cast<const uint4*>(from)[i] : make_uint4(0, 0, 0, 0);
    }
}

// The block's pieces of a row that `numbers` gives, times those of `suh`, turned.
template <class Numbers>
DEVICE void turned_pieces(int pieces, int first, const uint4 (&suh)[KEPT], Numbers numbers, float (&to)[KEPT][8]) {
#pragma unroll
    for (int p = 0; p < KEPT; p++) {
        const int i = first + p * blockDim.x + threadIdx.x;
        if (i - threadIdx.x % WARP >= pieces) continue;  // 16 lanes have a turn to themselves, but shuffles are warps'
        float factor[8];
        to_floats(suh[p], factor);
        numbers(min(i, pieces - 1), to[p]);
#pragma unroll
        for (int j = 0; j < 8; j++) to[p][j] *= factor[j] * TURNED;
        turn(to[p]);
    }
}

// The first of the last pieces of a row that a block has at once.
DEVICE int last_pieces(int pieces) {
    const int span = KEPT * blockDim.x;
    return (pieces - 1) / span * span;
}

// A row of turned numbers to float16 ones, over a power of two, which is returned. A row of more pieces than a block has
// at once is gone through twice, from its end to find its peak. `load` makes the pieces from `first` on, and `fetch` what
// it takes for that; for the last ones this has been done.
template <class Fetch, class Load>
DEVICE float turned_to_halves(int pieces, uint4* out, float (&kept)[KEPT][8], Fetch fetch, Load load) {
    const int span = KEPT * blockDim.x;
    u32 peak = 0;
#pragma unroll 1
    for (int first = last_pieces(pieces);;) {
        load(first);
#pragma unroll
        for (int p = 0; p < KEPT; p++)
            if (first + p * blockDim.x + threadIdx.x < pieces)
#pragma unroll
                for (int j = 0; j < 8; j++) peak = max(peak, magnitude(kept[p][j]));
        if ((first -= span) < 0) break;
        fetch(first);
    }
    const int shift = shift_of(block_max(peak));
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
        for (int p = 0; p < KEPT; p++) {
            const int i = first + p * blockDim.x + threadIdx.x;
            if (i < pieces) out[i] = to_halves(kept[p], power_of_two(shift));
        }
        if ((first += span) >= pieces) break;
        fetch(first);
        load(first);
    }
    return power_of_two(-shift);
}

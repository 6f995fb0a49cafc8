// What the streams of a block have of a row is added up: the result, or what `merge` goes on with.
#pragma once
#include "merge.cuh"

// By a warp. `of(k)` says where stream k, of a power of two of them, has the row's sums (`o`, of all channels) and its reference
// and sum of weights (`weight`). `out_row` is the row among those of all key heads.
template <int STREAMS, class F>
DEVICE void combine(const Attention& p, const Share& share, int out_row, int lane, F of) {
    static_assert((STREAMS & (STREAMS - 1)) == 0 && STREAMS <= WARP, "each stream has a lane, or several");
    float2 all = *of(lane % STREAMS).weight;
    const float own = all.x;
#pragma unroll
    for (int step = 1; step < STREAMS; step *= 2) all.x = fmaxf(all.x, __shfl_xor_sync(~0u, all.x, step));
    const float factor = exp2_of(own - all.x);
    all.y *= factor;
#pragma unroll
    for (int step = 1; step < STREAMS; step *= 2) all.y += __shfl_xor_sync(~0u, all.y, step);
#pragma unroll
    for (int base = 0; base < PADDED; base += WARP * 4) {
        const int column = base + lane * 4;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < STREAMS; k++) {
            const float own = __shfl_sync(~0u, factor, k);
            if (column < PADDED) add(sum, *reinterpret_cast<const float4*>(of(k).o + column), own);
        }
        if (column >= CUQUANT_DIM) continue;
        if (share.splits > 1)
            left_at(p, blockIdx.x, out_row)[column / 4] = sum;
        else
            store_channels(p, place_of(p, share.sequence, out_row), column, sum, all.y);
    }
    if (share.splits > 1) {
        if (lane < 2) left_at(p, blockIdx.x, out_row)[CUQUANT_DIM / 4 + lane] = make_float4(all.x, all.y, 0, 0);
        __syncwarp();
        if (!CUQUANT_BOXES && lane < p.parts) add_to(counter_of(p, share.sequence, out_row, lane), counted(share.splits));
    } else if (p.totals && lane == 0) {
        p.totals[s64(share.sequence) * p.heads * p.q_len + out_row] = all;
    }
}

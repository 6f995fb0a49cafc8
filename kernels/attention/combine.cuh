// What the streams of a block have of a row is added up: the result, or what `merge` goes on with.
#pragma once
#include "merge.cuh"

// Of a row in shared memory: a stream's sums of all channels, their reference and the sum of weights.
struct StreamRow {
    const float2* weight;
    const float* o;
};

// The sum of a row's streams, a lane's four channels of every 128.
struct Combined {
    float4 sum[(PADDED + 127) / 128];
    float2 weight;

    // By a warp. `of(k)` is the row of stream k, of a power of two of them.
    template <int STREAMS, class F>
    DEVICE void add_up(int lane, F of) {
        static_assert((STREAMS & (STREAMS - 1)) == 0 && STREAMS <= WARP, "each stream has a lane, or several");
        weight = *of(lane % STREAMS).weight;
        const float own = weight.x;
#pragma unroll
        for (int step = 1; step < STREAMS; step *= 2) weight.x = fmaxf(weight.x, __shfl_xor_sync(~0u, weight.x, step));
        const float factor = exp2_of(own - weight.x);
        weight.y *= factor;
#pragma unroll
        for (int step = 1; step < STREAMS; step *= 2) weight.y += __shfl_xor_sync(~0u, weight.y, step);
#pragma unroll
        for (int part = 0; part < (PADDED + 127) / 128; part++) {
            const int column = part * 128 + lane * 4;
            sum[part] = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int k = 0; k < STREAMS; k++) {
                const float own = __shfl_sync(~0u, factor, k);
                if (column < PADDED) add(sum[part], *reinterpret_cast<const float4*>(of(k).o + column), own);
            }
        }
    }

    // `out_row`: among the rows of all key heads.
    DEVICE void store(const Attention& p, const Share& share, int out_row, int lane) const {
#pragma unroll
        for (int part = 0; part < (PADDED + 127) / 128; part++) {
            const int column = part * 128 + lane * 4;
            if (column >= CUQUANT_DIM) continue;
            if (share.splits > 1)
                left_at(p, blockIdx.x, out_row)[column / 4] = sum[part];
            else
                store_channels(p, place_of(p, share.sequence, out_row), column, sum[part], weight.y);
        }
        if (share.splits > 1) {
            if (lane < 2) left_at(p, blockIdx.x, out_row)[CUQUANT_DIM / 4 + lane] = make_float4(weight.x, weight.y, 0, 0);
        } else if (p.totals && lane == 0) {
            p.totals[s64(share.sequence) * p.heads * p.q_len + out_row] = weight;
        }
    }
};

// How a sequence is shared, of several, for `merge` where it waits until attention is done: by a thread of each block.
DEVICE void tell_merge(const Attention& p, const Share& share) {
    if (p.batch > 1 && share.split + blockIdx.y + blockIdx.z == 0) p.shares[share.sequence] = make_int2(share.first, share.splits);
}

// Rows whose sequence several blocks share: what each leaves is added up, in order, by a kernel of its own.
//
// Of streams (ring.cuh) shares are few. A warp for each part of a row starts while attention is still at work, in registers
// that it leaves free, and waits for a counter that attention's warps raise: sooner than its end would be known. A
// multiprocessor of an H200 has room for four of them beside a block of attention:
//
//   attention   16 warps x 112 registers   57344
//   merge        4 warps x  64 registers    8192
//
// What they wait for comes, unless another stream has changed lengths since attention read them: none of them starts before all
// of attention's blocks have (core/ptx.cuh).
//
// Of boxes (boxes.cuh) there are four times as many, or many sequences: a block of several warps for each row, or part of
// it, asks for all of them at a time. There is room for it when attention is done, which it waits for. That has left the
// split, too, which many blocks would work out. Beside panels (panels.cuh) there is no room for anything, either.
#pragma once
#include "queries.cuh"

constexpr int MERGE_WARPS = CUQUANT_MERGE_WARPS, MERGE_ROWS = CUQUANT_MERGE_ROWS;  // warps of a row, rows of a block
static_assert(MERGE_WARPS == 1 || MERGE_ROWS == 1, "warps of a row meet");
constexpr int REGISTERS = 65536, MERGE_REGISTERS = 4 * WARP * 64;  // of a multiprocessor, and of four warps that merge
constexpr bool COUNTED = CUQUANT_COUNTED;  // else it waits until attention is done
constexpr int AT_ONCE = 5;                 // shares that a lane asks for together

DEVICE void add(float4& sum, const float4& v, float factor) {
    sum.x += v.x * factor, sum.y += v.y * factor, sum.z += v.z * factor, sum.w += v.w * factor;
}

// Where the result of a row, of those of all key heads, begins in elements of `out`. (Divisions take long.)
DEVICE s64 place_of(const Attention& p, int sequence, int row) {
    const s64 at = sequence * p.out_strides[0];
    if (p.q_len == 1) return at + row * p.out_strides[2];
    return at + row % p.q_len * p.out_strides[1] + row / p.q_len * p.out_strides[2];
}

// The inverse of a sum of weights; 1 without any, as what they weigh is 0.
DEVICE float inverse_of(float total) { return total == 0 ? 1 : __fdividef(1, total); }

// Four channels of a result, from `column` on.
DEVICE void store_channels(const Attention& p, s64 place, int column, const float4& sum, float total) {
    const float factor = inverse_of(total);
    const float y[4] = {sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor};
#pragma unroll
    for (int c = 0; c < 4; c++) store_float(p.out, place + (column + c) * p.out_strides[3], p.out_dtype, y[c]);
}

// What a block leaves of a row: sums, then a sector of memory that begins with the reference of their weights and the sum
// of these.
constexpr int LEFT_ROW = CUQUANT_DIM / 4 + 2;

DEVICE float4* left_at(const Attention& p, int share, int row) {
    return p.left + (s64(share) * p.heads * p.q_len + row) * LEFT_ROW;
}

// What says that all shares of a row are there, to the block that merges a part of it.
DEVICE u32* counter_of(const Attention& p, int sequence, int row, int part) {
    return p.counters + (s64(sequence) * p.heads * p.q_len + row) * p.parts + part;
}

// What each share adds to it: one, and how many there are, lest others be waited for where lengths have changed since.
DEVICE u32 counted(u32 splits) { return splits << 16 | 1; }

// How a sequence is shared, of several, to what does not count: by a thread of each of its blocks, of which only the first tells.
DEVICE void tell_merge(const Attention& p, const Share& share) {
    if (!ONE_SEQUENCE && share.split + head_group() == 0) p.shares[share.sequence] = make_int2(share.first, share.splits);
}

// Sums with the reference of their weights, and the sum of these.
struct Sums {
    float4 o;
    float reference, total;

    DEVICE void refer_to(float other) {
        const float factor = exp2_of(reference - other);
        o.x *= factor, o.y *= factor, o.z *= factor, o.w *= factor, total *= factor, reference = other;
    }

    // What `of_lane` gets of another lane's.
    template <class F>
    DEVICE void add(const Sums& own, F of_lane) {
        const float x = of_lane(own.o.x), y = of_lane(own.o.y), z = of_lane(own.o.z), w = of_lane(own.o.w);
        o.x += x, o.y += y, o.z += z, o.w += w, total += of_lane(own.total);
    }
};

// Adds every `apart`-th share, from `start` on: four channels, the `piece`-th of a row. Shares are `stride` apart.
DEVICE Sums take(const float4* left, int piece, int start, int splits, int apart, u32 stride) {
    Sums all = {make_float4(0, 0, 0, 0), Queries::LEAST, 0};
#pragma unroll 1
    for (int first = start; first < splits; first += apart * AT_ONCE) {
        float4 o[AT_ONCE];
        float2 weight[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            weight[k] = make_float2(Queries::LEAST, 0), o[k] = make_float4(0, 0, 0, 0);
            const int share = first + k * apart;
            if (share >= splits) continue;
            const float4* const from = left + u64(u32(share)) * stride;
            o[k] = from[piece], weight[k] = *reinterpret_cast<const float2*>(from + CUQUANT_DIM / 4);
        }
        float most = all.reference;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) most = fmaxf(most, weight[k].x);
        all.refer_to(most);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const float factor = exp2_of(weight[k].x - most);
            all.total += weight[k].y * factor;
            add(all.o, o[k], factor);
        }
    }
    return all;
}

// Grid: sequences, groups of rows, a power of two of parts of channels. Lanes have four channels each, a piece, of some of the
// shares.
DEVICE void merge_part(const Attention& p) {
    __shared__ Sums sums_of[MERGE_WARPS > 1 ? MERGE_WARPS * WARP : 1];
    const int sequence = blockIdx.x, row = MERGE_ROWS > 1 ? blockIdx.y * MERGE_ROWS + threadIdx.x / WARP : blockIdx.y;
    const int thread = MERGE_ROWS > 1 ? threadIdx.x % WARP : threadIdx.x, lane = thread % WARP;
    const int pieces = CUQUANT_DIM / 4 >> __ffs(gridDim.z) - 1, width = min(pieces, WARP);
    // Shares go round the lanes with the same piece, in the order of their ranks, and the warps; a few lanes may be too many.
    // (Where nothing hides a division the width is mostly a power of two.)
    constexpr bool SHIFTS = !COUNTED && (CUQUANT_DIM & (CUQUANT_DIM - 1)) == 0;
    const int rank = SHIFTS ? lane >> __ffs(width) - 1 : lane / width;
    const int apart = SHIFTS ? WARP >> __ffs(width) - 1 : WARP / width;
    const u32 stride = p.heads * p.q_len * LEFT_ROW;
    int2 shares;
    if (!COUNTED) {
        if (ONE_SEQUENCE) shares = Share::all_of_single(p);
        wait_for_predecessor();
        if (!ONE_SEQUENCE) shares = p.shares[sequence];
    } else {
        shares = ONE_SEQUENCE ? Share::all_of_single(p) : Portion::shares_of(p, sequence, lane);
    }
    const int splits = shares.y;
    if (splits == 1 || (MERGE_ROWS > 1 && row >= p.heads * p.q_len)) return;

    const float4* const left = left_at(p, shares.x, row);
    bool late = false;
    if (COUNTED && lane == 0) {
        u32* const counter = counter_of(p, sequence, row, blockIdx.z);
        late = !wait_for_counter(counter, splits * counted(splits));
        *counter = 0;
    }
    late = __any_sync(~0u, late);  // they are of other lengths: the result is NaN
#pragma unroll 1
    for (int first = 0; first < pieces; first += width) {
        const int own = lane - rank * width, piece = first + own;
        const int start = rank < apart && piece < pieces ? thread / WARP * apart + rank : splits;
        Sums sums = take(left, blockIdx.z * pieces + piece, start, splits, MERGE_WARPS * apart, stride);
        if (late) sums.total = __int_as_float(0x7fffffff);
        float most = sums.reference;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        sums.refer_to(most);
        if ((width & (width - 1)) == 0) {
#pragma unroll 1
            for (int step = width; step < WARP; step *= 2) sums.add(sums, [&](float x) { return __shfl_xor_sync(~0u, x, step); });
        } else {
            const Sums of_lane = sums;
#pragma unroll 1
            for (int k = 1; k < apart; k++)
                sums.add(of_lane, [&](float x) { return __shfl_sync(~0u, x, own + k * width); });
        }
        if constexpr (MERGE_WARPS > 1) {
            __syncthreads();
            sums_of[thread] = sums;
            __syncthreads();
            if (thread < width) {
#pragma unroll 4
                for (int w = 1; w < MERGE_WARPS; w++) most = fmaxf(most, sums_of[w * WARP + thread].reference);
                sums.refer_to(most);
#pragma unroll 4
                for (int w = 1; w < MERGE_WARPS; w++) {
                    Sums other = sums_of[w * WARP + thread];
                    other.refer_to(most);
                    sums.add(other, [](float x) { return x; });
                }
            }
        }
        if (thread >= width || piece >= pieces) continue;
        store_channels(p, place_of(p, sequence, row), (blockIdx.z * pieces + piece) * 4, sums.o, sums.total);
        if (p.totals && blockIdx.z == 0 && piece == 0)
            p.totals[s64(sequence) * (MERGE_ROWS > 1 ? p.heads * p.q_len : gridDim.y) + row] = make_float2(most, sums.total);
    }
}

constexpr int MERGES = !COUNTED ? 1 : 4 * REGISTERS / MERGE_REGISTERS;  // that a multiprocessor has room for

extern "C" __global__ void __launch_bounds__(MERGE_WARPS* MERGE_ROWS* WARP, MERGES)
    merge(const __grid_constant__ Attention p) {
    let_successor_start();
    merge_part(p);
    // Every grid has a thread that waits (core/ptx.cuh).
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) wait_for_predecessor();
}

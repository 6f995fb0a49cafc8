// Results of a grouped product (a mixture of experts), from a warpgroup's registers to memory (wgmma core).
#pragma once
#include "levels.cuh"
#include "results.cuh"

#if __CUDA_ARCH__ == 900
// A warp's results of levels::COLUMNS columns from n on and of batch rows from m on, as its sums are, to float16 rows in
// levels, with these `signs` of all columns, or null.
template <class P, int SUMS>
DEVICE void store_leveled(const P& p, const u16* signs, const float (&v)[SUMS], int m, int end_m, int n) {
    static_assert(levels::COLUMNS == 16, "those of a warp");
    constexpr int PARTS = SUMS / 4;  // of 8 batch rows
    const int lane = threadIdx.x % WARP, row_levels = p.N / levels::COLUMNS;
    u32 flips[2] = {};
    if (signs)
#pragma unroll
        for (int j = 0; j < 2; j++) flips[j] = *reinterpret_cast<const u32*>(signs + n + lane % 4 * 2 + j * 8);
    // Peaks of both batch rows of a lane: their upper 16 bits tell levels. NaN stays NaN, whatever its row's level.
    u32 peaks[PARTS];
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        auto peak = [&](int e) { return __float_as_int(fmaxf(fabsf(v[j * 4 + e]), fabsf(v[j * 4 + e + 2]))); };
        peaks[j] = __byte_perm(peak(0), peak(1), 0x7632);
    }
#pragma unroll
    for (int step = 4; step < WARP; step *= 2)
#pragma unroll
        for (int j = 0; j < PARTS; j++) peaks[j] = __vmaxu2(peaks[j], __shfl_xor_sync(~0u, peaks[j], step));
    u16* to = static_cast<u16*>(p.out) + (m + lane / 4) * p.out_row + n + lane % 4 * 2;
    u8* to_levels = p.levels + s64(m + lane % 4 * 2) * row_levels + n / levels::COLUMNS;
#pragma unroll
    for (int j = 0; j < PARTS; j++) {
        const levels::Two own(peaks[j]);
        const float factor = own.low_factor(), factor1 = own.high_factor();
        const u32 bytes = own.bytes();
        const u32 pair = transposed(pack(v[j * 4] * factor, v[j * 4 + 1] * factor1, FLOAT16));
        const u32 pair8 = transposed(pack(v[j * 4 + 2] * factor, v[j * 4 + 3] * factor1, FLOAT16));
        if (m + j * 8 + lane / 4 < end_m)
            reinterpret_cast<u32*>(to)[0] = pair ^ flips[0], reinterpret_cast<u32*>(to)[4] = pair8 ^ flips[1];
        const int own_m = m + j * 8 + lane * 2;
        if (lane < 4 && own_m < end_m) to_levels[0] = bytes;
        if (lane < 4 && own_m + 1 < end_m) to_levels[row_levels] = bytes >> 16;
        to += 8 * p.out_row, to_levels += 8 * row_levels;
    }
}

// Part `i` of the sums, registers of which the number is not known before: by branches to one of COUNT copies.
template <int FIRST, int COUNT, int ROW_BLOCKS, int OWN, int SUMS>
DEVICE void take_part(float (&v)[ROW_BLOCKS][OWN], const float (&acc)[ROW_BLOCKS][SUMS], int i) {
    if constexpr (COUNT > 1) {
        if (i < FIRST + COUNT / 2)
            take_part<FIRST, COUNT / 2>(v, acc, i);
        else
            take_part<FIRST + COUNT / 2, COUNT - COUNT / 2>(v, acc, i);
    } else {
        asm volatile("");  // lest it be taken for simple enough to be done in any case
#pragma unroll
        for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < OWN; j++) v[b][j] = acc[b][FIRST * OWN + j];
    }
}

// A warp's results of a grouped product: columns from n on, batch rows from m on, as its sums are. Float32 goes straight
// to memory, eight lanes a sector of 32 bytes.
template <int ROW_BLOCKS, int SUMS, class P>
DEVICE void store_part(const P& p, float (&v)[ROW_BLOCKS][SUMS], int m, int end_m, int warp_n, int lane) {
    const int n = warp_n + lane / 4, own_m = m + lane % 4 * 2;
    const s64 start = own_m * p.out_row + n;
    auto exists = [&](int b, int j) { return own_m + j / 4 * 8 + j % 2 < end_m && n + b * 64 + j % 4 / 2 * 8 < p.N; };
    auto place = [&](int b, int j) { return start + (j / 4 * 8 + j % 2) * p.out_row + b * 64 + j % 4 / 2 * 8; };
    if (!P::GATED && p.residual) {  // it may be where results go: all of it is asked for before any of them
        float factor[ROW_BLOCKS][SUMS];
#pragma unroll
        for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < SUMS; j++)
                factor[b][j] = exists(b, j) ? static_cast<const float*>(p.residual)[place(b, j)] : 0;
#pragma unroll
        for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
            for (int j = 0; j < SUMS; j++) v[b][j] *= factor[b][j];
    }
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < SUMS; j++)
            if (exists(b, j)) static_cast<float*>(p.out)[place(b, j)] = v[b][j];
}

// act(W's) * V's, v[0] and v[1].
template <int SUMS, class P>
DEVICE void store_gated(const P& p, const u16* signs, float (&v)[2][SUMS], int m, int end_m, int warp_n, int lane) {
    if (p.activation) activate<true>(v[0], p.activation);
    float results[1][SUMS];
#pragma unroll
    for (int j = 0; j < SUMS; j++) results[0][j] = v[0][j] * v[1][j];
    if (p.out_dtype != FLOAT16)
        store_part(p, results, m, end_m, warp_n, lane);
    else if (warp_n < p.N)
        store_leveled(p, signs, results[0], m, end_m, warp_n);
}

// Brings `unscale` of a tile's batch rows, but for up to seven at its end, to the L1 cache, a lane 32 bytes:
// `store_group` would wait for it, chunk by chunk, as long as it takes to store a chunk and longer.
template <int BATCH, class P>
DEVICE void fetch_unscale(const P& p, const Segment& own) {
    static_assert(BATCH <= WARP * 8, "all rows at once");
    const int row = own.first_m + threadIdx.x % WARP * 8;
    if (p.unscale && row < own.end_m) touch(p.unscale + row);
}

// Store a warpgroup's results of a grouped product, WARP batch rows at a time, or half or a quarter as many. Gated with one
// row block, warps 0 and 1 have sums of W, and 2 and 3 those of V: by way of `shared` either gets the others' of half of
// the batch rows.
template <int ROW_BLOCKS, int SUMS, class P>
DEVICE void store_group(const P& p, const Matrix& at, float (&acc)[ROW_BLOCKS][SUMS], const Segment& own,
                        int first_n, u8* shared, int group) {
    int thread = threadIdx.x % WARPGROUP;
    asm volatile("" : "+r"(thread));  // what follows from it is worked out here, rather than kept all the time
    // Known to be a warp's: where a branch around shuffles is not, counters and addresses of the main loop are not
    // either, and take a fifth more instructions.
    const int warp = uniform(thread / WARP), lane = thread % WARP;
    constexpr bool TRADES = P::GATED && ROW_BLOCKS == 1;
    constexpr int MANY = ROW_BLOCKS > 1 || SUMS * 2 % WARP ? WARP / 2 : WARP;
    constexpr int ROWS = !P::GATED && SUMS * ROW_BLOCKS > 128 ? 8 : MANY;  // as many as registers are left
    constexpr int OWN = ROWS / 2, CHUNKS = SUMS / OWN, EACH = TRADES ? OWN / 2 : OWN, SIDES = P::GATED ? 1 : ROW_BLOCKS;
    static_assert(SUMS % OWN == 0, "whole chunks");
    const int side = warp / 2, warp_n = first_n + (TRADES ? warp % 2 : warp) * 16;
    const int first_m = own.first_m, end_m = own.end_m;
    const u16* const signs = P::GATED && p.out_signs ? p.out_signs + s64(own.matrix) * p.N : nullptr;
    // A lane has that of one of a chunk's rows.
    auto unscale_of = [&](int m) { return at.unscale ? at.unscale[min(m + lane, end_m - 1)] : 1; };
    float unscale = unscale_of(first_m), next;
    auto scale = [&](float (&sums)[SIDES][EACH], bool second, int from) {
        const float factor = side_factor_of(p, second), both = unscale * factor;
        const float2 factors = safe_factors(unscale, factor);
        // Mostly both at once: neither they nor a sum times them leave the range.
        const bool safe = !__any_sync(~0u, !(both > 0x1p-60f && both < 0x1p60f));
        scale_part(sums, 0, safe ? both : factors.x, from);
        if (!safe) scale_part(sums, 0, factors.y, from);
    };
    if constexpr (TRADES) warpgroups_sync<WARPGROUP>(1 + group);  // the tile before is read
    // One copy of the code, for a chunk at a time: there is more of it than the instruction cache keeps while a tile is
    // multiplied.
#pragma unroll 1
    for (int i = 0; i < CHUNKS; i++, unscale = next) {
        const int m = first_m + i * ROWS;
        if (m >= end_m) break;
        if (i + 1 < CHUNKS) next = unscale_of(m + ROWS);  // as early as can be: it is waited for
        if constexpr (TRADES) {
            float kept[1][EACH], given[1][EACH], both[2][EACH];
            take_part<0, SUMS / EACH>(kept, acc, i * 2 + side), take_part<0, SUMS / EACH>(given, acc, i * 2 + 1 - side);
            scale(kept, side, side * (ROWS / 2)), scale(given, side, (1 - side) * (ROWS / 2));
            // Two buffers in turn: what is written now was read before the barrier of the chunk before.
            float4* const there = reinterpret_cast<float4*>(shared) + (group * 2 + i % 2) * (EACH / 4 * WARPGROUP);
#pragma unroll
            for (int j = 0; j < EACH; j += 4)
                there[j / 4 * WARPGROUP + thread] =
                    make_float4(given[0][j], given[0][j + 1], given[0][j + 2], given[0][j + 3]);
            warpgroups_sync<WARPGROUP>(1 + group);
#pragma unroll
            for (int j = 0; j < EACH; j += 4) {
                const float4 got = there[j / 4 * WARPGROUP + (thread ^ WARPGROUP / 2)];
                const float others[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    both[0][j + e] = side ? others[e] : kept[0][j + e];
                    both[1][j + e] = side ? kept[0][j + e] : others[e];
                }
            }
            store_gated(p, signs, both, m + side * (ROWS / 2), end_m, warp_n, lane);
        } else if constexpr (P::GATED) {
            float v[2][EACH];
            take_part<0, CHUNKS>(v, acc, i);
#pragma unroll
            for (int b = 0; b < 2; b++) scale(reinterpret_cast<float(&)[1][EACH]>(v[b]), b, 0);
            store_gated(p, signs, v, m, end_m, warp_n, lane);
        } else {
            float v[ROW_BLOCKS][EACH];
            take_part<0, CHUNKS>(v, acc, i);
            scale(v, false, 0);
            if (p.activation)
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++) activate<true>(v[b], p.activation);
            store_part(p, v, m, end_m, warp_n, lane);
        }
    }
}
#endif

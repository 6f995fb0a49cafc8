// A slot of a warp's ring, one step of 64 columns of some row tiles, and what it adds to their sums (decode core).
#pragma once
#include "codec.cuh"

// Tiles of one 64-column step in a slot, plane by plane: each starts at a multiple of 128 bytes, or copies to it would
// take longer (a launch up to 5%).
template <class F, int ROW_TILES>
struct RingSlot {
    static constexpr int HIGH_AT = ROW_TILES * F::LOW_BYTES, SCALE_AT = HIGH_AT + ROW_TILES * F::HIGH_BYTES;
    static constexpr int GROUP_AT = SCALE_AT + whole_lines(ROW_TILES * F::SCALE_BYTES);
    static constexpr int SIZE = GROUP_AT + whole_lines(ROW_TILES * F::GROUP_BYTES);
    static_assert(HIGH_AT % 128 == 0 && SCALE_AT % 128 == 0, "of codes every row tile has as many bytes");

    static DEVICE void load(Tile<F>& tile, const u8* slot, int r, int lane) {
        tile.load_shared(slot + r * F::LOW_BYTES, slot + HIGH_AT + r * F::HIGH_BYTES,
                         slot + SCALE_AT + r * F::SCALE_BYTES, slot + GROUP_AT + r * F::GROUP_BYTES, lane);
    }

    static DEVICE void load_block(Tile<F>& tile, const u8* slot, int r, int block, int lane) {
        tile.load_block(slot + r * F::LOW_BYTES, slot + HIGH_AT + r * F::HIGH_BYTES, slot + SCALE_AT + r * F::SCALE_BYTES,
                        slot + GROUP_AT + r * F::GROUP_BYTES, block, lane);
    }
};

// acc += W X^T for a slot's tiles, with x's rows of the step at x_at: codes are operand A, what they add up to is
// multiplied by their scale.
template <class F, class C, int GROUPS, int ROW_TILES>
DEVICE void add_codes(const C& codec, const u8* slot, const u32 (&x_at)[GROUPS], int lane,
                      float (&acc)[ROW_TILES][GROUPS][4]) {
    static_assert(!(Tile<F>::STEP_SCALES && F::HAS_MIN), "minimums are those of 32 columns");
    u32 unit[4];
    C::unit(unit);
#pragma unroll
    for (int block = 0; block < 2; block++) {
        u32 x[GROUPS][4];
        float sums[GROUPS][4], odd_sums[GROUPS][4];  // the latter of the second step, if scales are steps'
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            load_matrices(x[group], x_at[group] + block * 64);
            if constexpr (!C::SUMS) continue;
            const float zero[4] = {0, 0, 0, 0};
            mma_half(sums[group], unit, x[group][0], x[group][1], zero);
            if constexpr (Tile<F>::STEP_SCALES)
                mma_half(odd_sums[group], unit, x[group][2], x[group][3], zero);
            else
                mma_half(sums[group], unit, x[group][2], x[group][3], sums[group]);
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            Tile<F> tile;
            RingSlot<F, ROW_TILES>::load_block(tile, slot, r, block, lane);
            u32 a0[4], a1[4];
            codec.codes(tile, 2 * block, a0);
            codec.codes(tile, 2 * block + 1, a1);
            const float d[2] = {tile.d(2 * block, 0), tile.d(2 * block, 1)};
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                float c[4] = {};
                if constexpr (F::HAS_MIN || !C::SUMS)
                    mma_half(c, a0, x[group][0], x[group][1], c);
                else
                    mma_half(c, a0, x[group][0], x[group][1], sums[group]);
                if constexpr (Tile<F>::STEP_SCALES) {
                    const float odd[2] = {tile.d(2 * block + 1, 0), tile.d(2 * block + 1, 1)};
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[r][group][j] += d[j >> 1] * c[j];
                    float other[4] = {};
                    if constexpr (C::SUMS)
                        mma_half(other, a1, x[group][2], x[group][3], odd_sums[group]);
                    else
                        mma_half(other, a1, x[group][2], x[group][3], other);
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[r][group][j] += odd[j >> 1] * other[j];
                    continue;
                }
                mma_half(c, a1, x[group][2], x[group][3], c);
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    acc[r][group][j] += d[j >> 1] * c[j];
                    if constexpr (F::HAS_MIN) acc[r][group][j] += tile.m(2 * block, j >> 1) * sums[group][j];
                }
            }
        }
    }
}

// Operand B of a slot's 64 columns: x[block][group], of two steps of 16 columns each.
template <int GROUPS>
DEVICE void load_columns(const u32 (&x_at)[GROUPS], u32 (&x)[2][GROUPS][4]) {
#pragma unroll
    for (int block = 0; block < 2; block++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) load_matrices(x[block][group], x_at[group] + block * 64);
}

// Adds a slot's products where all 64 columns have a scale together, or a zero point: what a tile adds up to is multiplied
// just once.
template <class F, class C, int GROUPS, int ROW_TILES>
DEVICE void add_group(const C& codec, const u8* slot, const u32 (&x_at)[GROUPS], int lane,
                      float (&acc)[ROW_TILES][GROUPS][4]) {
    u32 unit[4], x[2][GROUPS][4];
    C::unit(unit);
    load_columns(x_at, x);
    auto add = [&](float (&sums)[GROUPS][4], const u32 (&a)[4], int h) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            const u32* const b = x[h / 2][group] + h % 2 * 2;
            mma_half(sums[group], a, b[0], b[1], sums[group]);
        }
    };
    float all[GROUPS][4] = {};
#pragma unroll
    for (int h = 0; h < 4; h++) add(all, unit, h);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        Tile<F> tile;
        RingSlot<F, ROW_TILES>::load(tile, slot, r, lane);
        float sums[GROUPS][4] = {};
        if constexpr (!F::HAS_MIN) {
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[group][j] = all[group][j];
        }
#pragma unroll
        for (int h = 0; h < 4; h++) {
            u32 a[4];
            codec.codes(tile, h, a);
            add(sums, a, h);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                acc[r][group][j] += tile.d(0, j / 2) * sums[group][j];
                if constexpr (F::HAS_MIN) acc[r][group][j] += tile.m(0, j / 2) * all[group][j];
            }
    }
}

// Adds a slot's products where codes times integer scales are exact: they are operand A, and integer minimums another one.
// What a tile adds up to is multiplied just once. Of a block's two steps a product takes columns 2i and 2i+1, or 2i+8 and
// 2i+9: minimums are the same for both, so that one operand serves two products.
template <class F, class C, int GROUPS, int ROW_TILES>
DEVICE void add_products(const C& codec, const u8* slot, const u32 (&x_at)[GROUPS], int lane,
                         float (&acc)[ROW_TILES][GROUPS][4]) {
    static_assert(F::GROUP_BYTES > 0 && F::HAS_MIN, "integer scales and minimums");
    u32 x[2][GROUPS][4];
    load_columns(x_at, x);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        Tile<F> tile;
        RingSlot<F, ROW_TILES>::load(tile, slot, r, lane);
        float products[GROUPS][4] = {}, minimums[GROUPS][4] = {};
#pragma unroll
        for (int block = 0; block < 2; block++) {
            u32 a[2][4], m[4];
            codec.products(tile, block, a);
            codec.minimums(tile, block, m);
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const u32(&b)[4] = x[block][group];
                    mma_half(products[group], a[half], b[2 * half], b[2 * half + 1], products[group]);
                    mma_half(minimums[group], m, b[2 * half], b[2 * half + 1], minimums[group]);
                }
        }
#pragma unroll
        for (int row8 = 0; row8 < 2; row8++) {
            constexpr int TIMES_8 = ROW_FACTORS<F> ? 1 : C::TIMES_8;  // which minimums have else
            const float d = tile.integer_unit(row8, 0), m = tile.integer_unit(row8, 1) * (row8 ? TIMES_8 : 1);
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
#pragma unroll
                for (int j = 2 * row8; j < 2 * row8 + 2; j++) {
                    acc[r][group][j] += d * products[group][j];
                    acc[r][group][j] += m * minimums[group][j];
                }
        }
    }
}

// Adds a slot's products of numbers that have no scale: sums need no other place than `acc`. Where a number is the sum of
// two, tensor cores add them up, too: twice as many products take less time than an addition and permutes for every pair of
// numbers.
template <class F, class C, int GROUPS, int ROW_TILES>
DEVICE void add_values(const C& codec, const u8* slot, const u32 (&x_at)[GROUPS], int lane,
                       float (&acc)[ROW_TILES][GROUPS][4]) {
    u32 x[2][GROUPS][4];
    load_columns(x_at, x);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        Tile<F> tile;
        RingSlot<F, ROW_TILES>::load(tile, slot, r, lane);
#pragma unroll
        for (int h = 0; h < 4; h++) {
            if constexpr (C::HALVES) {
                u32 a[2][4];
                codec.halves(tile, h, a);
#pragma unroll
                for (int group = 0; group < GROUPS; group++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {  // columns 2i, 2i+1, or 2i+8, 2i+9: every number twice
                        const u32 pair = x[h / 2][group][h % 2 * 2 + half];
                        mma_half(acc[r][group], a[half], twice(pair, 0), twice(pair, 1), acc[r][group]);
                    }
            } else {
                u32 a[4];
                codec.weights(tile, h, a);
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    const u32* const b = x[h / 2][group] + h % 2 * 2;
                    mma_half(acc[r][group], a, b[0], b[1], acc[r][group]);
                }
            }
        }
    }
}

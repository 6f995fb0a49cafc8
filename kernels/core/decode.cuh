// The decode core: small batches, bound by the bytes of W. Any batch is right, 8 or 16 rows at a time.
//
// A cluster of CLUSTER blocks owns ROW_WARPS x ROW_TILES row tiles of W and splits K between its blocks; within a
// block WARPS / ROW_WARPS warps take the tiles along K in turn. Each warp streams its own tiles through its own ring
// of DEPTH slots in shared memory (a slot: ROW_TILES tiles of one 64-column step), and waits for no other. X is
// staged once per chunk of columns. Sums meet in shared memory, of the block and then of the cluster, in a fixed
// order.
//
//      K ->  |  block 0 of the cluster | block 1 |      within a block:  | w0 | w1 | w0 | w1 | ...
//
// W is fixed, so the ring is filled before the kernels that come before this one in the stream are done.
//
// Gated, the first half of the warps along N has rows of W and the second half the same rows of V.
#pragma once
#include "epilogue.cuh"
#include "rounded.cuh"
#include "turned.cuh"

// Rows of x from column `first` on, `pieces` of 8 columns each, to shared memory, SIGNED with the signs of W's columns.
// By way of registers: asynchronous copies are waited for in order, behind those of the rings. `wait` is called when a
// thread knows what to ask for, `meanwhile` while pieces are on their way, for every TOGETHER of them.
template <bool SIGNED, int THREADS, int TOGETHER, class P, class Row, class Wait, class Meanwhile>
DEVICE void stage_rows(const P& p, const Matrix& at, const Row& x_row, int batch, int first, int pieces, u8* to,
                       int row_bytes, const Wait& wait, const Meanwhile& meanwhile) {
    // Pieces are counted through the rows, one after the other; a division for each would take longer than its load.
    const int rows = THREADS / pieces, rest = THREADS % pieces;
    auto advance = [&](int& m, int& piece) {
        m += rows, piece += rest;
        if (piece >= pieces) m++, piece -= pieces;
    };
    int m = threadIdx.x / pieces, piece = threadIdx.x % pieces;
#pragma unroll 1
    do {
        const u16 *from[TOGETHER], *signs_from[TOGETHER];
        int to_m = m, to_piece = piece;
#pragma unroll
        for (int u = 0; u < TOGETHER; u++, advance(m, piece)) {
            const int column = first + piece * 8;
            const bool exists = m < batch && column < p.K;
            from[u] = exists ? at.x + x_row(m) * p.x_row + column : nullptr;
            signs_from[u] = SIGNED && exists && at.signs ? at.signs + column : nullptr;
        }
        wait();
        uint4 x[TOGETHER], signs[TOGETHER];
#pragma unroll
        for (int u = 0; u < TOGETHER; u++) {
            x[u] = signs[u] = make_uint4(0, 0, 0, 0);
            if (from[u]) x[u] = *reinterpret_cast<const uint4*>(from[u]);
            if (SIGNED && signs_from[u]) signs[u] = *reinterpret_cast<const uint4*>(signs_from[u]);
        }
        meanwhile();
#pragma unroll
        for (int u = 0; u < TOGETHER; u++, advance(to_m, to_piece)) {
            if constexpr (SIGNED) x[u] = flip(x[u], signs[u]);
            if (to_m < batch) *reinterpret_cast<uint4*>(to + to_m * row_bytes + to_piece * 16) = x[u];
        }
    } while (m < batch);
}

// The same of rows from `from` on that follow each other: a thread has ROWS of them at a time, in the same columns, and COLUMNS
// pieces of each, THREADS apart. From one to the next only additions lead. Not done, and false, where few rows are there, or
// threads would ask more often than with as many pieces counted through the rows.
template <bool SIGNED, int THREADS, int ROWS, int COLUMNS, class Wait, class Meanwhile>
DEVICE bool stage_columns(const u16* from, s64 x_row, const u16* signs_from, int batch, int columns, int pieces, u8* to,
                          int row_bytes, const Wait& wait, const Meanwhile& meanwhile) {
    constexpr int AT_ONCE = THREADS * COLUMNS;
    const int asked = (pieces + AT_ONCE - 1) / AT_ONCE * ((batch + ROWS - 1) / ROWS);
    if (batch <= ROWS / 2 || (asked - 1) * ROWS * AT_ONCE >= batch * pieces) return false;
    const int beside = pieces < THREADS ? THREADS / pieces : 1;  // threads that have the same columns
    const int own = pieces < THREADS ? threadIdx.x / pieces : 0, mine = threadIdx.x - own * pieces;
    const int have = own < beside ? batch - own : 0, step = beside * row_bytes;
    s64 on = beside * x_row * 2;
    asm volatile("" : "+l"(on));  // lest it be worked out anew for every row
    from += own * x_row, to += own * row_bytes;
#pragma unroll 1
    for (int piece = mine; piece - mine < pieces; piece += AT_ONCE) {
        const u8* next = reinterpret_cast<const u8*>(from + piece * 8);
        u8* place = to + piece * 16;
#pragma unroll 1
        for (int m = 0; m < batch; m += ROWS * beside) {
            wait();
            uint4 x[ROWS][COLUMNS], signs[COLUMNS];
#pragma unroll
            for (int r = 0; r < ROWS; r++, next += on)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    x[r][c] = make_uint4(0, 0, 0, 0);
                    if (m + r * beside < have && (piece + c * THREADS) * 8 < columns)
                        x[r][c] = *reinterpret_cast<const uint4*>(next + c * THREADS * 16);
                }
#pragma unroll
            for (int c = 0; SIGNED && c < COLUMNS; c++) {
                signs[c] = make_uint4(0, 0, 0, 0);
                const int column = (piece + c * THREADS) * 8;
                if (have > 0 && column < columns && signs_from)
                    signs[c] = *reinterpret_cast<const uint4*>(signs_from + column);
            }
            meanwhile();
#pragma unroll
            for (int r = 0; r < ROWS; r++, place += step)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    if constexpr (SIGNED) x[r][c] = flip(x[r][c], signs[c]);
                    if (m + r * beside < have && piece + c * THREADS < pieces)
                        *reinterpret_cast<uint4*>(place + c * THREADS * 16) = x[r][c];
                }
        }
    }
    return true;
}

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

// The same where all 64 columns have a scale together, or a zero point: what a tile adds up to is multiplied just once.
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

// The same where codes times integer scales are exact: they are operand A, and integer minimums another one. What a tile
// adds up to is multiplied just once. Of a block's two steps a product takes columns 2i and 2i+1, or 2i+8 and 2i+9:
// minimums are the same for both, so that one operand serves two products.
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

// The same of numbers that have no scale: sums need no other place than `acc`. Where a number is the sum of two, tensor
// cores add them up, too: twice as many products take less time than an addition and permutes for every pair of numbers.
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

// CONVERTS: x is to be what q8_1 blocks of it stand for; or, of UNSCALED numbers, its one row is to be turned, with
// p.signs for factors, and out is float32.
template <class F, class C, int GROUPS, int ROW_TILES, int ROW_WARPS, int WARPS, int DEPTH, int CLUSTER,
          int TOGETHER, bool CONVERTS, class P>
DEVICE void decode(const P& p) {
    constexpr int K_WARPS = WARPS / ROW_WARPS, ROWS = ROW_WARPS * ROW_TILES * 16, WIDTH = GROUPS * 8;
    constexpr int THREADS = WARPS * WARP;
    // Whether rows of x follow each other, are more than one, and there are registers for it: with less to ask for at once
    // tall tiles of numbers that are computed would be compiled to wait for each piece.
    constexpr bool SCARCE = ROW_TILES == 7 && (F::HAS_MIN || (F::CODING == CODEBOOK && WARPS == 16));
    constexpr bool RARE = F::CODING == INTEGERS && !ROW_FACTORS<F>;
    constexpr bool COLUMNS = !P::GROUPED && !CONVERTS && !SCARCE && !RARE && F::CODING != PROCEDURE;
    constexpr int SIDE_WARPS = P::GATED ? ROW_WARPS / 2 : ROW_WARPS, SIDE_ROWS = SIDE_WARPS * ROW_TILES * 16;
    using Slot = RingSlot<F, ROW_TILES>;
    constexpr int AHEAD = (DEPTH + 1) / 2;  // slots that are filled before x is asked for, which is to come soon
    // After a codebook's table, or W's row plane, rings [WARPS][DEPTH][SLOT], then rows of x; sums take their place.
    u8* const after = dynamic_shared() + Codecs<C, P::TABLES>::TABLE_BYTES;
    Factors* const factors = reinterpret_cast<Factors*>(after);
    u8* const shared = after + (ROW_FACTORS<F> ? whole_lines(ROWS * 2) : 0);

    begin(p);
    __shared__ int found[WARPS][WIDTH];
    int* const entries = found[threadIdx.x / WARP];
    const Span span = span_of<WIDTH>(p, entries);
    if (P::GROUPED && span.first == span.end) return wait_for_predecessor();
    const Matrix operands = matrix_soon<F>(p, span.matrix);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Codecs<C, P::TABLES> codecs(p.values, values_of_v(p), lane);
    const int tiles = (p.K + 63) / 64, row_tiles = (p.N + 15) / 16, groups = groups_of<F>(tiles);
    const int row_warp = warp / K_WARPS, block_row = blockIdx.x / CLUSTER * (SIDE_ROWS / 16);
    const int first_row = block_row + row_warp % SIDE_WARPS * ROW_TILES;
    const int first_m = span.first, batch = min(span.end - first_m, WIDTH);
    auto x_row = [&](int m) {
        if constexpr (P::GROUPED)
            if (!p.works) return entries[m] / p.share;
        return first_m + m;
    };
    const int rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
    const int begin = int(s64(tiles) * rank / CLUSTER), end = int(s64(tiles) * (rank + 1) / CLUSTER);

    // One slot: every plane's share of the tiles at `tile`, 16 bytes a lane. A row tile beyond N reads the last one
    // instead; its rows are not stored. Offsets from the warp's first row tile fit 32 bits.
    u8* const ring = shared + warp * DEPTH * Slot::SIZE;
    const int first = min(first_row, row_tiles - 1), last = row_tiles - 1 - first;
    const bool second = row_warp >= SIDE_WARPS;
    const Planes w = side_of(p, operands.w, second);
    const u8* const low = w.low + s64(first) * tiles * F::LOW_BYTES;
    const u8* const high = w.high + s64(first) * tiles * F::HIGH_BYTES;
    const u8* const scale = w.scale + s64(first) * tiles * F::SCALE_BYTES;
    const u8* const group = w.group + s64(first) * groups * F::GROUP_BYTES;
    auto fetch = [&](int slot, int tile) {
        if (tile < end) {
            u8* const to = ring + slot * Slot::SIZE;
            auto plane = [&](const u8* source, int bytes, u8* to, int count, int at, bool again) {
                const int pieces = bytes / 16;
#pragma unroll
                for (int i = lane; i < ROW_TILES * pieces; i += WARP) {
                    const u8* const from = source + u32(min(i / pieces, last) * count + at) * bytes + i % pieces * 16;
                    if (again)
                        copy_async_again(shared_address(to + i * 16), from);
                    else
                        copy_async(to + i * 16, from, true);
                }
            };
            plane(low, F::LOW_BYTES, to, tiles, tile, false);
            if constexpr (F::HIGH_BYTES > 0) plane(high, F::HIGH_BYTES, to + Slot::HIGH_AT, tiles, tile, false);
            if constexpr (F::SCALE_BYTES > 0) plane(scale, F::SCALE_BYTES, to + Slot::SCALE_AT, tiles, tile, false);
            if constexpr (F::GROUP_BYTES > 0)
                plane(group, F::GROUP_BYTES, to + Slot::GROUP_AT, groups, tile / F::GROUP_TILES, true);
        }
        copy_commit();
    };
    int next = begin + warp % K_WARPS, fetched = next;  // tiles to compute and to fetch
#pragma unroll
    for (int slot = 0; slot < AHEAD; slot++, fetched += K_WARPS) fetch(slot, fetched);
    if constexpr (ROW_FACTORS<F>) {
        static_assert(ROWS / 8 <= THREADS, "a piece for each thread");
        const int row_tile = threadIdx.x / 2 % (SIDE_ROWS / 16), piece = threadIdx.x % 2 * 4;
        const Planes side = side_of(p, operands.w, threadIdx.x >= SIDE_ROWS / 8);
        if (threadIdx.x < ROWS / 8)
            copy_async(factors + threadIdx.x * 4, side.rows + min(block_row + row_tile, row_tiles - 1) * 8 + piece, true);
    }
    codecs.fill(threadIdx.x, THREADS);
    const C codec = codecs.of(second);
    int plain = 0;
    if constexpr (!P::GROUPED) plain = is_plain(p);
    asm volatile("" : "+r"(plain));  // kept, rather than found again in the end
    if (begin == end) copy_commit(), wait_for_operands<P>();  // no columns for this block of the cluster, but rows

    u8* const x_rows = shared + WARPS * DEPTH * Slot::SIZE;
    const int row_bytes = p.chunk * 128 + 16;  // 16 more: the 8 rows of a matrix load fall into different banks
    float acc[ROW_TILES][GROUPS][4] = {}, turned = 1;
    int slot = 0;
    for (int chunk = begin; chunk < end; chunk += p.chunk) {
        const int stop = min(chunk + p.chunk, end);
        if (chunk > begin) __syncthreads();
        const int pieces = (stop - chunk) * 8;
        auto wait = [&] {
            if (chunk == begin) wait_for_operands<P>();
        };
        auto fill = [&] {
            if (fetched == next + AHEAD * K_WARPS)
#pragma unroll
                for (int slot = AHEAD; slot < DEPTH; slot++, fetched += K_WARPS) fetch(slot, fetched);
        };
        bool staged = false;
        if constexpr (COLUMNS) {
            constexpr bool SIGNED = SIGNED_COLUMNS<F>;
            const u16* const from = operands.x + first_m * p.x_row + chunk * 64;
            const u16* const signs = SIGNED && operands.signs ? operands.signs + chunk * 64 : nullptr;
            const int columns = min(p.K - chunk * 64, pieces * 8);
            if (TOGETHER == 8 && batch <= 4)
                staged = stage_columns<SIGNED, THREADS, 4, TOGETHER / 4>(from, p.x_row, signs, batch, columns, pieces, x_rows,
                                                                         row_bytes, wait, fill);
            else
                staged = stage_columns<SIGNED, THREADS, TOGETHER, 1>(from, p.x_row, signs, batch, columns, pieces, x_rows,
                                                                     row_bytes, wait, fill);
        }
        if (!staged)
            stage_rows<SIGNED_COLUMNS<F>, THREADS, TOGETHER>(p, operands, x_row, batch, chunk * 64, pieces, x_rows, row_bytes,
                                                             wait, fill);
        if constexpr (CONVERTS && F::SCALING == UNSCALED) {
            __syncthreads();
            turned = turn_row<THREADS>(x_rows, p.signs + chunk * 64, pieces);
        } else if constexpr (CONVERTS) {
            round_rows<THREADS>(batch, pieces, x_rows, row_bytes);
        }
        __syncthreads();
        // Of lanes' 8 columns of a block: steps one after the other, or halves of both steps.
        const int piece = EXACT_PRODUCTS<F> ? lane / 8 % 2 * 2 + lane / 16 : lane / 8;
        u32 row[GROUPS];  // of batch rows beyond M the last is read instead
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            row[group] = shared_address(x_rows) + min(group * 8 + lane % 8, batch - 1) * row_bytes + piece * 16;
        for (; next < stop; next += K_WARPS) {
            copy_wait<DEPTH - 1>();
            __syncwarp();
            u32 x[GROUPS];
#pragma unroll
            for (int group = 0; group < GROUPS; group++) x[group] = row[group] + (next - chunk) * 128;
            if constexpr (F::SCALING == UNSCALED)
                add_values<F>(codec, ring + slot * Slot::SIZE, x, lane, acc);
            else if constexpr (EXACT_PRODUCTS<F>)
                add_products<F>(codec, ring + slot * Slot::SIZE, x, lane, acc);
            else if constexpr (GROUP_SCALES<F> && F::CODING == INTEGERS)
                add_group<F>(codec, ring + slot * Slot::SIZE, x, lane, acc);
            else
                add_codes<F>(codec, ring + slot * Slot::SIZE, x, lane, acc);
            __syncwarp();  // all lanes have read the slot
            fetch(slot, fetched);
            fetched += K_WARPS;
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
        }
    }

    // Sums of the warps along K: [k warp][row][batch row], then of the blocks of the cluster. A row's pairs of batch rows change
    // places, so that lanes which read the same ones of rows below each other meet no bank twice.
    copy_wait<0>();
    __syncthreads();
    float* const sums = reinterpret_cast<float*>(shared);
    auto place = [&](int n, int m) { return n * WIDTH + (m ^ n / (WARP / WIDTH) % (WIDTH / 2) * 2); };
    float* const mine = sums + (warp % K_WARPS * ROWS + warp / K_WARPS * ROW_TILES * 16) * WIDTH;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const int n = r * 16 + lane / 4 + j * 4, m = group * 8 + lane % 4 * 2;
                float unscale = (j ? C::UNSCALE_8 : C::UNSCALE) * turned;
                if constexpr (ROW_FACTORS<F>) unscale = factors[(warp / K_WARPS * ROW_TILES + r) * 8 + lane / 4][j / 2];
                float2 pair = make_float2(acc[r][group][j] * unscale, acc[r][group][j + 1] * unscale);
                *reinterpret_cast<float2*>(mine + place(n, m)) = pair;
            }
    __syncthreads();
    u32 matrix = span.matrix;
    asm volatile("" : "+r"(matrix));  // work the matrix out anew, rather than keep it in registers all the time
    const Matrix at = matrix_soon<F>(p, matrix);
    // Two batch rows at once: they lie together.
    auto total = [&](int n, int m) {
        float2 value = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < K_WARPS; w++) {
            float2 v = *reinterpret_cast<const float2*>(sums + w * ROWS * WIDTH + place(n, m));
            value.x += v.x, value.y += v.y;
        }
        return value;
    };
    auto store = [&](int n, int m, float2 value, float2 other) {
        if (block_row * 16 + n >= p.N) return;
        if constexpr (!P::GROUPED) {
            if (plain && p.out_dtype != FLOAT32) {  // mostly
                const s64 to = at.out + (first_m + m) * p.out_row + (block_row * 16 + n) * p.out_column;
                const u32 pair = pack(value.x * p.lift, value.y * p.lift, p.out_dtype);
                u16* const out = static_cast<u16*>(p.out) + to;
                *out = u16(pair);
                if (m + 1 < batch) out[p.out_row] = u16(pair >> 16);
                return;
            }
        }
#pragma unroll 1
        for (int e = 0; e < 2 && m + e < batch; e++)
            if constexpr (P::GROUPED)
                finish(p, at, x_row(m + e), p.works ? first_m + m + e : entries[m + e], block_row * 16 + n,
                       e ? value.y : value.x, e ? other.y : other.x);
            else
                finish(p, at, first_m + m + e, block_row * 16 + n, e ? value.y : value.x, plain);
    };
    const int pairs = (batch + 1) / 2;
    if constexpr (CLUSTER == 1) {
#pragma unroll 1
        for (int i = threadIdx.x; i < SIDE_ROWS * pairs; i += THREADS) {
            const int n = i % SIDE_ROWS, m = i / SIDE_ROWS * 2;
            store(n, m, total(n, m), P::GATED ? total(SIDE_ROWS + n, m) : float2());
        }
    } else {
#if __CUDA_ARCH__ >= 900
        for (int i = threadIdx.x; i < ROWS * WIDTH / 2; i += THREADS) {
            const int n = i * 2 / WIDTH, m = i * 2 % WIDTH;
            *reinterpret_cast<float2*>(sums + place(n, m)) = total(n, m);
        }
        cluster_sync();
        constexpr int SHARE = SIDE_ROWS / CLUSTER;
        auto of_cluster = [&](int n, int m) {
            float2 value = make_float2(0, 0);
#pragma unroll
            for (int other = 0; other < CLUSTER; other++) {
                float2 v;
                load_cluster(v, cluster_address(shared_address(sums + place(n, m)), other));
                value.x += v.x, value.y += v.y;
            }
            return value;
        };
#pragma unroll 1
        for (int i = threadIdx.x; i < SHARE * pairs; i += THREADS) {
            int n = rank * SHARE + i % SHARE, m = i / SHARE * 2;
            store(n, m, of_cluster(n, m), P::GATED ? of_cluster(SIDE_ROWS + n, m) : float2());
        }
        cluster_sync();  // no block leaves while another reads from it
#endif
    }
}

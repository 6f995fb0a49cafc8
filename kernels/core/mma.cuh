// The mma core: larger batches on GPUs without wgmma.
//
// A block owns WARPS x ROW_TILES x 16 rows of W and GROUPS x 8 batch rows. Steps of 64 columns, of W as the fragment
// layout has it and of X, go through a ring of STAGES in shared memory. Each warp dequantizes its own rows in
// registers, operand A, once for the whole batch tile.
#pragma once
#include "epilogue.cuh"

template <class F, class C, int GROUPS, int ROW_TILES, int WARPS, int STAGES, class P>
DEVICE void mma(const P& p) {
    constexpr int BATCH = GROUPS * 8, TILES = WARPS * ROW_TILES, ROWS = TILES * 16, THREADS = WARPS * WARP;
    constexpr int X_ROW = 128 + 16;  // 16 more: the 8 rows of a matrix load fall into different banks
    using Weights = WeightCopy<F, TILES, THREADS>;
    constexpr int WEIGHTS_AT = BATCH * X_ROW, STAGE = WEIGHTS_AT + Weights::SIZE;
    // After a codebook's table, or W's row plane, stages, whose place the staged sums take.
    Factors* const factors = reinterpret_cast<Factors*>(dynamic_shared() + C::TABLE_BYTES);
    u8* const shared = dynamic_shared() + C::TABLE_BYTES + (ROW_FACTORS<F> ? ROWS * 2 : 0);

    begin(p);
    const Span span = span_of<BATCH>(p);
    if (P::GROUPED && span.first == span.end) return wait_for_predecessor();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    C codec(p.values, lane);
    codec.fill(threadIdx.x, THREADS);
    wait_for_operands<P>();
    const Matrix at = matrix_of<F>(p, span.matrix);
    const int tiles = (p.K + 63) / 64, row_tiles = (p.N + 15) / 16;
    const int first_tile = blockIdx.x * TILES, first_m = span.first;

    Weights weights;
    weights.start(at.w, first_tile, row_tiles, tiles, 0, threadIdx.x);
    // Pieces of 16 bytes of x per thread and step: the same 8 columns of OWN rows.
    constexpr int OWN = BATCH * 8 / THREADS, APART = THREADS / 8;
    static_assert(OWN * THREADS == BATCH * 8, "every thread has as many");
    const int column = threadIdx.x % 8 * 8;
    const u16* x_from[OWN];
#pragma unroll
    for (int j = 0; j < OWN; j++)
        x_from[j] = at.x + min(first_m + int(threadIdx.x) / 8 + j * APART, span.end - 1) * p.x_row + column;
    auto copy = [&](int tile) {  // of batch rows beyond M the last is read instead
        if (tile < tiles) {
            u8* const stage = shared + tile % STAGES * STAGE;
            const bool exists = tile * 64 + column < p.K;
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                copy_async(stage + (threadIdx.x / 8 + j * APART) * X_ROW + column * 2, exists ? x_from[j] : at.x,
                           exists);
                x_from[j] += 64;
            }
            weights.copy(shared_address(stage + WEIGHTS_AT), threadIdx.x);
        }
        copy_commit();
    };
    if constexpr (ROW_FACTORS<F>) {  // with braces, as in decode.cuh
        for (int i = threadIdx.x; i < ROWS / 8; i += THREADS)
            copy_async(factors + i * 4, at.w.rows + min(first_tile + i / 2, row_tiles - 1) * 8 + i % 2 * 4, true);
    }
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; tile++) copy(tile);

    float acc[ROW_TILES][GROUPS][4] = {};
    for (int tile = 0; tile < tiles; tile++) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // this tile has arrived, and everyone has read the one whose place the next copy takes
        copy(tile + STAGES - 1);
        const u8* const stage = shared + tile % STAGES * STAGE;
        Tile<F> w[ROW_TILES];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) Weights::load(w[r], stage + WEIGHTS_AT, warp * ROW_TILES + r, 0, lane);
        // A matrix load brings two batch groups: lanes 0-7 and 8-15 point at columns 0-7 and 8-15 of the first.
        const u32 x = shared_address(stage) + (lane % 8 + lane / 16 * 8) * X_ROW + lane / 8 % 2 * 16;
#pragma unroll
        for (int h = 0; h < 4; h++) {
            u32 a[ROW_TILES][4];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) codec.weights(w[r], h, a[r]);
#pragma unroll
            for (int group = 0; group < GROUPS; group += 2) {
                u32 b[4];
                load_matrices(b, x + group * 8 * X_ROW + h * 32);
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    mma_half(acc[r][group], a[r], b[0], b[1], acc[r][group]);
                    mma_half(acc[r][group + 1], a[r], b[2], b[3], acc[r][group + 1]);
                }
            }
        }
    }
    copy_wait<0>();

    constexpr int LINE = ROWS + 4;  // [batch row][row of W], 16 batch rows at a time
    float* const staged = reinterpret_cast<float*>(shared);
    auto factor = [&](int n) { return ROW_FACTORS<F> ? factors[n / 16 * 8 + n % 8][n / 8 % 2] : 1; };
    // One copy of the code in the instruction cache: registers of all groups stand in it, under a condition.
#pragma unroll 1
    for (int first = 0; first < GROUPS; first += 2) {
        __syncthreads();
        float* const own = staged + lane % 4 * 2 * LINE + warp * ROW_TILES * 16 + lane / 4;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            if (first == group / 2 * 2)
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        own[(group % 2 * 8 + e % 2) * LINE + r * 16 + e / 2 * 8] = acc[r][group][e];
        __syncthreads();
        if constexpr (P::GROUPED) {
            auto load = [&](int row, int column) { return staged[row * LINE + column] * factor(column); };
            finish_group<ROWS, THREADS>(p, at, first_m + first * 8, span.end, first_tile * 16, threadIdx.x, load);
        } else {
            auto load = [&](int row, int column) {
                const float4 v = *reinterpret_cast<const float4*>(staged + row * LINE + column);
                if constexpr (!ROW_FACTORS<F>) return v;
                return make_float4(v.x * factor(column), v.y * factor(column + 1), v.z * factor(column + 2),
                                   v.w * factor(column + 3));
            };
            finish_rows<ROWS, THREADS>(p, at, first_m + first * 8, 16, first_tile * 16, threadIdx.x, load);
        }
    }
}

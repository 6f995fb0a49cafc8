// The mma core: larger batches on GPUs without wgmma.
//
// A block owns ROW_WARPS x ROW_TILES x 16 rows of W and, WARPS / ROW_WARPS warps beside each other, GROUPS x 8 batch
// rows each. Steps of 64 columns, of W as the fragment layout has it and of X, go through a ring of STAGES in shared
// memory. Each warp dequantizes its rows in registers, operand A, once for all its batch rows.
//
// Operands are made a turn ahead, or the tensor cores would wait for them: while they multiply 16 columns of one row
// tile, A of the next row tile is made, and while they do so with all of a warp's row tiles, B of the next 16 columns
// is loaded. So it goes on from stage to stage: behind the barrier both are there.
//
// Where tiles of one matrix are few, or those of the last round, blocks share their columns (SPLITS): each leaves its sums in
// global memory, and the one that comes last adds up all of them, in the order of their columns, and finishes the tile.
#pragma once
#include "epilogue.cuh"

// Where a block's columns begin, of those that share `tiles` steps of 64: at whole numbers of 256, as scales have them.
DEVICE int first_step(int tiles, int part, int parts) { return min((tiles + 3) / 4 * part / parts * 4, tiles); }

// What a block has: a tile, or, of the last `streamed` ones, one of several parts of its columns. (Blocks with parts come last:
// the first part of each tile, the second of each, and so on.)
template <int BATCH, int TILES, int SPLITS, class P>
struct Own {
    Span span;
    int first_tile;                        // row tile
    int shared = 0, part = 0, parts = 1;  // shared: the tile's number among those

    DEVICE explicit Own(const P& p) : span(span_of<BATCH>(p)), first_tile(blockIdx.x * TILES) {
        if constexpr (SPLITS) {
            const int whole = int(gridDim.x) - p.streamed * parts_of(p), block = block_again(), own = block - whole;
            if (own >= 0) shared = own % p.streamed, part = own / p.streamed, parts = parts_of(p);
            const int tiles_n = (p.N + TILES * 16 - 1) / (TILES * 16), tile = own < 0 ? block : whole + shared;
            span = {tile / tiles_n * BATCH, p.M, 0};
            first_tile = tile % tiles_n * TILES;
        }
    }
};

// Sums of a tile that blocks of THREADS threads share, added up: false of all blocks but the last one to come. Each thread's
// sums are its own, so all are read as they were written. The counter is zero again when the last block has come.
template <int THREADS, int ROW_TILES, int GROUPS>
DEVICE bool add_parts(float (&acc)[ROW_TILES][GROUPS][4], int tile, int part, int parts, float* partials, u32* counters) {
    constexpr int FOURS = ROW_TILES * GROUPS;  // of a thread
    const int thread = thread_again();
    float4* const all = reinterpret_cast<float4*>(partials) + s64(tile) * parts * (FOURS * THREADS) + thread;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        const float(&v)[4] = acc[i / GROUPS][i % GROUPS];
        __stcg(all + (part * FOURS + i) * THREADS, make_float4(v[0], v[1], v[2], v[3]));
    }
    __syncthreads();
    __shared__ bool last;
    if (thread == 0) {
        last = is_last(counters + tile, parts);
        if (last) read_all(), counters[tile] = 0;
    }
    __syncthreads();
    if (!last) return false;
#pragma unroll
    for (int i = 0; i < FOURS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[i / GROUPS][i % GROUPS][e] = 0;
    constexpr int AT_ONCE = FOURS < 16 ? 16 / FOURS : 1;  // parts that are on their way together
#pragma unroll AT_ONCE
    for (int from = 0; from < parts; from++)
#pragma unroll
        for (int i = 0; i < FOURS; i++) {
            float(&sum)[4] = acc[i / GROUPS][i % GROUPS];
            const float4 v = __ldcg(all + (from * FOURS + i) * THREADS);
            sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
    return true;
}

// TOGETHER: groups of a warp whose sums are staged at a time.
template <class F, class C, int GROUPS, int ROW_TILES, int ROW_WARPS, int WARPS, int STAGES, int TOGETHER, int SPLITS,
          class P>
DEVICE void mma(const P& p) {
    constexpr int BESIDE = WARPS / ROW_WARPS, BATCH = BESIDE * GROUPS * 8, THREADS = WARPS * WARP;
    constexpr int TILES = ROW_WARPS * ROW_TILES, ROWS = TILES * 16;
    constexpr int X_ROW = 128 + 16;  // 16 more: the 8 rows of a matrix load fall into different banks
    using Weights = WeightCopy<F, TILES, THREADS>;
    constexpr int WEIGHTS_AT = BATCH * X_ROW, STAGE = WEIGHTS_AT + Weights::SIZE;
    // After a codebook's table, or W's row plane, stages, whose place the staged sums take.
    Factors* const factors = reinterpret_cast<Factors*>(dynamic_shared() + C::TABLE_BYTES);
    u8* const shared = dynamic_shared() + C::TABLE_BYTES + (ROW_FACTORS<F> ? ROWS * 2 : 0);

    begin(p);
    using Here = Own<BATCH, TILES, SPLITS, P>;
    const Here here(p);
    const Span span = here.span;
    if (P::GROUPED && span.first == span.end) return wait_for_predecessor();
    const int lane = threadIdx.x % WARP, row_warp = threadIdx.x / WARP % ROW_WARPS;
    const int beside = threadIdx.x / (WARP * ROW_WARPS);
    C codec(p.values, lane);
    codec.fill(threadIdx.x, THREADS);
    wait_for_operands<P>();
    const Matrix at = matrix_of<F>(p, span.matrix);
    const int tiles = (p.K + 63) / 64, row_tiles = (p.N + 15) / 16;
    const int first_tile = here.first_tile, first_m = span.first;
    const int start = SPLITS ? first_step(tiles, here.part, here.parts) : 0;
    const int end = SPLITS ? first_step(tiles, here.part + 1, here.parts) : tiles;
    const int columns = SPLITS ? min(end * 64, p.K) : p.K;

    Weights weights;
    weights.start(at.w, first_tile, row_tiles, tiles, start, threadIdx.x);
    // Pieces of 16 bytes of x per thread and step: the same 8 columns of OWN rows.
    constexpr int OWN = BATCH * 8 / THREADS, APART = THREADS / 8;
    static_assert(OWN * THREADS == BATCH * 8, "every thread has as many");
    const int column = threadIdx.x % 8 * 8;
    // Of batch rows beyond M nothing is read, or others are, where there is no register to know them by. (If it were the last
    // one, which all blocks would read again and again, 16 rows would take longer than 32.)
    constexpr bool SKIPS = ROW_TILES * GROUPS <= 8;
    const int rows = SKIPS ? span.end - first_m - int(threadIdx.x) / 8 : BATCH;  // from the thread's first on
    const u16* x_from[OWN];
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int m = first_m + int(threadIdx.x) / 8 + j * APART, first = start * 64 + column;
        x_from[j] = at.x + (m < span.end ? m : m % span.end) * p.x_row + (first < p.K ? first : 0);
    }
    const u32 own_x_to = shared_address(shared) + threadIdx.x / 8 * X_ROW + column * 2;
    const u32 own_w_to = shared_address(shared) + WEIGHTS_AT + threadIdx.x * 16;
    auto copy_x = [&](int tile, int to, int j) {  // of columns beyond the last nothing is read: there is no branch for it
        const bool exists = tile * 64 + column < columns && j * APART < rows;
        copy_async(own_x_to + to + j * APART * X_ROW, x_from[j], exists);
        x_from[j] += 64;
    };
    auto copy_w = [&](int tile, int to) {
        const int left = SPLITS ? (tile * 64 < columns) + (tile * 64 + 64 < columns) : end - tile;  // a register fewer
        weights.template copy<true>(own_w_to + to, threadIdx.x, left);
        copy_commit();
    };
    // The braces are needed. Without them, where the condition is false, NVRTC 12.9 drops not only this loop but also
    // the next one, which has a `#pragma unroll`.
    if constexpr (ROW_FACTORS<F>) {
        for (int i = threadIdx.x; i < ROWS / 8; i += THREADS)
            copy_async(factors + i * 4, at.w.rows + min(first_tile + i / 2, row_tiles - 1) * 8 + i % 2 * 4, true);
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) {
#pragma unroll
        for (int j = 0; j < OWN; j++) copy_x(start + i, i * STAGE, j);
        copy_w(start + i, i * STAGE);
    }

    float acc[ROW_TILES][GROUPS][4] = {};
    Tile<F> w[ROW_TILES];
    // Operands A of row tiles, and B of steps h, in turn; of many groups one step's, which the next one's follow as they
    // were used.
    constexpr int STEPS = GROUPS == 16 ? 1 : 2, PAIRS = GROUPS / 2;
    u32 a[2][4], b[STEPS][PAIRS][4];
    // A matrix load brings two batch groups: lanes 0-7 and 8-15 point at columns 0-7 and 8-15 of the first.
    const u32 own_x = (beside * GROUPS * 8 + lane % 8 + lane / 16 * 8) * X_ROW + lane / 8 % 2 * 16;
    auto load_pair = [&](int from, int h, int pair) {
        load_matrices(b[h % STEPS][pair], shared_address(shared) + from + own_x + pair * 16 * X_ROW + h % 4 * 32);
    };
    auto load_x = [&](int from, int h) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) load_pair(from, h, pair);
    };
    const typename Weights::Reader reader(shared_address(shared) + WEIGHTS_AT, row_warp * ROW_TILES, 0, lane);
    auto load_w = [&](int from, int r) { reader.moved(from).load(w[r], r, 0); };

    copy_wait<STAGES - 2>();
    __syncthreads();  // the first tile has arrived
    load_x(0, 0);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) load_w(0, r);
    codec.weights(w[0], 0, a[0]);
    int stage = 0, freed = (STAGES - 1) * STAGE;  // where this tile is, and the next copy goes
    for (int tile = start; SPLITS ? tile * 64 < columns : tile < end; tile++) {
#pragma unroll
        for (int h = 0; h < 4; h++) {
            if (h == 3) {
                copy_wait<STAGES - 2>();
                __syncthreads();  // the next tile has arrived, and everyone has read this one, whose place is free
                freed = stage, stage = stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE;
            }
            if (STEPS == 2) load_x(stage, h + 1);
            if (h == 0)
#pragma unroll
                for (int j = 0; j < OWN; j++) copy_x(tile + STAGES - 1, freed, j);
            if (h == (STAGES > 2)) copy_w(tile + STAGES - 1, freed);
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                if (h == 3) load_w(stage, r);
                const int now = (h * ROW_TILES + r) % 2;
                codec.weights(w[(r + 1) % ROW_TILES], (h + (r + 1) / ROW_TILES) % 4, a[1 - now]);
#pragma unroll
                for (int group = 0; group < GROUPS; group++) {
                    const u32* const x = b[h % STEPS][group / 2] + group % 2 * 2;
                    mma_half(acc[r][group], a[now], x[0], x[1], acc[r][group]);
                    if (STEPS == 1 && r == ROW_TILES - 1 && group % 2) load_pair(stage, h + 1, group / 2);
                }
            }
        }
    }
    copy_wait<0>();
    if constexpr (SPLITS) {
        const Here again(p);
        if (again.parts > 1 && !add_parts<THREADS>(acc, again.shared, again.part, again.parts, p.partials, p.flags)) return;
    }
    // Where registers are scarce, asked for again.
    const Here still = SPLITS ? Here(p) : here;
    const auto own_thread = [] {
        if constexpr (SPLITS) return thread_again();
        else return threadIdx.x;
    }();
    const int own_lane = own_thread % WARP, own_row_warp = own_thread / WARP % ROW_WARPS;
    const int own_beside = own_thread / (WARP * ROW_WARPS);

    // [batch row][row of W], of a warp the batch rows of so many groups at a time.
    constexpr int LINE = ROWS + 4, OF_A_WARP = TOGETHER * 8;
    constexpr int SHARERS = THREADS / BESIDE;
    float* const staged = reinterpret_cast<float*>(shared) + own_beside * OF_A_WARP * LINE;
    const int thread = own_thread % SHARERS, own_m = still.span.first + own_beside * GROUPS * 8;
    auto factor = [&](int n) { return ROW_FACTORS<F> ? factors[n / 16 * 8 + n % 8][n / 8 % 2] : 1; };
    // One copy of the code in the instruction cache: registers of all groups stand in it, under a condition.
#pragma unroll 1
    for (int first = 0; first < GROUPS; first += TOGETHER) {
        __syncthreads();
        float* const own = staged + own_lane % 4 * 2 * LINE + own_row_warp * ROW_TILES * 16 + own_lane / 4;
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            if (first == group / TOGETHER * TOGETHER)
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        own[(group % TOGETHER * 8 + e % 2) * LINE + r * 16 + e / 2 * 8] = acc[r][group][e];
        __syncthreads();
        if constexpr (P::GROUPED) {
            auto load = [&](int row, int column) { return staged[row * LINE + column] * factor(column); };
            finish_group<ROWS, OF_A_WARP, SHARERS>(p, at, own_m + first * 8, span.end, still.first_tile * 16, thread, load);
        } else {
            auto load = [&](int row, int column) {
                const float4 v = *reinterpret_cast<const float4*>(staged + row * LINE + column);
                if constexpr (!ROW_FACTORS<F>) return v;
                return make_float4(v.x * factor(column), v.y * factor(column + 1), v.z * factor(column + 2),
                                   v.w * factor(column + 3));
            };
            finish_rows<ROWS, SHARERS, true>(p, at, own_m + first * 8, OF_A_WARP, still.first_tile * 16, thread, load);
        }
    }
}

// The mma core: batches above the decode core's, on every GPU with mma.sync.
//
// A block owns WARPS x ROW_TILES x 16 rows of W and GROUPS x 8 batch rows. X goes through a ring of STAGES tiles
// of 64 columns in shared memory, shared by all warps; each warp reads its own rows of W from global memory into
// registers, one tile ahead, and dequantizes them once for the whole batch tile.
#pragma once
#include "epilogue.cuh"

template <class F, template <int> class BatchOf, int GROUPS, int ROW_TILES, int WARPS, int STAGES>
DEVICE void mma(const Problem& p) {
    using Batch = BatchOf<GROUPS>;
    constexpr int BYTES = Batch::ELEMENT_BYTES, ROWS = GROUPS * 8;
    constexpr int ROW_BYTES = 64 * BYTES + 16;  // 16 extra: the 8 rows of a matrix load fall into different banks
    constexpr int STAGE_BYTES = ROWS * ROW_BYTES;
    extern __shared__ __align__(16) u8 shared[];  // [STAGES][ROWS][ROW_BYTES]

    const Matrix at = matrix_of<F, BYTES>(p, blockIdx.z);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int tiles = (p.K + 63) / 64, row_tiles = (p.N + 15) / 16;
    const int first_row = (blockIdx.x * WARPS + warp) * ROW_TILES, first_m = blockIdx.y * ROWS;
    const int x_columns = BYTES == 1 ? tiles * 64 : p.K;

    auto copy = [&](int tile) {
        constexpr int PIECES = 64 * BYTES / 16;
        u8* stage = shared + tile % STAGES * STAGE_BYTES;
        for (int i = threadIdx.x; i < ROWS * PIECES && tile < tiles; i += WARPS * WARP) {
            int m = i / PIECES, column = tile * 64 + i % PIECES * (16 / BYTES);
            bool exists = column < x_columns && first_m + m < p.M;
            const u8* from = exists ? at.x + ((first_m + m) * p.x_row + column) * BYTES : at.x;
            copy_async(stage + m * ROW_BYTES + i % PIECES * 16, from, exists);
        }
        copy_commit();
    };
    Tile<F> ahead[ROW_TILES];
    auto fetch = [&](int tile) {
        if (tile >= tiles) return;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
            ahead[r].load(at.w, s64(min(first_row + r, row_tiles - 1)) * tiles + tile, lane);
    };
    fetch(0);
#pragma unroll
    for (int tile = 0; tile < STAGES - 1; tile++) copy(tile);

    Accumulators<GROUPS> acc[ROW_TILES] = {};
    const u32 base = shared_address(shared) + lane % 8 * ROW_BYTES + Batch::lane_offset(lane);
    for (int tile = 0; tile < tiles; tile++) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // this tile has arrived, and everyone has read the one whose place the next copy takes
        copy(tile + STAGES - 1);
        Tile<F> now[ROW_TILES];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) now[r] = ahead[r];
        fetch(tile + 1);
        const u32 stage = base + tile % STAGES * STAGE_BYTES;
#pragma unroll
        for (int block = 0; block < 2; block++) {
            Batch batch;
            const float4* scales = at.scales + s64(tile * 2 + block) * p.scales_row + first_m / 2;
            batch.load([&](int group) { return stage + group * 8 * ROW_BYTES; }, scales, block, lane);
            if constexpr (F::HAS_MIN) batch.add_up();
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) batch.multiply(acc[r], now[r], block);
        }
    }
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int n = (first_row + r) * 16 + lane / 4 + (j >> 1) * 8;
                int m = first_m + group * 8 + lane % 4 * 2 + (j & 1);
                if (m < p.M && n < p.N) finish(p, at, m, n, acc[r][group][j]);
            }
}

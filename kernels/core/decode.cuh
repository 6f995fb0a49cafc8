// The decode core: small batches, bound by the bytes of W.
//
// A block owns ROW_TILES x 16 rows of W; its warps take the tiles along K in turn, so that together they read
// one contiguous stream. W goes from global memory straight into registers, DEPTH tiles ahead; X is staged in
// shared memory, a chunk of columns at a time and one chunk ahead; the warps' sums meet in shared memory, in a
// fixed order.
//
//      K ->  | w0 | w1 | w2 | w3 | w0 | w1 | ...      one row tile, a chunk = TURNS turns of all warps
#pragma once
#include "epilogue.cuh"

template <class F, template <int> class BatchOf, int GROUPS, int ROW_TILES, int WARPS, int DEPTH, int TURNS>
DEVICE void decode(const Problem& p) {
    using Batch = BatchOf<GROUPS>;
    constexpr int BYTES = Batch::ELEMENT_BYTES, CHUNK = TURNS * WARPS * 64, ROW_BYTES = CHUNK * BYTES + 16;
    // 16 bytes beyond a multiple of 128 put the 8 rows of a matrix load into different banks.
    static_assert(ROW_BYTES % 128 == 16, "bank conflicts");
    static_assert(TURNS % DEPTH == 0, "a register slot must keep its meaning from chunk to chunk");
    extern __shared__ __align__(16) u8 shared[];  // two chunks of the batch rows, and a row of zeros for those beyond

    const Matrix at = matrix_of<F, BYTES>(p, blockIdx.y);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int tiles = (p.K + 63) / 64, row_tiles = (p.N + 15) / 16, first_row = blockIdx.x * ROW_TILES;
    const int x_columns = BYTES == 1 ? tiles * 64 : p.K;  // columns that exist in x

    // A row tile beyond N reads the last one instead; its rows are not stored.
    Tile<F> ahead[DEPTH][ROW_TILES];
    auto fetch = [&](int slot, int tile) {
        if (tile < tiles) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
                ahead[slot][r].load(at.w, s64(min(first_row + r, row_tiles - 1)) * tiles + tile, lane);
        }
    };
#pragma unroll
    for (int slot = 0; slot < DEPTH; slot++) fetch(slot, warp + slot * WARPS);

    Accumulators<GROUPS> acc[ROW_TILES] = {};
    const int stage_bytes = p.M * ROW_BYTES;
    auto stage = [&](int chunk) {
        constexpr int PIECES = CHUNK * BYTES / 16;
        u8* to = shared + chunk / (TURNS * WARPS) % 2 * stage_bytes;
        for (int i = threadIdx.x; i < p.M * PIECES && chunk < tiles; i += WARPS * WARP) {
            int m = i / PIECES, piece = i % PIECES, column = chunk * 64 + piece * (16 / BYTES);
            bool exists = column < x_columns;
            const u8* from = at.x + (m * p.x_row + (exists ? column : 0)) * BYTES;
            copy_async(to + m * ROW_BYTES + piece * 16, from, exists);
        }
        copy_commit();
    };
    stage(0);
    for (int i = threadIdx.x; i < ROW_BYTES / 16; i += WARPS * WARP)
        reinterpret_cast<uint4*>(shared + 2 * stage_bytes)[i] = make_uint4(0, 0, 0, 0);

    for (int chunk = 0; chunk < tiles; chunk += TURNS * WARPS) {
        stage(chunk + TURNS * WARPS);
        copy_wait<1>();
        __syncthreads();
        u32 row[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            int m = group * 8 + lane % 8;
            int at_row = m < p.M ? chunk / (TURNS * WARPS) % 2 * stage_bytes + m * ROW_BYTES : 2 * stage_bytes;
            row[group] = shared_address(shared) + at_row + Batch::lane_offset(lane);
        }
        for (int turn = 0; turn < TURNS; turn += DEPTH) {
#pragma unroll
            for (int slot = 0; slot < DEPTH; slot++) {
                const int tile = chunk + (turn + slot) * WARPS + warp;
                if (tile >= tiles) break;
                const int offset = ((turn + slot) * WARPS + warp) * 64 * BYTES;
#pragma unroll
                for (int block = 0; block < 2; block++) {
                    Batch batch;
                    const float4* scales = at.scales + s64(tile * 2 + block) * p.scales_row;
                    batch.load([&](int group) { return row[group] + offset; }, scales, block, lane);
                    if constexpr (F::HAS_MIN) batch.add_up();
#pragma unroll
                    for (int r = 0; r < ROW_TILES; r++) batch.multiply(acc[r], ahead[slot][r], block);
                }
                fetch(slot, tile + DEPTH * WARPS);
            }
        }
        __syncthreads();  // this chunk has been read: the next copy takes its place
    }

    // Sums of all warps: [warp][row tile][row][batch row].
    copy_wait<0>();
    __syncthreads();
    float* sums = reinterpret_cast<float*>(shared);
    constexpr int WIDTH = GROUPS * 8, SIZE = ROW_TILES * 16 * WIDTH;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int n = r * 16 + lane / 4 + (j >> 1) * 8, m = group * 8 + lane % 4 * 2 + (j & 1);
                sums[warp * SIZE + n * WIDTH + m] = acc[r][group][j];
            }
    __syncthreads();
    for (int i = threadIdx.x; i < SIZE; i += WARPS * WARP) {
        int m = i / (ROW_TILES * 16), n = i % (ROW_TILES * 16), row_n = first_row * 16 + n;
        if (m >= p.M || row_n >= p.N) continue;
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += sums[w * SIZE + n * WIDTH + m];
        finish(p, at, m, row_n, total);
    }
}

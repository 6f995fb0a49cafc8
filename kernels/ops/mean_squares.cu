// Mean squares of rows of floats, whose terms are summed in order, as kquant.spread_over_rows in cuquant/formats does.
#include "../core/ieee.cuh"
#include "../core/ptx.cuh"

constexpr int PIECE = 16;  // columns of which there are registers for the next ones of all rows

// A lane has a row. Its warp brings a piece of 32 rows at a time, two rows at a time, and the next meanwhile. `columns` is a
// multiple of PIECE.
extern "C" __global__ void __launch_bounds__(WARP) mean_squares(
    const void* x, int dtype, s64 row_stride, s64 column_stride, s64 rows, s64 columns, float* out) {
    let_successor_start();
    wait_for_predecessor();
    __shared__ float tile[WARP][PIECE + 1];
    const int lane = threadIdx.x;
    const s64 first = s64(blockIdx.x) * WARP;
    const int last = int(min(rows - first, s64(WARP))) - 1;
    const int own_row = lane / PIECE, own = lane % PIECE;
    float next[PIECE], sum = 0;
    auto load = [&](s64 column) {
#pragma unroll
        for (int two = 0; two < PIECE; two++) {
            const s64 row = first + min(2 * two + own_row, last);
            next[two] = load_float(x, row * row_stride + (column + own) * column_stride, dtype);
        }
    };
    load(0);
#pragma unroll 1
    for (s64 column = 0; column < columns; column += PIECE) {
        __syncwarp();  // all have read what was there before
#pragma unroll
        for (int two = 0; two < PIECE; two++) tile[2 * two + own_row][own] = next[two];
        __syncwarp();
        if (column + PIECE < columns) load(column + PIECE);
#pragma unroll
        for (int j = 0; j < PIECE; j++) sum = ieee_add(sum, ieee_mul(tile[lane][j], tile[lane][j]));
    }
    if (lane <= last) out[first + lane] = ieee_div(sum, float(columns));
}

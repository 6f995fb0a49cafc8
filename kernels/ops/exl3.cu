// What surrounds products with EXL3 weights: W^T = diag(suh) H V H diag(svh), so that with x' = x diag(suh) H
//
//     y = act((x' V H) diag(svh) + bias) + residual
//
// Of mixtures of experts see moe_exl3.cu.
#include "../core/epilogue.cuh"
#include "../core/turned_rows.cuh"
#include "../formats/exl3.cuh"
#include "../formats/rows.cuh"

constexpr int RESULT_THREADS = 128;

// Float rows of any type to those of x' in float16, divided by powers of two, a block a row.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
turn_rows(const void* x, int dtype, s64 row_stride, s64 column_stride, int K, uint4* out, float* unscale,
          const u16* suh) {
    let_successor_start();
    const s64 row = blockIdx.x;
    const FloatRow from = {x, row * row_stride, column_stride, dtype, K};
    const int pieces = K / 8;
    uint4 factors[KEPT];
    float kept[KEPT][8];
    auto fetch = [&](int first) { fetch_pieces(suh, pieces, first, factors); };
    auto numbers = [&](int i, float(&to)[8]) { from.floats(from.load(i), to); };
    auto load = [&](int first) { turned_pieces(pieces, first, factors, numbers, kept); };
    fetch(last_pieces(pieces));  // they are fixed, as weights are
    wait_for_predecessor();
    const float factor = turned_to_halves(pieces, out + row * pieces, kept, fetch, load);
    if (threadIdx.x == 0) unscale[row] = factor;
}

// Results y of rows of N sums x' V, in float16 or (`wide`) float32, to be multiplied by `factor` and, unless null, the
// row's own. A thread has eight.
extern "C" __global__ void __launch_bounds__(RESULT_THREADS)
turn_results(const void* sums, int wide, int N, s64 out_row, s64 out_column, s64 residual_row, s64 residual_column,
             int out_dtype, int bias_dtype, int residual_dtype, int activation, float factor, void* out,
             const void* bias, const void* residual, const float* unscale, const u16* svh) {
    let_successor_start();
    const int row = blockIdx.x, n = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const bool exists = n < N;
    float v[8] = {}, scale[8] = {}, added[8] = {};
    if (exists) load_halves(svh + n, scale);  // fixed, as weights are
    wait_for_predecessor();
    const s64 from = s64(row) * N + n;
    if (exists && wide) load_floats(static_cast<const float*>(sums) + from, v);
    if (exists && !wide) load_halves(static_cast<const u16*>(sums) + from, v);
    const float2 factors = safe_factors(unscale ? unscale[row] : 1, factor * TURNED);
    turn(v);
    if (!exists) return;
    if (bias)
#pragma unroll
        for (int j = 0; j < 8; j++) added[j] = load_float(bias, n + j, bias_dtype);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = v[j] * scale[j] * factors.x * factors.y + added[j];
    if (activation) activate(v, activation);
    if (residual)
#pragma unroll
        for (int j = 0; j < 8; j++)
            v[j] += load_float(residual, row * residual_row + (n + j) * residual_column, residual_dtype);
    const s64 at = row * out_row + n * out_column;
    const int size = out_dtype == FLOAT32 ? 4 : 2;
    u8* const to = static_cast<u8*>(out) + at * size;
    if (out_column != 1 || u64(to) % 16) {
#pragma unroll
        for (int j = 0; j < 8; j++) store_float(out, at + j * out_column, out_dtype, v[j]);
    } else if (size == 4) {
        reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
        reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(pack(v[0], v[1], out_dtype), pack(v[2], v[3], out_dtype),
                                                   pack(v[4], v[5], out_dtype), pack(v[6], v[7], out_dtype));
    }
}

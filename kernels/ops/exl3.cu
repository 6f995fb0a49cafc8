// What surrounds products with EXL3 weights: W^T = diag(suh) H V H diag(svh), so that with x' = x diag(suh) H
//
//     y = act((x' V H) diag(svh) + bias) + residual
//
// Of mixtures of experts rows are in their entries' places (ops/moe.cu), and each expert has a suh and a svh of its own:
//
//     turn_entries -> gate, turn_entries -> up -> turn_hidden -> down -> turn_sums
#include "../core/epilogue.cuh"
#include "../formats/exl3.cuh"
#include "../formats/rows.cuh"

constexpr int KEPT = 4;  // pieces of a row

// The block's pieces of an array of float16 numbers from `first` on, zeros beyond.
template <int KEPT>
DEVICE void fetch_pieces(const u16* from, int pieces, int first, uint4 (&to)[KEPT]) {
#pragma unroll
    for (int p = 0; p < KEPT; p++) {
        const int i = first + p * blockDim.x + threadIdx.x;
        to[p] = i < pieces ? reinterpret_cast<const uint4*>(from)[i] : make_uint4(0, 0, 0, 0);
    }
}

// Those of a row that `numbers` gives, times factors, turned.
template <int KEPT, class Numbers>
DEVICE void turned_pieces(int pieces, int first, const uint4 (&factors)[KEPT], Numbers numbers, float (&to)[KEPT][8]) {
#pragma unroll
    for (int p = 0; p < KEPT; p++) {
        const int i = first + p * blockDim.x + threadIdx.x;
        if (i - threadIdx.x % WARP >= pieces) continue;  // 16 lanes have a turn to themselves, but shuffles are warps'
        float factor[8];
        to_floats(factors[p], factor);
        numbers(min(i, pieces - 1), to[p]);
#pragma unroll
        for (int j = 0; j < 8; j++) to[p][j] *= factor[j] * TURNED;
        turn(to[p]);
    }
}

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
    fetch(last_pieces<KEPT>(pieces));  // they are fixed, as weights are
    wait_for_predecessor();
    const float factor = turned_to_halves(pieces, out + row * pieces, kept, fetch, load);
    if (threadIdx.x == 0) unscale[row] = factor;
}

// Results y of rows of N sums x' V, in float16 or (`wide`) float32, to be multiplied by `factor` and, unless null, the
// row's own. A thread has eight.
extern "C" __global__ void __launch_bounds__(128)
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

// An entry of a mixture, which a block has: the place of its row, or NOWHERE, and its expert.
struct Entry {
    s64 place, expert;

    DEVICE Entry(const Routing& expert_of, const int* places)
        : place(places[blockIdx.x]), expert(expert_of.fresh(blockIdx.x)) {}
};

// Rows of float16 numbers, over `factors`, to those of x'.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
turn_entries(const u16* rows, const float* factors, int K, const void* ids, int wide, int tokens, int top_k, int experts,
             const int* places, u16* out, float* unscale, const u16* suh) {
    let_successor_start();
    wait_for_predecessor();
    const Entry own({ids, wide, tokens, top_k, experts}, places);
    if (own.place == NOWHERE) return;
    const int pieces = K / 8;
    uint4 by[KEPT];
    float kept[KEPT][8];
    auto fetch = [&](int first) { fetch_pieces(suh + own.expert * K, pieces, first, by); };
    auto numbers = [&](int i, float(&to)[8]) { load_halves(rows + own.place * K + i * 8, to); };
    auto load = [&](int first) { turned_pieces(pieces, first, by, numbers, kept); };
    fetch(last_pieces<KEPT>(pieces));
    uint4* const to = reinterpret_cast<uint4*>(out + own.place * K);
    const float factor = turned_to_halves(pieces, to, kept, fetch, load);
    if (threadIdx.x == 0) unscale[own.place] = factor * factors[own.place];
}

// Eight results of a row's float32 sums: turned, times those of svh and a factor. All lanes of a warp come here.
DEVICE void turned_sums(const float* sums, const u16* svh, float factor, float (&to)[8]) {
    float scale[8];
    load_floats(sums, to);
    load_halves(svh, scale);
    turn(to);
#pragma unroll
    for (int j = 0; j < 8; j++) to[j] *= scale[j] * factor;
}

// What `down` multiplies, x' of act(gate's results) * up's, K in a row. Factors are those of sums, but for the turn's.
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
turn_hidden(const float* gate, const float* up, int K, const void* ids, int wide, int tokens, int top_k, int experts,
            const int* places, u16* out, float* unscale, const u16* gate_svh, const u16* up_svh, const u16* suh,
            float gate_factor, float up_factor, int activation) {
    let_successor_start();
    wait_for_predecessor();
    const Entry own({ids, wide, tokens, top_k, experts}, places);
    if (own.place == NOWHERE) return;
    const s64 row = own.place * K, sides = own.expert * K;
    const int pieces = K / 8;
    uint4 by[KEPT];
    float kept[KEPT][8];
    auto fetch = [&](int first) { fetch_pieces(suh + sides, pieces, first, by); };
    auto numbers = [&](int i, float(&to)[8]) {
        float other[8];
        turned_sums(gate + row + i * 8, gate_svh + sides + i * 8, gate_factor * TURNED, to);
        turned_sums(up + row + i * 8, up_svh + sides + i * 8, up_factor * TURNED, other);
        if (activation) activate(to, activation);
#pragma unroll
        for (int j = 0; j < 8; j++) to[j] *= other[j];
    };
    auto load = [&](int first) { turned_pieces(pieces, first, by, numbers, kept); };
    fetch(last_pieces<KEPT>(pieces));
    const float factor = turned_to_halves(pieces, reinterpret_cast<uint4*>(out + row), kept, fetch, load);
    if (threadIdx.x == 0) unscale[own.place] = factor;
}

// Results in place of sums, N in a row. A thread has eight.
extern "C" __global__ void __launch_bounds__(128)
turn_sums(float* sums, int N, const void* ids, int wide, int tokens, int top_k, int experts, const int* places,
          const u16* svh, float factor) {
    let_successor_start();
    wait_for_predecessor();
    const Entry own({ids, wide, tokens, top_k, experts}, places);
    if (own.place == NOWHERE) return;
    const int n = (blockIdx.y * blockDim.x + threadIdx.x) * 8, whole = min(n, N - 8);
    float* const at = sums + own.place * N;
    float v[8];
    turned_sums(at + whole, svh + own.expert * N + whole, factor * TURNED, v);
    if (n >= N) return;
    reinterpret_cast<float4*>(at + n)[0] = make_float4(v[0], v[1], v[2], v[3]);
    reinterpret_cast<float4*>(at + n)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

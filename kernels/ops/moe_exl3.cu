// What surrounds the products of a mixture of EXL3 experts, each of which has a suh and a svh of its own (exl3.cu). Rows are
// in their entries' places (moe.cu):
//
//     turn_entries -> gate, turn_entries -> up -> turn_hidden -> down -> turn_sums
#include "../core/epilogue.cuh"
#include "../core/turned_rows.cuh"

constexpr int RESULT_THREADS = 128;

// An entry, which a block has: the place of its row, or NOWHERE, and its expert.
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
    fetch(last_pieces(pieces));
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
        if (activation) activate<true>(to, activation);
#pragma unroll
        for (int j = 0; j < 8; j++) to[j] *= other[j];
    };
    auto load = [&](int first) { turned_pieces(pieces, first, by, numbers, kept); };
    fetch(last_pieces(pieces));
    const float factor = turned_to_halves(pieces, reinterpret_cast<uint4*>(out + row), kept, fetch, load);
    if (threadIdx.x == 0) unscale[own.place] = factor;
}

// Results in place of sums, N in a row. A thread has eight.
extern "C" __global__ void __launch_bounds__(RESULT_THREADS)
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

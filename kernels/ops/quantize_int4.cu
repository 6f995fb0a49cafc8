// Floats to int4 groups.
#include "../formats/encode_int4.cuh"

constexpr bool ASYMMETRIC = CUQUANT_ASYMMETRIC;
constexpr int CODES_AT = ASYMMETRIC ? 3 : 2;

// Rows of floats, with strides in elements, to groups of `group` weights, of `lanes` lanes each (a power of two, at
// most what the weights of a group need). `first_bad` becomes the lowest row that holds NaN or infinity or has a scale
// that overflows (it starts as the greatest u64).
extern "C" __global__ void __launch_bounds__(256) quantize_int4(
    const void* x, int dtype, s64 row_stride, s64 column_stride, s64 rows, s64 groups_per_row, u8* out,
    u64* first_bad, int group, int lanes) {
    let_successor_start();
    wait_for_predecessor();
    const s64 own = (s64(blockIdx.x) * 256 + threadIdx.x) / lanes;
    const s64 index = min(own, rows * groups_per_row - 1);  // beyond the last: it again
    // Dense rows are one row: a 64-bit division is a function call.
    s64 first = index * group;
    if (column_stride != 1 || row_stride != groups_per_row * group) {
        const s64 row = index / groups_per_row;
        first = row * row_stride + (index - row * groups_per_row) * group * column_stride;
    }
    const int lane = threadIdx.x % lanes, pieces = group / MINE;
    float values[MINE];
    auto load = [&](int piece) {
        load_elements<8>(x, first + s64(piece) * MINE * column_stride, row_stride, column_stride, dtype, values);
    };
    load(lane);
    float low = ASYMMETRIC ? 0 : values[0], high = low;
    for (int piece = lane;;) {
#pragma unroll
        for (int j = 0; j < MINE; j++) low = ieee_min(low, values[j]), high = ieee_max(high, values[j]);
        piece += lanes;
        if (piece >= pieces) break;
        load(piece);
    }
    for (int step = lanes / 2; step; step /= 2) {
        low = ieee_min(low, __shfl_xor_sync(~0u, low, step));
        high = ieee_max(high, __shfl_xor_sync(~0u, high, step));
    }
    const u32 stored = float_to_half(int4_scale<ASYMMETRIC>(low, high));
    const float scale = half_to_float(u16(stored)), inverse = scale > 0 ? ieee_div(1, scale) : 0;
    const int zero = int4_zero<ASYMMETRIC>(low, scale, inverse);
    u8* const to = out + index * (CODES_AT + group / 2);
    for (int piece = lane; piece < pieces; piece += lanes) {
        if (pieces > lanes) load(piece);  // else it is still there
        store_int4(values, scale, inverse, zero, to + CODES_AT + piece * (MINE / 2));
    }
    if (lane) return;
    to[0] = u8(stored), to[1] = u8(stored >> 8);
    if constexpr (ASYMMETRIC) to[2] = u8(zero);
    if ((stored & 0x7c00) == 0x7c00) atomicMin(first_bad, u64(index / groups_per_row));
}

// Floats to int4 groups.
#include "../formats/encode_int4.cuh"

constexpr int THREADS = 256;
constexpr bool ASYMMETRIC = CUQUANT_ASYMMETRIC;
constexpr int CODES_AT = ASYMMETRIC ? 3 : 2;
constexpr int GROUP = CUQUANT_GROUP;  // weights of a group, 16 for each of a power of two of lanes; or 0

// Rows of floats, with strides in elements, to groups of GROUP weights; if that is 0, of `any_group` weights, of
// `any_lanes` lanes each (a power of two, at most what the weights of a group need).
extern "C" __global__ void __launch_bounds__(THREADS) quantize_int4(
    const void* x, int dtype, s64 row_stride, s64 column_stride, s64 rows, s64 groups_per_row, u8* out,
    Found* found, int any_group, int any_lanes) {
    let_successor_start();
    wait_for_predecessor();
    // Groups of which a thread has one piece go through shared memory: their bytes are neither aligned nor whole
    // sectors, those of 16 groups or more are.
    constexpr int MOST = THREADS / 2 * (CODES_AT + MINE);
    __shared__ __align__(16) u8 staged[MOST];
    const int group = GROUP ? GROUP : any_group, lanes = GROUP ? GROUP / MINE : any_lanes;
    const int lane_bits = __ffs(lanes) - 1, lane = threadIdx.x & lanes - 1;
    const int pieces = group / MINE, bytes = CODES_AT + group / 2, groups = THREADS >> lane_bits;
    const bool is_staged = pieces == lanes && groups >= 16;
    const s64 start = s64(blockIdx.x) * groups;
    int count = groups;
    if (blockIdx.x + 1 == gridDim.x) count = int(rows * groups_per_row - start);
    const int mine = min(int(threadIdx.x >> lane_bits), count - 1);  // beyond the last: it again
    const s64 index = start + mine;
    const bool dense = are_dense(x, row_stride, column_stride, groups_per_row * group);
    s64 first = index * group;
    if (!dense) {
        const s64 row = index / groups_per_row;
        first = row * row_stride + (index - row * groups_per_row) * group * column_stride;
    }
    float values[MINE];
    auto load = [&](int piece) {
        return load_elements<8>(x, first + s64(piece * MINE) * column_stride, row_stride, column_stride, dtype, values);
    };
    Extent range = dense ? load_in_order<8, true>(x, first + lane * MINE, dtype, values) : load(lane);
    int piece = lane;
    while (piece + lanes < pieces) {
        piece += lanes;
        const Extent next = load(piece);
        range = {ieee_min(range.low, next.low), ieee_max(range.high, next.high)};
    }
    for (int step = lanes / 2; step; step /= 2) {
        range.low = ieee_min(range.low, __shfl_xor_sync(~0u, range.low, step));
        range.high = ieee_max(range.high, __shfl_xor_sync(~0u, range.high, step));
    }
    if (ASYMMETRIC) range = {ieee_min(range.low, 0), ieee_max(range.high, 0)};
    const float exact = int4_scale<ASYMMETRIC>(range.low, range.high);
    const u32 stored = float_to_half(exact);
    const float scale = half_to_float(u16(stored)), inverse = scale > 0 ? ieee_div(1, scale) : 0;
    const int zero = int4_zero<ASYMMETRIC>(range.low, scale, inverse);
    if (lane == 0 && (stored & 0x7c00) == 0x7c00) atomicMin(&found->first_bad, u64(index / groups_per_row));
    const bool own = lane == 0 && int(threadIdx.x >> lane_bits) < count;
    add_lost(found, becomes_coarse<CUQUANT_FINE_FROM>(exact), own, pieces);
    auto store_scale = [&](u8* to) {
        if (lane) return;
        to[0] = u8(stored), to[1] = u8(stored >> 8);
        if constexpr (ASYMMETRIC) to[2] = u8(zero);
    };
    // Backward, since the last piece is still there.
    u32 words[2];
    for (u8* const to = out + index * bytes;;) {
        int4_codes(values, dtype, scale, inverse, zero, words);
        if (is_staged) break;
        store_int4(to + CODES_AT + piece * (MINE / 2), words);
        piece -= lanes;
        if (piece < 0) return store_scale(to);
        load(piece);
    }
    const u32 header = stored | (ASYMMETRIC ? zero << 16 : 0);
    store_group<CODES_AT>(reinterpret_cast<u32*>(staged), mine * bytes, header, words, lane, lanes);
    store_staged<MOST, THREADS>(out + start * bytes, staged, count * bytes);
}

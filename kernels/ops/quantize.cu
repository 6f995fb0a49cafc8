// Floats to blocks.
#include "../formats/encode_fp4.cuh"
#include "../formats/encode_kbit.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256;
// Blocks that a multiprocessor is to hold. With eight, all 2048 threads of sm_80's and sm_90's (sm_86's and sm_89's hold six
// blocks, sm_75's four), enough is on its way; codes that are looked up need more registers than are left then, and ptxas
// chooses (0).
constexpr int RESIDENT = LOOKED_UP<Format> ? 0 : 8;
constexpr int PARTS = Format::COLUMNS / 32, BLOCKS = THREADS / 2 / PARTS;  // of 32 elements; bytes a multiple of 16

// A thread's half of a block of integer codes to its place; false where a scale overflows float16. `lost`: whether it is
// too coarse.
template <class F>
DEVICE bool encode_integers(const float (&x)[MINE], Extent extent, int half, u8* to, bool& lost) {
    int q[MINE];
    u32 words[4];
    const Scales scales = encode<F>(x, extent, half, q);
    pack_codes<F>(q, words);
    const u32 scale = scale_bits<F>(scales, words);
    store_codes<F>(to, half, words);
    if (half == 0) F::store_scale_bits(to, scale);
    lost = becomes_coarse(scales.d);
    return (scale & 0x7c00) != 0x7c00 && (scale >> 16 & 0x7c00) != 0x7c00;
}

// Rows of K floats, with strides in elements, to blocks; `found` may be null. `thresholds` and `decoded`: of a codebook
// (encode_kbit.cuh); `scale`: what the elements of a tensor are divided by first (nvfp4).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) quantize(
    const void* x, int dtype, s64 row_stride, s64 column_stride, s64 rows, s64 blocks_per_row, u8* out,
    Found* found, const Thresholds* thresholds, int decoded, float scale) {
    let_successor_start();
    wait_for_predecessor();
    // Through shared memory: a block's bytes are neither aligned nor whole sectors, those of many are.
    __shared__ __align__(16) u8 staged[BLOCKS * Format::BLOCK_BYTES];
    const s64 first = s64(blockIdx.x) * BLOCKS;
    const bool last = blockIdx.x + 1 == gridDim.x;
    const int count = last ? int(rows * blocks_per_row - first) : BLOCKS;
    const int half = threadIdx.x % 2, part = threadIdx.x / 2 % PARTS, own = threadIdx.x / 2 / PARTS;
    const int mine = min(own, count - 1);  // threads beyond the last block repeat it
    constexpr int APART = Format::SCALING == E4M3 ? 8 : 16;  // a scale's elements in one thread
    constexpr bool SIGNED = Format::CODING == INTEGERS && Format::BITS != 8;

    const int within = part * 32 + half * (24 - APART);  // the block, the thread's first element
    float values[MINE];
    Extent extent;
    if (are_dense(x, row_stride, column_stride, blocks_per_row * Format::COLUMNS)) {
        const s64 at = first * Format::COLUMNS + (mine * Format::COLUMNS + within);
        extent = load_in_order<APART, SIGNED>(x, at, dtype, values);
    } else {
        const s64 row = (first + mine) / blocks_per_row, block = first + mine - row * blocks_per_row;
        const s64 at = row * row_stride + (block * Format::COLUMNS + within) * column_stride;
        extent = load_elements<APART, SIGNED>(x, at, row_stride, column_stride, dtype, values);
    }
    if constexpr (Format::CODING != INTEGERS && APART == 16)
        extent.high = ieee_max(extent.high, __shfl_xor_sync(~0u, extent.high, 1));
    const bool is_zero = __float_as_int(extent.high) == 0;  // subnormal numbers are not
    if (Format::SCALING == E4M3 && scale != 1) {
#pragma unroll
        for (int j = 0; j < MINE; j++) values[j] = ieee_div(values[j], scale);
        extent = extent_of<SIGNED>(values);
    }
    u8* const to = staged + own * Format::BLOCK_BYTES;
    bool good, lost = false;
    u32 stored = 1;
    if constexpr (LOOKED_UP<Format>) {
        good = encode_lookup<Format>(values, extent.high, dtype, half, to, *thresholds, decoded, stored);
    } else if constexpr (Format::CODING == E2M1) {
        good = encode_e2m1<Format>(values, extent.high, part, half, to, stored);
    } else {
        good = encode_integers<Format>(values, extent, half, to, lost);
    }
    if (!good && found) atomicMin(&found->first_bad, u64((first + mine) / blocks_per_row));
    if constexpr (Format::SCALING == E4M4 || Format::SCALING == E4M3) lost = stored == 0 && !is_zero;
    if constexpr (Format::CODING != INTEGERS && Format::SCALING == HALF) lost = is_coarse(stored) && !is_zero;
    if constexpr (Format::SCALING != E8M0) add_lost(found, lost, own < count);
    constexpr int MOST = BLOCKS * Format::BLOCK_BYTES;
    u8* const all = out + first * Format::BLOCK_BYTES;
    if (last)
        store_staged<MOST, THREADS>(all, staged, count * Format::BLOCK_BYTES);
    else
        store_staged<MOST, THREADS>(all, staged, MOST);
}

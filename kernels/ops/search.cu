// Floats to blocks of k-quants and IQ4, whose scales are searched for, and to ggml's by importance.
#include "../formats/encode_ggml.cuh"
#include "../formats/encode_iq4.cuh"
#include "../formats/encode_kquant.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256;
constexpr int PARTS = Format::COLUMNS / OWN, BLOCKS = THREADS / PARTS;

constexpr bool BY_IMPORTANCE = CUQUANT_BY_IMPORTANCE;

// Quantizes rows as `quantize` in quantize.cu does; if BY_IMPORTANCE, with that of columns, [K], and for formats that
// are encoded BY_ROW with mean squares of rows.
extern "C" __global__ void __launch_bounds__(THREADS, 1) search(
    const void* x, int dtype, s64 row_stride, s64 column_stride, s64 rows, s64 blocks_per_row, u8* out, Found* found,
    const float* importance, const float* mean_squares) {
    let_successor_start();
    wait_for_predecessor();
    __shared__ __align__(16) u8 staged[BLOCKS * Format::BLOCK_BYTES];
    const s64 first = s64(blockIdx.x) * BLOCKS;
    const int count = int(min(rows * blocks_per_row - first, s64(BLOCKS)));
    const int mine = min(int(threadIdx.x) / PARTS, count - 1);  // threads beyond the last block repeat it
    const s64 row = (first + mine) / blocks_per_row, block = first + mine - row * blocks_per_row;
    const s64 at = row * row_stride + (block * Format::COLUMNS + threadIdx.x % PARTS * OWN) * column_stride;
    float values[OWN];
    bool good = true;
#pragma unroll
    for (int half = 0; half < OWN; half += MINE) {
        float (&own)[MINE] = reinterpret_cast<float (&)[MINE]>(values[half]);
        load_elements<8>(x, at + half * column_stride, row_stride, column_stride, dtype, own);
    }
#pragma unroll
    for (int j = 0; j < OWN; j++) good &= is_finite(values[j]);
    u32 d = 0;
    float weights[OWN] = {};
    if (BY_IMPORTANCE) {
        const float4* const from =
            reinterpret_cast<const float4*>(importance + block * Format::COLUMNS + threadIdx.x % PARTS * OWN);
#pragma unroll
        for (int four = 0; four < OWN / 4; four++) {
            const float4 v = from[four];
            weights[four * 4] = v.x, weights[four * 4 + 1] = v.y, weights[four * 4 + 2] = v.z, weights[four * 4 + 3] = v.w;
        }
    }
    if constexpr (BY_ROW<Format>) spread_by(mean_squares[row], values, weights, weights);
    good &= encode_block<BY_IMPORTANCE>(Format(), values, weights, staged + mine * Format::BLOCK_BYTES, d);
    if (!good && found) atomicMin(&found->first_bad, u64(row));
    // If any of the block's threads needs its scale.
    const u32 lanes = __ballot_sync(~0u, need_scale<Format::HAS_MIN>(values)) >> threadIdx.x % WARP / PARTS * PARTS;
    const bool needed = lanes & ((1 << PARTS) - 1);
    add_lost(found, is_coarse<CUQUANT_FINE_FROM>(d) && needed, int(threadIdx.x) / PARTS < count, OWN / 16);
    store_staged<BLOCKS * Format::BLOCK_BYTES, THREADS>(out + first * Format::BLOCK_BYTES, staged,
                                                        count * Format::BLOCK_BYTES);
}

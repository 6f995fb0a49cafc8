// Activations as operand B wants them: float16 rows, or 8-bit codes in the order of core/tile.cuh.
//
// Rows that are not float16 are divided by a power of two that puts their peak between 2^13 and 2^14: exact, and
// undone in the float32 epilogue. What is 2^-37 of the peak or less is lost.
#include "../core/ieee.cuh"
#include "../formats/q8_1.cuh"

constexpr int THREADS = 256;

DEVICE u32 block_max(u32 value) {
    __shared__ u32 warps[THREADS / WARP];
#pragma unroll
    for (int step = 16; step; step /= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = value;
    __syncthreads();
    value = warps[0];
#pragma unroll
    for (int w = 1; w < THREADS / WARP; w++) value = max(value, warps[w]);
    return value;
}

// One row by one block of threads; `at(k)` is element k.
template <class Load>
DEVICE void normalise(const Load& at, int K, u16* out, float* unscale) {
    u32 peak = 0;
    for (int k = threadIdx.x; k < K; k += THREADS) peak = max(peak, magnitude(at(k)));
    int exponent = int(block_max(peak) >> 23) - 127;
    // Rows of zeros (or subnormal numbers) and rows with NaN or infinity are left as they are.
    int shift = exponent == -127 || exponent == 128 ? 0 : min(13 - exponent, 126);
    float scale = __int_as_float((shift + 127) << 23);
    for (int k = threadIdx.x; k < K; k += THREADS) out[k] = float_to_half(at(k) * scale);
    if (threadIdx.x == 0) *unscale = __int_as_float((127 - shift) << 23);
}

// Float rows with strides in elements to float16 rows [rows][K]; float16 itself is copied.
extern "C" __global__ void __launch_bounds__(THREADS)
rows_to_half(const void* x, int dtype, s64 row_stride, s64 column_stride, int K, u16* out, float* unscale) {
    s64 row = blockIdx.x;
    if (dtype == FLOAT16) {
        const u16* from = static_cast<const u16*>(x) + row * row_stride;
        for (int k = threadIdx.x; k < K; k += THREADS) out[row * K + k] = from[k * column_stride];
        if (threadIdx.x == 0) unscale[row] = 1;
        return;
    }
    auto at = [&](int k) { return load_float(x, row * row_stride + k * column_stride, dtype); };
    normalise(at, K, out + row * K, unscale + row);
}

// q8_1 blocks to float16 rows: the 16-bit route of 8-bit activations. The stored sum is not read.
extern "C" __global__ void __launch_bounds__(THREADS) blocks_to_half(const u8* blocks, int K, u16* out, float* unscale) {
    s64 row = blockIdx.x;
    const u8* from = blocks + row * (K / 32) * Format::BLOCK_BYTES;
    auto at = [&](int k) {
        const u8* block = from + k / 32 * Format::BLOCK_BYTES;
        return Format::value(Format::code(block, k % 32), Format::scale_bits(block));
    };
    normalise(at, K, out + row * K, unscale + row);
}

// q8_1 blocks [matrices][M][blocks] to codes [matrices][M][padded_blocks * 32] with the columns of each 16 in the
// order 2i, 2i+8, 2i+1, 2i+9, and to scales (d, d * sum(q)) [matrices][padded_blocks][padded_rows]; zero where padded.
// The sum is taken anew: the stored one may be rounded, infinite or another program's. A warp per block.
extern "C" __global__ void __launch_bounds__(THREADS)
blocks_to_int8(const u8* blocks, int matrices, int M, int count, int padded_rows, int padded_blocks, u8* codes, float2* scales) {
    const s64 warp = (s64(blockIdx.x) * THREADS + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    const int block = int(warp % padded_blocks), m = int(warp / padded_blocks % padded_rows);
    const s64 matrix = warp / padded_blocks / padded_rows;
    if (matrix >= matrices) return;
    u32 q = 0;
    float d = 0;
    if (m < M && block < count) {
        const u8* from = blocks + ((matrix * M + m) * count + block) * Format::BLOCK_BYTES;
        int position = lane % 16;
        q = Format::code(from, lane / 16 * 16 + position / 4 * 2 + position % 4 / 2 + position % 2 * 8);
        d = half_to_float(u16(Format::scale_bits(from)));
    }
    int sum = s8(q);
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (m < M) codes[((matrix * M + m) * padded_blocks + block) * 32 + lane] = u8(q);
    if (lane == 0) scales[(matrix * padded_blocks + block) * padded_rows + m] = make_float2(d, d * float(sum));
}

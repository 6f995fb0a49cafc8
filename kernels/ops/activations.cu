// Activations as operand B wants them: float16 rows.
//
// Rows that are not float16 are divided by a power of two that puts their peak between 2^13 and 2^14: exact, and
// undone in the float32 epilogue. What is 2^-37 of the peak or less is lost.
#include "../core/ieee.cuh"
#include "../core/ptx.cuh"
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
    let_successor_start();
    wait_for_predecessor();
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
extern "C" __global__ void __launch_bounds__(THREADS)
blocks_to_half(const u8* blocks, int K, u16* out, float* unscale) {
    let_successor_start();
    wait_for_predecessor();
    s64 row = blockIdx.x;
    const u8* from = blocks + row * (K / 32) * Format::BLOCK_BYTES;
    auto at = [&](int k) {
        const u8* block = from + k / 32 * Format::BLOCK_BYTES;
        return Format::value(Format::code(block, k % 32), Format::scale_bits(block));
    };
    normalise(at, K, out + row * K, unscale + row);
}

// Activations as operand B wants them: float16 rows.
//
// Rows that are not float16 are divided by a power of two that puts their peak between 2^13 and 2^14: exact, and
// undone in the float32 epilogue. What is 2^-37 of the peak or less is lost.
#pragma once
#include "encode.cuh"

constexpr int MOST_THREADS = 1024;  // as many as cuquant/plan/ wants

DEVICE u32 block_max(u32 value) {
    __shared__ u32 warps[MOST_THREADS / WARP];
#pragma unroll
    for (int step = 16; step; step /= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
    if (threadIdx.x % WARP == 0) warps[threadIdx.x / WARP] = value;
    __syncthreads();
    value = warps[0];
#pragma unroll
    for (int w = 1; w < MOST_THREADS / WARP; w++)
        if (w * WARP < blockDim.x) value = max(value, warps[w]);
    return value;
}

// The exponent of the power of two that a row with this peak is multiplied by. Rows of zeros (or subnormal numbers)
// and rows with NaN or infinity are left as they are.
DEVICE int shift_of(u32 peak) {
    int exponent = int(peak >> 23) - 127;
    return exponent == -127 || exponent == 128 ? 0 : min(13 - exponent, 126);
}

// Eight numbers, times a factor, to float16.
DEVICE void store_halves(u16* to, const float* x, float scale) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = pack(x[j * 2] * scale, x[j * 2 + 1] * scale, FLOAT16);
    *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// A row of floats, from element `at` of x on (strides in elements), by all threads of a block; the power of two that it
// then lacks. Float16 itself is copied. Pieces of 16 elements, as encode.cuh takes them; the second time they come from
// a cache.
DEVICE float row_to_half(const void* x, int dtype, s64 at, s64 row_stride, s64 column_stride, int K, u16* out) {
    auto load = [&](int piece, float (&values)[MINE]) {
        const int first = piece / 2 * 32 + piece % 2 * 8;
        load_elements(x, at + first * column_stride, row_stride, column_stride, dtype, values);
        return first;
    };
    float values[MINE];
    int shift = 0;
    if (dtype != FLOAT16) {
        u32 peak = 0;
        for (int piece = threadIdx.x; piece < K / MINE; piece += blockDim.x) {
            load(piece, values);
#pragma unroll
            for (int j = 0; j < MINE; j++) peak = max(peak, magnitude(values[j]));
        }
        shift = shift_of(block_max(peak));
    }
    const float scale = power_of_two(shift);
    for (int piece = threadIdx.x; piece < K / MINE; piece += blockDim.x) {
        u16* const to = out + load(piece, values);
        store_halves(to, values, scale);
        store_halves(to + 16, values + 8, scale);
    }
    return power_of_two(-shift);
}

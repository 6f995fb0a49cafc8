// Rows of activations as float16 numbers over a power of two, which follows from a row's peak.
#pragma once
#include "ieee.cuh"
#include "ptx.cuh"

// Threads of a block, and of one that keeps pieces of a row: as many as cuquant/plan/ wants.
constexpr int MOST_THREADS = 1024, ROW_THREADS = 512;

// The greatest value of a block's threads, which are whole warps.
DEVICE u32 block_max(u32 value) {
    __shared__ u32 warps[MOST_THREADS / WARP];
    static_assert(MOST_THREADS / WARP <= WARP, "a lane each");
    const int lane = threadIdx.x % WARP;
    value = warp_max(value);
    if (lane == 0) warps[threadIdx.x / WARP] = value;
    __syncthreads();
    return warp_max(lane < blockDim.x / WARP ? warps[lane] : 0);
}

// The exponent of the power of two that a row with this peak is multiplied by: 126 at most, as it is divided by it in the end.
// Rows of zeros and rows with NaN or infinity are left as they are.
DEVICE int shift_of(u32 peak) {
    const int exponent = int(peak >> 23) - 127;
    return peak == 0 || exponent == 128 ? 0 : min(13 - exponent, 126);
}

// Eight numbers, subnormal ones too, times a factor, as float16.
DEVICE uint4 to_halves(const float* x, float factor) {
    u32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = pack(ieee_mul(x[j * 2], factor), ieee_mul(x[j * 2 + 1], factor), FLOAT16);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Back.
DEVICE void to_floats(uint4 v, float (&to)[8]) {
    const u32 pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) to[2 * j] = low_to_float(pairs[j]), to[2 * j + 1] = high_to_float(pairs[j]);
}

// Floats to blocks, bit for bit as the reference in cuquant/formats: a warp per block, lane j holding element j.
#include "../core/ieee.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

// The element of the greatest key over the warp; of equal keys the one in the lowest lane.
DEVICE float first_greatest(float value, int key, int lane) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        float other = __shfl_xor_sync(~0u, value, step);
        int other_key = __shfl_xor_sync(~0u, key, step), other_lane = __shfl_xor_sync(~0u, lane, step);
        if (other_key > key || (other_key == key && other_lane < lane)) value = other, key = other_key, lane = other_lane;
    }
    return value;
}

DEVICE u32 warp_max(u32 value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
}

DEVICE int warp_sum(int value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Code of a lane's element, and the float32 scale and minimum of the block.
template <class F>
DEVICE u32 encode(float x, int lane, float& d, float& m) {
    if constexpr (F::BITS == 8) {
        u32 peak = warp_max(magnitude(x));
        d = ieee_div(__int_as_float(peak), 127);
        float scaled = ieee_mul(x, is_finite(d) ? inverse(d) : 0);
        return is_finite(scaled) ? u32(int(roundf(scaled))) : 0;
    } else if constexpr (F::HAS_MIN) {
        m = first_greatest(x, -order(x), lane);
        d = ieee_div(ieee_sub(first_greatest(x, order(x), lane), m), (1 << F::BITS) - 1);
        u32 q = u32(ieee_add(ieee_mul(ieee_sub(x, m), inverse(d)), 0.5f));
        return min(q, (1 << F::BITS) - 1);
    } else {
        float peak = first_greatest(x, int(magnitude(x)), lane);
        // The reference starts from +0, so a block of -0 has the peak +0 (and the scale -0).
        d = ieee_div(magnitude(peak) ? peak : 0, -F::OFFSET);
        u32 q = u32(ieee_add(ieee_mul(x, inverse(d)), F::OFFSET + 0.5f));
        return min(q, 2 * F::OFFSET - 1);
    }
}

// Rows of K floats, with strides in elements, to blocks. `first_bad`, if given, becomes the lowest row that holds
// NaN or infinity or has a scale that overflows float16 (it starts as the greatest u64).
extern "C" __global__ void __launch_bounds__(256) quantize(
    const void* x, int dtype, s64 row_stride, s64 column_stride, s64 rows, s64 blocks_per_row, u8* out, u64* first_bad) {
    const int lane = threadIdx.x % WARP;
    const s64 warps = s64(gridDim.x) * blockDim.x / WARP;
    for (s64 block = (s64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP; block < rows * blocks_per_row; block += warps) {
        s64 row = block / blocks_per_row, column = block % blocks_per_row * 32 + lane;
        float value = load_float(x, row * row_stride + column * column_stride, dtype);
        float d, m = 0;
        u32 q = encode<Format>(value, lane, d, m);
        u32 scale = float_to_half(d);
        if constexpr (Format::HAS_SUM)  // of the codes, times the scale before its rounding
            scale |= u32(float_to_half(ieee_mul(float(warp_sum(int(q))), d))) << 16;
        else if constexpr (Format::HAS_MIN)
            scale |= u32(float_to_half(m)) << 16;
        u8* to = out + block * Format::BLOCK_BYTES;
        Format::store_codes(to, lane, q);
        if (lane == 0) Format::store_scale_bits(to, scale);
        if (first_bad) {
            bool overflow = (scale & 0x7c00) == 0x7c00 || (scale >> 16 & 0x7c00) == 0x7c00;
            if (__any_sync(~0u, !is_finite(value) || overflow) && lane == 0) atomicMin(first_bad, u64(row));
        }
    }
}

// Blocks to floats: the formula in float32, then one rounding. A warp per block, lane j holding element j.
#include "../core/types.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

extern "C" __global__ void __launch_bounds__(256) dequantize(const u8* blocks, s64 count, void* out, int dtype) {
    const int lane = threadIdx.x % WARP;
    const s64 warps = s64(gridDim.x) * blockDim.x / WARP;
    for (s64 block = (s64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP; block < count; block += warps) {
        const u8* from = blocks + block * Format::BLOCK_BYTES;
        store_float(out, block * 32 + lane, dtype, Format::value(Format::code(from, lane), Format::scale_bits(from)));
    }
}

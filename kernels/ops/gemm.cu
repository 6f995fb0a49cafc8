// The matrix product: one core, one format, one tile configuration per module (see cuquant/plan.py).
#include "../core/decode.cuh"
#include "../core/mma.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

#if CUQUANT_INT8
#define BATCH Int8Batch
#else
#define BATCH HalfBatch
#endif

#if CUQUANT_DECODE
// One block at least: left to itself ptxas trades a few spilled registers for occupancy that decode has no use for.
extern "C" __global__ void __launch_bounds__(CUQUANT_WARPS* WARP, 1) gemm(const __grid_constant__ Problem problem) {
    decode<Format, BATCH, CUQUANT_GROUPS, CUQUANT_ROW_TILES, CUQUANT_WARPS, CUQUANT_DEPTH, CUQUANT_TURNS>(problem);
}
#else
extern "C" __global__ void __launch_bounds__(CUQUANT_WARPS* WARP) gemm(const __grid_constant__ Problem problem) {
    mma<Format, BATCH, CUQUANT_GROUPS, CUQUANT_ROW_TILES, CUQUANT_WARPS, CUQUANT_STAGES>(problem);
}
#endif

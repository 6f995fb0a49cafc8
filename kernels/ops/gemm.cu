// The matrix product: one core, one format, one tile configuration per module (see cuquant/plan/).
#include "../core/decode.cuh"
#include "../core/mma.cuh"
#include "../core/wgmma.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");
static_assert(ROW_FACTORS<Format> == CUQUANT_ROW_FACTORS, "host and device disagree about the row plane");

using Values = Codec<Format, CUQUANT_COPIES>;

#ifdef CUQUANT_GATED
using Argument = Grouped<CUQUANT_GATED, CUQUANT_TABLES>;
#else
using Argument = Problem;
#endif

#ifndef CUQUANT_CONVERTS
#define CUQUANT_CONVERTS 0
#endif
#ifndef CUQUANT_SIGNS
#define CUQUANT_SIGNS 0
#endif

#if CUQUANT_CORE == 0
extern "C" __global__ void __launch_bounds__(CUQUANT_WARPS* WARP, CUQUANT_RESIDENT)
gemm(const __grid_constant__ Argument problem) {
    decode<Format, Values, CUQUANT_GROUPS, CUQUANT_ROW_TILES, CUQUANT_ROW_WARPS, CUQUANT_WARPS, CUQUANT_DEPTH,
           CUQUANT_CLUSTER, CUQUANT_TOGETHER, CUQUANT_CONVERTS>(problem);
}
#elif CUQUANT_CORE == 1
extern "C" __global__ void __launch_bounds__(CUQUANT_WARPS* WARP, CUQUANT_RESIDENT)
gemm(const __grid_constant__ Argument problem) {
    mma<Format, Values, CUQUANT_GROUPS, CUQUANT_ROW_TILES, CUQUANT_ROW_WARPS, CUQUANT_WARPS, CUQUANT_STAGES,
        CUQUANT_TOGETHER, CUQUANT_SPLITS>(problem);
}
#elif __CUDA_ARCH__ == 900
extern "C" __global__ void __launch_bounds__((CUQUANT_GROUPS * CUQUANT_K_GROUPS + 1) * WARPGROUP, CUQUANT_RESIDENT)
gemm(const __grid_constant__ Argument problem) {
    wgmma<Format, Values, CUQUANT_BATCH, CUQUANT_ROW_BLOCKS, CUQUANT_GROUPS, CUQUANT_K_GROUPS, CUQUANT_K_TILES,
          CUQUANT_SPLIT, CUQUANT_BESIDE, CUQUANT_PAIR, CUQUANT_STREAM, CUQUANT_STAGES, CUQUANT_ROOM, CUQUANT_RESIDENT,
          CUQUANT_SIGNS>(problem);
}
#endif

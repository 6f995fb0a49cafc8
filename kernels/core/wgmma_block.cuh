// What a block of the wgmma core is (wgmma.cuh): its tile, and its ring of stages in shared memory.
#pragma once
#include "grouped.cuh"

#if __CUDA_ARCH__ == 900
template <class F_, int BATCH_, int ROW_BLOCKS_, int GROUPS_, int K_GROUPS_, int K_TILES_, int SPLIT_, int PAIR_,
          bool STREAM_, int STAGES_, int RESIDENT_, class P>
struct WgmmaBlock {
    using F = F_;
    static constexpr int BATCH = BATCH_, ROW_BLOCKS = ROW_BLOCKS_, GROUPS = GROUPS_, K_GROUPS = K_GROUPS_;
    static constexpr int K_TILES = K_TILES_, SPLIT = SPLIT_, PAIR = PAIR_, STAGES = STAGES_, RESIDENT = RESIDENT_;
    static constexpr bool STREAM = STREAM_;
    static_assert(SPLIT == 1 || (PAIR == 1 && !STREAM), "a cluster shares either rows or x");
    static_assert(!P::GROUPED || SPLIT == 1, "only the GPU knows how many tiles there are");
    static_assert(ROW_BLOCKS <= 2, "of two that are gated, one of W and one of V");
    static_assert(RESIDENT == 1 || (GROUPS * K_GROUPS == 2 && !STREAM), "a block of two has few registers");
    static constexpr int ROWS = GROUPS * ROW_BLOCKS * 64, ROW_TILES = ROWS / 16, CONSUMERS = GROUPS * K_GROUPS * WARPGROUP;
    static constexpr int CLUSTER = SPLIT * PAIR, SUMS = ROW_BLOCKS * BATCH / 2, WIDTH = K_GROUPS * K_TILES;
    static constexpr int SIDES = P::GATED ? 2 : 1, SIDE_TILES = ROW_TILES / SIDES;  // W, V
    static constexpr bool ROOMY = GROUPS * K_GROUPS == 2;  // threads have registers for what spares a short product time
    // Where tiles are shared, or works listed, the copying warpgroup tells the others what their segments are.
    static constexpr bool TOLD = P::GROUPED || STREAM;
    using Tiles = typename Either<P::GROUPED, GroupSchedule<SIDE_TILES * PAIR, WIDTH, STREAM, P>,
                                  Schedule<ROW_TILES * PAIR, BATCH, WIDTH, STREAM, ROOMY>>::Type;

    // A stage: x, in steps of 64 columns, then W.
    using Weights = WeightCopy<F, SIDE_TILES, WARPGROUP, WIDTH, SIDES>;
    static constexpr int X_BYTES = BATCH * 128, WEIGHTS_AT = WIDTH * X_BYTES;
    static constexpr int STAGE = (WEIGHTS_AT + SIDES * Weights::SIZE + 1023) / 1024 * 1024;
    static constexpr int BOX = BATCH / PAIR;  // batch rows that a block copies
    // Stages of W that are asked for before x: more of it would be in x's way, which all wait for.
    static constexpr int AHEAD = STAGES < 4 ? 2 : STAGES / 2;
    static_assert(AHEAD < STAGES, "they do not reach the ring's end");
    static_assert(STAGES <= WARP, "a thread initializes each one's barriers");

    // Sums that a block leaves to another in global memory (STREAM), [slot of the schedule][block of the cluster][warpgroup]:
    // each warpgroup has a place, with a flag and SUMS float32 numbers of each of its threads. `Left` brings all of a block's
    // to stages of the ring.
    using Left = LeftSums<GROUPS, SUMS, STAGE>;
    static DEVICE int own_place(int rank, int slot, int group) { return (slot * CLUSTER + rank) * GROUPS + group; }
    static DEVICE float4* sums_at(const P& p, int place) {
        return reinterpret_cast<float4*>(p.partials) + s64(place) * (SUMS / 4 * WARPGROUP);
    }
};

// Addresses in shared memory: of the barriers of full and of empty stages, and of the stages.
struct WgmmaRing {
    u32 full, empty, stages;
};
#endif

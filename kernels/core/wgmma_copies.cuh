// The copying warpgroup of a block of the wgmma core (wgmma.cuh): stages of W and x, and sums that others have left.
#pragma once
#include "wgmma_block.cuh"

#if __CUDA_ARCH__ == 900
// B: the block (WgmmaBlock). `segment_of(i)`: segment i of the `schedule`, of this block of the cluster, whose number is
// `rank`; where the others cannot work it out themselves (TOLD), they find it in `told`. `row_tiles` and `tiles`: of 16 rows
// of W, and of 64 columns.
template <class B, class P, class SegmentOf>
DEVICE void wgmma_copies(const P& p, typename B::Tiles& schedule, const SegmentOf& segment_of, Told<B::STAGES>& told,
                         const WgmmaRing& ring, int rank, int row_tiles, int tiles) {
    constexpr int GROUPS = B::GROUPS, WIDTH = B::WIDTH, PAIR = B::PAIR, BOX = B::BOX, STAGES = B::STAGES, STAGE = B::STAGE;
    constexpr bool STREAM = B::STREAM;
    using Left = typename B::Left;
    int thread = threadIdx.x - B::CONSUMERS;
    int stage = 0, parity = 1;  // the first pass over a fresh barrier does not wait
    bool waited = false;
    auto& shares = schedule.shares;
    __shared__ __align__(16) int4 kept[2 * WARPGROUP / WARP];
    if constexpr (STREAM) shares.keep(shared_address(kept + thread / WARP * 2));
    for (int i = 0; i < shares.segments; i++) {
        // Lest places be kept from segment to segment.
        if constexpr (STREAM || (B::SPLIT * B::RESIDENT == 1 && B::K_TILES >= B::K_GROUPS))
            asm volatile("" : "+r"(thread));
        const auto segment = segment_of(i);
        if constexpr (B::TOLD)
            if (thread == 0) told.tell(i, segment);
        const Matrix at = matrix_of<typename B::F>(p, segment.matrix);
        typename B::Weights weights;
        // Of rows beyond N (the second of a pair may have no others) the last are read instead.
        const int first_row = PAIR > 1 ? min(segment.first_row, row_tiles - 1) : segment.first_row;
        weights.start(at.w, first_row, row_tiles, tiles, segment.begin, thread);
        auto copy_weights = [&](int to) {  // of the next step
            weights.copy(ring.stages + to * STAGE + B::WEIGHTS_AT, thread, 2, apart_of(p));
            copy_arrive(ring.full + to * 8);
        };
        // No box goes beyond the last batch row: the copy engine takes longer to make zeros than to copy. (Of a grouped
        // product there are rows to read behind the last one.)
        const int rows = P::GROUPED ? B::BATCH : min(p.M - segment.first_m, B::BATCH);
        const int own_rows = rows - rank % PAIR * BOX;
        auto copy_x = [&](int tile, int to) {
            if (thread > 0) return;
            barrier_expect(ring.full + to * 8, WIDTH * rows * 128);
            if (PAIR > 1 && own_rows <= 0) return;
            const u64* const map = own_rows >= BOX ? p.map : p.rest_map;
            if constexpr (P::GROUPED && WIDTH > 1)
                // All steps of a stage in one box, if K is of whole steps: every box takes its time.
                if (p.box_steps == WIDTH)
                    return copy_box<1>(ring.stages + to * STAGE, p.map, ring.full + to * 8, 0, segment.first_m, tile, 0, 0);
            for (int k = 0; k < WIDTH; k++)
                copy_box<PAIR>(ring.stages + to * STAGE + k * B::X_BYTES + rank % PAIR * (B::X_BYTES / PAIR), map,
                               ring.full + to * 8, (tile + k) * 64, segment.first_m + rank % PAIR * BOX, at.axis[2],
                               at.axis[1], at.axis[0]);
        };
        int tile = segment.begin;
        // What a helper has left is there when the first stage of what it does next is free again.
        const int soon = STREAM && i > 0 && i == shares.pieces ? tile + STAGES * WIDTH : -1;
        auto tell_left = [&] {
            if (thread == 0) set_flags<GROUPS>(p.flags + B::own_place(rank, shares.first_slot(), 0), i, B::CLUSTER * GROUPS);
        };
        if (!waited) {  // W is fixed: its first stages need not wait for the kernels before this one
            const int ahead = min(B::AHEAD, (segment.end - segment.begin) / WIDTH);
            // Loops that are unrolled would take registers.
#pragma unroll 1
            for (int s = 0; s < ahead; s++) copy_weights(s);
            wait_for_operands<P>();
#pragma unroll 1
            for (int s = 0; s < ahead; s++) copy_x(segment.begin + s * WIDTH, s);
            tile += ahead * WIDTH, waited = true;
            stage = ahead;  // not yet the ring's end
        }
#pragma unroll 1
        for (; tile < segment.end; tile += WIDTH) {
            barrier_wait(ring.empty + stage * 8, parity);
            if (STREAM && tile == soon) tell_left();
            copy_x(tile, stage);
            copy_weights(stage);
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        if (STREAM && segment.end <= soon) {
            const int first = stage - (segment.end - segment.begin) / WIDTH;
            barrier_wait(ring.empty + (first < 0 ? first + STAGES : first) * 8, first < 0 ? parity : parity ^ 1);
            tell_left();
        }
    }
    const int others = STREAM ? shares.others() : 0;
    for (int j = 0; j < others; j++) {
        const int slot = uniform(shares.first_slot()) + j;
        for (int group = 0; group < GROUPS; group++) wait_for_flag(p.flags + B::own_place(rank, slot, group));
#pragma unroll 1
        for (int part = 0; part < Left::PARTS; part++) {
            const int own = thread_again() - B::CONSUMERS;
            barrier_wait(ring.empty + stage * 8, parity);
            Left::copy(ring.stages + stage * STAGE, B::sums_at(p, B::own_place(rank, slot, 0)), part, own);
            copy_arrive(ring.full + stage * 8);
            barrier_arrive(ring.full + stage * 8, own == 0);  // no x
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
#endif

// The wgmma core (sm_90a): larger batches, bound by the tensor cores.
//
// A block owns GROUPS x ROW_BLOCKS x 64 rows of W and BATCH batch rows. One warpgroup copies (wgmma_copies.cuh): every stage
// of the ring (wgmma_block.cuh) holds 64 columns of W, as the fragment layout has them, and of x. GROUPS warpgroups compute:
// each dequantizes its own rows in registers, operand A, two steps of 16 columns at a time, while the tensor cores work on
// the two before; x in shared memory is operand B.
//
//      copies:         | stage 0 | stage 1 | stage 2 | ...
//      warpgroup:      dequantize steps 2 and 3 | steps 0 and 1 of the next stage | ...
//      tensor cores:   steps 0 and 1            | steps 2 and 3                   | ...
//
// Where there is little to multiply, a stage may be K_GROUPS x K_TILES times as wide: K_GROUPS warpgroups for the same
// rows hide each other's latencies, and K_TILES times 64 columns of each make a turn of the loop worth its overhead.
// The sums of the K_GROUPS meet in shared memory. With few batch rows there are registers and room enough for two blocks
// on a multiprocessor (RESIDENT): one's start and end are in the other's shadow.
// A warpgroup stores its own rows of the result, so that the others may go on meanwhile; those of a split, and few sums of K
// groups, are stored by all together.
// Sums with EXL3's numbers are turned before that, which takes 128 rows of W (turned.cuh), where a block has all of K and
// whole 128s of rows.
//
// Blocks of a cluster either split K (SPLIT): they share their rows, and their sums meet in shared memory, in a fixed
// order. Or they share x (PAIR): one has the rows of W below the other's, and each copies half of x to both. Without
// a split clusters go from one output tile to the next, and copies run ahead over the border. What is left when every
// cluster has had as many whole tiles may be shared (STREAM): those that would have nothing to do take its last columns
// (schedule.cuh), and leave their sums in global memory. From there they come to the owner's ring, as W and x do, behind
// its last stage of them. Who waits has the higher number, so what it waits for has started.
//
// Signs of W's columns (trellis weights) may be given to operand A (SIGNS: column_signs.cuh), so that x needs no kernel before.
//
// Of a grouped product the batch tiles are the works, and blocks find out themselves how many tiles are left; the
// copying warpgroup tells the others what each is. Gated, a warpgroup of two row blocks has 64 rows of W and the same 64
// rows of V: its threads have what is multiplied in the same places. Of one row block two warps have 32 rows of W, and
// two the same of V.
#pragma once
#include "column_signs.cuh"
#include "wgmma_copies.cuh"

#if __CUDA_ARCH__ == 900
// Registers of a thread: as a block starts, and what its copying threads keep and the computing ones get of these; none change
// hands where one warpgroup computes.
struct HandedOver {
    int started, copying, computing;
};

DEVICE constexpr HandedOver handed_over(int groups, int resident) {
    if (groups == 4) return {96, 64, 104};
    if (groups == 2 && resident == 2) return {80, 48, 96};
    return groups == 2 ? HandedOver{168, 56, 224} : HandedOver{};
}

template <class F, class C, int BATCH, int ROW_BLOCKS, int GROUPS, int K_GROUPS, int K_TILES, int SPLIT, bool BESIDE,
          int PAIR, bool STREAM, int STAGES, int ROOM, int RESIDENT, bool SIGNS, class P>
DEVICE void wgmma(const P& p) {
    using B = WgmmaBlock<F, BATCH, ROW_BLOCKS, GROUPS, K_GROUPS, K_TILES, SPLIT, PAIR, STREAM, STAGES, RESIDENT, P>;
    using Weights = typename B::Weights;
    using Left = typename B::Left;
    constexpr int CONSUMERS = B::CONSUMERS, CLUSTER = B::CLUSTER, SIDES = B::SIDES, SIDE_TILES = B::SIDE_TILES;
    constexpr int SUMS = B::SUMS, WIDTH = B::WIDTH, X_BYTES = B::X_BYTES, WEIGHTS_AT = B::WEIGHTS_AT, STAGE = B::STAGE;
    constexpr bool ROOMY = B::ROOMY, TOLD = B::TOLD;
    constexpr HandedOver HANDED = handed_over(GROUPS * K_GROUPS, RESIDENT);
    static_assert(WARP * 4 * HANDED.copying + CONSUMERS * HANDED.computing <= (WARP * 4 + CONSUMERS) * HANDED.started,
                  "else computing threads wait for ever");
    constexpr bool BOXES = ROOM > 0 && !P::GROUPED;
    // Whether results of EXL3 are sums that have been turned, or these sums (as wgmma_core.turns_sums has it).
    constexpr bool TURNS = F::SCALING == UNSCALED && SPLIT == 1 && B::ROWS % HADAMARD == 0;
    static_assert(!TURNS || ROOM == 0 || ROOM == BATCH, "all of a tile is turned at once");
    // Whether the K groups' sums are added up when results are stored, as those of a split are: if they are few. Else, and
    // if they are an expert's, are to be turned, or are left to another block, the first K group adds them up before.
    constexpr bool MEET = K_GROUPS > 1 && BATCH == 16 && !TURNS && !P::GROUPED;
    // An expert's last rows are mostly few: the tensor cores need not take as long for them.
    constexpr int NARROW = !P::GROUPED || BATCH < 96 ? BATCH : BATCH == 256 ? 64 : 32;
    // After a codebook's table stages, then staged sums. Of a split they take the stages' place, but for what is sent BESIDE
    // them: then blocks need not wait until the others have read their stages.
    using Tables = Codecs<C, P::TABLES>;
    u8* const shared = dynamic_shared() + Tables::TABLE_BYTES;
    static_assert(Tables::TABLE_BYTES % 1024 == 0, "stages are swizzled");
    __shared__ __align__(8) u64 barriers[2 * STAGES], split_barrier;
    __shared__ Told<STAGES> told;
    // Opaque, lest the compiler work them out anew in the inner loops.
    u32 full = shared_address(barriers), empty = full + STAGES * 8, stages = shared_address(shared);
    asm volatile("" : "+r"(full), "+r"(empty), "+r"(stages));
    const u32 sums_came = shared_address(&split_barrier);
    using Partial = PartialSums<GROUPS, MEET ? K_GROUPS : 1, SPLIT, ROW_BLOCKS, BATCH / 2, CONSUMERS>;

    begin(p);
    const int warp = uniform(threadIdx.x / WARP);
    int lane = threadIdx.x % WARP;
    asm volatile("" : "+r"(lane));
    if (threadIdx.x == 0) {
        if (P::GROUPED || p.M >= B::BOX) prefetch_map(p.map);
        if (!P::GROUPED && p.M % B::BOX) prefetch_map(p.rest_map);
        if (BOXES && p.straight) prefetch_map(p.out_map);
    }
    if (threadIdx.x < STAGES) {
        barrier_init(full + threadIdx.x * 8, WARPGROUP + 1);  // every copying thread, and the copies of x
        barrier_init(empty + threadIdx.x * 8, CONSUMERS / WARP * PAIR);
        if (SPLIT > 1 && threadIdx.x == 0) barrier_init(sums_came, 1);
        barrier_init_fence();
        if (SPLIT > 1 && threadIdx.x == 0) barrier_expect(sums_came, Partial::BYTES);
    }
    __syncthreads();
    if constexpr (PAIR > 1) cluster_sync();
    if constexpr (BESIDE) cluster_arrive();  // sums may come

    const int rank = blockIdx.x % CLUSTER;  // unlike what the hardware says, known to be uniform
    const int row_tiles = (p.N + 15) / 16, tiles = (p.K + 63) / 64;  // the latter a multiple of WIDTH
    typename B::Tiles schedule(p, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
    auto segment_of = [&](int i) {
        auto segment = schedule[i];
        if constexpr (SPLIT > 1) {  // in whole turns of the loop, of which one may have one more than another
            const int turns = tiles / WIDTH;
            segment.begin = turns * rank / SPLIT * WIDTH, segment.end = turns * (rank + 1) / SPLIT * WIDTH;
        }
        if constexpr (PAIR > 1) segment.first_row += rank * SIDE_TILES;
        return segment;
    };

    if (warp >= CONSUMERS / WARP) {
        if constexpr (HANDED.copying) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HANDED.copying));
        wgmma_copies<B>(p, schedule, segment_of, told, {full, empty, stages}, rank, row_tiles, tiles);
        copy_wait<0>();
        if constexpr (SPLIT > 1 && !BESIDE) cluster_arrive();  // with the computing threads
        if constexpr (SPLIT > 1) cluster_wait();
    } else {
        if constexpr (HANDED.copying) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(HANDED.computing));
        Tables tables(p.values, values_of_v(p), lane);
        tables.fill(threadIdx.x, CONSUMERS);
        if constexpr (Tables::TABLE_BYTES > 0) warpgroups_sync<CONSUMERS>(EVERYONE);
        // Whether row block b is V's.
        auto side = [&](int b) { return P::GATED && (ROW_BLOCKS == 2 ? b == 1 : warp / 2 % 2 == 1); };
        const C codecs[] = {tables.of(side(0)), tables.of(side(ROW_BLOCKS - 1))};
        wait_for_operands<P>();
        const int group = warp / 4 % GROUPS, k_group = warp / 4 / GROUPS;
        // A stage is free when all who read it have said so: of a pair, those of both blocks.
        auto release = [&](int stage, bool used) {
            if constexpr (PAIR == 1)
                barrier_arrive(empty + stage * 8, bool(used & elected()));
            else
                barrier_arrive_cluster(cluster_address(empty + stage * 8, lane), used && lane < PAIR);
        };
        int stage = 0, parity = 0;
        auto own_segment = [&](int i) {
            // Opaque where registers are scarce, lest places be kept all the time; below, too.
            if constexpr (TOLD && SUMS > 128) asm volatile("" : "+r"(i));
            if constexpr (TOLD)
                return told[i];
            else
                return segment_of(i);
        };
        for (int i = 0; i < schedule.shares.segments; i++) {
            if constexpr (TOLD) barrier_wait(shared_address(barriers + stage), parity);  // it has been told
            const auto segment = own_segment(i);
            if constexpr (P::GROUPED) fetch_unscale<BATCH>(p, segment);
            float acc[ROW_BLOCKS][BATCH / 2];
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < BATCH / 2; j++) acc[b][j] = 0;
            Tile<F> tile[ROW_BLOCKS];
            Factors factors[ROW_BLOCKS];
            auto own_tile = [&](int b) {  // of the row tiles of its side in a stage
                if constexpr (P::GATED && ROW_BLOCKS == 1) return group * 2 + warp % 2;
                return (P::GATED ? group : group * ROW_BLOCKS + b) * 4 + warp % 4;
            };
            auto row_tile_of = [&](const Segment& segment, int b) {
                return min(segment.first_row + own_tile(b), row_tiles - 1);
            };
            auto load_factors = [&](const Segment& segment) {
                if constexpr (ROW_FACTORS<F>) {
                    const Planes w = matrix_of<F>(p, segment.matrix).w;
#pragma unroll
                    for (int b = 0; b < ROW_BLOCKS; b++)
                        factors[b].load(side_of(p, w, side(b)), row_tile_of(segment, b), lane);
                }
            };
            auto prefetch_factors = [&](const Segment& segment) {
                if constexpr (ROW_FACTORS<F>) {
                    const Planes w = matrix_of<F>(p, segment.matrix).w;
#pragma unroll
                    for (int b = 0; b < ROW_BLOCKS; b++)
                        Factors::prefetch(side_of(p, w, side(b)), row_tile_of(segment, b));
                }
            };
            auto multiply_by_factors = [&] {
                if constexpr (ROW_FACTORS<F>)
#pragma unroll
                    for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                        for (int j = 0; j < BATCH / 2; j++) acc[b][j] *= factors[b][j / 2 % 2];
            };
            // Where registers are left; else they come while sums are added, or are waited for.
            constexpr bool EARLY = (K_GROUPS == 1 || MEET) && SUMS <= 128;
            if constexpr (EARLY)
                load_factors(segment);
            else
                prefetch_factors(segment);
            u32 a[4][ROW_BLOCKS][4];  // operand A of four steps of 16 columns
            typename Weights::Reader reader(stages + stage * STAGE + WEIGHTS_AT + side(0) * Weights::SIZE, own_tile(0),
                                            k_group, lane);
            ColumnSigns<SIGNS> signs(SIGNS ? matrix_of<F>(p, segment.matrix).signs : nullptr, segment.begin + k_group, lane);
            auto load = [&](int k) {
                if (k == 0) barrier_wait(full + stage * 8, parity);
                signs.advance(K_GROUPS);
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++)
                    reader.moved(P::GATED ? b * Weights::SIZE : 0).load(tile[b], P::GATED ? 0 : b * 4, k * K_GROUPS);
            };
            auto dequantize = [&](int h) {  // steps h and h + 1
#pragma unroll
                for (int step = h; step < h + 2; step++) {
                    pin(a[step]);
#pragma unroll
                    for (int b = 0; b < ROW_BLOCKS; b++) {
                        codecs[b].weights(tile[b], step, a[step][b]);
                        signs.apply(step, a[step][b]);
                    }
                }
            };
            const int steps = (segment.end - segment.begin) / WIDTH;
            int previous = 0;  // stage that the tensor cores may still read
            // All steps; inlined twice, as which of the two it is would otherwise be asked in the inner loop.
            auto multiply_all = [&](bool narrow) {
                // Opaque, lest addresses of both copies of the loop be kept all the time.
                if constexpr (NARROW < BATCH) asm volatile("" : "+r"(lane), "+r"(full), "+r"(stages));
                // x: rows of 128 bytes, swizzled, 8 rows to a group of 1024 bytes; a step of 16 columns is 32 bytes.
                auto multiply = [&](int h, u64 x) {
                    pin(a[h]), pin(a[h + 1]);
                    wgmma_fence();
#pragma unroll
                    for (int step = h; step < h + 2; step++)
#pragma unroll
                        for (int b = 0; b < ROW_BLOCKS; b++)
                            if (narrow)
                                Wgmma<NARROW>::add(first_of<NARROW / 2>(acc[b]), a[step][b], x + 2 * step);
                            else
                                Wgmma<BATCH>::add(acc[b], a[step][b], x + 2 * step);
                    wgmma_commit();
                    wgmma_wait<1>();  // the two steps before have read their operands
                };
                const u32 first_x = (stages >> 4) + k_group * (X_BYTES >> 4) + (1 << 16);
                load(0);
                dequantize(0);
                for (int t = 0; t < steps; t++) {
                    const u64 own = u64(first_x + stage * (STAGE >> 4)) | u64(64) << 32 | u64(1) << 62;
                    const int current = stage;
#pragma unroll
                    for (int k = 0; k < K_TILES; k++) {
                        const u64 x = own + (k * K_GROUPS * X_BYTES >> 4);
                        multiply(0, x);
                        if (k == 0) release(previous, t > 0);
                        dequantize(2);
                        multiply(2, x);
                        if (k + 1 == K_TILES) {
                            const bool last = ++stage == STAGES;
                            reader = reader.moved(last ? -(STAGES - 1) * STAGE : STAGE);
                            if (last) stage = 0, parity ^= 1;
                        }
                        if (k + 1 < K_TILES || t + 1 < steps) {
                            load((k + 1) % K_TILES);
                            dequantize(0);
                        }
                    }
                    previous = current;
                }
            };
            if constexpr (NARROW < BATCH) {
                if (segment.end_m - segment.first_m <= NARROW)
                    multiply_all(true);
                else
                    multiply_all(false);
            } else {
                multiply_all(false);
            }
            wgmma_wait<0>();
            pin(acc);
            if constexpr (SPLIT > 1 && !BESIDE) cluster_arrive();  // the stages are read
            // Again: `segment` would take registers in the loop, and while sums are stored.
            const auto own = own_segment(i);
            auto again = [&] {
                if constexpr (TOLD)
                    return own_segment(i);
                else
                    return own;
            };
            const bool leaves = STREAM && again().begin > 0;
            if constexpr (!EARLY) load_factors(own);
            if constexpr (K_GROUPS == 1 || MEET) multiply_by_factors();
            release(previous, true);

            u8* const staged = shared + (SPLIT > 1 && !BESIDE ? 0 : STAGES * STAGE);
            if (BOXES && threadIdx.x % WARPGROUP == 0) store_box_wait<0>();  // of the tile before
            const bool gathered = K_GROUPS > 1 && (!MEET || leaves), first = K_GROUPS == 1 || k_group == 0;
            if (gathered) {
                warpgroups_sync<CONSUMERS>(EVERYONE);  // the sums before are added, and of a split the stages read
                float4* const sums =
                    reinterpret_cast<float4*>(SPLIT > 1 ? shared : staged) + group * (K_GROUPS - 1) * SUMS / 4 * WARPGROUP +
                    threadIdx.x % WARPGROUP;
                if (k_group > 0) write_sums(acc, sums + (k_group - 1) * SUMS / 4 * WARPGROUP);
                warpgroups_sync<CONSUMERS>(EVERYONE);
                if (first) {
#pragma unroll 1
                    for (int k = 1; k < K_GROUPS; k++) add_sums(acc, sums + (k - 1) * SUMS / 4 * WARPGROUP);
                    if constexpr (!MEET) multiply_by_factors();
                    if constexpr (SPLIT == 1)
                        warpgroups_sync<GROUPS * WARPGROUP>(EVERYONE + 1);  // results take the sums' place
                }
            }
            auto first_n_of = [&](const Segment& s) { return s.first_row * 16 + group * (ROW_BLOCKS * 64 / SIDES); };
            const Matrix at = matrix_of<F>(p, own.matrix);
            const int first_n = first_n_of(own);
            const bool leads = threadIdx.x % WARPGROUP == 0;
            if constexpr (STREAM) {
                const auto others = again();
#pragma unroll 1
                for (int j = 0; j < others.parts; j++) {
#pragma unroll
                    for (int part = 0; part < Left::PARTS; part++) {
                        barrier_wait(full + stage * 8, parity);
                        if (first) Left::add(acc, shared + stage * STAGE, part, group);
                        __syncwarp();
                        release(stage, true);
                        if (++stage == STAGES) stage = 0, parity ^= 1;
                    }
                    if (leads && first) p.flags[B::own_place(rank, others.slot + j, group)] = 0;
                }
            }
            if (SPLIT == 1 && gathered && !first) continue;
            if (leaves) {
                const int place = B::own_place(rank, again().slot, group);
                write_sums(acc, B::sums_at(p, place) + threadIdx.x % WARPGROUP);
                if (i + 1 < schedule.shares.segments) {
                    __syncwarp();  // before this warp frees the next segment's first stage
                } else {
                    warpgroups_sync<WARPGROUP>(1 + group);
                    if (leads) set_flags<1>(p.flags + place, i + 1, -CLUSTER * GROUPS);
                }
            } else if constexpr (P::GROUPED) {
                const auto last = again();
                store_group(p, matrix_of<F>(p, last.matrix), acc, last, first_n_of(last), staged, group);
            } else if constexpr (SPLIT > 1 || MEET) {
                u8* const places = staged + (MEET || BESIDE ? 0 : (K_GROUPS - 1) * GROUPS * SUMS * 4 * WARPGROUP);
                if constexpr (SPLIT > 1)
                    cluster_wait();  // the others have started, or read all stages
                else
                    warpgroups_sync<CONSUMERS>(EVERYONE);  // the results before are read
                if (MEET || first) Partial::write(acc, places, group, k_group, sums_came);
                warpgroups_sync<CONSUMERS>(EVERYONE);
                if constexpr (SPLIT > 1) barrier_wait_cluster(sums_came, 0);
                Partial::finish(p, at, own.first_m, own.first_row * 16, places);
            } else {
                if constexpr (TURNS) turn_sums<GROUPS, BOXES>(p, acc, first_n, staged, group);
                auto matrix_again = [&] {  // after a turn, which leaves no registers for it
                    if constexpr (TURNS) {
                        u32 matrix = own.matrix;
                        asm volatile("" : "+r"(matrix));
                        return matrix_of<F>(p, matrix);
                    } else {
                        return at;
                    }
                };
                const Matrix last = matrix_again();
                bool stored = false;
                if constexpr (BOXES) {
                    stored = p.straight;
                    if (stored)
                        store_rows<GROUPS, ROOM>(p, last, acc, own.matrix, own.first_m, first_n, staged, group);
                }
                if (!stored) finish_sums<GROUPS, ROOMY>(p, last, acc, own.first_m, first_n, staged, group);
            }
        }
    }
    if constexpr (BOXES) store_box_wait<0>();
    if constexpr (PAIR > 1) cluster_leave();  // no block is gone while another writes to it
}
#endif

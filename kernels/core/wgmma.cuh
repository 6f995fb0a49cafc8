// The wgmma core (sm_90a): larger batches, bound by the tensor cores.
//
// A block owns GROUPS x ROW_BLOCKS x 64 rows of W and BATCH batch rows. One warpgroup copies: every stage of the ring
// holds 64 columns of W, as the fragment layout has them, and of x. GROUPS warpgroups compute: each dequantizes its
// own rows in registers, operand A, 16 columns at a time, while the tensor cores work on the two steps before; x in
// shared memory is operand B.
//
//      copies:         | stage 0 | stage 1 | stage 2 | ...
//      warpgroup:      dequantize step 2 | dequantize step 3 | dequantize step 0 of the next stage | ...
//      tensor cores:   step 0            | step 1            | step 2                              | ...
//
// Blocks of a cluster of SPLIT share the rows and split K; their sums meet in shared memory, in a fixed order.
// Without a split a block goes from one output tile to the next, and copies run ahead over the border.
#pragma once
#include "epilogue.cuh"

#if __CUDA_ARCH__ == 900
constexpr int WARPGROUP = 128;

// d[64 x N] += a[64 x 16] b[16 x N], asynchronous; a in registers (a warp's 16 rows), b described by `b`.
template <int N>
struct Wgmma;

template <>
struct Wgmma<32> {
    static DEVICE void add(float (&d)[16], const u32* a, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
             "}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
               "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<64> {
    static DEVICE void add(float (&d)[32], const u32* a, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
             "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
               "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
               "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
               "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

template <>
struct Wgmma<128> {
    static DEVICE void add(float (&d)[64], const u32* a, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
             "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
             "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
               "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
               "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
               "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
               "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
               "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
               "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
               "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    }
};

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// The compiler knows nothing of registers that an asynchronous instruction uses later. An empty instruction that
// might change them keeps what comes before it before, and what comes after it after.
template <class T, int A, int B>
DEVICE void pin(T (&registers)[A][B]) {
#pragma unroll
    for (int i = 0; i < A; i++)
#pragma unroll
        for (int j = 0; j < B; j++) {
            if constexpr (sizeof(T) == 4 && T(0.5f) != T(0))
                asm volatile("" : "+f"(registers[i][j]) :: "memory");
            else
                asm volatile("" : "+r"(registers[i][j]) :: "memory");
        }
}

// Only so many threads meet, all computing ones.
template <int THREADS>
DEVICE void consumers_sync() {
    asm volatile("bar.sync 1, %0;" :: "n"(THREADS) : "memory");
}

template <class F, int BATCH, int ROW_BLOCKS, int GROUPS, int SPLIT, int STAGES>
DEVICE void wgmma(const Problem& p) {
    constexpr int ROWS = GROUPS * ROW_BLOCKS * 64, ROW_TILES = ROWS / 16, CONSUMERS = GROUPS * WARPGROUP;
    using Weights = WeightCopy<F, ROW_TILES, WARPGROUP>;
    constexpr int WEIGHTS_AT = BATCH * 128, STAGE = (WEIGHTS_AT + Weights::SIZE + 1023) / 1024 * 1024;
    extern __shared__ __align__(1024) u8 shared[];  // stages, staged sums (those of a split take the stages' place)
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    // Opaque, lest the compiler work them out anew in the inner loops.
    u32 full = shared_address(barriers), stages = shared_address(shared);
    asm volatile("" : "+r"(full), "+r"(stages));
    const u32 empty = full + STAGES * 8;

    let_successor_start();
    const int warp = __shfl_sync(~0u, threadIdx.x / WARP, 0);  // uniform, and known to be
    int lane = threadIdx.x % WARP;
    asm volatile("" : "+r"(lane));
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s * 8, WARPGROUP + 1);  // every copying thread, and the copy of x
            barrier_init(empty + s * 8, CONSUMERS / WARP);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    const int tiles = (p.K + 63) / 64, row_tiles = (p.N + 15) / 16;
    const int rank = SPLIT == 1 ? 0 : int(cluster_rank());
    const int begin = int(s64(tiles) * rank / SPLIT), end = int(s64(tiles) * (rank + 1) / SPLIT);
    const int blocks_n = (p.N + ROWS - 1) / ROWS, blocks_m = (p.M + BATCH - 1) / BATCH;
    const int works = blocks_n * blocks_m * int(p.extent[0] * p.extent[1] * p.extent[2]);

    // Output tiles in bands of 8 batch tiles, so that what runs together shares rows of W and of x in the L2 cache.
    struct Work {
        int first_row, first_m, matrix;
    };
    auto work_of = [&](int work) {
        int matrix = work / (blocks_n * blocks_m), within = work % (blocks_n * blocks_m);
        int band = within / (8 * blocks_n), height = min(8, blocks_m - band * 8), rest = within - band * 8 * blocks_n;
        return Work{rest / height * ROW_TILES, (band * 8 + rest % height) * BATCH, matrix};
    };
    const int step = gridDim.x / SPLIT;

    if (warp >= CONSUMERS / WARP) {
        // What the copying warpgroup gives, the others get: 384 threads start with 168 registers each, 640 with 96.
        if constexpr (GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if constexpr (GROUPS == 4) asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        const int thread = threadIdx.x - CONSUMERS;
        int stage = 0, parity = 1;  // the first pass over a fresh barrier does not wait
        bool waited = false;
        for (int work = blockIdx.x / SPLIT; work < works; work += step) {
            const Work where = work_of(work);
            const Matrix at = matrix_of<F>(p, where.matrix);
            Weights weights;
            weights.start(at.w, where.first_row, row_tiles, tiles, begin, thread);
            auto copy_weights = [&](int to) {  // of the next step
                weights.copy(stages + to * STAGE + WEIGHTS_AT, thread);
                copy_arrive(full + to * 8);
            };
            auto copy_x = [&](int tile, int to) {
                if (thread > 0) return;
                barrier_expect(full + to * 8, BATCH * 128);
                copy_box(stages + to * STAGE, p.map, full + to * 8, tile * 64, where.first_m, at.axis[2], at.axis[1],
                         at.axis[0]);
            };
            int tile = begin;
            if (!waited) {  // W is fixed: its first stages need not wait for the kernels before this one
                const int ahead = min(STAGES, end - begin);
                for (int s = 0; s < ahead; s++) copy_weights(s);
                wait_for_predecessor();
                for (int s = 0; s < ahead; s++) copy_x(begin + s, s);
                tile += ahead, waited = true;
                stage = ahead % STAGES;
                if (ahead == STAGES) parity ^= 1;
            }
            for (; tile < end; tile++) {
                barrier_wait(empty + stage * 8, parity);
                copy_x(tile, stage);
                copy_weights(stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        copy_wait<0>();
        if constexpr (SPLIT > 1) cluster_sync(), cluster_sync();  // with the computing threads
    } else {
        if constexpr (GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        if constexpr (GROUPS == 4) asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        wait_for_predecessor();
        const int group = warp / 4;
        int stage = 0, parity = 0;
        for (int work = blockIdx.x / SPLIT; work < works; work += step) {
            const Work where = work_of(work);
            float acc[ROW_BLOCKS][BATCH / 2];
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < BATCH / 2; j++) acc[b][j] = 0;
            Tile<F> tile[ROW_BLOCKS];
            // Operand A of four steps of 16 columns.
            u32 a0[ROW_BLOCKS][4], a1[ROW_BLOCKS][4], a2[ROW_BLOCKS][4], a3[ROW_BLOCKS][4];
            auto load = [&]() {
                barrier_wait(full + stage * 8, parity);
                const u8* weights = shared + stage * STAGE + WEIGHTS_AT;
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++)
                    Weights::load(tile[b], weights, (group * ROW_BLOCKS + b) * 4 + warp % 4, lane);
            };
            auto dequantize = [&](u32 (&a)[ROW_BLOCKS][4], int h) {
                pin(a);
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++) tile[b].weights(h, a[b]);
            };
            // x: rows of 128 bytes, swizzled, 8 rows to a group of 1024 bytes; a step of 16 columns is 32 bytes.
            auto multiply = [&](u32 (&a)[ROW_BLOCKS][4], u64 x) {
                pin(a);
                wgmma_fence();
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++) Wgmma<BATCH>::add(acc[b], a[b], x);
                wgmma_commit();
                wgmma_wait<2>();  // the instructions before the last two have read their operands
            };
            int previous = 0;  // stage that the tensor cores may still read
            load();
            dequantize(a0, 0);
            dequantize(a1, 1);
            for (int t = begin; t < end; t++) {
                const u64 x = u64((stages + stage * STAGE) >> 4) | u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
                const int current = stage;
                multiply(a0, x);
                dequantize(a2, 2);
                multiply(a1, x + 2);
                barrier_arrive(empty + previous * 8, t > begin && lane == 0);
                dequantize(a3, 3);
                multiply(a2, x + 4);
                if (++stage == STAGES) stage = 0, parity ^= 1;
                if (t + 1 < end) {
                    load();
                    dequantize(a0, 0);
                }
                multiply(a3, x + 6);
                if (t + 1 < end) dequantize(a1, 1);
                previous = current;
            }
            wgmma_wait<0>();
            pin(acc);
            barrier_arrive(empty + previous * 8, lane == 0);

            // [batch row][row of W], CHUNK batch rows at a time; 4 floats more keep a warp's stores in different banks.
            constexpr int CHUNK = SPLIT > 1 || BATCH < 32 ? BATCH : 32, LINE = ROWS + 4;
            const Matrix at = matrix_of<F>(p, where.matrix);
            float* const staged = reinterpret_cast<float*>(shared + (SPLIT > 1 ? 0 : STAGES * STAGE));
            // One copy of the code in the instruction cache: registers of all chunks stand in it, under a condition.
#pragma unroll 1
            for (int first = 0; first < BATCH; first += CHUNK) {
                consumers_sync<CONSUMERS>();  // everyone has read what was here
                float* const own = staged + lane % 4 * 2 * LINE + group * ROW_BLOCKS * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
                for (int j = 0; j < BATCH / 8; j++)
                    if (first == j * 8 / CHUNK * CHUNK)
#pragma unroll
                        for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                            for (int e = 0; e < 4; e++)
                                own[(j * 8 % CHUNK + e % 2) * LINE + b * 64 + e / 2 * 8] = acc[b][j * 4 + e];
                if constexpr (SPLIT > 1)
                    cluster_sync();
                else
                    consumers_sync<CONSUMERS>();
                constexpr int SHARE = CHUNK / SPLIT;
                auto total = [&](int row, int column) {
                    const float* from = staged + (rank * SHARE + row) * LINE + column;
                    if constexpr (SPLIT == 1) return *reinterpret_cast<const float4*>(from);
                    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
                    for (int other = 0; other < SPLIT; other++) {
                        float4 v = load_cluster4(cluster_address(shared_address(from), other));
                        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
                    }
                    return sum;
                };
                const int first_m = where.first_m + first + rank * SHARE;
                finish_rows<ROWS, CONSUMERS>(p, at, first_m, SHARE, where.first_row * 16, threadIdx.x, total);
            }
            if constexpr (SPLIT > 1) cluster_sync();  // no block leaves while another reads from it
        }
    }
}
#endif

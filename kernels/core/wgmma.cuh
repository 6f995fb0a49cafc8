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
// Where there is little to multiply, a stage may be K_GROUPS x K_TILES times as wide: K_GROUPS warpgroups for the same
// rows hide each other's latencies, and K_TILES times 64 columns of each make a turn of the loop worth its overhead.
// The sums of the K_GROUPS meet in shared memory.
// A warpgroup stores its own rows of the result, so that the others may go on meanwhile.
//
// Blocks of a cluster either split K (SPLIT): they share their rows, and their sums meet in shared memory, in a fixed
// order. Or they share x (PAIR): one has the rows of W below the other's, and each copies half of x to both. Without
// a split clusters go from one output tile to the next, and copies run ahead over the border. What is left when every
// cluster has had as many whole tiles is cut into equal shares of K, one after the other over several tiles:
//
//      tiles           |    0    |    1    |    2    |    3    |
//      clusters        |   c 2      |   c 1       |    c 0     |     (c 1: the end of tile 1, the beginning of tile 2)
//
// The cluster with a tile's beginning adds the sums of the end, which wait in global memory, and stores the result.
// It has the higher number, so what it waits for has started.
//
// Of a grouped product the batch tiles are the works. Gated, a warpgroup has 64 rows of W and the same 64 rows of V:
// its threads have what is multiplied in the same places.
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

template <>
struct Wgmma<256> {
    static DEVICE void add(float (&d)[128], const u32* a, u64 b) {
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {"
             "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
             "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
             "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
             "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
             "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
             "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
             "}, {%128, %129, %130, %131}, %132, 1, 1, 1, 0;"
             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
               "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
               "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
               "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
               "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
               "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
               "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
               "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
               "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
               "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
               "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
               "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
               "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
               "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
               "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),
               "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
               "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]),
               "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),
               "+f"(d[126]), "+f"(d[127])
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

// Only the threads of one or more warpgroups meet: a row group's at barrier 1 + group, all computing ones at EVERYONE.
constexpr int EVERYONE = 8;

template <int THREADS>
DEVICE void warpgroups_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(THREADS) : "memory");
}

// What is the same in all lanes, so that the compiler knows it: after a division it does not, and then keeps loops out
// of the uniform registers.
DEVICE int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Columns [begin, end), in steps of 64, of the output tile at row tile `first_row` of W and batch row `first_m`.
struct Segment {
    int first_row, first_m, matrix, begin, end;
};

// The segments of one cluster: whole tiles, then (STREAM) its share of the last `streamed` ones.
template <int ROW_TILES, int BATCH, bool STREAM>
struct Schedule {
    int blocks_n, blocks_m, tiles;         // of a matrix: row and batch tiles; steps of 64 columns
    int cluster, clusters, whole, shared;  // output tiles that this cluster has to itself, and first one that it shares
    int from, to, segments;                // its steps of the shared tiles, the first's beginning being 0

    DEVICE Schedule(const Problem& p, int cluster, int clusters) : cluster(cluster), clusters(clusters) {
        blocks_n = (p.N + ROW_TILES * 16 - 1) / (ROW_TILES * 16), blocks_m = (p.M + BATCH - 1) / BATCH;
        tiles = (p.K + 63) / 64;
        int works = blocks_n * blocks_m * int(p.extent[0] * p.extent[1] * p.extent[2]);
        if constexpr (STREAM) works -= p.streamed;
        whole = segments = uniform((works - cluster + clusters - 1) / clusters);
        if constexpr (STREAM) {
            const u32 steps = p.streamed * tiles, share = clusters - 1 - cluster;
            const int first = uniform(steps * share / clusters), end = uniform(steps * (share + 1) / clusters);
            const int skipped = uniform(first / tiles);
            shared = works + skipped, from = first - skipped * tiles, to = end - skipped * tiles;
            segments += uniform((to + tiles - 1) / tiles);
        }
    }

    DEVICE Segment operator[](int i) const {
        if (!STREAM || i < whole) return segment(cluster + i * clusters, 0, tiles);
        const int piece = i - whole;
        return segment(shared + piece, piece ? 0 : from, min(tiles, to - piece * tiles));
    }

private:
    // Output tiles in bands of 8 batch tiles, so that what runs together shares rows of W and of x in the L2 cache.
    DEVICE Segment segment(int work, int begin, int end) const {
        int matrix = work / (blocks_n * blocks_m), within = work % (blocks_n * blocks_m);
        int band = within / (8 * blocks_n), height = min(8, blocks_m - band * 8), rest = within - band * 8 * blocks_n;
        return {rest / height * ROW_TILES, (band * 8 + rest % height) * BATCH, matrix, begin, end};
    }
};

// The same of a grouped product, whose works are the batch tiles; `end_m` is where a segment's end.
struct GroupSegment : Segment {
    int end_m;
};

template <bool FIRST, class A, class B>
struct Either {
    using Type = A;
};

template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};

template <int ROW_TILES>
struct GroupSchedule {
    const Work* works;
    int blocks_n, tiles, count, first, step, segments;

    template <class P>
    DEVICE GroupSchedule(const P& p, int block, int blocks) : works(p.works), first(block), step(blocks) {
        blocks_n = (p.N + ROW_TILES * 16 - 1) / (ROW_TILES * 16), tiles = (p.K + 63) / 64;
        count = uniform(load_work(works).count);
        segments = uniform((blocks_n * count - block + blocks - 1) / blocks);
    }

    // In bands of 8 works: what runs together shares rows of W and of x.
    DEVICE GroupSegment operator[](int i) const {
        const int at = first + i * step, band = at / (8 * blocks_n), rest = at - band * 8 * blocks_n;
        const int height = min(8, count - band * 8);
        const Work work = load_work(works + uniform(band * 8 + rest % height));
        return {{uniform(rest / height) * ROW_TILES, uniform(work.first), uniform(work.matrix), 0, tiles},
                uniform(work.first + work.rows)};
    }
};

// A warpgroup's sums, thread by thread four at a time, in memory of either kind.
template <int ROW_BLOCKS, int SUMS>
DEVICE void write_sums(const float (&acc)[ROW_BLOCKS][SUMS], float4* to) {
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < SUMS; j += 4)
            to[(b * SUMS + j) / 4 * WARPGROUP] = make_float4(acc[b][j], acc[b][j + 1], acc[b][j + 2], acc[b][j + 3]);
}

template <int ROW_BLOCKS, int SUMS>
DEVICE void add_sums(float (&acc)[ROW_BLOCKS][SUMS], const float4* from) {
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < SUMS; j += 4) {
            const float4 v = from[(b * SUMS + j) / 4 * WARPGROUP];
            acc[b][j] += v.x, acc[b][j + 1] += v.y, acc[b][j + 2] += v.z, acc[b][j + 3] += v.w;
        }
}

// Sums times the factors of their batch rows, of which `last_m` is the last; a lane loads one of every 32. Of two
// factors with the same product (epilogue.cuh) the first or the `second`.
template <int ROW_BLOCKS, int SUMS>
DEVICE void scale_rows(const Problem& p, const Matrix& at, float (&acc)[ROW_BLOCKS][SUMS], int first_m, int last_m,
                       bool second) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int row = 0; row < SUMS * 2; row += WARP) {
        const float2 both = safe_factors(at.unscale ? at.unscale[min(first_m + row + lane, last_m)] : 1, p.lift);
        const float factor = second ? both.y : both.x;
#pragma unroll
        for (int j = row / 8; j < (row + WARP) / 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float own = __shfl_sync(~0u, factor, j * 8 % WARP + lane % 4 * 2 + e);
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++) acc[b][j * 4 + e] *= own, acc[b][j * 4 + e + 2] *= own;
            }
    }
}

// A warpgroup's results, from its registers to memory, with nothing to be done that would take long code for every
// register: scale, bias, one rounding. Those of float32 go at once, eight lanes a sector of 32 bytes. Others turn over
// in its part of the shared memory at `shared`, from where the copy engine takes them while the next tile is computed:
// boxes of 64 columns, batch row after batch row of 128 bytes, swizzled, so that no bank is met twice. There is room
// for all batch rows, or for half of them, which then go in quarters.
template <int GROUPS, int ROOM, int ROW_BLOCKS, int SUMS>
DEVICE void store_rows(const Problem& p, const Matrix& at, float (&acc)[ROW_BLOCKS][SUMS], int matrix, int first_m,
                       int first_n, u8* shared, int group) {
    constexpr int BATCH = SUMS * 2, CHUNK = ROOM < BATCH ? ROOM / 2 : BATCH, BOX = CHUNK * 128, BUFFERS = ROOM / CHUNK;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, lane = thread % WARP;
    if (at.unscale || p.lift != 1) scale_rows(p, at, acc, first_m, p.M - 1, false);
    if (p.lift != 1) scale_rows(p, at, acc, first_m, p.M - 1, true);
    const int own_n = first_n + warp * 16 + lane / 4;  // and 8 further; both again in every row block
    if (p.bias) {
#pragma unroll
        for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
                const int n = min(own_n + b * 64 + e * 4, p.N - 1);
                const float bias = load_float(p.bias, at.bias + n, p.bias_dtype);
#pragma unroll
                for (int j = 0; j < BATCH / 8; j++) acc[b][j * 4 + e] += bias, acc[b][j * 4 + e + 1] += bias;
            }
    }
    if (p.out_dtype == FLOAT32) {
        const int m = first_m + lane % 4 * 2;
        float* to = static_cast<float*>(p.out) + at.out + m * p.out_row + own_n;
#pragma unroll
        for (int j = 0; j < BATCH / 8; j++) {
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (m + j * 8 + e % 2 < p.M && own_n + b * 64 + e / 2 * 8 < p.N)
                        to[e % 2 * p.out_row + b * 64 + e / 2 * 8] = acc[b][j * 4 + e];
            to += 8 * p.out_row;
        }
        return;
    }
    u32 index[BATCH_AXES];
    if (thread == 0) indices_of(p, matrix, index);
#pragma unroll
    for (int first = 0; first < BATCH; first += CHUNK) {
        const u32 staged =
            shared_address(shared) + (first / CHUNK % BUFFERS * GROUPS + group) * (ROW_BLOCKS * BOX);
        const u32 own = staged + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
        if (first >= ROOM && thread == 0) store_box_wait<BUFFERS - 1>();
        warpgroups_sync<WARPGROUP>(1 + group);  // the copy engine has read what was here: its thread has waited
#pragma unroll
        for (int j = 0; j < CHUNK / 8; j += 2)
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; b++) {
                u32 r[4];
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    const float* v = &acc[b][(first / 8 + j + q / 2) * 4 + q % 2 * 2];
                    r[q] = pack(v[0], v[1], p.out_dtype);
                }
                store_matrices_transposed(own + b * BOX + j * 1024, r);
            }
        store_box_fence();
        warpgroups_sync<WARPGROUP>(1 + group);
        if (thread == 0) {
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; b++)
                if (first_n + b * 64 < p.N)
                    store_box(p.out_map, staged + b * BOX, first_n + b * 64, first_m + first, index[2], index[1],
                              index[0]);
            store_box_commit();
        }
    }
}

// The same for results of any kind; with a split, of a share of the batch rows that the blocks of the cluster have
// summed up, all its warpgroups together.
template <int GROUPS, int SPLIT, int ROW_BLOCKS, int SUMS>
DEVICE void finish_sums(const Problem& p, const Matrix& at, float (&acc)[ROW_BLOCKS][SUMS], int first_m, int first_n,
                        u8* shared, int group) {
    // [batch row][row of W], CHUNK batch rows at a time; 4 floats more keep a warp's stores in different banks.
    constexpr int BATCH = SUMS * 2, CHUNK = SPLIT > 1 || BATCH < 32 ? BATCH : 32, SHARE = CHUNK / SPLIT;
    constexpr int OWN_ROWS = ROW_BLOCKS * 64, LINE = OWN_ROWS + 4;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, lane = thread % WARP, rank = blockIdx.x % SPLIT;
    float* const staged = reinterpret_cast<float*>(shared) + group * CHUNK * LINE;
    float* const own = staged + lane % 4 * 2 * LINE + warp * 16 + lane / 4;
    auto total = [&](int row, int column) {
        const float* from = staged + (rank * SHARE + row) * LINE + column;
        if constexpr (SPLIT == 1) return *reinterpret_cast<const float4*>(from);
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int other = 0; other < SPLIT; other++) {
            float4 v;
            load_cluster(v, cluster_address(shared_address(from), other));
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        return sum;
    };
    // One copy of the code in the instruction cache: registers of all chunks stand in it, under a condition.
#pragma unroll 1
    for (int first = 0; first < BATCH; first += CHUNK) {
        if constexpr (SPLIT > 1)
            warpgroups_sync<GROUPS * WARPGROUP>(1);  // everyone has read the stages
        else
            warpgroups_sync<WARPGROUP>(1 + group);  // and what was here
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
            warpgroups_sync<WARPGROUP>(1 + group);
        finish_rows<OWN_ROWS, WARPGROUP>(p, at, first_m + first + rank * SHARE, SHARE, first_n, thread, total);
    }
}

// Those of a grouped product, float32: straight to memory, eight lanes a sector of 32 bytes.
template <int ROW_BLOCKS, int SUMS, class P>
DEVICE void store_group(const P& p, const Matrix& at, float (&acc)[ROW_BLOCKS][SUMS], int first_m, int end_m,
                        int first_n) {
    int thread = threadIdx.x % WARPGROUP;
    asm volatile("" : "+r"(thread));  // what follows from it is worked out here, rather than kept all the time
    const int warp = thread / WARP, lane = thread % WARP;
    scale_rows(p, at, acc, first_m, end_m - 1, false);
    if (p.lift != 1) scale_rows(p, at, acc, first_m, end_m - 1, true);
    constexpr int RESULTS = P::GATED ? 1 : ROW_BLOCKS;
#pragma unroll
    for (int b = 0; b < RESULTS; b++) {
        if (p.activation) activate(acc[b], p.activation);
        if constexpr (P::GATED)
#pragma unroll
            for (int j = 0; j < SUMS; j++) acc[b][j] *= acc[1][j];
    }
    const int n = first_n + warp * 16 + lane / 4, m = first_m + lane % 4 * 2;
    s64 to = m * p.out_row + n;
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++) {
        auto exists = [&](int b, int e) { return m + j * 8 + e % 2 < end_m && n + b * 64 + e / 2 * 8 < p.N; };
        auto place = [&](int b, int e) { return to + e % 2 * p.out_row + b * 64 + e / 2 * 8; };
        if (!P::GATED && p.residual)
#pragma unroll
            for (int b = 0; b < RESULTS; b++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (exists(b, e)) acc[b][j * 4 + e] *= static_cast<const float*>(p.residual)[place(b, e)];
#pragma unroll
        for (int b = 0; b < RESULTS; b++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (exists(b, e)) static_cast<float*>(p.out)[place(b, e)] = acc[b][j * 4 + e];
        to += 8 * p.out_row;
    }
}

template <class F, class C, int BATCH, int ROW_BLOCKS, int GROUPS, int K_GROUPS, int K_TILES, int SPLIT, int PAIR,
          bool STREAM, int STAGES, int ROOM, class P>
DEVICE void wgmma(const P& p) {
    constexpr int ROWS = GROUPS * ROW_BLOCKS * 64, ROW_TILES = ROWS / 16, CONSUMERS = GROUPS * K_GROUPS * WARPGROUP;
    constexpr int CLUSTER = SPLIT * PAIR, SUMS = ROW_BLOCKS * BATCH / 2, WIDTH = K_GROUPS * K_TILES;
    static_assert(SPLIT == 1 || (PAIR == 1 && !STREAM), "a cluster shares either rows or x");
    static_assert(!P::GROUPED || (SPLIT == 1 && !STREAM), "only the GPU knows what there is to share out");
    static_assert(!P::GATED || ROW_BLOCKS == 2, "a row block of W, and one of V");
    constexpr bool BOXES = ROOM > 0 && !P::GROUPED;
    constexpr int SIDES = P::GATED ? 2 : 1, SIDE_TILES = ROW_TILES / SIDES;  // W, V
    static_assert(WIDTH == 1 || !STREAM, "shares of K are no multiples of wide stages");
    using Weights = WeightCopy<F, SIDE_TILES, WARPGROUP, WIDTH>;
    constexpr int X_BYTES = BATCH * 128, WEIGHTS_AT = WIDTH * X_BYTES;
    constexpr int STAGE = (WEIGHTS_AT + SIDES * Weights::SIZE + 1023) / 1024 * 1024;
    // After a codebook's table stages, then staged sums (those of a split take the stages' place).
    u8* const shared = dynamic_shared() + C::TABLE_BYTES;
    static_assert(C::TABLE_BYTES % 1024 == 0, "stages are swizzled");
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    // Opaque, lest the compiler work them out anew in the inner loops.
    u32 full = shared_address(barriers), stages = shared_address(shared);
    asm volatile("" : "+r"(full), "+r"(stages));
    const u32 empty = full + STAGES * 8;

    begin(p);
    const int warp = uniform(threadIdx.x / WARP);
    int lane = threadIdx.x % WARP;
    asm volatile("" : "+r"(lane));
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + s * 8, WARPGROUP + 1);  // every copying thread, and the copies of x
            barrier_init(empty + s * 8, CONSUMERS / WARP * PAIR);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if constexpr (PAIR > 1)
        cluster_sync();
    else
        __syncthreads();

    const int rank = blockIdx.x % CLUSTER;  // unlike what the hardware says, known to be uniform
    const int row_tiles = (p.N + 15) / 16, tiles = (p.K + 63) / 64;  // the latter a multiple of SPLIT * WIDTH
    using Tiles = typename Either<P::GROUPED, GroupSchedule<SIDE_TILES * PAIR>,
                                  Schedule<ROW_TILES * PAIR, BATCH, STREAM>>::Type;
    const Tiles schedule(p, blockIdx.x / CLUSTER, gridDim.x / CLUSTER);
    auto segment_of = [&](int i) {
        auto segment = schedule[i];
        if constexpr (SPLIT > 1) segment.begin = tiles * rank / SPLIT, segment.end = tiles * (rank + 1) / SPLIT;
        if constexpr (PAIR > 1) segment.first_row += rank * SIDE_TILES;
        return segment;
    };

    if (warp >= CONSUMERS / WARP) {
        // What the copying warpgroup gives, the others get: 384 threads start with 168 registers each, 640 with 96.
        if constexpr (GROUPS * K_GROUPS == 2) asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
        if constexpr (GROUPS * K_GROUPS == 4) asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
        const int thread = threadIdx.x - CONSUMERS;
        int stage = 0, parity = 1;  // the first pass over a fresh barrier does not wait
        bool waited = false;
        for (int i = 0; i < schedule.segments; i++) {
            const auto segment = segment_of(i);
            const Matrix at = matrix_of<F>(p, segment.matrix);
            Weights weights[SIDES];
            // Of rows beyond N (the second of a pair may have no others) the last are read instead.
            const int first_row = PAIR > 1 ? min(segment.first_row, row_tiles - 1) : segment.first_row;
#pragma unroll
            for (int side = 0; side < SIDES; side++)
                weights[side].start(side_of(p, at.w, side), first_row, row_tiles, tiles, segment.begin, thread);
            auto copy_weights = [&](int to) {  // of the next step
#pragma unroll
                for (int side = 0; side < SIDES; side++)
                    weights[side].copy(stages + to * STAGE + WEIGHTS_AT + side * Weights::SIZE, thread);
                copy_arrive(full + to * 8);
            };
            auto copy_x = [&](int tile, int to) {
                if (thread > 0) return;
                barrier_expect(full + to * 8, WIDTH * PAIR * p.box * 128);
                for (int k = 0; k < WIDTH; k++)
                    copy_box<PAIR>(stages + to * STAGE + k * X_BYTES + rank % PAIR * (X_BYTES / PAIR), p.map,
                                   full + to * 8, (tile + k) * 64, segment.first_m + rank % PAIR * (BATCH / PAIR),
                                   at.axis[2], at.axis[1], at.axis[0]);
            };
            int tile = segment.begin;
            if (!waited) {  // W is fixed: its first stages need not wait for the kernels before this one
                const int ahead = min(STAGES, (segment.end - segment.begin) / WIDTH);
                for (int s = 0; s < ahead; s++) copy_weights(s);
                wait_for_operands<P>();
                for (int s = 0; s < ahead; s++) copy_x(segment.begin + s * WIDTH, s);
                tile += ahead * WIDTH, waited = true;
                stage = ahead % STAGES;
                if (ahead == STAGES) parity ^= 1;
            }
            for (; tile < segment.end; tile += WIDTH) {
                barrier_wait(empty + stage * 8, parity);
                copy_x(tile, stage);
                copy_weights(stage);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
        copy_wait<0>();
        if constexpr (SPLIT > 1) cluster_sync();  // with the computing threads
    } else {
        if constexpr (GROUPS * K_GROUPS == 2) asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        if constexpr (GROUPS * K_GROUPS == 4) asm volatile("setmaxnreg.inc.sync.aligned.u32 104;");
        C codec(p.values, lane);
        codec.fill(threadIdx.x, CONSUMERS);
        if constexpr (C::TABLE_BYTES > 0) warpgroups_sync<CONSUMERS>(EVERYONE);
        wait_for_operands<P>();
        const int group = warp / 4 % GROUPS, k_group = warp / 4 / GROUPS;
        // A stage is free when all who read it have said so: of a pair, those of both blocks.
        auto release = [&](int stage, bool used) {
            if constexpr (PAIR == 1)
                barrier_arrive(empty + stage * 8, used && lane == 0);
            else
                barrier_arrive_cluster(cluster_address(empty + stage * 8, lane), used && lane < PAIR);
        };
        int stage = 0, parity = 0;
        for (int i = 0; i < schedule.segments; i++) {
            const auto segment = segment_of(i);
            float acc[ROW_BLOCKS][BATCH / 2];
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                for (int j = 0; j < BATCH / 2; j++) acc[b][j] = 0;
            Tile<F> tile[ROW_BLOCKS];
            // Operand A of four steps of 16 columns.
            u32 a0[ROW_BLOCKS][4], a1[ROW_BLOCKS][4], a2[ROW_BLOCKS][4], a3[ROW_BLOCKS][4];
            auto load = [&](int k) {
                if (k == 0) barrier_wait(full + stage * 8, parity);
                const u8* weights = shared + stage * STAGE + WEIGHTS_AT;
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++)
                    Weights::load(tile[b], weights + (P::GATED ? b * Weights::SIZE : 0),
                                  (P::GATED ? group : group * ROW_BLOCKS + b) * 4 + warp % 4, k * K_GROUPS + k_group,
                                  lane);
            };
            auto dequantize = [&](u32 (&a)[ROW_BLOCKS][4], int h) {
                pin(a);
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++) codec.weights(tile[b], h, a[b]);
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
            const int steps = (segment.end - segment.begin) / WIDTH;
            int previous = 0;  // stage that the tensor cores may still read
            load(0);
            dequantize(a0, 0);
            dequantize(a1, 1);
            for (int t = 0; t < steps; t++) {
                const u64 own = u64((stages + stage * STAGE + k_group * X_BYTES) >> 4) | u64(1) << 16 | u64(64) << 32 |
                                u64(1) << 62;
                const int current = stage;
#pragma unroll
                for (int k = 0; k < K_TILES; k++) {
                    const u64 x = own + (k * K_GROUPS * X_BYTES >> 4);
                    multiply(a0, x);
                    dequantize(a2, 2);
                    multiply(a1, x + 2);
                    if (k == 0) release(previous, t > 0);
                    dequantize(a3, 3);
                    multiply(a2, x + 4);
                    if (k + 1 == K_TILES && ++stage == STAGES) stage = 0, parity ^= 1;
                    const bool more = k + 1 < K_TILES || t + 1 < steps;
                    if (more) {
                        load((k + 1) % K_TILES);
                        dequantize(a0, 0);
                    }
                    multiply(a3, x + 6);
                    if (more) dequantize(a1, 1);
                }
                previous = current;
            }
            wgmma_wait<0>();
            pin(acc);
            release(previous, true);

            u8* const staged = shared + (SPLIT > 1 ? 0 : STAGES * STAGE);
            if (BOXES && threadIdx.x % WARPGROUP == 0) store_box_wait<0>();  // of the tile before
            if constexpr (K_GROUPS > 1) {
                warpgroups_sync<CONSUMERS>(EVERYONE);  // the sums before are added, and of a split the stages read
                float4* const sums =
                    reinterpret_cast<float4*>(staged) + group * (K_GROUPS - 1) * SUMS / 4 * WARPGROUP +
                    threadIdx.x % WARPGROUP;
                if (k_group > 0) write_sums(acc, sums + (k_group - 1) * SUMS / 4 * WARPGROUP);
                warpgroups_sync<CONSUMERS>(EVERYONE);
                if (k_group > 0) {
                    if constexpr (SPLIT > 1) cluster_sync();  // with those that add
                    continue;
                }
#pragma unroll 1
                for (int k = 1; k < K_GROUPS; k++) add_sums(acc, sums + (k - 1) * SUMS / 4 * WARPGROUP);
                warpgroups_sync<GROUPS * WARPGROUP>(EVERYONE + 1);  // results take the sums' place
            }
            if constexpr (P::GROUPED) {
                int again = i;
                if (ROW_BLOCKS > 1) asm volatile("" : "+r"(again));  // the same, where registers are scarce
                const auto own = segment_of(again);
                const int first_n = own.first_row * 16 + group * (ROW_BLOCKS / SIDES) * 64;
                store_group(p, matrix_of<F>(p, own.matrix), acc, own.first_m, own.end_m, first_n);
                continue;
            }
            const Matrix at = matrix_of<F>(p, segment.matrix);
            const int first_n = segment.first_row * 16 + group * ROW_BLOCKS * 64;
            const bool leads = threadIdx.x % WARPGROUP == 0;
            auto left_by = [&](int slot) {
                return reinterpret_cast<float4*>(p.partials) + s64(slot) * (SUMS / 4 * WARPGROUP) +
                       threadIdx.x % WARPGROUP;
            };
            if (STREAM && segment.begin > 0) {
                const int slot = blockIdx.x * GROUPS + group;
                write_sums(acc, left_by(slot));
                warpgroups_sync<WARPGROUP>(1 + group);
                set_flag(p.flags + slot, 1, leads);
            } else {
                if (STREAM && segment.end < tiles) {
                    const int slot = (blockIdx.x - CLUSTER) * GROUPS + group;
                    wait_for_flag(p.flags + slot);
                    add_sums(acc, left_by(slot));
                    warpgroups_sync<WARPGROUP>(1 + group);
                    set_flag(p.flags + slot, 0, leads);
                }
                bool stored = false;
                if constexpr (BOXES) {
                    stored = p.straight;
                    if (stored)
                        store_rows<GROUPS, ROOM>(p, at, acc, segment.matrix, segment.first_m, first_n, staged, group);
                }
                if (!stored) finish_sums<GROUPS, SPLIT>(p, at, acc, segment.first_m, first_n, staged, group);
            }
        }
    }
    if constexpr (BOXES) store_box_wait<0>();
    if constexpr (CLUSTER > 1) cluster_sync();  // no block leaves while another reads from it or writes to it
}
#endif

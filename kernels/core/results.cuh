// From a warpgroup's registers to memory: sums for others, and results (wgmma core).
#pragma once
#include "ptx_90.cuh"
#include "schedule.cuh"
#include "turned.cuh"

#if __CUDA_ARCH__ == 900
DEVICE void add_four(float* sums, float4 v) { sums[0] += v.x, sums[1] += v.y, sums[2] += v.z, sums[3] += v.w; }

// A warpgroup's sums, thread by thread four at a time, in memory of either kind.
template <int ROW_BLOCKS, int SUMS>
DEVICE void write_sums(const float (&acc)[ROW_BLOCKS][SUMS], float4* to) {
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < SUMS; j += 4)
            to[(b * SUMS + j) / 4 * WARPGROUP] = make_float4(acc[b][j], acc[b][j + 1], acc[b][j + 2], acc[b][j + 3]);
}

// Adds to a warpgroup's sums what `write_sums` has written.
template <int ROW_BLOCKS, int SUMS>
DEVICE void add_sums(float (&acc)[ROW_BLOCKS][SUMS], const float4* from) {
#pragma unroll
    for (int i = 0; i < ROW_BLOCKS * SUMS / 4; i++) add_four(&acc[i * 4 / SUMS][i * 4 % SUMS], from[i * WARPGROUP]);
}

// Sums that another block has left in global memory (a shared tile's end) come as W and x do, in PARTS more stages of
// the ring. Each has FOURS of every thread's sums, one warpgroup's after the other's.
template <int GROUPS, int SUMS, int STAGE>
struct LeftSums {
    static constexpr int ALL = SUMS / 4, ROOM = STAGE / (GROUPS * WARPGROUP * 16), PARTS = (ALL + ROOM - 1) / ROOM;
    static constexpr int FOURS = (ALL + PARTS - 1) / PARTS;

    // By the copying warpgroup, to a stage.
    static DEVICE void copy(u32 to, const float4* from, int part, int thread) {
        to += thread * 16, from += part * FOURS * WARPGROUP + thread;
#pragma unroll 1
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll
            for (int j = 0; j < FOURS; j++)
                if (ALL % FOURS == 0 || part * FOURS + j < ALL) copy_async(to + j * WARPGROUP * 16, from + j * WARPGROUP);
            to += FOURS * WARPGROUP * 16, from += ALL * WARPGROUP;
        }
    }

    template <int ROW_BLOCKS, int OWN>
    static DEVICE void add(float (&acc)[ROW_BLOCKS][OWN], const u8* stage, int part, int group) {
        const float4* from = reinterpret_cast<const float4*>(stage) + group * FOURS * WARPGROUP + threadIdx.x % WARPGROUP;
#pragma unroll
        for (int j = 0; j < FOURS; j++) {
            const int i = part * FOURS + j;
            if (i < ALL) add_four(&acc[i * 4 / OWN][i * 4 % OWN], from[j * WARPGROUP]);
        }
    }
};

// Sums of WARP batch rows (or of all, if they are fewer), from the `first` of a thread on, times a number for each row, of
// which lanes have one each, from lane `from` on.
template <int ROW_BLOCKS, int SUMS>
DEVICE void scale_part(float (&acc)[ROW_BLOCKS][SUMS], int first, float factor, int from = 0) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int j = 0; j < (SUMS < WARP / 2 ? SUMS : WARP / 2); j += 4)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const float own = __shfl_sync(~0u, factor, from + j * 2 + lane % 4 * 2 + e);
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; b++) acc[b][first + j + e] *= own, acc[b][first + j + e + 2] *= own;
        }
}

// Sums times `unscale` of their batch rows and p.factor: times the first or the `second` of two factors with that product
// (`safe_factors`). `last_m` is the last batch row; a lane loads what one of every 32 has.
template <int ROW_BLOCKS, int SUMS>
DEVICE void scale_rows(const Problem& p, const Matrix& at, float (&acc)[ROW_BLOCKS][SUMS], int first_m, int last_m,
                       bool second) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int row = 0; row < SUMS * 2; row += WARP) {
        const float2 both = safe_factors(at.unscale ? at.unscale[min(first_m + row + lane, last_m)] : 1, p.factor);
        const float factor = second ? both.y : both.x;
        scale_part(acc, row / 2, factor);
    }
}

// Where a lane's part of boxes of 64 columns begins: batch row after batch row of 128 bytes, swizzled, so that no bank is
// met twice. The copy engine takes results so, and wgmma operand B.
DEVICE u32 place_in_boxes(u32 boxes, int warp, int lane) {
    return boxes + (lane / 16 * 8 + lane % 8) * 128 + ((warp * 2 + lane / 8 % 2) ^ lane % 8) * 16;
}

// COUNT batch rows of a warpgroup's sums, from `first` on, to boxes as 16-bit numbers.
template <int COUNT, int ROW_BLOCKS, int SUMS>
DEVICE void stage_boxes(const float (&acc)[ROW_BLOCKS][SUMS], int first, u32 own, int dtype) {
#pragma unroll
    for (int j = 0; j < COUNT / 8; j += 2)
#pragma unroll
        for (int b = 0; b < ROW_BLOCKS; b++) {
            u32 r[4];
#pragma unroll
            for (int q = 0; q < 4; q++) {
                const float* v = &acc[b][(first / 8 + j + q / 2) * 4 + q % 2 * 2];
                r[q] = pack(v[0], v[1], dtype);
            }
            store_matrices_transposed(own + b * (COUNT * 128) + j * 1024, r);
        }
}

// Sums x' V turned along the rows of W, 128 of one warpgroup or of two, and times svh. The tensor cores turn: operand A is the
// matrix of signs, and operand B what there is to turn, in float16 (times p.factor it fits), in boxes at `shared`. Row
// 16 u + r of the matrix has in column 16 s + c the sign of the bits that u and s, and r and c, have in common.
template <int GROUPS, bool BOXES, int ROW_BLOCKS, int SUMS>
DEVICE void turn_sums(const Problem& p, float (&acc)[ROW_BLOCKS][SUMS], int first_n, u8* shared, int group) {
    constexpr int BATCH = SUMS * 2, BOX = BATCH * 128;
    constexpr bool PAIR = ROW_BLOCKS == 1;
    static_assert(GROUPS * ROW_BLOCKS * 64 % HADAMARD == 0, "whole turns");
    const int warp = threadIdx.x % WARPGROUP / WARP, lane = threadIdx.x % WARP, r = lane / 4, c = lane % 4 * 2;
    const u32 boxes = shared_address(shared) + group * ROW_BLOCKS * BOX;
    // Sums are multiplied by p.factor here, before they are float16, and again by what follows, as all results are.
    const float factor = p.factor, up = TURNED / (factor * factor);
    float factors[ROW_BLOCKS][2];
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int n = min(first_n + b * 64 + warp * 16 + r + e * 8, p.N - 1);
            factors[b][e] = half_to_float(svh_of(p)[n]);
        }
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < SUMS; j++) acc[b][j] *= factor;
    // What was here has been read: boxes of results by the copy engine, whose thread has waited. Other results are staged in
    // other places, which all must have read, now and in the end.
    const bool alike = BOXES && p.straight;
    if (alike)
        warpgroups_sync<WARPGROUP>(1 + group);
    else
        warpgroups_sync<GROUPS * WARPGROUP>(EVERYONE + 1);
    stage_boxes<BATCH>(acc, 0, place_in_boxes(boxes, warp, lane), FLOAT16);
    store_box_fence();
    warpgroups_sync<WARPGROUP>(1 + group);
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < SUMS; j++) acc[b][j] = 0;
    constexpr u32 ONES = 0x3c003c00, SIGNS = 0x80008000;
    auto odd = [](int bits) { return u32(__popc(bits) & 1); };
    const u32 corner = ONES ^ odd(r & c) << 15 ^ odd(r & (c + 1)) << 31;
    const int own = PAIR ? group % 2 : 0;  // half of the 128
#pragma unroll 1
    for (int s = 0; s < HADAMARD / 16; s += 2) {  // not unrolled, as all operands would take too many registers
        if (PAIR && s == HADAMARD / 32) warpgroups_sync<2 * WARPGROUP>(EVERYONE + 2 + group / 2);
        const int half = own ^ s / 4;  // its own first, for which it need not wait
        u32 a[2][ROW_BLOCKS][4];
#pragma unroll
        for (int e = 0; e < 2; e++) {
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; b++) {
                const int u = (own + b) * 4 + warp;
                a[e][b][0] = a[e][b][1] = a[e][b][2] = odd(u & (half * 4 + s % 4 + e)) ? corner ^ SIGNS : corner;
                a[e][b][3] = a[e][b][0] ^ SIGNS;
            }
            pin(a[e]);
        }
        const u32 start = boxes + (half - own) * BOX;
        const u64 x = u64(start >> 4) + s % 4 * 2 | u64(1) << 16 | u64(64) << 32 | u64(1) << 62;
        wgmma_fence();
#pragma unroll
        for (int e = 0; e < 2; e++)
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; b++) Wgmma<BATCH>::add(acc[b], a[e][b], x + 2 * e);
        wgmma_commit();
        wgmma_wait<0>();
    }
    pin(acc);
    if (!alike)
        warpgroups_sync<GROUPS * WARPGROUP>(EVERYONE + 1);
    else if constexpr (PAIR)
        warpgroups_sync<2 * WARPGROUP>(EVERYONE + 2 + group / 2);
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
        for (int j = 0; j < SUMS; j++) acc[b][j] *= factors[b][j / 2 % 2] * up;
}

// A warpgroup's results, from its registers to memory, with nothing to be done that would take long code for every
// register: scale, bias, one rounding. Those of float32 go at once, eight lanes a sector of 32 bytes. Others turn over
// in its part of the shared memory at `shared`, from where the copy engine takes them, in boxes, while the next tile is
// computed. There is room for all batch rows, or for half of them, which then go in quarters.
template <int GROUPS, int ROOM, int ROW_BLOCKS, int SUMS>
DEVICE void store_rows(const Problem& p, const Matrix& at, float (&acc)[ROW_BLOCKS][SUMS], int matrix, int first_m,
                       int first_n, u8* shared, int group) {
    constexpr int BATCH = SUMS * 2, CHUNK = ROOM < BATCH ? ROOM / 2 : BATCH, BOX = CHUNK * 128, BUFFERS = ROOM / CHUNK;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, lane = thread % WARP;
    if (at.unscale || p.factor != 1) scale_rows(p, at, acc, first_m, p.M - 1, false);
    if (p.factor != 1) scale_rows(p, at, acc, first_m, p.M - 1, true);
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
        const u32 own = place_in_boxes(staged, warp, lane);
        if (first >= ROOM && thread == 0) store_box_wait<BUFFERS - 1>();
        warpgroups_sync<WARPGROUP>(1 + group);  // the copy engine has read what was here: its thread has waited
        stage_boxes<CHUNK>(acc, first, own, p.out_dtype);
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

// Finishes and stores a warpgroup's results of any kind, up to 32 batch rows at a time.
template <int GROUPS, bool QUICK, int ROW_BLOCKS, int SUMS>
DEVICE void finish_sums(const Problem& p, const Matrix& at, float (&acc)[ROW_BLOCKS][SUMS], int first_m, int first_n,
                        u8* shared, int group) {
    // [batch row][row of W], CHUNK batch rows at a time; 4 floats more keep a warp's stores in different banks.
    constexpr int BATCH = SUMS * 2, CHUNK = BATCH < 32 ? BATCH : 32, OWN_ROWS = ROW_BLOCKS * 64, LINE = OWN_ROWS + 4;
    const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, lane = thread % WARP;
    float* const staged = reinterpret_cast<float*>(shared) + group * CHUNK * LINE;
    float* const own = staged + lane % 4 * 2 * LINE + warp * 16 + lane / 4;
    auto load = [&](int row, int column) {
        return *reinterpret_cast<const float4*>(staged + row * LINE + column);
    };
    // One copy of the code in the instruction cache: registers of all chunks stand in it, under a condition.
#pragma unroll 1
    for (int first = 0; first < BATCH; first += CHUNK) {
        warpgroups_sync<WARPGROUP>(1 + group);  // everyone has read what was here
#pragma unroll
        for (int j = 0; j < BATCH / 8; j++)
            if (first == j * 8 / CHUNK * CHUNK)
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        own[(j * 8 % CHUNK + e % 2) * LINE + b * 64 + e / 2 * 8] = acc[b][j * 4 + e];
        warpgroups_sync<WARPGROUP>(1 + group);
        finish_rows<OWN_ROWS, WARPGROUP, QUICK>(p, at, first_m + first, CHUNK, first_n, thread, load);
    }
}

// Partial sums of an output tile, of a split's blocks and, if these are not added up before (K_GROUPS), of a block's K
// groups: they are added up where results are stored, by as many threads as these take. Every block of a cluster finishes a
// share of the batch rows. Before, each has written its sums to where they are added up, the others' shares to the others'
// memory: what is there can be read soon, and a block may leave while others read theirs.
//
//      shared memory of block r:  [block that wrote][K group][batch row of share r][row of W, and 4 floats between banks]
template <int GROUPS, int K_GROUPS, int SPLIT, int ROW_BLOCKS, int SUMS, int THREADS>
struct PartialSums {
    static constexpr int SHARE = SUMS * 2 / SPLIT, ROWS = GROUPS * ROW_BLOCKS * 64, LINE = ROWS + 4;
    // Whether eight batch rows, whose sums a thread has together, are one block's. Else all sums are sent, its own ones, too.
    static constexpr bool APART = SHARE >= 8;
    static constexpr int BYTES = (SPLIT - APART) * K_GROUPS * SHARE * ROWS * 4;  // that are sent to a block

    // Writes a block's sums to where they are added up; `came` counts what has come to each block of a split.
    static DEVICE void write(const float (&acc)[ROW_BLOCKS][SUMS], u8* shared, int group, int k_group, u32 came) {
        const int thread = threadIdx.x % WARPGROUP, warp = thread / WARP, lane = thread % WARP;
        const int rank = blockIdx.x % SPLIT, part = rank * K_GROUPS + k_group;
        float* const own = reinterpret_cast<float*>(shared) + part * SHARE * LINE + group * (ROW_BLOCKS * 64) + warp * 16 +
                           lane / 4;
#pragma unroll
        for (int first = 0; first < SUMS * 2; first += 8) {
            const int row = first + lane % 4 * 2, owner = APART ? first / SHARE : row / SHARE;
            float* const place = own + row % SHARE * LINE;
            if (SPLIT == 1 || (APART && owner == rank)) {
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                    for (int e = 0; e < 4; e++) place[e % 2 * LINE + b * 64 + e / 2 * 8] = acc[b][first / 2 + e];
            } else {
                const u32 to = cluster_address(shared_address(place), owner), barrier = cluster_address(came, owner);
#pragma unroll
                for (int b = 0; b < ROW_BLOCKS; b++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        store_cluster(to + (e % 2 * LINE + b * 64 + e / 2 * 8) * 4, acc[b][first / 2 + e], barrier);
            }
        }
    }

    // Called by all computing threads of a block.
    static DEVICE void finish(const Problem& p, const Matrix& at, int first_m, int first_n, const u8* shared) {
        auto total = [&](int row, int column) {
            float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int part = 0; part < SPLIT * K_GROUPS; part++) {
                const float* from = reinterpret_cast<const float*>(shared) + (part * SHARE + row) * LINE + column;
                const float4 v = *reinterpret_cast<const float4*>(from);
                sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
            }
            return sum;
        };
        finish_rows<ROWS, THREADS, true>(p, at, first_m + blockIdx.x % SPLIT * SHARE, SHARE, first_n, threadIdx.x, total);
    }
};
#endif

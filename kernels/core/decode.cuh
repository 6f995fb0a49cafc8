// The decode core: small batches, bound by the bytes of W. Any batch is right, 8 or 16 rows at a time.
//
// A cluster of CLUSTER blocks owns ROW_WARPS x ROW_TILES row tiles of W and splits K between its blocks; within a
// block WARPS / ROW_WARPS warps take the tiles along K in turn. Each warp streams its own tiles through its own ring
// of DEPTH slots in shared memory (a slot: ROW_TILES tiles of one 64-column step), and waits for no other. X is
// staged once per chunk of columns. Sums meet in shared memory, of the block and then of the cluster, in a fixed
// order.
//
//      K ->  |  block 0 of the cluster | block 1 |      within a block:  | w0 | w1 | w0 | w1 | ...
//
// W is fixed, so the ring is filled before the kernels that come before this one in the stream are done.
//
// Gated, the first half of the warps along N has rows of W and the second half the same rows of V.
#pragma once
#include "epilogue.cuh"
#include "ptx_90.cuh"
#include "rounded.cuh"
#include "slots.cuh"
#include "staging.cuh"
#include "turned.cuh"

// CONVERTS: x is to be what q8_1 blocks of it stand for; or, of UNSCALED numbers (EXL3), its one row is to be multiplied by
// suh and turned (turned.cuh), and out is float32.
template <class F, class C, int GROUPS, int ROW_TILES, int ROW_WARPS, int WARPS, int DEPTH, int CLUSTER,
          int TOGETHER, bool CONVERTS, class P>
DEVICE void decode(const P& p) {
    constexpr int K_WARPS = WARPS / ROW_WARPS, ROWS = ROW_WARPS * ROW_TILES * 16, WIDTH = GROUPS * 8;
    constexpr int THREADS = WARPS * WARP;
    // Whether rows of x follow each other, and are more than one. Where registers are scarce, or nothing is won by it, x is
    // brought in the other way, too.
    constexpr bool SCARCE = ROW_TILES == 7 && (F::HAS_MIN || (F::CODING == CODEBOOK && WARPS == 16));
    constexpr bool SCALED_LATE = F::CODING == INTEGERS && !ROW_FACTORS<F>;
    constexpr bool BY_COLUMNS = !P::GROUPED && !CONVERTS && !SCARCE && !SCALED_LATE && F::CODING != PROCEDURE;
    constexpr int SIDE_WARPS = P::GATED ? ROW_WARPS / 2 : ROW_WARPS, SIDE_ROWS = SIDE_WARPS * ROW_TILES * 16;
    using Slot = RingSlot<F, ROW_TILES>;
    constexpr int AHEAD = (DEPTH + 1) / 2;  // slots that are filled before x is asked for, which is to come soon
    // After a codebook's table, or W's row plane, what a cluster's blocks send; then rings [WARPS][DEPTH][SLOT] and rows of x;
    // a block's own sums take their place.
    u8* const after = dynamic_shared() + Codecs<C, P::TABLES>::TABLE_BYTES;
    Factors* const factors = reinterpret_cast<Factors*>(after);
    u8* const sent = after + (ROW_FACTORS<F> ? whole_lines(ROWS * 2) : 0);
    u8* const shared = sent + (CLUSTER > 1 ? ROWS * WIDTH * 4 : 0);

    begin(p);
    __shared__ int found[WARPS][WIDTH];
    int* const entries = found[threadIdx.x / WARP];
    const Span span = span_of<WIDTH>(p, entries);
    if (P::GROUPED && span.first == span.end) return wait_for_predecessor();
    const Matrix operands = matrix_soon<F>(p, span.matrix);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    Codecs<C, P::TABLES> codecs(p.values, values_of_v(p), lane);
    const int tiles = (p.K + 63) / 64, row_tiles = (p.N + 15) / 16, groups = groups_of<F>(tiles);
    const int row_warp = warp / K_WARPS, block_row = blockIdx.x / CLUSTER * (SIDE_ROWS / 16);
    const int first_row = block_row + row_warp % SIDE_WARPS * ROW_TILES;
    const int first_m = span.first, batch = min(span.end - first_m, WIDTH);
    auto x_row = [&](int m) {
        if constexpr (P::GROUPED)
            if (!p.works) return entries[m] / p.share;
        return first_m + m;
    };
    const int rank = CLUSTER == 1 ? 0 : blockIdx.x % CLUSTER;
    const int start = int(s64(tiles) * rank / CLUSTER), end = int(s64(tiles) * (rank + 1) / CLUSTER);

    // One slot: every plane's share of the tiles at `tile`, 16 bytes a lane. A row tile beyond N reads the last one
    // instead; its rows are not stored. Offsets from the warp's first row tile fit 32 bits.
    u8* const ring = shared + warp * DEPTH * Slot::SIZE;
    const int first = min(first_row, row_tiles - 1), last = row_tiles - 1 - first;
    const bool second = row_warp >= SIDE_WARPS;
    const Planes w = side_of(p, operands.w, second);
    const u8* const low = w.low + s64(first) * tiles * F::LOW_BYTES;
    const u8* const high = w.high + s64(first) * tiles * F::HIGH_BYTES;
    const u8* const scale = w.scale + s64(first) * tiles * F::SCALE_BYTES;
    const u8* const group = w.group + s64(first) * groups * F::GROUP_BYTES;
    auto fetch = [&](int slot, int tile) {
        if (tile < end) {
            u8* const to = ring + slot * Slot::SIZE;
            auto plane = [&](const u8* source, int bytes, u8* to, int count, int at, bool again) {
                const int pieces = bytes / 16;
#pragma unroll
                for (int i = lane; i < ROW_TILES * pieces; i += WARP) {
                    const u8* const from = source + u32(min(i / pieces, last) * count + at) * bytes + i % pieces * 16;
                    if (again)
                        copy_async_again(shared_address(to + i * 16), from);
                    else
                        copy_async(to + i * 16, from, true);
                }
            };
            plane(low, F::LOW_BYTES, to, tiles, tile, false);
            if constexpr (F::HIGH_BYTES > 0) plane(high, F::HIGH_BYTES, to + Slot::HIGH_AT, tiles, tile, false);
            if constexpr (F::SCALE_BYTES > 0) plane(scale, F::SCALE_BYTES, to + Slot::SCALE_AT, tiles, tile, false);
            if constexpr (F::GROUP_BYTES > 0)
                plane(group, F::GROUP_BYTES, to + Slot::GROUP_AT, groups, tile / F::GROUP_TILES, true);
        }
        copy_commit();
    };
    int next = start + warp % K_WARPS, fetched = next;  // tiles to compute and to fetch
#pragma unroll
    for (int slot = 0; slot < AHEAD; slot++, fetched += K_WARPS) fetch(slot, fetched);
    if constexpr (ROW_FACTORS<F>) {
        static_assert(ROWS / 8 <= THREADS, "a piece for each thread");
        const int row_tile = threadIdx.x / 2 % (SIDE_ROWS / 16), piece = threadIdx.x % 2 * 4;
        const Planes side = side_of(p, operands.w, threadIdx.x >= SIDE_ROWS / 8);
        if (threadIdx.x < ROWS / 8)
            copy_async(factors + threadIdx.x * 4, side.rows + min(block_row + row_tile, row_tiles - 1) * 8 + piece, true);
    }
    u32 sums_came = 0;  // counts what other blocks send
#if __CUDA_ARCH__ >= 900
    if constexpr (CLUSTER > 1) {
        __shared__ __align__(8) u64 barrier;
        sums_came = shared_address(&barrier);
        if (threadIdx.x == 0) {
            barrier_init(sums_came, 1);
            barrier_init_fence();
            barrier_expect(sums_came, (CLUSTER - 1) * (ROWS / CLUSTER) * ((batch + 1) / 2) * 8);
        }
        cluster_arrive();
    }
#endif
    codecs.fill(threadIdx.x, THREADS);
    const C codec = codecs.of(second);
    int plain = 0;
    if constexpr (!P::GROUPED) plain = is_plain(p);
    asm volatile("" : "+r"(plain));  // kept, rather than found again in the end
    if (start == end) copy_commit(), wait_for_operands<P>();  // no columns for this block of the cluster, but rows

    u8* const x_rows = shared + WARPS * DEPTH * Slot::SIZE;
    const int row_bytes = p.chunk * 128 + 16;  // 16 more: the 8 rows of a matrix load fall into different banks
    float acc[ROW_TILES][GROUPS][4] = {}, turned = 1;
    int slot = 0;
    for (int chunk = start; chunk < end; chunk += p.chunk) {
        const int stop = min(chunk + p.chunk, end);
        if (chunk > start) __syncthreads();
        const int pieces = (stop - chunk) * 8;
        auto wait = [&] {
            if (chunk == start) wait_for_operands<P>();
        };
        auto fill = [&] {
            if (fetched == next + AHEAD * K_WARPS)
#pragma unroll
                for (int slot = AHEAD; slot < DEPTH; slot++, fetched += K_WARPS) fetch(slot, fetched);
        };
        bool staged = false;
        if constexpr (BY_COLUMNS) {
            constexpr bool SIGNED = SIGNED_COLUMNS<F>;
            const u16* const from = operands.x + first_m * p.x_row + chunk * 64;
            const u16* const signs = SIGNED && operands.signs ? operands.signs + chunk * 64 : nullptr;
            const int columns = min(p.K - chunk * 64, pieces * 8);
            if (TOGETHER == 8 && batch <= 4)
                staged = stage_columns<SIGNED, THREADS, 4, TOGETHER / 4>(from, p.x_row, signs, batch, columns, pieces, x_rows,
                                                                         row_bytes, wait, fill);
            else
                staged = stage_columns<SIGNED, THREADS, TOGETHER, 1>(from, p.x_row, signs, batch, columns, pieces, x_rows,
                                                                     row_bytes, wait, fill);
        }
        if (!staged)
            stage_rows<SIGNED_COLUMNS<F>, THREADS, TOGETHER>(p, operands, x_row, batch, chunk * 64, pieces, x_rows, row_bytes,
                                                             wait, fill);
        if constexpr (CONVERTS && F::SCALING == UNSCALED) {
            __syncthreads();
            turned = turn_row<THREADS>(x_rows, suh_of(p) + chunk * 64, pieces);
        } else if constexpr (CONVERTS) {
            round_rows<THREADS>(batch, pieces, x_rows, row_bytes);
        }
        __syncthreads();
        // Lanes' 8 columns of a block: steps one after the other, or halves of both steps.
        const int piece = EXACT_PRODUCTS<F> ? lane / 8 % 2 * 2 + lane / 16 : lane / 8;
        u32 row[GROUPS];  // of batch rows beyond M the last is read instead
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            row[group] = shared_address(x_rows) + min(group * 8 + lane % 8, batch - 1) * row_bytes + piece * 16;
        for (; next < stop; next += K_WARPS) {
            copy_wait<DEPTH - 1>();
            __syncwarp();
            u32 x[GROUPS];
#pragma unroll
            for (int group = 0; group < GROUPS; group++) x[group] = row[group] + (next - chunk) * 128;
            if constexpr (F::SCALING == UNSCALED)
                add_values<F>(codec, ring + slot * Slot::SIZE, x, lane, acc);
            else if constexpr (EXACT_PRODUCTS<F>)
                add_products<F>(codec, ring + slot * Slot::SIZE, x, lane, acc);
            else if constexpr (GROUP_SCALES<F> && F::CODING == INTEGERS)
                add_group<F>(codec, ring + slot * Slot::SIZE, x, lane, acc);
            else
                add_codes<F>(codec, ring + slot * Slot::SIZE, x, lane, acc);
            __syncwarp();  // all lanes have read the slot
            fetch(slot, fetched);
            fetched += K_WARPS;
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
        }
    }

    // Sums of the warps along K: [k warp][row][batch row], then of the blocks of the cluster. A row's pairs of batch rows change
    // places, so that lanes which read the same ones of rows below each other meet no bank twice.
    copy_wait<0>();
    __syncthreads();
    float* const sums = reinterpret_cast<float*>(shared);
    auto place = [&](int n, int m) { return n * WIDTH + (m ^ n / (WARP / WIDTH) % (WIDTH / 2) * 2); };
    float* const mine = sums + (warp % K_WARPS * ROWS + warp / K_WARPS * ROW_TILES * 16) * WIDTH;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
#pragma unroll
            for (int j = 0; j < 4; j += 2) {
                const int n = r * 16 + lane / 4 + j * 4, m = group * 8 + lane % 4 * 2;
                float factor;
                if constexpr (ROW_FACTORS<F>)
                    factor = factors[(warp / K_WARPS * ROW_TILES + r) * 8 + lane / 4][j / 2];
                else
                    factor = codec.unscale(j / 2) * turned;
                float2 pair = make_float2(acc[r][group][j] * factor, acc[r][group][j + 1] * factor);
                *reinterpret_cast<float2*>(mine + place(n, m)) = pair;
            }
    __syncthreads();
    u32 matrix = span.matrix;
    asm volatile("" : "+r"(matrix));  // work the matrix out anew, rather than keep it in registers all the time
    const Matrix at = matrix_soon<F>(p, matrix);
    // Two batch rows at once: they lie together.
    auto total = [&](int n, int m) {
        float2 value = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < K_WARPS; w++) {
            float2 v = *reinterpret_cast<const float2*>(sums + w * ROWS * WIDTH + place(n, m));
            value.x += v.x, value.y += v.y;
        }
        return value;
    };
    auto store = [&](int n, int m, float2 value, float2 other) {
        if (block_row * 16 + n >= p.N) return;
        if constexpr (!P::GROUPED) {
            if (plain && p.out_dtype != FLOAT32) {  // mostly
                const s64 to = at.out + (first_m + m) * p.out_row + (block_row * 16 + n) * p.out_column;
                const u32 pair = pack(value.x * p.factor, value.y * p.factor, p.out_dtype);
                u16* const out = static_cast<u16*>(p.out) + to;
                *out = u16(pair);
                if (m + 1 < batch) out[p.out_row] = u16(pair >> 16);
                return;
            }
        }
#pragma unroll 1
        for (int e = 0; e < 2 && m + e < batch; e++)
            if constexpr (P::GROUPED)
                finish(p, at, x_row(m + e), p.works ? first_m + m + e : entries[m + e], block_row * 16 + n,
                       e ? value.y : value.x, e ? other.y : other.x);
            else
                finish(p, at, first_m + m + e, block_row * 16 + n, e ? value.y : value.x, plain);
    };
    const int pairs = (batch + 1) / 2;
    if constexpr (CLUSTER == 1) {
#pragma unroll 1
        for (int i = threadIdx.x; i < SIDE_ROWS * pairs; i += THREADS) {
            const int n = i % SIDE_ROWS, m = i / SIDE_ROWS * 2;
            store(n, m, total(n, m), P::GATED ? total(SIDE_ROWS + n, m) : float2());
        }
    } else {
#if __CUDA_ARCH__ >= 900
        // Each block finishes a share of the rows, and gets the others' sums of them: [block][row][batch row].
        constexpr int SHARE = SIDE_ROWS / CLUSTER;
        float* const shares = reinterpret_cast<float*>(sent);
        cluster_wait();  // the others have started
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * pairs; i += THREADS) {
            const int n = i % ROWS, m = i / ROWS * 2, owner = n % SIDE_ROWS / SHARE;
            float* const to =
                shares + rank * (ROWS / CLUSTER) * WIDTH + place(n / SIDE_ROWS * SHARE + n % SHARE, m);
            const float2 value = total(n, m);
            if (owner == rank)
                *reinterpret_cast<float2*>(to) = value;
            else
                store_cluster(cluster_address(shared_address(to), owner), value, cluster_address(sums_came, owner));
        }
        __syncthreads();
        barrier_wait_cluster(sums_came, 0);
        auto of_cluster = [&](int n, int m) {
            float2 value = make_float2(0, 0);
#pragma unroll
            for (int other = 0; other < CLUSTER; other++) {
                const float* const from = shares + other * (ROWS / CLUSTER) * WIDTH + place(n, m);
                const float2 v = *reinterpret_cast<const float2*>(from);
                value.x += v.x, value.y += v.y;
            }
            return value;
        };
#pragma unroll 1
        for (int i = threadIdx.x; i < SHARE * pairs; i += THREADS) {
            const int n = i % SHARE, m = i / SHARE * 2;
            store(rank * SHARE + n, m, of_cluster(n, m), P::GATED ? of_cluster(SHARE + n, m) : float2());
        }
#endif
    }
}

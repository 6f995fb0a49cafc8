// Attention over a cache of buckets: every block streams a share of one sequence's tokens, all its buckets, for a few
// key heads; then `merge` adds up the shares of each sequence, in order.
#include "../attention/bucket.cuh"
#if CUQUANT_BOXES
#include "../attention/boxes.cuh"
#endif

constexpr int WARPS = CUQUANT_WARPS;  // that compute

constexpr int BLOCK_HEADS = CUQUANT_BLOCK_HEADS;
constexpr int STREAMS = WARPS / BLOCK_HEADS;  // warps that share a head's tokens

#if CUQUANT_BOXES
static_assert(BLOCK_HEADS == BOX_HEADS, "a ring's warps have different heads");

struct Shared {
    u64 barriers[STREAMS * Ring::DEPTH * 2];

    DEVICE void init(const Attention& p, const Maps& maps) { Ring::init(p, maps, barriers); }
};

// What a warp does for one key head.
struct Work {
    const Attention& p;
    const Share& share;
    int head, first_row, lane;
    Ring ring;

    DEVICE Work(const Attention& p, const Share& share, Shared& shared, int head, int first_row, int own, int lane,
                const Maps& maps)
        : p(p), share(share), head(head), first_row(first_row), lane(lane),
          ring(p, maps, share, threadIdx.x / WARP % BOX_HEADS, shared.barriers) {}

    DEVICE void start() const {
        if (ring.head == 0 && lane == 0) ring.fill();
    }

    template <int TIER = 0>
    DEVICE void run(Queries& q) {
        if constexpr (has_tier(TIER)) {
            constexpr int BITS = bits_of(TIER);
            Boxes<BITS> tokens(ring, share.cuts[0][TIER], share.cuts[1][TIER], lane);
            if (tokens.first < tokens.end) {
                q.turn<BITS>(true);
                q.turn_sums<BITS>(true);
                Bucket<BITS, Boxes<BITS>>(p, q, tokens, share.sequence, head, first_row).run();
                q.turn<BITS>(false);
                q.turn_sums<BITS>(false);
            }
        }
        if constexpr (TIER + 1 < TIERS) run<TIER + 1>(q);
    }
};
#else
struct Shared {
    DEVICE void init(const Attention&) {}
};

// What a warp does for one key head.
struct Work {
    const Attention& p;
    const Share& share;
    int head, first_row, own, lane;
    u32 ring;
    int started;  // the tier that is in the ring already

    DEVICE Work(const Attention& p, const Share& share, Shared&, int head, int first_row, int own, int lane)
        : p(p), share(share), head(head), first_row(first_row), own(own), lane(lane),
          ring(shared_address(dynamic_shared() + threadIdx.x / WARP * CUQUANT_RING)), started(-1) {}

    template <int TIER>
    DEVICE Stream<bits_of(TIER)> stream() const {
        return {p, p.tiers[TIER], share.sequence, head, share.cuts[0][TIER], share.cuts[1][TIER], own, STREAMS, ring,
                lane};
    }

    DEVICE bool empty(int tier) const { return share.cuts[0][tier] >= share.cuts[1][tier]; }

    // Start to read the first bucket that has tokens.
    template <int TIER = 0>
    DEVICE void start() {
        if constexpr (has_tier(TIER)) {
            if (!empty(TIER)) {
                stream<TIER>().start();
                started = TIER;
                return;
            }
        }
        if constexpr (TIER + 1 < TIERS) start<TIER + 1>();
    }

    template <int TIER = 0>
    DEVICE void run(Queries& q) const {
        if constexpr (has_tier(TIER)) {
            if (!empty(TIER)) {
                constexpr int BITS = bits_of(TIER);
                Stream<BITS> tokens = stream<TIER>();
                if (TIER != started) tokens.start();
                q.turn<BITS>(true);
                q.turn_sums<BITS>(true);
                Bucket<BITS, Stream<BITS>>(p, q, tokens, share.sequence, head, first_row).run();
                q.turn<BITS>(false);
                q.turn_sums<BITS>(false);
                tokens.finish();
            }
        }
        if constexpr (TIER + 1 < TIERS) run<TIER + 1>(q);
    }
};
#endif

// Row sums of one warp in shared memory.
struct Partial {
    float2 weight[ROWS];  // reference, sum
    float o[ROWS][PADDED];

    DEVICE void store(const Queries& q, int lane) {
        const int g = lane / 4, i = lane % 4;
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const int row = Queries::row_of(n * 8 + i * 2 + c);
                float total = q.total[n][c];
#pragma unroll
                for (int step = 4; step < WARP; step *= 2) total += __shfl_xor_sync(~0u, total, step);
                if (g == 0) weight[row] = make_float2(q.reference[n][c], total);
#pragma unroll
                for (int m = 0; m < PAIRS * 4; m++)
                    *reinterpret_cast<float2*>(&o[row][(g * PAIRS + m / 4) * 8 + m % 4 * 2]) =
                        make_float2(q.o[n][m][c], q.o[n][m][c + 2]);
            }
    }
};

// They take the rings' place: a warp's that of its own ring, or those of eight warps that of the ring they share.
constexpr int PARTIAL = CUQUANT_BOXES ? sizeof(Partial) : CUQUANT_RING;
static_assert(PARTIAL * BLOCK_HEADS <= (CUQUANT_BOXES ? 1 : BLOCK_HEADS) * CUQUANT_RING, "there is room");
static_assert(sizeof(Partial) <= PARTIAL, "for each");

DEVICE Partial& partial(int head, int stream) {
    return *reinterpret_cast<Partial*>(dynamic_shared() + (stream * BLOCK_HEADS + head) * PARTIAL);
}

DEVICE void add(float4& sum, const float4& v, float factor) {
    sum.x += v.x * factor, sum.y += v.y * factor, sum.z += v.z * factor, sum.w += v.w * factor;
}

// Channels from `column` on of a row's result.
template <int COUNT>
DEVICE void store_row(const Attention& p, int sequence, int head, int row, int column, const float (&sum)[COUNT], float total) {
    const int place = p.q_len == 1 ? 0 : row % p.q_len, query_head = head * group_of(p) + (p.q_len == 1 ? row : row / p.q_len);
    const s64 to = sequence * p.out_strides[0] + place * p.out_strides[1] + query_head * p.out_strides[2];
#pragma unroll
    for (int c = 0; c < COUNT; c++)
        store_float(p.out, to + (column + c) * p.out_strides[3], p.out_dtype, total == 0 ? sum[c] : __fdiv_rn(sum[c], total));
}

// A warp adds up what the streams of a block have of a row; the result, or what `merge` goes on with.
DEVICE void combine(const Attention& p, const Share& share, int local, int row, int first_row, int lane) {
    float2 all = make_float2(Queries::LEAST, 0);
#pragma unroll 4
    for (int k = 0; k < STREAMS; k++) all.x = fmaxf(all.x, partial(local, k).weight[row].x);
    const int head = blockIdx.z * BLOCK_HEADS + local, at = first_row + row, out_row = head * rows_of(p) + at;
    const s64 rows = s64(p.heads) * p.q_len, to = blockIdx.x * rows + out_row;
#pragma unroll
    for (int column = lane * 4; column < PADDED; column += WARP * 4) {
        float4 sum = make_float4(0, 0, 0, 0);
        all.y = 0;
#pragma unroll 4
        for (int k = 0; k < STREAMS; k++) {
            const Partial& from = partial(local, k);
            const float factor = exp2_of(from.weight[row].x - all.x);
            all.y += from.weight[row].y * factor;
            add(sum, *reinterpret_cast<const float4*>(&from.o[row][column]), factor);
        }
        if (column >= CUQUANT_DIM) continue;
        if (share.splits > 1)
            *reinterpret_cast<float4*>(p.sums + to * CUQUANT_DIM + column) = sum;
        else
            store_row(p, share.sequence, head, at, column, {sum.x, sum.y, sum.z, sum.w}, all.y);
    }
    if (lane > 0) return;
    if (share.splits > 1)
        p.weights[to] = all;
    else if (p.totals)
        p.totals[share.sequence * rows + out_row] = all;
}

// Grid: blocks that share the tokens, groups of ROWS rows, groups of key heads. Warp w has key head w % BLOCK_HEADS of
// its group, and the steps of stream w / BLOCK_HEADS.
template <class... M>
DEVICE void attend(const Attention& p, const M&... maps) {
    __shared__ Share share;
    __shared__ Shared shared;
    if (threadIdx.x == 0) shared.init(p, maps...);
    let_successor_start();
    // What is needed first. It may still change, but the L2 cache has what kernels store.
    if (threadIdx.x == 0)
#pragma unroll
        for (int t = 0; t < TIERS; t++)
            if (has_tier(t)) prefetch(p.tiers[t].lengths);
    wait_for_predecessor();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    // Of a single sequence queries are asked for before the share is known.
    const bool single = p.batch == 1;
    if (!single) {
        if (warp == 0) share.find(p, blockIdx.x, lane);
        __syncthreads();
        if (share.sequence < 0) return;
    }
    const auto find_single = [&] {
        if (!single) return;
        if (warp == 0) share.find_single(p, blockIdx.x, lane);
        __syncthreads();
    };
    const int first_row = blockIdx.y * ROWS;
    if (warp < STREAMS * BLOCK_HEADS) {
        const int head = blockIdx.z * BLOCK_HEADS + warp % BLOCK_HEADS, own = warp / BLOCK_HEADS;
        Work work(p, share, shared, head, first_row, own, lane, maps...);
        const bool writes = p.queries != nullptr && own == 0 && (single ? blockIdx.x : share.split) == 0;
        Queries q(p, single ? 0 : share.sequence, head, first_row, writes, lane, [&] {
            find_single();
            if (share.sequence >= 0) work.start();
        });
        if (share.sequence < 0) return;
        work.run(q);
        if (CUQUANT_BOXES) __syncthreads();  // all of a ring's warps have read it
        partial(warp % BLOCK_HEADS, own).store(q, lane);
    } else {
        find_single();
        if (share.sequence < 0) return;
    }
    __syncthreads();
    const int count = min(ROWS, rows_of(p) - first_row);
    for (int item = warp; item < BLOCK_HEADS * count; item += WARPS)
        combine(p, share, item % BLOCK_HEADS, item / BLOCK_HEADS, first_row, lane);
    if (threadIdx.x == 0 && share.split == 0 && blockIdx.y == 0 && blockIdx.z == 0)
        p.splits[share.sequence] = make_int2(share.first, share.splits);
}

#if CUQUANT_BOXES
extern "C" __global__ void __launch_bounds__(WARPS * WARP, 1)
    attention(const __grid_constant__ Attention p, const __grid_constant__ Maps maps) {
    attend(p, maps);
}
#else
extern "C" __global__ void __launch_bounds__(WARPS * WARP, 1) attention(const __grid_constant__ Attention p) {
    attend(p);
}
#endif

// A block for each row of each sequence whose tokens were split: warp w adds up the shares w, w + MERGE_WARPS, ...
constexpr int MERGE_WARPS = 16, AT_ONCE = 4;

extern "C" __global__ void __launch_bounds__(MERGE_WARPS* WARP) merge(const __grid_constant__ Attention p) {
    __shared__ float4 sums[MERGE_WARPS][PADDED / 4];
    __shared__ float2 weights[MERGE_WARPS];
    let_successor_start();
    wait_for_predecessor();
    const int row = blockIdx.x, sequence = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int2 split = p.splits[sequence];
    // Of a single sequence sums are asked for before it is known how many there are: those beyond are not used.
    const bool single = p.batch == 1;
    const int most_splits = single ? p.budget : split.y;
    const s64 rows = s64(p.heads) * p.q_len, first = (single ? 0 : split.x) * rows + row;
    // Each warp refers to the largest reference of its own shares.
    float2 own = make_float2(Queries::LEAST, 0);
    float4 sum[PADDED / 128 + (PADDED < 128)] = {};
#pragma unroll 1
    for (int base = warp; base < most_splits; base += MERGE_WARPS * AT_ONCE) {
        float2 w[AT_ONCE];
        float4 v[AT_ONCE][PADDED / 128 + (PADDED < 128)];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            const int share = base + k * MERGE_WARPS;
            const s64 at = first + min(share, most_splits - 1) * rows;
            w[k] = p.weights[at];
            if (share >= split.y) w[k] = make_float2(Queries::LEAST, 0);
#pragma unroll
            for (int c = 0; c * 128 < PADDED; c++) {
                const int column = c * 128 + lane * 4;
                if (column < CUQUANT_DIM) v[k][c] = *reinterpret_cast<const float4*>(p.sums + at * CUQUANT_DIM + column);
            }
        }
        float most = own.x;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) most = fmaxf(most, w[k].x);
        const float before = exp2_of(own.x - most);
        own = make_float2(most, own.y * before);
#pragma unroll
        for (int c = 0; c * 128 < PADDED; c++) {
            sum[c].x *= before, sum[c].y *= before, sum[c].z *= before, sum[c].w *= before;
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            if (base + k * MERGE_WARPS >= split.y) break;
            const float factor = exp2_of(w[k].x - most);
            own.y += w[k].y * factor;
#pragma unroll
            for (int c = 0; c * 128 < PADDED; c++) add(sum[c], v[k][c], factor);
        }
    }
    if (split.y == 1) return;
    if (lane == 0) weights[warp] = own;
#pragma unroll
    for (int c = 0; c * 128 < PADDED; c++)
        if (c * 32 + lane < PADDED / 4) sums[warp][c * 32 + lane] = sum[c];
    __syncthreads();
    static_assert(CUQUANT_DIM <= MERGE_WARPS * WARP, "a thread for each channel");
    if (threadIdx.x >= CUQUANT_DIM) return;
    // A thread for a channel. Little code: it is rarely in the cache.
    float2 all = make_float2(Queries::LEAST, 0);
#pragma unroll 4
    for (int w = 0; w < MERGE_WARPS; w++) all.x = fmaxf(all.x, weights[w].x);
    float y[1] = {0};
#pragma unroll 4
    for (int w = 0; w < MERGE_WARPS; w++) {
        const float factor = exp2_of(weights[w].x - all.x);
        all.y += weights[w].y * factor;
        y[0] += reinterpret_cast<const float*>(sums[w])[threadIdx.x] * factor;
    }
    const int key_rows = rows_of(p);
    store_row(p, sequence, row / key_rows, row % key_rows, threadIdx.x, y, all.y);
    if (p.totals && threadIdx.x == 0) p.totals[sequence * rows + row] = all;
}

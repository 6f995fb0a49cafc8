// Attention over a cache of buckets: every block streams shares of one or several sequences' tokens, all their buckets, for a few
// key heads; then `merge` adds up the shares of each sequence, in order.
#include "../attention/bucket.cuh"
#include "../attention/ring.cuh"
#include "../attention/merge.cuh"
#if CUQUANT_BOXES
#include "../attention/boxes.cuh"
#endif

constexpr int WARPS = CUQUANT_WARPS;  // that compute
constexpr int COPYING_WARPS = 4;      // with boxes: a warpgroup more, which copies
constexpr int THREADS = (WARPS + (CUQUANT_BOXES ? COPYING_WARPS : 0)) * WARP;

constexpr int BLOCK_HEADS = CUQUANT_BLOCK_HEADS;
static_assert(WARPS == BLOCK_HEADS * BLOCK_STREAMS && (WARPS & (WARPS - 1)) == 0, "one for each");

// `merge`, which does not wait for what was before this kernel, is let start when that is done (core/ptx.cuh), and when this
// block knows its shares: it reads lengths, too, and takes registers. Whether this block has any.
DEVICE bool shared_out(const Shares& shares) {
    __syncthreads();
    let_successor_start();
    return shares.any();
}

#if CUQUANT_BOXES
// Registers of a thread: as launched, then of those that compute, and of the others.
constexpr int REGISTERS_AT_FIRST = 96, COMPUTING_REGISTERS = 112, COPYING_REGISTERS = 24;
static_assert(WARPS * COMPUTING_REGISTERS + COPYING_WARPS * COPYING_REGISTERS <= THREADS / WARP * REGISTERS_AT_FIRST,
              "else computing warps wait for ever");
static_assert(BLOCK_HEADS == BOX_HEADS, "a ring's warps have different heads");

// By one thread, before any waits for copies.
DEVICE void begin(const Attention&, const Maps& maps) {
    Copies::prefetch_maps(maps);
    Place::init();
}

// What a warp does for one key head.
struct Work {
    const Attention& p;
    Shares& shares;
    const int head, first_row, own, lane;
    Ring ring;

    DEVICE Work(const Attention& p, Shares& shares, int head, int first_row, int own, int lane)
        : p(p), shares(shares), head(head), first_row(first_row), own(own), lane(lane) {}

    // Who has what, and queries, when the kernel before is done; false where this block has nothing. Of a single sequence queries
    // are asked for between its lengths and its share.
    DEVICE bool begin(Queries& q) const {
        const bool finds = threadIdx.x < WARP;
        Lengths lengths(p, p.batch);
        if (ONE_SEQUENCE) {
            wait_for_predecessor();
            if (finds) lengths = Lengths(p, 0);
        } else {
            finds ? shares.find(p, own_block(), lane) : wait_for_predecessor();
            if (!shared_out(shares)) return false;
            if (!shares.owned(own)) return true;
        }
        const int sequence = ONE_SEQUENCE ? 0 : shares.owner(own).sequence;
        Given given(p, sequence, head, first_row, lane);
        given.ask();
        if (ONE_SEQUENCE) {
            if (finds) shares.of[0].find(p, lengths, own_block(), lane);
            if (!shared_out(shares)) return false;
        }
        const Share& share = shares.owner(own);
        q.take(p, given, sequence, head, first_row, p.queries && own == share.first_stream() && share.split == 0, lane);
        return true;
    }

    DEVICE bool busy() const { return true; }

    template <int TIER = 0>
    DEVICE void run(Queries& q) {
        if constexpr (has_tier(TIER)) {
            constexpr int BITS = bits_of(TIER);
            const Share& share = shares.owner(own);  // anew for each bucket: registers are scarce
            Boxes<BITS> tokens(ring, share.cuts[0][TIER], share.cuts[1][TIER], own - share.first_stream(), share.streams(), lane);
            if (tokens.first < tokens.end) {
                q.fit<BITS>(true);
                q.fit_sums<BITS>(true);
                Bucket<BITS, Boxes<BITS>>(p, q, tokens, share.sequence, head, first_row).run();
                q.fit<BITS>(false);
                q.fit_sums<BITS>(false);
            }
        }
        if constexpr (TIER == 0 && has_tier(0) && INTEGER_QUERIES) q.to_integers(lane);
        if constexpr (TIER + 1 < TIERS) run<TIER + 1>(q);
    }
};
#else
DEVICE void begin(const Attention&) {}

// What a warp does for one key head.
struct Work {
    const Attention& p;
    Shares& shares;
    const int head, first_row, own, lane;
    u32 ring;
    int started;  // the tier whose first tokens are in the ring, or on their way

    DEVICE Work(const Attention& p, Shares& shares, int head, int first_row, int own, int lane)
        : p(p), shares(shares), head(head), first_row(first_row), own(own), lane(lane),
          ring(shared_address(dynamic_shared() + threadIdx.x / WARP * CUQUANT_RING)), started(NONE) {
        asm volatile("" : "+r"(ring));  // opaque, lest the compiler work it out anew at every step
    }

    // Who has what, and queries, when the kernel before is done, and the first tokens on their way; false where this block has
    // nothing.
    //
    // Lengths of a single sequence are read, and shared out, while that kernel still runs. It may change them, but mostly tokens
    // that are there before are there after, and need not wait until that is known: the last warp, which has fewest of them,
    // finds it out while the others make of queries what products want.
    DEVICE bool begin(Queries& q) {
        __shared__ Share early;
        const int warp = threadIdx.x / WARP, finder = WARPS - 1;
        constexpr bool EARLY = OVERLAPS && ONE_SEQUENCE;
        bool known = !EARLY, starts = true, taken = false;
        // One warp reads lengths, which are the same for all blocks: they are served one after the other.
        int which = EARLY && warp == finder ? 0 : p.batch;
        asm volatile("" : "+r"(which));  // known before the wait
        Lengths lengths(p, which);
        if (EARLY) {
            if (warp == finder) early.find(p, lengths, own_block(), lane), early.loosen(p, lane);
            __syncthreads();
        } else {
            warp == finder ? shares.find(p, own_block(), lane) : wait_for_predecessor();
            if (!shared_out(shares)) return false;
            if (!shares.owned(own)) return true;
        }
        const Share& share = shares.owner(own);
        const int sequence = ONE_SEQUENCE ? 0 : share.sequence;
        const bool writes = p.queries && own == share.first_stream() && (EARLY ? own_block() : share.split) == 0;
        Given given(p, sequence, head, first_row, lane);
#pragma unroll 1
        while (true) {
            const Share& now = known ? share : early;
            if (starts)
                start(now, [&] {
                    if (!known) wait_for_predecessor(), lengths = Lengths(p, which);
                    given.ask();
                });
            if (!known && warp == finder)
                shares.of[0].find(p, lengths, own_block(), lane);
            else if (!taken && (busy(now) || writes))
                q.take(p, given, sequence, head, first_row, writes, lane), taken = true;
            if (known) return true;
            if (!shared_out(shares)) {
                stop();
                return false;
            }
            known = true;
            const bool same = goes_on(early, share);
            if (!same) stop();
            starts = !same && busy(share);
        }
    }

    DEVICE bool busy() const { return busy(shares.owner(own)); }
    DEVICE void run(Queries& q) const { run(q, shares.owner(own)); }

private:
    // Whether any of the tokens are this warp's.
    template <int TIER = 0>
    DEVICE bool busy(const Share& share) const {
        if constexpr (has_tier(TIER))
            if (share.cuts[0][TIER] + (own - share.first_stream()) * step_of(TIER) < share.cuts[1][TIER]) return true;
        if constexpr (TIER + 1 < TIERS) return busy<TIER + 1>(share);
        return false;
    }

    template <int TIER = 0>
    DEVICE void run(Queries& q, const Share& share) const {
        if constexpr (has_tier(TIER)) {
            if (!empty(share, TIER)) {
                constexpr int BITS = bits_of(TIER);
                Stream<BITS> tokens = stream<TIER>(share);
                if (TIER != started) tokens.start([] {});
                q.fit<BITS>(true);
                q.fit_sums<BITS>(true);
                Bucket<BITS, Stream<BITS>>(p, q, tokens, share.sequence, head, first_row).run();
                q.fit<BITS>(false);
                q.fit_sums<BITS>(false);
                tokens.finish();
            }
        }
        if constexpr (TIER == 0 && has_tier(0) && INTEGER_QUERIES) q.to_integers(lane);
        if constexpr (TIER + 1 < TIERS) run<TIER + 1>(q, share);
    }

    static constexpr int NONE = -1;

    // Start to read the first bucket that has tokens, when `before` has waited.
    template <class F, int TIER = 0>
    DEVICE void start(const Share& share, F before) {
        if constexpr (has_tier(TIER)) {
            if (!empty(share, TIER)) {
                stream<TIER>(share).start(before);
                started = TIER;
                return;
            }
        }
        if constexpr (TIER + 1 < TIERS)
            start<F, TIER + 1>(share, before);
        else
            before();
    }

    // Whether what was started for one share is what another begins with, which may end sooner: tokens that were copied from
    // behind its end are hidden. A warp that has started without tokens, or has none now, does not go on.
    DEVICE bool goes_on(const Share& before, const Share& share) const {
        bool same = before.sequence == share.sequence && busy(share) == (started != NONE);
#pragma unroll
        for (int t = 0; t < TIERS; t++) {
            if (!has_tier(t) || t > started) continue;
            if (t < started)
                same = same && empty(share, t);
            else
                same = same && !empty(share, t) && share.cuts[0][t] == before.cuts[0][t] &&
                       share.cuts[1][t] <= before.cuts[1][t];
        }
        return same;
    }

    // Nothing is on its way any more.
    DEVICE void stop() {
        copy_wait<0>();
        __syncwarp();
        started = NONE;
    }

    template <int TIER>
    DEVICE Stream<bits_of(TIER)> stream(const Share& share) const {
        return {p, p.tiers[TIER], share.sequence, head, share.cuts[0][TIER], share.cuts[1][TIER], own - share.first_stream(),
                share.streams(), ring, lane};
    }

    static DEVICE bool empty(const Share& share, int tier) { return share.cuts[0][tier] >= share.cuts[1][tier]; }
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
                const int row = row_of(n * 8 + i * 2 + c);
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

// Bytes between partial results, which take the rings' place: a warp's that of its own ring, or those of all warps that of
// the first ring of boxes.
constexpr int PARTIAL = CUQUANT_BOXES ? sizeof(Partial) : CUQUANT_RING;
static_assert(!CUQUANT_BOXES || PARTIAL * WARPS <= CUQUANT_RING, "there is room");
static_assert(sizeof(Partial) <= PARTIAL, "for each");

DEVICE Partial& partial(int head, int stream) {
    return *reinterpret_cast<Partial*>(dynamic_shared() + (stream * BLOCK_HEADS + head) * PARTIAL);
}

// A warp adds up what a share's streams have of a row; it stores the result, or what `merge` goes on with.
DEVICE void combine(const Attention& p, const Share& share, int local, int row, int first_row, int lane) {
    constexpr int N = BLOCK_STREAMS;
    static_assert((N & (N - 1)) == 0 && N <= WARP, "each stream has a lane, or several");
    constexpr int APART = BLOCK_HEADS * PARTIAL;  // bytes from a stream's to the next's
    const u8* const given = reinterpret_cast<const u8*>(&partial(local, share.first_stream()));
    const auto of_stream = [&](int k) -> const Partial& { return *reinterpret_cast<const Partial*>(given + k * APART); };
    const int streams = share.streams();
    float2 all = make_float2(Queries::LEAST, 0);
    if (lane % N < streams) all = of_stream(lane % N).weight[row];
    const float own = all.x;
#pragma unroll
    for (int step = 1; step < N; step *= 2) all.x = fmaxf(all.x, __shfl_xor_sync(~0u, all.x, step));
    const float factor = exp2_of(own - all.x);
    all.y *= factor;
#pragma unroll
    for (int step = 1; step < N; step *= 2) all.y += __shfl_xor_sync(~0u, all.y, step);
    const int head = head_group() * BLOCK_HEADS + local, at = first_row + row, out_row = head * rows_of(p) + at;
#pragma unroll
    for (int base = 0; base < PADDED; base += WARP * 4) {
        const int column = base + lane * 4;
        float4 sums[N], sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < N; k++) {
            sums[k] = make_float4(0, 0, 0, 0);
            if (k < streams && column < PADDED) sums[k] = *reinterpret_cast<const float4*>(&of_stream(k).o[row][column]);
        }
#pragma unroll
        for (int k = 0; k < N; k++) add(sum, sums[k], __shfl_sync(~0u, factor, k));
        if (column >= CUQUANT_DIM) continue;
        if (share.splits > 1)
            left_at(p, share.number(), out_row)[column / 4] = sum;
        else
            store_channels(p, place_of(p, share.sequence, out_row), column, sum, all.y);
    }
    if (share.splits > 1) {
        if (lane < 2) left_at(p, share.number(), out_row)[CUQUANT_DIM / 4 + lane] = make_float4(all.x, all.y, 0, 0);
    } else if (p.totals && lane == 0) {
        p.totals[s64(share.sequence) * p.heads * p.q_len + out_row] = all;
    }
}

#if CUQUANT_BOXES
// What the warpgroup beside those that compute does, a warp for each ring. It leaves registers to the others.
DEVICE void copy_tokens(const Attention& p, const Shares& shares, const Maps& maps) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING_REGISTERS));
    wait_for_predecessor();
    if (!shared_out(shares)) return;
    const int ring = threadIdx.x / WARP - WARPS;
    if (ring < RINGS && shares.owned(ring) && thread_again() % WARP == 0) Copies(p, maps, shares.owner(ring), ring).run();
    __syncthreads();
    __syncthreads();
}
#endif

// What a warp has summed up to results, or to what `merge` goes on with.
DEVICE void end(const Attention& p, const Shares& shares, const Queries& q, int first_row, int warp, int lane) {
    partial(warp % BLOCK_HEADS, warp / BLOCK_HEADS).store(q, lane);
    if (!COUNTED && !ONE_SEQUENCE && threadIdx.x < shares.count) tell_merge(p, shares.of[threadIdx.x]);
    __syncthreads();
    const int items = BLOCK_HEADS * min(ROWS, rows_of(p) - first_row), count = ONE_SEQUENCE ? 1 : shares.count;
    for (int at = 0; at < count; at++) {
        const Share& share = shares.of[at];
        const int start = ONE_SEQUENCE ? warp : (warp - at * items) & (WARPS - 1);  // rows of all shares go round the warps
        for (int item = start; item < items; item += WARPS)
            combine(p, share, item % BLOCK_HEADS, item / BLOCK_HEADS, first_row, lane);
        if (!COUNTED || share.splits == 1 || start >= items) continue;
        const auto counter = [&](int item) {
            const int head = head_group() * BLOCK_HEADS + item % BLOCK_HEADS, row = first_row + item / BLOCK_HEADS;
            return counter_of(p, share.sequence, head * rows_of(p) + row, lane);
        };
        u32* const of_first = counter(start);
        const u32 value = counted(share.splits);
        __syncwarp();
        if (lane >= p.parts) continue;
        add_to(of_first, value);  // waits, half a microsecond, until others can read all that was stored
        for (int item = start + WARPS; item < items; item += WARPS) add_relaxed(counter(item), value);
    }
}

// Grid: blocks that share the tokens, and groups of key heads (split.cuh), groups of ROWS rows. Warp w has key head
// w % BLOCK_HEADS of its group, and stream w / BLOCK_HEADS of tokens.
template <class... M>
DEVICE void attend(const Attention& p, const M&... maps) {
    __shared__ Shares shares;
    if (threadIdx.x == 0) begin(p, maps...);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
#if CUQUANT_BOXES
    if (warp >= WARPS) return copy_tokens(p, shares, maps...);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTING_REGISTERS));
#endif
    const int head = head_group() * BLOCK_HEADS + warp % BLOCK_HEADS, own = warp / BLOCK_HEADS, first_row = blockIdx.y * ROWS;
    Work work(p, shares, head, first_row, own, lane);
    Queries q;
    if (!work.begin(q)) return;
    q.clear();
    if (shares.owned(own) && work.busy()) work.run(q);
    if (CUQUANT_BOXES) __syncthreads();  // all warps have read their rings
    const int thread = thread_again();
    end(p, shares, q, first_row, thread / WARP, thread % WARP);
}

// BESIDE: registers of `merge` stay free, where the compiler can be told so.
#if CUQUANT_BESIDE && __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1204
#define BOUNDS __maxnreg__((REGISTERS - MERGE_REGISTERS) / THREADS < 255 ? (REGISTERS - MERGE_REGISTERS) / THREADS : 255)
#else
#define BOUNDS __launch_bounds__(THREADS, 1)
#endif

#if CUQUANT_BOXES
extern "C" __global__ void BOUNDS
    attention(const __grid_constant__ Attention p, const __grid_constant__ Maps maps) {
    attend(p, maps);
}
#else
extern "C" __global__ void BOUNDS attention(const __grid_constant__ Attention p) {
    attend(p);
}
#endif

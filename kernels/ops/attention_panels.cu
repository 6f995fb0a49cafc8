// Attention of many queries (sm_90a): every block has a share of one sequence's tokens, all its buckets, of one key head, and 64
// or 128 of its rows of queries. Two warpgroups convert the tokens' codes to float16 numbers in shared memory, once for all rows
// (or see to those that the copy engine brings), and two multiply: each has 64 rows, or every other panel of the same 64
// (STREAMS). Then `merge` adds up the shares of each sequence, in order, as behind ops/attention.cu.
#include "../attention/direct.cuh"
#include "../attention/merge.cuh"
#include "../attention/panel_rows.cuh"

#if __CUDA_ARCH__ == 900
constexpr int MULTIPLYING = 2 * WARPGROUP, THREADS = 4 * WARPGROUP, STREAMS = CUQUANT_STREAMS, BLOCK_ROWS = 128 / STREAMS;
// Registers of a thread: those that convert leave theirs to the others.
constexpr int CONVERTING_REGISTERS = 56, MULTIPLYING_REGISTERS = 200;
static_assert(CONVERTING_REGISTERS + MULTIPLYING_REGISTERS <= 2 * 128, "else multiplying warps wait for ever");

// What a warpgroup leaves in shared memory, in the place of panels, when all have been read.
struct Left {
    float o[64][PanelRows::WIDTH];
    float2 weight[64];
};
static_assert(2 * sizeof(Left) <= PANEL_SLOTS * PANEL, "there is room");

DEVICE Left& left_by(int warpgroup) { return reinterpret_cast<Left*>(dynamic_shared())[warpgroup]; }

// Keys or values of all buckets, in panels.
template <bool VALUES, int TIER = 0>
DEVICE void convert(const Attention& p, const PanelRing& ring, const Share& share, int least_last, u32 panel = 0) {
    if constexpr (has_tier(TIER)) {
        const int begin = share.cuts[0][TIER], end = share.cuts[1][TIER];
        if (begin < end)
            Converter<bits_of(TIER), VALUES>(p.tiers[TIER], ring, share.sequence, head_group(), begin, end, least_last,
                                             PanelScale(p.scale).of_keys, threadIdx.x % WARPGROUP).run(panel);
    }
    if constexpr (TIER + 1 < TIERS) convert<VALUES, TIER + 1>(p, ring, share, least_last, panel);
}

// Maps are asked for ahead.
DEVICE void prefetch() {}
DEVICE void prefetch(const PanelMaps& maps) { DirectPanels::prefetch_maps(maps); }

// Panels of keys, or of values, by the warpgroup that sees to them.
DEVICE void fill(const Attention& p, const PanelRing& ring, const Share& share, bool values, int least_last) {
    values ? convert<true>(p, ring, share, least_last) : convert<false>(p, ring, share, least_last);
}

DEVICE void fill(const Attention& p, const PanelRing& ring, const Share& share, bool values, int least_last,
                 const PanelMaps& maps) {
    const DirectPanels panels(ring, share);
    const int thread = threadIdx.x % WARPGROUP;
    const s64 row = share.sequence * p.tiers[0].room + share.cuts[0][0];
    if (values)
        panels.look_through(thread);
    else if (thread == 0)
        panels.copy(maps, int(row), head_group());
    else if (thread >= PANEL_TOKENS)
        panels.tell(p.tiers[0].slots + row, least_last, thread - PANEL_TOKENS);
}

DEVICE int panels_of(const Share& share) {
    int panels = 0;
#pragma unroll
    for (int t = 0; t < TIERS; t++)
        if (has_tier(t)) panels += max(0, share.cuts[1][t] - share.cuts[0][t] + PANEL_TOKENS - 1) / PANEL_TOKENS;
    return panels;
}

// Slots that a block's rows see: all of them those up to `least`, and none of them any beyond `most`.
struct Seen {
    int least = NO_SLOT - 1, most = NO_SLOT - 1;

    // By a warp, of BLOCK_ROWS rows or those that are left, which are of one query head or of several.
    DEVICE Seen(const Attention& p, int sequence, int first_row) {
        if (!CUQUANT_MASKED || !p.causal) return;
        const int count = min(BLOCK_ROWS, rows_of(p) - first_row), first = first_row % p.q_len;
        const bool several = first + count > p.q_len;
        const int begin = several ? 0 : first, end = several ? p.q_len : first + count;
        if (!p.positions) {
            least = min(least, last_seen(p, sequence, begin)), most = last_seen(p, sequence, end - 1);
            return;
        }
        most = -1;
        for (int position = begin + threadIdx.x % WARP; position < end; position += WARP) {
            const int last = last_seen(p, sequence, position);
            least = min(least, last), most = max(most, last);
        }
#pragma unroll
        for (int step = 16; step; step /= 2) {
            least = min(least, __shfl_xor_sync(~0u, least, step));
            most = max(most, __shfl_xor_sync(~0u, most, step));
        }
    }
};

// Takes the last tokens of a block's buckets away that none of its rows sees: those behind the last one that is seen, as slots
// of a bucket mostly ascend, but need not. By one warp, while others prepare queries.
DEVICE void trim(Share& share, const Attention& p, int first_row, int lane) {
    constexpr int AT_A_TIME = 16;  // tokens of a lane
    const int most = Seen(p, share.sequence, first_row).most;
    if (p.next_slots[share.sequence] - 1 - most < PANEL_TOKENS) return;
#pragma unroll 1
    for (int t = 0; t < TIERS; t++) {
        if (!has_tier(t)) continue;
        const int* const slots = p.tiers[t].slots + share.sequence * p.tiers[t].room;
        const int begin = share.cuts[0][t];
        int end = share.cuts[1][t];
        for (bool found = false; !found && end > begin;) {
            const int from = max(begin, end - AT_A_TIME * WARP);
            int last = from;
#pragma unroll
            for (int k = 0; k < AT_A_TIME; k++) {
                const int token = from + k * WARP + lane;
                if (token < end && slots[token] <= most) last = token + 1;
            }
            end = warp_max(last), found = end > from;
        }
        if (lane == 0) share.cuts[1][t] = end;
    }
}

// Whether there may be panels of such tokens.
DEVICE bool trims(const Attention& p) { return CUQUANT_MASKED && p.causal && (p.positions || p.to_come > PANEL_TOKENS); }

// Calls store(k, sums of a lane's four channels, reference and sum of weights) for each of a warp's rows, of the block's
// from `row` on, when streams are added up.
template <class F>
DEVICE void each_row(int row, int count, int lane, F store) {
    const bool there = lane * 4 < CUQUANT_DIM;
    const Left& left = left_by(STREAMS == 2 ? 0 : row / 64);
    const float4* from = reinterpret_cast<const float4*>(left.o[row % 64]) + (there ? lane : 0);
    const float2* weights = left.weight + row % 64;
    constexpr int OTHER = sizeof(Left);  // bytes to the second stream's
#pragma unroll 4
    for (int k = 0; k < count; k++, from += PanelRows::WIDTH / 4, weights++) {
        float2 weight = *weights;
        float4 sum = *from;
        if constexpr (STREAMS == 2) {
            const float2 other = *reinterpret_cast<const float2*>(reinterpret_cast<const u8*>(weights) + OTHER);
            const float4 more = *reinterpret_cast<const float4*>(reinterpret_cast<const u8*>(from) + OTHER);
            const float most = fmaxf(weight.x, other.x), own = exp2_of(weight.x - most), factor = exp2_of(other.x - most);
            sum.x *= own, sum.y *= own, sum.z *= own, sum.w *= own;
            add(sum, more, factor);
            weight = make_float2(most, fmaf(weight.y, own, other.y * factor));
        }
        store(k, sum, weight);
    }
}

// A warp's rows to results, or to what `merge` goes on with. Where one goes follows from where the last went, and all is
// asked once: a single warp is slow to work out anything.
DEVICE void finish(const Attention& p, const Share& share, int row, int count, int first_row, int lane) {
    const int own = first_row + row, out_row = head_group() * rows_of(p) + own;
    const bool there = lane * 4 < CUQUANT_DIM;
    if (share.splits > 1) {
        float4* left = left_at(p, share.number(), out_row);
        each_row(row, count, lane, [&](int, const float4& sum, const float2& weight) {
            if (there) left[lane] = sum;
            if (lane < 2) left[CUQUANT_DIM / 4 + lane] = make_float4(weight.x, weight.y, 0, 0);
            left += LEFT_ROW;
        });
        return;
    }
    s64 place = place_of(p, share.sequence, out_row) + lane * 4 * p.out_strides[3];
    int position = own % p.q_len;
    const s64 next = p.out_strides[1], next_head = p.out_strides[2] - (p.q_len - 1) * p.out_strides[1];
    const auto advance = [&] {
        const bool last = ++position == p.q_len;
        place += last ? next_head : next, position = last ? 0 : position;
    };
    const bool bfloat = p.out_dtype == BFLOAT16;
    const u64 apart = u64(p.out) / 2 | p.out_strides[0] | p.out_strides[1] | p.out_strides[2];  // in numbers of 16 bits
    if (p.out_dtype != FLOAT32 && p.out_strides[3] == 1 && apart % 4 == 0) {
        each_row(row, count, lane, [&](int, const float4& sum, const float2& weight) {
            const float factor = inverse_of(weight.y), x = sum.x * factor, y = sum.y * factor, z = sum.z * factor, w = sum.w * factor;
            if (there)
                *reinterpret_cast<uint2*>(static_cast<u16*>(p.out) + place) =
                    bfloat ? make_uint2(pack(x, y, BFLOAT16), pack(z, w, BFLOAT16)) : make_uint2(pack(x, y, FLOAT16), pack(z, w, FLOAT16));
            advance();
        });
    } else {
        each_row(row, count, lane, [&](int, const float4& sum, const float2& weight) {
            if (there) store_channels(p, place, 0, sum, weight.y);
            advance();
        });
    }
    if (p.totals) {
        float2* const totals = p.totals + s64(share.sequence) * p.heads * p.q_len + out_row;
        each_row(row, count, lane, [&](int k, const float4&, const float2& weight) {
            if (lane == 0) totals[k] = weight;
        });
    }
}

// Of several sequences, by a call: within the kernel it would leave the rest too few registers.
static __device__ __noinline__ void find_several(Shares& shares, const Attention& p, int lane) {
    shares.find(p, own_block(), lane);
}

// Grid: blocks that share the tokens, and key heads (split.cuh), groups of BLOCK_ROWS rows: the last positions, which see most
// tokens, come first.
template <class... M>
DEVICE void attend(const Attention& p, const M&... maps) {
    __shared__ Shares shares;
    const Share& share = shares.of[0];
    __shared__ __align__(8) u64 barriers[PanelRing::BARRIERS];
    __shared__ __align__(16) u8 about[PANEL_SLOTS / 2 * About::SIZE];
    const PanelRing ring(shared_address(dynamic_shared()), shared_address(barriers), shared_address(about));
    const int warp = uniform(threadIdx.x / WARP), lane = threadIdx.x % WARP;
    const int first_row = (gridDim.y - 1 - blockIdx.y) * BLOCK_ROWS;
    if (threadIdx.x == 0) prefetch(maps...);
    if (warp == 0) ring.begin(lane, MULTIPLYING / WARP / STREAMS);
    // Who has what is known, and what merges may start. Whether this block has anything.
    const auto meet = [&] {
        __syncthreads();
        let_successor_start();
        return shares.any();
    };
    if (warp < THREADS / WARP - 1)
        wait_for_predecessor();
    else if (ONE_SEQUENCE)
        shares.find(p, own_block(), lane);
    else
        find_several(shares, p, lane);
    if (!ONE_SEQUENCE && !meet()) return;
    if (warp >= MULTIPLYING / WARP) {
        if (ONE_SEQUENCE && !meet()) return;
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CONVERTING_REGISTERS));
        if (trims(p)) {
            if (warp == THREADS / WARP - 1) trim(shares.of[0], p, first_row, lane);
            warpgroups_sync<THREADS>(EVERYONE);
        }
        const bool values = warp >= (MULTIPLYING + WARPGROUP) / WARP;
        fill(p, ring, share, values, values ? 0 : Seen(p, share.sequence, first_row).least, maps...);
        return;
    }
    // Of a single sequence queries are asked for while it is shared out.
    const int head = head_group(), warpgroup = warp / 4, stream = STREAMS == 2 ? warpgroup : 0;
    const int own_row = (STREAMS == 2 ? 0 : warpgroup * 64) + warp % 4 * 16;
    Given given(p, ONE_SEQUENCE ? 0 : share.sequence, head, first_row + own_row, lane);
    given.ask();
    if (ONE_SEQUENCE && !meet()) return;
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING_REGISTERS));
    PanelRows rows(p, ring, share.sequence, head, first_row + own_row, warpgroup, lane);
    rows.begin(given, p.queries && share.split == 0 && stream == 0);
    if (trims(p)) warpgroups_sync<THREADS>(EVERYONE);
    if (STREAMS == 1) rows.begin_turns();
    rows.run<STREAMS == 1>(panels_of(share), stream, STREAMS);
    if (STREAMS == 1) rows.end_turns();
    warpgroups_sync<MULTIPLYING>(EVERYONE);  // all panels have been read
    rows.store(left_by(warpgroup).o[warp % 4 * 16], left_by(warpgroup).weight + warp % 4 * 16);
    if (STREAMS == 2)
        warpgroups_sync<MULTIPLYING>(EVERYONE);
    else
        __syncwarp();  // each goes on with its own
    if (threadIdx.x == 0) tell_merge(p, share);
    constexpr int EACH = BLOCK_ROWS / (MULTIPLYING / WARP);
    finish(p, share, warp * EACH, min(rows_of(p) - first_row - warp * EACH, EACH), first_row, lane);
}

#if CUQUANT_DIRECT
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attention(const __grid_constant__ Attention p, const __grid_constant__ PanelMaps maps) {
    attend(p, maps);
}
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const __grid_constant__ Attention p) { attend(p); }
#endif
#endif

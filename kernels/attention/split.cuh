// Which tokens a block has: the tokens of all sequences and buckets are shared out by what they cost.
//
// Lengths are read where they are, on the GPU: a captured launch serves a cache that grows. There is a number of streams of tokens,
// a few of each block. Every sequence gets some of them, by what its tokens cost, one behind the other, so a block has the last
// streams of one sequence, then whole sequences, and the first streams of the next:
//
//   sequence   0 0 0 0 0 0 0 0 0 0 0 1 1 2 2 2 2 2 2 2 2 2 2 ...
//   block      0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 2 2 2 2 2 2 2 ...     of eight streams
//   share      0               1     2   3     4
//
// What a block has of a sequence is a share; its streams take steps of its tokens in turn. Blocks of one sequence cut its buckets,
// one after another, at the same places, since they compute them alike.
#pragma once
#include "cache.cuh"

constexpr int GRAIN = 16;  // tokens that are not divided

// Blocks along x: those of all groups of key heads that have the same tokens, side by side, as is what they read. So the few
// without tokens, if any, come last.
constexpr int HEAD_GROUPS = CUQUANT_HEADS / CUQUANT_BLOCK_HEADS;

DEVICE int own_block() { return blockIdx.x / HEAD_GROUPS; }
DEVICE int head_group() { return blockIdx.x % HEAD_GROUPS; }

DEVICE constexpr int step_of(int tier) { return step_of_bits(bits_of(tier)); }

DEVICE constexpr bool has_tier(int tier) { return CUQUANT_TIERS >> tier & 1; }

// Cost of a grain of eight heads, about, in units of 80 ns of an H200's multiprocessor. Blocks with different buckets share
// the memory, which serves each by the bytes that it has asked for, as much as there is room for in its rings.
DEVICE constexpr float cost(int tier) {
    const float costs[TIERS] = {15, 8.4f, 4.4f, 4.8f, 4.3f};
    return costs[tier];
}

// Tokens of a sequence's buckets. The L1 cache may have old ones.
struct Lengths {
    int of[TIERS];

    DEVICE Lengths(const Attention& p, int sequence) {
#pragma unroll
        for (int t = 0; t < TIERS; t++) of[t] = has_tier(t) && sequence < p.batch ? __ldcg(p.tiers[t].lengths + sequence) : 0;
    }

    // Cost of a sequence, with the same bits wherever it is worked out: blocks, and the kernel that merges what they leave,
    // share alike.
    DEVICE float cost() const {
        float sum = 0;
#pragma unroll
        for (int t = 0; t < TIERS; t++)
            if (has_tier(t)) sum = fmaf(grains(t), ::cost(t), sum);
        return sum;
    }

    DEVICE Lengths of_lane(int lane) const {
        Lengths other = *this;
#pragma unroll
        for (int t = 0; t < TIERS; t++)
            if (has_tier(t)) other.of[t] = __shfl_sync(~0u, of[t], lane);
        return other;
    }

    DEVICE float cost_of(int t) const { return __fmul_rn(grains(t), ::cost(t)); }

private:
    DEVICE float grains(int t) const { return float((of[t] + GRAIN - 1) / GRAIN); }
};

// Streams of tokens, each of one sequence, of which a block has so many: a warp of each key head (ring.cuh), a ring (boxes.cuh), or
// all of the block (panels.cuh).
constexpr int BLOCK_STREAMS = CUQUANT_BLOCK_STREAMS;

constexpr bool ONE_SEQUENCE = CUQUANT_ONE_SEQUENCE;  // sequence, which has whole blocks

constexpr int CUTTING = WARP / 2;  // lanes, a share's two cuts of up to eight tiers each

// What a block has of one sequence.
struct Share {
    int sequence;              // none if negative
    int first, split, splits;  // number of the sequence's first share; how many of its shares come before this one; how many it has
    int start, count;          // the first of the block's streams that it has, and how many; not set for a single sequence
    int cuts[2][8];            // of each tier: the first token that is this share's, and the first behind those

    DEVICE int number() const { return first + split; }
    DEVICE int first_stream() const { return ONE_SEQUENCE ? 0 : uniform(start); }
    DEVICE int streams() const { return ONE_SEQUENCE ? BLOCK_STREAMS : uniform(count); }

    // By one warp, in shared memory: of a single sequence with these lengths.
    DEVICE void find(const Attention& p, const Lengths& lengths, int block, int lane) {
        const int count = blocks_of_single(p, lengths);
        if (lane == 0) sequence = block < count ? 0 : -1, first = 0, split = block, splits = count;
        if (lane < CUTTING) cuts[lane / 8][lane % 8] = cut(lengths, lane % 8, block + lane / 8, count);
    }

    // By the same warp, of lengths that another kernel may have been about to change: no token is beyond the rows that there
    // are, and what ends within a grain ends with it, as it may by now.
    DEVICE void loosen(const Attention& p, int lane) {
        __syncwarp();
        if (lane >= TIERS || !has_tier(lane)) return;
        int& begin = cuts[0][lane];
        int& end = cuts[1][lane];
        if (sequence < 0 || begin < 0 || begin >= min(s64(end), p.tiers[lane].room))
            begin = end = 0;
        else
            end = int(min((s64(end) + GRAIN - 1) / GRAIN * GRAIN, p.tiers[lane].room));
    }

    // Of a single sequence: the first share's number, and how many there are.
    static DEVICE int2 all_of_single(const Attention& p) { return make_int2(0, blocks_of_single(p, Lengths(p, 0))); }

    // By half of a warp, in shared memory: of one of several sequences, with these lengths, which has `all` streams from `from` on.
    DEVICE void find(const Lengths& lengths, int which, int from, int all, int block, int lane) {
        const int begin = max(from, block * BLOCK_STREAMS), end = min(from + all, (block + 1) * BLOCK_STREAMS);
        if (lane == 0) {
            const int2 its = numbers(which, from, all);
            sequence = which, first = its.x, split = number(which, block) - first, splits = its.y;
            start = begin - block * BLOCK_STREAMS, count = end - begin;
        }
        cuts[lane / 8][lane % 8] = cut(lengths, lane % 8, (lane < 8 ? begin : end) - from, all);
    }

    static DEVICE int streams_of(float cost, float rate) { return max(1, int(ceilf(__fmul_rn(cost, rate)))); }

    // Which part of all cost a unit is, or a little less: sums and quotients are rounded, and no stream may be beyond the grid. A
    // lane adds up float32 costs of up to MOST_BLOCKS / 32 sequences: 2048 additions, each off by 2^-24 of the sum at most, are
    // 2^-13. A few more roundings have the rest. Of equal sequences each may get one stream less than fit, from 2048 streams on.
    static DEVICE float share_of_unit(float total) { return __fmul_rn(about_inverse(total), 1 - 0x1p-12f); }

    static DEVICE int blocks_of_single(const Attention& p, const Lengths& lengths) {
        const float all = lengths.cost(), rate = fminf(__fmul_rn(float(p.streams), share_of_unit(all)), p.finest);
        return streams_of(all, __fmul_rn(rate, 1.f / BLOCK_STREAMS));
    }

    // Numbers go up with the sequences and, within one, the blocks: where one of them ends either is one further.
    static DEVICE int number(int sequence, int block) { return sequence + block; }

    // Of the shares of a sequence that has `count` streams, from `start` on: the first one's number, and how many there are.
    static DEVICE int2 numbers(int sequence, int start, int count) {
        const int block = start / BLOCK_STREAMS;
        return make_int2(number(sequence, block), (start + count - 1) / BLOCK_STREAMS - block + 1);
    }

private:
    // Where a share of a tier's bucket begins, of `splits` alike, at a whole step; number `splits` is the bucket's end.
    static DEVICE int cut(const Lengths& lengths, int tier, int share, int splits) {
        float before = 0, each = 1;
        int length = 0, step = GRAIN;
#pragma unroll
        for (int t = 0; t < TIERS; t++) {
            if (!has_tier(t)) continue;
            if (t < tier) before += lengths.cost_of(t);
            if (t == tier) length = lengths.of[t], step = step_of(t), each = GRAIN / (step_of(t) * cost(t));
        }
        if (share >= splits) return length;
        const float at = __fmul_rn(lengths.cost(), __fmul_rn(float(share), about_inverse(float(splits))));
        const float steps = rintf(__fmul_rn(__fadd_rn(at, -before), each));
        return min(int(fminf(fmaxf(steps, 0.f) * step, 2e9f)), length);
    }
};

// Which streams a lane's sequence has, of several.
struct Portion {
    float cost, rate;  // of all sequences: streams for a unit of cost
    int start, count;

    Portion() = default;

    // By one warp, of the first 32; each lane has one's cost. There are enough streams for all.
    //
    // Each sequence has whole streams, at least one. If the cost is divided by the number of streams, up to batch - 1 streams too
    // many are wanted; if it is divided by `batch` fewer, never, nor by half a stream more than that (which lets sequences of one
    // length have as many as fit). Each sequence has half a stream too many, in the mean, so numbers between are tried, unless
    // there are too many sequences for that.
    DEVICE Portion(const Attention& p, float own, int lane) {
        constexpr int STEPS = 4, MOST = 4 * WARP;
        float total = own;
        for (int base = WARP; base < p.batch; base += WARP) total += Lengths(p, base + lane).cost();
#pragma unroll
        for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        const float share = Share::share_of_unit(total), fewer = float(p.batch) / STEPS;
        const auto rate_of = [&](int step) {
            return fminf(__fmul_rn(fmaf(-fewer, float(step), p.streams + 0.5f), share), p.finest);
        };
        int wanted[STEPS];
#pragma unroll
        for (int k = 0; k < STEPS; k++) wanted[k] = lane < p.batch ? Share::streams_of(own, rate_of(k)) : 0;
        if (p.batch > WARP && p.batch <= MOST)
            for (int base = WARP; base < p.batch; base += WARP) {
                const float other = Lengths(p, base + lane).cost();
#pragma unroll
                for (int k = 0; k < STEPS; k++)
                    wanted[k] += base + lane < p.batch ? Share::streams_of(other, rate_of(k)) : 0;
            }
        rate = rate_of(STEPS);
#pragma unroll
        for (int k = STEPS - 1; k >= 0; k--)
            if (p.batch <= MOST && warp_sum(wanted[k]) <= p.streams) rate = rate_of(k);
        set(lane < p.batch, own, 0, lane);
    }

    // By one warp: of these lanes' sequences, if those before have `before` streams.
    DEVICE void set(bool there, float own, int before, int lane) {
        cost = own, count = there ? Share::streams_of(own, rate) : 0;
        int last = count;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) {
            const int other = __shfl_up_sync(~0u, last, step);
            if (lane >= step) last += other;
        }
        start = before + last - count;
    }

    DEVICE int end() const { return start + count; }

    // Of a sequence, by one warp: the first share's number, and how many there are. (Of a lone one nobody asks its number.)
    static DEVICE int2 shares_of(const Attention& p, int which, int lane) {
        const Lengths own(p, which), read(p, lane);
        const Portion portion(p, read.cost(), lane);
        const int all = Share::streams_of(own.cost(), portion.rate);
        if (all == 1) return make_int2(0, 1);
        int before = lane < which ? portion.count : 0;
        for (int base = WARP; base < which; base += WARP)
            if (base + lane < which) before += Share::streams_of(Lengths(p, base + lane).cost(), portion.rate);
        return Share::numbers(which, warp_sum(before), all);
    }
};

// What a block has, in shared memory.
struct Shares {
    Share of[ONE_SEQUENCE ? 1 : BLOCK_STREAMS];
    int count, owners[BLOCK_STREAMS];  // which of them has a stream of several sequences; none if negative

    DEVICE bool any() const { return ONE_SEQUENCE ? of[0].sequence >= 0 : count > 0; }
    DEVICE bool owned(int stream) const { return ONE_SEQUENCE || owners[stream] >= 0; }
    DEVICE const Share& owner(int stream) const { return of[ONE_SEQUENCE ? 0 : owners[stream]]; }

    // By one warp, when the kernel before is done, for which it waits. Lengths are read, and streams shared out, while that still
    // runs, and once more if it has changed what a sequence costs, or there are more than 32. (To read them takes half a
    // microsecond.)
    DEVICE void find(const Attention& p, int block, int lane) {
        if (ONE_SEQUENCE) return wait_for_predecessor(), of[0].find(p, Lengths(p, 0), block, lane);
        Portion portion;
        Lengths lengths(p, lane);
#pragma unroll 1
        for (bool waited = !OVERLAPS;;) {
            portion = Portion(p, lengths.cost(), lane);
            if (waited) break;
            wait_for_predecessor(), waited = true;
            lengths = Lengths(p, lane);
            if (p.batch <= WARP && !__any_sync(~0u, lengths.cost() != portion.cost)) break;
        }
        const int begin = block * BLOCK_STREAMS, end = begin + BLOCK_STREAMS;
        if (lane < BLOCK_STREAMS) owners[lane] = -1;
        __syncwarp();
        int found = 0;
        const int half = lane / CUTTING, own = lane % CUTTING;
        static_assert(BLOCK_STREAMS <= CUTTING, "a lane for each");
        for (int base = 0;;) {
            u32 here = uniform(__ballot_sync(~0u, portion.start < end && portion.end() > begin && portion.count > 0));
            while (here) {  // two at a time, half of the lanes each
                const u32 rest = here & here - 1, mine = half ? rest : here;
                const int which = max(__ffs(mine) - 1, 0);
                const int from = __shfl_sync(~0u, portion.start, which), all = __shfl_sync(~0u, portion.count, which);
                const Lengths its = lengths.of_lane(which);
                if (mine) {
                    of[found + half].find(its, base + which, from, all, block, own);
                    if (own < BLOCK_STREAMS && begin + own >= from && begin + own < from + all) owners[own] = found + half;
                }
                found += rest ? 2 : 1, here = rest & rest - 1;
            }
            base += WARP;
            if (base >= p.batch) break;
            const int before = __shfl_sync(~0u, portion.end(), WARP - 1);
            if (before >= end) break;
            lengths = Lengths(p, base + lane);
            portion.set(base + lane < p.batch, lengths.cost(), before, lane);
        }
        if (lane == 0) count = found;
    }
};

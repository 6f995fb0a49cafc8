// Which tokens a block has: the tokens of all sequences and buckets are shared out by what they cost.
//
// Lengths are read where they are, on the GPU: a captured launch serves a cache that grows. Blocks of one sequence cut
// its buckets, one after another, at the same places, since they compute them alike.
#pragma once
#include "cache.cuh"

constexpr int GRAIN = 16;  // tokens that are not divided

// Blocks along x: for each share of the tokens one for each group of key heads, side by side. So those without tokens, of which
// several sequences may have some, come last of a row tile's, mostly the only one, and all that have any find room at once.
constexpr int HEAD_GROUPS = CUQUANT_HEADS / CUQUANT_BLOCK_HEADS;

DEVICE int own_share() { return blockIdx.x / HEAD_GROUPS; }
DEVICE int head_group() { return blockIdx.x % HEAD_GROUPS; }

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

struct Share {
    int sequence;  // none if negative
    int first, split, splits;
    int cuts[2][8];  // of each tier: the first token that is this block's, and the first behind those

    // By one warp, in shared memory; of the first 32 sequences each lane has read one's lengths. (Each time they are read takes half
    // a microsecond.)
    DEVICE void find(const Attention& p, const Lengths& read, int block, int lane) {
        if (lane == 0) sequence = -1;
        const float part = part_of_all(p, read, lane);
        int before = 0;
        for (int base = 0; base < p.batch; base += WARP) {
            const Lengths lengths = base == 0 ? read : Lengths(p, base + lane);
            const int count = base + lane < p.batch ? count_of(lengths.cost(), part) : 0;
            int end = count;
#pragma unroll
            for (int step = 1; step < WARP; step *= 2) {
                const int other = __shfl_up_sync(~0u, end, step);
                if (lane >= step) end += other;
            }
            const u32 here = __ballot_sync(~0u, before + end - count <= block && block < before + end);
            if (here) {
                const int owner = __ffs(here) - 1, all = __shfl_sync(~0u, count, owner);
                const int start = before + __shfl_sync(~0u, end, owner) - all;
                const Lengths own = lengths.of_lane(owner);
                if (lane == 0) sequence = base + owner, first = start, split = block - start, splits = all;
                if (lane < 16) cuts[lane / 8][lane % 8] = cut(own, lane % 8, block - start + lane / 8, all);
                break;
            }
            before += __shfl_sync(~0u, end, WARP - 1);
        }
    }

    // The share of a block where there is a single sequence, with these lengths.
    DEVICE void find_single(const Attention& p, const Lengths& lengths, int block, int lane) {
        const int count = count_of_single(p, lengths);
        if (lane == 0) sequence = block < count ? 0 : -1, first = 0, split = block, splits = count;
        if (lane < 16) cuts[lane / 8][lane % 8] = cut(lengths, lane % 8, block + lane / 8, count);
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

    // The first share of a single sequence, and how many there are.
    static DEVICE int2 of_single(const Attention& p) {
        return make_int2(0, count_of_single(p, Lengths(p, 0)));
    }

    // The first share of a given sequence, and how many there are, by one warp; the first one counts where there are
    // several.
    static DEVICE int2 of_sequence(const Attention& p, int which, int lane) {
        const Lengths read(p, lane);
        const float part = part_of_all(p, read, lane);
        const int count = count_of(Lengths(p, which).cost(), part);
        int before = 0;
        if (count == 1) return make_int2(before, count);
        for (int base = 0; base < which; base += WARP)
            if (base + lane < which) before += count_of((base == 0 ? read : Lengths(p, base + lane)).cost(), part);
        return make_int2(warp_sum(before), count);
    }

private:
    // By one warp, of all sequences; of the first 32 each lane has read one's lengths.
    static DEVICE float part_of_all(const Attention& p, const Lengths& read, int lane) {
        float total = read.cost();
        for (int base = WARP; base < p.batch; base += WARP) total += Lengths(p, base + lane).cost();
#pragma unroll
        for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        float part = part_of(p, total);
        if (p.most)  // then there are 32 sequences at most
            while (warp_sum(lane < p.batch ? count_of(read.cost(), part) : 0) > p.most) part *= 1.25f;
        return part;
    }

    // A little more than a share of the whole: sums and quotients are rounded, and no share may be beyond the grid (SLACK in
    // cuquant/plan/attention.py, which is in p.part).
    static DEVICE float part_of(const Attention& p, float total) { return fmaxf(__fmul_rn(total, p.part), float(p.least)); }

    static DEVICE int count_of_single(const Attention& p, const Lengths& lengths) {
        const float all = lengths.cost();
        return count_of(all, part_of(p, all));
    }

    static DEVICE int count_of(float cost, float part) { return max(1, int(ceilf(__fmul_rn(cost, about_inverse(part))))); }

    // Where a share of a tier's bucket begins; share `splits` is the bucket's end.
    static DEVICE int cut(const Lengths& lengths, int tier, int share, int splits) {
        float before = 0, each = 1;
        int length = 0;
#pragma unroll
        for (int t = 0; t < TIERS; t++) {
            if (!has_tier(t)) continue;
            if (t < tier) before += lengths.cost_of(t);
            if (t == tier) length = lengths.of[t], each = 1 / cost(t);
        }
        if (share >= splits) return length;
        const float at = __fmul_rn(lengths.cost(), __fmul_rn(float(share), about_inverse(float(splits))));
        const float grain = rintf(__fmul_rn(__fadd_rn(at, -before), each));
        return min(int(fminf(fmaxf(grain, 0.f) * GRAIN, 2e9f)), length);
    }
};

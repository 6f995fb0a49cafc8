// Which tokens a block has: the tokens of all sequences and buckets are shared out by what they cost.
//
// Lengths are read where they are, on the GPU: a captured launch serves a cache that grows. Blocks of one sequence cut
// its buckets, one after another, at the same places, since they compute them alike.
#pragma once
#include "cache.cuh"

constexpr int GRAIN = 16;  // tokens that are not divided

DEVICE constexpr bool has_tier(int tier) { return CUQUANT_TIERS >> tier & 1; }

// Of a grain of eight heads, about, in units of 80 ns of an H200's multiprocessor. Blocks with different buckets share
// the memory: what counts is how long each computes, not its bytes.
DEVICE constexpr float cost(int tier) {
    const float costs[TIERS] = {15, 8.4f, 4.7f, 4.9f, 4};
    return costs[tier];
}

struct Share {
    int sequence;  // none if negative
    int first, split, splits;
    int cuts[2][8];  // of each tier: the first token that is this block's, and the first behind those

    // By one warp, in shared memory.
    DEVICE void find(const Attention& p, int block, int lane) {
        float total = 0;
        for (int base = 0; base < p.batch; base += WARP) total += cost_of(p, base + lane);
#pragma unroll
        for (int step = 16; step; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        if (lane == 0) sequence = -1;
        const float part = part_of(p, total);
        int before = 0;
        for (int base = 0; base < p.batch; base += WARP) {
            const int count = base + lane < p.batch ? count_of(cost_of(p, base + lane), part) : 0;
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
                if (lane == 0) sequence = base + owner, first = start, split = block - start, splits = all;
                if (lane < 16) cuts[lane / 8][lane % 8] = cut(p, base + owner, lane % 8, block - start + lane / 8, all);
                break;
            }
            before += __shfl_sync(~0u, end, WARP - 1);
        }
    }

    // The same of a single sequence.
    DEVICE void find_single(const Attention& p, int block, int lane) {
        const float all = cost_of(p, 0);
        const int count = count_of(all, part_of(p, all));
        if (lane == 0) sequence = block < count ? 0 : -1, first = 0, split = block, splits = count;
        if (lane < 16) cuts[lane / 8][lane % 8] = cut(p, 0, lane % 8, block + lane / 8, count);
    }

private:
    // A little more than a share of the whole: sums and quotients are rounded, and no share may be beyond the grid.
    static DEVICE float part_of(const Attention& p, float total) {
        return fmaxf(__fmul_rn(__fdiv_rn(total, float(p.budget)), 1 + 0x1p-15f), float(p.least));
    }

    static DEVICE int count_of(float cost, float part) { return max(1, int(ceilf(__fdiv_rn(cost, part)))); }

    // Where a share of a tier's bucket begins; share `splits` is the bucket's end.
    static DEVICE int cut(const Attention& p, int sequence, int tier, int share, int splits) {
        float before = 0, all = 0, each = 1;
        int length = 0;
#pragma unroll
        for (int t = 0; t < TIERS; t++) {
            if (!has_tier(t)) continue;
            const int tokens = p.tiers[t].lengths[sequence];
            const float own = grains(tokens) * cost(t);
            if (t < tier) before += own;
            if (t == tier) length = tokens, each = 1 / cost(t);
            all += own;
        }
        if (share >= splits) return length;
        const float at = __fmul_rn(all, __fdiv_rn(float(share), float(splits)));
        const float grain = rintf(__fmul_rn(__fadd_rn(at, -before), each));
        return min(int(fminf(fmaxf(grain, 0.f) * GRAIN, 2e9f)), length);
    }

    static DEVICE float grains(int tokens) { return float((tokens + GRAIN - 1) / GRAIN); }

    static DEVICE float cost_of(const Attention& p, int sequence) {
        float sum = 0;
        if (sequence < p.batch)
#pragma unroll
            for (int t = 0; t < TIERS; t++)
                if (has_tier(t)) sum += grains(p.tiers[t].lengths[sequence]) * cost(t);
        return sum;
    }
};

// What attention leaves for the allocator: each token's importance grows by the probability that it received, the sum
// over queries of the mean over heads. A second pass over the keys.
//
//   scores^T [tokens x 4 queries in two parts] = K Q^T      operand A: keys, rows are tokens      operand B: queries
//
// A query's channel is the sum of two float16 numbers, whose products have a column each, so that a lane has both parts of a
// score. A warp keeps queries of one key head in registers, and goes with them through the tokens of its block, of which warps
// with the same queries, where there are few, share the steps. What tokens received of the warps' queries meets in shared
// memory.
#include "../attention/cache.cuh"
#include "../attention/codes.cuh"
#include "../attention/encode_token.cuh"

constexpr int WARPS = 8;
constexpr int GROUPS = CUQUANT_GROUPS;  // of four queries that a warp has at a time
constexpr int QUERIES = GROUPS * 4;     // of a key head
constexpr int ROOM = 512;               // tokens of a block that are summed up at a time
constexpr int OWN = PAIRS * 16, UNITS = PAIRS * 2;  // channels of a token that a lane has, and units
constexpr bool WHOLE = PADDED == CUQUANT_DIM;

// Tokens of a step, as registers allow: products that need not wait for each other.
template <int BITS>
constexpr int TOKENS = UNITS * BITS <= 16 && GROUPS * PAIRS <= 4 ? 32 : 16;

// Queries of a key head from `first` on, for keys of so many bits. With lane = 4 g + i a lane has channels of query g / 2
// as operand B, the upper part of its numbers if g is even, and scores of query i.
template <int BITS>
struct Queries {
    u32 b[GROUPS][PAIRS][8];
    float sum[GROUPS];     // of all channels, in units of products
    float scale[GROUPS];   // of products, to bits
    float2 total[GROUPS];  // the greatest score, and one over the sum of all
    int last[GROUPS];      // slot that it sees
    int row;               // of its first query; GROUPS of four lie one behind the other

    DEVICE Queries(const Attention& p, int sequence, int head, int first, int lane) : row(first + lane % 4) {
        const int rows = rows_of(p);
        const s64 before = (s64(sequence) * p.kv_heads + head) * rows;
        float x[GROUPS][OWN];
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            const int own = row + 4 * n, given = first + 4 * n + lane / 8;
            load(x[n], p.queries + (before + given) * CUQUANT_DIM, given < rows, lane % 4 * OWN);
            total[n] = own < rows ? p.totals[before + own] : make_float2(0, INFINITE);
            last[n] = own < rows ? last_seen(p, sequence, own % p.q_len) : 0;
        }
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            take(x[n], n, p.scale, lane);
            total[n].y = __fdividef(1, total[n].y);
        }
    }

private:
    // A query's channels from `start` on, zeros where there are none.
    static DEVICE void load(float (&x)[OWN], const float* from, bool there, int start) {
#pragma unroll
        for (int e = 0; e < OWN; e += 4) {
            float4 v = {};
            if (there && (WHOLE || start + e < CUQUANT_DIM)) v = *reinterpret_cast<const float4*>(from + start + e);
            x[e] = v.x, x[e + 1] = v.y, x[e + 2] = v.z, x[e + 3] = v.w;
        }
    }

    DEVICE void take(const float (&x)[OWN], int n, float unit, int lane) {
        u32 peak = 0;
#pragma unroll
        for (int e = 0; e < OWN; e++) peak = max(peak, magnitude(x[e]));
        peak = max(peak, __shfl_xor_sync(~0u, peak, 1));
        peak = max(peak, __shfl_xor_sync(~0u, peak, 2));
        // The largest channel from 2^14 to 2^15, if there is one.
        const int exponent = int(peak >> 23) - 127;
        const int lift = exponent == -127 || exponent == 128 ? 0 : min(14 - exponent, 126);
        const bool lower = lane / 4 % 2;
        float all[4] = {};
#pragma unroll
        for (int u = 0; u < PAIRS; u++)
#pragma unroll
            for (int m = 0; m < 4; m++) {
                u32 codes[4];  // of 1
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    // Powers of two that codes have, queries take back.
                    const int j = 2 * m + k, power = shift<BITS>(j);
                    const float factor = power_of_two(lift) * (1.f / (1 << power));
                    const float first = x[u * 16 + j] * factor, second = x[u * 16 + 8 + j] * factor;
                    u32 pair = pack(first, second, FLOAT16);
                    if (lower) pair = pack(first - low_to_float(pair), second - high_to_float(pair), FLOAT16);
                    b[n][u][j] = pair;
                    codes[2 * k] = codes[2 * k + 1] = (15 + power << 10) * 0x00010001u;
                }
                mma_half(all, codes, b[n][u][2 * m], b[n][u][2 * m + 1], all);
            }
        sum[n] = all[0] + all[1];
        scale[n] = __shfl_sync(~0u, bounded(unit * power_of_two(-lift)), lane % 4 * 8);
    }
};

// A lane's units of a token's key, from where the first of them is, if it is there; others are zeros.
template <int BITS>
DEVICE void load_key(Units<BITS, UNITS>& to, const u8* from, int unit) {
    constexpr int BYTES = UNITS * BITS, HALVES = BYTES / 2;
    if constexpr (WHOLE && BYTES % 16 == 0) {
#pragma unroll
        for (int k = 0; k < BYTES / 16; k++) {
            // The heads beside this one are read by other warps at about this time.
            asm volatile("ld.global.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(to.w[4 * k]), "=r"(to.w[4 * k + 1]), "=r"(to.w[4 * k + 2]), "=r"(to.w[4 * k + 3])
                         : "l"(from + 16 * k));
        }
    } else if constexpr (WHOLE && BYTES % 4 == 0) {
#pragma unroll
        for (int k = 0; k < BYTES / 4; k++) to.w[k] = reinterpret_cast<const u32*>(from)[k];
    } else if constexpr (WHOLE) {
#pragma unroll
        for (int k = 0; k < BYTES / 4 + 1; k++) to.w[k] = 0;
#pragma unroll
        for (int k = 0; k < HALVES; k++) to.w[k / 2] |= u32(reinterpret_cast<const u16*>(from)[k]) << k % 2 * 16;
    } else {
#pragma unroll
        for (u32& w : to.w) w = 0;
#pragma unroll
        for (int k = 0; k < UNITS; k++) {
            if ((unit + k) * UNIT >= CUQUANT_DIM) continue;
            if constexpr (BITS == 16) {
                const uint4 v = reinterpret_cast<const uint4*>(from)[k];
                to.w[4 * k] = v.x, to.w[4 * k + 1] = v.y, to.w[4 * k + 2] = v.z, to.w[4 * k + 3] = v.w;
            } else {
                const int word = k * BITS / 4, at = k * BITS % 4 * 8;
                const u64 codes = load_codes(from + k * BITS, BITS) << at;
                to.w[word] |= u32(codes);
                if (at + BITS * 8 > 32) to.w[word + 1] |= u32(codes >> 32);
            }
        }
    }
}

// A lane's part of a step: tokens g, g + 8 and so on.
template <int BITS>
struct Keys {
    static constexpr int OWN = TOKENS<BITS> / 8;
    Units<BITS, UNITS> units[OWN];
    u16 scale[OWN];
    int slot[OWN];

    // The last token is there in place of those beyond it.
    DEVICE void load(const Attention& p, const Tier& tier, s64 before, int first, int count, int head, int lane) {
#pragma unroll
        for (int h = 0; h < OWN; h++) {
            const s64 token = before + min(first + lane / 4 + 8 * h, count - 1), key = token * p.kv_heads + head;
            const int unit = lane % 4 * UNITS;
            load_key<BITS>(units[h], tier.k + (key * (CUQUANT_DIM / UNIT) + unit) * BITS, unit);
            scale[h] = BITS < 16 ? tier.k_scale[key] : 0;
            slot[h] = tier.slots[token];
        }
    }
};

// Rarely needed, and long: the score that a mask leaves.
__device__ __noinline__ float masked_score(const Attention& p, int sequence, int head, int row, int slot, float score) {
    return unmasked(p, sequence, head, row, slot, score) ? score : -INFINITE;
}

// What a lane's queries give its tokens.
template <int BITS>
DEVICE void give(const Attention& p, const Queries<BITS>& q, const Keys<BITS>& keys, int sequence, int head,
                 float (&given)[TOKENS<BITS> / 8]) {
    constexpr int TILES = TOKENS<BITS> / 16;
    float s[TILES][GROUPS][4];
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
            s[t][n][0] = s[t][n][2] = -float(OFFSET<BITS>) / UNSCALE<BITS> * q.sum[n], s[t][n][1] = s[t][n][3] = 0;
#pragma unroll
    for (int u = 0; u < PAIRS; u++)
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            u32 low[8], high[8];
            pairs(keys.units[2 * t], keys.units[2 * t], 2 * u, low);
            pairs(keys.units[2 * t + 1], keys.units[2 * t + 1], 2 * u, high);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const u32 k[4] = {low[2 * m], high[2 * m], low[2 * m + 1], high[2 * m + 1]};
#pragma unroll
                for (int n = 0; n < GROUPS; n++) mma_half(s[t][n], k, q.b[n][u][2 * m], q.b[n][u][2 * m + 1], s[t][n]);
            }
        }
#pragma unroll
    for (int h = 0; h < 2 * TILES; h++) {
        given[h] = 0;
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            const float* const parts = s[h / 2][n] + h % 2 * 2;
            const float scale = (BITS < 16 ? half_to_float(keys.scale[h]) : 1) * UNSCALE<BITS>;
            float score = (parts[0] + parts[1]) * scale * q.scale[n];
            if (keys.slot[h] > q.last[n]) score = -INFINITE;
            if (p.mask_dtype != NO_MASK) score = masked_score(p, sequence, head, q.row + 4 * n, keys.slot[h], score);
            const float share = exp2_of(score - q.total[n].x) * q.total[n].y;
            given[h] += share == share ? fminf(share, 1) : 0;  // more is what huge scores lose in their rounding
        }
    }
}

using Sums = float[WARPS][ROOM];  // what tokens received of a warp's queries

// A bucket, of whose steps the block has every gridDim.x-th from `start` on.
template <int BITS>
DEVICE void add_bucket(const Attention& p, const Tier& tier, Sums& sums, int sequence, int start, int count) {
    constexpr int EACH = TOKENS<BITS>, AT_ONCE = ROOM / EACH;
    constexpr bool AHEAD = UNITS * BITS * EACH <= 16 * 32;  // there are registers for the keys of the next step
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, blocks = gridDim.x;
    const int parts = (rows_of(p) + QUERIES - 1) / QUERIES, works = p.kv_heads * parts;
    // So many warps have other queries each; others have other steps.
    const int abreast = min(works, WARPS), sets = WARPS / abreast, set = warp / abreast;
    const int steps = ((count + EACH - 1) / EACH - start + blocks - 1) / blocks;
    const s64 before = sequence * tier.room;
    for (int begin = 0; begin < steps; begin += AT_ONCE) {
        const int end = min(steps, begin + AT_ONCE);
        for (int work = set < sets ? warp % abreast : works; work < works; work += abreast) {
            const int head = work / parts;
            Keys<BITS> keys;
            const auto load = [&](int step) {
                if (step < end) keys.load(p, tier, before, (start + step * blocks) * EACH, count, head, lane);
            };
            if (AHEAD) load(begin + set);
            const Queries<BITS> q(p, sequence, head, work % parts * QUERIES, lane);
#pragma unroll 1
            for (int step = begin + set; step < end; step += sets) {
                if (!AHEAD) load(step);
                const Keys<BITS> now = keys;
                if (AHEAD) load(step + sets);
                float given[EACH / 8];
                give(p, q, now, sequence, head, given);
                float* const to = sums[warp] + (step - begin) * EACH + lane / 4;
#pragma unroll
                for (int h = 0; h < EACH / 8; h++) {
                    given[h] += __shfl_xor_sync(~0u, given[h], 1);
                    given[h] += __shfl_xor_sync(~0u, given[h], 2);
                    if (lane % 4 == 0) to[8 * h] = work < abreast ? given[h] : to[8 * h] + given[h];
                }
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < (end - begin) * EACH; i += blockDim.x) {
            const int step = begin + i / EACH, token = (start + step * blocks) * EACH + i % EACH;
            float all = 0;
            for (int w = 0; w < abreast; w++) all += sums[(step - begin) % sets * abreast + w][i];
            if (token < count) atomicAdd(tier.importance + before + token, all / p.heads);  // nobody else's: it is not waited for
        }
        __syncthreads();
    }
}

// The rest of the buckets, whose lengths these are. Their steps go on with block `first`.
template <int TIER = 0>
DEVICE void add_buckets(const Attention& p, Sums& sums, const int (&lengths)[TIERS], int sequence, int first) {
    if constexpr (TIER < TIERS) {
        constexpr int BITS = bits_of(TIER), EACH = TOKENS<BITS>;
        const int count = lengths[TIER], blocks = gridDim.x, start = int(blockIdx.x) - first;
        if (count > 0) add_bucket<BITS>(p, p.tiers[TIER], sums, sequence, start < 0 ? start + blocks : start, count);
        add_buckets<TIER + 1>(p, sums, lengths, sequence, (first + (count + EACH - 1) / EACH) % blocks);
    }
}

// Grid: blocks that share the tokens of a sequence, sequences.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, 2) importance(const __grid_constant__ Attention p) {
    __shared__ Sums sums;
    let_successor_start();
    int lengths[TIERS];  // behind attention: they need not be waited for (core/ptx.cuh)
#pragma unroll
    for (int t = 0; t < TIERS; t++) lengths[t] = p.tiers[t].lengths ? __ldcg(p.tiers[t].lengths + blockIdx.y) : 0;
    wait_for_predecessor();
    add_buckets(p, sums, lengths, blockIdx.y, 0);
}

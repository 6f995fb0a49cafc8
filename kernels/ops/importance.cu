// What attention leaves for the allocator: each token's importance grows by the probability that it received, the sum
// over queries of the mean over heads. A second pass over the keys: a warp for each token, with all heads.
#include "../attention/cache.cuh"
#include "../attention/encode_token.cuh"

constexpr int WARPS = 8;

// The probabilities that the queries of a key head give to a key.
DEVICE float received(const Attention& p, int sequence, int head, int slot, const float (&x)[UNIT], int lane) {
    float sum = 0;
    const s64 first = (s64(sequence) * p.kv_heads + head) * rows_of(p);
    for (int row = 0; row < rows_of(p); row++) {
        if (slot > last_seen(p, sequence, row % p.q_len)) continue;
        float score = 0;
        if (lane * UNIT < CUQUANT_DIM)
#pragma unroll
            for (int e = 0; e < UNIT; e++) score += x[e] * p.queries[(first + row) * CUQUANT_DIM + lane * UNIT + e];
#pragma unroll
        for (int step = 16; step; step /= 2) score += __shfl_xor_sync(~0u, score, step);
        score *= p.scale;
        if (!unmasked(p, sequence, head, row, slot, score)) continue;
        const float2 all = p.totals[first + row];
        const float share = exp2f(score - all.x) / all.y;
        if ((__float_as_int(share) & 0x7fffffff) < 0x7f800000) sum += share;
    }
    return sum;
}

// As many blocks of a multiprocessor as a launch has.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, 4) importance(const __grid_constant__ Attention p) {
    wait_for_predecessor();
    const int sequence = blockIdx.y, lane = threadIdx.x % WARP, warps = gridDim.x * WARPS;
    for (int t = 0; t < TIERS; t++) {
        const Tier& tier = p.tiers[t];
        if (!tier.lengths) continue;
        for (int token = blockIdx.x * WARPS + threadIdx.x / WARP; token < tier.lengths[sequence]; token += warps) {
            const s64 place = sequence * tier.room + token;
            float sum = 0;
            for (int head = 0; head < p.kv_heads; head++) {
                const s64 row = place * p.kv_heads + head;
                const u8* const key = tier.k + row * (CUQUANT_DIM / UNIT) * bits_of(t);
                float x[UNIT];
                decode(key, tier.k_scale + row, bits_of(t), CUQUANT_DIM, lane, x);
                sum += received(p, sequence, head, tier.slots[place], x, lane);
            }
            if (lane == 0) tier.importance[place] += sum / p.heads;
        }
    }
}

// What attention leaves for the allocator: each token's importance grows by the probability that it received, the sum
// over queries of the mean over heads. A second pass over the keys.
//
// A team of lanes has a key's channels, eight each, of several tokens at a time, so that what all of them need of a query is
// loaded once. Their scores are added up together: lanes change halves of them until each has a part of one token's, and
// then add up parts. So lanes of a team have different tokens behind that, and each works out what its own received.
//
//      16 lanes, 4 tokens      lanes 0 to 3: token 0      4 to 7: token 1      8 to 11: token 2      12 to 15: token 3
#include "../attention/cache.cuh"
#include "../attention/encode_token.cuh"

constexpr int WARPS = 8;
constexpr int TEAM = CUQUANT_DIM <= 64 ? 8 : CUQUANT_DIM <= 128 ? 16 : 32, TEAMS = WARP / TEAM;
static_assert(TEAM * UNIT >= CUQUANT_DIM, "a lane has eight channels");

// Of TOKENS scores of each lane of a team the sum over the team of one, that of token `lane / (TEAM / TOKENS)`.
template <int TOKENS>
DEVICE float sum_of_own(float (&score)[TOKENS], int lane) {
    int apart = TEAM / 2;
#pragma unroll
    for (int left = TOKENS / 2; left; left /= 2, apart /= 2) {
        const bool upper = lane & apart;
#pragma unroll
        for (int t = 0; t < left; t++) {
            const float given = __shfl_xor_sync(~0u, upper ? score[t] : score[t + left], apart);
            score[t] = (upper ? score[t + left] : score[t]) + given;
        }
    }
    float sum = score[0];
#pragma unroll
    for (; apart; apart /= 2) sum += __shfl_xor_sync(~0u, sum, apart);
    return sum;
}

// What all tokens need of the queries of a sequence: for every key head its rows of channels, of each the greatest score and the
// sum of all. In shared memory, if there is room, as else each row is waited for once more.
struct Queries {
    const float* rows;
    const float2* totals;
};

constexpr int ROOM = 8192, MOST_ROWS = 128;  // numbers, and rows of which there are totals

DEVICE Queries queries_of(const Attention& p, int sequence) {
    __shared__ __align__(16) float staged[ROOM];
    __shared__ float2 totals[MOST_ROWS];
    const int rows = p.kv_heads * rows_of(p);
    const float* const from = p.queries + s64(sequence) * rows * CUQUANT_DIM;
    const float2* const all = p.totals + s64(sequence) * rows;
    if (rows > MOST_ROWS || rows * CUQUANT_DIM > ROOM) return {from, all};
    for (int i = threadIdx.x; i < rows * CUQUANT_DIM / 4; i += blockDim.x)
        reinterpret_cast<float4*>(staged)[i] = reinterpret_cast<const float4*>(from)[i];
    for (int i = threadIdx.x; i < rows; i += blockDim.x) totals[i] = all[i];
    __syncthreads();
    return {staged, totals};
}

// TOKENS of a bucket from `first` on, of those that are there, by a team.
template <int TOKENS>
DEVICE void tokens_of_team(const Attention& p, const Tier& tier, const Queries& queries, int bits, int sequence, int first,
                           int count) {
    const int lane = threadIdx.x % TEAM, own = first + lane / (TEAM / TOKENS);
    const s64 room = sequence * tier.room;
    const int slot = own < count ? tier.slots[room + own] : 0;
    const int rows = rows_of(p);
    Stored next[TOKENS];  // keys of a head, which are asked for while those of the one before are multiplied
    auto load = [&](int head) {
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const s64 key = (room + min(first + t, count - 1)) * p.kv_heads + head;
            next[t] = load_stored(tier.k + key * (CUQUANT_DIM / UNIT) * bits, tier.k_scale + key, bits, CUQUANT_DIM, lane);
        }
    };
    load(0);
    float sum = 0;
    for (int head = 0; head < p.kv_heads; head++) {
        float x[TOKENS][UNIT];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) decode(next[t], bits, CUQUANT_DIM, lane, x[t]);
        if (head + 1 < p.kv_heads) load(head + 1);
        for (int row = 0, position = 0; row < rows; row++) {
            const int query = head * rows + row;
            const float2 all = queries.totals[query];
            const int last = last_seen(p, sequence, position);
            position = position + 1 == p.q_len ? 0 : position + 1;
            float4 low = {}, high = {};
            if (lane * UNIT < CUQUANT_DIM) {
                const float4* const from = reinterpret_cast<const float4*>(queries.rows + query * CUQUANT_DIM);
                low = from[lane * 2], high = from[lane * 2 + 1];
            }
            float score[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; t++)
                score[t] = x[t][0] * low.x + x[t][1] * low.y + x[t][2] * low.z + x[t][3] * low.w + x[t][4] * high.x +
                           x[t][5] * high.y + x[t][6] * high.z + x[t][7] * high.w;
            float total = sum_of_own(score, lane) * p.scale;
            if (slot > last || !unmasked(p, sequence, head, row, slot, total)) continue;
            const float share = __fdividef(exp2f(total - all.x), all.y);
            if (is_finite(share)) sum += share;
        }
    }
    if (own < count && lane % (TEAM / TOKENS) == 0) tier.importance[room + own] += sum / p.heads;
}

// As many blocks of a multiprocessor as a launch has.
extern "C" __global__ void __launch_bounds__(WARPS* WARP, 2) importance(const __grid_constant__ Attention p) {
    wait_for_predecessor();
    const int sequence = blockIdx.y, teams = gridDim.x * WARPS * TEAMS;
    const int team = (blockIdx.x * WARPS + threadIdx.x / WARP) * TEAMS + threadIdx.x % WARP / TEAM;
    const Queries queries = queries_of(p, sequence);
#pragma unroll
    for (int t = 0; t < TIERS; t++) {
        const Tier& tier = p.tiers[t];
        if (!tier.lengths) continue;
        const int count = tier.lengths[sequence];
        // All lanes of a warp go on together, as they change scores: teams without tokens have the last one's. Where there
        // are not enough tokens for all teams each has one at a time, which is there sooner.
        if (count <= teams) {
            if (team / TEAMS * TEAMS < count) tokens_of_team<1>(p, tier, queries, bits_of(t), sequence, team, count);
        } else {
            for (int first = team * 4; first / (4 * TEAMS) * (4 * TEAMS) < count; first += teams * 4)
                tokens_of_team<4>(p, tier, queries, bits_of(t), sequence, first, count);
        }
    }
}

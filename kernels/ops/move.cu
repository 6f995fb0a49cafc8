// Tokens of a cache from some places to others; where their width changes, what the cache holds of them is quantized anew.
//
// A launch takes all of them to memory between, at their new widths, a second one puts them where others may have been,
// and changes the lengths.
#include "../attention/cache.cuh"
#include "../attention/encode_token.cuh"

struct Move {
    s64 from, to;  // tokens of buffers [batch, room]
    int tier, to_tier;
};

struct Moving {
    Tier from[TIERS], to[TIERS];
    const Move* moves;   // [count]
    const int* lengths;  // [TIERS, batch] of `to`, or null
    int count, batch, kv_heads, dim;
};

// A warp for the vector of each head and of keys and values in turn.
DEVICE void move_token(const Moving& p, const Move& move) {
    const Tier &from = p.from[move.tier], &to = p.to[move.to_tier];
    const int bits = bits_of(move.tier), to_bits = bits_of(move.to_tier), lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        to.ids[move.to] = from.ids[move.from];
        to.slots[move.to] = from.slots[move.from];
        to.importance[move.to] = from.importance[move.from];
    }
    for (int item = threadIdx.x / WARP; item < 2 * p.kv_heads; item += blockDim.x / WARP) {
        const int head = item / 2, units = p.dim / UNIT;
        const bool value = item % 2;
        const s64 row = move.from * p.kv_heads + head, to_row = move.to * p.kv_heads + head;
        const u8* const codes = (value ? from.v : from.k) + row * units * bits;
        u8* const to_codes = (value ? to.v : to.k) + to_row * units * to_bits;
        const u16* const scale = (value ? from.v_scale : from.k_scale) + row;
        u16* const to_scale = (value ? to.v_scale : to.k_scale) + to_row;
        if (bits == to_bits) {
            for (int i = lane; i < units * bits; i += WARP) to_codes[i] = codes[i];
            if (lane == 0 && bits < 16) *to_scale = *scale;
        } else {
            float x[UNIT];
            decode(load_stored(codes, scale, bits, p.dim, lane), bits, p.dim, lane, x);
            encode(x, to_bits, p.dim, Group(WARP), to_codes, to_scale);
        }
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) move(const __grid_constant__ Moving p) {
    for (int i = blockIdx.x; i < p.count; i += gridDim.x) move_token(p, p.moves[i]);
    for (int i = threadIdx.x; blockIdx.x == 0 && p.lengths && i < TIERS * p.batch; i += blockDim.x) {
        int* const lengths = p.to[i / p.batch].lengths;
        if (lengths) lengths[i % p.batch] = p.lengths[i];
    }
}

// New tokens of a cache: quantized, and put where the lengths on the GPU say; then the lengths grow.
//
// A launch writes all tokens or, where one does not fit, none, and tells so in memory of the host. All blocks read the
// lengths before one of them, when all have come to their ends, changes them.
#include "../attention/cache.cuh"
#include "../attention/encode_token.cuh"
#include "../core/ptx_90.cuh"

struct Append {
    Tier tiers[TIERS];
    const void *k, *v;        // [batch, n, kv_heads, dim], the last axis contiguous
    int* next_slots;          // [batch]
    const float* key_scales;  // [batch, kv_heads, dim], or null
    const int* tier_of;       // [batch, n], with `rank` and `adds`, or null: all tokens go to `tier`
    const int* rank;          // [batch, n]: how many tokens of the sequence go to the same bucket before this one
    const int* adds;          // [batch, TIERS + 1]: how many go to each, and to none
    const int* ids;           // [batch, n], or null: slots
    const int* lengths;       // [batch]: how many of the n tokens are new, or null: all
    u32* ticket;              // 0 between launches
    int* refused;             // on the host: 1 + a sequence of `without_room`
    s64 k_strides[3], v_strides[3];
    int batch, n, kv_heads, dim, k_dtype, v_dtype, tier, capacity, rotate;
    int lanes;  // that have a vector; those of a warp are of one token
};

DEVICE int new_of(const Append& p, int sequence) { return p.lengths ? p.lengths[sequence] : p.n; }

// 1 + the last sequence of this thread's that has no room, or a token of no width, or gets fewer than 0 or more than n;
// 0 if there is none.
DEVICE int without_room(const Append& p) {
    int found = 0;
    for (int b = threadIdx.x; b < p.batch; b += blockDim.x) {
        const s64 added = new_of(p, b);
        s64 held = 0;
#pragma unroll
        for (int t = 0; t < TIERS; t++) held += p.tiers[t].lengths ? p.tiers[t].lengths[b] : 0;
        bool fits = added >= 0 && added <= p.n && held + added <= p.capacity;
        if (p.adds) {
            const int* const adds = p.adds + b * (TIERS + 1);
            fits = fits && adds[TIERS] == 0;
            for (int t = 0; t < TIERS; t++)
                if (p.tiers[t].lengths) fits = fits && p.tiers[t].lengths[b] + s64(adds[t]) <= p.tiers[t].room;
        } else {
            fits = fits && p.tiers[p.tier].lengths[b] + added <= p.tiers[p.tier].room;
        }
        if (!fits) found = b + 1;
    }
    return found;
}

DEVICE void grow(const Append& p, int sequence) {
    if (p.adds) {
        for (int t = 0; t < TIERS; t++)
            if (p.tiers[t].lengths) p.tiers[t].lengths[sequence] += p.adds[sequence * (TIERS + 1) + t];
    } else {
        p.tiers[p.tier].lengths[sequence] += new_of(p, sequence);
    }
    p.next_slots[sequence] += new_of(p, sequence);
}

// The vectors of a sequence's tokens, of keys and values of each head in turn: those that a group of lanes has.
struct Vectors {
    const Append& p;
    const Group group;
    const int sequence, all;  // of a token
    int token, item;          // the next one
    int tokens_on, items_on;  // from one to the next
    int slot;                 // of the first token
    Numbers given;

    DEVICE Vectors(const Append& p, int sequence)
        : p(p), group(p.lanes), sequence(sequence), all(2 * p.kv_heads) {
        const int groups = blockDim.x / p.lanes, first = blockIdx.x * groups + threadIdx.x / p.lanes, on = gridDim.x * groups;
        token = first / all, item = first % all;
        tokens_on = on / all, items_on = on % all;
        find();
    }

    // What does not depend on where tokens go is asked for.
    DEVICE void ask() {
        given.ask();
        slot = p.next_slots[sequence];
    }

    DEVICE void write(int count) {
        while (token < count) {
            const int head = item / 2;
            const bool value = item % 2;
            const s64 at = s64(sequence) * p.n + token;
            const int number = p.tier_of ? p.tier_of[at] : p.tier, bits = bits_of(number);
            const Tier& tier = p.tiers[number];
            const s64 place = sequence * tier.room + tier.lengths[sequence] + (p.rank ? p.rank[at] : token);
            if (item + group.lane == 0) {
                tier.ids[place] = p.ids ? p.ids[at] : slot + token;
                tier.slots[place] = slot + token;
                tier.importance[place] = 0;
            }
            float x[UNIT];
            given.take(value ? p.v_dtype : p.k_dtype, x);
            next();
            if (!value && p.key_scales)
                divide(x, p.key_scales + (s64(sequence) * p.kv_heads + head) * p.dim, p.dim, group.lane);
            if (p.rotate) rotate_keys(x, value);
            const s64 row = place * p.kv_heads + head;
            u8* const to = (value ? tier.v : tier.k) + row * (p.dim / UNIT) * bits;
            encode(x, bits, p.dim, group, to, (value ? tier.v_scale : tier.k_scale) + row);
        }
    }

private:
    DEVICE void find() {
        if (token >= p.n) return;
        const bool value = item % 2;
        const s64* const strides = value ? p.v_strides : p.k_strides;
        const s64 from = sequence * strides[0] + token * strides[1] + item / 2 * strides[2];
        given.find(value ? p.v : p.k, from, value ? p.v_dtype : p.k_dtype, p.dim, group.lane);
    }

    DEVICE void next() {
        token += tokens_on, item += items_on;
        if (item >= all) token++, item -= all;
        if (token >= p.n) return;
        find();
        given.ask();
    }

    // By all groups of a warp, of which some have values.
    static DEVICE void rotate_keys(float (&x)[UNIT], bool value) {
        float y[UNIT];
#pragma unroll
        for (int e = 0; e < UNIT; e++) y[e] = x[e];
        rotate_unit(y, threadIdx.x % WARP);
#pragma unroll
        for (int e = 0; e < UNIT; e++) x[e] = value ? x[e] : y[e];
    }
};

// Whether this block is to end it, as all have read the lengths: the last one, or the first of one token's, which are a cluster.
DEVICE bool ends(const Append& p) {
#if __CUDA_ARCH__ >= 900
    if (p.n == 1 && gridDim.x > 1) {
        cluster_sync();
        return blockIdx.x == 0;
    }
#endif
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = is_last(p.ticket, gridDim.x * gridDim.y);
    __syncthreads();
    return last;
}

// Grid: blocks that share the tokens of a sequence, sequences.
extern "C" __global__ void __launch_bounds__(512, 1) append(const __grid_constant__ Append p) {
    __shared__ int refused;
    let_successor_start();
    Vectors vectors(p, blockIdx.y);
    wait_for_predecessor();
    vectors.ask();
    const int found = without_room(p);
    if (found) refused = found;
    const bool fits = !__syncthreads_or(found);
    if (fits) vectors.write(new_of(p, blockIdx.y));
    if (!ends(p)) return;
    if (threadIdx.x == 0) {
        *p.ticket = 0;
        if (!fits) *static_cast<volatile int*>(p.refused) = refused;
    }
    for (int b = threadIdx.x; fits && b < p.batch; b += blockDim.x) grow(p, b);
}

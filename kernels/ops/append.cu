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
    int lanes;      // that have a vector; those of a warp are of one token
    int clustered;  // whether all blocks are a cluster
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

// Where a sequence's tokens of one width go, if there are `held`: the first of them among all tokens of the bucket, and of one
// vector the codes and the scale of that one.
struct Places {
    s64 first;
    u8* codes;
    u16* scale;

    DEVICE Places() : first(0), codes(nullptr), scale(nullptr) {}

    DEVICE Places(const Append& p, int number, int held, int sequence, int head, bool value) {
        const Tier& tier = p.tiers[number];
        first = sequence * tier.room + held;
        const s64 row = first * p.kv_heads + head;
        codes = (value ? tier.v : tier.k) + row * (p.dim / UNIT) * bits_of(number);
        scale = (value ? tier.v_scale : tier.k_scale) + row;
    }
};

constexpr int ANY = -1;  // in place of a tier: whatever there is, also widths token by token, rotation and key scales

// A vector of a sequence's tokens, of all heads' keys and then of their values, for each group of lanes: that of one token after
// the other.
struct Vectors {
    const Append& p;
    const Group group;
    const int sequence;
    int item;              // of a token's vectors
    int token, tokens_on;  // the next one, and from one to the next
    int slot;              // of the first token
    int held;              // tokens of the bucket, if all go to one

    DEVICE Vectors(const Append& p, int sequence) : p(p), group(p.lanes), sequence(sequence) {
        const int all = 2 * p.kv_heads, groups = blockDim.x / p.lanes, own = threadIdx.x / p.lanes;
        const int tokens = gridDim.x == 1 ? groups / all : 1;  // that a block has at a time
        item = gridDim.x == 1 ? own % all : blockIdx.x * groups + own;
        token = blockIdx.z * tokens + (gridDim.x == 1 ? own / all : 0), tokens_on = gridDim.z * tokens;
        if (own >= tokens * all || item >= all) token = p.n;
    }

    DEVICE bool is_value() const { return item >= p.kv_heads; }

    DEVICE int head() const { return is_value() ? item - p.kv_heads : item; }

    DEVICE int dtype() const { return is_value() ? p.v_dtype : p.k_dtype; }

    // From a token to the next one, in bytes.
    DEVICE s64 apart() const { return tokens_on * (is_value() ? p.v_strides : p.k_strides)[1] * (dtype() == FLOAT32 ? 4 : 2); }

    DEVICE Numbers numbers() const {
        const s64* const strides = is_value() ? p.v_strides : p.k_strides;
        const s64 first = sequence * strides[0] + token * strides[1] + head() * strides[2];
        return Numbers(is_value() ? p.v : p.k, first, dtype(), apart(), token < p.n ? p.dim : 0, group.lane);
    }

    // What does not depend on where tokens go is asked for.
    DEVICE void ask(Numbers& given) {
        given.ask();
        slot = p.next_slots[sequence];
        held = p.tier_of ? 0 : p.tiers[p.tier].lengths[sequence];
    }

    template <int TIER = 0>
    DEVICE void write(Numbers& given, int count) {
        if (p.tier_of || p.key_scales || p.rotate)
            write_tier<ANY>(given, count);
        else if (TIER == p.tier)
            write_tier<TIER>(given, count);
        else if constexpr (TIER + 1 < TIERS)
            write<TIER + 1>(given, count);
    }

private:
    template <int TIER>
    DEVICE void write_tier(Numbers& given, int count) {
        const s64 step = apart();
        const bool chosen = TIER == ANY && p.tier_of;
        const auto places = [&](int number, int held) { return Places(p, number, held, sequence, head(), is_value()); };
        Places to;
        if (!chosen) to = places(TIER == ANY ? p.tier : TIER, held);
        for (; token < count; token += tokens_on) {
            const s64 at = s64(sequence) * p.n + token;
            const int number = chosen ? p.tier_of[at] : TIER == ANY ? p.tier : TIER, bits = bits_of(number);
            const u32 rank = chosen ? p.rank[at] : token;
            const u64 row = u64(rank) * u32(p.kv_heads);
            if (chosen) to = places(number, p.tiers[number].lengths[sequence]);
            if (item + group.lane == 0) {
                const Tier& tier = p.tiers[number];
                tier.ids[to.first + rank] = p.ids ? p.ids[at] : slot + token;
                tier.slots[to.first + rank] = slot + token;
                tier.importance[to.first + rank] = 0;
            }
            float x[UNIT];
            given.take(dtype(), x);
            given.from += step;
            if (token + tokens_on < p.n) given.ask();
            if constexpr (TIER == ANY) {
                if (!is_value() && p.key_scales)
                    divide(x, p.key_scales + (s64(sequence) * p.kv_heads + head()) * p.dim, p.dim, group.lane);
                if (p.rotate) rotate_keys(x, is_value());
            }
            encode(x, bits, p.dim, group, to.codes + row * u32(p.dim / UNIT * bits), to.scale + row);
        }
    }

    // By all groups of a warp, of which some may have values.
    static DEVICE void rotate_keys(float (&x)[UNIT], bool value) {
        if (!__any_sync(~0u, !value)) return;
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
    if (p.clustered) {
        cluster_sync();
        return blockIdx.x == 0;
    }
#endif
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) last = is_last(p.ticket, gridDim.x * gridDim.y * gridDim.z);
    __syncthreads();
    return last;
}

// Blocks of 512 threads that a multiprocessor has room for, or of 128 four times as many: more than share its memory elsewhere.
constexpr int RESIDENT = __CUDA_ARCH__ >= 900 ? 2 : 1;

// Grid: blocks that share a token's vectors, sequences, blocks that share the tokens of a sequence.
extern "C" __global__ void __launch_bounds__(512, RESIDENT) append(const __grid_constant__ Append p) {
    __shared__ int refused;
    let_successor_start();
    Vectors vectors(p, blockIdx.y);
    Numbers given = vectors.numbers();
    wait_for_predecessor();
    vectors.ask(given);
    const int found = without_room(p);
    if (found) refused = found;  // whichever thread's stays
    const bool fits = !__syncthreads_or(found);
    if (fits) vectors.write(given, new_of(p, blockIdx.y));
    if (!ends(p)) return;
    if (threadIdx.x == 0) {
        *p.ticket = 0;
        if (!fits) *static_cast<volatile int*>(p.refused) = refused;
    }
    for (int b = threadIdx.x; fits && b < p.batch; b += blockDim.x) grow(p, b);
}

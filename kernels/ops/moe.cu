// Mixtures of experts, but for their products (gemm.cu): who goes where, and the sums.
//
// An entry is a slot of a token: number token * top_k + slot. Entries are sorted by expert, those of an expert in
// order; a token with an id that is no expert's takes part in nothing, and its place is NOWHERE.
//
//      gather -> products with gate and up -> hidden -> product with down -> combine
//
// Where gate and up together make float16 themselves, `level` stands in for `hidden`.
//
// Columns of an expert's matrices may have signs: bits that float16 numbers are changed by, [expert][K]. Rows in the
// entries' places get them from `change_signs`; a product that finds its rows itself gives them theirs
// (core/decode.cuh).
//
// Products after the first read the works and fetch weights while what they multiply is still being made (`early` in
// core/problem.cuh; why they may says core/ptx.cuh).
#include "../core/levels.cuh"
#include "../core/problem.cuh"
#include "../formats/rows.cuh"

constexpr int ROUTE_WARPS = CUQUANT_ROUTE_WARPS, GROUP_WARPS = CUQUANT_GROUP_WARPS, LEVEL_WARPS = CUQUANT_LEVEL_WARPS;
constexpr int MOST_EXPERTS = CUQUANT_MOST_EXPERTS, MOST_SLOTS = CUQUANT_MOST_SLOTS;
constexpr int PRODUCTS = 3;
// Threads of a block, at most; pieces of a row that one has at once.
constexpr int GATHER_THREADS = CUQUANT_GATHER_THREADS, GATHER_KEPT = CUQUANT_GATHER_KEPT;
constexpr int SIGN_THREADS = CUQUANT_SIGN_THREADS, COMBINE_THREADS = CUQUANT_COMBINE_THREADS;
static_assert(MOST_SLOTS <= COMBINE_THREADS, "a thread has a slot");

DEVICE void enter() {
    let_successor_start();
    wait_for_predecessor();
}

template <class T>
DEVICE T warp_sum(T value) {
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
}

// Sum of the lanes before this one.
DEVICE int sum_before(int value) {
    const int lane = threadIdx.x % WARP;
    int sum = value;
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    return sum - value;
}

// Integers in the order of the logits, larger ones first by their upper half, then lower indices; NaN comes last.
DEVICE u64 rank_of(float logit, int index) {
    const u32 bits = __float_as_int(logit), size = magnitude(logit);
    u32 order = size == 0 ? 0x80000000 : bits >> 31 ? ~bits : bits | 0x80000000;
    if (size > 0x7f800000) order = 0;
    return u64(order) << 32 | u32(~index);
}

// The top_k most probable experts of each token, a warp a token: softmax over all of them in float32.
extern "C" __global__ void __launch_bounds__(ROUTE_WARPS* WARP)
route(const void* logits, int dtype, s64 row_stride, s64 column_stride, s64 tokens, int experts, int top_k,
      int normalize, int* ids, float* probs) {
    enter();
    const s64 token = s64(blockIdx.x) * ROUTE_WARPS + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP;
    if (token >= tokens) return;
    auto logit = [&](int e) { return load_float(logits, token * row_stride + e * column_stride, dtype); };
    auto best_below = [&](u64 last) {
        u64 best = 0;
        for (int e = lane; e < experts; e += WARP) {
            const u64 rank = rank_of(logit(e), e);
            if (rank < last) best = max(best, rank);
        }
#pragma unroll
        for (int step = 16; step; step /= 2) best = max(best, __shfl_xor_sync(~0u, best, step));
        return best;
    };
    u64 best = best_below(~0ull);
    const float peak = logit(int(~u32(best)));
    float sum = 0, chosen = 0;
    for (int e = lane; e < experts; e += WARP) sum += expf(logit(e) - peak);
    sum = warp_sum(sum);
    for (int slot = 0; slot < top_k; slot++) {
        const int e = int(~u32(best));
        const float p = expf(logit(e) - peak) / sum;
        if (slot % WARP == lane) ids[token * top_k + slot] = e, probs[token * top_k + slot] = p;
        chosen += p;
        if (slot + 1 < top_k) best = best_below(best);
    }
    if (normalize)
        for (int slot = lane; slot < top_k; slot += WARP) probs[token * top_k + slot] /= chosen;
}

// The places of an expert's entries among many tokens, and where they start, by a block an expert. Warps have equal shares
// of the tokens, one after the other.
extern "C" __global__ void __launch_bounds__(GROUP_WARPS* WARP)
group(const void* ids, int wide, int tokens, int top_k, int experts, int* places, int* starts) {
    __shared__ int below[GROUP_WARPS], equal[GROUP_WARPS];  // entries of lower experts, and of this one
    enter();
    const Routing expert_of = {ids, wide, tokens, top_k, experts};
    const int own = blockIdx.x, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int share = (tokens + GROUP_WARPS - 1) / GROUP_WARPS;
    const int begin = min(tokens, warp * share), end = min(tokens, begin + share);
    int lower = 0, mine = 0;
#pragma unroll 4
    for (int token = begin + lane; token < end; token += WARP) {
        if (expert_of.lost(token)) continue;
        for (int slot = 0; slot < top_k; slot++) {
            const int e = expert_of(token, slot);
            lower += e < own, mine += e == own;
        }
    }
    lower = warp_sum(lower), mine = warp_sum(mine);
    if (lane == 0) below[warp] = lower, equal[warp] = mine;
    __syncthreads();
    int start = 0, all = 0, place = 0;
    for (int w = 0; w < GROUP_WARPS; w++) start += below[w], all += equal[w], place += w < warp ? equal[w] : 0;
    if (threadIdx.x == 0) starts[own] = start;
    if (threadIdx.x == 0 && own + 1 == experts) starts[experts] = start + all;
    place += start;
    for (int first = begin; first < end; first += WARP) {
        const int token = first + lane;
        const bool exists = token < end, lost = exists && expert_of.lost(token);
        int count = 0;
        if (exists && !lost)
            for (int slot = 0; slot < top_k; slot++) count += expert_of(token, slot) == own;
        int at = place + sum_before(count);
        place += warp_sum(count);
        for (int slot = 0; exists && slot < top_k; slot++) {
            int* const to = places + s64(token) * top_k + slot;
            if (lost)
                *to = NOWHERE;  // by every block
            else if (expert_of(token, slot) == own)
                *to = at++;
        }
    }
}

// The place of one entry among few tokens, which every block works out for its own.
DEVICE int place_of(const Routing& expert_of, int entry) {
    __shared__ int before[MOST_THREADS / WARP];
    const int token = entry / expert_of.top_k, slot = entry % expert_of.top_k, own = expert_of(token, slot);
    if (expert_of.lost(token)) return NOWHERE;
    int count = 0;
    for (int t = threadIdx.x; t < expert_of.tokens; t += blockDim.x) {
        if (expert_of.lost(t)) continue;
        for (int s = 0; s < expert_of.top_k; s++) {
            const int e = expert_of(t, s);
            count += e < own || (e == own && (t < token || (t == token && s < slot)));
        }
    }
    count = warp_sum(count);
    if (threadIdx.x % WARP == 0) before[threadIdx.x / WARP] = count;
    __syncthreads();
    int place = 0;
    for (int w = 0; w < blockDim.x / WARP; w++) place += before[w];
    return place;
}

// The works of a product whose blocks take `batch` rows each, and `most` entries of the list.
struct Works {
    Work* list;
    int batch, most;
};

// Sum of the threads before this one; `total` of all.
DEVICE int block_sum_before(int value, int& total) {
    __shared__ int warps[MOST_THREADS / WARP];
    const int warp = threadIdx.x / WARP;
    int before = sum_before(value);
    __syncthreads();  // what was here before has been read
    if (threadIdx.x % WARP == WARP - 1) warps[warp] = before + value;
    __syncthreads();
    total = 0;
    for (int w = 0; w < blockDim.x / WARP; w++) {
        if (w < warp) before += warps[w];
        total += warps[w];
    }
    return before;
}

// By one block: every thread has some experts, one after the other.
DEVICE void list_works(const Routing& expert_of, const int* starts, const Works (&products)[PRODUCTS]) {
    __shared__ int counts[MOST_EXPERTS];
    const int experts = expert_of.experts, each = (experts + blockDim.x - 1) / blockDim.x;
    const int begin = min(experts, int(threadIdx.x) * each), end = min(experts, begin + each);
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = starts ? starts[e + 1] - starts[e] : 0;
    __syncthreads();
    for (int token = threadIdx.x; !starts && token < expert_of.tokens; token += blockDim.x) {
        if (expert_of.lost(token)) continue;
        for (int slot = 0; slot < expert_of.top_k; slot++) atomicAdd(counts + expert_of(token, slot), 1);
    }
    __syncthreads();
    int rows = 0, total;
    for (int e = begin; e < end; e++) rows += counts[e];
    const int first = block_sum_before(rows, total);
#pragma unroll
    for (int i = 0; i < PRODUCTS; i++) {
        const Works& to = products[i];
        int own = 0;
        for (int e = begin; e < end; e++) own += (counts[e] + to.batch - 1) / to.batch;
        int work = block_sum_before(own, total), row = first;
        for (int e = begin; e < end; e++)
            for (int left = counts[e]; left > 0; left -= to.batch) {
                const int taken = min(left, to.batch);
                to.list[work++] = {e, row, taken, total};
                row += taken;
            }
        for (int w = total + threadIdx.x; w < to.most; w += blockDim.x) to.list[w] = {0, 0, 0, total};
    }
}

// Rows of x in the order of the entries' places, as float16, a block an entry; `factors` are what rows of x lack, or
// null. The last block lists the works. Of many tokens `group` has found places and starts before, of few they are made
// here.
extern "C" __global__ void __launch_bounds__(GATHER_THREADS, 1)
gather(const void* x, int dtype, s64 row_stride, s64 column_stride, const float* factors, int K, const void* ids,
       int wide, int tokens, int top_k, int experts, int* places, const int* starts, u16* out, float* unscale,
       Work* gate_list, int gate_batch, int gate_most, Work* up_list, int up_batch, int up_most, Work* down_list,
       int down_batch, int down_most) {
    enter();
    const Routing expert_of = {ids, wide, tokens, top_k, experts};
    const int entry = blockIdx.x;
    if (entry == tokens * top_k) {
        const Works products[] = {
            {gate_list, gate_batch, gate_most}, {up_list, up_batch, up_most}, {down_list, down_batch, down_most}};
        return list_works(expert_of, starts, products);
    }
    const int place = starts ? places[entry] : place_of(expert_of, entry);
    if (!starts && threadIdx.x == 0) places[entry] = place;
    if (place == NOWHERE) return;
    const int token = entry / top_k;
    const FloatRow row = {x, token * row_stride, column_stride, dtype, K};
    auto as_they_are = [](int) { return make_uint4(0, 0, 0, 0); };
    const float factor = row_to_half<GATHER_KEPT>(row, reinterpret_cast<uint4*>(out + s64(place) * K), as_they_are);
    if (threadIdx.x == 0) unscale[place] = factors ? factor * factors[token] : factor;
}

// An expert's of the signs of all, or null.
DEVICE const u16* signs_of(const u16* signs, int expert, int K) {
    return signs ? signs + s64(expert) * K : nullptr;
}

// Rows in the entries' places with other signs (or null) in place of those that they have, a block an entry.
extern "C" __global__ void __launch_bounds__(SIGN_THREADS)
change_signs(u16* rows, int K, const void* ids, int wide, int tokens, int top_k, int experts, const int* places,
             const u16* before, const u16* after) {
    enter();
    const int place = places[blockIdx.x];
    if (place == NOWHERE) return;
    const int expert = Routing{ids, wide, tokens, top_k, experts}.fresh(blockIdx.x);
    uint4* const row = reinterpret_cast<uint4*>(rows + s64(place) * K);
    for (int piece = threadIdx.x; piece < K / 8; piece += blockDim.x) {
        uint4 v = row[piece];
        if (before) v = flip(v, reinterpret_cast<const uint4*>(signs_of(before, expert, K))[piece]);
        if (after) v = flip(v, reinterpret_cast<const uint4*>(signs_of(after, expert, K))[piece]);
        row[piece] = v;
    }
}

// What `down` multiplies, from float32 rows to float16, as row_to_half does it. A block keeps a row of up to KEPT times
// four numbers of each thread; what is beyond is read again.
constexpr int HIDDEN_THREADS = CUQUANT_HIDDEN_THREADS, KEPT = CUQUANT_HIDDEN_KEPT;

extern "C" __global__ void __launch_bounds__(HIDDEN_THREADS, 2)
hidden(const float* x, int K, u16* out, float* unscale) {
    enter();
    const s64 row = blockIdx.x;
    const float4* const from = reinterpret_cast<const float4*>(x + row * K);
    uint2* const to = reinterpret_cast<uint2*>(out + row * K);
    const int pieces = K / 4, beyond = KEPT * blockDim.x + threadIdx.x;
    float4 kept[KEPT];
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const int i = j * blockDim.x + threadIdx.x;
        kept[j] = i < pieces ? from[i] : make_float4(0, 0, 0, 0);
    }
    u32 peak = 0;
    auto look = [&](const float4& v) {
        peak = max(max(peak, max(magnitude(v.x), magnitude(v.y))), max(magnitude(v.z), magnitude(v.w)));
    };
#pragma unroll
    for (int j = 0; j < KEPT; j++) look(kept[j]);
    for (int i = beyond; i < pieces; i += blockDim.x) look(from[i]);
    const int shift = shift_of(block_max(peak));
    const float scale = power_of_two(shift);
    auto halves = [&](const float4& v) {
        return make_uint2(pack(ieee_mul(v.x, scale), ieee_mul(v.y, scale), FLOAT16),
                          pack(ieee_mul(v.z, scale), ieee_mul(v.w, scale), FLOAT16));
    };
#pragma unroll
    for (int j = 0; j < KEPT; j++) {
        const int i = j * blockDim.x + threadIdx.x;
        if (i < pieces) to[i] = halves(kept[j]);
    }
    for (int i = beyond; i < pieces; i += blockDim.x) to[i] = halves(from[i]);
    if (threadIdx.x == 0) unscale[row] = power_of_two(-shift);
}

// Rows in levels (core/levels.cuh) to float16 rows over powers of two, in place, a warp a row.
extern "C" __global__ void __launch_bounds__(LEVEL_WARPS* WARP)
level(u16* x, int K, const u8* levels_of_rows, int rows, float* unscale) {
    enter();
    const int row = blockIdx.x * LEVEL_WARPS + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const int count = K / levels::COLUMNS;
    const u8* const own = levels_of_rows + s64(row) * count;
    u32 highest = levels::ZEROS;
#pragma unroll 4
    for (int i = lane; i < count; i += WARP) highest = max(highest, u32(own[i]));
#pragma unroll
    for (int step = 16; step; step /= 2) highest = max(highest, __shfl_xor_sync(~0u, highest, step));
#pragma unroll 4
    for (int i = lane; i < count; i += WARP) {
        const u32 lower = own[i];
        if (lower == highest || lower == levels::ZEROS) continue;
        const float factor = levels::factor(max(int(lower - highest), levels::LOWEST));
        u32* const pairs = reinterpret_cast<u32*>(x + s64(row) * K + i * levels::COLUMNS);
        for (int j = 0; j < levels::COLUMNS / 2; j++)
            pairs[j] = pack(low_to_float(pairs[j]) * factor, high_to_float(pairs[j]) * factor, FLOAT16);
    }
    if (lane == 0) unscale[row] = levels::factor_of_byte(highest);
}

// A number as `load_float` reads it, from the L2 cache.
DEVICE float load_fresh(const void* array, s64 index, int dtype) {
    if (dtype == FLOAT32) return __ldcg(static_cast<const float*>(array) + index);
    const u16 bits = __ldcg(static_cast<const u16*>(array) + index);
    return dtype == FLOAT16 ? half_to_float(bits) : bfloat_to_float(bits);
}

// y: the results of a token's entries, times their probabilities, in the order of their experts. Results are in the
// entries' places, or (null) in the order of the entries.
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
combine(const float* results, int columns, const int* places, const void* ids, int wide, int tokens, int top_k,
        int experts, const void* probs, int probs_dtype, void* out, int dtype, s64 row_stride, s64 column_stride) {
    __shared__ int chosen[MOST_SLOTS], sorted[MOST_SLOTS];
    __shared__ float weights[MOST_SLOTS];
    let_successor_start();
    // Routing was there before the product that this kernel waits for (core/ptx.cuh).
    const s64 token = blockIdx.x, first_entry = token * top_k;
    const int own = threadIdx.x;
    if (own < top_k) chosen[own] = Routing{ids, wide, tokens, top_k, experts}.fresh(int(first_entry) + own);
    __syncthreads();
    bool lost = false;
    for (int s = 0; s < top_k; s++) lost |= chosen[s] == NOWHERE;
    if (!lost && own < top_k) {
        int rank = 0;
        for (int s = 0; s < top_k; s++) rank += chosen[s] < chosen[own] || (chosen[s] == chosen[own] && s < own);
        sorted[rank] = places ? __ldcg(places + first_entry + own) : int(first_entry) + own;
        weights[rank] = load_fresh(probs, first_entry + own, probs_dtype);
    }
    __syncthreads();
    wait_for_predecessor();
    constexpr int EACH = 4;
    static_assert(EACH * COMBINE_THREADS == CUQUANT_COMBINE_COLUMNS, "columns of a block");
    const int first = (blockIdx.y * blockDim.x + threadIdx.x) * EACH;
    if (first >= columns) return;
    const bool whole = columns % EACH == 0;
    float sum[EACH] = {};
#pragma unroll 2
    for (int slot = 0; slot < top_k && !lost; slot++) {
        const float* from = results + s64(sorted[slot]) * columns + first;
        float v[EACH] = {};
        if (whole) {
            const float4 all = *reinterpret_cast<const float4*>(from);
            v[0] = all.x, v[1] = all.y, v[2] = all.z, v[3] = all.w;
        } else {
#pragma unroll
            for (int j = 0; j < EACH; j++)
                if (first + j < columns) v[j] = from[j];
        }
#pragma unroll
        for (int j = 0; j < EACH; j++) sum[j] += weights[slot] * v[j];
    }
#pragma unroll
    for (int j = 0; j < EACH; j++)
        if (first + j < columns)
            store_float(out, token * row_stride + (first + j) * column_stride, dtype,
                        lost ? __int_as_float(0x7fffffff) : sum[j]);
}

// Floats to blocks.
#include "../formats/encode_fp4.cuh"
#include "../formats/encode_kbit.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256;
constexpr int FINE_FROM = CUQUANT_FINE_FROM;  // steps of a scale
// Blocks that a multiprocessor is to hold. With eight, all 2048 threads of sm_80's and sm_90's (sm_86's and sm_89's hold six
// blocks, sm_75's four), enough is on its way; codes that are looked up need more registers than are left then. From
// sm_100 on these take some more, and so do scales with minimums.
constexpr bool MORE = __CUDA_ARCH__ >= 1000 && (LOOKED_UP<Format> || Format::HAS_MIN);
constexpr int RESIDENT = LOOKED_UP<Format> ? 5 - MORE : 8 - 2 * MORE;
constexpr int PARTS = Format::COLUMNS / 32, BLOCKS = THREADS / 2 / PARTS;  // of 32 elements; bytes a multiple of 16

// A thread's half of a block of integer codes to its place; false where a scale overflows float16. `lost`: whether it is
// too coarse.
template <class F>
DEVICE bool encode_integers(const float (&x)[MINE], Extent extent, int half, u8* to, bool& lost) {
    int q[MINE];
    u32 words[4];
    const Scales scales = encode<F>(x, extent, half, q);
    pack_codes<F>(q, words);
    const u32 scale = scale_bits<F>(scales, words);
    store_codes<F>(to, half, words);
    if (half == 0) F::store_scale_bits(to, scale);
    lost = becomes_coarse<FINE_FROM>(scales.d);
    return (scale & 0x7c00) != 0x7c00 && (scale >> 16 & 0x7c00) != 0x7c00;
}

// Rows of floats, with strides in elements, and what they are to become.
struct Quantizing {
    const void* x;
    int dtype;
    s64 row_stride, column_stride, rows, blocks_per_row;
    u8* out;
    Found* found;  // or null
    bool decoded;  // see Absmax
    float scale;   // what the elements of a tensor are divided by first (nvfp4)
};

// Codes looked up in a codebook want one, others none.
template <class F>
using LevelsOf = Levels<LOOKED_UP<F> ? F::BITS : 2>;

// What a thread has of a chunk of BLOCKS: of a block, `half` of 32 elements from `first` on, in two runs of eight.
template <class F>
struct Part {
    static constexpr int APART = F::SCALING == E4M3 ? 8 : 16;  // a scale's elements in one thread
    int half, number, block, first;

    DEVICE Part() {
        half = threadIdx.x % 2, number = threadIdx.x / 2 % PARTS, block = threadIdx.x / 2 / PARTS;
        first = number * 32 + half * (24 - APART);
    }
};

// A thread's elements to their codes. Whether its scale is too coarse.
template <class F, class Elements>
DEVICE bool encode_part(const Quantizing& p, const LevelsOf<F>& levels, const Part<F>& part, s64 block, int dtype,
                        Elements& values, Extent extent, u8* staged) {
    constexpr bool SIGNED = F::CODING == INTEGERS && F::BITS != 8;
    if constexpr (F::CODING != INTEGERS && Part<F>::APART == 16)
        extent.high = ieee_max(extent.high, __shfl_xor_sync(~0u, extent.high, 1));
    const bool is_zero = __float_as_int(extent.high) == 0;  // subnormal numbers are not
    if constexpr (F::SCALING == E4M3)
        if (p.scale != 1) {
#pragma unroll
            for (int j = 0; j < MINE; j++) values[j] = ieee_div(values[j], p.scale);
            extent = extent_of<SIGNED>(values);
        }
    u8* const to = staged + part.block * F::BLOCK_BYTES;
    bool good, lost = false;
    u32 stored = 1;
    if constexpr (LOOKED_UP<F>) {
        const Absmax<F> absmax(extent.high, p.decoded);
        stored = absmax.stored, good = absmax.good;
        levels.encode(values, absmax.d, dtype, part.half, to);
        if (part.half == 0) F::store_scale_bits(to, stored);
    } else if constexpr (F::CODING == E2M1) {
        good = encode_e2m1<F>(values, extent.high, part.number, part.half, to, stored);
    } else {
        good = encode_integers<F>(values, extent, part.half, to, lost);
    }
    if (!good && p.found) atomicMin(&p.found->first_bad, u64(block / p.blocks_per_row));
    // Whatever a step of the scale's type is.
    if constexpr (F::CODING != INTEGERS && F::SCALING != E8M0) lost = stored < FINE_FROM && !is_zero;
    return lost;
}

// The blocks of a chunk, by way of `staged`.
template <class F>
DEVICE void encode_chunk(const Quantizing& p, const LevelsOf<F>& levels, bool dense, s64 chunk, bool last, u8* staged) {
    constexpr int APART = Part<F>::APART;
    constexpr bool SIGNED = F::CODING == INTEGERS && F::BITS != 8;
    const s64 first = chunk * BLOCKS;
    const int count = last ? int(p.rows * p.blocks_per_row - first) : BLOCKS;
    const Part<F> part;
    const int mine = min(part.block, count - 1);  // threads beyond the last block repeat it
    float values[MINE];
    Extent extent;
    if (dense) {
        const s64 at = first * F::COLUMNS + (mine * F::COLUMNS + part.first);
        extent = load_in_order<APART, SIGNED>(p.x, at, p.dtype, values);
    } else {
        const s64 row = (first + mine) / p.blocks_per_row, block = first + mine - row * p.blocks_per_row;
        const s64 at = row * p.row_stride + (block * F::COLUMNS + part.first) * p.column_stride;
        extent = load_elements<APART, SIGNED>(p.x, at, p.row_stride, p.column_stride, p.dtype, values);
    }
    const bool lost = encode_part<F>(p, levels, part, first + mine, p.dtype, values, extent, staged);
    if constexpr (F::SCALING != E8M0) add_lost(p.found, lost, part.block < count);
    constexpr int MOST = BLOCKS * F::BLOCK_BYTES;
    u8* const all = p.out + first * F::BLOCK_BYTES;
    if (last)
        store_staged<MOST, THREADS>(all, staged, count * F::BLOCK_BYTES);
    else
        store_staged<MOST, THREADS>(all, staged, MOST);
}

// Whole chunks of dense float16 numbers, one after the other, the next one's on their way meanwhile. The first chunk that is
// not the block's any more.
template <class F>
DEVICE s64 encode_halves(const Quantizing& p, const LevelsOf<F>& levels, s64 chunks, u8* staged) {
    constexpr int BYTES = BLOCKS * F::BLOCK_BYTES;
    const Part<F> part;
    s64 chunk = blockIdx.x;
    const u16* from = static_cast<const u16*>(p.x) + (chunk * BLOCKS + part.block) * F::COLUMNS + part.first;
    u8* to = p.out + chunk * BYTES;
    u32 next[MINE / 2];
    auto load = [&] { load_pairs<Part<F>::APART>(reinterpret_cast<const uint4*>(from), next); };
    if (chunk < chunks) load();
    int lost = 0, turn = 0;
#pragma unroll 1
    for (; chunk < chunks; chunk += gridDim.x, turn ^= 1) {
        u32 pairs[MINE / 2];
#pragma unroll
        for (int j = 0; j < MINE / 2; j++) pairs[j] = next[j];
        from += s64(gridDim.x) * BLOCKS * F::COLUMNS;
        if (chunk + gridDim.x < chunks) load();
        const Extent extent = {0, peak_of(pairs)};
        const s64 block = chunk * BLOCKS + part.block;
        if constexpr (F::BITS == 2) {
            lost += encode_part<F>(p, levels, part, block, FLOAT16, pairs, extent, staged + turn * BYTES);
        } else {
            float values[MINE];
            widen(pairs, values);
            lost += encode_part<F>(p, levels, part, block, FLOAT16, values, extent, staged + turn * BYTES);
        }
        store_staged<BYTES, THREADS>(to, staged + turn * BYTES, BYTES);
        to += s64(gridDim.x) * BYTES;
    }
    if (lost && p.found) atomicAdd(&p.found->lost, u64(lost));
    return chunk;
}

// Rows of K floats, with strides in elements, to blocks; `found` may be null. `thresholds` and `decoded`: of a codebook
// (encode_kbit.cuh), whose tables are made once for all chunks that a block of threads takes.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) quantize(
    const void* x, int dtype, s64 row_stride, s64 column_stride, s64 rows, s64 blocks_per_row, u8* out,
    Found* found, const Thresholds* thresholds, int decoded, float scale) {
    let_successor_start();
    wait_for_predecessor();
    // Through shared memory: a block's bytes are neither aligned nor whole sectors, those of many are.
    constexpr bool STAYS = LOOKED_UP<Format>;
    __shared__ __align__(16) u8 staged[(STAYS ? 2 : 1) * BLOCKS * Format::BLOCK_BYTES];
    __shared__ LevelsOf<Format> levels;
    const bool dense = are_dense(x, row_stride, column_stride, blocks_per_row * Format::COLUMNS);
    const Quantizing p = {x, dtype, row_stride, column_stride, rows, blocks_per_row, out, found, decoded != 0, scale};
    if constexpr (STAYS) {
        levels.fill(*thresholds, decoded);
        __syncthreads();
        const s64 blocks = rows * blocks_per_row, chunks = (blocks + BLOCKS - 1) / BLOCKS;
        s64 chunk = blockIdx.x;
        if (dense && dtype == FLOAT16) chunk = encode_halves<Format>(p, levels, blocks / BLOCKS, staged);
#pragma unroll 1
        for (; chunk < chunks; chunk += gridDim.x) {
            __syncthreads();  // all have stored what was staged
            encode_chunk<Format>(p, levels, dense, chunk, chunk + 1 == chunks, staged);
        }
    } else {
        encode_chunk<Format>(p, levels, dense, blockIdx.x, blockIdx.x + 1 == gridDim.x, staged);
    }
}

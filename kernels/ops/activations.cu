// Activations as float16 rows, and as q8_1 blocks.
//
// Kernels that stand in for each other, of float16 and of other rows, have the same parameters, which cuquant/cuda/activations.py
// packs alike: those of float16 rows are told a dtype, and a place for `unscale`, though they may have no use for them.
#include "../core/rounded.cuh"
#include "../formats/encode.cuh"
#include "../formats/q8_1.cuh"
#include "../formats/rows.cuh"

DEVICE void store_halves(u16* to, const float* x, float factor) {
    *reinterpret_cast<uint4*>(to) = to_halves(x, factor);
}

// Rows of bits by which those of W's columns that are negative change float16 numbers, [..][pieces of 8], each of them
// for `each` rows of x; or null.
struct RowSigns {
    const u16* bits;
    int each;

    DEVICE uint4 operator()(u32 row, int pieces, int piece) const {
        if (!bits) return make_uint4(0, 0, 0, 0);
        return reinterpret_cast<const uint4*>(bits)[s64(row / u32(each)) * pieces + piece];
    }
};

// Float16 rows of any length to rows of the next multiple of 8, ended by zeros, with signs. A thread has a piece of 8.
// Without `unscale` rows may become themselves.
extern "C" __global__ void __launch_bounds__(256)
prepare_halves(const void* x, int, s64 row_stride, s64 column_stride, int K, uint4* out, float* unscale,
               const u16* signs, int each) {
    let_successor_start();
    const s64 row = blockIdx.x;
    const FloatRow from = {x, row * row_stride, column_stride, FLOAT16, K};
    const int pieces = from.pieces(), piece = blockIdx.y * blockDim.x + threadIdx.x;
    if (piece >= pieces) return;
    const uint4 by = RowSigns{signs, each}(blockIdx.x, pieces, piece);  // they are fixed, as weights are
    wait_for_predecessor();
    out[row * pieces + piece] = flip(from.load(piece).bits, by);
    if (unscale && piece == 0) unscale[row] = 1;
}

// Blocks of a multiprocessor that keep pieces of rows: code for sm_100 and later takes more registers.
constexpr int RESIDENT = __CUDA_ARCH__ >= 1000 ? 1 : 2;

// Bfloat16 and float32 rows to float16 rows of the next multiple of 8, divided by powers of two, with signs.
extern "C" __global__ void __launch_bounds__(ROW_THREADS, RESIDENT)
prepare_rows(const void* x, int dtype, s64 row_stride, s64 column_stride, int K, uint4* out, float* unscale,
             const u16* signs, int each) {
    let_successor_start();
    wait_for_predecessor();
    const s64 row = blockIdx.x;
    const FloatRow from = {x, row * row_stride, column_stride, dtype, K};
    const int pieces = from.pieces();
    auto by = [&](int piece) { return RowSigns{signs, each}(blockIdx.x, pieces, piece); };
    const float factor = row_to_half<4>(from, out + row * pieces, by);
    if (threadIdx.x == 0) unscale[row] = factor;
}

// Float16 rows to those that q8_1 blocks of them stand for.
extern "C" __global__ void __launch_bounds__(256)
round_halves(const void* x, int, s64 row_stride, s64 column_stride, int K, uint4* out, float*) {
    let_successor_start();
    const s64 row = blockIdx.x;
    const int pieces = K / 8, piece = blockIdx.y * blockDim.x + threadIdx.x;
    const FloatRow from = {x, row * row_stride, column_stride, FLOAT16, K};
    wait_for_predecessor();
    const uint4 v = rounded(from.load(min(piece, pieces - 1)).bits);  // whole warps exchange what they have
    if (piece < pieces) out[row * pieces + piece] = v;
}

// q8_1 blocks to float16 rows. The stored sum is not read. A row's peak is at most 128 times its greatest scale.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
blocks_to_half(const u8* blocks, int K, u16* out, float* unscale) {
    let_successor_start();
    wait_for_predecessor();
    const s64 row = blockIdx.x;
    const u8* from = blocks + row * (K / 32) * Format::BLOCK_BYTES;
    auto scale_of = [&](int block) {
        return half_to_float(u16(load_u16(from + block * Format::BLOCK_BYTES)));
    };
    u32 peak = 0;
    for (int block = threadIdx.x; block < K / 32; block += blockDim.x)
        peak = max(peak, magnitude(scale_of(block) * 128));
    const int shift = shift_of(block_max(peak));
    const float scale = power_of_two(shift);
    for (int i = threadIdx.x; i < K / 4; i += blockDim.x) {  // four codes each
        const int block = i / 8;
        const u8* own = from + block * Format::BLOCK_BYTES + Format::CODES_AT + i % 8 * 4;
        const u32 codes = load_u32(own);
        const float d = scale_of(block) * scale;
        u32 half[4];
#pragma unroll
        for (int j = 0; j < 4; j++) half[j] = float_to_half(float(s8(codes >> j * 8)) * d);
        reinterpret_cast<uint2*>(out + row * K)[i] = make_uint2(half[0] | half[1] << 16, half[2] | half[3] << 16);
    }
    if (threadIdx.x == 0) unscale[row] = power_of_two(-shift);
}

// A thread's half of block `mine` of `count` to `staged` and, all together, from there to memory, if blocks are wanted,
// so that a warp writes whole sectors. Its codes, and the block's scale.
DEVICE float store_blocks(const float (&values)[MINE], int half, int mine, int count, u32* staged, u32* to,
                          u32 (&words)[4]) {
    int q[MINE];
    const Scales scales = encode<Format>(values, half, q);
    pack_codes<Format>(q, words);
    const u32 bits = scale_bits<Format>(scales, words);
    u8* const own = reinterpret_cast<u8*>(staged) + mine * Format::BLOCK_BYTES;
    store_codes<Format>(own, half, words);
    if (half == 0) Format::store_scale_bits(own, bits);
    __syncthreads();
    if (to)
        for (int i = threadIdx.x; i < count * (Format::BLOCK_BYTES / 4); i += blockDim.x) to[i] = staged[i];
    return half_to_float(u16(bits));
}

DEVICE u32* block_at(u8* blocks, s64 number) {
    return blocks ? reinterpret_cast<u32*>(blocks + number * Format::BLOCK_BYTES) : nullptr;
}

// Float16 rows to q8_1 blocks and, at once, to the float16 rows of the numbers that they stand for: no power of
// two is needed, since codes times a float16 scale are exact where they are subnormal. Blocks y share a row. A product
// that the rounded scale carries just beyond float16's range becomes the last number in it; infinity and NaN stay.
extern "C" __global__ void __launch_bounds__(256)
quantize_half(const void* x, int, s64 row_stride, s64 column_stride, int K, u8* blocks, u16* out,
              float* unscale) {
    __shared__ __align__(16) u32 staged[256 / 2 * Format::BLOCK_BYTES / 4];
    let_successor_start();
    wait_for_predecessor();
    const s64 row = blockIdx.x;
    const int first = blockIdx.y * (blockDim.x / 2), count = min(K / 32 - first, int(blockDim.x / 2));
    const int half = threadIdx.x % 2, mine = min(int(threadIdx.x) / 2, count - 1);
    const int column = (first + mine) * 32 + half * 8;
    float values[MINE];
    load_elements(x, row * row_stride + column * column_stride, row_stride, column_stride, FLOAT16, values);
    u32 words[4];
    const float d = store_blocks(values, half, mine, count, staged, block_at(blocks, row * (K / 32) + first), words);
    const float most = is_finite(d) ? 65504.f : __int_as_float(0x7f800000);
#pragma unroll
    for (int j = 0; j < MINE; j++)
        values[j] = ieee_max(ieee_min(float(s8(words[j / 4] >> j % 4 * 8)) * d, most), -most);
    u16* const to = out + row * K + column;
    store_halves(to, values, 1);
    store_halves(to + 16, values + 8, 1);
    if (threadIdx.x == 0 && blockIdx.y == 0) unscale[row] = 1;
}

// Float rows of any type to the same (blocks or null), divided by powers of two, as blocks_to_half makes them. A thread
// takes up to PIECES times half a block, and keeps the codes until the row's peak is known.
constexpr int PIECES = 4;

extern "C" __global__ void __launch_bounds__(MOST_THREADS)
quantize_rows(const void* x, int dtype, s64 row_stride, s64 column_stride, int K, u8* blocks, u16* out,
              float* unscale) {
    __shared__ __align__(16) u32 staged[MOST_THREADS / 2 * Format::BLOCK_BYTES / 4];
    let_successor_start();
    wait_for_predecessor();
    const s64 row = blockIdx.x;
    const int half = threadIdx.x % 2, last = K / 32 - 1, at_once = blockDim.x / 2;
    u32 words[PIECES][4], peak = 0;
    float d[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const int first = p * at_once, count = min(at_once, last + 1 - first);
        if (count <= 0) break;
        const int mine = min(int(threadIdx.x) / 2, count - 1);  // threads beyond the last block repeat it
        const s64 at = row * row_stride + ((first + mine) * 32 + half * 8) * column_stride;
        float values[MINE];
        load_elements(x, at, row_stride, column_stride, dtype, values);
        if (p > 0) __syncthreads();  // what was staged before has been read
        d[p] = store_blocks(values, half, mine, count, staged, block_at(blocks, row * (K / 32) + first), words[p]);
        peak = max(peak, magnitude(d[p] * 128));
    }
    const int shift = shift_of(block_max(peak));
    const float scale = power_of_two(shift);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        const int block = p * at_once + threadIdx.x / 2;
        if (block > last) break;
        float values[MINE];
#pragma unroll
        for (int j = 0; j < MINE; j++) values[j] = float(s8(words[p][j / 4] >> j % 4 * 8));
        u16* const to = out + row * K + block * 32 + half * 8;
        store_halves(to, values, d[p] * scale);
        store_halves(to + 16, values + 8, d[p] * scale);
    }
    if (threadIdx.x == 0) unscale[row] = power_of_two(-shift);
}

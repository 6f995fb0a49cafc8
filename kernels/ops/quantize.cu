// Floats to blocks.
#include "../formats/encode.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256, BLOCKS = THREADS / 2;  // their bytes are a multiple of 16

// Rows of K floats, with strides in elements, to blocks. `first_bad`, if given, becomes the lowest row that holds
// NaN or infinity or has a scale that overflows float16 (it starts as the greatest u64).
extern "C" __global__ void __launch_bounds__(THREADS) quantize(
    const void* x, int dtype, s64 row_stride, s64 column_stride, s64 rows, s64 blocks_per_row, u8* out,
    u64* first_bad) {
    let_successor_start();
    wait_for_predecessor();
    __shared__ __align__(16) u8 staged[BLOCKS * Format::BLOCK_BYTES];
    const s64 first = s64(blockIdx.x) * BLOCKS;
    const int count = int(min(rows * blocks_per_row - first, s64(BLOCKS)));
    const int half = threadIdx.x % 2;
    const int mine = min(int(threadIdx.x) / 2, count - 1);  // threads beyond the last block repeat it

    // The thread's first element. Dense rows are one row: a 64-bit division is a function call.
    s64 at = first * 32 + (mine * 32 + half * 8);
    if (column_stride != 1 || row_stride != blocks_per_row * 32) {
        s64 row = (first + mine) / blocks_per_row;
        at = row * row_stride + ((first + mine - row * blocks_per_row) * 32 + half * 8) * column_stride;
    }
    float values[MINE];
    load_elements(x, at, row_stride, column_stride, dtype, values);
    int q[MINE];
    u32 words[4];
    const Scales scales = encode<Format>(values, half, q);
    pack_codes<Format>(q, words);
    const u32 scale = scale_bits<Format>(scales, words);

    // Through shared memory: a block's bytes are neither aligned nor whole sectors, those of many are.
    u8* const to = staged + mine * Format::BLOCK_BYTES;
    store_codes<Format>(to, half, words);
    if (half == 0) Format::store_scale_bits(to, scale);
    const bool overflow = (scale & 0x7c00) == 0x7c00 || (scale >> 16 & 0x7c00) == 0x7c00;
    if (overflow && first_bad) atomicMin(first_bad, u64((first + mine) / blocks_per_row));
    __syncthreads();
    u8* const blocks = out + first * Format::BLOCK_BYTES;
    const int bytes = count * Format::BLOCK_BYTES;
#pragma unroll
    for (int byte = threadIdx.x * 16; byte < BLOCKS * Format::BLOCK_BYTES; byte += THREADS * 16)
        if (byte + 16 <= bytes)
            *reinterpret_cast<uint4*>(blocks + byte) = *reinterpret_cast<const uint4*>(staged + byte);
        else
            for (int pair = byte; pair < bytes; pair += 2)
                *reinterpret_cast<u16*>(blocks + pair) = *reinterpret_cast<const u16*>(staged + pair);
}

// Blocks to floats: the formula in float32, then one rounding. A thread takes two runs of 16 bytes of the output,
// half a block apart: ggml's codes of 4 bits that share bytes.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

// What half of 32 weights of a block share.
template <class F>
DEVICE auto scale_of(const u8* block, int part, int half) {
    if constexpr (F::GROUP_BYTES > 0)
        return F::scale_at(block, part, half);
    else if constexpr (F::SCALING == E4M3)
        return F::scale_bits(block) >> 8 * (2 * part + half) & 0xff;
    else
        return F::scale_bits(block);
}

// N: elements in 16 bytes. `codebook` is in shared memory, a bank for each of its entries. `scale`: of the tensor
// (nvfp4).
template <int N>
DEVICE void dequantize_as(const u8* blocks, s64 count, void* out, int dtype, const float* codebook, float scale) {
    constexpr int THREADS = 16 / N;  // per block
    const s64 thread = s64(blockIdx.x) * blockDim.x + threadIdx.x, index = thread / THREADS;
    if (index >= count) return;
    const int first = int(thread % THREADS) * N;
    const u8* block = blocks + index / (Format::COLUMNS / 32) * Format::BLOCK_BYTES;
    const int part = index % (Format::COLUMNS / 32);
    const decltype(scale_of<Format>(block, part, 0)) scales[2] = {scale_of<Format>(block, part, 0),
                                                                  scale_of<Format>(block, part, 1)};
    u32 codes[2][N / 4];
#pragma unroll
    for (int w = 0; w < N / 4; w++) Format::load_codes(block, part * 32 + first + 4 * w, codes[0][w], codes[1][w]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            x[j] = Format::read(codes[half][j / 4], j % 4, scales[half], codebook);
            if constexpr (Format::SCALING == E4M3) x[j] = ieee_mul(x[j], scale);
        }
        u32 words[4];
#pragma unroll
        for (int w = 0; w < 4; w++)
            words[w] = N == 4 ? __float_as_int(x[w]) : pack(x[w * N / 4], x[w * N / 4 + 1], dtype);
        reinterpret_cast<uint4*>(out)[(index * 32 + half * 16 + first) / N] =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

extern "C" __global__ void __launch_bounds__(256)
dequantize(const u8* blocks, s64 count, void* out, int dtype, const float* codebook, float scale) {
    __shared__ float own[32];
    if constexpr (Format::CODING != INTEGERS) {
        if (threadIdx.x < 32) own[threadIdx.x] = codebook[threadIdx.x];
        __syncthreads();
    }
    if (dtype == FLOAT32)
        dequantize_as<4>(blocks, count, out, dtype, own, scale);
    else
        dequantize_as<8>(blocks, count, out, dtype, own, scale);
}

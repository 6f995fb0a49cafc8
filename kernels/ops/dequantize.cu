// Blocks to floats: the formula in float32, then one rounding. A thread takes two runs of 16 bytes of the output,
// half a block apart: codes of 4 bits that share bytes.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

// Codes of four elements from j < 16 on, and of the four 16 further, a byte each: unsigned, Format::ZERO meaning 0.
DEVICE void load_codes(const u8* block, int j, u32& low, u32& high) {
    low = load_u32(block + Format::CODES_AT + j);
    if constexpr (Format::BITS == 8) {
        low ^= 0x80808080;
        high = load_u32(block + Format::CODES_AT + j + 16) ^ 0x80808080;
    } else {
        high = low >> 4 & 0x0f0f0f0f;
        low &= 0x0f0f0f0f;
    }
    if constexpr (Format::HAS_FIFTH) {
        const u8* fifth = block + Format::FIFTH_AT + j / 8;
        // Bit j + k to bit 4 of byte k.
        auto spread = [&](u32 bits) { return ((bits >> j % 8 & 15) * 0x00204081 & 0x01010101) << 4; };
        low |= spread(fifth[0]);
        high |= spread(fifth[2]);
    }
}

// N: elements in 16 bytes.
template <int N>
DEVICE void dequantize_as(const u8* blocks, s64 count, void* out, int dtype) {
    constexpr int THREADS = 16 / N;  // per block
    const s64 thread = s64(blockIdx.x) * blockDim.x + threadIdx.x, index = thread / THREADS;
    if (index >= count) return;
    const int first = int(thread % THREADS) * N;
    const u8* block = blocks + index * Format::BLOCK_BYTES;
    const u32 scale = Format::scale_bits(block);
    const float d = half_to_float(u16(scale)), m = half_to_float(u16(scale >> 16));
    u32 codes[2][N / 4];
#pragma unroll
    for (int w = 0; w < N / 4; w++) load_codes(block, first + 4 * w, codes[0][w], codes[1][w]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            // A code in the last byte of 2^23's bits reads 2^23 + code.
            float q = __int_as_float(__byte_perm(codes[half][j / 4], 0x4b000000, 0x7440 + j % 4));
            x[j] = __fmul_rn(__fadd_rn(q, -(8388608.f + Format::ZERO)), d);
            if constexpr (Format::HAS_MIN) x[j] = __fadd_rn(x[j], m);
        }
        u32 words[4];
#pragma unroll
        for (int w = 0; w < 4; w++)
            words[w] = N == 4 ? __float_as_int(x[w]) : pack(x[w * N / 4], x[w * N / 4 + 1], dtype);
        reinterpret_cast<uint4*>(out)[(index * 32 + half * 16 + first) / N] =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

extern "C" __global__ void __launch_bounds__(256) dequantize(const u8* blocks, s64 count, void* out, int dtype) {
    if (dtype == FLOAT32)
        dequantize_as<4>(blocks, count, out, dtype);
    else
        dequantize_as<8>(blocks, count, out, dtype);
}

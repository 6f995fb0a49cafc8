// Float16 rows of x as the numbers that q8_1 blocks of them stand for: what `quantize_half` of ops/activations.cu makes, to
// the bit, but for the signs of zeros and NaN, which no product shows.
#pragma once
#include "ieee.cuh"
#include "ptx.cuh"

// Two float16 magnitudes as codes, rounded half up, of blocks with this 1 / scale: as float16 numbers. A number added
// to 2^23 + 25600 and rounded toward zero is an integer in the lowest bits, there 1024 and the code in float16. (The
// greatest float below a half leaves 0.49999997 at 0.)
DEVICE u32 codes_of(u32 pair, float inverse) {
    auto code = [&](float x) {
        float sum;
        asm("add.rz.f32 %0, %1, %2;" : "=f"(sum) : "f"(ieee_mul(x, inverse) + 0.49999997f), "f"(8414208.f));
        return u32(__float_as_int(sum));
    };
    return sub_half2(__byte_perm(code(low_to_float(pair)), code(high_to_float(pair)), 0x5410), 0x64006400);
}

// Eight numbers of a block of 32, of which four neighbouring lanes have as many each; by a whole warp.
DEVICE uint4 rounded(uint4 v) {
    u32 pairs[4] = {v.x, v.y, v.z, v.w}, peak = 0;  // the magnitudes' bits are in their order, NaN's above all
#pragma unroll
    for (int w = 0; w < 4; w++) peak = max(peak, max(pairs[w] & 0x7fff, pairs[w] >> 16 & 0x7fff));
    peak = max(peak, __shfl_xor_sync(~0u, peak, 1));
    peak = max(peak, __shfl_xor_sync(~0u, peak, 2));
    const float d = over_127(half_to_float(u16(peak))), inv = inverse(d);
    const u32 scale = float_to_half(d);
#pragma unroll
    for (int w = 0; w < 4; w++)
        pairs[w] = mul_half2(codes_of(pairs[w] & 0x7fff7fff, inv), scale * 0x00010001) | (pairs[w] & 0x80008000);
    // 127 times a scale of 516 is just beyond float16's range: the last number in it. (NaN stays NaN.)
    constexpr u32 CARRIES = 0x6008;
    if (scale >= CARRIES)
#pragma unroll
        for (int w = 0; w < 4; w++) pairs[w] -= ((pairs[w] & 0x7fff7fff) + 0x04000400) >> 15 & 0x00010001;
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Rows in shared memory, whole blocks of them, of so many pieces of 8 columns. Threads take the pieces that they have
// stored, counted through the rows: they need not meet before.
template <int THREADS>
DEVICE void round_rows(int batch, int pieces, u8* rows, int row_bytes) {
    int m = threadIdx.x / pieces, piece = threadIdx.x % pieces;
#pragma unroll 1
    for (int first = threadIdx.x / WARP * WARP; first < batch * pieces; first += THREADS) {
        uint4* const at = reinterpret_cast<uint4*>(rows + m * row_bytes + piece * 16);
        const uint4 made = rounded(m < batch ? *at : make_uint4(0, 0, 0, 0));
        if (m < batch) *at = made;
        m += THREADS / pieces, piece += THREADS % pieces;
        if (piece >= pieces) m++, piece -= pieces;
    }
}

// EXL3 matrices to floats: V, turned on both sides, times suh and svh in float32, then one rounding.
//
// A block of threads takes 128 x 128 weights, the side of H. They go through shared memory as float32 numbers, [n][k];
// the columns of a row change places in eights and sixteens, so that neither those who write operand A's order nor those who
// read along n or along k meet in a bank.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int BITS = Format::BITS, THREADS = 256, SIDE = HADAMARD, TILES = SIDE / 16;

DEVICE int place(int n, int k) { return n * SIDE + (k ^ (n % 8 * 8) ^ (n / 64 * 16)); }

// The numbers of a lane's steps in a ring.
DEVICE void numbers(const u32* ring, int lane, u32 (&pairs)[4]) {
    u32 w[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
        const u32 at = (BITS * (8 * lane + j + 1) + 256 * BITS - 16) % (256 * BITS);
        const u32 first = ring[at / 32], next = ring[(at / 32 + 1) % (8 * BITS)];
        w[j] = u32((u64(first) << 32 | next) >> (48 - at % 32)) & 0xffff;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = Numbers<Format::GENERATOR>::pair(w[2 * j], w[2 * j + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
dequantize(const u8* storage, s64 matrix_bytes, s64 blocks, int N, int K, void* out, int dtype) {
    float* const shared = reinterpret_cast<float*>(dynamic_shared());
    const int lane = threadIdx.x % WARP, blocks_n = N / SIDE, blocks_k = K / SIDE;
    for (s64 block = blockIdx.x; block < blocks; block += gridDim.x) {
        const s64 group = block / blocks_n, matrix = group / blocks_k;
        const int block_n = int(block - group * blocks_n), block_k = int(group - matrix * blocks_k);
        const u8* const from = storage + matrix * matrix_bytes;
        const u16* const suh = reinterpret_cast<const u16*>(from + s64(N) * K / 8 * BITS) + block_k * SIDE;
        const u16* const svh = suh - block_k * SIDE + K + block_n * SIDE;
        for (int t = threadIdx.x / WARP; t < TILES * TILES; t += THREADS / WARP) {
            const s64 ring = s64(block_k * TILES + t / TILES) * (N / 16) + block_n * TILES + t % TILES;
            u32 pairs[4];
            numbers(reinterpret_cast<const u32*>(from + ring * (32 * BITS)), lane, pairs);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int n = t % TILES * 16 + lane / 4 + j / 2 * 8, k = t / TILES * 16 + lane % 4 * 2 + j % 2 * 8;
                *reinterpret_cast<float2*>(shared + place(n, k)) = make_float2(low_to_float(pairs[j]), high_to_float(pairs[j]));
            }
        }
        __syncthreads();
        {  // along n: two threads a column, one has the first half of the rows
            const int k = threadIdx.x / 2, half = threadIdx.x % 2 * 64;
            float v[64];
#pragma unroll
            for (int n = 0; n < 64; n++) v[n] = shared[place(half + n, k)];
            turn_own(v);
            const float sign = half ? -1 : 1;
#pragma unroll
            for (int n = 0; n < 64; n++)
                shared[place(half + n, k)] = __fmaf_rn(v[n], sign, __shfl_xor_sync(~0u, v[n], 1));
        }
        __syncthreads();
        const int k = threadIdx.x % 16 * 8;  // along k: sixteen threads a row
        float factor[8];
        load_halves(suh + k, factor);
#pragma unroll 1
        for (int n = threadIdx.x / 16; n < SIDE; n += THREADS / 16) {
            float v[8];
            load_floats(shared + place(n, k), v);
            turn(v);
            const float scale = half_to_float(svh[n]) / HADAMARD;  // exact, as is its product with suh
            const s64 at = (matrix * N + block_n * SIDE + n) * K + block_k * SIDE + k;
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] *= factor[j] * scale;
            if (dtype == FLOAT32) {
                float4* const to = reinterpret_cast<float4*>(static_cast<float*>(out) + at);
                to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
            } else {
                *reinterpret_cast<uint4*>(static_cast<u16*>(out) + at) =
                    make_uint4(pack(v[0], v[1], dtype), pack(v[2], v[3], dtype), pack(v[4], v[5], dtype), pack(v[6], v[7], dtype));
            }
        }
        __syncthreads();
    }
}

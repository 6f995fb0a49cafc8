// Trellis matrices to floats: the formula in float32, then one rounding.
//
// A warp takes 32 rows x 64 columns: of two row tiles four storage tiles each, in which rows are next to each other. Lanes
// exchange indices, so that each has eight neighbouring columns of some rows (TrellisTile::to_rows). Levels are looked up in
// the registers of the warp's lanes, of which the upper half has their negatives, for columns of sign -1. A row's sign is its
// scales'. Blocks are in the order of columns, then of rows, as memory takes it best if rows are written as wholes.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT
#include "../formats/trellis_tile.cuh"

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256, WARPS = THREADS / WARP, COLUMNS = 64 * WARPS;  // of a block
constexpr int TILES = 2, ROWS = 16 * TILES;                                // of a warp
using Turn = TrellisTile<Format>;

struct Grid {
    float level[16];
};

// Which half of the levels eight columns have: 16 for a column of sign -1, else 0.
DEVICE void load_signs(const u8* su, int k, int K, u32 (&to)[8]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        // It starts on four bytes, and whole fours of it are in the record.
        const u32 four = *reinterpret_cast<const u32*>(su + min(k + 4 * half, (K - 1) / 4 * 4)) >> 3 & 0x10101010;
#pragma unroll
        for (int e = 0; e < 4; e++) to[4 * half + e] = __byte_perm(four, 0, 0x4440 + e);
    }
}

// Stores the first `count` of eight numbers, from number `at` on; all of them, which start on 16 bytes, if the part is WHOLE.
template <bool WHOLE>
DEVICE void store_eight(void* out, u64 at, int count, int dtype, const float (&x)[8]) {
    if (dtype == FLOAT32) {
        float* const to = static_cast<float*>(out) + at;
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (WHOLE && e % 4 == 0) *reinterpret_cast<float4*>(to + e) = make_float4(x[e], x[e + 1], x[e + 2], x[e + 3]);
            if (!WHOLE && e < count) to[e] = x[e];
        }
        return;
    }
    u32 pairs[4];
#pragma unroll
    for (int w = 0; w < 4; w++) pairs[w] = pack(x[w * 2], x[w * 2 + 1], dtype);
    u16* const to = static_cast<u16*>(out) + at;
    if (WHOLE) *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#pragma unroll
    for (int e = 0; e < 8; e++)
        if (!WHOLE && e < count) to[e] = u16(pairs[e / 2] >> e % 2 * 16);
}

// 64 columns of COUNT row tiles, from `first_n` and `first_k` on; all of them are in the matrix, and rows start on 16 bytes in
// `out`, if the part is WHOLE. `level`: the lane's own; `at`: the matrix's first number in `out`.
template <int COUNT, bool WHOLE>
DEVICE void dequantize_part(const u8* matrix, const Record<Format>& record, int first_n, int first_k, float level, void* out,
                            u64 at, int dtype) {
    const int lane = threadIdx.x % WARP, own_k = first_k + 2 * lane, rows = record.N - first_n;
    const u8* const tiles = matrix + record.tile_at(own_k / 16, first_n / 16) + own_k % 16 * Format::ROW_BYTES;
    u32 words[COUNT][Turn::WORDS] = {};
#pragma unroll
    for (int t = 0; t < COUNT; t++)
        if (WHOLE || (own_k / 16 < record.tiles_k() && rows > 16 * t)) Turn::load(tiles + t * Format::TILE_BYTES, words[t]);
    // From here on a lane has eight columns of every fourth row.
    const int k = first_k + lane / 4 * 8, own_n = lane % 4;
    const float* const scales = reinterpret_cast<const float*>(matrix + record.scales_at()) +
                                s64(min(k, record.K - 1) / Format::GROUP) * record.N + first_n + own_n;
    u32 columns[8];
    load_signs(matrix + record.su_at(), k, record.K, columns);
    const u8* const signs = matrix + record.sv_at() + first_n;
    const u32 negative = __ballot_sync(~0u, (WHOLE || lane < rows) && signs[lane] != 1) >> own_n;
    at += u64(first_n + own_n) * record.K + k;
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        float scale[4];
#pragma unroll
        for (int row = 0; row < 4; row++)
            scale[row] = WHOLE || own_n + 4 * row + 16 * t < rows ? scales[4 * row + 16 * t] : 0;
        u32 indices[Turn::SPREAD];
        Turn::to_rows(words[t], indices, lane);
#pragma unroll
        for (int row = 0; row < 4; row++, at += 4 * u64(record.K)) {
            const int r = 4 * t + row;
            const float own = __int_as_float(__float_as_int(scale[row]) ^ (negative << (31 - 4 * r) & 1u << 31));
            float x[8];
#pragma unroll
            for (int e = 0; e < 8; e++)
                x[e] = ieee_mul(entry_of(level, Turn::index_of(indices, row, e) | columns[e], 0), own);
            if (WHOLE || (own_n + 4 * r < rows && k < record.K)) store_eight<WHOLE>(out, at, record.K - k, dtype, x);
        }
    }
}

// On sm_120 indices of 3 bits take a few registers more.
constexpr int RESIDENT = Format::BITS == 3 && __CUDA_ARCH__ >= 1200 ? 3 : 4;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
dequantize(const u8* storage, s64 matrices, int N, int K, void* out, int dtype, const __grid_constant__ Grid grid) {
    const Record<Format> record = {N, K};
    const int lane = threadIdx.x % WARP, first_k = blockIdx.x * COLUMNS + threadIdx.x / WARP * 64;
    if (first_k >= K) return;
    const float level = lane < 16 ? grid.level[lane % 16] : -grid.level[lane % 16];
    const u32 bands = (N + ROWS - 1) / ROWS, band = blockIdx.z * gridDim.y + blockIdx.y, matrix = band / bands;
    if (matrix >= matrices) return;
    const int first_n = int(band - matrix * bands) * ROWS;
    const u8* const from = storage + s64(matrix) * record.bytes();
    const u64 first = u64(matrix) * N * K;
    if (K % 8 > 0 || first_k + 64 > K || first_n + ROWS > N) {
#pragma unroll 1
        for (int n = first_n; n < min(first_n + ROWS, N); n += 16)
            dequantize_part<1, false>(from, record, n, first_k, level, out, first, dtype);
    } else if (dtype == FLOAT16) {
        dequantize_part<TILES, true>(from, record, first_n, first_k, level, out, first, FLOAT16);
    } else if (dtype == BFLOAT16) {
        dequantize_part<TILES, true>(from, record, first_n, first_k, level, out, first, BFLOAT16);
    } else {
        dequantize_part<TILES, true>(from, record, first_n, first_k, level, out, first, FLOAT32);
    }
}

// Trellis matrices to floats: the formula in float32, then one rounding.
//
// A block of threads takes 16 rows x 1024 columns, 64 tiles. Their indices are transposed in shared memory, from tiles, in
// which rows are next to each other, to rows: a byte each, which is the place of a level in a table of them, in the
// second half of which they are negative, for columns of that sign. A row's sign is its scales'.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256, COLUMNS = 4 * THREADS, PITCH = COLUMNS + 16;

struct Grid {
    float level[16];
};

// Bytes i of four words, as word i.
DEVICE void transpose(u32 (&w)[4]) {
    const u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    const u32 c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

// The indices of a row of a tile, a byte each, in four words: byte b of word w is that of `row_of(w, b)`.
DEVICE uint4 load_indices(const u8* from) {
    if constexpr (Format::BITS == 2) {
        const u32 v = *reinterpret_cast<const u32*>(from);
        return make_uint4(v & 0x03030303, v >> 2 & 0x03030303, v >> 4 & 0x03030303, v >> 6 & 0x03030303);
    } else if constexpr (Format::BITS == 4) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        return make_uint4(v.x & 0x0f0f0f0f, v.x >> 4 & 0x0f0f0f0f, v.y & 0x0f0f0f0f, v.y >> 4 & 0x0f0f0f0f);
    } else {
        return load_row<Format>(from);
    }
}

DEVICE int row_of(int w, int b) {
    return Format::BITS == 2 ? w + 4 * b : Format::BITS == 4 ? w / 2 * 8 + w % 2 + 2 * b : 4 * w + b;
}

// This thread's four columns, from k on, of the row tile: places of levels to [n][k].
DEVICE void transpose_columns(const u8* matrix, const Record<Format>& record, int tile_n, int k, u8* to) {
    const u8* const from = matrix + record.tile_at(k / 16, tile_n) + k % 16 * Format::ROW_BYTES;
    uint4 columns[4];
#pragma unroll
    for (int e = 0; e < 4; e++) columns[e] = load_indices(from + e * Format::ROW_BYTES);
    // su starts on four bytes, and whole fours of it are in the record.
    const u32 su = *reinterpret_cast<const u32*>(matrix + record.su_at() + min(k, (record.K - 1) / 4 * 4));
    const u32 negative = su >> 1 & 0x40404040;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        auto word = [&](const uint4& v) { return w == 0 ? v.x : w == 1 ? v.y : w == 2 ? v.z : v.w; };
        u32 words[4] = {word(columns[0]), word(columns[1]), word(columns[2]), word(columns[3])};
        transpose(words);
#pragma unroll
        for (int b = 0; b < 4; b++) *reinterpret_cast<u32*>(to + row_of(w, b) * PITCH) = words[b] * 4 + negative;
    }
}

// A thread has the same columns of some of the rows. COUNT numbers are 16 bytes.
template <int COUNT>
DEVICE void write(const u8* matrix, const Record<Format>& record, int first_n, int first_k, const u8* indices,
                  const float* levels, void* out, s64 first, int dtype) {
    constexpr int ACROSS = COLUMNS / COUNT;
    const int column = threadIdx.x % ACROSS * COUNT, k = first_k + column, rows = min(record.N - first_n, 16);
    if (k >= record.K) return;
    const bool whole = record.K % COUNT == 0;  // rows start on 16 bytes
    const float* const scales =
        reinterpret_cast<const float*>(matrix + record.scales_at()) + s64(k / Format::GROUP) * record.N + first_n;
    const u8* const signs = matrix + record.sv_at() + first_n;
    int row = int(threadIdx.x) / ACROSS;
    s64 at = first + s64(first_n + row) * record.K + k;
    for (; row < rows; row += THREADS / ACROSS, at += s64(THREADS / ACROSS) * record.K) {
        const float scale = __int_as_float(__float_as_int(scales[row]) ^ u32(signs[row] != 1) << 31);
        float x[COUNT];
#pragma unroll
        for (int w = 0; w < COUNT / 4; w++) {
            const u32 word = reinterpret_cast<const u32*>(indices + row * PITCH + column)[w];
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const u32 place = __byte_perm(word, 0, 0x4440 + e);
                const float level = *reinterpret_cast<const float*>(reinterpret_cast<const u8*>(levels) + place);
                x[w * 4 + e] = ieee_mul(level, scale);
            }
        }
        if (whole) {
            u32 bits[4];
#pragma unroll
            for (int w = 0; w < 4; w++)
                bits[w] = COUNT == 4 ? __float_as_int(x[w]) : pack(x[w * COUNT / 4], x[w * COUNT / 4 + 1], dtype);
            static_cast<uint4*>(out)[at / COUNT] = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        } else {
#pragma unroll
            for (int e = 0; e < COUNT; e++)
                if (k + e < record.K) store_float(out, at + e, dtype, x[e]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 6)
dequantize(const u8* storage, s64 matrices, int N, int K, void* out, int dtype, const __grid_constant__ Grid grid) {
    __shared__ __align__(16) u8 indices[16 * PITCH];
    __shared__ float levels[32];
    const Record<Format> record = {N, K};
    const u32 runs = (K + COLUMNS - 1) / COLUMNS, bands = record.tiles_n();
    if (threadIdx.x < 32) {
        const float level = grid.level[threadIdx.x % 16];
        levels[threadIdx.x] = threadIdx.x < 16 ? level : -level;
    }
    for (s64 index = blockIdx.x; index < matrices * bands * runs; index += gridDim.x) {
        const s64 band = index / runs, matrix = band / bands;
        const int tile_n = int(band % bands), first_k = int(index % runs) * COLUMNS, k = first_k + threadIdx.x * 4;
        const u8* const from = storage + matrix * record.bytes();
        if (k < (record.K + 7) / 8 * 8) transpose_columns(from, record, tile_n, k, indices + threadIdx.x * 4);
        __syncthreads();
        const s64 first = matrix * N * K;
        if (dtype == FLOAT32)
            write<4>(from, record, tile_n * 16, first_k, indices, levels, out, first, dtype);
        else
            write<8>(from, record, tile_n * 16, first_k, indices, levels, out, first, dtype);
        __syncthreads();  // all have read the indices
    }
}

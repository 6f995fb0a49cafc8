// Storage layout <-> fragment layout (the picture is in core/tile.cuh).
//
// A block of threads takes 16 rows x RUN tiles. In storage a row of blocks starts at any even address, so its bytes
// pass through shared memory, which keeps their places in 16-byte words: whole words are moved as such, what the
// row has of its first and last word in pairs of bytes.
//
//     row r in shared memory    |..bbbbbb|bbbbbbbb|bbbbbbbb|bbb.....|    b: its blocks, from `begin` to `end`
//
// Rows and columns beyond the matrix have code 0 and scale 0.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256, ROWS = 16, ROW_THREADS = THREADS / ROWS;
constexpr int RUN = 16;                                            // tiles along K
constexpr int TILE_ROW = 2 * Format::BLOCK_BYTES;                  // bytes of storage
constexpr int PITCH = ((RUN * TILE_ROW + 14) / 16 + 1) * 16;
static_assert(PITCH / 16 % 2 == 1, "eight rows should fall into different banks");

struct Run {
    s64 first_tile, first_row;  // over all matrices
    int rows, tiles;            // that the matrix has of it
    int bytes;                  // of each row
    s64 row_bytes, column;      // of the matrix in storage; where in its rows the run starts
};

DEVICE Run run_of(u32 index, int N, int blocks) {
    u32 tiles_k = (u32(blocks) + 1) / 2, runs = (tiles_k + RUN - 1) / RUN, bands = (u32(N) + ROWS - 1) / ROWS;
    u32 band = index / runs, first = index % runs * RUN, row = band % bands * ROWS;
    Run run;
    run.first_tile = s64(band) * tiles_k + first;
    run.first_row = s64(band / bands) * N + row;
    run.rows = min(N - int(row), ROWS);
    run.tiles = min(int(tiles_k - first), RUN);
    run.bytes = min(blocks - int(first) * 2, RUN * 2) * Format::BLOCK_BYTES;
    run.row_bytes = s64(blocks) * Format::BLOCK_BYTES;
    run.column = s64(first) * TILE_ROW;
    return run;
}

// Row r of a run: bytes begin .. end of the 16-byte words from storage + at. Rows that are not there have no bytes.
struct Row {
    s64 at;
    int begin, end;
};

DEVICE Row row_of(const u8* storage, const Run& run, int r) {
    s64 at = (run.first_row + r) * run.row_bytes + run.column;
    int begin = int(reinterpret_cast<u64>(storage + at) % 16);
    return {at - begin, begin, begin + (r < run.rows ? run.bytes : 0)};
}

// The pair of bytes of the row's first (threads 0 to 7) or last word that is thread k's.
DEVICE int edge_of(const Row& row, int k) { return k < 8 ? k * 2 : row.end / 16 * 16 + (k - 8) * 2; }

// Bytes 2i, 2i+8, 2i+1, 2i+9 of 16 bytes, given the first: a lane's share of them, in the order of tile.cuh.
DEVICE u32 gather(const u8* p) { return __byte_perm(load_u16(p), load_u16(p + 8), 0x5140); }

DEVICE void scatter(u8* p, u32 bytes) {
    *reinterpret_cast<u16*>(p) = u16(__byte_perm(bytes, 0, 0x4420));
    *reinterpret_cast<u16*>(p + 8) = u16(__byte_perm(bytes, 0, 0x4431));
}

// Whether a weight of a block with this scale can be beyond float16, or not a number.
DEVICE bool overflows(u32 scale) {
    constexpr float peak = Format::HAS_MIN ? (1 << Format::BITS) - 1 : Format::OFFSET ? Format::OFFSET : 128;
    float m = Format::HAS_MIN ? fabsf(half_to_float(u16(scale >> 16))) : 0;
    return !(fabsf(half_to_float(u16(scale))) * peak + m <= 65504);
}

// `overflow` becomes 1 if any weight may be beyond float16.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
to_fragments(const u8* storage, s64 tiles, int N, int blocks, u8* low, u8* fifth, u8* scale, u32* overflow) {
    __shared__ __align__(16) u8 shared[ROWS * PITCH];
    const int lane = threadIdx.x % WARP, g = lane / 4, i = lane % 4;
    for (u32 index = blockIdx.x;; index += gridDim.x) {
        const Run run = run_of(index, N, blocks);
        if (run.first_tile >= tiles) return;
        {
            const int r = threadIdx.x / ROW_THREADS, k = threadIdx.x % ROW_THREADS;
            const Row row = row_of(storage, run, r);
            const u8* from = storage + row.at;
            u8* const image = shared + r * PITCH;
            const int edge = edge_of(row, k), last = row.end / 16;
            u16 pair = 0;
            if (edge >= row.begin && edge < row.end) pair = *reinterpret_cast<const u16*>(from + edge);
#pragma unroll
            for (int word = k; word < PITCH / 16; word += ROW_THREADS)
                if (word > last)
                    reinterpret_cast<uint4*>(image)[word] = make_uint4(0, 0, 0, 0);
                else if (word < last && word * 16 >= row.begin)
                    copy_async(image + word * 16, from + word * 16, true);
            copy_commit();
            // Where first and last word are one, or the first is whole, others have written it.
            if (k < 8 ? row.begin > 0 || last == 0 : last > 0) *reinterpret_cast<u16*>(image + edge) = pair;
        }
        const u8* const rows[2] = {shared + g * PITCH + row_of(storage, run, g).begin,
                                   shared + (g + 8) * PITCH + row_of(storage, run, g + 8).begin};
        copy_wait<0>();
        __syncthreads();
        for (int t = threadIdx.x / WARP; t < run.tiles; t += THREADS / WARP) {
            const s64 tile = run.first_tile + t;
            // Lane 4 g + 2 j + b has the scale and fifth bits of row g + 8 j, block b: the order of the scale plane.
            const u8* own = (i < 2 ? rows[0] : rows[1]) + t * TILE_ROW + i % 2 * Format::BLOCK_BYTES;
            const u32 own_scale = Format::scale_bits(own);
            u32 own_fifth = 0;
            if constexpr (Format::HAS_FIFTH)
                own_fifth = load_u32(own + Format::FIFTH_AT);

            constexpr int WORDS = Format::LOW_BYTES / 128;
            u32 words[WORDS] = {}, fifths = 0;
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int j = part / 2, b = part % 2;
                const u8* codes = rows[j] + t * TILE_ROW + b * Format::BLOCK_BYTES + Format::CODES_AT + 2 * i;
                if constexpr (Format::BITS == 8) {
                    words[b * 4 + j] = gather(codes);
                    words[b * 4 + 2 + j] = gather(codes + 16);
                } else {
                    u32 bytes = gather(codes);
                    words[2 * b] |= (bytes & 0x0f0f0f0f) << 4 * j;
                    words[2 * b + 1] |= (bytes >> 4 & 0x0f0f0f0f) << 4 * j;
                }
                if constexpr (Format::HAS_FIFTH) {
                    u32 bits = __shfl_sync(~0u, own_fifth, g * 4 + part) >> 2 * i;  // bits 0, 1, 8, 9 of each half
                    fifths |= (__byte_perm(bits, bits >> 1, 0x5410) & 0x01010101) << (4 * b + j);
                    fifths |= (__byte_perm(bits, bits >> 1, 0x7632) & 0x01010101) << (4 * b + 2 + j);
                }
            }
#pragma unroll
            for (int part = 0; part < WORDS / 4; part++)
                reinterpret_cast<uint4*>(low + tile * Format::LOW_BYTES + part * 512)[lane] =
                    make_uint4(words[part * 4], words[part * 4 + 1], words[part * 4 + 2], words[part * 4 + 3]);
            if constexpr (Format::HAS_FIFTH) reinterpret_cast<u32*>(fifth + tile * Format::FIFTH_BYTES)[lane] = fifths;
            if constexpr (Format::HAS_MIN)
                reinterpret_cast<u32*>(scale + tile * Format::SCALE_BYTES)[lane] = own_scale;
            else
                reinterpret_cast<u16*>(scale + tile * Format::SCALE_BYTES)[lane] = u16(own_scale);
            if (overflows(own_scale)) *overflow = 1;
        }
        __syncthreads();  // all have read this run
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
from_fragments(u8* storage, s64 tiles, int N, int blocks, const u8* low, const u8* fifth, const u8* scale) {
    __shared__ __align__(16) u8 shared[ROWS * PITCH];
    const int lane = threadIdx.x % WARP, g = lane / 4, i = lane % 4;
    for (u32 index = blockIdx.x;; index += gridDim.x) {
        const Run run = run_of(index, N, blocks);
        if (run.first_tile >= tiles) return;
        u8* const rows[2] = {shared + g * PITCH + row_of(storage, run, g).begin,
                             shared + (g + 8) * PITCH + row_of(storage, run, g + 8).begin};
        for (int t = threadIdx.x / WARP; t < run.tiles; t += THREADS / WARP) {
            const s64 tile = run.first_tile + t;
            constexpr int WORDS = Format::LOW_BYTES / 128;
            u32 words[WORDS], fifths = 0, own_fifth = 0;
#pragma unroll
            for (int part = 0; part < WORDS / 4; part++) {
                uint4 v = reinterpret_cast<const uint4*>(low + tile * Format::LOW_BYTES + part * 512)[lane];
                words[part * 4] = v.x, words[part * 4 + 1] = v.y, words[part * 4 + 2] = v.z, words[part * 4 + 3] = v.w;
            }
            if constexpr (Format::HAS_FIFTH)
                fifths = reinterpret_cast<const u32*>(fifth + tile * Format::FIFTH_BYTES)[lane];
            const u8* scales = scale + tile * Format::SCALE_BYTES;
            const u32 own_scale = Format::HAS_MIN ? reinterpret_cast<const u32*>(scales)[lane]
                                                  : reinterpret_cast<const u16*>(scales)[lane];
#pragma unroll
            for (int part = 0; part < 4; part++) {
                const int j = part / 2, b = part % 2;
                u8* codes = rows[j] + t * TILE_ROW + b * Format::BLOCK_BYTES + Format::CODES_AT + 2 * i;
                if constexpr (Format::BITS == 8) {
                    scatter(codes, words[b * 4 + j]);
                    scatter(codes + 16, words[b * 4 + 2 + j]);
                } else {
                    u32 even = words[2 * b] >> 4 * j & 0x0f0f0f0f, odd = words[2 * b + 1] >> 4 * j & 0x0f0f0f0f;
                    scatter(codes, even | odd << 4);
                }
                if constexpr (Format::HAS_FIFTH) {
                    u32 even = fifths >> (4 * b + j) & 0x01010101, odd = fifths >> (4 * b + 2 + j) & 0x01010101;
                    u32 bits = (((even | even >> 15) & 0x0303) | ((odd | odd >> 15) & 0x0303) << 16) << 2 * i;
                    bits |= __shfl_xor_sync(~0u, bits, 1);
                    bits |= __shfl_xor_sync(~0u, bits, 2);
                    if (i == part) own_fifth = bits;
                }
            }
            u8* own = (i < 2 ? rows[0] : rows[1]) + t * TILE_ROW + i % 2 * Format::BLOCK_BYTES;
            Format::store_scale_bits(own, own_scale);
            if constexpr (Format::HAS_FIFTH) store_u32(own + Format::FIFTH_AT, own_fifth);
        }
        __syncthreads();
        const int r = threadIdx.x / ROW_THREADS, k = threadIdx.x % ROW_THREADS;
        const Row row = row_of(storage, run, r);
        u8* const to = storage + row.at;
        const u8* const image = shared + r * PITCH;
        const int edge = edge_of(row, k), last = row.end / 16;
        if (edge >= row.begin && edge < row.end)
            *reinterpret_cast<u16*>(to + edge) = *reinterpret_cast<const u16*>(image + edge);
#pragma unroll
        for (int word = k; word < PITCH / 16; word += ROW_THREADS)
            if (word < last && word * 16 >= row.begin)
                reinterpret_cast<uint4*>(to)[word] = reinterpret_cast<const uint4*>(image)[word];
        __syncthreads();  // all have read this run
    }
}

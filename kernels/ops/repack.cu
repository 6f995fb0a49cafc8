// Storage layout <-> fragment layout (the picture is in core/tile.cuh). A warp per tile of 16 rows x 64 columns.
// Rows and columns beyond the matrix have code 0 and scale 0.
#include "../core/problem.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

struct Place {
    s64 tile;         // over all matrices
    s64 first_block;  // of this tile's matrix, in storage
    int row, block;   // first row, and first block along K, in the matrix
};

DEVICE Place place_of(s64 tile, int N, int blocks) {
    int tiles_k = (blocks + 1) / 2, tiles_n = (N + 15) / 16;
    s64 matrix = tile / (s64(tiles_k) * tiles_n), within = tile % (s64(tiles_k) * tiles_n);
    return {tile, matrix * N * blocks, int(within / tiles_k) * 16, int(within % tiles_k) * 2};
}

// Code of (row, column) of a tile.
DEVICE u32 stored_code(const u8* storage, const Place& at, int row, int column, int N, int blocks) {
    int n = at.row + row, block = at.block + column / 32;
    if (n >= N || block >= blocks) return 0;
    return Format::code(storage + (at.first_block + s64(n) * blocks + block) * Format::BLOCK_BYTES, column % 32);
}

extern "C" __global__ void __launch_bounds__(256)
to_fragments(const u8* storage, s64 tiles, int N, int blocks, u8* low, u8* fifth, u8* scale) {
    const s64 tile = (s64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    if (tile >= tiles) return;
    const int lane = threadIdx.x % WARP, g = lane / 4, i = lane % 4;
    const Place at = place_of(tile, N, blocks);

    constexpr int WORDS = Format::LOW_BYTES / 128;
    u32 words[WORDS] = {}, fifths = 0;
#pragma unroll
    for (int h = 0; h < 4; h++)
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                u32 q = stored_code(storage, at, g + r % 2 * 8, h * 16 + 2 * i + e + r / 2 * 8, N, blocks);
                if constexpr (Format::BITS == 8) {
                    words[h / 2 * 4 + h % 2 * 2 + r % 2] |= q << (e * 2 + r / 2) * 8;
                } else {
                    words[h] |= (q & 15) << (r + e * 4) * 4;
                    fifths |= (q >> 4) << (2 * h + r % 2 + r / 2 * 8 + e * 16);
                }
            }
#pragma unroll
    for (int part = 0; part < WORDS / 4; part++)
        reinterpret_cast<uint4*>(low + tile * Format::LOW_BYTES + part * 512)[lane] =
            make_uint4(words[part * 4], words[part * 4 + 1], words[part * 4 + 2], words[part * 4 + 3]);
    if constexpr (Format::HAS_FIFTH) reinterpret_cast<u32*>(fifth + tile * Format::FIFTH_BYTES)[lane] = fifths;

    // Lane l has the scale of row l / 4 (+ 8 for odd pairs) and block l % 2: the order of the scale plane.
    int n = at.row + lane / 4 + lane / 2 % 2 * 8, block = at.block + lane % 2;
    u32 bits = 0;
    if (n < N && block < blocks)
        bits = Format::scale_bits(storage + (at.first_block + s64(n) * blocks + block) * Format::BLOCK_BYTES);
    u8* to = scale + tile * Format::SCALE_BYTES;
    if constexpr (Format::HAS_MIN)
        reinterpret_cast<u32*>(to)[lane] = bits;
    else
        reinterpret_cast<u16*>(to)[lane] = u16(bits);
}

extern "C" __global__ void __launch_bounds__(256)
from_fragments(u8* storage, s64 tiles, int N, int blocks, const u8* low, const u8* fifth, const u8* scale) {
    const s64 tile = (s64(blockIdx.x) * blockDim.x + threadIdx.x) / WARP;
    if (tile >= tiles) return;
    const int lane = threadIdx.x % WARP;
    const Place at = place_of(tile, N, blocks);
    for (int row = 0; row < 16; row++)
        for (int half = 0; half < 2; half++) {
            if (at.row + row >= N || at.block + half >= blocks) continue;
            // Element `lane` of this block, in the tile: its step h, register r, element e, and owner.
            int column = half * 32 + lane, h = column / 16, r = row / 8 + column % 16 / 8 * 2, e = column % 2;
            int owner = row % 8 * 4 + column % 8 / 2;
            u32 q;
            if constexpr (Format::BITS == 8) {
                int at_byte = (h / 2 * 512) + owner * 16 + (h % 2 * 2 + r % 2) * 4 + e * 2 + r / 2;
                q = low[tile * Format::LOW_BYTES + at_byte];
            } else {
                u32 word = reinterpret_cast<const u32*>(low + tile * Format::LOW_BYTES)[owner * 4 + h];
                q = word >> (r + e * 4) * 4 & 15;
                if constexpr (Format::HAS_FIFTH) {
                    u32 bits = reinterpret_cast<const u32*>(fifth + tile * Format::FIFTH_BYTES)[owner];
                    q |= (bits >> (2 * h + r % 2 + r / 2 * 8 + e * 16) & 1) << 4;
                }
            }
            u8* to = storage + (at.first_block + s64(at.row + row) * blocks + at.block + half) * Format::BLOCK_BYTES;
            Format::store_codes(to, lane, q);
            if (lane == 0) {
                int index = row % 8 * 4 + row / 8 * 2 + half;
                const u8* from = scale + tile * Format::SCALE_BYTES;
                u32 bits = Format::HAS_MIN ? reinterpret_cast<const u32*>(from)[index]
                                           : reinterpret_cast<const u16*>(from)[index];
                Format::store_scale_bits(to, bits);
            }
        }
}

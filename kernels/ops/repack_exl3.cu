// EXL3 matrices: storage layout <-> fragment layout (core/procedure.cuh). No bit is lost either way.
//
// A warp takes a tile of 16 x 64 weights, four rings of storage. Of each a lane has BITS bytes in a row; a ring's bytes, the
// highest of a word first, are those of memory with their last two address bits turned around.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int BITS = Format::BITS, RING = 32 * BITS, WARPS = 8;
constexpr int LOW_WORDS = Format::LOW_BYTES / 128;

// Where word w of a lane's is in its tile, in words: those of the low plane four at a time, or one.
DEVICE int low_word(int w, int lane) {
    return Format::LOW_BYTES <= 256 ? w * 32 + lane : (w / 4 * 32 + lane) * 4 + w % 4;
}

// Calls each(byte of a warp's four rings, a lane's word that has it, from which bit on).
template <class Each>
DEVICE void for_bytes(int lane, const Each& each) {
#pragma unroll
    for (int h = 0; h < 4; h++)
#pragma unroll
        for (int c = 0; c < BITS; c++) {
            const int byte = h * BITS + c;
            each(h * RING + (lane * BITS + c ^ 3), byte / 4, 24 - byte % 4 * 8);
        }
}

template <bool TO_FRAGMENTS>
DEVICE void repack(u8* storage, s64 matrix_bytes, s64 row_tiles, int tiles_n, int tiles, u32* low, u32* high) {
    __shared__ __align__(16) u8 rings[WARPS][4 * RING];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u8* const own = rings[warp];
    // Neighbours in storage are tiles of other rows.
    for (s64 i = s64(blockIdx.x) * WARPS + warp; i < row_tiles * tiles; i += s64(gridDim.x) * WARPS) {
        const s64 group = i / tiles_n, matrix = group / tiles;
        const int row_tile = int(i - group * tiles_n), tile = int(group - matrix * tiles);
        auto stored = [&](int h) {
            return reinterpret_cast<u32*>(storage + matrix * matrix_bytes + (s64(tile * 4 + h) * tiles_n + row_tile) * RING);
        };
        const s64 at = (matrix * tiles_n + row_tile) * tiles + tile;
        u32* const low_at = low + at * (Format::LOW_BYTES / 4);
        u32* const high_at = high + at * (Format::HIGH_BYTES / 4);
        u32 words[BITS] = {};
        __syncwarp();  // the tile before has been read
        if constexpr (TO_FRAGMENTS) {
#pragma unroll
            for (int h = 0; h < 4; h++)
                for (int w = lane; w < RING / 4; w += WARP) reinterpret_cast<u32*>(own + h * RING)[w] = stored(h)[w];
            __syncwarp();
            for_bytes(lane, [&](int byte, int w, int shift) { words[w] |= u32(own[byte]) << shift; });
#pragma unroll
            for (int w = 0; w < BITS; w++)
                (w < LOW_WORDS ? low_at[low_word(w, lane)] : high_at[(w - LOW_WORDS) * 32 + lane]) = words[w];
        } else {
#pragma unroll
            for (int w = 0; w < BITS; w++)
                words[w] = w < LOW_WORDS ? low_at[low_word(w, lane)] : high_at[(w - LOW_WORDS) * 32 + lane];
            for_bytes(lane, [&](int byte, int w, int shift) { own[byte] = u8(words[w] >> shift); });
            __syncwarp();
#pragma unroll
            for (int h = 0; h < 4; h++)
                for (int w = lane; w < RING / 4; w += WARP) stored(h)[w] = reinterpret_cast<u32*>(own + h * RING)[w];
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
to_fragments(u8* storage, s64 matrix_bytes, s64 row_tiles, int tiles_n, int tiles, u32* low, u32* high) {
    repack<true>(storage, matrix_bytes, row_tiles, tiles_n, tiles, low, high);
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP)
from_fragments(u8* storage, s64 matrix_bytes, s64 row_tiles, int tiles_n, int tiles, u32* low, u32* high) {
    repack<false>(storage, matrix_bytes, row_tiles, tiles_n, tiles, low, high);
}

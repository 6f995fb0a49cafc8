// Trellis matrices: W[n, k] = grid[q] * scale * su[k] * sv[n], with indices q of 2 to 4 bits.
//
// Storage of a matrix is one record, which starts on 16 bytes: tiles of 16 x 16 indices, [K / 16][N / 16], each of
// them row-major (k, n), from the lowest bit on | scales, float32 [K / GROUP][N] | su, int8 [K] | sv, int8 [N]. Sides
// of any length: tiles are whole.
//
// In the fragment layout scales have the sign of their row, sv, and are multiplied by a power of two; su belongs to the
// activations.
#pragma once
#include "pairs.cuh"

template <int BITS_, int GROUP_>
struct TrellisMatrix {
    static constexpr int BITS = BITS_, GROUP = GROUP_;
    static constexpr int BLOCK_BYTES = GROUP * BITS / 8 + 4;  // of what a group has of a row
    static constexpr Coding CODING = CODEBOOK;
    static constexpr Scaling SCALING = SINGLE;
    static constexpr bool HAS_MIN = false;

    // Bytes of a 16 x 64 tile in each plane of the fragment layout (core/codebook.cuh). Scales of more than a tile are
    // in the group plane.
    static constexpr int LOW_BYTES = BITS / 2 * 256, HIGH_BYTES = BITS % 2 * 128;
    static constexpr int SCALE_BYTES = GROUP == 32 ? 128 : 0, GROUP_BYTES = GROUP == 32 ? 0 : 64;
    static constexpr int GROUP_TILES = GROUP == 32 ? 1 : GROUP / 64;

    static constexpr int TILE_BYTES = 32 * BITS, ROW_BYTES = 2 * BITS;  // of a 16 x 16 tile, and of one k of it
    static constexpr u32 MASK = (1 << BITS) - 1;
};

using Format = TrellisMatrix<(CUQUANT_BLOCK_BYTES - 4) * 8 / (CUQUANT_BLOCK_BYTES > 32 ? 128 : 32),
                             (CUQUANT_BLOCK_BYTES > 32 ? 128 : 32)>;

// Where the parts of a record are.
template <class F>
struct Record {
    int N, K;

    DEVICE int tiles_n() const { return (N + 15) / 16; }
    DEVICE int tiles_k() const { return (K + 15) / 16; }
    DEVICE int groups() const { return (K + F::GROUP - 1) / F::GROUP; }
    DEVICE s64 tile_at(int k, int n) const { return (s64(k) * tiles_n() + n) * F::TILE_BYTES; }
    DEVICE s64 scales_at() const { return tile_at(tiles_k(), 0); }
    DEVICE s64 su_at() const { return scales_at() + s64(groups()) * N * 4; }
    DEVICE s64 sv_at() const { return su_at() + K; }
    DEVICE s64 bytes() const { return (sv_at() + N + 15) / 16 * 16; }
};

// Four indices, a byte each, next to each other.
template <int BITS>
DEVICE u32 squeeze(u32 bytes) {
    constexpr u32 two = (1 << 2 * BITS) - 1, four = (1 << 4 * BITS) - 1;
    bytes = (bytes | bytes >> (8 - BITS)) & two * 0x00010001;
    return (bytes | bytes >> (16 - 2 * BITS)) & four;
}

// Sixteen indices, a byte each, to a row of a tile.
template <class F>
DEVICE void store_row(u8* row, uint4 codes) {
    constexpr int B = F::BITS;
    const u64 low = squeeze<B>(codes.x) | squeeze<B>(codes.y) << 4 * B;
    const u64 high = squeeze<B>(codes.z) | squeeze<B>(codes.w) << 4 * B;
    const u64 bits = low | high << 8 * B;
    if constexpr (B == 4) {
        *reinterpret_cast<u64*>(row) = bits;
    } else if constexpr (B == 2) {
        *reinterpret_cast<u32*>(row) = u32(bits);
    } else {
#pragma unroll
        for (int part = 0; part < 3; part++) reinterpret_cast<u16*>(row)[part] = u16(bits >> 16 * part);
    }
}

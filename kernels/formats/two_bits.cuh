// Integers of 2 bits around 1 with one float16 scale for 64, 128 or 256 weights: W = d (q - 1). q2_0 and tq2_0, and what
// q1_0 and tq1_0 are kept as. Scales are in the group plane, a word of rows g and g + 8.
#pragma once
#include "fields.cuh"

// Bytes from byte AT on of four codes in order, the first in the lowest bits.
template <int AT>
struct Fours {
    // Codes of eight elements from `code` on, a byte each.
    static DEVICE uint2 eight(const u8* block, int code, const u8*) {
        const u8* const from = block + AT + code / 4;
        return make_uint2(spread(from[0]), spread(from[1]));
    }

    // Codes 2i, + 8, + 1, + 9 of every 16 columns: a lane's share, in the order of tile.cuh.
    template <int STEPS>
    static DEVICE void gather(const u8* block, int i, u32 (&codes)[STEPS]) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const u8* const from = block + AT + step * 4 + i / 2;
            const u32 pairs = from[0] | from[2] << 8, own = pairs >> i % 2 * 4;
            codes[step] = (own & 0x0303) | (own & 0x0c0c) << 14;
        }
    }

    // Back: a byte has the codes of two lanes.
    template <int STEPS>
    static DEVICE void scatter(u8* block, int i, const u32 (&codes)[STEPS]) {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const u32 own = ((codes[step] & 0x0303) | (codes[step] >> 14 & 0x0c0c)) << i % 2 * 4;
            const u32 both = own | __shfl_xor_sync(~0u, own, 1);
            block[AT + step * 4 + i / 2 + i % 2 * 2] = u8(i % 2 ? both >> 8 : both);
        }
    }

private:
    // Four codes of a byte to a byte each.
    static DEVICE u32 spread(u32 four) {
        const u32 pairs = (four & 0x0f) | (four & 0xf0) << 12;
        return (pairs & 0x00030003) | (pairs & 0x000c000c) << 6;
    }
};

template <int COLUMNS_, class Low_, int D_AT>
struct TwoBitBlock {
    static constexpr int BITS = 2, COLUMNS = COLUMNS_, BLOCK_BYTES = 2 + COLUMNS / 4;
    static constexpr Coding CODING = INTEGERS;
    static constexpr Scaling SCALING = HALF;
    static constexpr bool HAS_MIN = false;
    static constexpr int OFFSET = 1, ZERO = OFFSET;
    static constexpr int LOW_BYTES = 256, HIGH_BYTES = 0, SCALE_BYTES = 0;
    static constexpr int PARTS = COLUMNS / 64, GROUP_BYTES = 32, GROUP_TILES = PARTS;
    using Low = Low_;

    static DEVICE u32 scale_bits(const u8* block) { return load_u16(block + D_AT); }

    // The greatest magnitude of a weight with these bits; NaN for NaN.
    static DEVICE float peak(const LaneShare<TwoBitBlock>& share) { return fabsf(half_to_float(u16(share.scale))) * 2; }

    // Codes of eight elements from j on, a byte each.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8* end) { return Low::eight(block, j, end); }

    static DEVICE float read(u32 codes, int j, u32 scale, float) {
        // A code in the last byte of 2^23's bits reads 2^23 + code.
        const float q = __fadd_rn(__int_as_float(__byte_perm(codes, 0x4b000000, 0x7440 + j)), -(8388608.f + ZERO));
        return __fmul_rn(q, half_to_float(u16(scale)));
    }

    // This lane's share of the blocks of rows g and g + 8 (lane = 4 g + i) ...
    static DEVICE void gather(LaneShare<TwoBitBlock> (&shares)[PARTS], const u8* row, const u8* row8, int lane) {
        const int i = lane % 4;
        Words<TwoBitBlock>::gather(shares, row, 0, i);
        Words<TwoBitBlock>::gather(shares, row8, 1, i);
        const u32 scale = scale_bits(i % 2 ? row8 : row);
#pragma unroll
        for (int part = 0; part < PARTS; part++) shares[part].scale = shares[part].group = scale;
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<TwoBitBlock> (&shares)[PARTS], u8* row, u8* row8, int lane) {
        const int i = lane % 4;
        Words<TwoBitBlock>::scatter(shares, row, 0, i);
        Words<TwoBitBlock>::scatter(shares, row8, 1, i);
        if (i < 2) store_u16((i ? row8 : row) + D_AT, shares[0].group);
    }

    // The same of blocks that are no more than a tile.
    static DEVICE LaneShare<TwoBitBlock> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<TwoBitBlock> shares[1] = {};
        gather(shares, row, row8, lane);
        return shares[0];
    }

    static DEVICE void scatter(const LaneShare<TwoBitBlock>& share, u8* row, u8* row8, int lane) {
        const LaneShare<TwoBitBlock> shares[1] = {share};
        scatter(shares, row, row8, lane);
    }
};

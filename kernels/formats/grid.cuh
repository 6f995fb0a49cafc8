// Codes of 3 bits that are looked up, in nibbles as iq4 has them, and for each 16 weights a scale, an integer of a byte times a
// float16 number of the block: see cuquant/formats/grid.py.
#pragma once
#include "iq4.cuh"

struct GridBlock {
    static constexpr int BITS = 3, COLUMNS = 256, SCALES_AT = 2, CODES_AT = 18, BLOCK_BYTES = 146;
    static constexpr Coding CODING = CODEBOOK;
    static constexpr Scaling SCALING = STEP_BYTES;
    static constexpr bool HAS_MIN = false;
    static constexpr int SCALE_ZERO = 0;
    static constexpr int LOW_BYTES = 256, HIGH_BYTES = 128, SCALE_BYTES = 64, GROUP_BYTES = 32, GROUP_TILES = 4;

    // The peak of both scales that a lane has; two lanes have the d of its two rows.
    static DEVICE float peak(const LaneShare<GridBlock>& share, int row8) {
        const u32 d = __shfl_sync(~0u, share.group, (threadIdx.x & 30) + row8);
        return fabsf(half_to_float(u16(d)) * int(share.scale >> 8 * row8 & 0xff));
    }

    // Codes of eight elements from j on, a byte each.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8* end) {
        return Field<4, CODES_AT, 16>::eight(block, j, end);
    }

    static DEVICE float scale_at(const u8* block, int number, int half) {
        return __fmul_rn(half_to_float(u16(load_u16(block))), block[SCALES_AT + 2 * number + half]);
    }

    static DEVICE float read(u32 codes, int j, float scale, float entry) {
        return __fmul_rn(scale, entry_of(entry, codes, j));
    }

    // This lane's share of the blocks of rows g and g + 8 (lane = 4 g + i) ...
    static DEVICE void gather(LaneShare<GridBlock> (&shares)[4], const u8* row, const u8* row8, int lane) {
        const int i = lane % 4;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            LaneShare<GridBlock>& share = shares[part];
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                const int j = quarter / 2, b = quarter % 2;
                const u8* const codes = (j ? row8 : row) + CODES_AT + (2 * part + b) * 16;
                Pairs<GridBlock>::put(share, b, j, NibblePairs::gather(codes, i));
            }
            share.scale = row[SCALES_AT + 4 * part + i] | row8[SCALES_AT + 4 * part + i] << 8;
            share.group = load_u16(i % 2 ? row8 : row);
        }
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<GridBlock> (&shares)[4], u8* row, u8* row8, int lane) {
        const int i = lane % 4;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const LaneShare<GridBlock>& share = shares[part];
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                const int j = quarter / 2, b = quarter % 2;
                u32 fifths;
                u8* const codes = (j ? row8 : row) + CODES_AT + (2 * part + b) * 16;
                NibblePairs::scatter(codes, i, Pairs<GridBlock>::get(share, b, j, fifths));
            }
            row[SCALES_AT + 4 * part + i] = u8(share.scale);
            row8[SCALES_AT + 4 * part + i] = u8(share.scale >> 8);
        }
        if (i < 2) store_u16(i ? row8 : row, shares[0].group);
    }
};

using Format = GridBlock;

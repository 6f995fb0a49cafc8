// mxfp4: see cuquant/formats/mxfp4.py. A block is an E8M0 byte and 16 bytes of nibbles, ordered as ggml's codes of four
// bits. Blocks start at any address.
#pragma once
#include "fp4.cuh"

struct Mxfp4Block : Ungrouped {
    static constexpr int BITS = 4, COLUMNS = 32, BLOCK_BYTES = 17, CODES_AT = 1;
    static constexpr Coding CODING = E2M1;
    static constexpr Scaling SCALING = E8M0;
    static constexpr bool HAS_MIN = false;
    static constexpr int LOW_BYTES = 512, HIGH_BYTES = 0, SCALE_BYTES = 32;

    static DEVICE u32 scale_bits(const u8* block) { return block[0]; }

    // e + 1 as a float's bits, of a block that is not all zeros (for ops/center.cu).
    static DEVICE float peak(const LaneShare<Mxfp4Block>& share) {
        u32 used = 0;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const u32 both = share.low[part % 2 * 2] | share.low[part % 2 * 2 + 1];
            if (both & (part < 2 ? 0x0e380e38 : 0x01c701c7)) used |= 1 << part;  // magnitudes in rows g, g + 8
        }
        return __int_as_float(or_of_row(used) >> threadIdx.x % 4 & 1 ? share.scale + 1 : 0);
    }

    // Codes of eight elements from j on, a byte each.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8* end) {
        return codes_at(load_eight(block + CODES_AT + j % 16, end), j / 16 * 4, 15);
    }

    // Half of 2^(e - 127); the least are subnormal.
    static DEVICE float half_of(u32 e) { return __int_as_float(e < 2 ? 0x00200000 << e : (e - 1) << 23); }

    // The codebook holds twice the numbers.
    static DEVICE float read(u32 codes, int j, u32 e, float entry) {
        return ieee_mul(entry_of(entry, codes, j), half_of(e));
    }

    // This lane's share of a tile, from the blocks of rows g and g + 8 (lane = 4 g + i) ...
    static DEVICE LaneShare<Mxfp4Block> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<Mxfp4Block> share = {};
        const int i = lane % 4;
        share.scale = scale_bits((i < 2 ? row : row8) + i % 2 * BLOCK_BYTES);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            const u8* codes = (j ? row8 : row) + b * BLOCK_BYTES + CODES_AT + 2 * i;
#pragma unroll
            for (int t = 0; t < 2; t++) {  // columns 2i + 8t and the next
                const u32 bytes = bytes_to_halves(codes + 8 * t);
                share.low[2 * b] |= place_e2m1(bytes, 2 * t + j);
                share.low[2 * b + 1] |= place_e2m1(bytes >> 4, 2 * t + j);
            }
        }
        return share;
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<Mxfp4Block>& share, u8* row, u8* row8, int lane) {
        const int i = lane % 4;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            u8* codes = (j ? row8 : row) + b * BLOCK_BYTES + CODES_AT + 2 * i;
#pragma unroll
            for (int t = 0; t < 2; t++)
                halves_to_bytes(codes + 8 * t, e2m1_at(share.low[2 * b], 2 * t + j) |
                                                e2m1_at(share.low[2 * b + 1], 2 * t + j) << 4);
        }
        u8* own = (i < 2 ? row : row8) + i % 2 * BLOCK_BYTES;
        own[0] = u8(share.scale);
    }
};

using Format = Mxfp4Block;

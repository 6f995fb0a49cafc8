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

    // The host brings exponents into float16's range.
    static DEVICE float peak(const LaneShare<Mxfp4Block>&) { return 0; }

    static DEVICE void load_codes(const u8* block, int j, u32& low, u32& high) {
        const u8* from = block + CODES_AT + j;
        low = from[0] | from[1] << 8 | from[2] << 16 | u32(from[3]) << 24;
        high = low >> 4 & 0x0f0f0f0f;
        low &= 0x0f0f0f0f;
    }

    // Half of 2^(e - 127); the least are subnormal.
    static DEVICE float half_of(u32 e) { return __int_as_float(e < 2 ? 0x00200000 << e : (e - 1) << 23); }

    // The codebook holds twice the numbers.
    static DEVICE float read(u32 codes, int j, u32 e, const float* codebook) {
        return ieee_mul(codebook[codes >> 8 * j & 0xff], half_of(e));
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
            for (int t = 0; t < 2; t++)  // columns 2i + 8t and the next
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const u32 two = codes[8 * t + e];
                    share.low[2 * b] |= place_e2m1(two & 15, 2 * t + j) << 16 * e;
                    share.low[2 * b + 1] |= place_e2m1(two >> 4, 2 * t + j) << 16 * e;
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
#pragma unroll
                for (int e = 0; e < 2; e++)
                    codes[8 * t + e] = u8(e2m1_at(share.low[2 * b] >> 16 * e, 2 * t + j) |
                                          e2m1_at(share.low[2 * b + 1] >> 16 * e, 2 * t + j) << 4);
        }
        u8* own = (i < 2 ? row : row8) + i % 2 * BLOCK_BYTES;
        own[0] = u8(share.scale);
    }
};

using Format = Mxfp4Block;

// int4 in groups of 32 weights, as which larger groups are kept (cuquant/formats/int4.py): a block is a float16 scale,
// a zero point of one byte in blocks of odd length, and 16 bytes, each with two codes in order.
#pragma once
#include "share.cuh"

template <bool ASYMMETRIC>
struct Int4Block : Ungrouped {
    static constexpr int BITS = 4, COLUMNS = 32, CODES_AT = ASYMMETRIC ? 3 : 2, BLOCK_BYTES = CODES_AT + 16;
    static constexpr Coding CODING = INTEGERS;
    static constexpr Scaling SCALING = ASYMMETRIC ? HALF_AND_ZERO : HALF;
    static constexpr bool HAS_MIN = ASYMMETRIC;  // -zero * scale
    static constexpr int OFFSET = ASYMMETRIC ? 0 : 8, ZERO = OFFSET;
    static constexpr int LOW_BYTES = 512, HIGH_BYTES = 0, SCALE_BYTES = ASYMMETRIC ? 128 : 64;

    // Scale in the low half, the zero point in float16 in the high half.
    static DEVICE u32 scale_bits(const u8* block) {
        const u32 scale = block[0] | block[1] << 8;
        return ASYMMETRIC ? scale | u32(float_to_half(block[2])) << 16 : scale;
    }

    static DEVICE float peak(const LaneShare<Int4Block>& share) {
        const u32 scale = share.scale;
        const float zero = ASYMMETRIC ? half_to_float(u16(scale >> 16)) : 8;
        return fabsf(half_to_float(u16(scale))) * fmaxf(15 - zero, zero);
    }

    // Codes of elements j .. j + 3 and, 16 further, j + 16 ..; a byte each.
    static DEVICE void load_codes(const u8* block, int j, u32& low, u32& high) {
        low = in_bytes(block + CODES_AT + j / 2), high = in_bytes(block + CODES_AT + j / 2 + 8);
    }

    static DEVICE float read(u32 codes, int j, u32 scale, const float*) {
        const float zero = ASYMMETRIC ? half_to_float(u16(scale >> 16)) : 8;
        return __fmul_rn(float(codes >> 8 * j & 0xff) - zero, half_to_float(u16(scale)));
    }

    // This lane's share of a tile, from the blocks of rows g and g + 8 (lane = 4 g + i) ...
    static DEVICE LaneShare<Int4Block> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<Int4Block> share = {};
        const int i = lane % 4;
        share.scale = scale_bits((i < 2 ? row : row8) + i % 2 * BLOCK_BYTES);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            const u8* codes = (j ? row8 : row) + b * BLOCK_BYTES + CODES_AT + i;
#pragma unroll
            for (int m = 0; m < 4; m++) {  // columns 8 m + 2 i and the next: step m / 2, registers j + 2 (m % 2)
                const u32 two = codes[4 * m];
                share.low[2 * b + m / 2] |= ((two & 15) | (two & 0xf0) << 12) << (8 * (m % 2) + 4 * j);
            }
        }
        return share;
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<Int4Block>& share, u8* row, u8* row8, int lane) {
        const int i = lane % 4;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            u8* codes = (j ? row8 : row) + b * BLOCK_BYTES + CODES_AT + i;
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const u32 two = share.low[2 * b + m / 2] >> (8 * (m % 2) + 4 * j);
                codes[4 * m] = u8((two & 15) | (two >> 12 & 0xf0));
            }
        }
        u8* own = (i < 2 ? row : row8) + i % 2 * BLOCK_BYTES;
        own[0] = u8(share.scale), own[1] = u8(share.scale >> 8);
        if constexpr (ASYMMETRIC) own[2] = u8(__float2int_rn(half_to_float(u16(share.scale >> 16))));
    }

private:
    static DEVICE u32 in_bytes(const u8* p) {
        const u32 two = p[0] | p[1] << 16;
        return (two & 0x000f000f) | (two & 0x00f000f0) << 4;
    }
};

using Format = Int4Block</* asymmetric */ CUQUANT_BLOCK_BYTES % 2 != 0>;

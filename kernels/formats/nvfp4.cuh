// nvfp4: see cuquant/formats/nvfp4.py. A block of 64 weights is four E4M3 bytes, one for every 16, and four times eight
// bytes of nibbles: byte j has codes j and j + 8 of its 16.
#pragma once
#include "fp4.cuh"

struct Nvfp4Block : Ungrouped {
    static constexpr int BITS = 4, COLUMNS = 64, BLOCK_BYTES = 36, CODES_AT = 4;
    static constexpr Coding CODING = E2M1;
    static constexpr Scaling SCALING = E4M3;
    static constexpr bool HAS_MIN = false;
    static constexpr int LOW_BYTES = 512, HIGH_BYTES = 0, SCALE_BYTES = 64;

    static DEVICE u32 scale_bits(const u8* block) { return load_u32(block); }

    static DEVICE float peak(const LaneShare<Nvfp4Block>&) { return 0; }  // every weight fits float16

    // Codes of elements j .. j + 3, and of the four 16 further, a byte each.
    static DEVICE void load_codes(const u8* block, int j, u32& low, u32& high) {
        const u8* from = block + CODES_AT + j / 16 * 8 + j % 8;
        low = load_u32(from) >> j % 16 / 8 * 4 & 0x0f0f0f0f;
        high = load_u32(from + 8) >> j % 16 / 8 * 4 & 0x0f0f0f0f;
    }

    // Half of what a scale means. A float16 number with these exponent and mantissa bits is 2^-8 times it, but 0x7f is
    // 0.
    static DEVICE float half_of(u32 scale) {
        return scale == 0x7f ? 0 : half_to_float(u16((scale & 0x7f) << 7)) * 128;
    }

    // The codebook holds twice the numbers.
    static DEVICE float read(u32 codes, int j, u32 scale, const float* codebook) {
        return __fmul_rn(codebook[codes >> 8 * j & 0xff], half_of(scale));
    }

    // This lane's share of a tile, from the blocks of rows g and g + 8 (lane = 4 g + i) ...
    static DEVICE LaneShare<Nvfp4Block> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<Nvfp4Block> share = {};
        const int i = lane % 4;
        share.scale = load_u16((i < 2 ? row : row8) + i % 2 * 2);
#pragma unroll
        for (int h = 0; h < 4; h++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {  // columns 2i + e, and 8 further
                    const u32 two = (j ? row8 : row)[CODES_AT + h * 8 + 2 * i + e];
                    share.low[h] |= (place_e2m1(two & 15, j) | place_e2m1(two >> 4, 2 + j)) << 16 * e;
                }
        return share;
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<Nvfp4Block>& share, u8* row, u8* row8, int lane) {
        const int i = lane % 4;
#pragma unroll
        for (int h = 0; h < 4; h++)
#pragma unroll
            for (int j = 0; j < 2; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const u32 half = share.low[h] >> 16 * e;
                    (j ? row8 : row)[CODES_AT + h * 8 + 2 * i + e] = u8(e2m1_at(half, j) | e2m1_at(half, 2 + j) << 4);
                }
        *reinterpret_cast<u16*>((i < 2 ? row : row8) + i % 2 * 2) = u16(share.scale);
    }
};

using Format = Nvfp4Block;

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

    // Every weight fits float16. Not 0 if `canonical` would change the scales.
    static DEVICE float peak(const LaneShare<Nvfp4Block>& share) { return canonical(share.scale) != share.scale; }

    // Scales without their unused signs; 0x7f, which ggml reads as 0, as 0, but 0xff, 480, as 0x7f.
    static DEVICE u32 canonical(u32 scales) {
        u32 made = scales & 0x7f7f;
        if ((scales & 0xff) == 0x7f) made &= 0xff00;
        if (scales >> 8 == 0x7f) made &= 0xff;
        return made;
    }

    // Codes of eight elements from j on, a byte each.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8* end) {
        return codes_at(load_eight(block + CODES_AT + j / 16 * 8, end), j / 8 % 2 * 4, 15);
    }

    // Half of what a scale means. A float16 number with these exponent and mantissa bits is 2^-8 times it, but 0x7f is
    // 0.
    static DEVICE float half_of(u32 scale) {
        return scale == 0x7f ? 0 : half_to_float(u16((scale & 0x7f) << 7)) * 128;
    }

    // The codebook holds twice the numbers, `half` is half of a scale.
    static DEVICE float read(u32 codes, int j, float half, float entry) {
        return __fmul_rn(entry_of(entry, codes, j), half);
    }

    // This lane's share of a tile, from the blocks of rows g and g + 8 (lane = 4 g + i) ...
    static DEVICE LaneShare<Nvfp4Block> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<Nvfp4Block> share = {};
        const int i = lane % 4;
        share.scale = load_u16((i < 2 ? row : row8) + i % 2 * 2);
#pragma unroll
        for (int h = 0; h < 4; h++)
#pragma unroll
            for (int j = 0; j < 2; j++) {  // columns 2i and the next, and 8 further
                const u32 bytes = bytes_to_halves((j ? row8 : row) + CODES_AT + h * 8 + 2 * i);
                share.low[h] |= place_e2m1(bytes, j) | place_e2m1(bytes >> 4, 2 + j);
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
                halves_to_bytes((j ? row8 : row) + CODES_AT + h * 8 + 2 * i,
                             e2m1_at(share.low[h], j) | e2m1_at(share.low[h], 2 + j) << 4);
        store_u16((i < 2 ? row : row8) + i % 2 * 2, share.scale);
    }
};

using Format = Nvfp4Block;

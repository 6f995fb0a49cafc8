// IQ4: nibbles that are looked up in 16 levels. Of each 32 weights byte j holds codes j and j + 16.
#pragma once
#include "fields.cuh"
#include "pairs.cuh"

// The pairs of a lane's codes of block b of row g + 8 j, as core/codebook.cuh has them: byte m of a word is pair m.
struct NibblePairs {
    using Nibbles = Field<4, 0, 16>;

    // `codes`: 16 bytes of nibbles.
    static DEVICE u32 gather(const u8* codes, int i) {
        u32 own[2] = {};
        Nibbles::gather(codes, i, own);
        return spread_bits(__byte_perm(own[0], own[1], 0x5410)) | spread_bits(__byte_perm(own[0], own[1], 0x7632)) << 1;
    }

    static DEVICE void scatter(u8* codes, int i, u32 pairs) {
        const u32 even = gather_bits(pairs), odd = gather_bits(pairs >> 1);
        const u32 own[2] = {__byte_perm(even, odd, 0x5410), __byte_perm(even, odd, 0x7632)};
        Nibbles::scatter(codes, i, own);
    }
};

// A float16 scale for each 32 weights.
struct Iq4NlBlock : Ungrouped {
    static constexpr int BITS = 4, COLUMNS = 32, CODES_AT = 2, BLOCK_BYTES = 18;
    static constexpr Coding CODING = CODEBOOK;
    static constexpr Scaling SCALING = HALF;
    static constexpr bool HAS_MIN = false;
    static constexpr int LOW_BYTES = 512, HIGH_BYTES = 0, SCALE_BYTES = 64;

    static DEVICE u32 scale_bits(const u8* block) { return load_u16(block); }

    // The greatest magnitude of a weight, in units of the greatest level's power of two; NaN for NaN.
    static DEVICE float peak(const LaneShare<Iq4NlBlock>& share) { return fabsf(half_to_float(u16(share.scale))); }

    // Codes of eight elements from j on, a byte each.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8* end) {
        return Field<4, CODES_AT, 16>::eight(block, j, end);
    }

    static DEVICE float read(u32 codes, int j, u32 scale, float entry) {
        return __fmul_rn(half_to_float(u16(scale)), entry_of(entry, codes, j));
    }

    // This lane's share of a tile, from the blocks of rows g and g + 8 (lane = 4 g + i) ...
    static DEVICE LaneShare<Iq4NlBlock> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<Iq4NlBlock> share;
        const int i = lane % 4;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            share.low[2 * b + j] = NibblePairs::gather((j ? row8 : row) + b * BLOCK_BYTES + CODES_AT, i);
        }
        share.scale = scale_bits((i < 2 ? row : row8) + i % 2 * BLOCK_BYTES);
        return share;
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<Iq4NlBlock>& share, u8* row, u8* row8, int lane) {
        const int i = lane % 4;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            NibblePairs::scatter((j ? row8 : row) + b * BLOCK_BYTES + CODES_AT, i, share.low[2 * b + j]);
        }
        store_u16((i < 2 ? row : row8) + i % 2 * BLOCK_BYTES, share.scale);
    }
};

// Scales of 6 bits for each 32 weights, less 32, times a float16 number of the block: float16 d, a word of the upper two
// bits (bits 2 i belong to scale i), 4 bytes of the lower four (byte j holds those of scales 2 j and 2 j + 1), nibbles.
struct Iq4XsBlock {
    static constexpr int BITS = 4, COLUMNS = 256, UPPER_AT = 2, LOWER_AT = 4, CODES_AT = 8, BLOCK_BYTES = 136;
    static constexpr Coding CODING = CODEBOOK;
    static constexpr Scaling SCALING = BYTES;
    static constexpr bool HAS_MIN = false;
    static constexpr int SCALE_ZERO = 32;
    static constexpr int LOW_BYTES = 512, HIGH_BYTES = 0, SCALE_BYTES = 32, GROUP_BYTES = 32, GROUP_TILES = 4;

    // Scale and d of one row.
    static DEVICE float peak(const LaneShare<Iq4XsBlock>& share) {
        return fabsf(half_to_float(u16(share.group)) * (int(share.scale) - SCALE_ZERO));
    }

    // Codes of eight elements from j on, a byte each.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8* end) {
        return Field<4, CODES_AT, 16>::eight(block, j, end);
    }

    static DEVICE u32 get(const u8* block, int number) {
        const u32 upper = block[UPPER_AT + number / 4] >> number % 4 * 2 & 3;
        return (block[LOWER_AT + number / 2] >> number % 2 * 4 & 15) | upper << 4;
    }

    // The scale of the 32 weights of this number.
    static DEVICE float scale_at(const u8* block, int number, int) {
        return __fmul_rn(half_to_float(u16(load_u16(block))), int(get(block, number)) - SCALE_ZERO);
    }

    static DEVICE float read(u32 codes, int j, float scale, float entry) {
        return __fmul_rn(scale, entry_of(entry, codes, j));
    }

    // This lane's share of the blocks of rows g and g + 8 (lane = 4 g + i): of a tile's scales that of row g + 8 (i % 2) and of
    // 32 columns i / 2 ...
    static DEVICE void gather(LaneShare<Iq4XsBlock> (&shares)[4], const u8* row, const u8* row8, int lane) {
        const int i = lane % 4;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            LaneShare<Iq4XsBlock>& share = shares[part];
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                const int j = quarter / 2, b = quarter % 2;
                share.low[2 * b + j] = NibblePairs::gather((j ? row8 : row) + CODES_AT + (2 * part + b) * 16, i);
            }
            share.scale = get(i % 2 ? row8 : row, 2 * part + i / 2);
            share.group = load_u16(i % 2 ? row8 : row);
        }
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<Iq4XsBlock> (&shares)[4], u8* row, u8* row8, int lane) {
        const int i = lane % 4;
        u32 lower = 0, upper = 0;
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const LaneShare<Iq4XsBlock>& share = shares[part];
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                const int j = quarter / 2, b = quarter % 2;
                NibblePairs::scatter((j ? row8 : row) + CODES_AT + (2 * part + b) * 16, i, share.low[2 * b + j]);
            }
            const u32 second = __shfl_xor_sync(~0u, share.scale, 2);
            lower |= ((share.scale & 15) | (second & 15) << 4) << 8 * part;
            upper |= (share.scale >> 4 | second >> 4 << 2) << 4 * part;
        }
        if (i >= 2) return;
        u8* const block = i ? row8 : row;
        store_u16(block, shares[0].group), store_u16(block + UPPER_AT, upper), store_u32(block + LOWER_AT, lower);
    }
};

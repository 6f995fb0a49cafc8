// int4 in groups of 32, 64 or 128 weights (cuquant/formats/int4.py): a block is a float16 scale, a zero point of one
// byte in blocks of odd length, and bytes with two codes each, in order. What larger groups than those of 32 share is in the
// group plane: of rows g and g + 8 a word of scales and, behind it, one of zero points in float16.
#pragma once
#include "share.cuh"

template <bool ASYMMETRIC, int GROUP>
struct Int4Block {
    static constexpr int BITS = 4, COLUMNS = GROUP, CODES_AT = ASYMMETRIC ? 3 : 2, BLOCK_BYTES = CODES_AT + GROUP / 2;
    static constexpr Coding CODING = INTEGERS;
    static constexpr Scaling SCALING = ASYMMETRIC ? HALF_AND_ZERO : HALF;
    static constexpr bool HAS_MIN = ASYMMETRIC;  // -zero * scale
    static constexpr int OFFSET = ASYMMETRIC ? 0 : 8, ZERO = OFFSET;
    static constexpr int LOW_BYTES = 512, HIGH_BYTES = 0, SCALE_BYTES = GROUP > 32 ? 0 : ASYMMETRIC ? 128 : 64;
    static constexpr int GROUP_BYTES = GROUP == 32 ? 0 : ASYMMETRIC ? 64 : 32, GROUP_TILES = GROUP == 32 ? 1 : GROUP / 64;
    static constexpr int PARTS = GROUP_TILES;  // tiles of a block, or of blocks that make one

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

    // Codes of eight elements from j on, a byte each.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8* end) {
        const u32 two = load_four(block + CODES_AT + j / 2, end), even = two & 0x0f0f0f0f, odd = two >> 4 & 0x0f0f0f0f;
        return make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
    }

    static DEVICE float read(u32 codes, int j, u32 scale, float) {
        const float zero = ASYMMETRIC ? half_to_float(u16(scale >> 16)) : 8;
        // A code in the last byte of 2^23's bits reads 2^23 + code.
        const float q = __fadd_rn(__int_as_float(__byte_perm(codes, 0x4b000000, 0x7440 + j)), -(8388608.f + zero));
        return __fmul_rn(q, half_to_float(u16(scale)));
    }

    // This lane's share of the tiles of the blocks of rows g and g + 8 (lane = 4 g + i). Of a tile it wants a byte in four, m, of
    // 16 bytes of either row and block, k = 2 j + b; so lane k brings these, and the four lanes exchange bytes ...
    static DEVICE void gather(LaneShare<Int4Block> (&shares)[PARTS], const u8* row, const u8* row8, int lane) {
        const int i = lane % 4;
        const u32 scale = scale_bits(block_of(row, row8, i));
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            LaneShare<Int4Block>& share = shares[part];
            share.scale = scale;
            if constexpr (GROUP > 32) share.group = i < 2 ? scale : scale >> 16;
            u32 words[4];
            load_words((i < 2 ? row : row8) + column_at(part, i % 2), words);
            turn_bytes(words);
            exchange(words, i);
            // Columns 8 m + 2 i and the next: step m / 2, registers j + 2 (m % 2).
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const u32 first = chosen(words[b], words[2 + b] << 4, 0x0f0f0f0f);
                const u32 second = chosen(words[b] >> 4, words[2 + b], 0x0f0f0f0f);
                share.low[2 * b] = permute(first, second, 0x5410), share.low[2 * b + 1] = permute(first, second, 0x7632);
            }
        }
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<Int4Block> (&shares)[PARTS], u8* row, u8* row8, int lane) {
        const int i = lane % 4;
#pragma unroll
        for (int part = 0; part < PARTS; part++)
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) {
                const int j = quarter / 2, b = quarter % 2;
                u8* codes = (j ? row8 : row) + column_at(part, b) + i;
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const u32 two = shares[part].low[2 * b + m / 2] >> (8 * (m % 2) + 4 * j);
                    codes[4 * m] = u8((two & 15) | (two >> 12 & 0xf0));
                }
            }
        u8* const own = block_of(row, row8, i);
        const u32 scale = GROUP == 32 ? shares[0].scale : shares[0].group, zero = GROUP == 32 ? scale >> 16 : scale;
        if (GROUP == 32 || i < 2) own[0] = u8(scale), own[1] = u8(scale >> 8);
        if (ASYMMETRIC && (GROUP == 32 || i >= 2)) own[2] = u8(__float2int_rn(half_to_float(u16(zero))));
    }

    // The same of blocks that are no more than a tile.
    static DEVICE LaneShare<Int4Block> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<Int4Block> shares[1];
        gather(shares, row, row8, lane);
        return shares[0];
    }

    static DEVICE void scatter(const LaneShare<Int4Block>& share, u8* row, u8* row8, int lane) {
        const LaneShare<Int4Block> shares[1] = {share};
        scatter(shares, row, row8, lane);
    }

private:
    // Lane i's block of the tile, of two of each row, or of a larger one, of which the row alone counts.
    template <class Byte>
    static DEVICE Byte* block_of(Byte* row, Byte* row8, int i) {
        if constexpr (GROUP > 32) return i % 2 ? row8 : row;
        return (i < 2 ? row : row8) + i % 2 * BLOCK_BYTES;
    }

    static DEVICE int column_at(int part, int b) {
        return CODES_AT + (GROUP == 32 ? b * BLOCK_BYTES : part * 32 + b * 16);
    }
};

using Format = Int4Block</* asymmetric */ CUQUANT_BLOCK_BYTES % 2 != 0, (CUQUANT_BLOCK_BYTES / 16) * 32>;

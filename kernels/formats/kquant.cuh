// k-quants: blocks of 256 integer codes whose scales (and minimums) are integers, too, times one float16 number (or two)
// of the block: see cuquant/formats/kquant.py and those of the formats.
//
// In the fragment layout every integer scale has a byte (q2_k: with its minimum). Lane 4 g + i has two bytes of a tile's
// scale plane, of rows g and g + 8: of step i, or of block i / 2 its scale (i even) or its minimum.
#pragma once
#include "fields.cuh"

// A weight is d * q - m, with the product of two float16 integers' rounding, as the reference has it.
struct Affine {
    float d, m;
};

// Scales and minimums of 6 bits for each 32 weights, after d and dmin: q4_k and q5_k.
struct PairsOfSixBits {
    static constexpr Scaling SCALING = BYTES_AND_MIN;
    static constexpr bool HAS_MIN = true;
    static constexpr int D_AT = 0, AT = 4, SCALE_ZERO = 0, SCALE_BITS = 6;

    // The scale (0) or the minimum of 32 weights.
    static DEVICE u32 get(const u8* block, int number, int minimum) {
        const u8* const from = block + AT;
        if (number < 4) return from[number + 4 * minimum] & 63;
        return (from[number + 4] >> 4 * minimum & 15) | (from[number - 4 + 4 * minimum] >> 6) << 4;
    }

    static DEVICE u32 lane_share(const u8* block, int part, int i) { return get(block, 2 * part + i / 2, i % 2); }

    static DEVICE void put_lane_share(u8* block, int part, int i, u32 value) {
        const u32 other = __shfl_xor_sync(~0u, value, 1);
        const int number = 2 * part + i / 2;
        u8* const to = block + AT + 4 * (i % 2);
        if (number < 4) {
            to[number] = u8(value);
        } else {
            to[number - 4] |= u8(value >> 4 << 6);
            if (i % 2) block[AT + number + 4] = u8((other & 15) | (value & 15) << 4);
        }
    }

    static DEVICE int scale_of(const u8* block, int number, int) { return get(block, number, 0); }
    static DEVICE int minimum_of(const u8* block, int number, int) { return get(block, number, 1); }
};

// A nibble of scale and one of minimum in a byte for each 16 weights: q2_k.
struct PairsOfNibbles {
    static constexpr Scaling SCALING = STEP_NIBBLES_AND_MIN;
    static constexpr bool HAS_MIN = true;
    static constexpr int D_AT = 80, SCALE_ZERO = 0, SCALE_BITS = 4;

    static DEVICE u32 lane_share(const u8* block, int part, int i) { return block[4 * part + i]; }
    static DEVICE void put_lane_share(u8* block, int part, int i, u32 value) { block[4 * part + i] = u8(value); }

    static DEVICE int scale_of(const u8* block, int number, int half) { return block[2 * number + half] & 15; }
    static DEVICE int minimum_of(const u8* block, int number, int half) { return block[2 * number + half] >> 4; }
};

// Scales of 6 bits for each 16 weights, less 32: q3_k.
struct SixBits {
    static constexpr Scaling SCALING = STEP_BYTES;
    static constexpr bool HAS_MIN = false;
    static constexpr int D_AT = 108, SCALE_ZERO = 32, SCALE_BITS = 5;
    using Lower = Field<4, 96, 8>;
    using Upper = Field<2, 104, 4>;

    static DEVICE u32 lane_share(const u8* block, int part, int i) {
        return Lower::get(block, 4 * part + i) | Upper::get(block, 4 * part + i) << 4;
    }

    static DEVICE void put_lane_share(u8* block, int part, int i, u32 value) {
        Lower::put(block, 4 * part + i, value & 15);
        Upper::put(block, 4 * part + i, value >> 4);
    }

    static DEVICE int scale_of(const u8* block, int number, int half) {
        return int(Lower::get(block, 2 * number + half) | Upper::get(block, 2 * number + half) << 4) - 32;
    }
};

// Scales of signed bytes for each 16 weights: q6_k. In the fragment layout 128 stands for 0.
struct SignedBytes {
    static constexpr Scaling SCALING = STEP_BYTES;
    static constexpr bool HAS_MIN = false;
    static constexpr int D_AT = 208, AT = 192, SCALE_ZERO = 128, SCALE_BITS = 7;

    static DEVICE u32 lane_share(const u8* block, int part, int i) { return block[AT + 4 * part + i] ^ 0x80; }
    static DEVICE void put_lane_share(u8* block, int part, int i, u32 value) {
        block[AT + 4 * part + i] = u8(value ^ 0x80);
    }

    static DEVICE int scale_of(const u8* block, int number, int half) { return s8(block[AT + 2 * number + half]); }
};

template <int BITS_, class Low_, class High_, class Scales, int BYTES_>
struct KQuantBlock {
    static constexpr int BITS = BITS_, COLUMNS = 256, BLOCK_BYTES = BYTES_;
    static constexpr Coding CODING = INTEGERS;
    static constexpr Scaling SCALING = Scales::SCALING;
    static constexpr bool HAS_MIN = Scales::HAS_MIN;  // W = d * s * q - dmin * m, else W = d * s * (q - OFFSET)
    static constexpr int OFFSET = HAS_MIN ? 0 : 1 << (BITS - 1), ZERO = OFFSET;
    static constexpr int SCALE_ZERO = Scales::SCALE_ZERO, SCALE_BITS = Scales::SCALE_BITS;  // magnitudes up to 2^SCALE_BITS
    static constexpr int LOW_BYTES = BITS < 4 ? 256 : 512, HIGH_BYTES = BITS * 128 - LOW_BYTES;
    static constexpr int SCALE_BYTES = 64, GROUP_BYTES = HAS_MIN ? 64 : 32, GROUP_TILES = 4;
    using Low = Low_;
    using High = High_;

    // Whether weights are finite is all that is asked.
    static DEVICE float peak(const LaneShare<KQuantBlock>& share) { return fabsf(half_to_float(u16(share.group))); }

    // Codes of eight elements from j on, a byte each, that are in one field; and of the four runs of 32 in half a block eight
    // each, that are in two.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8* end) { return Low::eight(block, j, end); }
    static DEVICE void load_runs(const u8* block, int half, int column, const u8* end, uint2 (&codes)[4]) {
        Low::eights(block, half, column, end, codes);
        High::eights(block, half, column, end, codes, Words<KQuantBlock>::LOW);
    }

    // What 16 weights share: half of those of number `number` of the block's 32.
    static DEVICE Affine scale_at(const u8* block, int number, int half) {
        const u8* const d = block + Scales::D_AT;
        Affine scale = {__fmul_rn(half_to_float(u16(load_u16(d))), Scales::scale_of(block, number, half)), 0};
        if constexpr (HAS_MIN)
            scale.m = __fmul_rn(half_to_float(u16(load_u16(d + 2))), Scales::minimum_of(block, number, half));
        return scale;
    }

    // What byte j of such codes reads as: the reference formula in float32. With a minimum d * q has 22 bits at most, and
    // is exact.
    static DEVICE float read(u32 codes, int j, Affine scale, float) {
        const float q = __fadd_rn(__int_as_float(__byte_perm(codes, 0x4b000000, 0x7440 + j)), -(8388608.f + OFFSET));
        return HAS_MIN ? __fmaf_rn(q, scale.d, -scale.m) : __fmul_rn(q, scale.d);
    }

    // This lane's share of the blocks of rows g and g + 8 (lane = 4 g + i). dmin changes its sign ...
    static DEVICE void gather(LaneShare<KQuantBlock> (&shares)[4], const u8* row, const u8* row8, int lane) {
        const int i = lane % 4;
        Words<KQuantBlock>::gather(shares, row, 0, i);
        Words<KQuantBlock>::gather(shares, row8, 1, i);
        const u8* const d = (i % 2 ? row8 : row) + Scales::D_AT;
        const u32 group = HAS_MIN && i >= 2 ? load_u16(d + 2) ^ 0x8000 : load_u16(d);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            shares[part].scale = Scales::lane_share(row, part, i) | Scales::lane_share(row8, part, i) << 8;
            shares[part].group = group;
        }
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<KQuantBlock> (&shares)[4], u8* row, u8* row8, int lane) {
        const int i = lane % 4;
        Words<KQuantBlock>::scatter(shares, row, 0, i);
        Words<KQuantBlock>::scatter(shares, row8, 1, i);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            Scales::put_lane_share(row, part, i, shares[part].scale & 0xff);
            Scales::put_lane_share(row8, part, i, shares[part].scale >> 8);
        }
        u8* const d = (i % 2 ? row8 : row) + Scales::D_AT;
        if (i < 2) store_u16(d, shares[0].group);
        if (i >= 2 && HAS_MIN) store_u16(d + 2, shares[0].group ^ 0x8000);
    }
};

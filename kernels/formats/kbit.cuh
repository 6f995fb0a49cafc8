// k-bit blocks: 32 codes of 2 to 5 bits as bit planes, and one scale. W = codebook[q] * absmax.
//
// Storage of a block: BITS words of 32 bits, bit j of word p being bit p of code j | absmax, an E4M4 byte or float16.
// Blocks start at any address.
//
// SIGNED_CODEBOOK, of 5 bits: codebook[q] = -codebook[31 - q], so that a code is a magnitude's, q - 16 or 15 - q, and a sign.
// MASKED_CODEBOOK, of 2: likewise, and the two magnitudes are such that a mask can make them (core/masked.cuh).
#pragma once
#include "pairs.cuh"

template <int BITS_, bool IS_E4M4, Coding CODING_ = CODEBOOK>
struct KbitBlock : Ungrouped {
    static constexpr int BITS = BITS_, COLUMNS = 32;
    static constexpr Coding CODING = CODING_;
    static constexpr bool SIGNED = CODING == SIGNED_CODEBOOK;
    static constexpr Scaling SCALING = IS_E4M4 ? E4M4 : HALF;
    static constexpr bool HAS_MIN = false;
    static constexpr int SCALE_AT = BITS * 4, BLOCK_BYTES = SCALE_AT + (IS_E4M4 ? 1 : 2);

    // Bytes of a 16 x 64 tile in each plane of the fragment layout (core/codebook.cuh).
    static constexpr int LOW_BYTES = BITS / 2 * 256, HIGH_BYTES = BITS % 2 * 128, SCALE_BYTES = IS_E4M4 ? 32 : 64;

    static DEVICE u32 scale_bits(const u8* block) {
        return block[SCALE_AT] | (IS_E4M4 ? 0 : block[SCALE_AT + 1] << 8);
    }

    static DEVICE void store_scale_bits(u8* block, u32 bits) {
        block[SCALE_AT] = u8(bits);
        if constexpr (!IS_E4M4) block[SCALE_AT + 1] = u8(bits >> 8);
    }

    // absmax: an E4M4 byte has the exponent and mantissa bits of a float16 number 2^-4 times its own.
    static DEVICE float scale(u32 bits) {
        return IS_E4M4 ? half_to_float(u16(bits << 6)) * 16 : half_to_float(u16(bits));
    }

    // The greatest magnitude of a weight with this scale (no entry of a codebook is greater than 1); NaN for NaN.
    static DEVICE float peak(const LaneShare<KbitBlock>& share) { return fabsf(scale(share.scale)); }

    // Codes of eight elements from j on, in the last bits of a byte each; of up to 4 bits with others above them.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8*) {
        u32 planes = 0;
#pragma unroll
        for (int p = 0; p < BITS && p < 4; p++) planes |= block[p * 4 + j / 8] << p * 8;
        const u32 nibbles = nibbles_of(planes);
        if constexpr (BITS < 5) return make_uint2(nibbles, nibbles >> 4);
        uint2 codes = make_uint2(nibbles & 0x0f0f0f0f, nibbles >> 4 & 0x0f0f0f0f);
        add_plane(codes, block[16 + j / 8], 4);
        return codes;
    }

    // What byte j of such codes reads as: the formula in float32.
    static DEVICE float read(u32 codes, int j, u32 scale_bits, float entry) {
        return __fmul_rn(entry_of(entry, codes, j), scale(scale_bits));
    }

    // The words of a block in shared memory, and up to three bytes beyond it.
    static DEVICE void load_planes(const u8* block, u32 (&planes)[BITS]) {
        const u32 shift = u32(reinterpret_cast<u64>(block)) % 4 * 8;
        const u32* from = reinterpret_cast<const u32*>(block - shift / 8);
#pragma unroll
        for (int p = 0; p < BITS; p++) planes[p] = __funnelshift_r(from[p], from[p + 1], shift);
    }

    static DEVICE void store_plane(u8* block, int p, u32 bits) {
#pragma unroll
        for (int j = 0; j < 4; j++) block[p * 4 + j] = u8(bits >> 8 * j);
    }

    // This lane's share of a tile, from the blocks of rows g and g + 8 (lane = 4 g + i) ...
    static DEVICE LaneShare<KbitBlock> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<KbitBlock> share = {};
        const int i = lane % 4;
        share.scale = scale_bits((i < 2 ? row : row8) + i % 2 * BLOCK_BYTES);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            const u8* block = (j ? row8 : row) + b * BLOCK_BYTES;
            u32 planes[BITS], pairs = 0;  // byte m: a pair, of 5 bits without the fifth ones
            load_planes(block, planes);
#pragma unroll
            for (int p = 0; p < BITS; p++) planes[p] = planes[p] >> 2 * i & 0x03030303;
            if constexpr (SIGNED) {
                planes[4] ^= 0x03030303;  // set: negative
#pragma unroll
                for (int p = 0; p < 4; p++) planes[p] ^= planes[4];
            }
#pragma unroll
            for (int p = 0; p < BITS && p < 4; p++) pairs |= planes[p] << 2 * p;
            if constexpr (SIGNED) {
                share.low[2 * b + j] = pairs;
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const u32 signs = planes[4] >> 8 * m;
                    share.high[0] |= ((signs & 1) << 15 | (signs & 2) << 30) >> (8 * b + 4 * j + m);
                }
            } else {
                Pairs<KbitBlock>::put(share, b, j, pairs, BITS == 5 ? planes[BITS - 1] : 0);
            }
        }
        return share;
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<KbitBlock>& share, u8* row, u8* row8, int lane) {
        const int i = lane % 4;
        u32 planes[4 * BITS];  // of the blocks of both rows, this lane's bits
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            u32 pairs, fifths, flips = 0;
            if constexpr (SIGNED) {
                pairs = share.low[2 * b + j];
#pragma unroll
                for (int m = 0; m < 4; m++) {
                    const u32 signs = share.high[0] << (8 * b + 4 * j + m);
                    flips |= ((signs >> 15 & 1) | (signs >> 30 & 2)) << 8 * m;
                }
                fifths = flips ^ 0x03030303;
            } else {
                pairs = Pairs<KbitBlock>::get(share, b, j, fifths);
            }
#pragma unroll
            for (int p = 0; p < BITS; p++) {
                const u32 two = p == 4 ? fifths : (pairs >> 2 * p & 0x03030303) ^ flips;
                planes[part * BITS + p] = two << 2 * i;
            }
        }
        auto block_of = [&](int part) { return (part < 2 ? row : row8) + part % 2 * BLOCK_BYTES; };
#pragma unroll
        for (int four = 0; four < BITS; four++) {  // planes next to each other: in different banks
            const int own = four * 4 + i;
            store_plane(block_of(own / BITS), own % BITS, own_of_row(planes + four * 4, i));
        }
        store_scale_bits(block_of(i), share.scale);
    }
};

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

    static DEVICE void store_plane(u8* block, int p, u32 bits) {
#pragma unroll
        for (int j = 0; j < 4; j++) block[p * 4 + j] = u8(bits >> 8 * j);
    }

    // This lane's share of a tile, from the blocks of rows g and g + 8 (lane = 4 g + i). It wants two columns in eight of four
    // blocks, k = 2 j + b of row g + 8 j; so lane k brings block k, and the four lanes exchange parts ...
    static DEVICE LaneShare<KbitBlock> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<KbitBlock> share = {};
        const int i = lane % 4;
        const u8* const block = (i < 2 ? row : row8) + i % 2 * BLOCK_BYTES;
        share.scale = scale_bits(block);
        u32 planes[BITS];
        load_words(block, planes);
        if constexpr (BITS == 2) {
            planes_to_pairs(planes, i);
            Pairs<KbitBlock>::put_both(share, planes);
        } else {
            u32 four[4] = {}, last = 0;
            if constexpr (SIGNED) planes[4] = ~planes[4];  // set: negative
#pragma unroll
            for (int p = 0; p < BITS && p < 4; p++) four[p] = SIGNED ? planes[p] ^ planes[BITS - 1] : planes[p];
            planes_to_pairs(four, i);
            if constexpr (BITS == 5) last = plane_to_pairs(planes[4], i);
            if constexpr (SIGNED) {
#pragma unroll
                for (int k = 0; k < 4; k++) share.low[k % 2 * 2 + k / 2] = four[k];
                share.high[0] = signs_of(last);
            } else {
                Pairs<KbitBlock>::put_all(share, four, last);
            }
        }
        return share;
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<KbitBlock>& share, u8* row, u8* row8, int lane) {
        const int i = lane % 4;
        u32 planes[BITS];
        if constexpr (BITS == 2) {
            Pairs<KbitBlock>::get_both(share, planes);
            pairs_to_planes(planes, i);
        } else {
            u32 four[4], last = 0;
            if constexpr (SIGNED) {
#pragma unroll
                for (int k = 0; k < 4; k++) four[k] = share.low[k % 2 * 2 + k / 2];
                last = plane_of(share.high[0]);
            } else {
                Pairs<KbitBlock>::get_all(share, four, last);
            }
            pairs_to_planes(four, i);
            if constexpr (BITS == 5) planes[4] = pairs_to_plane(last, i);
#pragma unroll
            for (int p = 0; p < BITS && p < 4; p++) planes[p] = SIGNED ? four[p] ^ planes[BITS - 1] : four[p];
            if constexpr (SIGNED) planes[4] = ~planes[4];
        }
        u8* const block = (i < 2 ? row : row8) + i % 2 * BLOCK_BYTES;
#pragma unroll
        for (int p = 0; p < BITS; p++) {  // rows g and g + 8 begin in the same bank: one has its next plane at a time
            const int next = (p + 1) % BITS;
            store_plane(block, i < 2 ? p : next, i < 2 ? planes[p] : planes[next]);
        }
        store_scale_bits(block, share.scale);
    }

private:
    // Bits 2 m + e of byte 2 j + b of a plane, of pair p = 8 b + 4 j + m, to bit 16 e + 15 - p: to 16 e + p, and all of them
    // backwards, but the halves.
    static DEVICE u32 signs_of(u32 plane) {
        const u32 bits = __brev(with_last_first(plane));
        return __funnelshift_l(bits, bits, 16);
    }

    static DEVICE u32 plane_of(u32 signs) { return with_first_last(__brev(__funnelshift_l(signs, signs, 16))); }
};

template <int BITS, bool IS_E4M4, Coding CODING>
constexpr bool HAS_PLANES<KbitBlock<BITS, IS_E4M4, CODING>> = true;

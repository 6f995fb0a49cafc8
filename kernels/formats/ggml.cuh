// ggml's blocks of 32 weights: where the bits are in storage, how they are quantized, and how the fragment
// layout holds them. A format is one instance of this template.
//
// Storage of a block: float16 d | float16 m (with a minimum) or s (with a sum) | 4 bytes of fifth bits (5 bits) |
// codes.
// Codes of 4 bits: byte j holds code j in its low nibble and code j + 16 in its high one. Bit j of the fifth
// bits belongs to code j. Codes of 8 bits are signed bytes in order.
#pragma once
#include "fields.cuh"

template <int BITS_, bool HAS_MIN_, bool HAS_SUM_ = false>
struct GgmlBlock : Ungrouped {
    static constexpr int BITS = BITS_, COLUMNS = 32;
    static constexpr Coding CODING = INTEGERS;
    static constexpr Scaling SCALING = HAS_MIN_ ? HALF_AND_MIN : HALF;
    static constexpr bool HAS_MIN = HAS_MIN_;                           // W = d * q + m, else W = d * (q - OFFSET)
    static constexpr bool HAS_SUM = HAS_SUM_;                           // d * sum(q) is stored after d
    static constexpr int OFFSET = HAS_MIN || BITS == 8 ? 0 : 1 << (BITS - 1);
    static constexpr bool HAS_FIFTH = BITS == 5;
    static constexpr int ZERO = BITS == 8 ? 128 : OFFSET;               // what stands for 0 once codes are unsigned

    static constexpr int FIFTH_AT = HAS_MIN || HAS_SUM ? 4 : 2;                    // byte offsets in a block
    static constexpr int CODES_AT = FIFTH_AT + (HAS_FIFTH ? 4 : 0);
    static constexpr int BLOCK_BYTES = CODES_AT + (BITS == 8 ? 32 : 16);

    // Bytes of a 16 x 64 tile in each plane of the fragment layout.
    static constexpr int LOW_BYTES = BITS == 8 ? 1024 : 512;
    static constexpr int HIGH_BYTES = HAS_FIFTH ? 128 : 0;
    static constexpr int SCALE_BYTES = HAS_MIN ? 128 : 64;

    // Codes of eight elements from j on, a byte each: unsigned, ZERO meaning 0.
    static DEVICE uint2 load_codes(const u8* block, int j, const u8* end) {
        uint2 codes = load_eight(block + CODES_AT + (BITS == 8 ? j : j % 16), end);
        if constexpr (BITS == 8)
            codes = make_uint2(codes.x ^ 0x80808080, codes.y ^ 0x80808080);
        else
            codes = codes_at(codes, j / 16 * 4, 15);
        if constexpr (HAS_FIFTH) add_plane(codes, block[FIFTH_AT + j / 8], 4);
        return codes;
    }

    // Scale in the low half, minimum (or the sum) in the high half.
    static DEVICE u32 scale_bits(const u8* block) {
        return load_u16(block) | (FIFTH_AT == 4 ? load_u16(block + 2) << 16 : 0);
    }

    // The greatest magnitude of a weight with these bits; NaN for NaN.
    static DEVICE float peak(const LaneShare<GgmlBlock>& share) {
        const u32 scale = share.scale;
        constexpr float code = HAS_MIN ? (1 << BITS) - 1 : OFFSET ? OFFSET : 128;
        const float m = HAS_MIN ? fabsf(half_to_float(u16(scale >> 16))) : 0;
        return fabsf(half_to_float(u16(scale))) * code + m;
    }

    static DEVICE void store_scale_bits(u8* block, u32 bits) {
        store_u16(block, bits);
        if constexpr (FIFTH_AT == 4) store_u16(block + 2, bits >> 16);
    }

    // What byte j of such codes reads as: the reference formula in float32. q is exact, and d * q of 16 bits, so there
    // is one rounding.
    static DEVICE float read(u32 codes, int j, u32 scale, float) {
        // A code in the last byte of 2^23's bits reads 2^23 + code.
        const float q = __fadd_rn(__int_as_float(__byte_perm(codes, 0x4b000000, 0x7440 + j)), -(8388608.f + ZERO));
        const float d = half_to_float(u16(scale));
        return HAS_MIN ? __fmaf_rn(q, d, half_to_float(u16(scale >> 16))) : __fmul_rn(q, d);
    }

    // This lane's share of a tile, from the blocks of rows g and g + 8 (lane = 4 g + i) ...
    static DEVICE LaneShare<GgmlBlock> gather(const u8* row, const u8* row8, int lane) {
        LaneShare<GgmlBlock> share = {};
        const int g = lane / 4, i = lane % 4;
        const u8* own = (i < 2 ? row : row8) + i % 2 * BLOCK_BYTES;
        share.scale = scale_bits(own);
        u32 own_fifth = 0;
        if constexpr (HAS_FIFTH) own_fifth = load_u32(own + FIFTH_AT);
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            const u8* codes = (j ? row8 : row) + b * BLOCK_BYTES + CODES_AT + 2 * i;
            if constexpr (BITS == 8) {
                share.low[b * 4 + j] = gather_bytes(codes) ^ 0x80808080;
                share.low[b * 4 + 2 + j] = gather_bytes(codes + 16) ^ 0x80808080;
            } else {
                const u32 bytes = gather_bytes(codes);
                u32 fifths = 0;
                if constexpr (HAS_FIFTH) fifths = __shfl_sync(~0u, own_fifth, g * 4 + part) >> 2 * i;
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    u32 own = bytes >> 4 * step & 0x0f0f0f0f;
                    if constexpr (HAS_FIFTH) own = and_or(spread(fifths >> 16 * step), 0x10101010, own);
                    Words<GgmlBlock>::put_codes(share, 2 * b + step, j, own);
                }
            }
        }
        return share;
    }

    // ... and back.
    static DEVICE void scatter(const LaneShare<GgmlBlock>& share, u8* row, u8* row8, int lane) {
        const int i = lane % 4;
        u32 fifths[4] = {};
#pragma unroll
        for (int part = 0; part < 4; part++) {
            const int j = part / 2, b = part % 2;
            u8* codes = (j ? row8 : row) + b * BLOCK_BYTES + CODES_AT + 2 * i;
            if constexpr (BITS == 8) {
                scatter_bytes(codes, share.low[b * 4 + j] ^ 0x80808080);
                scatter_bytes(codes + 16, share.low[b * 4 + 2 + j] ^ 0x80808080);
            } else {
                u32 bytes = 0, bits = 0;
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    const u32 own = Words<GgmlBlock>::get_codes(share, 2 * b + step, j);
                    bytes |= (own & 0x0f0f0f0f) << 4 * step;
                    if constexpr (HAS_FIFTH) bits |= joined(own) << 16 * step;
                }
                scatter_bytes(codes, bytes);
                fifths[part] = bits << 2 * i;
            }
        }
        u8* own = (i < 2 ? row : row8) + i % 2 * BLOCK_BYTES;
        store_scale_bits(own, share.scale);
        if constexpr (HAS_FIFTH) store_u32(own + FIFTH_AT, own_of_row(fifths, i));
    }

private:
    // Fifth bits of columns 2i, 2i+1, 2i+8 and 2i+9 of 16, at bits 0, 1, 8 and 9, to those of codes in bytes t + 2 e, and to
    // others; back.
    static DEVICE u32 spread(u32 bits) { return (bits & 0x0303) * (1 << 4 | 1 << 19); }
    static DEVICE u32 joined(u32 codes) { return (codes >> 4 & 0x0101) | (codes >> 19 & 0x0202); }

    // Bytes 2i, 2i+8, 2i+1, 2i+9 of 16 bytes, given the first: a lane's share of them, in the order of tile.cuh.
    static DEVICE u32 gather_bytes(const u8* p) { return __byte_perm(load_u16(p), load_u16(p + 8), 0x5140); }

    static DEVICE void scatter_bytes(u8* p, u32 bytes) {
        store_u16(p, __byte_perm(bytes, 0, 0x4420));
        store_u16(p + 8, __byte_perm(bytes, 0, 0x4431));
    }
};

// ggml's blocks of 32 weights: where the bits are in storage, how they are quantized, and how the fragment
// layout holds them. A format is one instance of this template.
//
// Storage of a block: float16 d | float16 m (with a minimum) or s (with a sum) | 4 bytes of fifth bits (5 bits) |
// codes.
// Codes of 4 bits: byte j holds code j in its low nibble and code j + 16 in its high one. Bit j of the fifth
// bits belongs to code j. Codes of 8 bits are signed bytes in order.
#pragma once
#include "../core/ptx.cuh"

template <int BITS_, bool HAS_MIN_, bool HAS_SUM_ = false>
struct GgmlBlock {
    static constexpr int BITS = BITS_;
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
    static constexpr int FIFTH_BYTES = HAS_FIFTH ? 128 : 0;
    static constexpr int SCALE_BYTES = HAS_MIN ? 128 : 64;

    // Code j of a block, as stored: 0 .. 2^BITS - 1, or a signed byte's bits.
    static DEVICE u32 code(const u8* block, int j) {
        if constexpr (BITS == 8) return block[CODES_AT + j];
        u32 q = block[CODES_AT + (j & 15)] >> (j >> 4) * 4 & 15;
        if constexpr (HAS_FIFTH) q |= u32(block[FIFTH_AT + (j >> 3)] >> (j & 7) & 1) << 4;
        return q;
    }

    // Scale in the low half, minimum (or the sum) in the high half.
    static DEVICE u32 scale_bits(const u8* block) {
        return load_u16(block) | (FIFTH_AT == 4 ? load_u16(block + 2) << 16 : 0);
    }

    static DEVICE void store_scale_bits(u8* block, u32 bits) {
        *reinterpret_cast<u16*>(block) = u16(bits);
        if constexpr (FIFTH_AT == 4) *reinterpret_cast<u16*>(block + 2) = u16(bits >> 16);
    }

    // The reference formula in float32: q is exact, so there is one rounding without a minimum, two with it.
    static DEVICE float value(u32 code, u32 scale) {
        float d = half_to_float(u16(scale));
        float q = BITS == 8 ? float(s8(code)) : float(int(code) - OFFSET);
        if constexpr (HAS_MIN) return __fadd_rn(__fmul_rn(q, d), half_to_float(u16(scale >> 16)));
        return __fmul_rn(q, d);
    }
};

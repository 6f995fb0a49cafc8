// Codes that are integers: W = d (q - OFFSET), d q + m or d (q - zero).
//
// The picture is in tile.cuh. A mask selects the two codes of a register, and their place in a float16 number is
// their value: under the exponent of a subnormal number exactly q times a power of two, under that of 1024 a number
// from which little has to be subtracted.
#pragma once
#include "convert.cuh"
#include "tile.cuh"

template <class F>
struct IntegerCodes {
    static constexpr int TABLE_BYTES = 0;
    static constexpr bool SUMS = true;  // exact codes need the sums of the activations, for offset or minimum

    DEVICE IntegerCodes(const u16*, int) {}
    DEVICE void fill(int, int) {}

    // Exact codes of step h: a code q is the subnormal float16 number q * 2^-24, in rows g + 8 of 4 and 5 bits
    // q * 2^-20: masking is all it takes, and the powers of two leave with the accumulators (UNSCALE).
    DEVICE void codes(const Tile<F>& tile, int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if constexpr (F::BITS == 8)
                a[r] = __byte_perm(tile.low[h / 2 * 4 + h % 2 * 2 + r % 2] ^ 0x80808080, 0, r < 2 ? 0x4240 : 0x4341);
            else
                a[r] = masked(tile, h, r, 0);
        }
    }

    static constexpr float UNSCALE = 16777216.f;                             // 2^24, of rows g
    static constexpr float UNSCALE_8 = F::BITS == 8 ? 16777216.f : 1048576.f;  // of rows g + 8

    // What `codes` gives for the code -1 (OFFSET times it shifts codes to zero), or for 1 where there is a minimum.
    // As operand A it makes sums of the activations in the units of the accumulators.
    static DEVICE void unit(u32 (&a)[4]) {
        constexpr u32 one = F::HAS_MIN ? 1 : 0x8000 | F::ZERO;
        constexpr u32 one_8 = F::HAS_MIN ? (F::BITS == 8 ? 1 : 16) : 0x8000 | F::ZERO * (F::BITS == 8 ? 1 : 16);
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = (r % 2 ? one_8 : one) * 0x00010001;
    }

    // The weights of step h in float16, rounded once. A code q in the mantissa under the exponent of 1024 reads
    // 1024 + q, four bits higher 1024 + 16 q.
    DEVICE void weights(const Tile<F>& tile, int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            u32 q;
            if constexpr (F::BITS == 8) {
                q = int8_to_half2(tile.low[h / 2 * 4 + h % 2 * 2 + r % 2], r / 2);
            } else if (r % 2) {
                q = corrected_16<F::OFFSET>(masked(tile, h, r, 0x64006400));
            } else {
                q = corrected<F::OFFSET>(masked(tile, h, r, 0x64006400));
            }
            u32 d = tile.scale_pair(h, r % 2);
            if constexpr (F::SCALING == HALF_AND_MIN)
                a[r] = fma_half2(q, d, tile.scale_pair(h, r % 2, 1));
            else if constexpr (F::SCALING == HALF_AND_ZERO)
                a[r] = mul_half2(sub_half2(q, tile.scale_pair(h, r % 2, 1)), d);
            else
                a[r] = mul_half2(q, d);
        }
    }

private:
    // Both elements of register r at step h, over `bits`: at bit 0 of each half in rows g, at bit 4 in rows g + 8.
    static DEVICE u32 masked(const Tile<F>& tile, int h, int r, u32 bits) {
        const u32 mask = r % 2 ? 0x00f000f0 : 0x000f000f;
        u32 q = and_or(r < 2 ? tile.low[h] : tile.low[h] >> 8, mask, bits);
        if constexpr (F::HIGH_BYTES > 0) {
            const u32 turned = __funnelshift_r(tile.high, tile.high, 2 * (h & 1) + 8 * (h >> 1));
            q = and_or(r < 2 ? turned : turned >> 1, r % 2 ? 0x01000100 : 0x00100010, q);
        }
        return q;
    }
};

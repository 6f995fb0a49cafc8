// Codes that are integers: W = d (q - ZERO), d q + m or d (q - zero).
//
// The pictures are in tile.cuh and places.cuh. A mask selects the two codes of a register, and their place in a subnormal
// float16 number is their value: exactly q times a power of two.
#pragma once
#include "places.cuh"
#include "tile.cuh"

template <class F>
struct IntegerCodes {
    static constexpr int TABLE_BYTES = 0;
    static constexpr bool SUMS = true;  // exact codes need the sums of the activations, for offset or minimum

    DEVICE IntegerCodes(const u16*, int) {}
    DEVICE void fill(int, int) {}

    // Exact codes of step h: a code q is the subnormal float16 number q * 2^-24, in rows g + 8 q * 2^(HIGHER - 24): masking
    // is all it takes. The powers of two leave with the accumulators, by `unscale` or the factors of rows.
    DEVICE void codes(const Tile<F>& tile, int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = code(tile, h, r);
    }

    // Exact codes of block b's two steps times integer scales, in the same units: columns 2i, 2i+1 of both steps, then
    // columns 2i+8, 2i+9 of both.
    DEVICE void products(const Tile<F>& tile, int b, u32 (&a)[2][4]) const {
#pragma unroll
        for (int step = 0; step < 2; step++) {
            const u32 s = tile.integer_scales(2 * b + step);
#pragma unroll
            for (int r = 0; r < 4; r++)
                a[r / 2][2 * step + r % 2] = mul_half2(code(tile, 2 * b + step, r), twice(s, r % 2));
        }
    }

    // Integer minimums of these columns, of either half, in units of 2^-24.
    DEVICE void minimums(const Tile<F>& tile, int b, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = tile.minimum_bits(2 * b + r / 2, r % 2);
    }

    // Row g + 8's codes stand so many times higher than row g's.
    static constexpr int TIMES_8 = 1 << HIGHER<F>;

    // What brings sums of codes to their own units.
    static DEVICE float unscale(int row8) { return 16777216.f / (row8 ? TIMES_8 : 1); }

    // What `codes` gives for the code that stands for 0, negative, or for 1 where there is a minimum: as operand A it
    // makes sums of the activations in the units of the accumulators. Beside factors of rows minimums are in these units
    // themselves, and integer ones, of all rows, in those of rows g.
    static DEVICE void unit(u32 (&a)[4]) {
        constexpr bool LIFTED = ROW_FACTORS<F> && F::SCALING != HALF_AND_ZERO;
#pragma unroll
        for (int r = 0; r < 4; r++)
            a[r] = !F::HAS_MIN ? zero(r) : !LIFTED ? one(r) : F::SCALING >= BYTES ? one(0) : 0x3c003c00;
    }

    // The weights of step h in float16, as long as they are normal numbers rounded once, or a few times where scales are
    // products.
    DEVICE void weights(const Tile<F>& tile, int h, u32 (&a)[4]) const {
        static_assert(ROW_FACTORS<F>, "codes are subnormal numbers");
        if constexpr (F::SCALING >= BYTES)
            of_products(tile, h, a);
        else
            of_scales(tile, h, a);
    }

private:
    // One multiplication and addition makes weights of codes that are subnormal numbers, but for a zero point, which is
    // subtracted first: that is exact.
    static DEVICE void of_scales(const Tile<F>& tile, int h, u32 (&a)[4]) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 d = tile.scale_pair(h, r % 2);
            if constexpr (F::SCALING == HALF_AND_ZERO)
                a[r] = mul_half2(sub_half2(code(tile, h, r), mul_half2(tile.scale_pair(h, r % 2, 1), one(r))), d);
            else if constexpr (F::HAS_MIN)
                a[r] = fma_half2(code(tile, h, r), d, tile.scale_pair(h, r % 2, 1));
            else
                a[r] = fma_half2(code(tile, h, r), d, tile.scaled_pair(h, r % 2, zero(r)));
        }
    }

    // Both elements of register r at step h as subnormal numbers.
    static DEVICE u32 code(const Tile<F>& tile, int h, int r) {
        if constexpr (F::BITS == 8)
            return __byte_perm(tile.low[h / 2 * 4 + h % 2 * 2 + r % 2], 0, r < 2 ? 0x4240 : 0x4341);
        else
            return Places<F::BITS>::masked([&](int w) { return tile.word(w); }, h, r);
    }

    // The codes 1 and, negative, that which stands for 0 in register r, twice.
    static DEVICE constexpr u32 one(int r) { return (r % 2 ? TIMES_8 : 1) * 0x00010001; }
    static DEVICE constexpr u32 zero(int r) { return 0x80008000 | F::ZERO * one(r); }

    // Weights of codes with integer scales and minimums (tile.cuh), whose products d * s and dmin * m are rounded. All of a
    // row's registers would have that error: the second of a step has what both lack, and of steps that share a scale the
    // last one what all four still do. Of a scale's error that is what it is for the mean code. (Without minimums the mean
    // code stands for about 0.)
    static DEVICE void of_products(const Tile<F>& tile, int h, u32 (&a)[4]) {
        const u32 s = tile.integer_scales(h), d = mul_half2(s, tile.group[0]);
        u32 first, second;
        if constexpr (F::HAS_MIN) {
            const u32 m = tile.integer_minimums(h);
            first = mul_half2(m, tile.group[1]);
            const u32 lost = fma_half2(multiply_subtract_half2(s, tile.group[0], d), (1 << (F::BITS - 1)) * both(1),
                                       multiply_subtract_half2(m, tile.group[1], first));
            second = fma_half2(lost, 0x40004000, first);  // 2
            if (!Tile<F>::STEP_SCALES && h % 2)
                second = fma_half2(lost, 0x44004400, multiply_subtract_half2(first, 0x40004000, second));  // 4, 2
        } else {
            first = second = mul_half2(d, 0x80008000 | both(F::ZERO));
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
            a[r] = fma_half2(code(tile, h, r), twice(d, r % 2), twice(r < 2 ? first : second, r % 2));
    }

    // What a code of row g, and the same of row g + 8, is.
    static DEVICE constexpr u32 both(int code) { return code * (1 | TIMES_8 << 16); }
};

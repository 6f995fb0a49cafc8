// Codes that are integers: W = d (q - ZERO), d q + m or d (q - zero).
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

    // Exact codes of step h: a code q is the subnormal float16 number q * 2^-24, in rows g + 8 of 4 to 6 bits
    // q * 2^-20, of 2 and 3 bits q * 2^-22: masking is all it takes. The powers of two leave with the accumulators, by
    // UNSCALE or the factors of rows.
    DEVICE void codes(const Tile<F>& tile, int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = code(tile, h, r);
    }

    // Exact codes of block b's two steps times integer scales, in the same units: columns 2i, 2i+1 of both steps, then
    // columns 2i+8, 2i+9 of both.
    DEVICE void products(const Tile<F>& tile, int b, u32 (&a)[2][4]) const {
#pragma unroll
        for (int step = 0; step < 2; step++) {
            const u32 s = tile.integer_halves(2 * b + step, 0);
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
    static constexpr float UNSCALE = 16777216.f;             // 2^24, of rows g
    static constexpr float UNSCALE_8 = UNSCALE / TIMES_8;  // of rows g + 8

    // What `codes` gives for the code that stands for 0, negative, or for 1 where there is a minimum: as operand A it
    // makes sums of the activations in the units of the accumulators. Minimums beside factors of rows are in these units
    // themselves.
    static DEVICE void unit(u32 (&a)[4]) {
#pragma unroll
        for (int r = 0; r < 4; r++)
            a[r] = !F::HAS_MIN ? zero(r) : ROW_FACTORS<F> ? 0x3c003c00 : (r % 2 ? TIMES_8 : 1) * 0x00010001;
    }

    // The weights of step h in float16, rounded once as long as they are normal numbers. A code q in the mantissa under
    // the exponent of 1024 reads 1024 + q, four bits higher 1024 + 16 q, two bits higher 1024 + 4 q.
    DEVICE void weights(const Tile<F>& tile, int h, u32 (&a)[4]) const {
        if constexpr (ROW_FACTORS<F>)
            of_subnormals(tile, h, a);
        else if constexpr (F::SCALING >= BYTES && F::HAS_MIN)
            above_minimums(tile, h, a);
        else
            scaled(tile, h, a);
    }

private:
    // One multiplication and addition makes weights of codes that are subnormal numbers.
    static DEVICE void of_subnormals(const Tile<F>& tile, int h, u32 (&a)[4]) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 d = tile.scale_pair(h, r % 2);
            if constexpr (F::HAS_MIN)
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
            return masked(tile, h, r, 0);
    }

    // The code that stands for 0 in register r, negative, twice.
    static DEVICE constexpr u32 zero(int r) { return (0x8000 | F::ZERO * (r % 2 ? TIMES_8 : 1)) * 0x00010001; }

    static DEVICE void scaled(const Tile<F>& tile, int h, u32 (&a)[4]) {
        static_assert(F::BITS < 8, "codes of 8 bits have factors of rows");
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 bits = masked(tile, h, r, 0x64006400);
            const u32 q = r % 2 ? corrected_times<F::OFFSET, TIMES_8>(bits) : corrected<F::OFFSET>(bits);
            const u32 d = tile.scale_pair(h, r % 2);
            if constexpr (F::SCALING == HALF_AND_ZERO)
                a[r] = mul_half2(sub_half2(q, tile.scale_pair(h, r % 2, 1)), d);
            else
                a[r] = mul_half2(q, d);
        }
    }

    // d * (s * q) - dmin * m with integers s and m (tile.cuh): s * q is exact. A minimum's rounding would be the same
    // error for all its columns: the last of a lane's registers for these has what the others lack.
    static DEVICE void above_minimums(const Tile<F>& tile, int h, u32 (&a)[4]) {
        constexpr u32 part = TIMES_8 == 4 ? 0x34003c00 : 0x2c003c00, minus = TIMES_8 == 4 ? 0xdc00e400 : 0xd400e400;
        const u32 s = fma_half2(tile.integer_pair(h, 0), part, minus);  // of row g + 8 what takes codes back, too
        const u32 base = mul_half2(s, 0xe400e400);                      // -1024 times
        const u32 m = tile.integer_halves(h, 1), factor = tile.group[1];
        const u32 first = mul_half2(m, factor);
        const bool ends = Tile<F>::STEP_SCALES || h % 2;
        const u32 registers = Tile<F>::STEP_SCALES ? 0x40004000 : 0x44004400;  // 2 or 4
        const u32 last = fma_half2(multiply_subtract_half2(m, factor, first), registers, first);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const u32 product = fma_half2(masked(tile, h, r, 0x64006400), twice(s, r % 2), twice(base, r % 2));
            a[r] = fma_half2(product, twice(tile.group[0], r % 2), twice(ends && r >= 2 ? last : first, r % 2));
        }
    }

    // Both elements of register r at step h, over `bits`: at bit 0 of each half in rows g, at bit 4 or 2 in rows g + 8.
    static DEVICE u32 masked(const Tile<F>& tile, int h, int r, u32 bits) {
        constexpr int LOW = F::LOW_BYTES == 256 ? 2 : 4, HIGH = F::BITS - LOW;
        const u32 mask = ((1 << LOW) - 1) * 0x00010001 << (r % 2 ? LOW : 0);
        const u32 word = LOW == 2 ? tile.low[h / 2] >> 4 * (h % 2) : tile.low[h];
        u32 q = and_or(r < 2 ? word : word >> 8, mask, bits);
        if constexpr (F::HIGH_BYTES > 0) {
            const u32 other = tile.high[HIGH == 2 ? h / 2 : 0];
            const u32 turned = __funnelshift_r(other, other, turn_of<F::BITS>(h));
            const u32 high_mask = ((1 << HIGH) - 1) * 0x00010001 << (r % 2 ? 2 * LOW : LOW);
            q = and_or(r < 2 ? turned : turned >> HIGH, high_mask, q);
        }
        return q;
    }
};

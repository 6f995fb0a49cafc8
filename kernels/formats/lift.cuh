// How the scales of a row are lifted, in formats with ROW_FACTORS: multiplied by a power of two, 2^L, that follows from the
// greatest of them, so that weights are normal float16 numbers (the picture is in core/tile.cuh).
#pragma once
#include "../core/types.cuh"

// Whether a scale has a minimum beside it, which is a number and no code.
template <class F>
constexpr bool MINIMUMS = F::HAS_MIN && F::SCALING != HALF_AND_ZERO;

// The magnitude of a float16 number, 0 if it is not finite.
DEVICE float finite_half(u32 bits) { return (bits & 0x7c00) < 0x7c00 ? half_to_float(u16(bits & 0x7fff)) : 0; }

// What decides L, of a word of scales, as the bits of a float: the greatest finite one. A minimum counts as 2^-18 times as
// much, so that 2^-19 times as much is finite.
template <class F>
DEVICE u32 peak_to_lift(u32 word) {
    const float low = finite_half(word), high = F::SCALING == HALF_AND_ZERO ? 0 : finite_half(word >> 16);
    return __float_as_int(fmaxf(low, MINIMUMS<F> ? high * power_of_two(-18) : high));
}

// By how much more a number that multiplies integer minimums is lifted than what multiplies scales.
template <class F>
DEVICE int more_of_minimums(int row8) {
    return row8 ? HIGHER<F> : 0;
}

// What decides L, of a half of a word of the group plane, as the bits of a float: of what multiplies integer scales, of
// which the product must be finite, or minimums.
template <class F>
DEVICE u32 group_peak_to_lift(u32 bits, int row8, bool minimum) {
    if constexpr (GROUP_SCALES<F>)
        return minimum ? 0 : __float_as_int(finite_half(bits));  // a minimum is a zero point
    else
        return __float_as_int(finite_half(bits) * power_of_two(minimum ? more_of_minimums<F>(row8) : F::SCALE_BITS));
}

// The L of a row with this peak; 40 if it is 0.
DEVICE int row_lift_of(u32 peak) { return min(15 + 127 - int(peak >> 23), 40); }

// The C of row g, or g + 8.
template <class F>
DEVICE int code_exponent(int row8) {
    return 24 - (row8 ? HIGHER<F> : 0);
}

// The bits of the factor of a row with this L, and L again.
template <class F>
DEVICE u32 factor_of(int L, int row8) {
    return u32(127 + code_exponent<F>(row8) - L) << 7;
}

template <class F>
DEVICE int lift_by(u32 factor, int row8) {
    return 127 + code_exponent<F>(row8) - int(factor >> 7);
}

// The bits of a number times 2^exponent. What is not finite stays as it is.
DEVICE u32 lifted_half(u32 bits, int exponent) {
    bits &= 0xffff;
    if ((bits & 0x7c00) == 0x7c00) return bits;
    return u32(float_to_half(half_to_float(u16(bits)) * power_of_two(exponent)));
}

// A word of scales lifted; or brought back, where `direction` is -1. A zero point stays as it is.
template <class F>
DEVICE u32 lifted(u32 word, int L, int row8, int direction) {
    const int second = MINIMUMS<F> ? L - code_exponent<F>(row8) : L;
    const u32 high = F::SCALING == HALF_AND_ZERO ? word >> 16 : lifted_half(word >> 16, direction * second);
    return lifted_half(word, direction * L) | high << 16;
}

// A half of a word of the group plane, lifted, or back.
template <class F>
DEVICE u32 lifted_group(u32 bits, int L, int row8, bool minimum, int direction) {
    if (GROUP_SCALES<F> && minimum) return bits & 0xffff;
    return lifted_half(bits, direction * (minimum ? L + more_of_minimums<F>(row8) : L));
}

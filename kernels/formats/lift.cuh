// By how much the scales of a row are multiplied, in formats with ROW_FACTORS (the picture is in core/tile.cuh), and how.
#pragma once
#include "../core/types.cuh"

// What decides it, of a word of scales: the bits of the greatest finite one. A minimum counts as 2^-18 times as much, so
// that 2^-20 times as much is finite.
template <class F>
DEVICE u32 peak_to_lift(u32 word) {
    auto finite = [](u32 bits) { return (bits & 0x7fff) < 0x7c00 ? bits & 0x7fff : 0; };
    const u32 low = finite(word), high = finite(word >> 16);
    if constexpr (F::HAS_MIN) return max(low, high > 18 << 10 ? high - (18 << 10) : 0);
    return max(low, high);
}

// The L of a row with this peak, from 0 to 30.
DEVICE int lift_of(u32 peak) { return 30 - int(peak >> 10); }

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

// A word of scales lifted; or brought back, where `direction` is -1. What is not finite stays as it is.
template <class F>
DEVICE u32 lifted(u32 word, int L, int row8, int direction) {
    auto half = [](u32 bits, int exponent) {
        bits &= 0xffff;
        if ((bits & 0x7c00) == 0x7c00) return bits;
        return u32(float_to_half(half_to_float(u16(bits)) * power_of_two(exponent)));
    };
    const int second = F::HAS_MIN ? L - code_exponent<F>(row8) : L;
    return half(word, direction * L) | half(word >> 16, direction * second) << 16;
}

// By how much the scales of a row are multiplied, in formats that are LIFTED (the picture is in core/tile.cuh), and how.
#pragma once
#include "../core/types.cuh"

// What decides it, of a word of scales: the bits of the greatest finite one. A minimum counts as 2^-22 times as much, so
// that 2^-24 times as much is finite.
template <class F>
DEVICE u32 peak_to_lift(u32 word) {
    auto finite = [](u32 bits) { return (bits & 0x7fff) < 0x7c00 ? bits & 0x7fff : 0; };
    const u32 low = finite(word), high = finite(word >> 16);
    if constexpr (F::HAS_MIN) return max(low, high > 22 << 10 ? high - (22 << 10) : 0);
    return max(low, high);
}

// The L of a row with this peak, from 0 to 30; the bits of the row's factor, and L again.
DEVICE int lift_of(u32 peak) { return 30 - int(peak >> 10); }

DEVICE u32 factor_of(int L) { return u32(127 + 24 - L) << 7; }

DEVICE int lift_by(u32 factor) { return 127 + 24 - int(factor >> 7); }

DEVICE float power_of_two(int exponent) { return __int_as_float(127 + exponent << 23); }

// A word of scales of row g, or g + 8, lifted by 2^L; or brought back, where `direction` is -1. What is not finite stays
// as it is.
template <class F>
DEVICE u32 lifted(u32 word, int L, int row8, int direction) {
    auto half = [](u32 bits, int exponent) {
        bits &= 0xffff;
        if ((bits & 0x7c00) == 0x7c00) return bits;
        return u32(float_to_half(half_to_float(u16(bits)) * power_of_two(exponent)));
    };
    const int own = L - (row8 && F::BITS < 8 ? 4 : 0);
    return half(word, direction * own) | half(word >> 16, direction * (F::HAS_MIN ? L - 24 : own)) << 16;
}

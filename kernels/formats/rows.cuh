// Activations as operand B wants them: float16 rows.
//
// Rows that are not float16 are divided by a power of two that puts their peak between 2^13 and 2^14: exact, and
// undone in the float32 epilogue. What is 2^-37 of the peak or less is lost.
#pragma once
#include "../core/peak.cuh"

// Eight numbers as they are in memory: of 16 bits, or of 32 with `more`.
struct Piece {
    uint4 bits, more;
};

// A row of K floats of a type, from element `at` of x on, in pieces of eight; zeros beyond K.
struct FloatRow {
    const void* x;
    s64 at, column_stride;
    int dtype, K;

    DEVICE int pieces() const { return (K + 7) / 8; }

    DEVICE Piece load(int piece) const {
        const s64 first = at + piece * 8 * column_stride;
        const uint4* const from =
            reinterpret_cast<const uint4*>(static_cast<const u8*>(x) + first * (dtype == FLOAT32 ? 4 : 2));
        const int count = K - piece * 8;
        Piece v = {make_uint4(0, 0, 0, 0), make_uint4(0, 0, 0, 0)};
        if (count >= 8 && column_stride == 1 && u64(from) % 16 == 0) {
            v.bits = from[0];
            if (dtype == FLOAT32) v.more = from[1];
        } else {
            u32 words[8] = {};
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (j >= count) continue;
                if (dtype == FLOAT32)
                    words[j] = static_cast<const u32*>(x)[first + j * column_stride];
                else
                    words[j / 2] |= u32(static_cast<const u16*>(x)[first + j * column_stride]) << j % 2 * 16;
            }
            v.bits = make_uint4(words[0], words[1], words[2], words[3]);
            v.more = make_uint4(words[4], words[5], words[6], words[7]);
        }
        return v;
    }

    // A piece of bfloat16 or float32 numbers as floats.
    DEVICE void widen(const Piece& v, float (&to)[8]) const {
        const u32 words[8] = {v.bits.x, v.bits.y, v.bits.z, v.bits.w, v.more.x, v.more.y, v.more.z, v.more.w};
#pragma unroll
        for (int j = 0; j < 8; j++)
            to[j] = dtype == FLOAT32 ? __int_as_float(words[j]) : bfloat_to_float(u16(words[j / 2] >> j % 2 * 16));
    }

    // A piece of numbers of any type as floats.
    DEVICE void floats(const Piece& v, float (&to)[8]) const {
        if (dtype == FLOAT16)
            to_floats(v.bits, to);
        else
            widen(v, to);
    }

    // A piece times a power of two; of float16 as it is.
    DEVICE uint4 to_half(const Piece& v, int shift) const {
        if (dtype == FLOAT16) return v.bits;
        float values[8];
        widen(v, values);
        return to_halves(values, power_of_two(shift));
    }

    // The bits of the greatest magnitude, of bfloat16 and float32.
    DEVICE u32 peak(const Piece& v) const {
        float values[8];
        widen(v, values);
        u32 peak = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) peak = max(peak, magnitude(values[j]));
        return peak;
    }
};

// A row as float16, by all threads of a block, of which piece i takes the signs signs(i); the power of two that it then
// lacks. Float16 itself is copied. Threads ask for KEPT pieces at once. The row is gone through from its end to find its
// peak, and then from its beginning, which threads have kept.
template <int KEPT, class Signs>
DEVICE float row_to_half(const FloatRow& row, uint4* out, const Signs& signs) {
    const int pieces = row.pieces(), span = KEPT * blockDim.x;
    Piece kept[KEPT];
    auto load = [&](int first) {
#pragma unroll
        for (int p = 0; p < KEPT; p++) {
            const int i = first + p * blockDim.x + threadIdx.x;
            if (i < pieces) kept[p] = row.load(i);
        }
    };
    int shift = 0;
    if (row.dtype == FLOAT16) {
        load(0);
    } else {
        u32 peak = 0;
#pragma unroll 1
        for (int first = (pieces - 1) / span * span; first >= 0; first -= span) {
            load(first);
#pragma unroll
            for (int p = 0; p < KEPT; p++)
                if (first + p * blockDim.x + threadIdx.x < pieces) peak = max(peak, row.peak(kept[p]));
        }
        shift = shift_of(block_max(peak));
    }
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
        for (int p = 0; p < KEPT; p++) {
            const int i = first + p * blockDim.x + threadIdx.x;
            if (i < pieces) out[i] = flip(row.to_half(kept[p], shift), signs(i));
        }
        if ((first += span) >= pieces) return power_of_two(-shift);
        load(first);
    }
}

// Floats to blocks of IQ4, as cuquant/formats/iq4_nl.py and iq4_xs.py search, rounding for rounding: `encode_block` as of k-quants
// (encode_kquant.cuh).
#pragma once
#include "encode_search.cuh"
#include "iq4.cuh"

// IQ4's levels, and the code nearest to every half integer from the first level to the last: of two levels equally near
// the upper one.
struct Levels {
    static constexpr int LEAST = -127, MOST = 113, COUNT = 2 * (MOST - LEAST) + 1;
    float level[COUNT];
    u8 nearest[COUNT];

    DEVICE void fill(int thread, int threads) {
        constexpr s8 LEVELS[16] = {LEAST, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, MOST};
        for (int step = thread; step < COUNT; step += threads) {
            int code = 0, own = LEAST;
#pragma unroll
            for (int i = 1; i < 16; i++)
                if (LEVELS[i - 1] + LEVELS[i] <= step + 2 * LEAST) code = i, own = LEVELS[i];
            nearest[step] = u8(code), level[step] = own;
        }
    }

    static DEVICE int step_of(float x, float inverse) {
        const int step = floor_of_twice(clipped(ieee_mul(x, inverse), LEAST, MOST)) - 2 * LEAST;
        return min(u32(step), COUNT - 1);  // of NaN, too
    }

    DEVICE int code(float x, float inverse) const { return nearest[step_of(x, finite(inverse))]; }
};

// The scale of least weighted error of 32 weights: iq4_nl.search.
template <class Weight>
DEVICE float search_levels(const Levels& levels, const float (&x)[OWN], const Weight& weight) {
    const float peak = largest<OWN>(x);
    float sum_xl, sum_l2;
    auto sums = [&](float inverse) {
        sum_xl = sum_l2 = NOTHING;
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const float level = levels.level[Levels::step_of(x[j], finite(inverse))], wl = ieee_mul(weight(j), level);
            sum_xl = ieee_add(sum_xl, ieee_mul(wl, x[j])), sum_l2 = ieee_add(sum_l2, ieee_mul(wl, level));
        }
    };
    sums(ieee_div(1, ieee_div(negated(peak), -127)));
    float scale = ieee_less(0, sum_l2) ? ieee_div(sum_xl, sum_l2) : 0, gain = ieee_mul(scale, sum_xl);
#pragma unroll 1
    for (int i = -7; i <= 7; i++) {
        sums(ieee_div(float(i - 127), peak));
        if (ieee_less(0, sum_l2) && ieee_less(ieee_mul(gain, sum_l2), ieee_mul(sum_xl, sum_xl)))
            scale = ieee_div(sum_xl, sum_l2), gain = ieee_mul(scale, sum_xl);
    }
    if (!is_finite(scale)) scale = ieee_div(peak, -127);
    return ieee_less(absolute(peak), NEGLIGIBLE) ? 0 : scale;
}

template <bool BY_IMPORTANCE, int COLUMNS>
DEVICE float search_by(const Levels& levels, const float (&x)[OWN], const float (&importance)[OWN]) {
    float w[OWN];
    if constexpr (BY_IMPORTANCE) spread<COLUMNS>(x, importance, 2, w);
    return search_levels(levels, x, [&](int j) { return BY_IMPORTANCE ? w[j] : ieee_mul(x[j], x[j]); });
}

// Codes of 32 weights as sixteen bytes of nibbles.
DEVICE void store_levels(const Levels& levels, const float (&x)[OWN], float inverse, u8* to) {
#pragma unroll
    for (int j = 0; j < 16; j++) to[j] = u8(levels.code(x[j], inverse) | levels.code(x[j + 16], inverse) << 4);
}

// A thread's block of iq4_nl.
template <bool BY_IMPORTANCE>
DEVICE bool encode_block(Iq4NlBlock, const float (&x)[OWN], const float (&importance)[OWN], u8* block, u32& d_bits) {
    __shared__ Levels levels;
    levels.fill(threadIdx.x, blockDim.x);
    __syncthreads();
    const float scale = search_by<BY_IMPORTANCE, 32>(levels, x, importance);
    d_bits = float_to_half(scale);
    store_u16(block, d_bits);
    store_levels(levels, x, inverse(scale), block + Iq4NlBlock::CODES_AT);
    return fits_half(d_bits);
}

// A thread's 32 weights of a block of iq4_xs. Codes are chosen for d before it is rounded.
template <bool BY_IMPORTANCE>
DEVICE bool encode_block(Iq4XsBlock, const float (&x)[OWN], const float (&importance)[OWN], u8* block, u32& d_bits) {
    __shared__ Levels levels;
    levels.fill(threadIdx.x, blockDim.x);
    __syncthreads();
    const int group = threadIdx.x % 8;
    const float scale = search_by<BY_IMPORTANCE, 256>(levels, x, importance), d = ieee_div(negated(largest_of_block(scale)), 32);
    const int s = int(clipped(nearest_integer(ieee_mul(inverse(d), scale)), -32, 31));
    store_levels(levels, x, inverse(ieee_mul(d, float(s))), block + Iq4XsBlock::CODES_AT + 16 * group);
    d_bits = float_to_half(d);
    const int code = s + 32, other = __shfl_xor_sync(~0u, code, 1);
    if (group % 2 == 0) block[Iq4XsBlock::LOWER_AT + group / 2] = u8((code & 15) | (other & 15) << 4);
    u32 upper = u32(code >> 4) << 2 * group;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) upper |= __shfl_xor_sync(~0u, upper, step);
    if (group == 0) store_u16(block, d_bits), store_u16(block + Iq4XsBlock::UPPER_AT, upper);
    return fits_half(d_bits);
}

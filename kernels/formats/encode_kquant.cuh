// Floats to blocks of k-quants: `encode_block` has a thread's 32 weights, the importance of their columns, by which it searches if
// BY_IMPORTANCE, and the block in shared memory. It returns the bits of d; false where a scale overflows.
#pragma once
#include "encode_search.cuh"
#include "kquant.cuh"

// Two bits for each of a block's weights, of which this thread has those of weight j of its own: of j, j + 32, j + 64 and
// j + 96 they are a byte.
template <class Field>
DEVICE void store_two_bits(u8* block, int j, int own) {
    const int group = threadIdx.x % 8;
    u32 bits = u32(own) << group % 4 * 2;
    bits |= __shfl_xor_sync(~0u, bits, 1), bits |= __shfl_xor_sync(~0u, bits, 2);
    if (j % 4 == group % 4) block[Field::byte_of(group / 4 * 128) + j] = u8(bits);
}

// Encodes a block of q4_k or q5_k.
template <bool BY_IMPORTANCE, int BITS, class Low, class High, int BYTES>
DEVICE bool encode_block(KQuantBlock<BITS, Low, High, PairsOfSixBits, BYTES>, const float (&x)[OWN],
                         const float (&importance)[OWN], u8* block, u32& d_bits) {
    constexpr int MOST = (1 << BITS) - 1;
    const int group = threadIdx.x % 8;
    float w[OWN], d, dmin;
    int q[OWN], scales[1], minimums[1];
    if constexpr (BY_IMPORTANCE) {
        spread<256>(x, importance, 2, w);
        const Fit fit = affine<MOST, 36, false>(x, w, -0.9f, 0.05f, q);
        const float total[1] = {sum_of(w)};
        of_least_error<63>({fit.scale}, total, d, scales), of_least_error<63>({fit.minimum}, total, dmin, minimums);
    } else {
        const float mean = ieee_sqrt(ieee_div(square_of_block<OWN>(x), OWN));
#pragma unroll
        for (int j = 0; j < OWN; j++) w[j] = ieee_add(mean, absolute(x[j]));
        const Fit fit = affine<MOST, BITS == 4 ? 20 : 15, false>(x, w, BITS == 4 ? -1 : -0.5f, 0.1f, q);
        of_largest<63>({fit.scale}, d, scales), of_largest<63>({fit.minimum}, dmin, minimums);
    }
    const int s = scales[0], m = minimums[0];
    const u32 dmin_bits = float_to_half(dmin);
    d_bits = float_to_half(d);
    const float step = ieee_mul(half_to_float(u16(d_bits)), float(s));
    requantize<OWN>(x, ieee_mul(half_to_float(u16(dmin_bits)), float(m)), step, 0, MOST, q);

    // Scales 4 to 7 share bytes with scales 0 to 3.
    const int upper_s = __shfl_xor_sync(~0u, s, 4), upper_m = __shfl_xor_sync(~0u, m, 4);
    if (group < 4) {
        block[4 + group] = u8(s | upper_s >> 4 << 6), block[8 + group] = u8(m | upper_m >> 4 << 6);
        block[12 + group] = u8((upper_s & 15) | (upper_m & 15) << 4);
    }
    if (group == 0) {
        store_u16(block, d_bits);
        store_u16(block + 2, dmin_bits);
    }
    // Nibbles of weights j and j + 32 are a byte: one thread stores the first sixteen, the other the rest.
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        const int other = __shfl_xor_sync(~0u, q[j], 1);
        const int low = group % 2 ? other : q[j], high = group % 2 ? q[j] : other;
        if (j / 16 == group % 2) block[Low::byte_of(group / 2 * 64) + j] = u8((low & 15) | (high & 15) << 4);
        if constexpr (BITS == 5) {
            const u32 fifths = __ballot_sync(~0u, q[j] >> 4) >> threadIdx.x % 32 / 8 * 8;
            if (j % 8 == group) block[High::byte_of(0) + j] = u8(fifths);
        }
    }
    return fits_half(d_bits) && fits_half(dmin_bits);
}

// Encodes a block of q6_k.
template <bool BY_IMPORTANCE, class Low, class High, int BYTES>
DEVICE bool encode_block(KQuantBlock<6, Low, High, SignedBytes, BYTES>, const float (&x)[OWN],
                         const float (&importance)[OWN], u8* block, u32& d_bits) {
    const int group = threadIdx.x % 8;
    int q[OWN];
    float scale[2];
#pragma unroll
    for (int part = 0; part < 2; part++) {
        auto weight = [&](int j) {
            const int own = 16 * part + j;
            return BY_IMPORTANCE ? importance[own] : ieee_mul(x[own], x[own]);
        };
        scale[part] = symmetric<32>(x + 16 * part, weight, q + 16 * part);
    }
    const float top = largest_of_block(largest<2>(scale)), inverse = ieee_div(-128, top);
    const bool zero = ieee_less(absolute(top), NEGLIGIBLE);
    d_bits = float_to_half(zero ? 0 : ieee_div(1, inverse));
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const int s = zero ? 0 : int(ieee_min(nearest_integer(ieee_mul(inverse, scale[part])), 127));
        requantize<16>(x + 16 * part, 0, ieee_mul(half_to_float(u16(d_bits)), float(s)), -32, 31, q + 16 * part);
        block[SignedBytes::AT + 2 * group + part] = u8(s);
    }
    if (group == 0) store_u16(block + SignedBytes::D_AT, d_bits);
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        if (zero) q[j] = 0;
        // Nibbles of weights j and j + 64, upper bits of j, j + 32, j + 64 and j + 96.
        const int other = __shfl_xor_sync(~0u, q[j], 2);
        const int low = group & 2 ? other : q[j], high = group & 2 ? q[j] : other;
        if (j / 16 == group / 2 % 2)
            block[Low::byte_of(group / 4 * 128 + group % 2 * 32) + j] = u8((low & 15) | (high & 15) << 4);
        store_two_bits<High>(block, j, q[j] >> 4);
    }
    return fits_half(d_bits);
}

// Encodes a block of q2_k.
template <bool BY_IMPORTANCE, class Low, class High, int BYTES>
DEVICE bool encode_block(KQuantBlock<2, Low, High, PairsOfNibbles, BYTES>, const float (&x)[OWN],
                         const float (&importance)[OWN], u8* block, u32& d_bits) {
    constexpr int D_AT = PairsOfNibbles::D_AT;
    const int group = threadIdx.x % 8;
    int q[OWN], s[2], m[2];
    float scale[2], minimum[2], total[2], d, dmin, spread_w[OWN];
    if (BY_IMPORTANCE) spread<256>(x, importance, 1, spread_w);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        float w[16];
#pragma unroll
        for (int j = 0; j < 16; j++) w[j] = BY_IMPORTANCE ? spread_w[16 * part + j] : absolute(x[16 * part + j]);
        const Fit fit = BY_IMPORTANCE ? affine<3, 36, false>(x + 16 * part, w, -0.9f, 0.05f, q + 16 * part)
                                      : affine<3, 15, true>(x + 16 * part, w, -0.5f, 0.1f, q + 16 * part);
        scale[part] = fit.scale, minimum[part] = fit.minimum, total[part] = sum_of(w);
    }
    if constexpr (BY_IMPORTANCE)
        of_least_error<15>(scale, total, d, s), of_least_error<15>(minimum, total, dmin, m);
    else
        of_largest<15>(scale, d, s), of_largest<15>(minimum, dmin, m);
    const u32 dmin_bits = float_to_half(dmin);
    d_bits = float_to_half(d);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const float step = ieee_mul(half_to_float(u16(d_bits)), float(s[part]));
        requantize<16>(x + 16 * part, ieee_mul(half_to_float(u16(dmin_bits)), float(m[part])), step, 0, 3, q + 16 * part);
        block[2 * group + part] = u8(s[part] | m[part] << 4);
    }
    if (group == 0) store_u16(block + D_AT, d_bits), store_u16(block + D_AT + 2, dmin_bits);
#pragma unroll
    for (int j = 0; j < OWN; j++) store_two_bits<Low>(block, j, q[j]);
    return fits_half(d_bits) && fits_half(dmin_bits);
}

// Encodes a block of q3_k.
template <bool BY_IMPORTANCE, class Low, class High, int BYTES>
DEVICE bool encode_block(KQuantBlock<3, Low, High, SixBits, BYTES>, const float (&x)[OWN],
                         const float (&importance)[OWN], u8* block, u32& d_bits) {
    const int group = threadIdx.x % 8;
    int q[OWN], s[2];
    float scale[2], d;
    if constexpr (BY_IMPORTANCE) {
        float w[OWN], total[2], scales[16], totals[16];
        spread<256>(x, importance, 2, w);
#pragma unroll
        for (int part = 0; part < 2; part++) {
            total[part] = NOTHING;
#pragma unroll
            for (int j = 0; j < 16; j++) total[part] = ieee_add(total[part], w[16 * part + j]);
            scale[part] = symmetric<4>(x + 16 * part, [&](int j) { return w[16 * part + j]; }, q + 16 * part);
        }
        gather_block(scale, scales), gather_block(total, totals);
        int all[16];
        d = symmetric<32>(scales, [&](int i) { return totals[i]; }, all);
#pragma unroll
        for (int i = 0; i < 16; i++)
            if (i / 2 == group) s[i % 2] = all[i];
    } else {
#pragma unroll
        for (int part = 0; part < 2; part++) scale[part] = by_turns<4>(x + 16 * part, q + 16 * part);
        const float top = largest_of_block(largest<2>(scale)), inverse = ieee_div(-32, top);
        const bool zero = ieee_less(absolute(top), NEGLIGIBLE);
        d = zero ? 0 : ieee_div(1, inverse);
#pragma unroll
        for (int part = 0; part < 2; part++)
            s[part] = zero ? 0 : int(clipped(nearest_integer(ieee_mul(inverse, scale[part])), -32, 31)) + 32;
    }
    d_bits = float_to_half(d);
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const float step = ieee_mul(half_to_float(u16(d_bits)), float(s[part] - 32));
        requantize<16>(x + 16 * part, 0, step, -4, 3, q + 16 * part);
        // The nibbles of scales 8 further on are above; of the upper two bits those of every fourth scale are a byte.
        const int other = __shfl_xor_sync(~0u, s[part], 4);
        if (group < 4) block[SixBits::Lower::byte_of(2 * group + part)] = u8((s[part] & 15) | (other & 15) << 4);
        u32 upper = u32(s[part] >> 4) << group / 2 * 2;
        upper |= __shfl_xor_sync(~0u, upper, 2), upper |= __shfl_xor_sync(~0u, upper, 4);
        if (group < 2) block[SixBits::Upper::byte_of(2 * group + part)] = u8(upper);
    }
    if (group == 0) store_u16(block + SixBits::D_AT, d_bits);
#pragma unroll
    for (int j = 0; j < OWN; j++) {
        store_two_bits<Low>(block, j, q[j] & 3);
        const u32 thirds = __ballot_sync(~0u, q[j] >> 2) >> threadIdx.x % 32 / 8 * 8;
        if (j % 8 == group) block[High::byte_of(0) + j] = u8(thirds);
    }
    return fits_half(d_bits);
}

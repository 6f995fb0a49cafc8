// Floats to the codes and scales of k-quants and IQ4: the searches of cuquant/formats/kquant.py and iq4_nl.py, rounding
// for rounding. A thread has 32 consecutive weights, and a block of 256 the next eight threads.
#pragma once
#include "encode.cuh"
#include "iq4.cuh"
#include "kquant.cuh"

constexpr int OWN = 32;
constexpr float NEGLIGIBLE = 1e-15f;

// Sums term after term start as the first term, whatever its sign: from -0.
constexpr float NOTHING = -0.f;

DEVICE float clipped(float x, float least, float most) { return ieee_min(ieee_max(x, least), most); }

// The number of the largest magnitude with its sign, the first of equals.
template <int N>
DEVICE float largest(const float* x) {
    float peak = x[0];
#pragma unroll
    for (int j = 1; j < N; j++)
        if (magnitude(x[j]) > magnitude(peak)) peak = x[j];
    return peak;
}

// The number of the largest magnitude, the first of equals, of all numbers of the block's eight threads, thread after
// thread.
DEVICE float largest_of_block(float own) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
        const float other = __shfl_xor_sync(~0u, own, step);
        const bool after = threadIdx.x & step;  // the other's come first
        if (magnitude(other) > magnitude(own) || (after && magnitude(other) == magnitude(own))) own = other;
    }
    return own;
}

DEVICE float most_of_block(float own) {
#pragma unroll
    for (int step = 1; step < 8; step *= 2) own = ieee_max(own, __shfl_xor_sync(~0u, own, step));
    return own;
}

// The sum of numbers, and of squares of a block of COLUMNS weights, term after term, of one of 256 thread after thread.
template <int N>
DEVICE float sum_of(const float (&x)[N]) {
    float sum = NOTHING;
#pragma unroll
    for (int j = 0; j < N; j++) sum = ieee_add(sum, x[j]);
    return sum;
}

template <int COLUMNS>
DEVICE float square_of_block(const float (&x)[OWN]) {
    float sum = NOTHING;
#pragma unroll 1
    for (int thread = 0; thread < COLUMNS / OWN; thread++) {
#pragma unroll
        for (int j = 0; j < OWN; j++) sum = ieee_add(sum, ieee_mul(x[j], x[j]));
        if (COLUMNS > OWN) sum = __shfl_sync(~0u, sum, threadIdx.x % WARP / 8 * 8 + thread);
    }
    return sum;
}

// kquant.spread: what errors of weights count, given the importance of their columns.
template <int COLUMNS>
DEVICE void spread(const float (&x)[OWN], const float (&importance)[OWN], float factor, float (&w)[OWN]) {
    const float mean = ieee_mul(square_of_block<COLUMNS>(x), factor / COLUMNS);
#pragma unroll
    for (int j = 0; j < OWN; j++) w[j] = ieee_mul(importance[j], ieee_sqrt(ieee_add(mean, ieee_mul(x[j], x[j]))));
}

// Codes of N weights from 0 to MOST, made with a factor in place of 1 / scale, and their weighted error: of squares, or
// ABSOLUTE.
template <int N, int MOST, bool ABSOLUTE>
struct Affinity {
    const float* x;
    const float (&w)[N];

    DEVICE float code(int j, float inverse, float low) const {
        return clipped(nearest_integer(ieee_mul(ieee_sub(x[j], low), inverse)), 0, MOST);
    }

    DEVICE float error(float inverse, float origin, float scale, float low) const {
        float sum = NOTHING;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float off = ieee_sub(ieee_add(ieee_mul(code(j, inverse, origin), scale), low), x[j]);
            sum = ieee_add(sum, ieee_mul(ABSOLUTE ? absolute(off) : ieee_mul(off, off), w[j]));
        }
        return sum;
    }
};

struct Fit {
    float scale, minimum;  // the latter with its sign turned
};

// kquant.affine: scale and minimum of least weighted error, and codes.
template <int MOST, int STEPS, bool ABSOLUTE, int N>
DEVICE Fit affine(const float* x, const float (&w)[N], float first, float step, int* q) {
    const Affinity<N, MOST, ABSOLUTE> of = {x, w};
    float high = x[0], low = x[0], sum_w = NOTHING, sum_x = NOTHING;
#pragma unroll
    for (int j = 0; j < N; j++) {
        high = ieee_max(high, x[j]), low = ieee_min(low, x[j]);
        sum_w = ieee_add(sum_w, w[j]), sum_x = ieee_add(sum_x, ieee_mul(w[j], x[j]));
    }
    low = ieee_min(low, 0);
    const bool flat = order(high) == order(low);
    float best = finite(ieee_div(MOST, ieee_sub(high, low))), origin = low;
    float scale = ieee_div(1, ieee_div(MOST, ieee_sub(high, low))), least = of.error(best, low, scale, low);
#pragma unroll 1
    for (int i = 0; i <= STEPS; i++) {
        const float wanted = ieee_add(ieee_add(first, ieee_mul(step, float(i))), MOST);
        const float inverse = finite(ieee_div(wanted, ieee_sub(high, low)));
        float sum_q = NOTHING, sum_xq = NOTHING, sum_q2 = NOTHING;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float code = of.code(j, inverse, low), wq = ieee_mul(w[j], code);
            sum_q = ieee_add(sum_q, wq), sum_xq = ieee_add(sum_xq, ieee_mul(wq, x[j]));
            sum_q2 = ieee_add(sum_q2, ieee_mul(wq, code));
        }
        const float determinant = ieee_sub(ieee_mul(sum_w, sum_q2), ieee_mul(sum_q, sum_q));
        float new_scale =
            ieee_div(ieee_sub(ieee_mul(sum_w, sum_xq), ieee_mul(sum_x, sum_q)), determinant);
        float new_low = ieee_div(ieee_sub(ieee_mul(sum_q2, sum_x), ieee_mul(sum_q, sum_xq)), determinant);
        if (ieee_less(0, new_low)) new_scale = ieee_div(sum_xq, sum_q2), new_low = 0;
        const float now = of.error(inverse, low, new_scale, new_low);
        if (ieee_less(0, determinant) && ieee_less(now, least))
            least = now, best = inverse, origin = low, scale = new_scale, low = new_low;
    }
#pragma unroll
    for (int j = 0; j < N; j++) q[j] = flat ? 0 : int(of.code(j, best, origin));
    return {flat ? 0 : scale, negated(low)};
}

// Codes of x / d from `least` on, which becomes 0; where d is 0, those that the search made.
template <int N>
DEVICE void requantize(const float* x, float add, float d, int least, int most, int* q) {
#pragma unroll
    for (int j = 0; j < N; j++)
        if (d != 0) q[j] = int(clipped(nearest_integer(ieee_div(ieee_add(x[j], add), d)), least, most)) - least;
}

// A thread's N scales of the block as codes up to MOST of the largest: kquant.of_largest.
template <int MOST, int N>
DEVICE void of_largest(const float (&own)[N], float& d, int (&codes)[N]) {
    float most = own[0];
#pragma unroll
    for (int i = 1; i < N; i++) most = ieee_max(most, own[i]);
    const float top = ieee_add(most_of_block(most), 0), inverse = finite(ieee_div(MOST, top));
    d = ieee_div(top, MOST);
#pragma unroll
    for (int i = 0; i < N; i++) codes[i] = int(clipped(nearest_integer(ieee_mul(inverse, own[i])), 0, MOST));
}

// kquant._improved: codes from LEAST to MOST are changed one after the other to what the others' best scale asks for.
template <int LEAST, int MOST, int N, class Weight>
DEVICE float improved(const float* x, const Weight& weight, float (&code)[N]) {
    float sum_xq = NOTHING, sum_q2 = NOTHING;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float w = weight(j), c = code[j];
        sum_xq = ieee_add(sum_xq, ieee_mul(ieee_mul(w, x[j]), c));
        sum_q2 = ieee_add(sum_q2, ieee_mul(ieee_mul(w, c), c));
    }
#pragma unroll 1
    for (int pass = 0; pass < 5; pass++)
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float w = weight(j), wx = ieee_mul(w, x[j]), c = code[j];
            const float rest_xq = ieee_sub(sum_xq, ieee_mul(wx, c));
            const float rest_q2 = ieee_sub(sum_q2, ieee_mul(ieee_mul(w, c), c));
            const float now = clipped(nearest_integer(ieee_div(ieee_mul(x[j], rest_q2), rest_xq)), LEAST, MOST);
            const float new_xq = ieee_add(rest_xq, ieee_mul(wx, now));
            const float new_q2 = ieee_add(rest_q2, ieee_mul(ieee_mul(w, now), now));
            const bool better = ieee_less(0, rest_xq) && now != c && ieee_less(0, LEAST < 0 ? new_q2 : rest_q2) &&
                                ieee_less(ieee_mul(ieee_mul(sum_xq, sum_xq), new_q2),
                                          ieee_mul(ieee_mul(new_xq, new_xq), sum_q2));
            if (better) code[j] = now, sum_xq = new_xq, sum_q2 = new_q2;
        }
    const bool none = !ieee_less(0, sum_q2) && is_finite(sum_q2);  // NaN where weights overflow
    return none ? 0 : ieee_div(sum_xq, sum_q2);
}

// What the block's eight threads have, N numbers each.
template <int N>
DEVICE void gather_block(const float (&own)[N], float (&all)[8 * N]) {
#pragma unroll
    for (int i = 0; i < 8 * N; i++) all[i] = __shfl_sync(~0u, own[i % N], threadIdx.x % WARP / 8 * 8 + i / N);
}

// A thread's N scales of the block as codes up to MOST of least weighted error: kquant.of_least_error, by every thread.
template <int MOST, int N>
DEVICE void of_least_error(const float (&own)[N], const float (&own_w)[N], float& d, int (&codes)[N]) {
    float x[8 * N], w[8 * N], code[8 * N], peak;
    gather_block(own, x), gather_block(own_w, w);
    peak = x[0];
#pragma unroll
    for (int i = 1; i < 8 * N; i++) peak = ieee_max(peak, x[i]);
    auto code_of = [&](int i, float inverse) { return clipped(nearest_integer(ieee_mul(inverse, x[i])), 0, MOST); };
    auto error = [&](float inverse) {
        const float scale = ieee_div(1, inverse);
        float sum = NOTHING;
#pragma unroll
        for (int i = 0; i < 8 * N; i++) {
            const float off = ieee_sub(x[i], ieee_mul(scale, code_of(i, inverse)));
            sum = ieee_add(sum, ieee_mul(ieee_mul(w[i], off), off));
        }
        return sum;
    };
    float best = ieee_div(MOST, peak), least = error(best);
#pragma unroll 1
    for (int i = -4; i < 5; i++) {
        if (i == 0) continue;
        const float inverse = ieee_div(ieee_add(ieee_mul(0.1f, float(i)), MOST), peak), now = error(inverse);
        if (ieee_less(now, least)) least = now, best = inverse;
    }
#pragma unroll
    for (int i = 0; i < 8 * N; i++) code[i] = code_of(i, best);
    const float scale = improved<0, MOST>(x, [&](int i) { return w[i]; }, code);
    const bool zero = ieee_less(peak, NEGLIGIBLE);
    d = zero ? 0 : is_finite(scale) ? scale : ieee_div(peak, MOST);
#pragma unroll
    for (int i = 0; i < 8 * N; i++)
        if (i / N == threadIdx.x % 8) codes[i % N] = zero ? 0 : int(code[i]);
}

// Two bits for each of a block's weights, of which this thread has those of weight j of its own: of j, j + 32, j + 64 and
// j + 96 they are a byte.
template <class Field>
DEVICE void store_two_bits(u8* block, int j, int own) {
    const int group = threadIdx.x % 8;
    u32 bits = u32(own) << group % 4 * 2;
    bits |= __shfl_xor_sync(~0u, bits, 1), bits |= __shfl_xor_sync(~0u, bits, 2);
    if (j % 4 == group % 4) block[Field::byte_of(group / 4 * 128) + j] = u8(bits);
}

// Whether these bits are a float16 number's.
DEVICE bool fits_half(u32 bits) { return (bits & 0x7c00) != 0x7c00; }

// A thread's 32 weights of a block of q4_k or q5_k, `block` in shared memory, and the bits of d; false where a scale
// overflows.
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

// Scale of 16 numbers, and codes from 0 on up to 2 MOST - 1: kquant.symmetric.
template <int MOST, class Weight>
DEVICE float symmetric(const float* x, const Weight& weight, int* q) {
    const float peak = largest<16>(x);
    auto code = [&](int j, float inverse) { return clipped(nearest_integer(ieee_mul(x[j], inverse)), -MOST, MOST - 1); };
    float sum_xq, sum_q2;
    auto sums = [&](float inverse) {
        sum_xq = sum_q2 = NOTHING;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const float w = weight(j), c = code(j, inverse);
            sum_xq = ieee_add(sum_xq, ieee_mul(ieee_mul(w, x[j]), c));
            sum_q2 = ieee_add(sum_q2, ieee_mul(ieee_mul(w, c), c));
        }
    };
    float best = ieee_div(-MOST, peak);
    sums(best);
    float scale = magnitude(sum_q2) ? ieee_div(sum_xq, sum_q2) : 0, gain = ieee_mul(scale, sum_xq);
#pragma unroll 1
    for (int i = -9; i < 10; i++) {
        if (i == 0) continue;
        const float inverse = ieee_div(-ieee_add(MOST, ieee_mul(0.1f, float(i))), peak);
        sums(inverse);
        if (ieee_less(0, sum_q2) && ieee_less(ieee_mul(gain, sum_q2), ieee_mul(sum_xq, sum_xq)))
            scale = ieee_div(sum_xq, sum_q2), gain = ieee_mul(scale, sum_xq), best = inverse;
    }
    const bool zero = ieee_less(absolute(peak), NEGLIGIBLE);
#pragma unroll
    for (int j = 0; j < 16; j++) q[j] = zero ? 0 : int(code(j, best)) + MOST;
    return zero ? 0 : is_finite(scale) ? scale : ieee_div(peak, -MOST);
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

// Scale of 16 weights, and codes from 0 on up to 2 MOST - 1, which are improved in turn: kquant.by_turns.
template <int MOST>
DEVICE float by_turns(const float* x, int* q) {
    const float peak = largest<16>(x), inverse = ieee_div(-MOST, peak);
    float code[16];
#pragma unroll
    for (int j = 0; j < 16; j++) code[j] = clipped(nearest_integer(ieee_mul(inverse, x[j])), -MOST, MOST - 1);
    const float scale = improved<-MOST, MOST - 1>(x, [&](int j) { return ieee_mul(x[j], x[j]); }, code);
    const bool zero = ieee_less(absolute(peak), NEGLIGIBLE);
#pragma unroll
    for (int j = 0; j < 16; j++) q[j] = zero ? 0 : int(code[j]) + MOST;
    return zero ? 0 : is_finite(scale) ? scale : ieee_div(peak, -MOST);
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

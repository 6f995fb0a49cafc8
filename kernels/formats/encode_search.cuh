// Searches for scales, those of cuquant/formats/kquant.py, rounding for rounding. A thread has 32 consecutive weights, and a
// block of 256 the next eight threads.
#pragma once
#include "encode.cuh"

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

// What errors of weights count, given the importance of their columns and a mean square: of their row
// (kquant.spread_over_rows), or ...
DEVICE void spread_by(float mean, const float (&x)[OWN], const float (&importance)[OWN], float (&w)[OWN]) {
#pragma unroll
    for (int j = 0; j < OWN; j++) w[j] = ieee_mul(importance[j], ieee_sqrt(ieee_add(mean, ieee_mul(x[j], x[j]))));
}

// ... of their block, times a factor (kquant.spread).
template <int COLUMNS>
DEVICE void spread(const float (&x)[OWN], const float (&importance)[OWN], float factor, float (&w)[OWN]) {
    spread_by(ieee_mul(square_of_block<COLUMNS>(x), factor / COLUMNS), x, importance, w);
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

// Whether these bits are a float16 number's.
DEVICE bool fits_half(u32 bits) { return (bits & 0x7c00) != 0x7c00; }

// Scale of N numbers, and codes from 0 on up to 2 MOST - 1: kquant.symmetric.
template <int MOST, int N = 16, class Weight>
DEVICE float symmetric(const float* x, const Weight& weight, int* q) {
    const float peak = largest<N>(x);
    auto code = [&](int j, float inverse) { return clipped(nearest_integer(ieee_mul(x[j], inverse)), -MOST, MOST - 1); };
    float sum_xq, sum_q2;
    auto sums = [&](float inverse) {
        sum_xq = sum_q2 = NOTHING;
#pragma unroll
        for (int j = 0; j < N; j++) {
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
    for (int j = 0; j < N; j++) q[j] = zero ? 0 : int(code(j, best)) + MOST;
    return zero ? 0 : is_finite(scale) ? scale : ieee_div(peak, -MOST);
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

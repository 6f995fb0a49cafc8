// From a float32 accumulator to the result: scale, bias, activation, residual, one rounding.
#pragma once
#include "problem.cuh"

enum Activation { NONE = 0, RELU = 1, GELU = 2, GELU_ERF = 3, SILU = 4 };

// A quotient; or about it, which takes a few instructions and no branch, but more registers where there are many.
// Divisors of 2^126 and more then make 0 of it: these are of numbers that are nearly 0 in any case.
template <bool ABOUT>
DEVICE float quotient(float a, float b) {
    return ABOUT ? __fdividef(a, b) : a / b;
}

// NaN stays NaN in each of them. With u = sqrt(2 / pi) (x + 0.044715 x^3), (1 + tanh u) / 2 is the logistic function
// of 2 u.
template <int ACTIVATION, bool ABOUT, int COUNT>
DEVICE void activate(float (&x)[COUNT]) {
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        const float v = x[j];
        if constexpr (ACTIVATION == RELU) x[j] = v < 0 ? 0 : v;
        if constexpr (ACTIVATION == GELU)
            x[j] = quotient<ABOUT>(v, 1 + __expf(-1.5957691216f * (v + 0.044715f * v * v * v)));
        if constexpr (ACTIVATION == GELU_ERF) x[j] = 0.5f * v * (1 + erff(v * 0.7071067812f));
        if constexpr (ACTIVATION == SILU) x[j] = quotient<ABOUT>(v, 1 + __expf(-v));
    }
}

template <bool ABOUT = false, int COUNT>
DEVICE void activate(float (&x)[COUNT], int activation) {
    switch (activation) {
        case RELU: return activate<RELU, ABOUT>(x);
        case GELU: return activate<GELU, ABOUT>(x);
        case GELU_ERF: return activate<GELU_ERF, ABOUT>(x);
        case SILU: return activate<SILU, ABOUT>(x);
    }
}

// Two factors, the first one a power of two, as two others with the same product, so that a number times the first and
// the second leaves float32's range only if the result does: where one is below 1 and the other is not, their product,
// which is between them, is one of them.
DEVICE float2 safe_factors(float a, float b) { return (a < 1) == (b < 1) ? make_float2(a, b) : make_float2(a * b, 1); }

// Whether all that becomes of accumulators is a factor that they have in common. Known beforehand it spares a short
// product's end half of its time: every question to the constants waits for the answer to the one before.
DEVICE bool is_plain(const Problem& p) { return !(p.unscale || p.bias || p.activation || p.residual); }

// Element (m, n) of y, from its accumulator.
DEVICE void finish(const Problem& p, const Matrix& at, int m, int n, float value, bool plain = false) {
    if (plain) return store_float(p.out, at.out + m * p.out_row + n * p.out_column, p.out_dtype, value * p.factor);
    const float2 factors = safe_factors(at.unscale ? at.unscale[m] : 1, p.factor);
    value = value * factors.x * factors.y;
    if (p.bias) value += load_float(p.bias, at.bias + n, p.bias_dtype);
    if (p.activation) {
        float one[1] = {value};
        activate(one, p.activation);
        value = one[0];
    }
    if (p.residual) {
        s64 from = at.residual + m * p.residual_row + n * p.residual_column;
        value += load_float(p.residual, from, p.residual_dtype);
    }
    store_float(p.out, at.out + m * p.out_row + n * p.out_column, p.out_dtype, value);
}

// Finish a sum of a grouped product, of row x_m of x, from the accumulators of W and, if gated, V.
template <bool GATED, int TABLES>
DEVICE void finish(const Grouped<GATED, TABLES>& p, const Matrix& at, int x_m, int m, int n, float value, float other) {
    const float unscale = at.unscale ? at.unscale[x_m] : 1;
    auto result = [&](float sum, bool second) {
        const float2 factors = safe_factors(unscale, side_factor_of(p, second));
        return sum * factors.x * factors.y;
    };
    float one[1] = {result(value, false)};
    activate(one, p.activation);
    const s64 to = m * p.out_row + n;
    if constexpr (GATED)
        one[0] *= result(other, true);
    else if (p.residual)
        one[0] *= static_cast<const float*>(p.residual)[to];
    static_cast<float*>(p.out)[to] = one[0];
}

// COLUMNS columns of BATCH of its batch rows, from (first_m, first_n) on, by THREADS threads: `load(row, column)` gives an
// accumulator.
template <int COLUMNS, int BATCH, int THREADS, class Load>
DEVICE void finish_group(const Grouped<false, 1>& p, const Matrix& at, int first_m, int end_m, int first_n, int thread,
                         const Load& load) {
#pragma unroll 1
    for (int i = thread; i < BATCH * COLUMNS; i += THREADS) {
        const int row = i / COLUMNS, column = i % COLUMNS;
        if (first_m + row < end_m && first_n + column < p.N)
            finish(p, at, first_m + row, first_m + row, first_n + column, load(row, column), 0);
    }
}

// COLUMNS columns of `rows` batch rows, from (first_m, first_n) on, by THREADS threads, a thread 8 columns at a time:
// `load(row, column)` gives the accumulators of four. Instructions that run once are cold in the cache: what most
// products need is short, and the loops are not unrolled. QUICK where there are registers for two rows at once.
template <int COLUMNS, int THREADS, bool QUICK, class Load>
DEVICE void finish_rows(const Problem& p, const Matrix& at, int first_m, int rows, int first_n, int thread,
                        const Load& load) {
    constexpr int WIDE = COLUMNS / 8;
    static_assert(THREADS % WIDE == 0, "a thread keeps to its columns");
    const int column = thread % WIDE * 8, n = first_n + column, count = min(8, p.N - n);
    if (count <= 0) return;
    const int size = p.out_dtype == FLOAT32 ? 4 : 2;
    u8* const out = static_cast<u8*>(p.out) + (at.out + n * p.out_column) * size;
    const bool whole = count == 8 && p.out_column == 1 && ((u64(out) | p.out_row * size) & 15) == 0;
    if (QUICK && whole && size == 2 && is_plain(p)) {
        // Few warps are left in the end, and each waits for one instruction after the other: two rows at once.
        const float factor = p.factor;
#pragma unroll 2
        for (int row = thread / WIDE; row < min(rows, p.M - first_m); row += THREADS / WIDE) {
            const float4 v = load(row, column), w = load(row, column + 4);
            *reinterpret_cast<uint4*>(out + (first_m + row) * p.out_row * 2) = make_uint4(
                pack(v.x * factor, v.y * factor, p.out_dtype), pack(v.z * factor, v.w * factor, p.out_dtype),
                pack(w.x * factor, w.y * factor, p.out_dtype), pack(w.z * factor, w.w * factor, p.out_dtype));
        }
        return;
    }
    float bias[8] = {};
    if (p.bias)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < count) bias[j] = load_float(p.bias, at.bias + n + j, p.bias_dtype);
#pragma unroll 1
    for (int row = thread / WIDE; row < rows && first_m + row < p.M; row += THREADS / WIDE) {
        const int m = first_m + row;
        const float4 low = load(row, column), high = load(row, column + 4);
        float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        const float2 factors = safe_factors(at.unscale ? at.unscale[m] : 1, p.factor);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = v[j] * factors.x * factors.y + bias[j];
        if (p.activation) activate(v, p.activation);
        if (p.residual)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                s64 from = at.residual + m * p.residual_row + (n + j) * p.residual_column;
                if (j < count) v[j] += load_float(p.residual, from, p.residual_dtype);
            }
        u8* const to = out + m * p.out_row * size;
        if (!whole) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j < count) store_float(to, j * p.out_column, p.out_dtype, v[j]);
        } else if (size == 4) {
            reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            *reinterpret_cast<uint4*>(to) = make_uint4(pack(v[0], v[1], p.out_dtype), pack(v[2], v[3], p.out_dtype),
                                                       pack(v[4], v[5], p.out_dtype), pack(v[6], v[7], p.out_dtype));
        }
    }
}

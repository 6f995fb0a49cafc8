// From a float32 accumulator to the result: scale, bias, activation, residual, one rounding.
#pragma once
#include "problem.cuh"

enum Activation { NONE = 0, RELU = 1, GELU = 2, GELU_ERF = 3, SILU = 4 };

// NaN stays NaN in each of them.
DEVICE float activate(float x, int activation) {
    switch (activation) {
        case RELU: return x < 0 ? 0 : x;
        case GELU: return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
        case GELU_ERF: return 0.5f * x * (1 + erff(x * 0.7071067812f));
        case SILU: return x / (1 + __expf(-x));
        default: return x;
    }
}

// Element (m, n) of y, from its accumulator.
DEVICE void finish(const Problem& p, const Matrix& at, int m, int n, float value) {
    if (at.unscale) value *= at.unscale[m];
    if (p.bias) value += load_float(p.bias, at.bias + n, p.bias_dtype);
    value = activate(value, p.activation);
    if (p.residual) {
        s64 from = at.residual + m * p.residual_row + n * p.residual_column;
        value += load_float(p.residual, from, p.residual_dtype);
    }
    store_float(p.out, at.out + m * p.out_row + n * p.out_column, p.out_dtype, value);
}

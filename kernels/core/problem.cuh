// The product that a kernel computes, y = act(x W^T + bias) + residual, as plan.py packs it.
#pragma once
#include "codec.cuh"

constexpr int BATCH_AXES = 3;

// Whether W's columns may have signs, which are x's to take.
template <class F>
constexpr bool SIGNED_COLUMNS = F::SCALING == SINGLE;

struct Problem {
    alignas(64) u64 map[16];  // x as the copy engine reads it (wgmma core)
    u64 out_map[16];          // out as it writes it, if results are `straight` and of 16 bits
    const u8 *low, *high, *scale;  // planes of W, all matrices of a stack one after the other in each
    const u16* x;             // rows of K float16 numbers
    const float* unscale;     // per batch row, the power of two that its float16 row was divided by; or null
    void* out;
    const void* bias;      // or null
    const void* residual;  // or null
    float* partials;       // sums that a block leaves for another (wgmma core), and whether they are there: zeros
    u32* flags;
    const u16* values;  // of a codebook
    const u8* group;    // the last plane of W
    s64 x_row;             // stride of x in elements
    s64 out_row, out_column, residual_row, residual_column;
    // Leading axes, slowest first, padded with ones: extents, and strides in matrices of W, in elements of x, out
    // and residual.
    s64 extent[BATCH_AXES], w_axis[BATCH_AXES], x_axis[BATCH_AXES], out_axis[BATCH_AXES], residual_axis[BATCH_AXES];
    s64 x_row_axis[BATCH_AXES];  // as x_axis, in rows; 0 where x was not converted
    int M, N, K, chunk;          // chunk: tiles of 64 columns that the decode core stages at a time
    int out_dtype, bias_dtype, residual_dtype, activation;
    int bias_stacked;      // bias has a row of N for every matrix of W
    int streamed;          // output tiles whose columns are shared out evenly (wgmma core)
    int box;               // batch rows that a copy of x brings (wgmma core)
    float lift;            // the power of two by which the weights were multiplied, taken back; times a tensor's scale
    int straight;          // whether scale, bias and one rounding make results, in rows of whole pieces
    const u16* signs;      // or null: of W's columns, [matrix of W][K], the bits that x is changed by (decode core)
};

// One matrix product of a batch: the problem with its pointers moved there.
struct Matrix {
    Planes w;
    const u16* x;
    const float* unscale;
    const u16* signs;
    s64 bias, out, residual;  // offsets in elements
    int axis[BATCH_AXES];     // index along each axis that x has, else 0
};

// Indices along the leading axes of the matrix of this number.
DEVICE void indices_of(const Problem& p, u32 matrix, u32 (&index)[BATCH_AXES]) {
#pragma unroll
    for (int axis = BATCH_AXES - 1; axis >= 0; axis--) {
        const u32 extent = u32(p.extent[axis]);
        index[axis] = extent > 1 ? matrix % extent : 0;
        if (extent > 1) matrix /= extent;
    }
}

template <class F>
DEVICE Matrix matrix_of(const Problem& p, u32 index) {
    Matrix at;
    s64 w = 0, x = 0, x_rows = 0, out = 0, residual = 0;
#pragma unroll
    for (int axis = BATCH_AXES - 1; axis >= 0; axis--) {
        u32 extent = u32(p.extent[axis]), i = 0;  // 64-bit division is a function call
        if (extent > 1) i = index % extent, index /= extent;
        w += i * p.w_axis[axis], x += i * p.x_axis[axis], x_rows += i * p.x_row_axis[axis];
        out += i * p.out_axis[axis], residual += i * p.residual_axis[axis];
        at.axis[axis] = p.x_axis[axis] ? int(i) : 0;
    }
    s64 tiles = w * ((p.N + 15) / 16) * ((p.K + 63) / 64);
    at.w = {p.low + tiles * F::LOW_BYTES, p.high + tiles * F::HIGH_BYTES, p.scale + tiles * F::SCALE_BYTES, p.group};
    if constexpr (F::GROUP_BYTES > 0)
        at.w.group += w * ((p.N + 15) / 16) * groups_of<F>((p.K + 63) / 64) * F::GROUP_BYTES;
    at.x = p.x + x, at.unscale = p.unscale ? p.unscale + x_rows : nullptr;
    if constexpr (SIGNED_COLUMNS<F>) at.signs = p.signs ? p.signs + w * p.K : nullptr;
    at.bias = p.bias_stacked ? w * p.N : 0, at.out = out, at.residual = residual;
    return at;
}

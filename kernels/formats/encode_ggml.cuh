// Floats to ggml's blocks by importance, as cuquant/formats/by_importance.py searches, rounding for rounding. Without one
// quantize.cu makes them.
#pragma once
#include "encode_search.cuh"
#include "ggml.cuh"

// Whether errors count by the mean square of the row that a weight is of, not by the block's.
template <class F>
constexpr bool BY_ROW = false;

template <int BITS, bool HAS_MIN>
constexpr bool BY_ROW<GgmlBlock<BITS, HAS_MIN>> = true;

// A thread's block, of weights whose errors count `w`, to shared memory; as `encode_block` of k-quants
// (encode_kquant.cuh) otherwise.
template <bool BY_IMPORTANCE, int BITS, bool HAS_MIN>
DEVICE bool encode_block(GgmlBlock<BITS, HAS_MIN>, const float (&x)[OWN], const float (&w)[OWN], u8* block, u32& d_bits) {
    static_assert(BY_IMPORTANCE && BITS < 8, "there is nothing to search for");
    using F = GgmlBlock<BITS, HAS_MIN>;
    int q[OWN];
    u32 m_bits = 0;
    if constexpr (HAS_MIN) {
        const Fit fit = affine<(1 << BITS) - 1, 36, false>(x, w, -0.9f, 0.05f, q);
        d_bits = float_to_half(fit.scale), m_bits = float_to_half(ieee_add(negated(fit.minimum), 0));
    } else {
        d_bits = float_to_half(symmetric<F::OFFSET, OWN>(x, [&](int j) { return w[j]; }, q));
    }
    F::store_scale_bits(block, d_bits | m_bits << 16);
#pragma unroll
    for (int j = 0; j < 16; j++) block[F::CODES_AT + j] = u8((q[j] & 15) | (q[j + 16] & 15) << 4);
    if constexpr (F::HAS_FIFTH) {
        u32 fifths = 0;
#pragma unroll
        for (int j = 0; j < OWN; j++) fifths |= u32(q[j] >> 4) << j;
        store_u32(block + F::FIFTH_AT, fifths);
    }
    return fits_half(d_bits) && fits_half(m_bits);
}

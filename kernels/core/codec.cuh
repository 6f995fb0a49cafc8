// How codes become numbers: the codec that a format asks for. All of them give operand A of a step of 16 columns,
// `codes` without the block's scale and `weights` with it.
#pragma once
#include "codebook.cuh"
#include "e2m1.cuh"
#include "integer.cuh"
#include "masked.cuh"
#include "procedure.cuh"

template <class F, int COPIES, Coding CODING = F::CODING>
struct CodecOf {
    using Type = IntegerCodes<F>;
};

template <class F, int COPIES>
struct CodecOf<F, COPIES, CODEBOOK> {
    using Type = Codebook<F, COPIES>;
};

template <class F, int COPIES>
struct CodecOf<F, COPIES, SIGNED_CODEBOOK> {
    using Type = Codebook<F, COPIES, /* signed */ true>;
};

template <class F, int COPIES>
struct CodecOf<F, COPIES, MASKED_CODEBOOK> {
    using Type = MaskedCodebook<F, COPIES>;
};

template <class F, int COPIES>
struct CodecOf<F, COPIES, E2M1> {
    using Type = E2m1Codes<F>;
};

template <class F, int COPIES>
struct CodecOf<F, COPIES, PROCEDURE> {
    using Type = Procedure<F>;
};

// COPIES: of a table in shared memory (codebook.cuh).
template <class F, int COPIES>
using Codec = typename CodecOf<F, COPIES>::Type;

// The codecs of W and of V, of which each may have a codebook, and a table, of its own.
template <class C, int TABLES>
struct Codecs {
    static constexpr int TABLE_BYTES = C::TABLE_BYTES;
    C both;

    DEVICE Codecs(const u16* values, const u16*, int lane) : both(values, lane) {}
    DEVICE void fill(int thread, int threads) { both.fill(thread, threads); }
    DEVICE C of(bool second) const { return both; }
};

template <class C>
struct Codecs<C, 2> {
    static constexpr int TABLE_BYTES = C::TWO_BYTES;
    C w, v;

    DEVICE Codecs(const u16* values, const u16* values_of_v, int lane) : w(values, lane), v(values_of_v, lane, 1) {}
    DEVICE void fill(int thread, int threads) const {
#pragma unroll 1
        for (int table = 0; table < 2; table++) of(table).fill(thread, threads, table);
    }
    DEVICE C of(bool second) const { return second ? v : w; }
};

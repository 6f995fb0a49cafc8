// How codes become numbers: the codec that a format asks for. All of them give operand A of a step of 16 columns,
// `codes` without the block's scale and `weights` with it.
#pragma once
#include "codebook.cuh"
#include "e2m1.cuh"
#include "integer.cuh"

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
struct CodecOf<F, COPIES, E2M1> {
    using Type = E2m1Codes<F>;
};

// COPIES: of a table in shared memory (codebook.cuh).
template <class F, int COPIES>
using Codec = typename CodecOf<F, COPIES>::Type;

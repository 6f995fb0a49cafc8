// How codes become numbers: the codec that a format asks for. All of them give operand A of a step of 16 columns,
// `codes` without the block's scale and `weights` with it.
#pragma once
#include "codebook.cuh"
#include "integer.cuh"

template <class F, int COPIES, bool LOOKUP = F::LOOKUP>
struct CodecOf {
    using Type = IntegerCodes<F>;
};

template <class F, int COPIES>
struct CodecOf<F, COPIES, true> {
    using Type = Codebook<F, COPIES>;
};

// COPIES: of a table in shared memory (codebook.cuh).
template <class F, int COPIES>
using Codec = typename CodecOf<F, COPIES>::Type;

// kbit5 with a codebook that is its upper half, backwards with signs, and that half.
#pragma once
#include "kbit.cuh"

using Format = KbitBlock</* bits */ 5, /* E4M4 */ CUQUANT_BLOCK_BYTES % 2 != 0, SIGNED_CODEBOOK>;

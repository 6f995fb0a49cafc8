// kbit2 with a codebook of two magnitudes with signs, and E4M4 scales.
#pragma once
#include "kbit.cuh"

using Format = KbitBlock</* bits */ 2, /* E4M4 */ true, MASKED_CODEBOOK>;

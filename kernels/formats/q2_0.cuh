// q2_0 in groups of 64 or 128 weights: see cuquant/formats/q2_0.py.
#pragma once
#include "two_bits.cuh"

using Format = TwoBitBlock<(CUQUANT_BLOCK_BYTES - 2) * 4, Fours</* at */ 2>, /* d at */ 0>;

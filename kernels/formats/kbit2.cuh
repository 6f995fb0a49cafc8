// kbit2: see cuquant/formats/kbit.py. Scales of one byte make blocks of odd length.
#pragma once
#include "kbit.cuh"

using Format = KbitBlock</* bits */ 2, /* E4M4 */ CUQUANT_BLOCK_BYTES % 2 != 0>;

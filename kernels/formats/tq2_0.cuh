// tq2_0: see cuquant/formats/tq.py.
#pragma once
#include "two_bits.cuh"

using Format = TwoBitBlock<256, Field<2, /* at */ 0, /* span */ 32>, /* d at */ 64>;

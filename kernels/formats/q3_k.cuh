// q3_k: see cuquant/formats/q3_k.py.
#pragma once
#include "kquant.cuh"

using Format = KQuantBlock</* bits */ 3, Field<2, 32, 32>, Field<1, 0, 32>, SixBits, /* bytes */ 110>;

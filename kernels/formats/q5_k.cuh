// q5_k: see cuquant/formats/q5_k.py.
#pragma once
#include "kquant.cuh"

using Format = KQuantBlock</* bits */ 5, Field<4, 48, 32>, Field<1, 16, 32>, PairsOfSixBits, /* bytes */ 176>;

// q4_k: see cuquant/formats/q4_k.py.
#pragma once
#include "kquant.cuh"

using Format = KQuantBlock</* bits */ 4, Field<4, 16, 32>, NoField, PairsOfSixBits, /* bytes */ 144>;

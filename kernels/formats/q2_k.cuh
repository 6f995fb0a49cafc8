// q2_k: see cuquant/formats/q2_k.py.
#pragma once
#include "kquant.cuh"

using Format = KQuantBlock</* bits */ 2, Field<2, 16, 32>, NoField, PairsOfNibbles, /* bytes */ 84>;

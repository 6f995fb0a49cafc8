// q6_k: see cuquant/formats/q6_k.py.
#pragma once
#include "kquant.cuh"

using Format = KQuantBlock</* bits */ 6, Field<4, 0, 64>, Field<2, 128, 32>, SignedBytes, /* bytes */ 210>;

// q4_0: see cuquant/formats/q4_0.py.
#pragma once
#include "ggml.cuh"

using Format = GgmlBlock</* bits */ 4, /* minimum */ false>;

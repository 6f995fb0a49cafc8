// q8_0: see cuquant/formats/q8_0.py.
#pragma once
#include "ggml.cuh"

using Format = GgmlBlock</* bits */ 8, /* minimum */ false>;

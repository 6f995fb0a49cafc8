// q5_0: see cuquant/formats/q5_0.py.
#pragma once
#include "ggml.cuh"

using Format = GgmlBlock</* bits */ 5, /* minimum */ false>;

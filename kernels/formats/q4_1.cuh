// q4_1: see cuquant/formats/q4_1.py.
#pragma once
#include "ggml.cuh"

using Format = GgmlBlock</* bits */ 4, /* minimum */ true>;

// q5_1: see cuquant/formats/q5_1.py.
#pragma once
#include "ggml.cuh"

using Format = GgmlBlock</* bits */ 5, /* minimum */ true>;

// q8_1: see cuquant/formats/q8_1.py.
#pragma once
#include "ggml.cuh"

using Format = GgmlBlock</* bits */ 8, /* minimum */ false, /* sum */ true>;

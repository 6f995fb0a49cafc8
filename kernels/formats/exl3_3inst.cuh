// EXL3's numbers of the procedure 3inst: see cuquant/formats/exl3.py.
#pragma once
#include "exl3.cuh"

using Format = Exl3Tile</* bits */ CUQUANT_BLOCK_BYTES / 32, THREE_INST>;

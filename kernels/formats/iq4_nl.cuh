// iq4_nl: see cuquant/formats/iq4_nl.py.
#pragma once
#include "iq4.cuh"

using Format = Iq4NlBlock;

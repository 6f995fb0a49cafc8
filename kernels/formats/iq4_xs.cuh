// iq4_xs: see cuquant/formats/iq4_xs.py.
#pragma once
#include "iq4.cuh"

using Format = Iq4XsBlock;

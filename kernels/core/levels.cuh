// Rows of float16 numbers that are stored before anybody knows their peak: what a mixture's gate and up make of x.
//
// Every COLUMNS numbers have a level of their own, and are divided by 256 to its power, so that their peak is between
// 2^5 and 2^13: most of a row, and mostly all, have the same. Afterwards those of lower levels are brought to the
// highest of their row (ops/moe.cu), which becomes the row's factor. What is 2^-29 of a row's peak or less is lost.
#pragma once
#include "types.cuh"

namespace levels {

constexpr int COLUMNS = 16, LOWEST = -15;
// In memory a level is a byte, from 1 on; 0 stands for numbers that are all 0, which go with any level.
constexpr int ZEROS = 0, FIRST = 1;

// Of numbers with a peak of these bits, of which the upper 16 are enough.
DEVICE int of_peak(u32 peak) { return max((int(peak >> 23) - (127 + 5)) >> 3, LOWEST); }

DEVICE float factor(int level) { return power_of_two(8 * level); }

// The byte of a level, given the upper 16 bits of the peak: without them it is subnormal, and arithmetic makes 0 of it.
DEVICE u8 as_byte(u32 peak, int level) { return u8(peak ? level - LOWEST + FIRST : ZEROS); }

// The factor of a row whose highest level is this byte's.
DEVICE float factor_of_byte(u32 byte) { return byte == ZEROS ? 1 : factor(int(byte) - FIRST + LOWEST); }

}  // namespace levels

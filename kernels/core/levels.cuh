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

DEVICE float factor(int level) { return power_of_two(8 * level); }

// Two levels at once, less LOWEST, one in each half, of numbers whose peaks have these upper 16 bits.
struct Two {
    u32 above;      // the lowest
    u32 exponents;  // of the peaks

    DEVICE Two(u32 peaks) : exponents(peaks >> 7 & 0x00ff00ff) {
        constexpr u32 LEAST = 127 + 5 + 8 * LOWEST;
        above = (__vmaxu2(exponents, LEAST * 0x10001) - LEAST * 0x10001) >> 3 & 0x001f001f;
    }

    // What numbers are multiplied by.
    DEVICE float low_factor() const { return __int_as_float(NONE - (above << 26)); }
    DEVICE float high_factor() const { return __int_as_float(NONE - ((above & 0x001f0000) << 10)); }

    // Bytes in memory, one in each half. Subnormal numbers are 0: arithmetic makes that of them.
    DEVICE u32 bytes() const { return above + __vminu2(exponents, 0x10001); }

private:
    static constexpr u32 NONE = u32(127 - 8 * LOWEST) << 23;
};

// The factor of a row whose highest level is this byte's.
DEVICE float factor_of_byte(u32 byte) { return byte == ZEROS ? 1 : factor(int(byte) - FIRST + LOWEST); }

}  // namespace levels

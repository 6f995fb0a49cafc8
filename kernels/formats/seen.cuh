// What is found out about a weight on its way to the fragment layout: places of numbers of 32 bits that are zeros before.
// `_Found` (cuquant/cuda/fragments.py) reads the first ones in this order.
#pragma once

enum Seen {
    GREATEST,           // of the blocks' peaks, as bits of floats; of E8M0 scales e + 1 of blocks that are not zeros
    LEAST,              // of those that are not 0, inverted
    LOST,               // 1 where a scale or a minimum would not come back with all its bits
    UNFIT,              // 1 where float16 lacks bits of weights, or exponents do not fit
    ADDED,              // to scales that are exponents
    GREATEST_EXPONENT,  // of E8M0 scales e of all blocks
    LEAST_EXPONENT,     // inverted
};

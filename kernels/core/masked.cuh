// Codes of 2 bits for two magnitudes with signs, -b, -a, a and b: half of them are looked up, of half one mask makes two.
//
// A subnormal float16 number of which the lowest bit of the exponent is set becomes 2^-14 more. So with a = c * 2^-24 and
// b = a + 2^-14 a weight's bits are c, a bit of the exponent and a sign: with c for both halves of a register a mask
// selects the others of two codes. As every ratio a / b below 1/2 is that of c and 1024 + c for some c, about, the codebook
// is in other units, which `Weight.scale` takes back (cuquant/formats/kbit.py). What shared memory brings of a table (all
// its 128 bytes a cycle go by at 64 weights) is half as much then, beside instructions of which the pipe has enough.
//
// Steps h = 0 and 2 are looked up, and their pairs in word 0 of a lane: byte h + t has those of t, j = 0 in its lower bits
// (codebook.cuh). Steps 1 and 3 are word 1's: a code is a sign, set for -b and -a, and a bit set for b. The pair of step
// 2b + 1, t and j has them, with q = 2b + j and the ends of the word joined, at
//
//     bit   16e + 8t + 2q + 1   16e + 8t + 2q - 4
//           sign                other bit           of its code e
//
// so that each of the 32 bits is somebody's, and a pair wants one shift (two of eight a rotation) and one mask.
#pragma once
#include "codebook.cuh"

template <class F, int COPIES>
struct MaskedCodebook : Codebook<F, COPIES> {
    using Table = Codebook<F, COPIES>;
    static_assert(F::BITS == 2 && F::SCALING == E4M4, "words of 16 codes, scales that float16 holds 2^11 times");

    u32 less;   // c, for two codes
    u32 boost;  // what the range of scales leaves room for in float16: a power of two, twice

    // Behind the table's values there is one more: `boost`.
    DEVICE MaskedCodebook(const u16* values, int lane, int table = 0)
        : Table(values, lane, table), less(values[2] * 0x10001), boost(values[4] * 0x10001) {}

    // What scales in float32 lack of those in float16.
    DEVICE float unscale(int) const { return low_to_float(boost) * SCALES; }

    DEVICE void codes(const Tile<F>& tile, int h, u32 (&a)[4]) const {
        if (h % 2 == 0) {
#pragma unroll
            for (int t = 0; t < 2; t++) Table::look_up(tile.low[0], h + t, a[2 * t], a[2 * t + 1]);
        } else {
#pragma unroll
            for (int r = 0; r < 4; r++) a[r] = and_or(turned(tile.low[1], h / 2 * 2 + r % 2, r / 2), 0x84008400, less);
        }
    }

    // The weights of step h in float16, rounded once.
    DEVICE void weights(const Tile<F>& tile, int h, u32 (&a)[4]) const {
        codes(tile, h, a);
        const u32 scales = mul_half2(tile.byte_scales(h), boost);
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = mul_half2(a[r], twice(scales, r % 2));
    }

    static constexpr float SCALES = 32768;  // 2^15, of `byte_scales`

private:
    // Signs to bits 15 and 31, the others to 10 and 26.
    static DEVICE u32 turned(u32 word, int q, int t) {
        const int left = 14 - 8 * t - 2 * q;
        return left <= 10 ? word << left : __funnelshift_l(word, word, left);
    }
};

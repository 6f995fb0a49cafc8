// Codes that are looked up, in a lane's words: where core/codebook.cuh has the pairs of them.
#pragma once
#include "share.cuh"

template <class F>
struct Pairs {
    // Byte m of `pairs` to pair 8 b + 4 j + m; of 5 bits without the fifth ones, which are byte m of `fifths`.
    static DEVICE void put(LaneShare<F>& share, int b, int j, u32 pairs, u32 fifths = 0) {
        if constexpr (F::BITS % 2) {
#pragma unroll
            for (int m = 0; m < 4; m++)
                put_one(share, 8 * b + 4 * j + m, (pairs >> 8 * m & 0xff) | (fifths >> 8 * m & 0xff) << 8);
        } else {
            share.low[F::BITS == 2 ? b : 2 * b + j] |= F::BITS == 2 ? pairs << 4 * j : pairs;
        }
    }

    // The way back; of 2 bits with those of the other j in the upper half of each byte.
    static DEVICE u32 get(const LaneShare<F>& share, int b, int j, u32& fifths) {
        fifths = 0;
        if constexpr (F::BITS % 2 == 0) return F::BITS == 2 ? share.low[b] >> 4 * j : share.low[2 * b + j];
        u32 pairs = 0;
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const u32 pair = get_one(share, 8 * b + 4 * j + m);
            pairs |= (pair & 0xff) << 8 * m, fifths |= pair >> 8 << 8 * m;
        }
        return pairs;
    }

private:
    static constexpr int PAIR = 2 * F::BITS, PER_WORD = 32 / PAIR, WORDS = F::LOW_BYTES / 128 + 1;

    static DEVICE u32& word_of(LaneShare<F>& share, int w) { return w < WORDS - 1 ? share.low[w] : share.high[0]; }

    static DEVICE void put_one(LaneShare<F>& share, int p, u32 bits) {
        if (p < 15) {
            word_of(share, p / PER_WORD) |= bits << p % PER_WORD * PAIR;
        } else {
#pragma unroll
            for (int w = 0; w < WORDS; w++) word_of(share, w) |= bits >> 2 * w << 30;
        }
    }

    static DEVICE u32 get_one(LaneShare<F> share, int p) {
        if (p < 15) return word_of(share, p / PER_WORD) >> p % PER_WORD * PAIR & ((1 << PAIR) - 1);
        u32 bits = 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) bits |= word_of(share, w) >> 30 << 2 * w;
        return bits;
    }
};

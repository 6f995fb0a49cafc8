// Codes that are looked up, in a lane's words: where core/codebook.cuh has the pairs of them.
#pragma once
#include "share.cuh"

// Codes of up to 4 bits, a byte each, to every second bit of their bytes, and back: a pair's first codes, and `<< 1` its
// second ones.
DEVICE u32 spread_bits(u32 codes) {
    codes = (codes | codes << 2) & 0x33333333;
    return (codes | codes << 1) & 0x55555555;
}

DEVICE u32 gather_bits(u32 codes) {
    codes &= 0x55555555;
    codes = (codes | codes >> 1) & 0x33333333;
    return (codes | codes >> 2) & 0x0f0f0f0f;
}

template <class F>
struct Pairs {
    // Byte m of `pairs` to pair 8 b + 4 j + m; of 5 bits without the fifth ones, which are byte m of `fifths`.
    static DEVICE void put(LaneShare<F>& share, int b, int j, u32 pairs, u32 fifths = 0) {
        static_assert(F::BITS > 2, "whose bits of all pairs are put together (put_both)");
        if constexpr (F::BITS % 2) {
#pragma unroll
            for (int m = 0; m < 4; m++)
                put_one(share, 8 * b + 4 * j + m, (pairs >> 8 * m & 0xff) | (fifths >> 8 * m & 0xff) << 8);
        } else {
            share.low[2 * b + j] |= pairs;
        }
    }

    // Puts all pairs, of 2 bits: byte m of word b has pair 8 b + m in its lower half and pair 8 b + 4 + m in the upper one. And
    // takes them back.
    static DEVICE void put_both(LaneShare<F>& share, const u32 (&pairs)[2]) {
        if constexpr (F::CODING == MASKED_CODEBOOK) {
            // Bits 4 j + 2 s + e of byte 2 b + t, of pair 8 b + 4 j + 2 + t: where s is 1 signs, else the others.
            const u32 codes = permute(pairs[0], pairs[1], 0x7632), flipped = ~(codes ^ (codes >> 2 & 0x33333333));
            const u32 bits = with_last_first(flipped);  // 16 e + 8 t + 4 b + 2 j + s
            share.low[0] = permute(pairs[0], pairs[1], 0x5410);
            share.low[1] = chosen(bits, __funnelshift_r(bits, bits, 4), 0xaaaaaaaa);
        } else {
            share.low[0] = pairs[0], share.low[1] = pairs[1];
        }
    }

    static DEVICE void get_both(const LaneShare<F>& share, u32 (&pairs)[2]) {
        if constexpr (F::CODING == MASKED_CODEBOOK) {
            const u32 bits = chosen(share.low[1], __funnelshift_l(share.low[1], share.low[1], 4), 0xaaaaaaaa);
            const u32 flipped = ~with_first_last(bits), codes = flipped ^ (flipped >> 2 & 0x33333333);
            pairs[0] = permute(share.low[0], codes, 0x5410), pairs[1] = permute(share.low[0], codes, 0x7632);
        } else {
            pairs[0] = share.low[0], pairs[1] = share.low[1];
        }
    }

    // Puts all pairs, of more bits: byte m of word 2 j + b has pair 8 b + 4 j + m, of 5 bits without the fifth ones, which
    // are bits 2 m and 2 m + 1 of byte 2 j + b of `fifths`; of 3 bits with any others above them.
    static DEVICE void put_all(LaneShare<F>& share, const u32 (&pairs)[4], u32 fifths = 0) {
        if constexpr (F::BITS == 3) {
            u32 steps[4];  // of step h bytes 2 (m % 2) + j (place_of)
#pragma unroll
            for (int h = 0; h < 4; h++) steps[h] = permute(pairs[h / 2], pairs[2 + h / 2], h % 2 ? 0x7362 : 0x5140);
#pragma unroll
            for (int w = 0; w < WORDS; w++) word_of(share, w) = chosen(steps[w], steps[3] << (6 - 2 * w), 0x3f3f3f3f);
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const u32 eight = fifths >> 8 * k, four = (eight & 0x0f) | (eight & 0xf0) << 12;
                put(share, k % 2, k / 2, pairs[k], (four & 0x00030003) | (four & 0x000c000c) << 6);
            }
        }
    }

    // The inverse of `put_all`; of 3 bits with others above them.
    static DEVICE void get_all(const LaneShare<F>& share, u32 (&pairs)[4], u32& fifths) {
        fifths = 0;
        if constexpr (F::BITS == 3) {
            u32 steps[4] = {share.low[0], share.low[1], share.high[0], 0};
            steps[3] = chosen(steps[0] >> 6, chosen(steps[1] >> 4, steps[2] >> 2, 0x0f0f0f0f), 0x03030303);
#pragma unroll
            for (int k = 0; k < 4; k++) pairs[k] = permute(steps[k % 2 * 2], steps[k % 2 * 2 + 1], k < 2 ? 0x6420 : 0x7531);
        } else {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 four;
                pairs[k] = get(share, k % 2, k / 2, four);
                four |= four >> 6;
                fifths |= ((four & 0x0f) | (four >> 12 & 0xf0)) << 8 * k;
            }
        }
    }

    // A pair's codes: the inverse of `put`.
    static DEVICE u32 get(const LaneShare<F>& share, int b, int j, u32& fifths) {
        fifths = 0;
        if constexpr (F::BITS % 2 == 0) return share.low[2 * b + j];
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

    // Where a pair is: from a bit of a word on, or, of those that are in all words (word WORDS), its bits 2w and 2w + 1
    // from a bit of word w on.
    struct Place {
        int word, bit;
    };

    static DEVICE Place place_of(int p) {
        if constexpr (F::BITS == 5) return {p / PER_WORD, p < 15 ? p % PER_WORD * PAIR : 30};
        const int h = p / 8 * 2 + p % 4 / 2, byte = p % 2 * 2 + p / 4 % 2;
        return {h, 8 * byte + (h < WORDS ? 0 : 6)};
    }

    static DEVICE void put_one(LaneShare<F>& share, int p, u32 bits) {
        const Place at = place_of(p);
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (at.word == w) word_of(share, w) |= bits << at.bit;
            if (at.word == WORDS) word_of(share, w) |= (bits >> 2 * w & 3) << at.bit;
        }
    }

    static DEVICE u32 get_one(LaneShare<F> share, int p) {
        const Place at = place_of(p);
        u32 bits = 0;
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            if (at.word == w) bits |= word_of(share, w) >> at.bit & ((1 << PAIR) - 1);
            if (at.word == WORDS) bits |= (word_of(share, w) >> at.bit & 3) << 2 * w;
        }
        return bits;
    }
};

// Scales of a row tile in the fragment layout, or what integer scales are multiplied by, as products take them, of formats
// with ROW_FACTORS (the picture is in core/tile.cuh), by the block of threads that has made them; and the factors of its
// rows. What is lifted is read from `own`, which is where it lies or in shared memory.
#pragma once
#include "lift.cuh"
#include "seen.cuh"
#include "share.cuh"

// The factors of a row tile's rows, of which the first one's peak is given.
template <class F>
DEVICE void store_factors(u32* factors, const u32* peaks) {
    const int g = threadIdx.x;
    if (g < 8) factors[g] = factor_of<F>(row_lift_of(peaks[g]), 0) | factor_of<F>(row_lift_of(peaks[g + 8]), 1) << 16;
}

// Whether a block with these bits has weights that would lack bits: float16's steps of 2^-24 are then 1/128 or more of
// those between its weights. By the peaks of formats: 8 of the latter (q4_0), 128 of them, or a minimum besides.
template <class F>
DEVICE bool is_small(u32 scale, int exponent) {
    LaneShare<F> share = {};
    share.scale = scale;
    const float peak = F::peak(share) * power_of_two(exponent);
    return peak > 0 && peak < power_of_two(MINIMUMS<F> ? -12 : F::BITS == 8 ? -13 : -14);
}

// `found`: of what was seen (seen.cuh) LOST, and UNFIT, where weights lack bits.
template <class F, int THREADS, bool GROUPED = (F::GROUP_BYTES > 0), bool INTEGERS = (F::SCALING >= BYTES)>
struct Lift {
    // Words of scales that a tile has: two scales of a row, or a scale and what is beside it. A thread takes four at a
    // time, of the same rows in all tiles.
    static constexpr int WORDS = F::SCALE_BYTES / 4, OWN = 4;
    static_assert(THREADS * OWN % WORDS == 0, "tiles end where threads do");

    static DEVICE void run(const u8* own, u8* scale, u8*, const u32* peaks, int tiles_k, u32* found) {
        const uint4* const given = reinterpret_cast<const uint4*>(own);
        uint4* const pieces = reinterpret_cast<uint4*>(scale);
        auto row8 = [](int w) { return w / (F::HAS_MIN ? 2 : 1) % 2; };
        int L[OWN];
#pragma unroll
        for (int w = 0; w < OWN; w++) L[w] = row_lift_of(peaks[(threadIdx.x * OWN + w) % WORDS / (WORDS / 8) + row8(w) * 8]);
        bool lossy = false, lacking = false;
        for (int piece = threadIdx.x; piece < tiles_k * WORDS / OWN; piece += THREADS) {
            uint4 v = given[piece];
            u32* const words = &v.x;
#pragma unroll
            for (int w = 0; w < OWN; w++) {
                const int exponent = L[w] - code_exponent<F>(row8(w));
                const u32 was = words[w], made = lifted<F>(was, L[w], row8(w), 1);
                lossy |= lifted<F>(made, L[w], row8(w), -1) != was;
                if constexpr (F::HAS_MIN)
                    lacking |= is_small<F>(was, exponent);
                else
                    lacking |= is_small<F>(was & 0xffff, exponent) || is_small<F>(was >> 16, exponent);
                words[w] = made;
            }
            pieces[piece] = v;
        }
        if (lossy) found[LOST] = 1;
        if (lacking) found[UNFIT] = 1;
    }
};

// How scales, and zero points, in the group plane are lifted.
template <class F, int THREADS>
struct Lift<F, THREADS, true, false> {
    static constexpr int OWN = F::HAS_MIN ? 2 : 1;  // words of a lane's two rows

    static DEVICE void run(const u8* own, u8*, u8* group, const u32* peaks, int tiles_k, u32* found) {
        const int records = groups_of<F>(tiles_k);
        const u32* const given = reinterpret_cast<const u32*>(own);
        u32* const words = reinterpret_cast<u32*>(group);
        const int g = threadIdx.x % 8, L[2] = {row_lift_of(peaks[g]), row_lift_of(peaks[g + 8])};
        bool lossy = false, lacking = false;
        for (int at = threadIdx.x; at < records * 8; at += THREADS) {
            const u32 was = given[at * OWN], zeros = F::HAS_MIN ? given[at * OWN + 1] : 0;
            u32 made = 0;
#pragma unroll
            for (int row8 = 0; row8 < 2; row8++) {
                const u32 scale = was >> 16 * row8 & 0xffff, to = lifted_half(scale, L[row8]);
                lossy |= lifted_half(to, -L[row8]) != scale;
                lacking |= is_small<F>(scale | (zeros >> 16 * row8) << 16, L[row8] - code_exponent<F>(row8));
                made |= to << 16 * row8;
            }
            words[at * OWN] = made;
            if (F::HAS_MIN) words[at * OWN + 1] = zeros;
        }
        if (lossy) found[LOST] = 1;
        if (lacking) found[UNFIT] = 1;
    }
};

// Integer scales: what multiplies them, and minimums, in the group plane. Weights lack bits, too, where a row has to be
// lowered; lifting loses none.
template <class F, int THREADS>
struct Lift<F, THREADS, true, true> {
    static constexpr int OWN = F::HAS_MIN ? 2 : 1;  // words of a lane's two rows

    // Whether there would be less than 2^7 of float16's steps of 2^-24 between two codes times the greatest scale, or,
    // between codes of 2 and 3 bits, of which a weight is few, 2^9; and less than 2^10 to the greatest minimum.
    static DEVICE bool is_small(u32 d, u32 m, int row8) {
        const float scale = fabsf(half_to_float(u16(d))), minimum = fabsf(half_to_float(u16(m)));
        const int least = (F::BITS < 4 ? 9 : 7) - F::SCALE_BITS - more_of_minimums<F>(row8);
        return scale < power_of_two(least) && minimum < power_of_two(10 - F::SCALE_BITS) && scale + minimum > 0;
    }

    static DEVICE void run(const u8* own, u8*, u8* group, const u32* peaks, int tiles_k, u32* found) {
        const int records = groups_of<F>(tiles_k);
        const u32* const given = reinterpret_cast<const u32*>(own);
        u32* const words = reinterpret_cast<u32*>(group);
        const int g = threadIdx.x % 8, L[2] = {row_lift_of(peaks[g]), row_lift_of(peaks[g + 8])};
        bool lacking = min(L[0], L[1]) < 0;
        for (int at = threadIdx.x; at < records * 8; at += THREADS) {
            u32 made[2] = {};
#pragma unroll
            for (int w = 0; w < OWN; w++) {
                const u32 was = given[at * OWN + w];
#pragma unroll
                for (int row8 = 0; row8 < 2; row8++)
                    made[w] |= lifted_group<F>(was >> 16 * row8, L[row8], row8, w, 1) << 16 * row8;
                words[at * OWN + w] = made[w];
            }
#pragma unroll
            for (int row8 = 0; row8 < 2; row8++)
                lacking |= is_small(made[0] >> 16 * row8, made[1] >> 16 * row8, row8);
        }
        if (lacking) found[UNFIT] = 1;
    }
};

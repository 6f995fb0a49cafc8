// Attention of a warp's queries to its share of a bucket.
//
//   scores^T [tokens x queries] = K Q^T      operand A: keys, rows are tokens      operand B: queries
//   sums^T [channels x queries] += V^T P^T   operand A: values, rows are channels  operand B: weights, transposed
//
// Weights are P = exp2(score - reference) * v_scale: those of a token whose values are small count for little, so the
// reference of a query is near the largest score + log2(v_scale), and float16 holds every weight that matters. It is
// moved when a weight exceeds 2^15, to where the largest is 2^10. The sum of exp2(score - reference) is in float32.
#pragma once
#include "queries.cuh"

constexpr float HEADROOM = 10.f;

DEVICE float load_shared_half(u32 address) {
    u16 bits;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address));
    return half_to_float(bits);
}

// `S` streams the tokens.
template <int BITS, class S>
struct Bucket {
    static constexpr int TOKENS = S::L::TOKENS, TILES = TOKENS / 16;
    // Queries in two parts of 256 channels leave few registers; from sm_90 on this does not help.
    static constexpr bool SCARCE = __CUDA_ARCH__ < 900 && HALVES > 1 && PADDED > 128;
    static constexpr int AT_ONCE = BITS >= 8 || SCARCE ? 1 : PAIRS;  // pairs of a key's units that are loaded together
    static constexpr int VALUES = BITS == 16 || SCARCE ? 1 : PAIRS;  // units of a value that are

    const Attention& p;
    Queries& q;
    S& stream;
    const int sequence, head, first_row, lane, g, i;
    float s[GROUPS][TILES][4];     // scores of tokens g and g + 8 of each tile
    u32 weight[GROUPS][TILES][2];  // as operand B: of tokens 2 i, 2 i + 1, and these + 8
    u32 seen;                      // bits of scores that are not hidden
    float excess[GROUPS][2];       // of sums, by the offsets of this lane's tokens; as float16 numbers of a shift of 0

    DEVICE Bucket(const Attention& p, Queries& q, S& stream, int sequence, int head, int first_row)
        : p(p), q(q), stream(stream), sequence(sequence), head(head), first_row(first_row), lane(stream.lane),
          g(stream.lane / 4), i(stream.lane % 4), excess() {}

    DEVICE void run() {
#pragma unroll 1
        for (int step = stream.first; step < stream.end; step += stream.stride) {
            const u32 keys = stream.wait();
            scores(keys);
            weights(keys, step);
            stream.template release<false>(step);
            values(stream.wait());
            stream.template release<true>(step);
        }
        if constexpr (BITS == 16)
#pragma unroll
            for (int n = 0; n < GROUPS; n++)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    const float first = __shfl_sync(~0u, q.o[n][0][c], i);
#pragma unroll
                    for (int m = 0; m < PAIRS * 4; m++)
#pragma unroll
                        for (int h = 0; h < 2; h++)
                            if (first != first) q.o[n][m][h * 2 + c] = first;
                }
        if constexpr (BALANCED<BITS>)
#pragma unroll
            for (int n = 0; n < GROUPS; n++)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
                    for (int step = 4; step < WARP; step *= 2) excess[n][c] += __shfl_xor_sync(~0u, excess[n][c], step);
#pragma unroll
                    for (int m = 0; m < PAIRS * 4; m++)
#pragma unroll
                        for (int h = 0; h < 2; h++)
                            q.o[n][m][h * 2 + c] -= excess[n][c] * power_of_two(shift<BITS>(m % 4 * 2 + h));
                }
    }

private:
    DEVICE void scores(u32 slot) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
            if constexpr (INTEGER<BITS>)
                integer_scores(slot, t);
            else
                float_scores(slot, t);
    }

    DEVICE void float_scores(u32 slot, int t) {
        float other[GROUPS][4];  // half of the products, so that they wait for each other half as long
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                s[n][t][c] = c % 2 < COLUMNS ? -float(OFFSET<BITS>) / UNSCALE<BITS> * q.sum[n][c % 2] : 0, other[n][c] = 0;
#pragma unroll
        for (int first = 0; first < PAIRS; first += AT_ONCE) {
            Units<BITS, AT_ONCE * 2> a, b;
            stream.key(a, slot, t * 2, first);
            stream.key(b, slot, t * 2 + 1, first);
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) multiply(t, other, first + u, a, b, u);
        }
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (BITS < 16 && c % 2 < COLUMNS) s[n][t][c] += other[n][c];
    }

    // Class by class: sums are multiplied by what its codes are larger.
    DEVICE void integer_scores(u32 slot, int t) {
        static_assert(CLASSES<BITS> == 1 || AT_ONCE == PAIRS, "all codes are there");
        int sums[GROUPS][4];
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int k = 0; k < 4; k++) sums[n][k] = BITS < 8 ? -OFFSET<BITS> * q.whole[n][k % 2] : 0;
#pragma unroll
        for (int first = 0; first < PAIRS; first += AT_ONCE) {
            Units<BITS, AT_ONCE * 2> a, b;
            stream.key(a, slot, t * 2, first);
            stream.key(b, slot, t * 2 + 1, first);
#pragma unroll
            for (int c = 0; c < CLASSES<BITS>; c++) {
#pragma unroll
                for (int n = 0; n < GROUPS; n++)
#pragma unroll
                    for (int k = 0; k < 4; k++) sums[n][k] *= c > 0 ? 1 << BITS : 1;
#pragma unroll
                for (int m = c; m < AT_ONCE * 2; m += CLASSES<BITS>) {
                    u32 k[4];
                    codes_of_product(a, m, k[0], k[2]);
                    codes_of_product(b, m, k[1], k[3]);
                    const int r = (first * 2 + m) * 2;
#pragma unroll
                    for (int n = 0; n < GROUPS; n++) mma_bytes<BITS == 8>(sums[n], k, q.bytes[n][r], q.bytes[n][r + 1]);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int h = 0; h < 4; h += 2) s[n][t][h] = float(sums[n][h] * 256 + sums[n][h + 1]);
    }

    // Adds pair `at` of units of tokens g (a) and g + 8 (b), which is pair u of a lane's.
    DEVICE void multiply(int t, float (&other)[GROUPS][4], int u, const Units<BITS, AT_ONCE * 2>& a,
                         const Units<BITS, AT_ONCE * 2>& b, int at) {
        u32 low[8], high[8];
        pairs(a, a, 2 * at, low);
        pairs(b, b, 2 * at, high);
        if constexpr (BITS == 16 && PADDED > CUQUANT_DIM) clear_padding(2 * u, low, high);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const u32 k[4] = {low[2 * m], high[2 * m], low[2 * m + 1], high[2 * m + 1]};
#pragma unroll
            for (int part = 0; part < HALVES; part++)
#pragma unroll
                for (int n = 0; n < GROUPS; n++) {
                    float(&sums)[4] = BITS < 16 && m % 2 ? other[n] : s[n][t];
                    mma_half(sums, k, q.b[part][n][u][2 * m], q.b[part][n][u][2 * m + 1], sums);
                }
        }
    }

    // What is behind a row of float16 numbers may be NaN.
    DEVICE void clear_padding(int unit, u32 (&low)[8], u32 (&high)[8]) const {
        const int channel = (i * PAIRS * 2 + unit) * 8;
        const u32 keep = (channel < CUQUANT_DIM ? 0xffff : 0) | (channel + 8 < CUQUANT_DIM ? 0xffff0000 : 0);
#pragma unroll
        for (int j = 0; j < 8; j++) low[j] &= keep, high[j] &= keep;
    }

    DEVICE void weights(u32 slot, int first) {
        constexpr float UNDONE = INTEGER<BITS> ? 1 : UNSCALE<BITS>;  // integers are scaled by queries
        float v_scale[TILES][2], gained[GROUPS][2];
        seen = ~0u;
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                // Infinite scales become NaN, as codes of 0 times them are: the products' sum is 0 but for rounding.
                const float loaded = BITS < 16 ? load_shared_half(stream.key_scale(slot, t * 2 + h)) : 1;
                const float k_scale = BITS < 16 ? fmaf(loaded, 0.f, loaded * UNDONE) : 1;
                const float stored = BITS < 16 ? load_shared_half(stream.value_scale(slot, t * 2 + h)) : 1;
                // NaN becomes infinite: its weight is above MOST_WEIGHT, which NaN is not.
                v_scale[t][h] = BITS < 16 ? fminf(stored + NOTHING, INFINITE) : 1;
#pragma unroll
                for (int n = 0; n < GROUPS; n++)
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        float& own = s[n][t][h * 2 + c];
                        // In two roundings: what the reference is made of, to the bit.
                        own = __fmul_rn(__fmul_rn(own, k_scale), q.scale[n][c]);
                    }
            }
        if (hides(slot, first)) {
            if (CUQUANT_MASKED && p.mask_dtype != NO_MASK)
                hide<true>(slot, first, v_scale);
            else
                hide<false>(slot, first, v_scale);
        }
        float w[GROUPS][TILES][4];
        if (__any_sync(~0u, weigh(v_scale, w, gained) > MOST_WEIGHT)) {
            move_references(v_scale);
            weigh(v_scale, w, gained);
        }
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) q.total[n][c] += gained[n][c];
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const float sign = BALANCED<BITS> && h ? -1 : 1;
                    const float second = COLUMNS == 2 ? w[n][t][h * 2 + 1] : 0;
                    const u32 pair = pack(sign * w[n][t][h * 2], sign * second, FLOAT16);
                    weight[n][t][h] = transposed(pair);
                    if constexpr (BALANCED<BITS>) {
                        constexpr float UNIT = 1 / UNSCALE<BITS>;
                        const float offset = (OFFSET<BITS> - h) * UNIT;
                        excess[n][0] = fmaf(low_to_float(pair), offset, excess[n][0]);
                        if (COLUMNS == 2) excess[n][1] = fmaf(high_to_float(pair), offset, excess[n][1]);
                    }
                }
        }
    }

    // Whether a query may not see all tokens of a step. Of few steps one does not where there is no mask: the last ones.
    DEVICE bool hides(u32 slot, int first) const {
        if (first + TOKENS > stream.end) return true;
        if (!CUQUANT_MASKED) return false;
        const bool later = load_shared_int(slot + S::L::SLOTS + lane % TOKENS * 4) > q.least_last;
        return __any_sync(~0u, later) || p.mask_dtype != NO_MASK;
    }

    template <bool BY_MASK>
    DEVICE void hide(u32 slot, int first, float (&v_scale)[TILES][2]) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int token = t * 16 + h * 8 + stream.token(g);
                const bool there = first + token < stream.end;
                if (!there) v_scale[t][h] = NOTHING;
                const int global = CUQUANT_MASKED && there ? load_shared_int(slot + S::L::SLOTS + token * 4) : 0;
#pragma unroll
                for (int n = 0; n < GROUPS; n++)
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        float& own = s[n][t][h * 2 + c];
                        bool visible = there & (!CUQUANT_MASKED || global <= q.last[n][c]);
                        if (BY_MASK)
                            visible = visible && unmasked(p, sequence, head, first_row + n * 8 + i * 2 + c, global, own);
                        own = visible ? own : -INFINITE;
                        seen &= visible ? ~0u : ~bit(n, t, h, c);
                    }
            }
    }

    // Weights of the tokens, what they add to the queries' sums, and the largest of this lane.
    DEVICE float weigh(const float (&v_scale)[TILES][2], float (&w)[GROUPS][TILES][4], float (&gained)[GROUPS][2]) const {
        float most = 0;
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                gained[n][c] = 0;
                float here = 0;
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float share = exp2_of(__fadd_rn(s[n][t][h * 2 + c], -q.reference[n][c]));
                        float own = BITS < 16 ? share * v_scale[t][h] : share;
                        if constexpr (CUQUANT_MASKED) own = seen & bit(n, t, h, c) ? own : 0;
                        gained[n][c] += share, w[n][t][h * 2 + c] = own;
                        here = fmaxf(here, fabsf(own));
                    }
                most = fmaxf(most, here);
            }
        return most;
    }

    // Tokens whose values are not finite count as others of their score, and then spoil what is summed up of values.
    DEVICE void move_references(float (&v_scale)[TILES][2]) {
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                float most = -INFINITE;
#pragma unroll
                for (int t = 0; t < TILES; t++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const float size = fabsf(v_scale[t][h]);
                        most = fmaxf(most, s[n][t][h * 2 + c] + (BITS < 16 && size < INFINITE ? log2_of(size) : 0));
                    }
#pragma unroll
                for (int step = 4; step < WARP; step *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
                float& reference = q.reference[n][c];
                const float moved = most - reference > log2_of(MOST_WEIGHT) ? reference_for(most, HEADROOM) : reference;
                const float factor = exp2_of(reference - moved);
                reference = moved;
                q.total[n][c] *= factor;
#pragma unroll
                for (int m = 0; m < PAIRS * 4; m++) q.o[n][m][c] *= factor, q.o[n][m][c + 2] *= factor;
                excess[n][c] *= factor;
            }
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int h = 0; h < 2; h++) v_scale[t][h] = fmaf(v_scale[t][h], 0.f, v_scale[t][h]);
    }

    DEVICE void values(u32 slot) {
#pragma unroll
        for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int first = 0; first < PAIRS; first += VALUES) {
                Units<BITS, VALUES> v[4];  // of rows 2 i, 2 i + 1, 2 i + 8 and 2 i + 9
#pragma unroll
                for (int k = 0; k < 4; k++) stream.value(v[k], slot, t * 2 + k / 2, k % 2, first);
                if constexpr (BITS == 16) spoil(v, t, first);
#pragma unroll
                for (int u = 0; u < VALUES; u++) {
                    u32 a[8], b[8];
                    pairs(v[0], v[1], u, a);
                    pairs<BALANCED<BITS> ? COMPLEMENTED : MASKED>(v[2], v[3], u, b);
                    centre<BITS>(a);
                    centre<BITS>(b);
#pragma unroll
                    for (int m = 0; m < 4; m++) {
                        const u32 k[4] = {a[2 * m], a[2 * m + 1], b[2 * m], b[2 * m + 1]};
                        const int o = (first + u) * 4 + m;
#pragma unroll
                        for (int n = 0; n < GROUPS; n++)
                            mma_half(q.o[n][o], k, weight[n][t][0], weight[n][t][1], q.o[n][o]);
                    }
                }
            }
        }
    }

    // Float16 values that are infinite or NaN count as 0, lest a weight of 0 makes them NaN, and spoil the queries that
    // see them: their first channel, which stands for all (`run`), and not the sum of weights.
    DEVICE void spoil(Units<BITS, VALUES> (&v)[4], int t, int unit) {
        u32 bad = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 carried = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) carried |= (v[k].w[j] & 0x7fff7fff) + 0x04000400;
            if (carried & 0x80008000 && (g * PAIRS + unit) * 8 < CUQUANT_DIM) {
                bad |= 1u << (2 * i + k % 2 + k / 2 * 8);
#pragma unroll
                for (int j = 0; j < 4; j++) v[k].w[j] = 0;
            }
        }
        if (!__any_sync(~0u, bad != 0)) return;
#pragma unroll
        for (int step = 1; step < WARP; step *= 2) bad |= __shfl_xor_sync(~0u, bad, step);
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const bool sees = (bad >> g & 1 && seen & bit(n, t, 0, c)) || (bad >> (8 + g) & 1 && seen & bit(n, t, 1, c));
                if (__ballot_sync(~0u, sees) & 0x11111111u << i) q.o[n][0][c] = __int_as_float(0x7fffffff);
            }
    }

    static DEVICE constexpr u32 bit(int n, int t, int h, int c) {
        static_assert(GROUPS * TILES * 4 <= 32, "each score has one");
        return 1u << (((n * TILES + t) * 2 + h) * 2 + c);
    }
};

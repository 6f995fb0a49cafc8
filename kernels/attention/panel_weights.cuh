// Weights of 64 rows of queries over a panel, in the registers of a warpgroup: from what products gave (panel_rows.cuh), without
// the tokens that a row does not see, and with references that move.
//
// Weights are as in bucket.cuh. What is rare (`move`) a warp does alone: warps do not wait for each other between products.
//
// With lane = 4 g + i a lane has rows g and g + 8 of its warp's 16, of scores tokens 8 m + 2 i and the one behind: number
// 4 m + 2 n + c is of row g + 8 n, token 8 m + 2 i + c.
#pragma once
#include "queries.cuh"
#include "panels.cuh"

#if __CUDA_ARCH__ == 900
struct PanelWeights {
    static constexpr int STEPS = CUQUANT_DIM / 16, TOKENS = PANEL_TOKENS;
    static_assert(GROUPS == 2 && HALVES == 1 && COLUMNS == 2, "a warp has 16 rows, each channel a float16 number");

    const Attention& p;
    const PanelRing& ring;
    const int sequence, head, first_row, lane, g, i;  // the warp's first row
    // Float16 numbers of a cache that has no others: all keys have this scale, and values 1, or infinity where a token has numbers
    // that are not finite. So they are looked at only where some token has.
    static constexpr bool DIRECT = PanelRing::DIRECT;
    const float keys_scale;
    u32 a[STEPS][4];  // queries
    float o[1][CUQUANT_DIM / 2];
    float s[1][TOKENS / 2];  // products, then weights that are multiplied next: `w` may still be read
    u32 w[TOKENS / 16][4];   // weights as operand A
    float reference[2], total[2];
    // Where queries are lifted keys' scales are multiplied by this, and powers divided: a whole one might have no room in float32
    // beside products.
    static constexpr float REST = 1ull << 40;
    float power[2];  // of two, by which products are multiplied
    bool lifted;     // whether it would be other than 1 for some row of the warp
    int last[2];     // slots that the rows see
    u32 seen;        // bits of scores that are not hidden

    // (The compiler cannot make a shuffle's result anew: in the loop it would ask for the thread's number each time.)
    DEVICE PanelWeights(const Attention& p, const PanelRing& ring, int sequence, int head, int first_row, int lane)
        : p(p), ring(ring), sequence(sequence), head(head), first_row(first_row), lane(lane), g(lane / 4),
          i(__shfl_sync(~0u, lane % 4, lane)), keys_scale(PanelScale(p.scale).of_keys) {}

    // What is known of a panel's tokens, asked for in front of its products, behind which it would wait as they do, and not
    // looked at before these are multiplied.
    using Scales = float4[TOKENS / 8];  // of this lane's
    struct Known {
        Scales scales;
        int4 largest;  // slots, scales
    };

    static DEVICE float4 floats(u32 address) {
        const int4 v = load_shared(address);
        return make_float4(__int_as_float(v.x), __int_as_float(v.y), __int_as_float(v.z), __int_as_float(v.w));
    }

    // Scales of a key's product and of a value's weight, for the token at c of m.
    static DEVICE float of_key(const float4& scale, int c) { return c ? scale.y : scale.x; }
    static DEVICE float of_value(const float4& scale, int c) { return c ? scale.w : scale.z; }

    static DEVICE u32 bit(int m, int n, int c) { return 1u << (m * 4 + n * 2 + c); }

    DEVICE float4 scale_of(u32 about, int m) const {
        float4 scale = floats(about + About::SCALES + i * 16 + m * 64);
        if (DIRECT) scale.x = scale.y = keys_scale;
        return scale;
    }

    DEVICE void take_weights() {
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++)
#pragma unroll
            for (int c = 0; c < 4; c++) w[k][c] = pack(s[0][k * 8 + c * 2], s[0][k * 8 + c * 2 + 1], FLOAT16);
    }

    DEVICE bool sees_all(int n, int largest_slot) const { return CUQUANT_MASKED < 2 && largest_slot <= last[n]; }

    // Weights, and what they add to the rows' sums, of a panel whose largest scale is known. RARE: tokens may be hidden, queries
    // lifted.
    template <bool RARE>
    DEVICE void weigh(u32 panel, const Scales& scales, float largest, float (&gained)[2]) {
        if (RARE && lifted)
#pragma unroll
            for (int at = 0; at < TOKENS / 2; at++) s[0][at] *= power[at / 2 % 2];
        const float rest = RARE ? rest_of_power() : 1;
#pragma unroll
        for (int at = 0; at < TOKENS / 2; at++) {
            const int n = at / 2 % 2;
            const float scale = (DIRECT ? keys_scale : of_key(scales[at / 4], at % 2)) * rest;
            s[0][at] = CUQUANT_MASKED == 2 ? __fmul_rn(s[0][at], scale) : fmaf(s[0][at], scale, -reference[n]);
        }
        if (CUQUANT_MASKED == 2)
            hide_by_mask(ring.about(panel));
        else if (RARE)
            hide(panel, [](float& own, bool visible) { own = visible ? own : -INFINITE; });
        gained[0] = gained[1] = 0;
#pragma unroll
        for (int at = 0; at < TOKENS / 2; at++) {
            const float share = exp2_of(s[0][at]);
            s[0][at] = DIRECT ? share : share * of_value(scales[at / 4], at % 2);
            gained[at / 2 % 2] += share;
        }
        if (DIRECT && RARE && largest == INFINITE)
#pragma unroll
            for (int at = 0; at < TOKENS / 2; at++) s[0][at] *= of_value(scale_of(ring.about(panel), at / 4), at % 2);
        // Nothing comes of a hidden token's scale, though it be infinite.
        if (RARE && largest == INFINITE)
#pragma unroll
            for (int at = 0; at < TOKENS / 2; at++) s[0][at] = seen >> at & 1 ? s[0][at] : 0;
    }

    // Finds out which tokens each row sees, of those that some query may not see: eight bits for each m.
    template <class F>
    DEVICE void hide(u32 panel, F each) {
        const u32 about = ring.about(panel);
        const int2 hidden = load_shared_pair(about + About::HIDDEN);
#pragma unroll
        for (int m = 0; m < TOKENS / 8; m++) {
            if (!((m < 4 ? hidden.x : hidden.y) >> m % 4 * 8 & 0xff)) continue;
            const int2 slots = load_shared_pair(about + About::SLOTS + m * 32 + i * 8);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const bool visible = (c ? slots.y : slots.x) <= last[n];
                    each(s[0][m * 4 + n * 2 + c], visible);
                    seen &= visible ? ~0u : ~bit(m, n, c);
                }
        }
    }

    // Where a mask may hide tokens, or change scores: these, as they are, become logarithms of weights.
    DEVICE void hide_by_mask(u32 about) {
        seen = 0;
#pragma unroll
        for (int at = 0; at < TOKENS / 2; at++) {
            const int m = at / 4, n = at / 2 % 2, c = at % 2;
            const bool visible = masked(about, m, n, c, s[0][at]);
            s[0][at] = visible ? s[0][at] - reference[n] : -INFINITE;
            seen |= visible ? bit(m, n, c) : 0;
            asm volatile("" : "+r"(seen) :: "memory");  // one after the other: there are no registers for all at once
        }
    }

    DEVICE bool masked(u32 about, int m, int n, int c, float& score) const {
        const int slot = load_shared_int(about + About::SLOTS + (m * 8 + 2 * i + c) * 4);
        return slot <= last[n] && unmasked(p, sequence, head, first_row + n * 8 + g, slot, score);
    }

    // A row's reference is moved where a weight might be above MOST_WEIGHT. If a row sees a whole panel none is larger than the sum
    // of those that a lane has of it, but for values' scales, times the panel's largest scale; else weights themselves are looked
    // at. So no row's result depends on other rows, or on what it does not see. References of rows that have seen anything are
    // whole numbers: what goes with them is multiplied by powers of two, if they are below 2^24.
    //
    // The largest weight of those who move is about 2^8: room for a sum of 16, and for scales that differ.
    static constexpr int ROOM_ABOVE = 8;

    DEVICE bool in_row(bool any_lane) const { return __ballot_sync(~0u, any_lane) >> lane / 4 * 4 & 15; }

    static DEVICE float largest_of_row(float v) {
        v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
        return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
    }

    // The largest magnitude of the weights of row n that a lane has.
    DEVICE float largest_weight(int n) const {
        float most = 0;
#pragma unroll
        for (int at = 0; at < TOKENS / 2; at++)
            if (at / 2 % 2 == n) most = fmaxf(most, fabsf(s[0][at]));
        return most;
    }

    DEVICE void move(u32 panel, const bool (&above)[2], float (&gained)[2]) {
        pin(o);
        float most[2];
        bool infinite[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            most[n] = largest_of_row(largest_weight(n));
            const bool far = above[n] && fabsf(reference[n]) >= WHOLE;
            infinite[n] = in_row(gained[n] == INFINITE || far) || most[n] == INFINITE;
        }
        // No number has room for these: the first that a row sees, or much larger than what it has seen; or the reference has no
        // room for what is added to it.
        if (__any_sync(~0u, infinite[0] | infinite[1])) restart<false>(panel, infinite, gained);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int exponent = (__float_as_int(most[n]) >> 23) - 127 - ROOM_ABOVE;
            const int up = in_row(above[n]) && !infinite[n] ? max(exponent, 0) : 0;
            const float factor = power_of_two(-up);
            reference[n] += up;
            gained[n] *= factor;
#pragma unroll
            for (int m = 0; m < TOKENS / 8; m++) s[0][m * 4 + n * 2] *= factor, s[0][m * 4 + n * 2 + 1] *= factor;
            scale_sums(n, factor);
        }
        pin(o);
    }

    DEVICE void scale_sums(int n, float factor) {
        total[n] *= factor;
#pragma unroll
        for (int m = 0; m < CUQUANT_DIM / 8; m++) o[0][m * 4 + n * 2] *= factor, o[0][m * 4 + n * 2 + 1] *= factor;
    }

    // Weights of some rows, whose references go by their largest score. FIRST: nothing was seen before, and `s` has products.
    // Else they are multiplied once more, by this warp. What has an infinite scale becomes NaN.
    template <bool FIRST>
    DEVICE void restart(u32 panel, const bool (&rows)[2], float (&gained)[2]) {
        const u32 about = ring.about(panel);
        if (FIRST && CUQUANT_MASKED == 2) seen = 0;
        float most[2] = {-INFINITE, -INFINITE};
#pragma unroll(FIRST ? TOKENS / 8 : 1)
        for (int m = 0; m < TOKENS / 8; m++) {
            float x[4];
            const float4 scale = scale_of(about, m);
            scores<FIRST>(panel, m, scale, x);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const float size = fabsf(of_value(scale, c)), lift = size < INFINITE ? log2_of(size) : 0;
                    most[n] = fmaxf(most[n], seen & bit(m, n, c) ? x[n * 2 + c] + lift : -INFINITE);
                }
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            most[n] = largest_of_row(most[n]);
            const bool moves = rows[n] && most[n] - reference[n] > log2_of(MOST_WEIGHT);
            const float moved = moves ? reference_for(ceilf(most[n]), ROOM_ABOVE) : reference[n];
            const float factor = exp2_of(reference[n] - moved);
            reference[n] = moved;
            if (!FIRST) scale_sums(n, factor);
            if (rows[n]) gained[n] = 0;
        }
#pragma unroll
        for (int m = 0; m < TOKENS / 8; m++) {
            float x[4];
            const float4 scale = scale_of(about, m);
            scores<FIRST>(panel, m, scale, x);
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const float share = seen & bit(m, n, c) ? exp2_of(x[n * 2 + c] - reference[n]) : 0;
                    const float given = of_value(scale, c);
                    float& own = s[0][m * 4 + n * 2 + c];
                    own = !rows[n] ? own : seen & bit(m, n, c) ? share * fmaf(given, 0.f, given) : 0;
                    gained[n] += rows[n] ? share : 0;
                }
        }
    }

private:
    DEVICE float rest_of_power() const { return lifted ? REST : 1; }

    // Scores of the tokens at m, both rows: x[2 n + c]. A mask is asked again.
    template <bool FIRST>
    DEVICE void scores(u32 panel, int m, const float4& scale, float (&x)[4]) {
        if (FIRST)
#pragma unroll
            for (int j = 0; j < 4; j++) x[j] = s[0][m * 4 + j];
        else
            multiply_again(ring.keys(panel) + (m * 8 + g) * 128, x);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float& own = x[n * 2 + c];
                own = __fmul_rn(own * power[n], of_key(scale, c) * rest_of_power());
                if (CUQUANT_MASKED == 2 && masked(ring.about(panel), m, n, c, own)) seen |= bit(m, n, c);
            }
    }

    // Queries by eight keys, of which row g begins at `row`.
    DEVICE void multiply_again(u32 row, float (&x)[4]) const {
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = 0;
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const u32 from = row + k / 4 * PANEL_ROWS + i * 4;
            mma_half(x, a[k], load_shared_int(from + (k % 4 * 2 ^ g) * 16), load_shared_int(from + (k % 4 * 2 + 1 ^ g) * 16), x);
        }
    }
};
#endif

// 64 rows of a key head's queries, in the registers of a warpgroup, and what is summed up for them over panels (panels.cuh).
//
//   scores [rows x tokens] = Q K^T      operand A: queries      operand B: keys, a row each
//   sums [rows x channels] += P V       operand A: weights      operand B: values, turned
//
// Weights are as in bucket.cuh. Scores of the next panel are multiplied in front of this one's sums, so that the tensor cores
// have these to do while weights are worked out:
//
//   tensor cores:   scores 1, sums 0   | scores 2, sums 1   | ...
//   warpgroup:           weights 1          weights 2
//
// With lane = 4 g + i a lane has rows g and g + 8 of its warp's 16, of scores tokens 8 n + 2 i and the one behind.
#pragma once
#include "queries.cuh"
#include "panels.cuh"

#if __CUDA_ARCH__ == 900
struct PanelRows {
    static constexpr int STEPS = CUQUANT_DIM / 16, TOKENS = PANEL_TOKENS;
    static_assert(GROUPS == 2 && HALVES == 1 && COLUMNS == 2, "a warp has 16 rows, each channel a float16 number");

    const Attention& p;
    const PanelRing& ring;
    const int sequence, head, first_row, barrier, lane, g, i;  // the warp's first row, and where its warpgroup meets
    u32 a[STEPS][4];  // queries
    float o[1][CUQUANT_DIM / 2];
    float s[1][TOKENS / 2];  // scores, then weights that are multiplied next: `w` may still be read
    u32 w[TOKENS / 16][4];   // weights as operand A
    float scale[2], reference[2], total[2];
    int last[2];
    u32 seen;  // bits of scores that are not hidden

    DEVICE PanelRows(const Attention& p, const PanelRing& ring, int sequence, int head, int first_row, int barrier, int lane)
        : p(p), ring(ring), sequence(sequence), head(head), first_row(first_row), barrier(barrier), lane(lane), g(lane / 4), i(lane % 4) {}

    // `writes`: queries are left for `importance`.
    DEVICE void begin(const Given& given, bool writes) {
        Queries q;
        q.take(p, given, sequence, head, first_row, writes, lane);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int u = 0; u < PAIRS; u++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 x[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) x[j] = q.b[0][n][u][half * 4 + j];
                    turn(x);
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        if (j * PAIRS + u < STEPS) a[j * PAIRS + u][n + 2 * half] = x[j];
                }
            scale[n] = of_row(q.scale[n]);
            last[n] = CUQUANT_MASKED ? of_row(q.last[n]) : 0x7fffffff;
            reference[n] = Queries::LEAST, total[n] = 0;
        }
#pragma unroll
        for (int m = 0; m < CUQUANT_DIM / 2; m++) o[0][m] = 0;
    }

    // `panels` pairs of keys and values, every `apart`-th of the ring's from `panel` on.
    DEVICE void run(int panels, int panel, int apart) {
        if (panel >= panels) return;
        PanelPlace place;
        int before = -1;  // slot of the values that sums may still read
        place.advance(panel * 2);
        Known known = look(place);
        multiply_keys(place);
        wgmma_commit();  // nothing
#pragma unroll 1
        while (true) {
            find_weights(place, known, before);
#pragma unroll
            for (int k = 0; k < TOKENS / 16; k++)
#pragma unroll
                for (int c = 0; c < 4; c++) w[k][c] = pack(s[0][k * 8 + c * 2], s[0][k * 8 + c * 2 + 1], FLOAT16);
            before = place.at + 1;
            panel += apart;
            if (panel >= panels) break;
            place.advance(apart * 2);
            known = look(place);
            multiply_keys(place);
            multiply_values(before);
        }
        multiply_values(before);
        wgmma_wait<0>();
        pin(o);
    }

    // To shared memory: rows of the warp, `WIDTH` numbers apart; and their references and sums of weights.
    static constexpr int WIDTH = CUQUANT_DIM + 4;  // so that rows begin in other banks
    DEVICE void store(float* sums, float2* weights) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float all = total[n];
            all += __shfl_xor_sync(~0u, all, 1);
            all += __shfl_xor_sync(~0u, all, 2);
            if (i == 0) weights[n * 8 + g] = make_float2(reference[n], all);
            float* const row = sums + (n * 8 + g) * WIDTH + i;
#pragma unroll
            for (int m = 0; m < CUQUANT_DIM / 8; m++)
#pragma unroll
                for (int c = 0; c < 2; c++) row[m / 2 * 16 + m % 2 * 4 + c * 8] = o[0][m * 4 + n * 2 + c];
        }
    }

private:
    // Of row g, from the lane that has rows 2 i and 2 i + 1.
    template <class T>
    DEVICE T of_row(const T (&two)[2]) const {
        const int from = lane / 4 * 4 + g / 2;
        const T even = __shfl_sync(~0u, two[0], from), odd = __shfl_sync(~0u, two[1], from);
        return g % 2 ? odd : even;
    }

    // A 4 x 4 matrix of a lane's registers and four lanes.
    DEVICE void turn(u32 (&x)[4]) const {
#pragma unroll
        for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j & bit) continue;
                const bool upper = i & bit;
                const u32 other = __shfl_xor_sync(~0u, upper ? x[j] : x[j | bit], bit);
                (upper ? x[j] : x[j | bit]) = other;
            }
    }

    // What describes an operand of rows of 128 bytes, eight of which are 1024; for values, blocks of 64 channels lie PANEL_ROWS
    // apart.
    static DEVICE u64 described(u32 address, int apart) {
        return u64(address >> 4) | u64(apart >> 4) << 16 | u64(64) << 32 | u64(1) << 62;
    }

    using Scales = float4[TOKENS / 8];

    // What products of a panel are multiplied by, in this lane, asked for while others are multiplied.
    struct Known {
        float4 scales[TOKENS / 8];
        float largest;
        int hides;
    };

    static DEVICE float4 floats(u32 address) {
        const int4 v = load_shared(address);
        return make_float4(__int_as_float(v.x), __int_as_float(v.y), __int_as_float(v.z), __int_as_float(v.w));
    }

    // When the panel of keys and that of values are there.
    DEVICE Known look(const PanelPlace& place) const {
        const u32 about = ring.about(place.at);
        Known known;
        barrier_wait(ring.full + place.at * 8, place.parity);
        barrier_wait(ring.full + place.at * 8 + 8, place.parity);
        const int4 hidden = load_shared(about + About::HIDDEN);
        const float4 largest = floats(about + About::LARGEST);
        known.hides = hidden.x | hidden.y | hidden.z | hidden.w;
        known.largest = fmaxf(fmaxf(largest.x, largest.y), fmaxf(largest.z, largest.w));
#pragma unroll
        for (int m = 0; m < TOKENS / 8; m++) known.scales[m] = floats(about + About::SCALES + i * 16 + m * 64);
        return known;
    }

    DEVICE void multiply_keys(const PanelPlace& place) {
        const u64 keys = described(ring.slot(place.at), 16);
        pin(a), pin(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const u64 step = keys + (k / 4 * PANEL_ROWS >> 4) + k % 4 * 2;
            if (k == 0)
                Wgmma<TOKENS>::set(s[0], a[k], step);
            else
                Wgmma<TOKENS>::add(s[0], a[k], step);
        }
        wgmma_commit();
    }

    DEVICE void multiply_values(int slot) {
        const u64 values = described(ring.slot(slot), PANEL_ROWS);
        pin(w), pin(o);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++) Wgmma<CUQUANT_DIM>::add_turned(o[0], w[k], values + (k * 16 * 128 >> 4));
        wgmma_commit();
    }

    // What hides tokens.
    enum Hiding { NONE, BY_SLOT, BY_MASK };

    // Weights of a panel whose scores are multiplied. Then sums of the one before are there, whose values are in slot `before`.
    DEVICE void find_weights(const PanelPlace& place, const Known& known, int before) {
        const bool first = before < 0;
        wgmma_wait<1>();
        pin(s);
        if (CUQUANT_MASKED == 2)
            finish_weights<BY_MASK>(place, known, first);
        else if (__builtin_expect(known.hides, 0))
            finish_weights<BY_SLOT>(place, known, first);
        else
            finish_weights<NONE>(place, known, first);
        barrier_arrive(ring.empty + place.at * 8, elected());
        pin(s);
        wgmma_wait<0>();
        barrier_arrive(ring.empty + before * 8, bool((before >= 0) & elected()));
    }

    // A row's reference is moved where a weight might be above MOST_WEIGHT: none is larger than the sum of those that a lane has
    // of the row, but for values' scales, times the largest scale that the row sees. So it goes by nothing else, as weights do, and
    // no row's result depends on others, or on what it does not see. That takes scores again, which all warps multiply together.
    // What is worked out in front of that branch stays there, and does not wait for sums. The first panel moves all rows.
    template <Hiding HIDING>
    DEVICE void finish_weights(const PanelPlace& place, const Known& known, bool first) {
        const Scales& scales = known.scales;
        const u32 about = ring.about(place.at);
        float gained[2], largest[2];
        bool above[2] = {true, true}, moves = first;
        if (!first) {
            if (HIDING != NONE) hide<HIDING>(about, scales);
            weigh<HIDING, false>(scales, gained, largest);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (HIDING == NONE || (HIDING == BY_SLOT && sees_all(n))) largest[n] = known.largest;
                above[n] = gained[n] * largest[n] > MOST_WEIGHT;
            }
            moves = any_of_warpgroups<WARPGROUP>(barrier, above[0] | above[1]);
        }
        if (__builtin_expect(moves, 0)) {
            wgmma_wait<0>();
            barrier_wait(ring.full + place.at * 8, place.parity);  // it has; without a branch here products would all wait
            multiply_keys(place);
            wgmma_wait<0>();
            pin(s);
            if (HIDING != NONE) hide<HIDING>(about, scales);
            move_references<HIDING>(scales, above);
            weigh<HIDING, true>(scales, gained, largest);
        }
        total[0] += gained[0], total[1] += gained[1];
    }

    DEVICE float score(float product, float k_scale, int n) const { return __fmul_rn(__fmul_rn(product, k_scale), scale[n]); }

    // Whether row n sees all tokens: those of four lanes.
    DEVICE bool sees_all(int n) const {
        const u32 own = 0x33333333u << 2 * n;
        return (__ballot_sync(~0u, (seen & own) == own) >> lane / 4 * 4 & 15) == 15;
    }

    // Weights, what they add to the rows' sums, and, where any are hidden, the largest scale of the others' values. SPOILS: infinite
    // ones become NaN.
    template <Hiding HIDING, bool SPOILS>
    DEVICE void weigh(const Scales& scales, float (&gained)[2], float (&largest)[2]) {
        gained[0] = gained[1] = largest[0] = largest[1] = 0;
#pragma unroll
        for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
            for (int n = 0; n < 2; n++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int at = m * 4 + n * 2 + c;
                    float& own = s[0][at];
                    const float given = c ? scales[m].w : scales[m].z;
                    float share = exp2_of(HIDING == BY_MASK ? __fadd_rn(own, -reference[n])
                                                            : fmaf(own * (c ? scales[m].y : scales[m].x), scale[n], -reference[n]));
                    own = share * (SPOILS ? fmaf(given, 0.f, given) : given);
                    if (HIDING != NONE) {
                        const bool visible = seen >> at & 1;
                        share = visible ? share : 0, own = visible ? own : 0;
                        largest[n] = fmaxf(largest[n], visible ? fabsf(given) : 0);
                    }
                    gained[n] += share;
                }
    }

    // Which tokens are seen. Where a mask may change them scores take the products' place, those that are not seen as -infinity.
    template <Hiding HIDING>
    DEVICE void hide(u32 about, const Scales& scales) {
        seen = 0;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int row = first_row + n * 8 + g;
#pragma unroll
            for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int at = m * 4 + n * 2 + c, slot = load_shared_int(about + About::SLOTS + (m * 8 + 2 * i + c) * 4);
                    bool visible = slot >= 0 && slot <= last[n];
                    if (HIDING == BY_MASK) {
                        float own = score(s[0][at], c ? scales[m].y : scales[m].x, n);
                        visible = visible && unmasked(p, sequence, head, row, slot, own);
                        s[0][at] = visible ? own : -INFINITE;
                    }
                    seen |= u32(visible) << at;
                    asm volatile("" : "+r"(seen) :: "memory");  // one after the other: there are no registers for all at once
                }
        }
    }

    // The largest weight of those who move is 2^8: room for a sum of 16, and for scales that differ.
    static constexpr float ROOM_ABOVE = 8;
    template <Hiding HIDING>
    DEVICE void move_references(const Scales& scales, const bool (&above)[2]) {
        pin(o);
        float most[2] = {-INFINITE, -INFINITE};
#pragma unroll
        for (int m = 0; m < TOKENS / 8; m++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const float size = fabsf(c ? scales[m].w : scales[m].z), lift = size < INFINITE ? log2_of(size) : 0;
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float own = s[0][m * 4 + n * 2 + c];
                    const float all = (HIDING == BY_MASK ? own : score(own, c ? scales[m].y : scales[m].x, n)) + lift;
                    most[n] = fmaxf(most[n], HIDING == NONE || seen >> (m * 4 + n * 2 + c) & 1 ? all : -INFINITE);
                }
            }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            most[n] = fmaxf(most[n], __shfl_xor_sync(~0u, most[n], 1));
            most[n] = fmaxf(most[n], __shfl_xor_sync(~0u, most[n], 2));
            const bool moves = __ballot_sync(~0u, above[n]) >> lane / 4 * 4 & 15;
            const float moved = moves ? fmaxf(reference[n], most[n] - ROOM_ABOVE) : reference[n];
            const float factor = exp2_of(reference[n] - moved);
            reference[n] = moved;
            total[n] *= factor;
#pragma unroll
            for (int m = 0; m < CUQUANT_DIM / 8; m++) o[0][m * 4 + n * 2] *= factor, o[0][m * 4 + n * 2 + 1] *= factor;
        }
        pin(o);
    }
};
#endif

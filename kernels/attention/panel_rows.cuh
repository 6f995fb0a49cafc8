// 64 rows of a key head's queries, in the registers of a warpgroup, and what is summed up for them over panels (panels.cuh).
//
//   scores [rows x tokens] = Q K^T      operand A: queries      operand B: keys, a row each
//   sums [rows x channels] += P V       operand A: weights      operand B: values, turned
//
// Scores of the next panel are multiplied in front of this one's sums, so that the tensor cores have these to do while weights are
// worked out (panel_weights.cuh):
//
//   tensor cores:   scores 1, sums 0   | scores 2, sums 1   | ...
//   warpgroup:           weights 1          weights 2
#pragma once
#include "panel_weights.cuh"

#if __CUDA_ARCH__ == 900
struct PanelRows : PanelWeights {
    static constexpr int TURN = CONVERTED + 2;  // barriers where warpgroups wait for their turns

    const int second;  // whether the warpgroup is the second
    u32 panels;        // where they begin, in 16 bytes

    DEVICE PanelRows(const Attention& p, const PanelRing& ring, int sequence, int head, int first_row, int second, int lane)
        : PanelWeights(p, ring, sequence, head, first_row, lane), second(second), panels(ring.panels / 16) {
        asm volatile("" : "+r"(panels));
    }

    static constexpr float LEAST_POWER = 1.f / (1 << 18);  // of queries of 2^-4, which were lifted to 2^14

    // `writes`: queries are left for `importance`.
    DEVICE void begin(const Given& given, bool writes) {
        Queries q;
        q.take(p, given, sequence, head, first_row, writes, lane);
        const float beyond = power_of_two(PanelScale(p.scale).beyond);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int u = 0; u < PAIRS; u++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 x[4];
#pragma unroll
                    for (int j = 0; j < 4; j++) x[j] = q.b[0][n][u][half * 4 + j];
                    transpose(x);
#pragma unroll
                    for (int j = 0; j < 4; j++)
                        if (j * PAIRS + u < STEPS) a[j * PAIRS + u][n + 2 * half] = x[j];
                }
            power[n] = q.power[n];
            last[n] = min(CUQUANT_MASKED ? of_row(q.last[n]) : NO_SLOT, NO_SLOT - 1);
            reference[n] = Queries::LEAST, total[n] = 0;
            // Queries whose largest channel is from 2^-4 to 2^15 are multiplied as they are: float16 holds them, or near enough.
            const bool plain = power[n] <= 1 && power[n] >= LEAST_POWER;
            const u32 back = plain ? pack(power[n], power[n], FLOAT16) : 0x3c003c00;
#pragma unroll
            for (int k = 0; k < STEPS; k++) a[k][n] = mul_half2(a[k][n], back), a[k][n + 2] = mul_half2(a[k][n + 2], back);
            power[n] = bounded((plain ? 1 : power[n]) * beyond);
        }
        lifted = __any_sync(~0u, power[0] != 1 || power[1] != 1);
        if (lifted) power[0] *= 1 / REST, power[1] *= 1 / REST;
#pragma unroll
        for (int m = 0; m < CUQUANT_DIM / 2; m++) o[0][m] = 0;
    }

    // Before and after `run`, where warpgroups take turns: the first one's turn is first, and the second arrives once more. (As
    // branches in `run` the compiler would have products wait for each other.)
    DEVICE void begin_turns() const {
        if (second) warpgroups_arrive<2 * WARPGROUP>(TURN);
    }
    DEVICE void end_turns() const {
        if (!second) warpgroups_sync<2 * WARPGROUP>(TURN);
    }

    // `panels` panels, every `apart`-th from `panel` on. Where warpgroups take turns, one's products are multiplied while the other
    // works out weights; else both do the same at the same time, as they wait for the same panels.
    template <bool TURNS>
    DEVICE void run(int panels, int panel, int apart) {
        if (panel >= panels) return;
        Known known;
        look(panel, known, false);
        multiply_keys(panel);
        wgmma_wait<0>();
        begin_sums(panel);
        bool there = false;
        // What is known of a panel is looked at behind a branch: so the compiler does not have products wait for it.
        const auto multiply_next = [&] {
            if (panel + apart >= panels) return false;
            panel += apart;
            look(panel, known, there);
            if (TURNS) warpgroups_sync<2 * WARPGROUP>(TURN + second);
            multiply_keys(panel);
            multiply_values(panel - apart);
            if (TURNS) warpgroups_arrive<2 * WARPGROUP>(TURN + !second);
            return true;
        };
        if (multiply_next())
#pragma unroll 1
            do there = find_weights(panel, apart, known);
            while (multiply_next());
        multiply_values(panel);
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
            float* const row = sums + (n * 8 + g) * WIDTH + (DIRECT ? 2 * i : i);
#pragma unroll
            for (int m = 0; m < CUQUANT_DIM / 8; m++)
#pragma unroll
                for (int c = 0; c < 2; c++)
                    row[DIRECT ? m * 8 + c : m / 2 * 16 + m % 2 * 4 + c * 8] = o[0][m * 4 + n * 2 + c];
        }
    }

private:
    // The value of row g, from the lane that has rows 2 i and 2 i + 1.
    template <class T>
    DEVICE T of_row(const T (&two)[2]) const {
        const int from = lane / 4 * 4 + g / 2;
        const T even = __shfl_sync(~0u, two[0], from), odd = __shfl_sync(~0u, two[1], from);
        return g % 2 ? odd : even;
    }

    // A 4 x 4 matrix of a lane's registers and four lanes.
    DEVICE void transpose(u32 (&x)[4]) const {
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
    // apart. In units of 16 bytes, of which places and steps are whole numbers.
    static constexpr u64 OPERAND = u64(64) << 32 | u64(1) << 62, STEP = 2;
    static constexpr u32 OF_KEYS = 1 << 16, OF_VALUES = PANEL / 16 | PANEL_ROWS / 16 << 16;
    DEVICE u64 described(u32 panel, u32 which) const { return OPERAND | (panels + ring.place(panel) * (2 * PANEL / 16) + which); }

    // When the panel of keys and that of values are there, which may be known.
    DEVICE void look(u32 panel, Known& known, bool there) const {
        const u32 about = ring.about(panel);
        if (!there) barrier_wait(ring.full(panel), ring.parity(panel));
        known.largest = load_shared(about + About::LARGEST_SLOT + i * 16);
#pragma unroll
        for (int m = 0; m < TOKENS / 8; m++)
            if (!DIRECT) known.scales[m] = scale_of(about, m);
    }

    DEVICE void multiply_keys(u32 panel) {
        const u64 keys = described(panel, OF_KEYS);
        pin(a), pin(s);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const u64 step = keys + k / 4 * (PANEL_ROWS / 16) + k % 4 * STEP;
            if (k == 0)
                Wgmma<TOKENS>::set(s[0], a[k], step);
            else
                Wgmma<TOKENS>::add(s[0], a[k], step);
        }
        wgmma_commit();
    }

    DEVICE void multiply_values(u32 panel) {
        const u64 values = described(panel, OF_VALUES);
        pin(w), pin(o);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++) Wgmma<CUQUANT_DIM>::add_turned(o[0], w[k], values + k * 16 * (128 / 16));
        wgmma_commit();
    }

    // Weights of the first panel.
    DEVICE void begin_sums(u32 panel) {
        pin(s);
        const bool all[2] = {true, true};
        seen = ~0u;
        if (CUQUANT_MASKED < 2) hide(panel, [](float&, bool) {});
        restart<true>(panel, all, total);
        take_weights();
        barrier_arrive(ring.empty(panel, false), elected());
    }

    // Weights of a panel whose keys are multiplied, when sums of the one `apart` before are there. Returns whether the next is.
    DEVICE bool find_weights(u32 panel, int apart, const Known& known) {
        wgmma_wait<1>();
        pin(s);
        const int largest_slot = max(known.largest.x, known.largest.y);
        const u32 scales = __vmaxu2(known.largest.z, known.largest.w);
        const float largest = __int_as_float(max(scales << 16, scales & 0xffff0000));
        float gained[2];
        bool above[2];
        seen = ~0u;
        const bool hides = __any_sync(~0u, largest_slot > min(last[0], last[1]));
        if (__builtin_expect(CUQUANT_MASKED == 2 || lifted | hides | (DIRECT && largest == INFINITE), 0)) {
            weigh<true>(panel, known.scales, largest, gained);
#pragma unroll
            for (int n = 0; n < 2; n++)
                above[n] = (sees_all(n, largest_slot) ? gained[n] * largest : largest_weight(n)) > MOST_WEIGHT;
        } else {
            weigh<false>(panel, known.scales, largest, gained);
#pragma unroll
            for (int n = 0; n < 2; n++) above[n] = gained[n] * largest > MOST_WEIGHT;
        }
        const bool there = barrier_passed(ring.full(panel + apart), ring.parity(panel + apart));
        const bool moves = __any_sync(~0u, above[0] | above[1]);
        wgmma_wait<0>();
        barrier_arrive(ring.empty(panel - apart, true), elected());
        take_weights();
        if (__builtin_expect(moves, 0)) {
            move(panel, above, gained);
            take_weights();
        }
        barrier_arrive(ring.empty(panel, false), elected());
        total[0] += gained[0], total[1] += gained[1];
        return there;
    }
};
#endif

// Keys and values as operand B of warpgroups' products (sm_90a): 64 tokens of one head, as float16 numbers in shared memory.
//
// A panel is 64 tokens of keys, or their values: for every 64 channels rows of 128 bytes, a token each, whose eighths change
// places with the token. Two warpgroups convert codes to panels, one those of keys and one those of values, which take the places
// of a ring in turn. Their warps copy the codes that they will convert to places of their own in shared memory, several panels
// ahead; nobody else waits for these.
//
//   memory  -- copies, `AHEAD` panels -->  codes  -- converted -->  panels  -- products -->  scores, sums
//
// Numbers of a panel are codes, without their offset, or float16 numbers as they are; what they are multiplied by lies beside the
// panels (`About`). Among 16 channels number 2 j is channel j, and 2 j + 1 channel 8 + j (`pairs`).
#pragma once
#include "../core/warpgroup.cuh"
#include "split.cuh"
#include "codes.cuh"

#if __CUDA_ARCH__ == 900
constexpr int PANEL_TOKENS = 64;
constexpr int PANEL_ROWS = PANEL_TOKENS * 128;  // bytes of 64 channels
constexpr int PANEL = (CUQUANT_DIM + 63) / 64 * PANEL_ROWS;
constexpr int PANEL_SLOTS = 8, CODES_AT = PANEL_SLOTS * PANEL;
static_assert(CUQUANT_DIM % 32 == 0, "threads convert 32 channels");

constexpr int CONVERTED = 1;  // barrier where those meet who convert keys, and, at the next, values
constexpr int NO_SLOT = 0x7fffffff;

// What else is known of a panel's tokens, in shared memory, at so many bytes:
struct About {
    static constexpr int SCALES = 0;                      // of two tokens each: of their keys, of their values
    static constexpr int SLOTS = PANEL_TOKENS * 8;        // global ones, where somebody asks; NO_SLOT where there is no token
    // The largest slot of 32 tokens each, and scale of values of each warp that converts them, a float's upper half or more: four
    // times, for each lane of four, as the compiler would have products wait for what is the same in all lanes.
    static constexpr int LARGEST_SLOT = SLOTS + PANEL_TOKENS * 4, LARGEST_SCALE = LARGEST_SLOT + 8;
    static constexpr int HIDDEN = LARGEST_SLOT + 4 * 16;  // bits of tokens that some query may not see
    static constexpr int SIZE = HIDDEN + 16;

    static DEVICE u32 scale(bool values, int token) { return SCALES + (token / 2 * 4 + values * 2 + token % 2) * 4; }
};

// By a warp or several: the slot of a panel's token, whose number is the lane's or 32 more.
DEVICE void tell_slot(u32 about, int token, int slot, int least_last) {
    store_shared_int(about + About::SLOTS + token * 4, slot);
    const u32 hidden = __ballot_sync(~0u, slot > least_last), largest = warp_max(slot);
    const u32 half = about + token / WARP * 4;
    if (token % WARP == 0) store_shared_int(half + About::HIDDEN, hidden);
    if (token % WARP < 4) store_shared_int(half + About::LARGEST_SLOT + token % WARP * 16, largest);
}

// By a warpgroup: bits of the largest scale of each thread's values, or 0.
DEVICE void tell_largest_scale(u32 about, int thread, u32 scale) {
    const u32 most = warp_max(scale) + 0xffff >> 16;
    if (thread % WARP < 4) store_shared_short(about + About::LARGEST_SCALE + thread % WARP * 16 + thread / WARP * 2, most);
}

// Where in shared memory a panel of keys is, and that of their values behind it, of a block's panels, which take places in turn.
// (Addresses are opaque, lest the compiler work them out anew.)
struct PanelRing {
    static constexpr bool DIRECT = CUQUANT_DIRECT;  // who fills panels: direct.cuh
    static constexpr int PLACES = PANEL_SLOTS / 2, BARRIERS = (DIRECT ? 4 : 3) * PLACES;
    static constexpr int FILLING = DIRECT ? 1 + PANEL_TOKENS + WARPGROUP : 2 * WARPGROUP;  // threads

    u32 panels, barriers, known;

    DEVICE PanelRing(u32 panels, u32 barriers, u32 known) : panels(panels), barriers(barriers), known(known) {
        asm volatile("" : "+r"(this->panels), "+r"(this->barriers), "+r"(this->known));
    }

    static DEVICE u32 place(u32 panel) { return panel % PLACES; }
    static DEVICE u32 parity(u32 panel) { return panel / PLACES % 2; }

    DEVICE u32 keys(u32 panel) const { return panels + place(panel) * (2 * PANEL); }
    DEVICE u32 values(u32 panel) const { return keys(panel) + PANEL; }
    DEVICE u32 about(u32 panel) const { return known + place(panel) * About::SIZE; }
    DEVICE u32 full(u32 panel) const { return barriers + place(panel) * 8; }  // both
    DEVICE u32 empty(u32 panel, bool values) const { return full(panel) + (values ? 2 : 1) * PLACES * 8; }
    DEVICE u32 landed(u32 panel) const { return full(panel) + 3 * PLACES * 8; }  // values, by the copy engine

    // By a warp: `readers` arrive when they have multiplied keys, and when values.
    DEVICE void begin(int lane, int readers) const {
        if (lane < BARRIERS) barrier_init(barriers + lane * 8, lane < PLACES ? FILLING : lane < 3 * PLACES ? readers : 1);
        barrier_init_fence();
    }
};

// Bytes from global to shared memory, or zeros.
template <int BYTES>
DEVICE void copy_or_zeros(u32 to, const u8* from, bool there) {
    const int given = there ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(given) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(to), "l"(from), "n"(BYTES), "r"(given) : "memory");
}

// The scale of all scores, of which keys' scales in shared memory have a part, and queries' powers the rest: 2^beyond, mostly 1.
// That part is small: keys' own scales are up to 2^16, and REST (panel_weights.cuh) is beside them, so that a larger one would
// leave queries with powers that count as 0 where scores do not.
struct PanelScale {
    static constexpr int MOST = 20;  // of its exponent, either way

    int beyond;
    float of_keys;

    DEVICE explicit PanelScale(float scale) {
        const int exponent = magnitude(scale) ? int(magnitude(scale) >> 23) - 127 : 0;
        beyond = exponent - min(max(exponent, -MOST), MOST);
        of_keys = scale * power_of_two(-beyond);
    }
};

// How tokens of one width are converted: a thread's jobs are 16 or 32 channels of a token each, so that eight lanes, whose
// stores are served together, meet all banks.
template <int BITS>
struct Jobs {
    static constexpr int UNITS = BITS >= 8 ? 2 : 4, CHANNELS = UNITS * 8;
    static constexpr int BYTES = UNITS * BITS, AREA = BYTES == 12 ? 16 : BYTES;  // of a job's codes, given and kept
    static constexpr int IN_ROW = 64 / CHANNELS, TOKENS = 8 / IN_ROW;  // jobs of a row of a panel; tokens of eight lanes
    static constexpr int ROWS = PANEL / PANEL_ROWS, LANES = 8 * ROWS;  // of those tokens
    static constexpr int STEP = WARPGROUP / LANES * TOKENS;            // tokens from job to job
    static constexpr int COUNT = PANEL_TOKENS / STEP;
    static constexpr int GIVEN = CUQUANT_DIM / 8 * BITS;  // bytes of a token in the cache
    // Bytes of a panel: codes, then a word for each thread: with the scale of a token, or, of the others who convert keys,
    // its slot.
    static constexpr int WORDS = COUNT * AREA * WARPGROUP, SIZE = WORDS + WARPGROUP * 4;
    static constexpr int AHEAD = CUQUANT_CODES / 2 / SIZE < 6 ? CUQUANT_CODES / 2 / SIZE : 6;
    static_assert(AHEAD >= 2, "a panel that is converted, one on its way");
};

// The job of a thread's that is first: the block of 64 channels, the part of it, the token.
template <int BITS>
struct Job {
    using J = Jobs<BITS>;
    int row, part, token;

    DEVICE explicit Job(int thread)
        : row(thread / 8 % J::ROWS), part(thread % J::IN_ROW), token(thread / J::LANES * J::TOKENS + thread / J::IN_ROW % J::TOKENS) {}

    DEVICE bool there() const { return CUQUANT_DIM % 64 == 0 || row * 64 + part * J::CHANNELS < CUQUANT_DIM; }
};

// Keys or values of the tokens of one bucket that are this block's, by the warpgroup that converts them.
template <int BITS, bool VALUES>
struct Converter {
    using J = Jobs<BITS>;
    // Of float16 numbers a job is both halves of a sector of memory. Neighbouring lanes copy these, of every other lane's job.
    static constexpr bool TOGETHER = BITS == 16;
    static constexpr int AT_ONCE = BITS == 16 && J::COUNT % 2 == 0 ? J::COUNT / 2 : J::COUNT;  // jobs in registers

    const Tier& tier;
    const PanelRing& ring;
    const int thread, count, least_last;
    const float score_scale;  // of all scores
    const s64 origin;  // of the first token's row: keys, values and scales are indexed alike
    const Job<BITS> own, copied;
    const u8 *from, *word_from;  // what is copied next: codes, and the word of a token (`has_word`)
    u32 codes, to;      // where the codes of panels are; where this thread's begin

    DEVICE Converter(const Tier& tier, const PanelRing& ring, int sequence, int head, int begin, int end, int least_last,
                     float score_scale, int thread)
        : tier(tier), ring(ring), thread(thread), count(end - begin), least_last(least_last), score_scale(score_scale),
          origin((s64(sequence) * tier.room + begin) * CUQUANT_HEADS + head), own(thread),
          copied(TOGETHER ? thread / WARP * WARP + thread % WARP / 2 : thread),
          codes(ring.panels + CODES_AT + VALUES * (CUQUANT_CODES / 2)) {
        const int token = thread % PANEL_TOKENS;
        const u64 word = of_scale() ? reinterpret_cast<u64>((VALUES ? tier.v_scale : tier.k_scale) + scale_at(token))
                                    : reinterpret_cast<u64>(tier.slots + origin / CUQUANT_HEADS + token);
        word_from = reinterpret_cast<const u8*>(word & ~3ull);
        from = (VALUES ? tier.v : tier.k) + (origin + s64(copied.token) * CUQUANT_HEADS) * J::GIVEN +
               (copied.row * 64 + copied.part * J::CHANNELS) / 8 * BITS + (TOGETHER ? thread % 2 * 16 : 0);
        to = codes + thread / WARP * (J::AREA * WARP) + thread % WARP * (J::AREA < 16 ? J::AREA : 16);
    }

    DEVICE void run(u32& panel) {
#pragma unroll 1
        for (int i = 0; i < J::AHEAD; i++) copy(i * PANEL_TOKENS, i);
        int at = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += PANEL_TOKENS) {
            copy_wait<J::AHEAD - 1>();
            if (TOGETHER) __syncwarp();
            const u32 row = (VALUES ? ring.values(panel) : ring.keys(panel)) + own.row * PANEL_ROWS + own.token * 128;
            u32 word = 0, bad = 0;
#pragma unroll
            for (int base = 0; base < J::COUNT; base += AT_ONCE) {
                Units<BITS, J::UNITS> units[AT_ONCE];
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) take(units[k], at * J::SIZE + (base + k) * J::AREA * WARPGROUP);
                if (base == 0) {
                    if (has_word()) word = load_shared_int(codes + at * J::SIZE + J::WORDS + thread * 4);
                    if (first > 0) arrive(panel - 1);
                }
                if (base + AT_ONCE == J::COUNT) {
                    if (TOGETHER) __syncwarp();
                    copy(first + J::AHEAD * PANEL_TOKENS, at);
                }
                if (base == 0) barrier_wait(ring.empty(panel, VALUES), ring.parity(panel) ^ 1);
                if constexpr (VALUES && BITS == 16) bad |= clear_bad(units) << base;
#pragma unroll
                for (int k = 0; k < AT_ONCE; k++) put(units[k], row + (base + k) * J::STEP * 128);
            }
            if (++at == J::AHEAD) at = 0;
            about(ring.about(panel), first, word, bad);
            panel++;
        }
        arrive(panel - 1);
        copy_wait<0>();
        warpgroups_sync<WARPGROUP>(CONVERTED + VALUES);  // another width's codes lie in other places: these have been taken
    }

private:
    // A panel is there: said when the next one's codes are asked for, as stores take their time.
    DEVICE void arrive(u32 panel) const {
        store_box_fence();  // what warpgroups multiply is read as the copy engine reads
        barrier_arrive(ring.full(panel), true);
    }

    DEVICE bool of_scale() const { return thread < PANEL_TOKENS; }
    DEVICE bool has_word() const { return of_scale() ? BITS < 16 : CUQUANT_MASKED && !VALUES; }

    // Codes of the panel from token `first` on are on their way to place `at`.
    DEVICE void copy(int first, int at) {
        if (first + PANEL_TOKENS <= count)
            copy_panel<true>(first, at);
        else if (first < count)
            copy_panel<false>(first, at);
        from += PANEL_TOKENS * (CUQUANT_HEADS * J::GIVEN);
        word_from += PANEL_TOKENS * (of_scale() ? CUQUANT_HEADS * 2 : 4);
        copy_commit();
    }

    // WHOLE: all tokens are there. Else zeros are in the others' place, and addresses are those of the bucket.
    template <bool WHOLE>
    DEVICE void copy_panel(int first, int at) const {
        const u32 place = to + at * J::SIZE;
        const auto piece = [&](int k, int half, int tokens) {
            const bool there = WHOLE || first + copied.token + tokens < count;
            const u8* const source = there ? from + tokens * (CUQUANT_HEADS * J::GIVEN) : VALUES ? tier.v : tier.k;
            const u32 target = place + k * J::AREA * WARPGROUP + half * 16 * WARP;
            if constexpr (J::BYTES == 12) {
#pragma unroll
                for (int b = 0; b < 12; b += 4) copy_or_zeros<4>(target + b, source + b, there);
            } else {
                copy_or_zeros<J::BYTES < 16 ? J::BYTES : 16>(target, source, there);
            }
        };
        if (copied.there())
#pragma unroll
            for (int k = 0; k < J::COUNT; k++)
#pragma unroll
                for (int half = 0; half < (TOGETHER ? 2 : 1); half++)
                    piece(k, half, k * J::STEP + half * (16 / J::LANES * J::TOKENS));
        if (has_word()) {
            const bool there = WHOLE || first + thread % PANEL_TOKENS < count;
            copy_or_zeros<4>(codes + at * J::SIZE + J::WORDS + thread * 4, there ? word_from : tier.k, there);
        }
    }

    DEVICE s64 scale_at(int token) const { return origin + s64(token) * CUQUANT_HEADS; }

    // A job's codes, `apart` from where this thread's first would be.
    DEVICE void take(Units<BITS, J::UNITS>& units, int apart) const {
        if constexpr (J::BYTES == 8) {
            const int2 v = load_shared_pair(to + apart);
            units.w[0] = v.x, units.w[1] = v.y;
        } else {
            const u32 place = TOGETHER ? to + thread % WARP * 16 + apart : to + apart;
#pragma unroll
            for (int part = 0; part < J::AREA / 16; part++) {
                const int4 v = load_shared(place + part * 16);
                units.w[part * 4] = v.x, units.w[part * 4 + 1] = v.y, units.w[part * 4 + 2] = v.z, units.w[part * 4 + 3] = v.w;
            }
        }
    }

    DEVICE void put(const Units<BITS, J::UNITS>& units, u32 row) const {
        if (!own.there()) return;
#pragma unroll
        for (int u = 0; u < J::UNITS; u += 2) {
            u32 h[8];
            pairs<ABOVE_1024>(units, units, u, h);
            to_integers<BITS>(h);
#pragma unroll
            for (int half = 0; half < 2; half++)
                store_shared(row + ((own.part * J::UNITS + u + half) ^ own.token % 8) * 16,
                             make_int4(h[half * 4], h[half * 4 + 1], h[half * 4 + 2], h[half * 4 + 3]));
        }
    }

    // Values that are infinite or NaN count as 0, lest a weight of 0 makes them NaN. Bits of this thread's jobs that have some,
    // or whose token has in another thread's.
    DEVICE u32 clear_bad(Units<BITS, J::UNITS> (&units)[AT_ONCE]) const {
        u32 bad = 0;
        const int lane = thread % WARP;
        const u32 part = ((1u << J::IN_ROW) - 1) << lane / J::LANES * J::LANES + lane % 8 / J::IN_ROW * J::IN_ROW;
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) {
            u32 zeros = 0;  // or NaN
#pragma unroll
            for (int w = 0; w < J::UNITS * 4; w++) zeros = fma_half2(units[k].w[w], 0, zeros);
            const bool spoils = zeros & 0x7fff7fff && own.there();
            if (spoils)
#pragma unroll
                for (int w = 0; w < J::UNITS * 4; w++) units[k].w[w] = 0;
            if (__ballot_sync(~0u, spoils) & (J::ROWS > 1 ? part * 0x101 : part)) bad |= 1u << k;
        }
        return bad;
    }

    // Infinite scales of keys become NaN, as codes of 0 times them are; scales of values that are NaN become infinite, and
    // those of 0 next to nothing (bucket.cuh).
    DEVICE void about(u32 to, int first, u32 word, u32 bad) const {
        const int at = thread % PANEL_TOKENS, token = first + at;
        const auto store = [&](int place, float v) { store_shared_int(to + place, __float_as_int(v)); };
        const float stored = scale_at(token) % 2 ? high_to_float(word) : low_to_float(word);
        if constexpr (VALUES) {
            float largest = 0;
            if constexpr (BITS == 16) {
                if (own.row == 0 && own.part == 0)
#pragma unroll
                    for (int k = 0; k < J::COUNT; k++)
                        store(About::scale(true, own.token + k * J::STEP), bad >> k & 1 ? INFINITE : 1);
                largest = bad ? INFINITE : 1;
            } else if (of_scale()) {
                const float used = fminf(stored + NOTHING, INFINITE);
                store(About::scale(true, at), used);
                largest = fabsf(used);
            }
            tell_largest_scale(to, thread, __float_as_int(largest));
        } else {
            if (of_scale()) {
                store(About::scale(false, at), (BITS < 16 ? fmaf(stored, 0.f, stored) : 1) * score_scale);
                return;
            }
            tell_slot(to, at, token >= count ? NO_SLOT : CUQUANT_MASKED ? int(word) : 0, least_last);
        }
    }
};
#endif

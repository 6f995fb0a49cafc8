// Keys and values as operand B of warpgroups' products (sm_90a): 64 tokens of one head, as float16 numbers in shared memory.
//
// A panel is 64 tokens of keys, or their values: for every 64 channels rows of 128 bytes, a token each, whose eighths change
// places with the token. One warpgroup converts codes to panels, which take the slots of a ring in turn: keys, values, keys, ...
// Each of its threads copies the codes that it will convert, to a place of its own in shared memory, several panels ahead;
// nobody else waits for these.
//
//   memory  -- copies, `AHEAD` panels -->  codes  -- converted -->  panels  -- products -->  scores, sums
//
// Numbers of a panel are codes, without their offset, or float16 numbers as they are; what they are multiplied by lies beside the
// panels of values (`About`). Among 16 channels number 2 j is channel j, and 2 j + 1 channel 8 + j (`pairs`).
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

// What else is known of a panel's tokens.
struct About {
    float k_scale[PANEL_TOKENS], v_scale[PANEL_TOKENS];
    int slots[PANEL_TOKENS];  // global ones, where somebody asks; negative where there is no token
    u32 hidden[2];            // whether a query may not see one of the first, or the last 32
};

// Slots of the ring, and who waits for them.
struct PanelRing {
    u32 panels, full, empty;
    About* about;  // of every other slot, which has values

    DEVICE u32 slot(int at) const { return panels + at * PANEL; }
};

// A place in the ring.
struct PanelPlace {
    int at = 0;
    u32 parity = 0;

    DEVICE void advance(int slots) {
        at += slots;
        if (at >= PANEL_SLOTS) at -= PANEL_SLOTS, parity ^= 1;
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

// Of one width. A thread's jobs are 16 or 32 channels of a token each, so that eight lanes, whose stores are served together,
// meet all banks.
template <int BITS>
struct Jobs {
    static constexpr int UNITS = BITS >= 8 ? 2 : 4, CHANNELS = UNITS * 8;
    static constexpr int BYTES = UNITS * BITS, AREA = BYTES == 12 ? 16 : BYTES;  // of a job's codes, given and kept
    static constexpr int IN_ROW = 64 / CHANNELS, TOKENS = 8 / IN_ROW;  // jobs of a row of a panel; tokens of eight lanes
    static constexpr int ROWS = PANEL / PANEL_ROWS;
    static constexpr int STEP = WARPGROUP / (8 * ROWS) * TOKENS;  // tokens from job to job
    static constexpr int COUNT = PANEL_TOKENS / STEP;
    static constexpr int GIVEN = CUQUANT_DIM / 8 * BITS;  // bytes of a token in the cache
    // Of a panel: codes, then a word for each thread with a scale in it, then slots.
    static constexpr int SCALES = COUNT * AREA * WARPGROUP, SLOTS = SCALES + WARPGROUP * 4;
    static constexpr int SIZE = SLOTS + CUQUANT_MASKED * PANEL_TOKENS * 4;
    static constexpr int AHEAD = CUQUANT_CODES / SIZE < 12 ? CUQUANT_CODES / SIZE : 12;
    static_assert(AHEAD >= 2, "keys and values");
};

// The tokens of one bucket that are this block's, by the converting warpgroup.
template <int BITS>
struct Converter {
    using J = Jobs<BITS>;

    const Attention& p;
    const Tier& tier;
    const PanelRing& ring;
    const int thread, begin, count, least_last;
    const s64 origin;  // of the first token's row: keys, values and scales are indexed alike
    const int row, chunk, token;  // 64 channels, the job among these, the first token
    u32 codes;

    DEVICE Converter(const Attention& p, const Tier& tier, const PanelRing& ring, int sequence, int head, int begin, int end,
                     int least_last, int thread)
        : p(p), tier(tier), ring(ring), thread(thread), begin(begin), count(end - begin), least_last(least_last),
          origin((s64(sequence) * tier.room + begin) * CUQUANT_HEADS + head), row(thread / 8 % J::ROWS),
          chunk(thread % J::IN_ROW), token(thread / (8 * J::ROWS) * J::TOKENS + thread / J::IN_ROW % J::TOKENS),
          codes(ring.panels + CODES_AT) {}

    DEVICE void run(PanelPlace& place) {
        const int panels = (count + PANEL_TOKENS - 1) / PANEL_TOKENS * 2;
#pragma unroll 1
        for (int i = 0; i < J::AHEAD; i++) copy(i, codes + i * J::SIZE);
        int at = 0;
#pragma unroll 1
        for (int i = 0; i < panels; i++) {
            copy_wait<J::AHEAD - 1>();
            const u32 from = codes + at * J::SIZE;
            Units<BITS, J::UNITS> units[J::COUNT];
#pragma unroll
            for (int k = 0; k < J::COUNT; k++) take(units[k], from, k);
            u32 scale;
            int slot = 0;
            if (i % 2) {
                scale = load_shared_int(from + J::SCALES + thread * 4);
                if (CUQUANT_MASKED && thread < PANEL_TOKENS) slot = load_shared_int(from + J::SLOTS + thread * 4);
            }
            copy(i + J::AHEAD, from);
            if (++at == J::AHEAD) at = 0;
            barrier_wait(ring.empty + place.at * 8, place.parity ^ 1);
            u32 bad = 0;
            if (i % 2) {
                if constexpr (BITS == 16) bad = clear_bad(units);
                about(ring.about[place.at / 2], i / 2 * PANEL_TOKENS, scale, slot, bad);
            }
            const u32 to = ring.slot(place.at) + row * PANEL_ROWS + token * 128;
#pragma unroll
            for (int k = 0; k < J::COUNT; k++) put(units[k], to + k * J::STEP * 128);
            store_box_fence();  // what warpgroups multiply is read as the copy engine reads
            barrier_arrive(ring.full + place.at * 8, true);
            place.advance(1);
        }
        copy_wait<0>();
    }

private:
    DEVICE bool own_channels() const { return CUQUANT_DIM % 64 == 0 || row * 64 + chunk * J::CHANNELS < CUQUANT_DIM; }

    // Panel `i` is on its way to `to`.
    DEVICE void copy(int i, u32 to) const {
        const int first = i / 2 * PANEL_TOKENS;
        if (first < count) {
            const u8* const from = (i % 2 ? tier.v : tier.k) + (origin + s64(first + token) * CUQUANT_HEADS) * J::GIVEN +
                                   (row * 64 + chunk * J::CHANNELS) / 8 * BITS;
#pragma unroll
            for (int k = 0; k < J::COUNT; k++) {
                const u8* const own = from + k * J::STEP * (CUQUANT_HEADS * J::GIVEN);
                const bool there = first + token + k * J::STEP < count && own_channels();
                const u32 place = to + k * J::AREA * WARPGROUP + thread * (J::AREA < 16 ? J::AREA : 16);
                if constexpr (BITS == 16) {  // both halves of a sector: the second finds it in the L1 cache
                    copy_async_again(place, own, there);
                    copy_async_again(place + 16 * WARPGROUP, own + 16, there);
                } else if constexpr (J::BYTES == 12) {
#pragma unroll
                    for (int b = 0; b < 12; b += 4) copy_or_zeros<4>(place + b, own + b, there);
                } else {
                    copy_or_zeros<J::BYTES>(place, own, there);
                }
            }
            const int own = first + thread % PANEL_TOKENS;
            if (i % 2) {
                if constexpr (BITS < 16) {
                    const u64 scale = reinterpret_cast<u64>((thread < PANEL_TOKENS ? tier.k_scale : tier.v_scale) + scale_at(own));
                    copy_or_zeros<4>(to + J::SCALES + thread * 4, reinterpret_cast<const u8*>(scale & ~3ull), own < count);
                }
                if (CUQUANT_MASKED && thread < PANEL_TOKENS)
                    copy_or_zeros<4>(to + J::SLOTS + thread * 4, reinterpret_cast<const u8*>(tier.slots + origin / CUQUANT_HEADS + own),
                                     own < count);
            }
        }
        copy_commit();
    }

    DEVICE s64 scale_at(int own) const { return origin + s64(own) * CUQUANT_HEADS; }

    DEVICE void take(Units<BITS, J::UNITS>& units, u32 from, int k) const {
        const u32 place = from + k * J::AREA * WARPGROUP + thread * (J::AREA < 16 ? J::AREA : 16);
        if constexpr (J::BYTES == 8) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(units.w[0]), "=r"(units.w[1]) : "r"(place));
        } else {
#pragma unroll
            for (int half = 0; half < J::AREA / 16; half++) {
                const int4 v = load_shared(place + half * 16 * WARPGROUP);
                units.w[half * 4] = v.x, units.w[half * 4 + 1] = v.y, units.w[half * 4 + 2] = v.z, units.w[half * 4 + 3] = v.w;
            }
        }
    }

    DEVICE void put(const Units<BITS, J::UNITS>& units, u32 to) const {
        if (!own_channels()) return;
#pragma unroll
        for (int u = 0; u < J::UNITS; u += 2) {
            u32 h[8];
            pairs<ABOVE_1024>(units, units, u, h);
            to_integers<BITS>(h);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int piece = chunk * J::UNITS + u + half;
                store_shared(to + (piece ^ token % 8) * 16,
                             make_int4(h[half * 4], h[half * 4 + 1], h[half * 4 + 2], h[half * 4 + 3]));
            }
        }
    }

    // Values that are infinite or NaN count as 0, lest a weight of 0 makes them NaN. Bits of this thread's jobs that have some,
    // or whose token has in another thread's.
    DEVICE u32 clear_bad(Units<BITS, J::UNITS> (&units)[J::COUNT]) const {
        u32 bad = 0;
        const int lane = thread % WARP;
#pragma unroll
        for (int k = 0; k < J::COUNT; k++) {
            u32 carried = 0;
#pragma unroll
            for (int w = 0; w < J::UNITS * 4; w++) carried |= (units[k].w[w] & 0x7fff7fff) + 0x04000400;
            const bool own = carried & 0x80008000;
            if (own)
#pragma unroll
                for (int w = 0; w < J::UNITS * 4; w++) units[k].w[w] = 0;
            const u32 same = ((1u << J::IN_ROW) - 1) * (J::ROWS > 1 ? 0x101u : 1u) << lane / (8 * J::ROWS) * (8 * J::ROWS) + lane % 8 / J::IN_ROW * J::IN_ROW;
            if (__ballot_sync(~0u, own) & same) bad |= 1u << k;
        }
        return bad;
    }

    // Infinite scales of keys become NaN, as codes of 0 times them are; scales of values that are NaN become infinite, and
    // those of 0 next to nothing (bucket.cuh).
    DEVICE void about(About& to, int first, u32 scale, int slot, u32 bad) const {
        const int at = thread % PANEL_TOKENS, own = first + at;
        const bool keys = thread < PANEL_TOKENS;
        if constexpr (BITS == 16) {
            if (keys) to.k_scale[at] = 1;
            if (row == 0 && chunk == 0)
#pragma unroll
                for (int k = 0; k < J::COUNT; k++) to.v_scale[token + k * J::STEP] = bad >> k & 1 ? INFINITE : 1;
        } else {
            const float stored = scale_at(own) % 2 ? high_to_float(scale) : low_to_float(scale);
            if (keys)
                to.k_scale[at] = fmaf(stored, 0.f, stored);
            else
                to.v_scale[at] = fminf(stored + NOTHING, INFINITE);
        }
        if (keys) {
            const bool there = own < count;
            to.slots[at] = there ? slot : -1;
            const u32 hidden = __ballot_sync(~0u, !there || slot > least_last);
            if (thread % WARP == 0) to.hidden[at / WARP] = hidden;
        }
    }
};
#endif

// Keys and values as operand B of warpgroups' products (sm_90a): 64 tokens of one head, as float16 numbers in shared memory.
//
// A panel is 64 tokens of keys, or their values: for every 64 channels rows of 128 bytes, a token each, whose eighths change
// places with the token. Two warpgroups convert codes to panels, one those of keys and one those of values, which take the slots
// of a ring in turn. Their warps copy the codes that they will convert to places of their own in shared memory, several panels
// ahead; nobody else waits for these.
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
    float4 scales[PANEL_TOKENS / 2];  // of two tokens: of their keys, of their values
    int slots[PANEL_TOKENS];          // global ones, where somebody asks; negative where there is no token
    u32 hidden[4];                    // whether a query may not see one, and the largest scale of values, as a warp knows it
    float largest[4];
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
    static constexpr int ROWS = PANEL / PANEL_ROWS, LANES = 8 * ROWS;  // of those tokens
    static constexpr int STEP = WARPGROUP / LANES * TOKENS;            // tokens from job to job
    static constexpr int COUNT = PANEL_TOKENS / STEP;
    static constexpr int GIVEN = CUQUANT_DIM / 8 * BITS;  // bytes of a token in the cache
    // Of a panel: codes, then a word for each thread with a scale in it, then slots.
    static constexpr int SCALES = COUNT * AREA * WARPGROUP, SLOTS = SCALES + WARPGROUP * 4;
    static constexpr int SIZE = SLOTS + PANEL_TOKENS * 4;
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

    const Tier& tier;
    const PanelRing& ring;
    const int thread, count, least_last;
    const s64 origin;  // of the first token's row: keys, values and scales are indexed alike
    const Job<BITS> own, copied;
    const u8* from;     // what is copied next
    u32 codes, to;      // where the codes of panels are; where this thread's begin

    DEVICE Converter(const Tier& tier, const PanelRing& ring, int sequence, int head, int begin, int end, int least_last, int thread)
        : tier(tier), ring(ring), thread(thread), count(end - begin), least_last(least_last),
          origin((s64(sequence) * tier.room + begin) * CUQUANT_HEADS + head), own(thread),
          copied(TOGETHER ? thread / WARP * WARP + thread % WARP / 2 : thread),
          codes(ring.panels + CODES_AT + VALUES * (CUQUANT_CODES / 2)) {
        from = (VALUES ? tier.v : tier.k) + (origin + s64(copied.token) * CUQUANT_HEADS) * J::GIVEN +
               (copied.row * 64 + copied.part * J::CHANNELS) / 8 * BITS + (TOGETHER ? thread % 2 * 16 : 0);
        to = codes + thread / WARP * (J::AREA * WARP) + thread % WARP * (J::AREA < 16 ? J::AREA : 16);
    }

    DEVICE void run(PanelPlace& place) {
#pragma unroll 1
        for (int i = 0; i < J::AHEAD; i++) copy(i * PANEL_TOKENS, i);
        int at = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += PANEL_TOKENS) {
            copy_wait<J::AHEAD - 1>();
            if (TOGETHER) __syncwarp();
            Units<BITS, J::UNITS> units[J::COUNT];
            u32 scale = 0;
            int slot = 0;
#pragma unroll
            for (int k = 0; k < J::COUNT; k++) take(units[k], at * J::SIZE + k * J::AREA * WARPGROUP);
            if (VALUES) {
                const u32 words = codes + at * J::SIZE + thread * 4;
                if (BITS < 16) scale = load_shared_int(words + J::SCALES);
                if (CUQUANT_MASKED && thread < PANEL_TOKENS) slot = load_shared_int(words + J::SLOTS);
            }
            if (TOGETHER) __syncwarp();
            copy(first + J::AHEAD * PANEL_TOKENS, at);
            if (++at == J::AHEAD) at = 0;
            barrier_wait(ring.empty + place.at * 8, place.parity ^ 1);
            if constexpr (VALUES) {
                u32 bad = 0;
                if constexpr (BITS == 16) bad = clear_bad(units);
                about(ring.about[place.at / 2], first, scale, slot, bad);
            }
            const u32 row = ring.slot(place.at) + own.row * PANEL_ROWS + own.token * 128;
#pragma unroll
            for (int k = 0; k < J::COUNT; k++) put(units[k], row + k * J::STEP * 128);
            store_box_fence();  // what warpgroups multiply is read as the copy engine reads
            barrier_arrive(ring.full + place.at * 8, true);
            place.advance(2);
        }
        copy_wait<0>();
        if (TOGETHER) __syncwarp();
    }

private:
    // Codes of the panel from token `first` on are on their way to place `at`.
    DEVICE void copy(int first, int at) {
        if (first + PANEL_TOKENS <= count)
            copy_panel<true>(first, at);
        else if (first < count)
            copy_panel<false>(first, at);
        from += PANEL_TOKENS * (CUQUANT_HEADS * J::GIVEN);
        copy_commit();
    }

    // WHOLE: all tokens are there. Else zeros are in their place.
    template <bool WHOLE>
    DEVICE void copy_panel(int first, int at) const {
        const u32 place = to + at * J::SIZE;
        const auto piece = [&](int k, int half, int tokens) {
            const bool there = WHOLE || first + copied.token + tokens < count;
            const u8* const source = from + tokens * (CUQUANT_HEADS * J::GIVEN);
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
        if constexpr (VALUES) {
            const int token = first + thread % PANEL_TOKENS;
            const u32 words = codes + at * J::SIZE + thread * 4;
            const bool there = WHOLE || token < count;
            if constexpr (BITS < 16) {
                const u64 scale = reinterpret_cast<u64>((thread < PANEL_TOKENS ? tier.k_scale : tier.v_scale) + scale_at(token));
                copy_or_zeros<4>(words + J::SCALES, reinterpret_cast<const u8*>(scale & ~3ull), there);
            }
            if (CUQUANT_MASKED && thread < PANEL_TOKENS)
                copy_or_zeros<4>(words + J::SLOTS, reinterpret_cast<const u8*>(tier.slots + origin / CUQUANT_HEADS + token), there);
        }
    }

    DEVICE s64 scale_at(int token) const { return origin + s64(token) * CUQUANT_HEADS; }

    // A job's codes, `apart` from where this thread's first would be.
    DEVICE void take(Units<BITS, J::UNITS>& units, int apart) const {
        if constexpr (J::BYTES == 8) {
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(units.w[0]), "=r"(units.w[1]) : "r"(to + apart) : "memory");
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
    DEVICE u32 clear_bad(Units<BITS, J::UNITS> (&units)[J::COUNT]) const {
        u32 bad = 0;
        const int lane = thread % WARP;
        const u32 part = ((1u << J::IN_ROW) - 1) << lane / J::LANES * J::LANES + lane % 8 / J::IN_ROW * J::IN_ROW;
#pragma unroll
        for (int k = 0; k < J::COUNT; k++) {
            u32 carried = 0;
#pragma unroll
            for (int w = 0; w < J::UNITS * 4; w++) carried |= (units[k].w[w] & 0x7fff7fff) + 0x04000400;
            const bool spoils = carried & 0x80008000 && own.there();
            if (spoils)
#pragma unroll
                for (int w = 0; w < J::UNITS * 4; w++) units[k].w[w] = 0;
            if (__ballot_sync(~0u, spoils) & (J::ROWS > 1 ? part * 0x101 : part)) bad |= 1u << k;
        }
        return bad;
    }

    // Infinite scales of keys become NaN, as codes of 0 times them are; scales of values that are NaN become infinite, and
    // those of 0 next to nothing (bucket.cuh).
    DEVICE void about(About& to, int first, u32 scale, int slot, u32 bad) const {
        const int at = thread % PANEL_TOKENS, warp = thread / WARP;
        const bool keys = thread < PANEL_TOKENS, there = first + at < count;
        const auto scale_of = [&](bool values, int token) -> float& {
            return reinterpret_cast<float*>(to.scales)[token / 2 * 4 + token % 2 + values * 2];
        };
        float largest = 0;
        if constexpr (BITS == 16) {
            if (keys) scale_of(false, at) = 1;
            if (own.row == 0 && own.part == 0)
#pragma unroll
                for (int k = 0; k < J::COUNT; k++) scale_of(true, own.token + k * J::STEP) = bad >> k & 1 ? INFINITE : 1;
            largest = bad ? INFINITE : 1;
        } else {
            const float stored = scale_at(first + at) % 2 ? high_to_float(scale) : low_to_float(scale);
            const float used = keys ? fmaf(stored, 0.f, stored) : fminf(stored + NOTHING, INFINITE);
            scale_of(!keys, at) = used;
            if (!keys) largest = fabsf(used);
        }
        if (keys) to.slots[at] = there ? slot : -1;
        const u32 hidden = __ballot_sync(~0u, keys && (!there || slot > least_last)), most = warp_max(__float_as_int(largest));
        if (thread % WARP == 0) to.hidden[warp] = hidden, to.largest[warp] = __int_as_float(most);
    }
};
#endif

// A block's own rings in shared memory, through which the copy engine streams keys and values of eight heads (sm_90).
//
// Rows of eight neighbouring heads are whole lines of memory; of one head at 2 bits they are a quarter of one, and
// requests for quarters keep the L2 cache busy, not the memory. Warps of BOX_HEADS heads share a ring, in which a step
// is TOKENS tokens: keys, with the scales of both, then values. Rings take steps in turn, and one warp more for each asks
// for its copies, over the borders of buckets.
#pragma once
#include "../core/ptx_90.cuh"
#include "ring.cuh"
#include "split.cuh"

constexpr int BOX_HEADS = 8;
constexpr int RINGS = CUQUANT_WARPS / BOX_HEADS;
constexpr int LINE = 128;  // bytes, of which eight pieces of 16 change places with the token

DEVICE constexpr int maps_before(int tier) {
    int count = 0;
    for (int t = 0; t < tier; t++) count += has_tier(t);
    return count;
}

// CUtensorMaps of each bucket: codes of keys and of values, scales of keys and of values.
struct __align__(64) Maps {
    u8 maps[maps_before(TIERS)][4][128];
};

template <int BITS>
struct Box {
    static constexpr int TOKENS = BITS >= 8 ? 16 : 32;
    static constexpr int ROW = CUQUANT_DIM / 8 * BITS, LINES = BOX_HEADS * ROW / LINE;
    static_assert(BOX_HEADS * ROW % LINE == 0, "whole lines");
    // Line l of token t is at (l * TOKENS + t) * LINE. Behind the codes are the scales of keys, then of values.
    static constexpr int SCALES = LINES * TOKENS * LINE, SCALE_BYTES = BITS == 16 ? 0 : TOKENS * BOX_HEADS * 2;
    static constexpr int SLOTS = 0;  // are not copied: nothing is masked
    static_assert(SCALES + 2 * SCALE_BYTES <= CUQUANT_RING / CUQUANT_DEPTH, "a slot for each bucket's half steps");
};

// A place in a ring: a slot, and whose turn it is. Behind its slots a ring has a barrier for each that copies to it pass,
// and then one for each that its warps pass when they have read it.
struct Place {
    static constexpr int DEPTH = CUQUANT_DEPTH, SLOT = CUQUANT_RING / DEPTH;
    static constexpr int BARRIERS = 1024;  // bytes: slots are at multiples of that
    static_assert(DEPTH * 16 <= BARRIERS, "two for each slot");

    u32 start;
    int at;
    u32 parity;

    DEVICE explicit Place(int ring)
        : start(shared_address(dynamic_shared()) + ring * (CUQUANT_RING + BARRIERS)), at(0), parity(0) {}

    DEVICE u32 slot() const { return start + at * SLOT; }
    DEVICE u32 filled() const { return start + CUQUANT_RING + at * 8; }
    DEVICE u32 left() const { return filled() + DEPTH * 8; }

    DEVICE void next() {
        if (++at == DEPTH) at = 0, parity ^= 1;
    }

    // By one thread, of all rings.
    static DEVICE void init() {
        for (int ring = 0; ring < RINGS; ring++) {
            Place place(ring);
            for (int s = 0; s < DEPTH; s++, place.next())
                barrier_init(place.filled(), 1), barrier_init(place.left(), BOX_HEADS);
        }
        barrier_init_fence();
    }
};

// A ring, as each of its warps sees it.
struct Ring {
    Place place;

    DEVICE Ring() : place(number()) {}

    // Which of the rings is the warp's, and which of eight heads.
    static DEVICE int number() { return threadIdx.x / (BOX_HEADS * WARP); }
    static DEVICE int head() { return threadIdx.x / WARP % BOX_HEADS; }

    DEVICE u32 wait() const {
        barrier_wait(place.filled(), place.parity);
        return place.slot();
    }

    // The warp has read its slot.
    DEVICE void release(int lane) {
        __syncwarp();
        barrier_arrive(place.left(), lane == 0);
        place.next();
    }
};

// What asks for a ring's copies: a thread of a warp of its own.
struct Copies {
    const Attention& p;
    const Maps& maps;
    const Share& share;
    const int own;  // of the share's rings
    Place place;

    DEVICE Copies(const Attention& p, const Maps& maps, const Share& share, int ring)
        : p(p), maps(maps), share(share), own(ONE_SEQUENCE ? ring : ring - share.start), place(ring) {}

    // Maps are asked for ahead.
    static DEVICE void prefetch_maps(const Maps& maps) {
#pragma unroll
        for (int t = 0; t < TIERS; t++) {
            if (!has_tier(t)) continue;
#pragma unroll
            for (int m = 0; m < (t == 0 ? 2 : 4); m++) prefetch_map(&maps.maps[maps_before(t)][m]);
        }
    }

    template <int TIER = 0>
    DEVICE void run() {
        if constexpr (has_tier(TIER)) {
            constexpr int TOKENS = Box<bits_of(TIER)>::TOKENS;
            const int streams = ONE_SEQUENCE ? RINGS : share.count;
            const int end = share.cuts[1][TIER], before = int(share.sequence * p.tiers[TIER].room);
#pragma unroll 1
            for (int first = share.cuts[0][TIER] + own * TOKENS; first < end; first += streams * TOKENS)
#pragma unroll
                for (int values = 0; values < 2; values++) copy<TIER>(before + first, values);
        }
        if constexpr (TIER + 1 < TIERS) run<TIER + 1>();
    }

private:
    // Half a step, from row `row` of the bucket's arrays on, when its slot has been left.
    template <int TIER>
    DEVICE void copy(int row, int values) {
        using L = Box<bits_of(TIER)>;
        const auto& map = maps.maps[maps_before(TIER)];
        const u32 to = place.slot(), barrier = place.filled();
        const int group = head_group();
        barrier_wait(place.left(), place.parity ^ 1);
        place.next();
        barrier_expect(barrier, L::SCALES + (values ? 0 : 2 * L::SCALE_BYTES));
        copy_box<1>(to, map[values], barrier, 0, row, group * L::LINES, 0, 0);
        if (L::SCALE_BYTES == 0 || values) return;
        // Scales of all heads are side by side: one row of the map, if there are no others between them.
        const int x = HEADS == BOX_HEADS ? row * BOX_HEADS : group * BOX_HEADS, y = HEADS == BOX_HEADS ? 0 : row;
        copy_box<1>(to + L::SCALES, map[2], barrier, x, y, 0, 0, 0);
        copy_box<1>(to + L::SCALES + L::SCALE_BYTES, map[3], barrier, x, y, 0, 0, 0);
    }
};

// One warp's part of a ring: the tokens of its head.
template <int BITS>
struct Boxes {
    using L = Box<BITS>;
    static_assert(L::TOKENS == step_of_bits(BITS), "as shares are cut");
    // Rows of a product are tokens in an order for which lanes that read keys meet different banks, and those that
    // read values, two rows each, too.
    static DEVICE constexpr int token(int r) { return (r % 2 * 4 + r / 2 % 2 * 2) ^ r / 4 * 5; }

    static constexpr bool NARROW = BITS <= 4;  // a lane reads all that it needs of a row at once: in so many words
    static constexpr int KEY_WORDS = BITS == 3 ? 3 : 1, VALUE_WORDS = BITS == 3 ? 2 : 1;

    Ring& ring;
    int first, end, stride, lane;
    const int g, i;
    u32 scale_at, key_at[KEY_WORDS], value_at[2][VALUE_WORDS];  // in a slot

    DEVICE Boxes(Ring& ring, int begin, int end, int own, int rings, int lane)
        : ring(ring), first(begin + own * L::TOKENS), end(end), stride(rings * L::TOKENS), lane(lane),
          g(lane / 4), i(lane % 4), scale_at(L::SCALES + ring.head() * 2 + token(g) * (BOX_HEADS * 2)) {
        // Opaque, lest the compiler work them out anew at every step.
        asm volatile("" : "+r"(scale_at));
#pragma unroll
        for (int k = 0; k < KEY_WORDS; k++) {
            key_at[k] = place(token(g), key_byte() + k * 4);
            asm volatile("" : "+r"(key_at[k]));
        }
#pragma unroll
        for (int k = 0; k < 2 * VALUE_WORDS; k++) {
            u32& at = value_at[k % 2][k / 2];
            at = place(token(2 * i + k % 2), (BITS == 3 ? value_byte() / 4 * 4 : value_byte()) + k / 2 * 4);
            asm volatile("" : "+r"(at));
        }
    }

    DEVICE u32 wait() const { return ring.wait(); }

    template <bool VALUES>
    DEVICE void release(int) const {
        ring.release(lane);
    }

    template <int COUNT>
    DEVICE void key(Units<BITS, COUNT>& to, u32 from, int eight, int pair) const {
        from += eight * 8 * LINE;
        if constexpr (NARROW)
            read<false>(to, from, key_at, key_byte());
        else
            to.load_words([&](int k) { return from + place(token(g), key_byte() + pair * 2 * BITS + k * 16); });
    }

    template <int COUNT>
    DEVICE void value(Units<BITS, COUNT>& to, u32 from, int eight, int second, int unit) const {
        from += eight * 8 * LINE;
        const int row = token(2 * i + second);
        if constexpr (NARROW)
            read<true>(to, from, value_at[second], value_byte());
        else
            to.load_words([&](int k) { return from + place(row, value_byte() + unit * BITS + k * 16); });
    }

    DEVICE u32 key_scale(u32 from, int eight) const { return from + scale_at + eight * 8 * BOX_HEADS * 2; }
    DEVICE u32 value_scale(u32 from, int eight) const { return key_scale(from, eight) + L::SCALE_BYTES; }

private:
    // Where byte `at` of a token's row is in a slot.
    DEVICE u32 place(int token, int at) const {
        const int byte = at + ring.head() * L::ROW, in_line = byte % LINE;
        return byte / LINE * (L::TOKENS * LINE) + token * LINE + (in_line ^ token * 16);
    }

    // The first byte that this lane reads of a key's row, and of a value's.
    DEVICE int key_byte() const { return i * PAIRS * 2 * BITS; }
    DEVICE int value_byte() const { return g * PAIRS * BITS; }

    // Units from byte `byte` of a row on, whose words are `at` these places.
    template <bool APART, int COUNT, int WORDS>
    static DEVICE void read(Units<BITS, COUNT>& to, u32 from, const u32 (&at)[WORDS], int byte) {
        if constexpr (BITS == 3)
            to.template load_bytes<APART>(byte, [&](int k) { return from + at[k]; });
        else
            to.load_words([&](int) { return from + at[0]; });
    }
};

// A warp's own ring in shared memory, through which it streams keys and values of one head.
//
// A step is TOKENS tokens of a bucket. Its keys, with the scales of both, are a half step, its values another; half
// steps take the slots of the ring in turn. Only the warp itself waits: no barrier is needed.
#pragma once
#include "cache.cuh"
#include "codes.cuh"

constexpr int HEADS = CUQUANT_HEADS;  // of keys: rows from token to token

template <int BITS>
struct Layout {
    static constexpr int TOKENS = BITS >= 8 ? 16 : 32;
    static constexpr int ROW = PADDED / 8 * BITS;        // bytes of a token in a slot
    static constexpr int GIVEN = CUQUANT_DIM / 8 * BITS;  // and in the cache
    static constexpr int PIECE = GIVEN % 16 == 0 ? 16 : GIVEN % 8 == 0 ? 8 : GIVEN % 4 == 0 ? 4 : GIVEN % 2 == 0 ? 2 : 1;
    static constexpr int PIECES = GIVEN / PIECE;
    static constexpr int SCALES = TOKENS * ROW, SLOTS = SCALES + TOKENS * 8;
    static constexpr int SLOT = (SLOTS + CUQUANT_MASKED * TOKENS * 4 + 15) / 16 * 16;
    static constexpr int DEPTH = CUQUANT_RING / SLOT;
    static_assert(DEPTH >= 3, "a half step that is read, one that waits, one on its way");

    // Pieces of rows of 64 bytes and more change places, so that lanes reading different tokens meet different banks.
    static DEVICE u32 swizzle(int token) {
        constexpr bool SQUARE = PIECE == 16 && (ROW & (ROW - 1)) == 0;
        return SQUARE && ROW >= 128 ? token % 8 * 16 : SQUARE && ROW == 64 ? token / 2 % 4 * 16 : 0;
    }
};

template <int BYTES>
DEVICE void copy_piece(u32 to, const u8* from) {
    if constexpr (BYTES == 16) {
#if __CUDA_ARCH__ >= 800
        // The heads beside this one are read by other warps at about this time.
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
#else
        copy_async(to, from);
#endif
    } else if constexpr (BYTES >= 4) {
#if __CUDA_ARCH__ >= 800
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(to), "l"(from), "n"(BYTES) : "memory");
#else
#pragma unroll
        for (int i = 0; i < BYTES; i += 4) {
            u32 v = *reinterpret_cast<const u32*>(from + i);
            asm volatile("st.shared.u32 [%0], %1;" :: "r"(to + i), "r"(v) : "memory");
        }
#endif
    } else {
#pragma unroll
        for (int i = 0; i < BYTES; i++)
            asm volatile("st.shared.u8 [%0], %1;" :: "r"(to + i), "h"(u16(from[i])) : "memory");
    }
}

// Tokens `first` to `end` of one sequence's bucket, of which this warp takes TOKENS every `stride`.
template <int BITS>
struct Stream {
    using L = Layout<BITS>;
    static_assert(L::TOKENS == step_of_bits(BITS), "as shares are cut");

    const Tier& tier;
    s64 origin;  // of this head, in rows: keys, values and scales are indexed alike
    int first, end, stride, lane;
    u32 ring, slot;
    const int g, i;
    const int odd;  // whether this lane's tokens have their scales in the upper halves of words

    DEVICE Stream(const Attention& p, const Tier& tier, int sequence, int head, int begin, int end, int own, int warps,
                  u32 ring, int lane)
        : tier(tier), origin(s64(sequence) * tier.room * HEADS + head), first(begin + own * L::TOKENS), end(end), stride(warps * L::TOKENS),
          lane(lane), ring(ring), slot(ring), g(lane / 4), i(lane % 4), odd((origin + g * HEADS) % 2) {}

    // Fill the ring, all of it at once, when `before` has waited for what may be read. Until then it is worked out where that is.
    template <class F>
    DEVICE void start(F before) const {
        const s64 at = origin + s64(first) * HEADS;
        u64 keys = address(tier.k + at * L::GIVEN + own_byte()), key_scales = scale_word(tier.k_scale, first);
        u64 values = keys + (tier.v - tier.k), value_scales = scale_word(tier.v_scale, first);
        asm volatile("" : "+l"(keys), "+l"(values), "+l"(key_scales), "+l"(value_scales));
        before();
#pragma unroll(L::DEPTH <= 4 ? L::DEPTH : 1)
        for (int half = 0; half < L::DEPTH; half++) {
            const int ahead = half / 2 * stride, step = first + ahead;
            const u32 slot = ring + half * L::SLOT;
            if (!EVEN || step + L::TOKENS > end) {
                copy(half % 2, step, slot);
                continue;
            }
            own_pieces((half % 2 ? values : keys) + s64(ahead) * HEADS * L::GIVEN, slot);
            if (half % 2 == 0) own_scales(key_scales, value_scales, ahead, step, slot);
            copy_commit();
        }
    }

    // The next half step, when it is there: its slot.
    DEVICE u32 wait() const {
        copy_wait<L::DEPTH - 1>();
        __syncwarp();
        return slot;
    }

    // Keys or values of a step have been read: their slot takes the half step that is DEPTH further on.
    template <bool VALUES>
    DEVICE void release(int step) {
        __syncwarp();
        constexpr bool THEN = L::DEPTH % 2 ? !VALUES : VALUES;
        copy(THEN, step + (L::DEPTH + VALUES) / 2 * stride, slot);
        slot = slot == ring + (L::DEPTH - 1) * L::SLOT ? ring : slot + L::SLOT;
    }

    // All copies are done.
    DEVICE void finish() const {
        copy_wait<0>();
        __syncwarp();
    }

    // The token, of eight, that is row r of a product.
    static DEVICE constexpr int token(int r) { return r; }

    // Pairs of units from `pair` on, of those that this lane has of the key in row g of eight tokens.
    template <int COUNT>
    DEVICE void key(Units<BITS, COUNT>& to, u32 from, int eight, int pair) const {
        to.template load<false>(from + (eight * 8 + g) * L::ROW, (i * PAIRS + pair) * 2, L::swizzle(eight * 8 + g));
    }

    // Units from `unit` on, of those that this lane has of the value in row 2 i or 2 i + 1.
    template <int COUNT>
    DEVICE void value(Units<BITS, COUNT>& to, u32 from, int eight, int second, int unit) const {
        const int row = eight * 8 + 2 * i + second;
        to.template load<true>(from + row * L::ROW, g * PAIRS + unit, L::swizzle(row));
    }

    // Scales of the key and the value in row g.
    DEVICE u32 key_scale(u32 from, int eight) const { return from + L::SCALES + (eight * 8 + g) * 4 + odd * 2; }
    DEVICE u32 value_scale(u32 from, int eight) const { return key_scale(from, eight) + L::TOKENS * 4; }

private:
    // Where rows divide a warp, a lane's pieces of a step are of every APART-th token.
    static constexpr int TOTAL = L::TOKENS * L::PIECES, EACH = (TOTAL + WARP - 1) / WARP, APART = WARP / L::PIECES;
    static constexpr bool EVEN = WARP % L::PIECES == 0 && TOTAL % WARP == 0;

    static DEVICE u64 address(const void* p) { return reinterpret_cast<u64>(p); }

    DEVICE void copy(bool values, int step, u32 slot) const {
        if (step < end) {
            rows(values ? tier.v : tier.k, step, slot);
            if (!values && step + lane % L::TOKENS < end)
                own_scales(scale_word(tier.k_scale, step), scale_word(tier.v_scale, step), 0, step, slot);
        }
        copy_commit();
    }

    DEVICE void rows(const u8* array, int step, u32 to) const {
        const u8* const from = array + (origin + s64(step) * HEADS) * L::GIVEN;
        const bool whole = step + L::TOKENS <= end;
        if (EVEN && whole) return own_pieces(address(from + own_byte()), to);
#pragma unroll(L::PIECE < 4 || WARP % L::PIECES == 0 ? 1 : EACH)
        for (int j = 0; j < EACH; j++) {
            const int piece = lane + j * WARP, token = piece / L::PIECES, column = piece % L::PIECES * L::PIECE;
            if ((TOTAL % WARP == 0 || piece < TOTAL) && (whole || step + token < end))
                copy_piece<L::PIECE>(to + token * L::ROW + (column ^ L::swizzle(token)),
                                     from + token * (HEADS * L::GIVEN) + column);
        }
    }

    // Where this lane's first piece of a whole step is, and copies of all its pieces.
    DEVICE int own_byte() const { return lane / L::PIECES * (HEADS * L::GIVEN) + lane % L::PIECES * L::PIECE; }

    DEVICE void own_pieces(u64 from, u32 to) const {
        const int token = lane / L::PIECES;
        const u32 place = token * L::ROW + (lane % L::PIECES * L::PIECE ^ L::swizzle(token));
#pragma unroll
        for (int j = 0; j < EACH; j++)
            copy_piece<L::PIECE>(to + (place ^ L::swizzle(j * APART)) + j * APART * L::ROW,
                                 reinterpret_cast<const u8*>(from) + j * APART * (HEADS * L::GIVEN));
    }

    // Where this lane's scale of a step is.
    DEVICE u64 scale_word(const u16* scales, int step) const {
        return address(scales + origin + s64(step + lane % L::TOKENS) * HEADS);
    }

    // The aligned words that hold the scales of a lane's token, which are `ahead` of these; and its slot.
    DEVICE void own_scales(u64 keys, u64 values, int ahead, int step, u32 to) const {
        const int token = lane % L::TOKENS;
        const auto word = [&](u64 from, u32 place) {
            from += s64(ahead) * (HEADS * 2);
            copy_piece<4>(to + L::SCALES + place + token * 4, reinterpret_cast<const u8*>(from & ~3ull));
        };
        if constexpr (L::TOKENS == WARP) {
            word(keys, 0);
            word(values, L::TOKENS * 4);
        } else if constexpr (BITS < 16) {
            static_assert(L::TOKENS == 16, "a lane for each scale");
            word(lane < 16 ? keys : values, lane / 16 * 64);
        }
        if (CUQUANT_MASKED && lane < L::TOKENS)
            copy_piece<4>(to + L::SLOTS + token * 4,
                          reinterpret_cast<const u8*>(tier.slots + origin / HEADS + step + token));
    }
};

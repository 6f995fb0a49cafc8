// A warp's own ring in shared memory, through which it streams keys and values of one head.
//
// A step is TOKENS tokens of a bucket. Its keys, with the scales of both, are a half step, its values another; half
// steps take the slots of the ring in turn. Only the warp itself waits: no barrier is needed.
#pragma once
#include "cache.cuh"

// Channels in shared memory and in registers; those added count as 0.
constexpr int PADDED = CUQUANT_DIM <= 64 ? 64 : CUQUANT_DIM <= 128 ? 128 : 256;

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
    static DEVICE u32 turn(int token) {
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

    const Tier& tier;
    s64 origin;  // of this head, in rows: keys, values and scales are indexed alike
    int first, end, stride, lane;
    u32 ring;

    DEVICE Stream(const Attention& p, const Tier& tier, int sequence, int head, int begin, int end, int own, int warps,
                  u32 ring, int lane)
        : tier(tier), origin(s64(sequence) * tier.room * HEADS + head), first(begin + own * L::TOKENS), end(end), stride(warps * L::TOKENS), lane(lane), ring(ring) {}

    // Fill the ring, all of it at once.
    DEVICE void start() const {
#pragma unroll 1
        for (int half = 0; half < L::DEPTH; half++)
            copy(half % 2, first + half / 2 * stride, ring + half * L::SLOT);
    }

    DEVICE u32 next(u32 slot) const { return slot == ring + (L::DEPTH - 1) * L::SLOT ? ring : slot + L::SLOT; }

    DEVICE void wait() const {
        copy_wait<L::DEPTH - 1>();
        __syncwarp();
    }

    // The slot of keys or values of a step has been read; it takes the half step that is DEPTH further on.
    template <bool VALUES>
    DEVICE void release(int step, u32 slot) const {
        __syncwarp();
        constexpr bool THEN = L::DEPTH % 2 ? !VALUES : VALUES;
        copy(THEN, step + (L::DEPTH + VALUES) / 2 * stride, slot);
    }

private:
    DEVICE void copy(bool values, int step, u32 slot) const {
        if (step < end) {
            rows(values ? tier.v : tier.k, step, slot);
            if (!values) scales(step, slot);
        }
        copy_commit();
    }

    DEVICE void rows(const u8* array, int step, u32 to) const {
        constexpr int TOTAL = L::TOKENS * L::PIECES, EACH = (TOTAL + WARP - 1) / WARP;
        constexpr int APART = WARP / L::PIECES;  // tokens from a lane's piece to its next, if rows divide a warp
        const u8* const from = array + (origin + s64(step) * HEADS) * L::GIVEN;
        const bool whole = step + L::TOKENS <= end;
        if (WARP % L::PIECES == 0 && TOTAL % WARP == 0 && whole) {
            const int token = lane / L::PIECES, column = lane % L::PIECES * L::PIECE;
            const u8* const own = from + token * (HEADS * L::GIVEN) + column;
            const u32 place = token * L::ROW + (column ^ L::turn(token));
#pragma unroll
            for (int j = 0; j < EACH; j++)
                copy_piece<L::PIECE>(to + (place ^ L::turn(j * APART)) + j * APART * L::ROW,
                                     own + j * APART * (HEADS * L::GIVEN));
            return;
        }
#pragma unroll(L::PIECE < 4 || WARP % L::PIECES == 0 ? 1 : EACH)
        for (int j = 0; j < EACH; j++) {
            const int piece = lane + j * WARP, token = piece / L::PIECES, column = piece % L::PIECES * L::PIECE;
            if ((TOTAL % WARP == 0 || piece < TOTAL) && (whole || step + token < end))
                copy_piece<L::PIECE>(to + token * L::ROW + (column ^ L::turn(token)),
                                     from + token * (HEADS * L::GIVEN) + column);
        }
    }

    // The aligned words that hold the scales; and slots.
    DEVICE void scales(int step, u32 to) const {
        const int token = lane % L::TOKENS;
        if (step + token >= end) return;
        const s64 at = origin + s64(step + token) * HEADS;
        const auto word = [&](const u16* array, u32 place) {
            const u64 address = reinterpret_cast<u64>(array + at) & ~3ull;
            copy_piece<4>(to + L::SCALES + place + token * 4, reinterpret_cast<const u8*>(address));
        };
        if constexpr (L::TOKENS == WARP) {
            word(tier.k_scale, 0);
            word(tier.v_scale, L::TOKENS * 4);
        } else if constexpr (BITS < 16) {
            static_assert(L::TOKENS == 16, "a lane for each scale");
            word(lane < 16 ? tier.k_scale : tier.v_scale, lane / 16 * 64);
        }
        if (CUQUANT_MASKED && lane < L::TOKENS)
            copy_piece<4>(to + L::SLOTS + token * 4,
                          reinterpret_cast<const u8*>(tier.slots + origin / HEADS + step + token));
    }
};

// One 16 x 64 tile of weights in a warp's registers, and the two ways in which it becomes operand A.
//
// The weight is operand A, the activations are operand B: C^T [rows of W x batch] = W X^T. With lane = 4 g + i a
// lane holds, of each 16 columns (a step h = 0..3 of the tile), rows g and g + 8 at columns 2i, 2i+1, 2i+8, 2i+9:
//
//     register   row     columns          nibbles of word h     byte of the 8-bit words
//     a0         g       2i,   2i+1       0, 4                  0, 2 of row g's
//     a1         g + 8   2i,   2i+1       1, 5                  0, 2 of row g + 8's
//     a2         g       2i+8, 2i+9       2, 6                  1, 3 of row g's
//     a3         g + 8   2i+8, 2i+9       3, 7                  1, 3 of row g + 8's
//
// One-bit plane: bit 2h + (r & 1) + 8 (r >> 1) + 16 e of the lane's word is element e of register r at step h.
#pragma once
#include "ptx.cuh"

// Where the planes of all tiles start; a tile's share is its number times the plane's bytes per tile.
struct Planes {
    const u8* low;
    const u8* fifth;
    const u8* scale;
};

template <class F>
struct Tile {
    u32 low[F::LOW_BYTES / 128];
    u32 fifth;
    u32 scale[F::SCALE_BYTES / 32];  // rows g and g + 8, two blocks each

    // From shared memory: where the tile's share of each plane starts.
    DEVICE void load_shared(const u8* low_at, const u8* fifth_at, const u8* scale_at, int lane) {
#pragma unroll
        for (int part = 0; part < F::LOW_BYTES / 512; part++)
            set_low(part, reinterpret_cast<const uint4*>(low_at)[part * 32 + lane]);
        if constexpr (F::HAS_FIFTH) fifth = reinterpret_cast<const u32*>(fifth_at)[lane];
        if constexpr (F::HAS_MIN)
            set_scale(reinterpret_cast<const uint4*>(scale_at)[lane / 4]);
        else
            set_scale(reinterpret_cast<const uint2*>(scale_at)[lane / 4]);
    }

    // Of block b alone: the words of its two steps, and what belongs to both blocks.
    DEVICE void load_block(const u8* low_at, const u8* fifth_at, const u8* scale_at, int b, int lane) {
        if constexpr (F::BITS == 8) {
            set_low(b, reinterpret_cast<const uint4*>(low_at)[b * 32 + lane]);
        } else {
            uint2 v = reinterpret_cast<const uint2*>(low_at)[lane * 2 + b];
            low[2 * b] = v.x, low[2 * b + 1] = v.y;
        }
        if constexpr (F::HAS_FIFTH) fifth = reinterpret_cast<const u32*>(fifth_at)[lane];
        if constexpr (F::HAS_MIN)
            set_scale(reinterpret_cast<const uint4*>(scale_at)[lane / 4]);
        else
            set_scale(reinterpret_cast<const uint2*>(scale_at)[lane / 4]);
    }

    // Exact codes of step h: a code q is the subnormal float16 number q * 2^-24, in rows g + 8 of 4 and 5 bits
    // q * 2^-20: masking is all it takes, and the powers of two leave with the accumulators (UNSCALE).
    DEVICE void codes(int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if constexpr (F::BITS == 8)
                a[r] = __byte_perm(low[h / 2 * 4 + h % 2 * 2 + r % 2] ^ 0x80808080, 0, r < 2 ? 0x4240 : 0x4341);
            else
                a[r] = masked(h, r, 0);
        }
    }

    static constexpr float UNSCALE = 16777216.f;                             // 2^24, of rows g
    static constexpr float UNSCALE_8 = F::BITS == 8 ? 16777216.f : 1048576.f;  // of rows g + 8

    // What `codes` gives for the code -1 (OFFSET times it shifts codes to zero), or for 1 where there is a minimum.
    // As operand A it makes sums of the activations in the units of the accumulators.
    static DEVICE void unit(u32 (&a)[4]) {
        constexpr u32 one = F::HAS_MIN ? 1 : 0x8000 | F::ZERO;
        constexpr u32 one_8 = F::HAS_MIN ? (F::BITS == 8 ? 1 : 16) : 0x8000 | F::ZERO * (F::BITS == 8 ? 1 : 16);
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = (r % 2 ? one_8 : one) * 0x00010001;
    }

    // The weights of step h in float16, rounded once: d * (q - offset) or d * q + m. A code q in the mantissa
    // under the exponent of 1024 reads 1024 + q, four bits higher 1024 + 16 q.
    DEVICE void weights(int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            u32 q;
            if constexpr (F::BITS == 8) {
                u32 word = low[h / 2 * 4 + h % 2 * 2 + r % 2] ^ 0x80808080;  // signed to offset 128
                q = sub_half2(__byte_perm(word, 0x64646464, r < 2 ? 0x4240 : 0x4341), 0x64806480);
            } else if (r % 2) {
                constexpr u32 sixteenth = 0x2c002c00, base = 0xd400 + F::OFFSET * 16;  // -(64 + offset)
                q = fma_half2(masked(h, r, 0x64006400), sixteenth, base * 0x00010001);
            } else {
                q = sub_half2(masked(h, r, 0x64006400), 0x64006400 + F::OFFSET * 0x00010001);
            }
            u32 d = scale_pair(h / 2, r % 2, 0);
            a[r] = F::HAS_MIN ? fma_half2(q, d, scale_pair(h / 2, r % 2, 1)) : mul_half2(q, d);
        }
    }

    // Scale d of block b; row8 = 1 for row g + 8.
    DEVICE float d(int b, int row8) const {
        u32 bits = F::HAS_MIN ? scale[row8 * 2 + b] : scale[row8] >> 16 * b;
        return half_to_float(u16(bits));
    }

    // Minimum m of block b, in formats that have one.
    DEVICE float m(int b, int row8) const { return half_to_float(u16(scale[F::HAS_MIN ? row8 * 2 + b : 0] >> 16)); }

private:
    DEVICE void set_low(int part, uint4 v) {
        low[part * 4 + 0] = v.x, low[part * 4 + 1] = v.y, low[part * 4 + 2] = v.z, low[part * 4 + 3] = v.w;
    }
    DEVICE void set_scale(uint2 v) { scale[0] = v.x, scale[1] = v.y; }
    DEVICE void set_scale(uint4 v) { set_scale(make_uint2(v.x, v.y)), scale[2] = v.z, scale[3] = v.w; }

    // Both elements of register r at step h, over `bits`: at bit 0 of each half in rows g, at bit 4 in rows g + 8.
    DEVICE u32 masked(int h, int r, u32 bits) const {
        const u32 mask = r % 2 ? 0x00f000f0 : 0x000f000f;
        u32 q = and_or(r < 2 ? low[h] : low[h] >> 8, mask, bits);
        if constexpr (F::HAS_FIFTH) {
            const int from = 2 * h + r % 2 + r / 2 * 8, to = r % 2 ? 8 : 4;
            q = and_or(from < to ? fifth << (to - from) : fifth >> (from - to), r % 2 ? 0x01000100 : 0x00100010, q);
        }
        return q;
    }

    // Two copies of block b's scale, or (high) of its minimum.
    DEVICE u32 scale_pair(int b, int row8, int high) const {
        if constexpr (F::HAS_MIN) return __byte_perm(scale[row8 * 2 + b], 0, high ? 0x3232 : 0x1010);
        return __byte_perm(scale[row8], 0, b ? 0x3232 : 0x1010);
    }
};

// One thread's share of copying a plane of ROW_TILES row tiles to shared memory, a step at a time: of the step's pieces
// of 16 bytes, every THREADS-th. BYTES are a row tile's of a step. A row tile beyond the last reads the last instead.
template <int ROW_TILES, int BYTES, int THREADS>
struct PlaneCopy {
    static constexpr int PIECES = ROW_TILES * BYTES / 16, OWN = (PIECES + THREADS - 1) / THREADS;
    const u8* from[OWN ? OWN : 1];

    // From `plane` on, where the first row tile's first step is; the others' follow `apart` bytes apart.
    DEVICE void start(const u8* plane, int last, u32 apart, int thread) {
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            int piece = thread + j * THREADS, row = piece / (BYTES / 16);
            from[j] = plane + min(row, last) * apart + piece % (BYTES / 16) * 16;
        }
    }

    // The next step, to shared address `to`.
    DEVICE void copy(u32 to, int thread) {
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            if (PIECES % THREADS == 0 || thread + j * THREADS < PIECES)
                copy_async(to + (thread + j * THREADS) * 16, from[j]);
            from[j] += BYTES;
        }
    }
};

// All planes; a step is WIDTH tiles of 64 columns. In shared memory every plane is [row tile][tile of the step].
template <class F, int ROW_TILES, int THREADS, int WIDTH = 1>
struct WeightCopy {
    static constexpr int TILES = ROW_TILES * WIDTH;
    static constexpr int FIFTH_AT = TILES * F::LOW_BYTES, SCALE_AT = FIFTH_AT + TILES * F::FIFTH_BYTES;
    static constexpr int SIZE = SCALE_AT + TILES * F::SCALE_BYTES;  // of a step in shared memory
    PlaneCopy<ROW_TILES, F::LOW_BYTES * WIDTH, THREADS> low;
    PlaneCopy<ROW_TILES, (F::FIFTH_BYTES ? F::FIFTH_BYTES : 16) * WIDTH, THREADS> fifth;
    PlaneCopy<ROW_TILES, F::SCALE_BYTES * WIDTH, THREADS> scale;

    DEVICE void start(const Planes& w, int first_row, int row_tiles, int tiles, int tile, int thread) {
        const s64 first = s64(first_row) * tiles + tile;
        const int last = row_tiles - 1 - first_row;
        low.start(w.low + first * F::LOW_BYTES, last, tiles * F::LOW_BYTES, thread);
        if constexpr (F::HAS_FIFTH) fifth.start(w.fifth + first * F::FIFTH_BYTES, last, tiles * F::FIFTH_BYTES, thread);
        scale.start(w.scale + first * F::SCALE_BYTES, last, tiles * F::SCALE_BYTES, thread);
    }

    DEVICE void copy(u32 to, int thread) {
        low.copy(to, thread);
        if constexpr (F::HAS_FIFTH) fifth.copy(to + FIFTH_AT, thread);
        scale.copy(to + SCALE_AT, thread);
    }

    // Row tile r, tile k of the step at `from`.
    static DEVICE void load(Tile<F>& tile, const u8* from, int r, int k, int lane) {
        const int i = r * WIDTH + k;
        tile.load_shared(from + i * F::LOW_BYTES, from + FIFTH_AT + i * F::FIFTH_BYTES,
                         from + SCALE_AT + i * F::SCALE_BYTES, lane);
    }
};

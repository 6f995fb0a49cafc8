// One 16 x 64 tile of weights in a warp's registers, and how it gets there; codec.cuh makes operand A of it.
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
// Codes of 8 bits are around 128. Of 2 to 6 bits the words, and the low and the high plane, have them as places.cuh says.
//
// Group plane: what scales of many columns share, one record of GROUP_BYTES bytes per row tile and GROUP_TILES tiles
// along K. In the rings of shared memory it is a part of every slot, which has its tiles' records. Of integer scales
// (types.cuh) it has the float16 number d, and -dmin as a second word, of rows g and g + 8; of groups of 64 columns or
// more that have scales of their own these, and zero points as a second word.
//
// Row plane, of formats with ROW_FACTORS (types.cuh) alone: for every row a factor, a power of two in bfloat16; a word
// has those of rows g and g + 8 of a row tile. Operand A takes a code q as the bits of a subnormal float16 number, which
// is nothing to do: q * 2^-C, where C is 24, in rows g + 8 less by what codes stand HIGHER. So that weights are normal
// numbers, the scales of a row are kept multiplied by 2^L, its minimums by 2^(L - C); the row's factor is 2^(C - L). L
// brings the greatest scale to 2^15 or more, if minimums allow it. Zero points stay codes. Integer scales are multiplied by
// d, so that d is kept multiplied by 2^L and L brings the greatest product there; dmin by 2^L too, of rows g + 8 by 2^L
// times what codes stand HIGHER: then integer minimums times it are in the units of codes.
#pragma once
#include "ptx.cuh"

// Where the planes of all tiles start; a tile's share is its number times the plane's bytes per tile.
struct Planes {
    const u8* low;
    const u8* high;
    const u8* scale;
    const u8* group;
    const u32* rows;
};

// A word of the row plane.
struct Factors {
    u32 word;

    DEVICE void load(const Planes& w, int row_tile, int lane) { word = load_now(w.rows + row_tile * 8 + lane / 4); }

    static DEVICE void prefetch(const Planes& w, int row_tile) { ::prefetch(w.rows + row_tile * 8); }

    DEVICE float operator[](int row8) const { return __int_as_float(row8 ? word & 0xffff0000 : word << 16); }
};

// What a lane holds of a tile. Integers of 4 bits are a word for each step h, those of 8 bits two, others as places.cuh
// says. Codes that are looked up in a codebook are in an order of their own (codebook.cuh).
template <class F>
struct Tile {
    u32 low[F::LOW_BYTES / 128];
    u32 high[F::HIGH_BYTES ? F::HIGH_BYTES / 128 : 1];
    u32 scale[F::SCALE_BYTES ? F::SCALE_BYTES / 32 : 1];  // rows g and g + 8, two blocks each
    u32 group[F::GROUP_BYTES ? F::GROUP_BYTES / 32 : 1];  // rows g and g + 8

    // Word w of the codes, the last ones being the high plane's.
    DEVICE u32 word(int w) const {
        constexpr int LOW = F::LOW_BYTES / 128;
        return w < LOW ? low[w] : high[w - LOW];
    }

    // Bytes from one lane's part of a plane to the next one's; of scales and groups four lanes have the same.
    static constexpr int LOW_LANE = WORDS_TOGETHER<F> ? 8 : F::LOW_BYTES == 256 ? 4 : 16, HIGH_LANE = 4;
    static constexpr int SCALE_LANE = F::SCALE_BYTES / 8, GROUP_LANE = F::GROUP_BYTES / 8;

    // From shared memory: where the tile's share of each plane starts. (Lane 0: where a lane's own part does.)
    DEVICE void load_shared(const u8* low_at, const u8* high_at, const u8* scale_at, const u8* group_at, int lane) {
        if constexpr (WORDS_TOGETHER<F>) {
            load_both(low_at, lane);
        } else if constexpr (F::LOW_BYTES == 256) {
#pragma unroll
            for (int w = 0; w < 2; w++) low[w] = reinterpret_cast<const u32*>(low_at)[w * 32 + lane];
        } else {
#pragma unroll
            for (int part = 0; part < F::LOW_BYTES / 512; part++)
                set_low(part, reinterpret_cast<const uint4*>(low_at)[part * 32 + lane]);
        }
        if constexpr (F::HIGH_BYTES == 256) high[1] = reinterpret_cast<const u32*>(high_at)[32 + lane];
        load_others(high_at, scale_at, group_at, lane);
        if constexpr (F::SCALING == SINGLE) round_scales();
    }

    // Loads block b alone: the words of its two steps, and what belongs to both blocks.
    DEVICE void load_block(const u8* low_at, const u8* high_at, const u8* scale_at, const u8* group_at, int b,
                           int lane) {
        const bool own = F::CODING == INTEGERS && b == 0;  // of 3 and 5 bits block 1 has some in block 0's words
        if constexpr (WORDS_TOGETHER<F>) {
            load_both(low_at, lane);
        } else if constexpr (F::LOW_BYTES == 256) {
#pragma unroll
            for (int w = 0; w < 2; w++)
                if (w == b || (F::BITS == 3 && !own)) low[w] = reinterpret_cast<const u32*>(low_at)[w * 32 + lane];
        } else if (F::BITS == 5 && F::CODING != SIGNED_CODEBOOK && !own) {
            set_low(0, reinterpret_cast<const uint4*>(low_at)[lane]);
        } else if constexpr (F::BITS == 8) {
            set_low(b, reinterpret_cast<const uint4*>(low_at)[b * 32 + lane]);
        } else {
            uint2 v = reinterpret_cast<const uint2*>(low_at)[lane * 2 + b];
            low[2 * b] = v.x, low[2 * b + 1] = v.y;
        }
        load_others(F::HIGH_BYTES == 256 ? high_at + b * 128 : high_at, scale_at, group_at, lane);
        if constexpr (F::HIGH_BYTES == 256) high[1] = high[0];
    }

    // Two copies of the scale of step h in float16, or (minimum) of its minimum or zero point; row8 = 1 for row g + 8.
    // Of E4M3 bytes 2^7 times their own numbers.
    DEVICE u32 scale_pair(int h, int row8, int minimum = 0) const {
        const int b = h / 2;
        if constexpr (F::SCALING >= BYTES) return twice(product_halves(h), row8);
        if constexpr (F::SCALING == E4M3) return twice(mul_half2(step_halves(h, row8), 0x78007800), b);
        if constexpr (GROUP_SCALES<F>) return twice(group[minimum], row8);
        if constexpr (F::HAS_MIN) return twice(scale[row8 * 2 + b], minimum);
        if constexpr (F::SCALE_BYTES == 32) return twice(halves(b), row8);
        return twice(scale[row8], b);
    }

    // Both rows' scale of step h where scales are E4M4 bytes, 2^11 times.
    DEVICE u32 byte_scales(int h) const { return mul_half2(halves(h / 2), 0x78007800); }

    // Two copies of the scale of step h times a pair, where scales are pairs of blocks, or of rows.
    DEVICE u32 scaled_pair(int h, int row8, u32 pair) const {
        if constexpr (GROUP_SCALES<F>) return mul_half2(twice(group[0], row8), pair);
        return twice(mul_half2(scale[row8], pair), h / 2);
    }

    // The scale of step h in float32; of E8M0 bytes their own powers of two, of E4M3 bytes 2^-8 times their own numbers.
    DEVICE float d(int h, int row8) const {
        const int b = h / 2;
        if constexpr (F::SCALING >= BYTES) return product(h, row8, 0);
        if constexpr (F::SCALING == E4M3)
            return b ? high_to_float(step_halves(h, row8)) : low_to_float(step_halves(h, row8));
        if constexpr (F::SCALING == SINGLE && F::GROUP_BYTES > 0) return __int_as_float(group[row8]);
        if constexpr (F::SCALING == SINGLE) return __int_as_float(scale[row8 * 2 + b]);
        if constexpr (GROUP_SCALES<F>) return row8 ? high_to_float(group[0]) : low_to_float(group[0]);
        if constexpr (F::HAS_MIN) return low_to_float(scale[row8 * 2 + b]);
        if constexpr (F::SCALING == E8M0) return __int_as_float(exponent(row8 * 2 + b));
        const u32 pair = F::SCALE_BYTES == 32 ? halves(b) : scale[row8];
        return (F::SCALE_BYTES == 32 ? row8 : b) ? high_to_float(pair) : low_to_float(pair);
    }

    // Minimum of step h, in formats that have one; with a zero point, -zero * d.
    DEVICE float m(int h, int row8) const {
        const int b = h / 2;
        if constexpr (F::SCALING >= BYTES) return product(h, row8, 1);
        if constexpr (GROUP_SCALES<F> && F::HAS_MIN)
            return -(row8 ? high_to_float(group[1]) : low_to_float(group[1])) * d(2 * b, row8);
        const float m = high_to_float(scale[F::HAS_MIN ? row8 * 2 + b : 0]);
        return F::SCALING == HALF_AND_ZERO ? -m * d(2 * b, row8) : m;
    }

    // Both rows' integer scale of step h in float16: under the exponent of 1024 the byte s in the mantissa reads 1024 + s.
    DEVICE u32 integer_scales(int h) const {
        const Integers s = integers(h, 0);
        const u32 read = __byte_perm(s.word, 0x64646464, 0x4040 | s.at | s.at + 1 << 8);
        return sub_half2(read, 0x64006400 + F::SCALE_ZERO * 0x10001);
    }

    // Both rows' integer minimum as subnormal numbers, in units of 2^-24; and a row's, twice.
    DEVICE u32 integer_minimums(int h) const {
        const Integers m = integers(h, 1);
        return __byte_perm(m.word, 0, 0x4040 | m.at | m.at + 1 << 8);
    }

    DEVICE u32 minimum_bits(int h, int row8) const {
        const Integers s = integers(h, 1);
        return __byte_perm(s.word, 0, 0x4040 | (s.at + row8) * 0x0101);
    }

    // What integer scales (or minimums) are multiplied by.
    DEVICE float integer_unit(int row8, int minimum) const {
        return row8 ? high_to_float(group[minimum]) : low_to_float(group[minimum]);
    }

    // Whether every step has a scale of its own.
    static constexpr bool STEP_SCALES =
        F::SCALING == E4M3 || F::SCALING == STEP_BYTES || F::SCALING == STEP_NIBBLES_AND_MIN;

private:
    // Where the integer scale (or minimum) of step h and row g is: byte `at` of the word, row g + 8's being the next.
    struct Integers {
        u32 word;
        int at;
    };

    DEVICE Integers integers(int h, int minimum) const {
        const int b = h / 2;
        if constexpr (F::SCALING == BYTES) return {scale[0], 2 * b};
        if constexpr (F::SCALING == BYTES_AND_MIN) return {scale[b], 2 * minimum};
        if constexpr (F::SCALING == STEP_BYTES) return {scale[b], 2 * (h % 2)};
        return {masked(minimum ? scale[b] >> 4 : scale[b], 0x0f0f0f0f), 2 * (h % 2)};
    }

    // Both rows' scale, integer times d, in float16, rounded once.
    DEVICE u32 product_halves(int h) const {
        return mul_half2(integer_scales(h), group[0]);
    }

    // A row's integer times d, or the minimum, in float32, exact: as the second byte of 32768's bits s reads 32768 + s.
    DEVICE float product(int h, int row8, int minimum) const {
        const Integers s = integers(h, minimum);
        const float read = __int_as_float(__byte_perm(s.word, 0x47000000, 0x7404 | s.at + row8 << 4));
        const float factor = integer_unit(row8, minimum);
        return __fmaf_rn(read, factor, factor * -(32768.f + F::SCALE_ZERO));
    }

    // The scales of steps h % 2 and h % 2 + 2 of a row: E4M3 bytes, whose bits are a float16 number's.
    DEVICE u32 step_halves(int h, int row8) const {
        return masked(h % 2 ? scale[row8] >> 1 : scale[row8] << 7, 0x3f803f80);
    }

    // Byte `at` as the exponent of a float32 number.
    DEVICE u32 exponent(int at) const {
        return masked(at < 3 ? scale[0] << (23 - 8 * at) : scale[0] >> 1, 0x7f800000);
    }

    // Both rows' scales of block b, from bytes. An E4M4 byte is the float16 number with these exponent and mantissa
    // bits, 2^-4 times its own, subnormal ones included. Of an E8M0 byte the lowest five bits are the exponent: bytes
    // from 97 to 126 read as 2^16 times their own number, 2^-30 to 2^-1, and 96 as 0.
    DEVICE u32 halves(int b) const {
        if constexpr (F::SCALING == E8M0) return masked(b ? scale[0] << 2 : scale[0] << 10, 0x7c007c00);
        return masked(b ? scale[0] >> 2 : scale[0] << 6, 0x3fc03fc0);
    }

    // Float32 scales to float16, half as many words: what `scale_pair` takes, but not `d`.
    DEVICE void round_scales() {
        auto pair = [](u32 a, u32 b) { return pack(__int_as_float(a), __int_as_float(b), FLOAT16); };
        if constexpr (F::GROUP_BYTES > 0)
            group[0] = pair(group[0], group[1]);
        else
            scale[0] = pair(scale[0], scale[1]), scale[1] = pair(scale[2], scale[3]);
    }

    // Words that lie together.
    DEVICE void load_both(const u8* low_at, int lane) {
        const uint2 v = reinterpret_cast<const uint2*>(low_at)[lane];
        low[0] = v.x, low[1] = v.y;
    }

    DEVICE void set_low(int part, uint4 v) {
        low[part * 4 + 0] = v.x, low[part * 4 + 1] = v.y, low[part * 4 + 2] = v.z, low[part * 4 + 3] = v.w;
    }

    DEVICE void load_others(const u8* high_at, const u8* scale_at, const u8* group_at, int lane) {
        if constexpr (F::HIGH_BYTES > 0) high[0] = reinterpret_cast<const u32*>(high_at)[lane];
        if constexpr (F::SCALE_BYTES == 128) {
            uint4 v = reinterpret_cast<const uint4*>(scale_at)[lane / 4];
            scale[0] = v.x, scale[1] = v.y, scale[2] = v.z, scale[3] = v.w;
        } else if constexpr (F::SCALE_BYTES == 64) {
            uint2 v = reinterpret_cast<const uint2*>(scale_at)[lane / 4];
            scale[0] = v.x, scale[1] = v.y;
        } else if constexpr (F::SCALE_BYTES > 0) {
            scale[0] = reinterpret_cast<const u32*>(scale_at)[lane / 4];
        }
        if constexpr (F::GROUP_BYTES == 64) {
            uint2 v = reinterpret_cast<const uint2*>(group_at)[lane / 4];
            group[0] = v.x, group[1] = v.y;
        } else if constexpr (F::GROUP_BYTES > 0) {
            group[0] = reinterpret_cast<const u32*>(group_at)[lane / 4];
        }
    }
};

// One thread's share of copying a plane of ROW_TILES row tiles to shared memory, a step at a time: of the step's pieces
// of 16 bytes, every THREADS-th. BYTES are a row tile's of a step. A row tile beyond the last reads the last instead.
// AGAIN: the next step may well be the same bytes. SIDES: of so many weights, `apart` from each other, which in shared
// memory are SIDE_BYTES apart.
template <int ROW_TILES, int BYTES, int THREADS, int SIDES, int SIDE_BYTES, bool AGAIN = false>
struct PlaneCopy {
    static constexpr int ROW_PIECES = BYTES / 16, PIECES = ROW_TILES * ROW_PIECES;
    static constexpr int OWN = (PIECES + THREADS - 1) / THREADS;
    // How many of a thread's pieces are of one row tile, always as far from each other: one address for all.
    static constexpr int SAME_ROW = ROW_PIECES && ROW_PIECES % THREADS == 0 ? ROW_PIECES / THREADS : 1;
    const u8* from[OWN ? OWN / SAME_ROW : 1];

    // From `plane` on, where the first row tile's first step is; the others' follow `apart` bytes apart.
    DEVICE void start(const u8* plane, int last, u32 apart, int thread) {
#pragma unroll
        for (int j = 0; j < OWN; j += SAME_ROW) {
            const int piece = thread + j * THREADS, row = piece / ROW_PIECES;
            from[j / SAME_ROW] = plane + min(row, last) * apart + piece % ROW_PIECES * 16;
        }
    }

    // The next step, if it `exists`, to shared address `to`, which is that of the thread's own first piece if it is its
    // OWN_PLACE; the one after it is `advance` bytes further.
    template <bool OWN_PLACE>
    DEVICE void copy(u32 to, int thread, int advance, bool exists, s64 apart) {
#pragma unroll
        for (int j = 0; j < OWN; j++) {
            const u8*& row = from[j / SAME_ROW];
            if (PIECES % THREADS == 0 || thread + j * THREADS < PIECES) {
#pragma unroll
                for (int side = 0; side < SIDES; side++) {
                    const u32 piece = to + ((OWN_PLACE ? 0 : thread) + j * THREADS) * 16 + side * SIDE_BYTES;
                    const u8* const own = row + j % SAME_ROW * THREADS * 16 + side * apart;
                    if constexpr (AGAIN)
                        copy_async_again(piece, own, exists);
                    else
                        copy_async(piece, own, exists);
                }
            }
            if (j % SAME_ROW == SAME_ROW - 1) row += advance;
        }
    }
};

// All planes; a step is WIDTH tiles of 64 columns. In shared memory every plane is [row tile][tile of the step], groups
// [row tile][record]; of two SIDES the second one's follow the first one's.
template <class F, int ROW_TILES, int THREADS, int WIDTH = 1, int SIDES = 1>
struct WeightCopy {
    static constexpr int TILES = ROW_TILES * WIDTH, RECORDS = (WIDTH + F::GROUP_TILES - 1) / F::GROUP_TILES;
    static_assert(WIDTH % F::GROUP_TILES == 0 || F::GROUP_TILES % WIDTH == 0, "steps start where groups do");
    static constexpr int HIGH_AT = TILES * F::LOW_BYTES, SCALE_AT = HIGH_AT + TILES * F::HIGH_BYTES;
    static constexpr int GROUP_AT = SCALE_AT + TILES * F::SCALE_BYTES;
    static constexpr int SIZE = GROUP_AT + ROW_TILES * RECORDS * F::GROUP_BYTES;  // of a step in shared memory
    static constexpr int LOW = F::LOW_BYTES * WIDTH, HIGH = (F::HIGH_BYTES ? F::HIGH_BYTES : 16) * WIDTH;
    static constexpr int SCALE = (F::SCALE_BYTES ? F::SCALE_BYTES : 16) * WIDTH;
    static constexpr int GROUP = (F::GROUP_BYTES ? F::GROUP_BYTES : 16) * RECORDS;
    PlaneCopy<ROW_TILES, LOW, THREADS, SIDES, SIZE> low;
    PlaneCopy<ROW_TILES, HIGH, THREADS, SIDES, SIZE> high;
    PlaneCopy<ROW_TILES, SCALE, THREADS, SIDES, SIZE> scale;
    PlaneCopy<ROW_TILES, GROUP, THREADS, SIDES, SIZE, true> group;
    int next;  // tile, where there are groups

    DEVICE void start(const Planes& w, int first_row, int row_tiles, int tiles, int tile, int thread) {
        const s64 first = s64(first_row) * tiles + tile;
        const int last = row_tiles - 1 - first_row;
        low.start(w.low + first * F::LOW_BYTES, last, tiles * F::LOW_BYTES, thread);
        if constexpr (F::HIGH_BYTES > 0)
            high.start(w.high + first * F::HIGH_BYTES, last, tiles * F::HIGH_BYTES, thread);
        if constexpr (F::SCALE_BYTES > 0)
            scale.start(w.scale + first * F::SCALE_BYTES, last, tiles * F::SCALE_BYTES, thread);
        if constexpr (F::GROUP_BYTES > 0) {
            const int groups = groups_of<F>(tiles);
            const s64 record = s64(first_row) * groups + tile / F::GROUP_TILES;
            group.start(w.group + record * F::GROUP_BYTES, last, groups * F::GROUP_BYTES, thread);
            next = tile;
        }
    }

    // The next step, one of `left`. Beyond the last nothing is read: there is no branch for it. `to`: as above; with its own
    // place a thread keeps one register, and calculates nothing.
    template <bool OWN_PLACE = false>
    DEVICE void copy(u32 to, int thread, int left = 2, s64 apart = 0) {
        const bool exists = left > 0;
        const int on = left > 1;
        low.template copy<OWN_PLACE>(to, thread, on * LOW, exists, apart);
        if constexpr (F::HIGH_BYTES > 0) high.template copy<OWN_PLACE>(to + HIGH_AT, thread, on * HIGH, exists, apart);
        if constexpr (F::SCALE_BYTES > 0) scale.template copy<OWN_PLACE>(to + SCALE_AT, thread, on * SCALE, exists, apart);
        if constexpr (F::GROUP_BYTES > 0) {
            next += WIDTH;
            group.template copy<OWN_PLACE>(to + GROUP_AT, thread, next % F::GROUP_TILES ? 0 : on * GROUP, exists, apart);
        }
    }

    // How a lane reads its tiles: where it has its parts of row tile r and tile k of the step at `step`. It is moved from step
    // to step, so that no load of a loop takes an instruction for its address.
    struct Reader {
        u32 low, high, scale, group;

        DEVICE Reader(u32 step, int r, int k, int lane) {
            const int i = r * WIDTH + k;
            low = step + i * F::LOW_BYTES + lane * Tile<F>::LOW_LANE;
            high = step + HIGH_AT + i * F::HIGH_BYTES + lane * Tile<F>::HIGH_LANE;
            scale = step + SCALE_AT + i * F::SCALE_BYTES + lane / 4 * Tile<F>::SCALE_LANE;
            group = step + GROUP_AT + group_record(r, k) * F::GROUP_BYTES + lane / 4 * Tile<F>::GROUP_LANE;
        }

        // To another step, or to that of another of the SIDES.
        DEVICE Reader moved(int bytes) const {
            Reader to = *this;
            to.low += bytes, to.high += bytes, to.scale += bytes, to.group += bytes;
            return to;
        }

        // The tile r row tiles and k tiles further on, k being a multiple of a number that the first one's is less than.
        DEVICE void load(Tile<F>& tile, int r, int k) const {
            const int i = r * WIDTH + k;
            auto at = [](u32 address, int bytes) {
                return static_cast<const u8*>(__cvta_shared_to_generic(address)) + bytes;
            };
            tile.load_shared(at(low, i * F::LOW_BYTES), at(high, i * F::HIGH_BYTES), at(scale, i * F::SCALE_BYTES),
                             at(group, group_record(r, k) * F::GROUP_BYTES), 0);
        }

    private:
        static DEVICE constexpr int group_record(int r, int k) { return r * RECORDS + k / F::GROUP_TILES; }
    };
};

// Queries of a key head as operand B, and what is summed up for them.
//
// With lane = 4 g + i a lane has the queries of row g of each group of eight as they enter products, and of rows 2 i
// and 2 i + 1 scores, references and sums, as products leave them.
//
// Codes of keys meet up to four queries as 16-bit integers, a high and a low byte, both signed: q = 256 high + low, with
// about 2^14 to 2^15 for the largest channel of a row. Each byte has a column of a product, the products are exact, and a
// register has four codes where it has two float16 numbers (codes.cuh). Float16 numbers are what keys of 16 bits meet, and all
// keys where there are more queries, whose bytes would take twice as many products; where a bucket's codes are too few for an
// integer product (2 or 3 bits of 64 channels); where queries are masked or float32, and on sm_75.
#pragma once
#include "../core/ieee.cuh"
#include "split.cuh"
#include "codes.cuh"

constexpr int GROUPS = CUQUANT_GROUPS;  // of eight rows
constexpr int ROWS = GROUPS * 8;
// Rows of eight that a lane has after products. Up to four rows take two columns each, so that each lane has one: the
// second is for low bytes, or nobody looks at it.
constexpr int COLUMNS = CUQUANT_SPREAD ? 1 : 2;
constexpr int HALVES = CUQUANT_HALVES;  // float16 numbers of which a query's channel is the sum: of float32 two

constexpr float MOST_WEIGHT = 32768.f;  // of a token, beyond which references move (bucket.cuh)

// The reference by which the largest score has a weight of 2^room. From 2^24 on floats are more than 1 apart, and the difference
// might become any: there it is the score itself.
constexpr float WHOLE = 1 << 24;
DEVICE float reference_for(float most, int room) { return fabsf(most) < WHOLE ? most - room : most; }

constexpr bool FEW_CODES = PAIRS == 1 && (has_tier(3) || has_tier(4));
constexpr bool INTEGER_QUERIES = __CUDA_ARCH__ >= 800 && COLUMNS == 1 && HALVES == 1 && !FEW_CODES;

template <int BITS>
constexpr bool INTEGER = INTEGER_QUERIES && BITS < 16;

// Sums of integer products are so many times too large.
template <int BITS>
constexpr int OVERSIZE = 1 << BITS * (CLASSES<BITS> - 1);

// The row at a place of those of a block.
DEVICE constexpr int row_of(int place) { return place * COLUMNS / 2; }

constexpr int OWN = PAIRS * 16;          // channels of a query that a lane has
constexpr int WORDS = HALVES * OWN / 8;  // of 16 bytes, that they take at most

// A lane's channels of its rows of queries: of one half float16 or bfloat16, else float32. Where they are is known before they
// may be asked for.
struct Given {
    u64 at[GROUPS];     // addresses
    int count[GROUPS];  // of the words that are there; others are zeros
    uint4 raw[GROUPS][WORDS];

    // Queries of a key head's rows from `first` on.
    DEVICE Given(const Attention& p, int sequence, int head, int first, int lane) {
        constexpr int EACH = HALVES > 1 ? 4 : 8;  // channels of a word
        const int start = lane % 4 * OWN;
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
            const int row = first + row_of(n * 8 + lane / 4);
            const int query_head = head * p.group + (p.q_len == 1 ? row : row / p.q_len);
            const s64 element = sequence * p.q_strides[0] + (p.q_len == 1 ? 0 : row % p.q_len * p.q_strides[1]) +
                                query_head * p.q_strides[2] + start;
            at[n] = reinterpret_cast<u64>(static_cast<const u8*>(p.q) + element * (16 / EACH));
            count[n] = row >= rows_of(p) ? 0 : PADDED == CUQUANT_DIM ? WORDS : (CUQUANT_DIM - start + EACH - 1) / EACH;
            asm volatile("" : "+l"(at[n]), "+r"(count[n]));  // worked out here
        }
    }

    DEVICE void ask() {
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
#pragma unroll
            for (int k = 0; k < WORDS; k++) raw[n][k] = make_uint4(0, 0, 0, 0);
            if (at[n] % 16 == 0) {
#pragma unroll
                for (int k = 0; k < WORDS; k++)
                    if (k < count[n]) raw[n][k] = reinterpret_cast<const uint4*>(at[n])[k];
            } else {
#pragma unroll
                for (int k = 0; k < WORDS; k++)
                    if (k < count[n]) raw[n][k] = gathered(reinterpret_cast<const u16*>(at[n]) + k * 8);
            }
        }
    }

private:
    static __device__ __noinline__ uint4 gathered(const u16* from) {
        u32 w[4];
        for (int k = 0; k < 4; k++) w[k] = from[2 * k] | u32(from[2 * k + 1]) << 16;
        return make_uint4(w[0], w[1], w[2], w[3]);
    }
};

// How channels of a query are paired in registers: channel j of 16 with channel 8 + j, as codes of keys are, or neighbours, as
// float16 numbers of keys are that are multiplied as they lie in memory.
constexpr bool NEIGHBOURS = CUQUANT_DIRECT;

DEVICE constexpr int first_of_pair(int j) { return NEIGHBOURS ? 2 * j : j; }
DEVICE constexpr int second_of_pair(int j) { return NEIGHBOURS ? 2 * j + 1 : 8 + j; }

struct Queries {
    u32 b[HALVES][GROUPS][PAIRS][8];  // pair j of units 2 p and 2 p + 1 of the lane, which are i * 2 PAIRS + ...
    u32 bytes[GROUPS][PAIRS * 4];     // of four channels of the lane each: `order` says which
    float scale[GROUPS][2];           // of a product's sums, to scores
    float power[GROUPS];              // of two that is part of it, for the lane's own row, lane / 4 of each eight
    float sum[GROUPS][2];             // of all channels as products take them, in their units: what an offset of 1 adds
    int whole[GROUPS][2];             // the same of bytes, high and low ones
    int last[GROUPS][2], least_last;  // slot that it sees, and the least of all rows
    float reference[GROUPS][2], total[GROUPS][2], o[GROUPS][PAIRS * 4][4];

    // Nothing is summed up yet.
    DEVICE void clear() {
#pragma unroll
        for (int n = 0; n < GROUPS; n++) {
#pragma unroll
            for (int c = 0; c < 2; c++) reference[n][c] = LEAST, total[n][c] = 0;
#pragma unroll
            for (int m = 0; m < PAIRS * 4; m++)
#pragma unroll
                for (int c = 0; c < 4; c++) o[n][m][c] = 0;
        }
    }

    // Rows from `first` on of a key head. `writes`: they are left for `importance`.
    DEVICE void take(const Attention& p, const Given& given, int sequence, int head, int first, bool writes, int lane) {
#pragma unroll
        for (int n = 0; n < GROUPS; n++) prepare(p, sequence, head, first, n, writes, lane, given.raw[n]);
        if constexpr (CUQUANT_MASKED) {
            least_last = last[0][0];
#pragma unroll
            for (int n = 0; n < GROUPS; n++)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) least_last = min(least_last, last[n][c]);
            least_last = min(least_last, __shfl_xor_sync(~0u, least_last, 1));
            least_last = min(least_last, __shfl_xor_sync(~0u, least_last, 2));
        }
    }

    // Float16 numbers become integers, which all buckets but that of 16 bits, the first, meet.
    DEVICE void to_integers(int lane) {
#pragma unroll
        for (int n = 0; n < GROUPS; n++)
            take_bytes(n, lane, 1, [&](int e) {
                const u32 pair = b[0][n][e / 16][e % 8];
                return e % 16 < 8 ? low_to_float(pair) : high_to_float(pair);
            });
    }

    // Made fit for codes of a width (`to`), or as before again: codes have powers of two that queries take back, or are bytes in
    // an order of their own, whose sums are too large.
    template <int BITS>
    DEVICE void fit(bool to) {
        if constexpr (INTEGER<BITS>) {
#pragma unroll
            for (int n = 0; n < GROUPS; n++) {
                order<BITS>(bytes[n], to);
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) scale[n][c] *= to ? 1.f / OVERSIZE<BITS> : OVERSIZE<BITS>;
            }
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                constexpr int ONE = 15;
                const int n = shift<BITS>(j);
                if (n == 0) continue;
                const u32 power = ((to ? ONE - n : ONE + n) << 10) * 0x00010001u;
#pragma unroll
                for (int s = 0; s < HALVES; s++)
#pragma unroll
                    for (int g = 0; g < GROUPS; g++)
#pragma unroll
                        for (int u = 0; u < PAIRS; u++) b[s][g][u][j] = mul_half2(b[s][g][u][j], power);
            }
        }
    }

    // Sums of values made fit for codes of a width (`to`), or as before again: they have these powers of two, too.
    template <int BITS>
    DEVICE void fit_sums(bool to) {
#pragma unroll
        for (int m = 0; m < PAIRS * 4; m++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int n = shift<BITS>(m % 4 * 2 + c / 2) - (BITS == 16 ? 0 : 24);
                const float power = power_of_two(to ? n : -n);
#pragma unroll
                for (int g = 0; g < GROUPS; g++) o[g][m][c] *= power;
            }
    }

private:
    // Register r has channels 4 r .. 4 r + 3, or those of a key's register r in integer products (codes.cuh).
    template <int BITS>
    static DEVICE void order(u32 (&r)[PAIRS * 4], bool to) {
        const auto two = [](u32& x, u32& y, u32 low, u32 high) {
            const u32 a = x, b = y;
            x = __byte_perm(a, b, low), y = __byte_perm(a, b, high);
        };
        const auto swap = [](u32& x, u32& y) {
            const u32 a = x;
            x = y, y = a;
        };
        if constexpr (BITS == 4)
#pragma unroll
            for (int k = 0; k < PAIRS * 4; k += 4) {  // even and odd channels of eight
                if (!to) swap(r[k + 1], r[k + 2]);
#pragma unroll
                for (int j = k; j < k + 4; j += 2) two(r[j], r[j + 1], to ? 0x6420 : 0x5140, to ? 0x7531 : 0x7362);
                if (to) swap(r[k + 1], r[k + 2]);
            }
        if constexpr (BITS < 4)
#pragma unroll
            for (int k = 0; k + 8 <= PAIRS * 4; k += 8) {  // every fourth, or eighth, of 32: 4 x 4 bytes are transposed
                u32 v[8];
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = r[k + (to ? given(BITS, j) : transposed(BITS, j))];
#pragma unroll
                for (int j = 0; j < 8; j += 4) {
                    two(v[j], v[j + 1], 0x5140, 0x7362), two(v[j + 2], v[j + 3], 0x5140, 0x7362);
                    two(v[j], v[j + 2], 0x5410, 0x7632), two(v[j + 1], v[j + 3], 0x5410, 0x7632);
                    swap(v[j + 1], v[j + 2]);
                }
#pragma unroll
                for (int j = 0; j < 8; j++) r[k + (to ? transposed(BITS, j) : given(BITS, j))] = v[j];
            }
    }

    // The register that is row j of two matrices of 4 x 4 bytes, and that which is when they are transposed.
    static DEVICE constexpr int given(int bits, int j) { return bits == 2 ? j : j % 4 * 2 + j / 4; }
    static DEVICE constexpr int transposed(int bits, int j) {
        constexpr int OF_3_BITS[8] = {0, 2, 5, 1, 3, 7, 4, 6};
        return bits == 2 ? j % 4 * 2 + j / 4 : OF_3_BITS[j];
    }

    static constexpr bool BYTES_FIRST = INTEGER_QUERIES && !has_tier(0);

    static DEVICE u32 word(const uint4 (&raw)[WORDS], int k) {
        const uint4 v = raw[k / 4];
        return k % 4 == 0 ? v.x : k % 4 == 1 ? v.y : k % 4 == 2 ? v.z : v.w;
    }

    static DEVICE float number(const uint4 (&raw)[WORDS], int e, bool bfloat) {
        if constexpr (HALVES > 1) return __int_as_float(word(raw, e));
        const u32 pair = word(raw, e / 2);
        if (bfloat) return __int_as_float(e % 2 ? pair & 0xffff0000 : pair << 16);
        return e % 2 ? high_to_float(pair) : low_to_float(pair);
    }

    DEVICE void prepare(const Attention& p, int sequence, int head, int first, int n, bool writes, int lane,
                        const uint4 (&raw)[WORDS]) {
        const bool as_given = HALVES == 1 && p.q_dtype == FLOAT16 && !p.key_scales && !p.rotate && !writes;
        const u32 peak = as_given ? take_halves(n, lane, raw) : take_floats(p, sequence, head, first, n, writes, lane, raw);
        // A row that is not finite has no integers: all its scores are NaN.
        power[n] = peak < 0x7f800000 ? power_of_two(-query_lift_of(peak)) : __int_as_float(0x7fffffff);
        const float factor = bounded(__fmul_rn(p.scale, power[n]));
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            scale[n][c] = __shfl_sync(~0u, factor, (lane % 4 * 2 + c) * 4);
            const int after = first + row_of(n * 8 + lane % 4 * 2 + c);
            if (CUQUANT_MASKED) last[n][c] = last_seen(p, sequence, after % p.q_len);
        }
    }

    // The power of two by which a row's largest channel is to be multiplied, from 2^14 to 2^15, or half as much where it, or
    // the float16 number that it is rounded to, in steps of 16, would be more than 127 * 256 + 127: from 32632 on. `peak` is
    // its bits.
    static DEVICE int query_lift_of(u32 peak) {
        const int exponent = int(peak >> 23) - 127, over = (peak & 0x7fffff) >= 0x7ef000;
        return exponent == -127 || exponent == 128 ? 0 : min(14 - over - exponent, 126);
    }

    static DEVICE u32 largest_of_row(u32 peak) {
        peak = max(peak, __shfl_xor_sync(~0u, peak, 1));
        return max(peak, __shfl_xor_sync(~0u, peak, 2));
    }

    // Channels, as they are multiplied by keys, to high bytes, or low ones in odd columns; `channel` gives one of the lane's.
    template <class F>
    DEVICE void take_bytes(int n, int lane, float power, F channel) {
        const bool low = lane / 4 % 2;
        const u32 select = low ? 0x0040 : 0x0051;
#pragma unroll
        for (int r = 0; r < PAIRS * 4; r++) {
            u32 v[4];  // the low byte, which is off by 128, and the high one
#pragma unroll
            for (int e = 0; e < 4; e++) v[e] = __float_as_int(fmaf(channel(r * 4 + e), power, 12582912.f + 128));
            bytes[n][r] = __byte_perm(__byte_perm(v[0], v[1], select), __byte_perm(v[2], v[3], select), 0x5410) ^
                          (low ? 0x80808080 : 0);
        }
#if __CUDA_ARCH__ >= 800
        const u32 ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
        int all[4] = {};
#pragma unroll
        for (int r = 0; r < PAIRS * 4; r += 2) mma_bytes<false>(all, ones, bytes[n][r], bytes[n][r + 1]);
        whole[n][0] = all[0], whole[n][1] = all[1];
#endif
    }

    // Float16 queries that are only multiplied by a power of two. They, and others, give their largest channel's bits.
    DEVICE u32 take_halves(int n, int lane, const uint4 (&raw)[WORDS]) {
        u32 peaks = 0;
#pragma unroll
        for (int k = 0; k < OWN / 2; k++) peaks = __vmaxu2(peaks, word(raw, k) & 0x7fff7fff);
        const u32 peak = __float_as_int(half_to_float(u16(largest_of_row(max(peaks & 0xffff, peaks >> 16)))));
        const int lift = query_lift_of(peak);
        if constexpr (BYTES_FIRST)
            take_bytes(n, lane, power_of_two(lift), [&](int e) { return number(raw, e, false); });
        else
            take_lifted(n, lift, raw);
        return peak;
    }

    DEVICE void take_lifted(int n, int lift, const uint4 (&raw)[WORDS]) {
#pragma unroll
        for (int u = 0; u < PAIRS; u++)
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const u32 a = word(raw, u * 8 + (NEIGHBOURS ? j : j / 2)), c = word(raw, u * 8 + (NEIGHBOURS ? j + 1 : 4 + j / 2));
                b[0][n][u][j] = NEIGHBOURS ? a : __byte_perm(a, c, 0x5410);
                b[0][n][u][j + 1] = NEIGHBOURS ? c : __byte_perm(a, c, 0x7632);
            }
        int rest = lift;
#pragma unroll 1
        do {
            const int step = min(rest, 15);  // float16 has 2^15
            rest -= step;
            const u32 power = (15 + step << 10) * 0x00010001u;
#pragma unroll
            for (int u = 0; u < PAIRS; u++)
#pragma unroll
                for (int j = 0; j < 8; j++) b[0][n][u][j] = mul_half2(b[0][n][u][j], power);
        } while (__any_sync(~0u, rest > 0));
        const u32 ones[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
        float all[4] = {};
#pragma unroll
        for (int u = 0; u < PAIRS; u++)
#pragma unroll
            for (int j = 0; j < 8; j += 2) mma_half(all, ones, b[0][n][u][j], b[0][n][u][j + 1], all);
        // The lane's own: as the result of a shuffle it takes no more registers, where the largest caches have none to spare.
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sum[n][c] = __shfl_sync(~0u, all[c], threadIdx.x % WARP);
    }

    DEVICE u32 take_floats(const Attention& p, int sequence, int head, int first, int n, bool writes, int lane,
                           const uint4 (&raw)[WORDS]) {
        const int row = first + row_of(n * 8 + lane / 4), start = lane % 4 * OWN, rows = rows_of(p);
        float x[OWN];
#pragma unroll
        for (int e = 0; e < OWN; e++) x[e] = number(raw, e, p.q_dtype == BFLOAT16);
        if (p.key_scales) {
            const float* const scales = p.key_scales + (s64(sequence) * p.kv_heads + head) * CUQUANT_DIM + start;
#pragma unroll
            for (int e = 0; e < OWN; e++)
                if (start + e < CUQUANT_DIM) x[e] *= scales[e];
        }
        if (p.rotate) rotate(x);
        if (writes && row < rows && (COLUMNS == 2 || lane / 4 % 2 == 0)) {
            float* const to = p.queries + ((s64(sequence) * p.kv_heads + head) * rows + row) * CUQUANT_DIM + start;
#pragma unroll
            for (int e = 0; e < OWN; e++)
                if (start + e < CUQUANT_DIM) to[e] = x[e];
        }
        u32 peak = 0;
#pragma unroll
        for (int e = 0; e < OWN; e++) peak = max(peak, magnitude(x[e]));
        peak = largest_of_row(peak);
        const float power = power_of_two(query_lift_of(peak));
        if constexpr (BYTES_FIRST)
            take_bytes(n, lane, power, [&](int e) { return x[e]; });
        else
            take_rounded(n, lane, power, x);
        return peak;
    }

    DEVICE void take_rounded(int n, int lane, float power, const float (&x)[OWN]) {
        float all = 0;
#pragma unroll
        for (int u = 0; u < PAIRS; u++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float low = x[u * 16 + first_of_pair(j)] * power, high = x[u * 16 + second_of_pair(j)] * power;
#pragma unroll
                for (int s = 0; s < HALVES; s++) {
                    const u32 pair = pack(low, high, FLOAT16);
                    b[s][n][u][j] = pair;
                    const float rounded[2] = {low_to_float(pair), high_to_float(pair)};
                    all += rounded[0] + rounded[1];
                    low -= rounded[0], high -= rounded[1];
                }
            }
        all += __shfl_xor_sync(~0u, all, 1);
        all += __shfl_xor_sync(~0u, all, 2);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) sum[n][c] = __shfl_sync(~0u, all, (lane % 4 * 2 + c) * 4);
    }

    // Hadamard's transform of each 32 channels, those of two lanes where a lane has 16.
    static DEVICE void rotate(float (&x)[OWN]) {
#pragma unroll
        for (int step = 1; step < 32 && step < OWN; step *= 2)
#pragma unroll
            for (int e = 0; e < OWN; e++)
                if (e % (2 * step) < step) {
                    const float a = x[e], b = x[e + step];
                    x[e] = a + b, x[e + step] = a - b;
                }
#pragma unroll
        for (int e = 0; e < OWN; e++) {
            if constexpr (OWN == 16) {
                const float other = __shfl_xor_sync(~0u, x[e], 1);
                x[e] = threadIdx.x % 2 ? other - x[e] : x[e] + other;
            }
            x[e] *= ROTATED;
        }
    }

public:
    static constexpr float LEAST = -3.4e38f;  // a reference before any token was seen
    static_assert(LEAST < LEAST_SCORE, "it moves with the first");
};

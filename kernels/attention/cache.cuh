// A cache of buckets as kernels take it, and the argument of attention over one.
#pragma once
#include "../core/ptx.cuh"

constexpr int TIERS = 5;  // of 16, 8, 4, 3 and 2 bits; those that a cache lacks are zero

#define INFINITE __int_as_float(0x7f800000)

DEVICE constexpr int bits_of(int tier) { return tier == 0 ? 16 : tier == 1 ? 8 : 6 - tier; }

DEVICE constexpr int step_of_bits(int bits) { return bits >= 8 ? 16 : 32; }  // tokens that a stream takes at a time

// The buckets of one width: arrays [batch, room, ...] of cuquant/kv/tiers.py, and lengths [batch].
struct Tier {
    u8* k;
    u8* v;
    u16* k_scale;
    u16* v_scale;
    int* ids;
    int* slots;
    float* importance;
    int* lengths;
    s64 room;
};

enum Mask { NO_MASK = -1, BOOLEAN = 3 };  // else its float type

// Strides are in elements.
struct Attention {
    Tier tiers[TIERS];
    const void* q;           // [batch, q_len, heads, DIM], the last axis contiguous
    void* out;               // the same shape
    const void* mask;        // [batch, heads, q_len, columns]
    const int* positions;    // [batch, q_len], as many apart as the call has; or null: the last ones of each sequence
    const int* next_slots;   // [batch]
    const float* key_scales; // [batch, kv_heads, DIM], or null
    float4* left;            // [shares, heads * q_len, LEFT_ROW] (merge.cuh) of those that share a sequence
    u32* counters;           // [batch, heads * q_len, parts] of shares that are there; else 0
    int2* shares;            // [batch], where nothing counts: the first share of a sequence, and how many there are
    float* queries;          // [batch, heads * q_len, DIM] as they meet stored keys, for importance; or null
    float2* totals;          // [batch, heads * q_len], for importance; or null
    s64 q_strides[3], out_strides[4], mask_strides[4];
    int batch, q_len, heads, kv_heads;
    int q_dtype, out_dtype, mask_dtype, mask_columns;
    int causal, rotate;
    float scale;   // of scores, times log2(e)
    float finest;  // streams (split.cuh) for a unit of cost, at most
    int streams;   // of all blocks
    int group;     // query heads that share a key head
    int parts;     // of a row, each merged by a warp of its own
    int of_call;   // queries of a sequence in the call, of which a launch may have some
    int to_come;   // of these, from the launch's first one on
};

// Rows of queries that one load of a key head serves: row = query head * q_len + position.
DEVICE int rows_of(const Attention& p) { return p.group * p.q_len; }

// The last slot that a position of a sequence's queries sees.
DEVICE int last_seen(const Attention& p, int sequence, int position) {
    if (!p.causal) return 0x7fffffff;
    if (p.positions) return p.positions[s64(sequence) * p.of_call + position];
    return p.next_slots[sequence] - p.to_come + position;
}

constexpr float ROTATED = 0.17677669529663687f;  // 1 / sqrt(32), by which Hadamard's transform of 32 numbers is orthogonal

// Scores are logarithms to base 2.
DEVICE float exp2_of(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

DEVICE float log2_of(float x) {
    float r;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// The least score that a finite mask leaves, and minus the greatest: tokens that are far below all others still share what there
// is.
constexpr float LEAST_SCORE = -3.3e38f;

// In place of a value's scale of 0, and lost in the rounding of every other: a weight so small that it adds nothing, and never 0
// times infinity.
constexpr float NOTHING = 8.7e-19f;  // about 2^-60

// The greatest number in place of infinity: by that 0, the score of a key of zeros, is 0.
DEVICE float bounded(float factor) {
    constexpr float GREATEST = 3.4028235e38f;
    return fabsf(factor) > GREATEST ? copysignf(GREATEST, factor) : factor;
}

// Whether the mask lets a row of a key head's queries see a slot; a float mask is added to the score, in bits.
DEVICE bool unmasked(const Attention& p, int sequence, int head, int row, int slot, float& score) {
    if (p.mask_dtype == NO_MASK) return true;
    if (row >= rows_of(p) || slot >= p.mask_columns) return false;
    const int query_head = head * p.group + row / p.q_len;
    const s64 at = sequence * p.mask_strides[0] + query_head * p.mask_strides[1] + row % p.q_len * p.mask_strides[2] +
                   slot * p.mask_strides[3];
    if (p.mask_dtype == BOOLEAN) return static_cast<const u8*>(p.mask)[at];
    const float value = load_float(p.mask, at, p.mask_dtype);
    const float sum = score + value * 1.44269504f;
    const bool finite = fabsf(value) < INFINITE && fabsf(score) < INFINITE;
    score = finite ? fminf(fmaxf(sum, LEAST_SCORE), -LEAST_SCORE) : sum;
    return value != -INFINITE;
}

// Floats to the bit planes and the scale of a k-bit block, bit for bit as the reference in cuquant/formats/kbit.py.
// Two threads per block, as in encode.cuh.
#pragma once
#include "encode.cuh"
#include "share.cuh"

// What all blocks are compared with.
struct Thresholds {
    float value[32];  // 2^BITS - 1 means of neighbouring entries, ascending, then infinity
};

// E4M4 of a number from 0 on: to nearest even, saturating. Adding 2^9, whose last bit is worth 2^-14, rounds to the
// step of the subnormal codes.
DEVICE u32 e4m4_of(float x) {
    const u32 bits = __float_as_int(x), odd = bits >> 19 & 1;
    const u32 normal = ((bits + 0x3ffff + odd) >> 19) - ((127 - 11) << 4);
    const u32 subnormal = __float_as_int(ieee_add(x, 512.f)) - 0x44000000;
    return min(x < 0x1p-10f ? subnormal : normal, 255u);
}

// x / d rounded to nearest, with 1 / d rounded to nearest: a quotient's remainder corrects it, and is exact unless it
// is too small for a normal number.
DEVICE float quotient(float x, float d, float inverse) {
    const float q = x * inverse;
    return __fmaf_rn(__fmaf_rn(-q, d, x), inverse, q);
}

// Elements over d, rounded to nearest; what is below 2^-99 counts as 0. Float16 numbers over each other, or over a
// scale, are further from the middle between two floats than an error in the 46th bit.
DEVICE void divide(float (&x)[MINE], float d, int dtype) {
    if (dtype == FLOAT16) {
        const float inverse = about_inverse(d);
        const float rest = __fmaf_rn(-d, inverse, 1) * inverse;
#pragma unroll
        for (int j = 0; j < MINE; j++) x[j] = __fmaf_rn(x[j], inverse, x[j] * rest);
        return;
    }
    const float inverse = ieee_div(1, d), small = d * 0x1p-40f;
    float least = small;
#pragma unroll
    for (int j = 0; j < MINE; j++) least = fminf(least, fabsf(x[j]));
    if (least == small) {
#pragma unroll
        for (int j = 0; j < MINE; j++) x[j] = quotient(x[j], d, inverse);
    } else {
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const bool is_small = fabsf(x[j]) < small;
            const float v = quotient(is_small ? x[j] * 0x1p32f : x[j], d, inverse);
            x[j] = !is_small ? v : fabsf(v) < 0x1p-67f ? 0 : v * 0x1p-32f;
        }
    }
}

// A thread's 16 codes, in the last bits of a byte each, as bytes of bit planes to their places.
template <int BITS>
DEVICE void store_planes(const u32 (&codes)[MINE / 4], int half, u8* to) {
#pragma unroll
    for (int run = 0; run < 2; run++) {
        const u32 low = codes[run * 2], high = codes[run * 2 + 1];
        const u32 planes = planes_of((low & 0x0f0f0f0f) | (high << 4 & 0xf0f0f0f0));
#pragma unroll
        for (int p = 0; p < BITS && p < 4; p++) to[p * 4 + run * 2 + half] = u8(planes >> p * 8);
        if constexpr (BITS == 5)  // bits 0 and 4 of byte k to bits k and k + 4 of the highest byte
            to[16 + run * 2 + half] = u8(((low >> 4 & 0x01010101) | (high & 0x10101010)) * 0x01020408 >> 24);
    }
}

// Stores planes of 2 bits, of numbers and what they are compared with. Of the three differences' signs the one in the
// middle is plane 1, and plane 0 is set if their number is odd.
DEVICE void store_planes(const float (&v)[MINE], int half, u8* to, const float (&thresholds)[3]) {
    u32 planes[2] = {};
#pragma unroll
    for (int j = MINE - 1; j >= 0; j--) {
        u32 signs[3];
#pragma unroll
        for (int i = 0; i < 3; i++) signs[i] = __float_as_int(ieee_sub(thresholds[i], v[j]));
        planes[0] = __funnelshift_l(signs[0] ^ signs[1] ^ signs[2], planes[0], 1);
        planes[1] = __funnelshift_l(signs[1], planes[1], 1);
    }
#pragma unroll
    for (int byte = 0; byte < 4; byte++) to[byte * 2 + half] = u8(planes[byte / 2] >> byte % 2 * 8);
}

// Stores planes of 2 bits, of pairs of float16 numbers, and of limits twice in a word. A permute repeats the signs of two
// pairs, of the first eight numbers and of the others, as bytes; their bits 2k and 2k + 1 are the thread's plane.
DEVICE void store_planes(const u32 (&pairs)[MINE / 2], int half, u8* to, const u32 (&limits)[3]) {
    u32 planes[2] = {};
#pragma unroll
    for (int k = 0; k < MINE / 4; k++) {
        u32 signs[2][2];
#pragma unroll
        for (int run = 0; run < 2; run++) {
            u32 above[3];
#pragma unroll
            for (int i = 0; i < 3; i++) above[i] = sub_half2(limits[i], pairs[run * 4 + k]);
            signs[0][run] = above[0] ^ above[1] ^ above[2], signs[1][run] = above[1];
        }
#pragma unroll
        for (int p = 0; p < 2; p++)
            planes[p] = and_or(permute(signs[p][0], signs[p][1], SIGNS_OF_HALVES), 0x02020101 << 2 * k, planes[p]);
    }
#pragma unroll
    for (int p = 0; p < 2; p++) {
        const u32 bytes = planes[p] | planes[p] >> 16;
        to[p * 4 + half] = u8(bytes), to[p * 4 + 2 + half] = u8(bytes >> 8);
    }
}

// What a float16 number is above just where it over d, rounded to nearest, is above t: d times the middle between t and
// the next float, rounded down. The middle has 25 bits, so that no quotient of float16 numbers is in it. (From -2^k the
// next float is half as far, but no other quotient so close.)
DEVICE float times(float t, float d) {
    const float power = __int_as_float(__float_as_int(t) & 0x7f800000);
    float r;
    asm("fma.rm.f32 %0, %1, %2, %3;" : "=f"(r) : "f"(t), "f"(d), "f"(ieee_mul(power, d * 0x1p-24f)));
    return r;
}

// How many thresholds numbers are above. The numbers from -1 to 1 are divided into equal steps, and a number is above
// the thresholds of the steps before its own, since numbers' steps grow with them; it is compared with what its own
// step holds, if no step holds more than one. Both are one word of a table: the last BITS bits are the count of
// thresholds before, and the word as a float is the step's own threshold, or less by up to 2 LAST of its last bits:
//
//     bit      31 | 30 ... BITS                                | BITS - 1 ... 0
//     word      s | of the threshold, less LAST, or more if s  | thresholds before
//
// Numbers between the two are few (one of 13000 of 5 bits, of 4 bits one of 60000), and known by their small
// difference: then they are compared with thresholds themselves. All need a search where codebooks have closer entries or a
// threshold at the border of a step, or where a stored scale was rounded down, which makes numbers beyond 1.
//
// A number is x / d, which is not computed: of a threshold t it is above if x is above d t. That is exact where d is 1.
// Rounded to nearest, a quotient is above t if it is above the middle of t and the next float, but that is as close.
template <int BITS>
struct Levels {
    static constexpr int STEPS = BITS == 5 ? 64 : 32, LAST = (1 << BITS) - 1;
    // Of 32 steps each lane of a warp has one, which it gives by shuffle. Of 64 every lane has all, in its own bank of shared memory:
    // wherever they want to look, 32 lanes do so at once.
    static constexpr int COPIES = STEPS == 32 ? 1 : WARP;
    // What a step is worth in `place`, and how much numbers from 0 to 1 are: 64 steps are rows of bytes.
    static constexpr int STEP = STEPS == 32 ? 1 : 4 * COPIES;
    static constexpr float FACTOR = STEPS == 32 ? 15.45f : 31.75f * STEP;

    float thresholds[32];
    alignas(16) u32 words[STEPS * COPIES];  // stored four at a time
    bool searches[STEPS / WARP];

    // The place of x among the steps if `factor` is FACTOR / d: the last bits of a float whose last bit is worth 1.
    static DEVICE u32 place(float x, float factor) {
        return __float_as_int(__fmaf_rn(x, factor, 12582912.f + STEPS / 2 * STEP));
    }

    static DEVICE int step_of(float threshold) { return place(threshold, FACTOR) & (STEPS - 1) * STEP; }

    // By all threads of a block, which have a barrier behind it. `decoded`: see Absmax.
    DEVICE void fill(const Thresholds& given, bool decoded) {
        if (threadIdx.x >= STEPS) return;
        const int lane = threadIdx.x % WARP, step = threadIdx.x * STEP;
        const float value = given.value[lane];
        const int its = lane < LAST ? step_of(value) : STEPS * STEP;
        int count = 0;
#pragma unroll
        for (int more = (LAST + 1) / 2; more; more /= 2)
            if (__shfl_sync(~0u, its, count + more - 1) < step) count += more;
        const int first = __float_as_int(__shfl_sync(~0u, value, count));
        const bool has_one = __shfl_sync(~0u, its, count) == step;
        const bool has_two = __shfl_sync(~0u, its, min(count + 1, LAST)) == step;
        const int lower = first == 0 ? 0 : first + (first < 0 ? LAST : -LAST);
        const u32 word = ((has_one ? lower : 0x71000000) & ~LAST) | count;  // 2^99: above all
        if constexpr (COPIES == 1) {
            words[threadIdx.x] = word;
        } else {
            uint4* const row = reinterpret_cast<uint4*>(words + threadIdx.x * COPIES);
#pragma unroll
            for (int i = 0; i < COPIES / 4; i++) row[(i + lane) % (COPIES / 4)] = make_uint4(word, word, word, word);
        }
        // Places are those of numbers that are off by up to 2^-22 of themselves; below -1 a last bit is worth more.
        const bool unclear = step_of(value * (1 - 0x1p-20f)) != step_of(value * (1 + 0x1p-20f)) || value < -0.9999f;
        const bool any = __any_sync(~0u, has_two || (unclear && lane < LAST));
        if (lane == 0) searches[threadIdx.x / WARP] = any || decoded;
        if (threadIdx.x < WARP) thresholds[lane] = value;
    }

    // A thread's half of a block, divided by d, to its place.
    DEVICE void encode(float (&x)[MINE], float d, int dtype, int half, u8* to) const {
        if (dtype != FLOAT16) divide(x, d, dtype);
        u32 codes[MINE / 4];
        const bool searching = has_to_search();
        if (searching || !find(x, dtype == FLOAT16 ? d : 1, codes)) {
            if (dtype == FLOAT16) divide(x, d, dtype);
            searching ? search(x, codes) : settle(x, codes);
        }
        store_planes<BITS>(codes, half, to);
    }

private:
    DEVICE bool has_to_search() const { return searches[0] || searches[STEPS / WARP - 1]; }

    // Codes of x / d, from -1 to 1, in the last bits of a byte each, with others above them; false where one may be
    // wrong. By the whole warp.
    DEVICE bool find(const float (&x)[MINE], float d, u32 (&codes)[MINE / 4]) const {
        const float factor = FACTOR * about_inverse(d);
        const u32 lane = threadIdx.x % WARP, own = words[lane];
        const u8* const rows = reinterpret_cast<const u8*>(words);
        int closest = 0;  // of the negative differences, whose bits are the less the closer they are
#pragma unroll
        for (int four = 0; four < MINE / 4; four++) {
            u32 q[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float v = x[four * 4 + j];
                const u32 at = place(v, factor);
                u32 word;
                if constexpr (STEPS == 32)
                    word = __shfl_sync(~0u, own, at);
                else
                    word = *reinterpret_cast<const u32*>(rows + ((at & (STEPS - 1) * STEP) | lane * 4));
                const int difference = __float_as_int(__fmaf_rn(__int_as_float(word), d, -v));
                closest = min(closest, difference);
                q[j] = word + (u32(difference) >> 31);
            }
            codes[four] = first_bytes(q);
        }
        return closest >= __float_as_int(d * (-(LAST + 1) * 0x1p-23f));
    }

    DEVICE void search(const float (&v)[MINE], u32 (&codes)[MINE / 4]) const {
#pragma unroll
        for (int four = 0; four < MINE / 4; four++) {
            u32 q[4] = {};
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int more = (LAST + 1) / 2; more; more /= 2)
                    if (v[four * 4 + j] > thresholds[q[j] + more - 1]) q[j] += more;
            codes[four] = first_bytes(q);
        }
    }

    // Codes that may be one too many, as a number is not above a step's threshold just where it is above what a word has of it.
    DEVICE void settle(const float (&v)[MINE], u32 (&codes)[MINE / 4]) const {
#pragma unroll
        for (int j = 0; j < MINE; j++) {
            const u32 q = codes[j / 4] >> j % 4 * 8 & LAST;
            const u32 is_above = v[j] > thresholds[(q - 1) % WARP];
            codes[j / 4] -= (u32(q > 0) & ~is_above) << j % 4 * 8;
        }
    }

    static DEVICE u32 first_bytes(const u32 (&q)[4]) {
        return __byte_perm(__byte_perm(q[0], q[1], 0x0040), __byte_perm(q[2], q[3], 0x0040), 0x5410);
    }
};

// Levels of 2 bits: a number is compared with all thresholds.
template <>
struct Levels<2> {
    float thresholds[3];

    DEVICE void fill(const Thresholds& given, bool) {
        if (threadIdx.x < 3) thresholds[threadIdx.x] = given.value[threadIdx.x];
    }

    DEVICE void encode(float (&x)[MINE], float d, int dtype, int half, u8* to) const {
        if (dtype != FLOAT16) divide(x, d, dtype);
        float limits[3];
#pragma unroll
        for (int i = 0; i < 3; i++) limits[i] = dtype == FLOAT16 ? times(thresholds[i], d) : thresholds[i];
        store_planes(x, half, to, limits);
    }

    // Encodes pairs of float16 numbers: the greatest of these that is not above a limit is as good a limit.
    DEVICE void encode(const u32 (&pairs)[MINE / 2], float d, int, int half, u8* to) const {
        u32 limits[3];
#pragma unroll
        for (int i = 0; i < 3; i++) {
            const float limit = times(thresholds[i], d);
            u32 bits = float_to_half(limit);
            if (half_to_float(u16(bits)) > limit) bits += bits >> 15 ? 1 : -1;
            limits[i] = bits * 0x00010001;
        }
        store_planes(pairs, half, to, limits);
    }
};

// The scale of a block with this peak, as stored and as what elements are divided by: what it reads as (`decoded`), or the
// greatest magnitude itself. It may not hold that, which may be no number.
template <class F>
struct Absmax {
    u32 stored;
    float d;
    bool good;

    DEVICE Absmax(float peak, bool decoded) {
        stored = F::SCALING == E4M4 ? e4m4_of(peak) : float_to_half(peak);
        d = fmaxf(decoded ? F::scale(stored) : peak, 1e-8f);
        good = F::SCALING == E4M4 ? peak <= 31.5f : (stored & 0x7c00) != 0x7c00;
    }
};

// The PTX instructions of the kernels as functions (translate.py): results first, then operands, braces flattened.
// Arithmetic is IEEE's; where the PTX manual leaves a sum's order open, it is that of the columns.
#pragma once
#include "device.h"

namespace ptx {

// Operations of floats without .ftz see subnormal numbers. Where numbers are ordinary that makes no difference; else, if one
// is subnormal, or a result is 0 that may have been flushed, they are done again without. (To change that takes long.)

__attribute__((always_inline)) inline bool ordinary(float v) {  // from 2^-100 on, and finite
    return (__builtin_bit_cast(u32, v) & 0x7fffffff) - 0x0d800000 < 0x7f800000 - 0x0d800000;
}

inline bool subnormal(float v) {
    const u32 bits = u32(__float_as_int(v)) & 0x7fffffff;
    return bits && bits < 0x00800000;
}

// A number of which the compiler does not know that it is another's, as it takes operations for the same in both modes.
inline float afresh(float v) {
    asm volatile("" : "+x"(v));
    return v;
}

template <class Function, class... Floats>
inline auto again(Function function, Floats... given) {
    const emulated::Unflushed guard;
    const auto result = function(afresh(given)...);
    asm volatile("" ::"g"(result));
    return result;
}

// `zero`: whether a result of 0 is right.
template <class Function, class... Floats>
__noinline__ auto unflushed(Function function, bool zero, Floats... given) {
    const auto result = function(given...);
    return !(subnormal(given) || ...) && (result != 0 || zero) ? result : again(function, given...);
}

// Halves and bfloats

inline float widened(u16 half) {
    typedef short Halves __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps(Halves{short(half)})[0];
}

inline u16 narrowed(float value) {
    typedef float Floats __attribute__((vector_size(16)));
    return value != value ? u16(0x7fff) : u16(__builtin_ia32_vcvtps2ph(Floats{value, 0, 0, 0}, 0)[0]);
}

inline float widened_bfloat(u16 bits) { return __int_as_float(u32(bits) << 16); }

inline u16 narrowed_bfloat(float value) {
    if (value != value) return 0x7fff;
    const u32 bits = __float_as_int(value);
    return u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// To the float whose last bit says that something is lost: rounded once more, it gives what one rounding gives.
inline float to_odd(double value) {
    const float near = float(value);
    if (near == value || value != value) return near;
    return __int_as_float((__float_as_int(near) - (fabs(near) > fabs(value))) | 1);
}

template <class Function>
inline u32 of_halves(Function function, u32 a, u32 b, u32 c = 0) {
    u32 r = 0;
    for (int i = 0; i < 32; i += 16)
        r |= u32(narrowed(to_odd(function(widened(a >> i), widened(b >> i), widened(c >> i))))) << i;
    return r;
}

inline void cvt_f32_f16(float& r, u16 a) { r = widened(a); }
inline void cvt_rn_f16_f32(u16& r, float a) { r = narrowed(a); }
inline void cvt_rn_f16x2_f32(u32& r, float high, float low) { r = narrowed(low) | u32(narrowed(high)) << 16; }
inline void cvt_rz_f16x2_f32(u32& r, float high, float low) {
    typedef float Floats __attribute__((vector_size(16)));
    const auto packed = [](float v) {
        return v != v ? u16(0x7fff) : u16(__builtin_ia32_vcvtps2ph(Floats{v, 0, 0, 0}, 3)[0]);
    };
    r = packed(low) | u32(packed(high)) << 16;
}
inline void cvt_rn_bf16x2_f32(u32& r, float high, float low) {
    r = narrowed_bfloat(low) | u32(narrowed_bfloat(high)) << 16;
}
inline void add_f16(u16& r, u16 a, u16 b) { r = narrowed(to_odd(double(widened(a)) + widened(b))); }
inline void sub_f16x2(u32& r, u32 a, u32 b) {
    r = of_halves([](double a, double b, double) { return a - b; }, a, b);
}
inline void mul_f16x2(u32& r, u32 a, u32 b) {
    r = of_halves([](double a, double b, double) { return a * b; }, a, b);
}
inline void fma_rn_f16x2(u32& r, u32 a, u32 b, u32 c) {
    r = of_halves([](double a, double b, double c) { return a * b + c; }, a, b, c);
}
inline void abs_f16x2(u32& r, u32 a) { r = a & 0x7fff7fff; }
inline void min_NaN_f16x2(u32& r, u32 a, u32 b) {
    r = of_halves([](double a, double b, double) { return a != a ? a : b != b ? b : fmin(a, b); }, a, b);
}
inline void max_NaN_f16x2(u32& r, u32 a, u32 b) {
    r = of_halves([](double a, double b, double) { return a != a ? a : b != b ? b : fmax(a, b); }, a, b);
}
inline void neg_f16x2(u32& r, u32 a) { r = a ^ 0x80008000; }
inline void fma_rn_bf16x2(u32& r, u32 a, u32 b, u32 c) {
    const auto rounded = [](float a, float b, float c) {
        return widened_bfloat(narrowed_bfloat(to_odd(double(a) * b + c)));
    };
    r = 0;
    for (int i = 0; i < 32; i += 16) {
        const float sum = unflushed(rounded, false, widened_bfloat(a >> i), widened_bfloat(b >> i), widened_bfloat(c >> i));
        r |= u32(__float_as_int(sum)) >> 16 << i;
    }
}

// Bits

inline void mov_b16(u16& r, u16 a) { r = a; }
inline void mov_b32(u32& r, u32 a) { r = a; }
inline void mov_b32(u16& low, u16& high, u32 a) { low = u16(a), high = u16(a >> 16); }
inline void mov_b32(u32& r, u16 low, u16 high) { r = low | u32(high) << 16; }
inline void lop3_b32(u32& r, u32 a, u32 b, u32 c, u32 table) {
    const auto entry = [&](u32 i) { return 0 - (table >> i & 1); };
    const auto by_c = [&](u32 i) { return (c & entry(i + 1)) | (~c & entry(i)); };
    r = (a & ((b & by_c(6)) | (~b & by_c(4)))) | (~a & ((b & by_c(2)) | (~b & by_c(0))));
}
inline void prmt_b32(u32& r, u32 a, u32 b, u32 selector) {
    r = 0;
    for (int i = 0; i < 4; i++) {
        const u32 byte = u8((u64(b) << 32 | a) >> 8 * (selector >> 4 * i & 7));
        r |= (selector >> 4 * i & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
}
inline void cvt_pack_sat_s8_s32_b32(u32& r, u32 a, u32 b, u32 c) {
    const auto packed = [](u32 v) { return u32(u8(max(-128, min(127, int(v))))); };
    r = c << 16 | packed(a) << 8 | packed(b);
}
inline void cvt_pack_sat_u4_s32_b32(u32& r, u32 a, u32 b, u32 c) {
    const auto packed = [](u32 v) { return u32(max(0, min(15, int(v)))); };
    r = c << 8 | packed(a) << 4 | packed(b);
}

// Floats

inline float toward_zero_of(double exact) {
    const float near = float(exact);
    return fabs(near) > fabs(exact) ? __int_as_float(__float_as_int(near) - 1) : near;
}

// Sums, products and quotients, and the lesser or the greater of two, are right if they are ordinary.
#define UNFLUSHED(NAME, RESULT, ZERO)                                                                 \
    __attribute__((always_inline)) inline void NAME(float& r, float a, float b) {                     \
        r = RESULT;                                                                                   \
        if (!ordinary(r)) r = unflushed([](float a, float b) { return RESULT; }, ZERO, a, b);         \
    }
UNFLUSHED(add_rn_f32, a + b, a == -b)
UNFLUSHED(sub_rn_f32, a - b, a == b)
UNFLUSHED(mul_rn_f32, a * b, !a || !b)
UNFLUSHED(mul_rz_f32, toward_zero_of(double(a) * b), !a || !b)
UNFLUSHED(add_rz_f32, toward_zero_of(double(a) + b), a == -b)  // of one sign; what double loses is not seen
UNFLUSHED(div_rn_f32, a / b, !a)
// -0 is less than +0.
UNFLUSHED(min_NaN_f32, a != a ? a : b != b ? b : a == b ? (signbit(a) ? a : b) : fminf(a, b), true)
UNFLUSHED(max_NaN_f32, a != a ? a : b != b ? b : a == b ? (signbit(a) ? b : a) : fmaxf(a, b), true)

inline void fma_rn_f32(float& r, float a, float b, float c) {
    r = fmaf(a, b, c);
    if (!ordinary(r)) r = unflushed([](float a, float b, float c) { return fmaf(a, b, c); }, double(a) * b == -double(c), a, b, c);
}

inline void fma_rm_f32(float& r, float a, float b, float c) {
    const auto rounded_down = [](float a, float b, float c) {
        const double product = double(a) * b, sum = product + c;  // the product is exact, and lost says what the sum is not
        const double part = sum - product, lost = (product - (sum - part)) + (c - part);
        const float near = float(sum);
        return near > sum || (near == sum && lost < 0) ? nextafterf(near, -HUGE_VALF) : near;
    };
    r = unflushed(rounded_down, false, a, b, c);
}
inline void rcp_approx_ftz_f32(float& r, float a) { r = 1 / a; }
inline void rcp_rn_f32(float& r, float a) { r = unflushed([](float a) { return 1 / a; }, false, a); }
inline void sqrt_rn_f32(float& r, float a) { r = unflushed([](float a) { return sqrtf(a); }, !a, a); }
inline void cvt_rni_f32_f32(float& r, float a) { r = rintf(a); }
inline void cvt_rmi_f32_f32(float& r, float a) {
    r = floorf(a);
    if (!ordinary(a)) r = unflushed([](float a) { return floorf(a); }, true, a);
}
inline void ex2_approx_ftz_f32(float& r, float a) { r = exp2f(a); }
inline void lg2_approx_ftz_f32(float& r, float a) { r = log2f(a); }
inline void setp_lt_f32(bool& r, float a, float b) {
    r = a < b;
    if (!ordinary(a) && !ordinary(b)) r = unflushed([](float a, float b) { return a < b; }, true, a, b);
}
inline void setp_gt_f32(bool& r, float a, float b) { setp_lt_f32(r, b, a); }
inline void selp_u32(u32& r, u32 a, u32 b, bool first) { r = first ? a : b; }

// Memory

inline u8* shared(u32 address, u32 bytes, u32 edge) {
    const bool fixed = address >= emulated::SHARED;
    const u64 begin = fixed ? address - emulated::SHARED : address;
    const u64 size = fixed ? emulated::fixed_bytes : emulated::shared_bytes;
    if (address % edge || begin + bytes > size)
        emulated::fail("%u bytes at %llu of %llu shared ones", bytes, begin, size);
    return (fixed ? emulated::fixed_memory : dynamic) + begin;
}

inline u8* shared(u32 address, u32 bytes) { return shared(address, bytes, bytes); }

template <class T>
inline void load(T& r, u32 address) { memcpy(&r, shared(address, sizeof r), sizeof r); }

inline void trap() { emulated::fail("trap"); }
inline void ld_shared_u16(u16& r, u32 address) { load(r, address); }
inline void ld_shared_u32(u32& r, u32 address) { load(r, address); }
inline void ld_shared_v2_u32(u32& x, u32& y, u32 address) {
    uint2 v;
    load(v, address);
    x = v.x, y = v.y;
}
inline void ld_shared_v4_u32(u32& x, u32& y, u32& z, u32& w, u32 address) {
    uint4 v;
    load(v, address);
    x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void ld_shared_v4_s32(u32& x, u32& y, u32& z, u32& w, u32 address) { ld_shared_v4_u32(x, y, z, w, address); }
inline void st_shared_v4_u32(u32 address, u32 x, u32 y, u32 z, u32 w) {
    const u32 values[] = {x, y, z, w};
    memcpy(shared(address, 16), values, 16);
}
inline void st_shared_u32(u32 address, u32 value) { memcpy(shared(address, 4), &value, 4); }
inline void st_shared_u16(u32 address, u16 value) { memcpy(shared(address, 2), &value, 2); }
inline void st_shared_u8(u32 address, u16 value) { *shared(address, 1) = u8(value); }
inline void prefetch_global_L2(u64) {}
inline void nanosleep_u32(u32) { emulated::pause(); }  // others may overtake
inline void fence_acq_rel_gpu() {}
inline void red_relaxed_gpu_global_add_u32(u64 address, u32 v) { *reinterpret_cast<u32*>(address) += v; }
inline void atom_relaxed_gpu_global_add_u32(u32& r, u64 address, u32 v) {
    r = *reinterpret_cast<u32*>(address), red_relaxed_gpu_global_add_u32(address, v);
}

// What is awaited comes from a block of a lower number, which has run, or never.
inline void ld_acquire_gpu_global_u32(u32& r, u64 address) {
    const u32& flag = *reinterpret_cast<const u32*>(address);
    if (!flag) emulated::wait_until_changed(flag, 0);
    r = flag;
}
inline void ld_global_nc_u32(u32& r, u64 address) { r = *reinterpret_cast<const u32*>(address); }
inline void ld_global_ca_u32(u32& r, u64 address) { ld_global_nc_u32(r, address); }
inline void ld_global_cg_v4_s32(u32& x, u32& y, u32& z, u32& w, u64 address) {
    const auto& v = *reinterpret_cast<const uint4*>(address);
    x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void ld_global_L2__128B_v4_u32(u32& x, u32& y, u32& z, u32& w, u64 address) {
    ld_global_cg_v4_s32(x, y, z, w, address);
}

inline emulated::Copy& one_more_copy() {
    emulated::Fiber& fiber = emulated::fibers[emulated::current];
    if (fiber.copying == fiber.room) {
        fiber.room = fiber.room ? 2 * fiber.room : 16;
        fiber.copies = static_cast<emulated::Copy*>(realloc(fiber.copies, fiber.room * sizeof(emulated::Copy)));
    }
    return fiber.copies[fiber.copying++];
}

// What was there is gone as soon as the copy begins; what comes is there only when the copy is waited for.
inline void copy(u32 to, u64 from, u32 bytes, u32 given) {
    if (given && from % bytes) emulated::fail("a copy of %u bytes from %llx", bytes, from);
    emulated::Copy& c = one_more_copy();
    c = {shared(to, bytes), u8(bytes), {}, emulated::fibers[emulated::current].group};
    memcpy(c.value, reinterpret_cast<const void*>(from), given);
    memset(c.to, 0xff, bytes);
}

inline void cp_async_cg_shared_global(u32 to, u64 from, int bytes) { copy(to, from, bytes, bytes); }
inline void cp_async_cg_shared_global(u32 to, u64 from, int bytes, u32 given) { copy(to, from, bytes, given); }
inline void cp_async_cg_shared_global_L2__128B(u32 to, u64 from, int bytes) { copy(to, from, bytes, bytes); }
inline void cp_async_cg_shared_global_L2__256B(u32 to, u64 from, int bytes) { copy(to, from, bytes, bytes); }
inline void cp_async_ca_shared_global(u32 to, u64 from, int bytes) { copy(to, from, bytes, bytes); }
inline void cp_async_ca_shared_global(u32 to, u64 from, int bytes, u32 given) { copy(to, from, bytes, given); }
inline void cp_async_commit_group() { emulated::fibers[emulated::current].group++; }
inline void cp_async_wait_group(int pending) {
    emulated::Fiber& fiber = emulated::fibers[emulated::current];
    while (fiber.first < fiber.copying && fiber.copies[fiber.first].group + pending < fiber.group) fiber.land();
}

// Matrices: lane 4 g + i has elements (g, 2 i) and (g, 2 i + 1) of 8 x 8

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32& x, u32& y, u32& z, u32& w, u32 address) {
    const u32 lane = emulated::current % emulated::WARP;
    const auto* addresses = emulated::exchange(~0u, address);
    u32* results[] = {&x, &y, &z, &w};
    for (u32 i = 0; i < 4; i++)
        memcpy(results[i], shared(u32(addresses[8 * i + lane / 4][0]), 16) + 4 * (lane % 4), 4);
    emulated::exchange(~0u, 0);  // no lane writes there before all have read
}

inline void movmatrix_sync_aligned_m8n8_trans_b16(u32& r, u32 a) {
    const u32 lane = emulated::current % emulated::WARP, row = lane / 4, column = 2 * (lane % 4);
    const auto* words = emulated::exchange(~0u, a);
    const auto element = [&](u32 row, u32 column) {
        return u32(u16(words[4 * row + column / 2][0] >> 16 * (column % 2)));
    };
    r = element(column, row) | element(column + 1, row) << 16;
}

typedef float Four __attribute__((vector_size(16)));
typedef float Eight __attribute__((vector_size(32)));

inline Four widened_four(u64 halves) {
    typedef short Halves __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps(emulated::bits_of<Halves>(halves));
}

// a[16 x 16] b[16 x 8] + c, in the lanes' first words; given are their registers of a (its quarters, rows first), b (its
// halves, transposed) and c (its halves). By one lane for all: each would widen what others do.
inline void multiply(emulated::Words words) {
    const emulated::Unflushed guard;
    float a[16][16], b[16][8];
    Eight sums[16];
    for (u32 lane = 0; lane < emulated::WARP; lane++) {
        const u32 row = lane / 4, column = 2 * (lane % 4);
        const Four left = widened_four(words[lane][0]), right = widened_four(words[lane][1]);
        const Four columns = widened_four(words[lane][2]);
        for (u32 i = 0; i < 4; i++) {
            a[row + 8 * (i / 2)][column + i % 2] = left[i], a[row + 8 * (i / 2)][column + 8 + i % 2] = right[i];
            b[column + 8 * (i / 2) + i % 2][row] = columns[i];
        }
        for (u32 i = 0; i < 4; i++)
            sums[row + 8 * (i / 2)][column + i % 2] = __int_as_float(int(words[lane][3 + i / 2] >> 32 * (i % 2)));
    }
    for (u32 k = 0; k < 16; k++) {
        Eight line;
        memcpy(&line, b[k], sizeof(line));
        for (u32 row = 0; row < 16; row++) sums[row] += a[row][k] * line;
    }
    for (u32 lane = 0; lane < emulated::WARP; lane++)
        for (u32 half = 0; half < 2; half++)
            memcpy(&words[lane][half], reinterpret_cast<float*>(&sums[lane / 4 + 8 * half]) + 2 * (lane % 4), 8);
}

__noinline__ static void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1,
    float c2, float c3) {
    const auto pair = [](u32 low, u32 high) { return u64(high) << 32 | low; };
    const auto bits = [](float v) { return u32(__float_as_int(v)); };
    const u64* own = emulated::together(
        ~0u, multiply, pair(a0, a1), pair(a2, a3), pair(b0, b1), pair(bits(c0), bits(c1)),
        pair(bits(c2), bits(c3)))[emulated::current % emulated::WARP];
    d0 = __int_as_float(int(own[0])), d1 = __int_as_float(int(own[0] >> 32));
    d2 = __int_as_float(int(own[1])), d3 = __int_as_float(int(own[1] >> 32));
}

// The same of bytes: a[16 x 32] b[32 x 8] + c.
template <class A>
inline void multiply_bytes(emulated::Words words) {
    A a[16][32];
    signed char b[8][32];
    int sums[16][8];
    for (u32 lane = 0; lane < emulated::WARP; lane++) {
        const u32 row = lane / 4, at = lane % 4;
        for (u32 half = 0; half < 2; half++) {
            memcpy(&a[row][16 * half + 4 * at], &words[lane][half], 4);
            memcpy(&a[row + 8][16 * half + 4 * at], reinterpret_cast<const u8*>(&words[lane][half]) + 4, 4);
            memcpy(&b[row][16 * half + 4 * at], reinterpret_cast<const u8*>(&words[lane][2]) + 4 * half, 4);
            memcpy(&sums[row + 8 * half][2 * at], &words[lane][3 + half], 8);
        }
    }
    for (u32 row = 0; row < 16; row++)
        for (u32 column = 0; column < 8; column++)
            for (u32 k = 0; k < 32; k++) sums[row][column] += int(a[row][k]) * b[column][k];
    for (u32 lane = 0; lane < emulated::WARP; lane++)
        for (u32 half = 0; half < 2; half++) memcpy(&words[lane][half], &sums[lane / 4 + 8 * half][2 * (lane % 4)], 8);
}

template <class A>
__noinline__ static void mma_of_bytes(u32& d0, u32& d1, u32& d2, u32& d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const auto pair = [](u32 low, u32 high) { return u64(high) << 32 | low; };
    const u64* own = emulated::together(~0u, multiply_bytes<A>, pair(a0, a1), pair(a2, a3), pair(b0, b1), pair(d0, d1),
                                        pair(d2, d3))[emulated::current % emulated::WARP];
    d0 = u32(own[0]), d1 = u32(own[0] >> 32), d2 = u32(own[1]), d3 = u32(own[1] >> 32);
}

// Sums stay where they are: `c` is `d`.
inline void mma_sync_aligned_m16n8k32_row_col_s32_u8_s8_s32(u32& d0, u32& d1, u32& d2, u32& d3, u32 a0, u32 a1, u32 a2,
                                                            u32 a3, u32 b0, u32 b1, u32, u32, u32, u32) {
    mma_of_bytes<u8>(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1);
}
inline void mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(u32& d0, u32& d1, u32& d2, u32& d3, u32 a0, u32 a1, u32 a2,
                                                            u32 a3, u32 b0, u32 b1, u32, u32, u32, u32) {
    mma_of_bytes<signed char>(d0, d1, d2, d3, a0, a1, a2, a3, b0, b1);
}

}  // namespace ptx

#if __CUDA_ARCH__ >= 900
#include "hopper.h"
#else
namespace emulated {
void Fiber::copies_arrive(u8*) {}
bool something_arrives() { return false; }
void forget_arrivals() {}
bool all_has_arrived() { return true; }
}  // namespace emulated
#endif

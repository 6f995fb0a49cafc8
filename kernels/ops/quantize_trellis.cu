// Floats to trellis matrices, bit for bit as the reference in cuquant/formats/trellis.py.
//
// Eight threads have a group: thread j its elements j, j + 8, ... Sums go as NumPy's do: eight of them, of every eighth
// element, then ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7)).
#include "../core/ieee.cuh"
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int GROUP = Format::GROUP, OWN = GROUP / 8;
constexpr int THREADS = 128, ROWS = THREADS / 8;  // a block of threads: a tile's rows x GROUP columns
constexpr int CANDIDATES = 20, REFINEMENTS = 3;

// What groups are compared with: levels over the greatest magnitude, ascending, the means of neighbours, then infinity;
// `order`: the index of each level, four bits.
struct Levels {
    float level[16], middle[16];
    float candidate[CANDIDATES];
    float largest;
    int tried;  // candidates, and as many of the other sign where the grid is not symmetric
    u64 order;
};

// a > b, of subnormal numbers too.
DEVICE bool ieee_greater(float a, float b) {
    u32 r;
    asm("{.reg .pred p;\nsetp.gt.f32 p, %1, %2;\nselp.u32 %0, 1, 0, p;}" : "=r"(r) : "f"(a), "f"(b));
    return r;
}

DEVICE float sum(const float (&own)[OWN]) {
    float s = own[0];
#pragma unroll
    for (int e = 1; e < OWN; e++) s = ieee_add(s, own[e]);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) s = ieee_add(s, __shfl_xor_sync(~0u, s, step));
    return ieee_add(s, 0);
}

// How many middles v is above: the nearest level.
DEVICE int nearest_level(float v, const Levels& levels) {
    int q = 0;
#pragma unroll
    for (int step = 1 << (Format::BITS - 1); step; step /= 2)
        if (ieee_greater(v, levels.middle[q + step - 1])) q += step;
    return q;
}

// Codes of a group's elements x, with importance h, and its scale; `start`: the scale to begin with, if given.
DEVICE float search(const float (&x)[OWN], const float (&h)[OWN], const Levels& levels, const float* start,
                    u8 (&codes)[OWN]) {
    u32 bits = 0;
#pragma unroll
    for (int e = 0; e < OWN; e++) bits = max(bits, magnitude(x[e]));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, step));
    const float peak = __int_as_float(bits), unit = ieee_div(peak, levels.largest);
    float v[OWN], weighted[OWN];
#pragma unroll
    for (int e = 0; e < OWN; e++) v[e] = ieee_div(x[e], bits ? peak : 1), weighted[e] = ieee_mul(h[e], v[e]);
    float best = 0, gain = -1;
    auto attempt = [&](float scale) {
        const float divisor = magnitude(scale) ? scale : 1;
        float cross[OWN], power[OWN];
#pragma unroll
        for (int e = 0; e < OWN; e++) {
            const float level = levels.level[nearest_level(ieee_div(v[e], divisor), levels)];
            cross[e] = ieee_mul(weighted[e], level);
            power[e] = ieee_mul(ieee_mul(h[e], level), level);
        }
        const float all = sum(cross), of = sum(power);
        const float solved = magnitude(of) ? ieee_div(all, of) : 0, explained = ieee_mul(solved, all);
        if (ieee_greater(explained, gain)) best = solved, gain = explained;
    };
    if (start) {
        attempt(magnitude(unit) ? ieee_div(*start, unit) : 0);
    } else {
#pragma unroll 1
        for (int i = 0; i < levels.tried; i++)
            attempt(i < CANDIDATES ? levels.candidate[i] : -levels.candidate[i - CANDIDATES]);
    }
#pragma unroll 1
    for (int i = 0; i < REFINEMENTS; i++) attempt(best);
    const float divisor = magnitude(best) ? best : 1;
#pragma unroll
    for (int e = 0; e < OWN; e++)
        codes[e] = levels.order >> 4 * nearest_level(ieee_div(v[e], divisor), levels) & 15;
    return ieee_mul(best, unit);
}

DEVICE void fetch(Levels& to, const Levels& from) {
    constexpr int WORDS = sizeof(Levels) / 4;
    for (int i = threadIdx.x; i < WORDS; i += THREADS)
        reinterpret_cast<u32*>(&to)[i] = reinterpret_cast<const u32*>(&from)[i];
    __syncthreads();
}

// Groups x [count][GROUP] of importances h, as they are: codes in bytes, and scales; from `start` on, if given.
extern "C" __global__ void __launch_bounds__(THREADS)
nearest(const float* x, const float* h, const float* start, s64 count, u8* codes, float* scales,
        const __grid_constant__ Levels levels) {
    __shared__ Levels own;
    fetch(own, levels);
    const s64 group = min(s64(blockIdx.x) * ROWS + threadIdx.x / 8, count - 1);
    const s64 first = group * GROUP + threadIdx.x % 8;
    float v[OWN], weights[OWN];
    u8 q[OWN];
#pragma unroll
    for (int e = 0; e < OWN; e++) v[e] = x[first + 8 * e], weights[e] = h[first + 8 * e];
    const float scale = search(v, weights, own, start ? start + group : nullptr, q);
#pragma unroll
    for (int e = 0; e < OWN; e++) codes[first + 8 * e] = q[e];
    if (threadIdx.x % 8 == 0) scales[group] = scale;
}

// Matrices of floats [N][K], rows and columns with strides in elements, into records whose signs are there. `h`:
// importance of the columns, or null. first_bad[0] becomes the lowest row, counted through, that holds NaN or infinity,
// [1] that has a scale beyond float32; they start as the greatest u64.
extern "C" __global__ void __launch_bounds__(THREADS)
quantize(const void* x, int dtype, s64 row_stride, s64 column_stride, s64 matrices, int N, int K, const float* h,
         u8* storage, u64* first_bad, const __grid_constant__ Levels levels) {
    __shared__ Levels own;
    __shared__ __align__(16) u8 staged[GROUP * 16];  // [k][n], a byte each
    fetch(own, levels);
    const Record<Format> record = {N, K};
    const u32 bands = record.tiles_n(), groups = record.groups();
    for (s64 index = blockIdx.x; index < matrices * bands * groups; index += gridDim.x) {
        const s64 band = index / groups, matrix = band / bands;
        const int group = int(index % groups), tile_n = int(band % bands);
        const int row = threadIdx.x / 8, n = tile_n * 16 + row, first = group * GROUP + threadIdx.x % 8;
        u8* const to = storage + matrix * record.bytes();
        const u32 sv = n < N && to[record.sv_at() + n] != 1;
        float v[OWN], weights[OWN];
        u8 q[OWN];
        bool finite = true;
#pragma unroll
        for (int e = 0; e < OWN; e++) {
            const int k = first + 8 * e;
            v[e] = weights[e] = 0;
            if (n >= N || k >= K) continue;
            const u32 sign = sv ^ (to[record.su_at() + k] != 1);
            const float value = load_float(x, (matrix * N + n) * row_stride + k * column_stride, dtype);
            finite &= is_finite(value);
            v[e] = __int_as_float(__float_as_int(value) ^ sign << 31);
            weights[e] = h ? h[k] : 1;
        }
        const float scale = search(v, weights, own, nullptr, q);
        if (n < N) {
            if (!finite) atomicMin(first_bad, u64(matrix * N + n));
            if (!is_finite(scale)) atomicMin(first_bad + 1, u64(matrix * N + n));
            if (threadIdx.x % 8 == 0)
                reinterpret_cast<float*>(to + record.scales_at())[s64(group) * N + n] = scale;
        }
#pragma unroll
        for (int e = 0; e < OWN; e++)
            staged[(threadIdx.x % 8 + 8 * e) * 16 + row] = n < N && first + 8 * e < K ? q[e] : 0;
        __syncthreads();
        const int k = group * GROUP + threadIdx.x;
        if (threadIdx.x < GROUP && k / 16 < record.tiles_k())
            store_row<Format>(to + record.tile_at(k / 16, tile_n) + k % 16 * Format::ROW_BYTES,
                              reinterpret_cast<const uint4*>(staged)[threadIdx.x]);
        __syncthreads();  // all have read the codes
    }
}

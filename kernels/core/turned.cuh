// Rows that are turned by Hadamard matrices of 128, as EXL3 weights want activations and results.
#pragma once
#include "peak.cuh"

constexpr int HADAMARD = 128;

// COUNT numbers times Sylvester's matrix: sums and differences of pairs, those of neighbours first.
template <int COUNT>
DEVICE void turn_own(float (&v)[COUNT]) {
#pragma unroll
    for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if (!(j & step)) {
                const float a = v[j], b = v[j | step];
                v[j] = a + b, v[j | step] = a - b;
            }
}

// 128 numbers of 16 lanes, eight in a row each, times Sylvester's matrix.
DEVICE void turn(float (&v)[8]) {
    turn_own(v);
#pragma unroll
    for (int step = 1; step < HADAMARD / 8; step *= 2) {
        const float sign = threadIdx.x & step ? -1 : 1;
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __fmaf_rn(v[j], sign, __shfl_xor_sync(~0u, v[j], step));
    }
}

constexpr float TURNED = 0.08838834764831845f;  // 1 / sqrt(128), which makes it orthogonal

// Eight numbers in a row.
DEVICE void load_halves(const u16* from, float (&to)[8]) { to_floats(*reinterpret_cast<const uint4*>(from), to); }

DEVICE void load_floats(const float* from, float (&to)[8]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

// A row of float16 numbers in shared memory, whole turns of it: times the float16 numbers at `suh`, turned, over a power
// of two, which is returned. A thread has every THREADS-th piece of eight numbers, and turns all but the first twice: from
// the last one on to find the peak, and again.
template <int THREADS>
DEVICE float turn_row(u8* row, const u16* suh, int pieces) {
    float v[8];
    auto load = [&](int first) {
        const int i = first + threadIdx.x;
        float factor[8] = {};
        load_halves(reinterpret_cast<const u16*>(row) + min(i, pieces - 1) * 8, v);
        if (i < pieces) load_halves(suh + i * 8, factor);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] *= factor[j] * TURNED;
        turn(v);
    };
    u32 peak = 0;
#pragma unroll 1
    for (int first = (pieces - 1) / THREADS * THREADS; first >= 0; first -= THREADS) {
        load(first);
#pragma unroll
        for (int j = 0; j < 8; j++) peak = max(peak, magnitude(v[j]));
    }
    const int shift = shift_of(block_max(peak));
#pragma unroll 1
    for (int first = 0; first < pieces; first += THREADS) {
        if (first > 0) load(first);
        const int i = first + threadIdx.x;
        if (i < pieces) reinterpret_cast<uint4*>(row)[i] = to_halves(v, power_of_two(shift));
    }
    return power_of_two(-shift);
}

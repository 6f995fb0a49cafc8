// E8M0 scales e, of weights E2M1 * 2^(e - 127), in the range of float16's exponents, if they fit there: kernels take the
// last five bits of bytes up to LAST for a float16 number's exponent (core/tile.cuh). Where they do not fit, they are
// float32 exponents up to TOP, of which 0 is that of 0: sums of float32 numbers stay finite, in the units that they have
// (core/e2m1.cuh), and a block that is lost is 2^-TOP of the greatest. Blocks of zeros have no say, and become what others
// may be. Scales that are there already stay, as those between 2^-25 and 1/2 do.
#include "../core/ptx.cuh"
#include "../formats/seen.cuh"

constexpr int THREADS = 256, OWN = 4;  // pieces of 16 bytes of a thread
constexpr int FIRST = 96, LAST = 126;
// How far below the last one E2M1 numbers, in float16 2^-14 times themselves, times such a scale are exact.
constexpr int EXACT = 24;
constexpr int TOP = 220;

// All `bytes` of a scale plane, a multiple of 16. `found` is what was seen (formats/seen.cuh): without blocks that are not
// zeros GREATEST and LEAST are 0. LOST, UNFIT and ADDED are left there.
extern "C" __global__ void __launch_bounds__(THREADS) center(u8* scale, s64 bytes, u32* found) {
    wait_for_predecessor();
    // At least 4, so that the power of two that products are multiplied by is a normal number.
    const int greatest = max(4, int(found[GREATEST]) - 1), least = found[GREATEST] ? int(~found[LEAST]) - 1 : greatest;
    const bool fit = greatest - least <= EXACT;
    const bool stay = greatest <= LAST && least >= LAST - EXACT;
    const int offset = stay ? 0 : fit ? LAST - greatest : min(TOP - greatest, int(least == 0));
    const int low = fit ? FIRST : 0, high = fit ? LAST : TOP;
    const bool lost = int(found[GREATEST_EXPONENT]) + offset > high || int(~found[LEAST_EXPONENT]) + offset < low;
    if (blockIdx.x == 0 && threadIdx.x == 0) found[LOST] = lost, found[UNFIT] = !fit, found[ADDED] = u32(offset);
    if (offset == 0 && !lost) return;
    const s64 pieces = bytes / 16, first = s64(blockIdx.x) * (THREADS * OWN) + threadIdx.x;
    uint4* const from = reinterpret_cast<uint4*>(scale);
    uint4 v[OWN];
#pragma unroll
    for (int own = 0; own < OWN; own++)
        if (first + own * THREADS < pieces) v[own] = from[first + own * THREADS];
#pragma unroll
    for (int own = 0; own < OWN; own++) {
        u32* const words = &v[own].x;
#pragma unroll
        for (int w = 0; w < 4; w++) {
            u32 made = 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
                made |= u32(min(max(int(words[w] >> 8 * j & 0xff) + offset, low), high)) << 8 * j;
            words[w] = made;
        }
        if (first + own * THREADS < pieces) from[first + own * THREADS] = v[own];
    }
}

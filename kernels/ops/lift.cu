// Scales in the fragment layout as products take them, of formats with ROW_FACTORS (the picture is in core/tile.cuh): a
// block of threads for each row tile; and the factors of rows, of which ops/repack.cu has found the peaks.
#include "../core/ptx.cuh"
#include "../formats/lift.cuh"
#include CUQUANT_FORMAT

static_assert(ROW_FACTORS<Format>, "the format has no row plane");
static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256, ROWS = 16;
// Words of scales that a tile has: two scales of a row, or a scale and a minimum. A thread takes four at a time, of the same
// rows in all tiles.
constexpr int WORDS = Format::SCALE_BYTES / 4, OWN = 4;
static_assert(THREADS * OWN % WORDS == 0, "tiles end where threads do");

// Whether a block with these bits has weights that would lack bits: float16's steps of 2^-24 are then 1/128 or more of
// those between its weights. By the peaks of formats: 8 of the latter (q4_0), 128 of them, or a minimum besides.
DEVICE bool is_small(u32 scale, int exponent) {
    LaneShare<Format> share = {};
    share.scale = scale;
    const float peak = Format::peak(share) * power_of_two(exponent);
    return peak > 0 && peak < power_of_two(Format::HAS_MIN ? -12 : Format::BITS == 8 ? -13 : -14);
}

// `found`: [2] becomes 1 where a scale or a minimum would not come back with all its bits, [3] where weights lack some.
extern "C" __global__ void __launch_bounds__(THREADS)
lift(u8* scale, u32* factors, const u32* peaks, int tiles_k, u32* found) {
    wait_for_predecessor();
    uint4* const pieces = reinterpret_cast<uint4*>(scale + s64(blockIdx.x) * tiles_k * Format::SCALE_BYTES);
    peaks += s64(blockIdx.x) * ROWS;
    auto row8 = [](int w) { return w / (Format::HAS_MIN ? 2 : 1) % 2; };
    int L[OWN];
#pragma unroll
    for (int w = 0; w < OWN; w++) L[w] = lift_of(peaks[(threadIdx.x * OWN + w) % WORDS / (WORDS / 8) + row8(w) * 8]);
    bool lossy = false, lacking = false;
    for (int piece = threadIdx.x; piece < tiles_k * WORDS / OWN; piece += THREADS) {
        uint4 v = pieces[piece];
        u32* const words = &v.x;
#pragma unroll
        for (int w = 0; w < OWN; w++) {
            const int exponent = L[w] - code_exponent<Format>(row8(w));
            const u32 own = words[w], made = lifted<Format>(own, L[w], row8(w), 1);
            lossy |= lifted<Format>(made, L[w], row8(w), -1) != own;
            if constexpr (Format::HAS_MIN)
                lacking |= is_small(own, exponent);
            else
                lacking |= is_small(own & 0xffff, exponent) || is_small(own >> 16, exponent);
            words[w] = made;
        }
        pieces[piece] = v;
    }
    if (lossy) found[2] = 1;
    if (lacking) found[3] = 1;
    const int g = threadIdx.x;
    if (g < 8)
        factors[s64(blockIdx.x) * 8 + g] = factor_of<Format>(lift_of(peaks[g]), 0) |
                                           factor_of<Format>(lift_of(peaks[g + 8]), 1) << 16;
}

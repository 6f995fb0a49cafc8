// Blocks to floats: the formula in float32, then one rounding.
//
// A warp takes SETS times 16 runs of 32 weights. A lane reads what half a run shares, 16 weights, and, in two passes, eight
// codes, so that the numbers of a warp's pass lie side by side:
//
//     shared by    lane 0 | lane 1     | lane 2 ...             half a run each
//     pass 0       lane 0 | 1 | 2 | 3  | lane 4 ... lane 31     runs 0 .. 7, eight weights each
//     pass 1       lane 0 | 1 | 2 | 3  | lane 4 ... lane 31     runs 8 .. 15
//
// Where codes are in two fields, whose bytes have codes of several runs (TOGETHER), a lane goes through four runs in as many
// passes, so that it reads each byte once: q3_k takes 164 us so, and 193 otherwise. Then just four lanes' numbers lie side by
// side, which with one field is more of a loss: 162 us in place of 158 for q2_k.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256, SETS = 2;
constexpr int RUNS = SETS * 16, PARTS = Format::COLUMNS / 32;  // runs of a warp, and of a block
static_assert(RUNS % PARTS == 0, "a warp starts with a block");
constexpr bool TOGETHER = PARTS == 8 && Format::HIGH_BYTES > 0 && Format::CODING == INTEGERS;
static_assert(SETS == 2, "a lane goes through half a block");

// Which run a lane has codes of in a pass, and what half a run shares of in a set; and the lane that has the latter for it.
DEVICE int run_in(int pass, int lane) { return TOGETHER ? lane / 4 * 4 + pass : pass * 8 + lane / 4; }
DEVICE int run_shared(int set, int lane) { return TOGETHER ? lane / 4 * 4 + set * 2 + lane / 2 % 2 : set * 16 + lane / 2; }
DEVICE int sharing(int pass, int lane) {
    return TOGETHER ? lane / 4 * 4 + pass % 2 * 2 + lane % 4 / 2 : pass % 2 * 16 + lane / 2;
}

// What half of the 32 weights of part `part` of a block share.
template <class F>
DEVICE auto scale_of(const u8* block, int part, int half) {
    if constexpr (F::SCALING >= BYTES)
        return F::scale_at(block, part, half);
    else if constexpr (F::SCALING == E4M3)
        return F::half_of(block[2 * part + half]);
    else
        return F::scale_bits(block);
}

// A lane's codes of all passes, a byte each; `block_of` tells where the block of a run is.
template <class F, class Block>
DEVICE void load_codes(const Block& block_of, int lane, const u8* end, uint2 (&codes)[2 * SETS]) {
    const int column = lane % 4 * 8;
    if constexpr (TOGETHER) {
        F::load_runs(block_of(run_in(0, lane)), lane / 4 % 2, column, end, codes);
    } else {
#pragma unroll
        for (int pass = 0; pass < 2 * SETS; pass++) {
            const int run = run_in(pass, lane);
            codes[pass] = F::load_codes(block_of(run), run % PARTS * 32 + column, end);
        }
    }
}

template <class T>
DEVICE T from_lane(T value, int lane) {
    if constexpr (sizeof(T) == 8)
        return {__shfl_sync(~0u, value.d, lane), __shfl_sync(~0u, value.m, lane)};
    else
        return __shfl_sync(~0u, value, lane);
}

// Eight numbers to their place; `at` counts eights.
DEVICE void store_eight(void* out, s64 at, int dtype, const float (&x)[8]) {
    if (dtype == FLOAT32) {
        float4* const to = static_cast<float4*>(out) + at * 2;
        to[0] = make_float4(x[0], x[1], x[2], x[3]), to[1] = make_float4(x[4], x[5], x[6], x[7]);
    } else {
        u32 pairs[4];
#pragma unroll
        for (int w = 0; w < 4; w++) pairs[w] = pack(x[w * 2], x[w * 2 + 1], dtype);
        static_cast<uint4*>(out)[at] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

// Five blocks of a multiprocessor leave registers enough for all loads of a thread to be on their way at once. Loads of bit
// planes are few bytes, so that with seven (where a multiprocessor has as many) more are on their way: kbit4 takes 170 us so
// in place of 180.
constexpr int RESIDENT = HAS_PLANES<Format> ? 7 : 5;

// `count` runs. `scale`: of the tensor (nvfp4).
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
dequantize(const u8* blocks, s64 count, void* out, int dtype, const float* codebook, float scale) {
    const int lane = threadIdx.x % WARP;
    // Warps beyond the last run repeat what the last one does.
    const s64 own = (s64(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP) * RUNS;
    const s64 first = min(own, (count - 1) / RUNS * RUNS);
    const int runs = int(min(count - first, s64(RUNS)));
    const u8* const from = blocks + first / PARTS * Format::BLOCK_BYTES;
    auto block_of = [&](u32 run) { return from + u64(min(run, u32(runs - 1)) / PARTS) * Format::BLOCK_BYTES; };

    uint2 codes[2 * SETS] = {};
    auto load = [&](const u8* end) { load_codes<Format>(block_of, lane, end, codes); };
    // Where blocks may end within a word there are branches between the loads: only the last warps have them.
    if (first + RUNS < count)
        load(nullptr);
    else
        load(blocks + count / PARTS * Format::BLOCK_BYTES);
    decltype(scale_of<Format>(from, 0, 0)) shared[SETS];
#pragma unroll
    for (int set = 0; set < SETS; set++) {
        const int run = run_shared(set, lane);
        shared[set] = scale_of<Format>(block_of(run), run % PARTS, lane % 2);
    }
    // Each lane has an entry of the codebook; those of few bits come again.
    float entry = 0;
    if constexpr (Format::CODING != INTEGERS) entry = codebook[lane % (1 << Format::BITS)];
#pragma unroll
    for (int pass = 0; pass < 2 * SETS; pass++) {
        const auto own_scale = from_lane(shared[pass / 2], sharing(pass, lane));
        float x[8];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            x[j] = Format::read(j < 4 ? codes[pass].x : codes[pass].y, j % 4, own_scale, entry);
            if constexpr (Format::SCALING == E4M3) x[j] = ieee_mul(x[j], scale);
        }
        const int run = run_in(pass, lane);
        if (run < runs) store_eight(out, (first + run) * 4 + lane % 4, dtype, x);
    }
}

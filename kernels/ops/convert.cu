// Conversions of small codes side by side: each alone, over and over in registers, and as the codec of the decode core.
// For tests of core/convert.cuh, and for cuquant/bench/dequant.py, which says of each of these structs what codes its
// words hold. No product uses this file.
#include "../core/convert.cuh"
#include "../core/decode.cuh"

// Weights of four and of eight bits with a float16 scale for every 32.
struct FourBits : Ungrouped {
    static constexpr int BITS = 4, OFFSET = 8, ZERO = 8, LOW_BYTES = 512, HIGH_BYTES = 0, SCALE_BYTES = 64;
    static constexpr Coding CODING = INTEGERS;
    static constexpr Scaling SCALING = HALF;
    static constexpr bool HAS_MIN = false;
};

struct EightBits : FourBits {
    static constexpr int BITS = 8, LOW_BYTES = 1024;
};

// A codec (core/codec.cuh) without a table, of numbers as they are.
template <class F = FourBits>
struct Codes {
    using Format = F;
    static constexpr int TABLE_BYTES = 0;
    static constexpr bool SUMS = false;

    DEVICE Codes(const u16*, int) {}
    DEVICE void fill(int, int) {}
    static DEVICE void unit(u32 (&)[4]) {}
    static DEVICE float unscale(int) { return 1; }
};

// The words themselves: what everything but a conversion takes.
struct Nothing : Codes<> {
    using Codes::Codes;
    DEVICE void codes(const Tile<Format>& tile, int h, u32 (&a)[4]) const {
        for (int r = 0; r < 4; r++) a[r] = tile.low[h];
    }
};

template <u32 (*CONVERT)(u32), int LOG_UNSCALE = 0>
struct Document : Codes<> {
    using Codes::Codes;
    static DEVICE float unscale(int) { return 1 << LOG_UNSCALE; }
    DEVICE void codes(const Tile<Format>& tile, int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = CONVERT(tile.low[h] << (12 - 4 * r));
    }
};

using E2m1 = Document<e2m1_to_half2>;
using E2m1Uncorrected = Document<e2m1_to_half2_uncorrected, 14>;
using E2m1Bfloat = Document<e2m1_to_bfloat2>;
using E2m1BfloatUncorrected = Document<e2m1_to_bfloat2_uncorrected>;

struct E2m1Permutes : Codes<> {
    using Codes::Codes;
    DEVICE void codes(const Tile<Format>& tile, int h, u32 (&a)[4]) const {
        e2m1_to_half2_by_permutes(tile.low[h], a);
    }
};

template <u32 (*LOW)(u32), u32 (*HIGH)(u32)>
struct Magic : Codes<> {
    using Codes::Codes;
    DEVICE void codes(const Tile<Format>& tile, int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = (r % 2 ? HIGH : LOW)(r < 2 ? tile.low[h] : tile.low[h] >> 8);
    }
};

using U4 = Magic<u4_low_to_half2<0>, u4_high_to_half2<0>>;
using U4b8 = Magic<u4_low_to_half2<8>, u4_high_to_half2<8>>;
using U4Uncorrected = Magic<u4_low_to_half2_uncorrected, u4_high_to_half2_uncorrected>;

template <u32 (*CONVERT)(u32, int)>
struct Bytes : Codes<EightBits> {
    using Codes::Codes;
    DEVICE void codes(const Tile<Format>& tile, int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] = CONVERT(tile.low[h / 2 * 4 + h % 2 * 2 + r % 2], r / 2);
    }
};

using Int8 = Bytes<int8_to_half2>;
using Int8Uncorrected = Bytes<int8_to_half2_uncorrected>;

struct Permutes : Codes<> {
    PermuteTable table;
    DEVICE Permutes(const u16* values, int lane) : Codes(values, lane), table(values) {}
    DEVICE void codes(const Tile<Format>& tile, int h, u32 (&a)[4]) const { table.convert(tile.low[h], a); }
};

struct Values : Codes<> {
    static constexpr int TABLE_BYTES = SharedTable::BYTES;
    const u16* values;
    DEVICE Values(const u16* values, int lane) : Codes(values, lane), values(values) {}
    DEVICE void fill(int thread, int) { SharedTable::fill(values, thread); }
    DEVICE void codes(const Tile<Format>& tile, int h, u32 (&a)[4]) const { SharedTable::convert(tile.low[h], a); }
};

// Conversions by the codecs of products.
#if CUQUANT_COPIES > 0
struct Pairs : Codebook<FourBits, CUQUANT_COPIES> {
    using Format = FourBits;
    using Codebook::Codebook;
};
#endif

struct FragmentIntegers : IntegerCodes<FourBits> {
    using Format = FourBits;
    using IntegerCodes::IntegerCodes;
};

struct FragmentE2m1 : E2m1Codes<FourBits> {
    using Format = FourBits;
    using E2m1Codes::E2m1Codes;
    static DEVICE float unscale(int) { return 16384; }  // 2^14: scales are their own numbers here
};

using Conversion = CUQUANT_CONVERSION;
using Format = Conversion::Format;
constexpr int WORDS = Format::BITS / 2;  // of a lane and two steps of 16 columns, which are eight pairs

// Registers of these words, one thread after the other.
extern "C" __global__ void __launch_bounds__(256) words(const u32* in, u32* out, const u16* values) {
    Conversion conversion(values, threadIdx.x % WARP);
    conversion.fill(threadIdx.x, 256);
    __syncthreads();
    const s64 thread = s64(blockIdx.x) * 256 + threadIdx.x;
    Tile<Format> tile;
#pragma unroll
    for (int w = 0; w < WORDS; w++) tile.low[w] = in[thread * WORDS + w];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        u32 a[4];
        conversion.codes(tile, h, a);
        for (int r = 0; r < 4; r++) out[thread * 8 + h * 4 + r] = a[r];
    }
}

// Words that follow from the thread's number by additions, converted, and added up: half of each sum and the register,
// one instruction for a pair, rounded to float16. A turn of the loop is UNROLLED rounds of 16 codes.
constexpr int UNROLLED = 4;

extern "C" __global__ void __launch_bounds__(256, 4) registers(u32* sums, int rounds, const u16* values) {
    constexpr u32 STEP = 0x9e3779b9, ONE_HALF = 0x38003800;
    Conversion conversion(values, threadIdx.x % WARP);
    conversion.fill(threadIdx.x, 256);
    __syncthreads();
    const s64 thread = s64(blockIdx.x) * 256 + threadIdx.x;
    u32 word = u32(thread) * 0x85ebca6b, total[2][4] = {};
#pragma unroll 1
    for (int round = 0; round < rounds; round += UNROLLED) {
#pragma unroll
        for (int i = 0; i < UNROLLED; i++) {
            Tile<Format> tile;
#pragma unroll
            for (int w = 0; w < WORDS; w++) tile.low[w] = word, word += STEP;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 a[4];
                conversion.codes(tile, h, a);
#pragma unroll
                for (int r = 0; r < 4; r++) total[h][r] = fma_half2(total[h][r], ONE_HALF, a[r]);
            }
        }
    }
    for (int h = 0; h < 2; h++)
        for (int r = 0; r < 4; r++) sums[thread * 8 + h * 4 + r] = total[h][r];
}

// The decode core of products, with the conversion for its codec.
#ifdef CUQUANT_GROUPS
extern "C" __global__ void __launch_bounds__(CUQUANT_WARPS* WARP, CUQUANT_RESIDENT)
product(const __grid_constant__ Problem problem) {
    decode<Format, Conversion, CUQUANT_GROUPS, CUQUANT_ROW_TILES, CUQUANT_ROW_WARPS, CUQUANT_WARPS, CUQUANT_DEPTH,
           CUQUANT_CLUSTER, CUQUANT_TOGETHER, false>(problem);
}
#endif

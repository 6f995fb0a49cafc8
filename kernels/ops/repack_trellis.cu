// Trellis matrices: storage layout <-> fragment layout (the picture is in core/tile.cuh), and what must be known of
// them before.
//
// A warp takes a tile of 16 x 64 weights, four 16 x 16 tiles of storage. Neighbours in storage are tiles of other rows,
// in the fragment layout tiles of other columns: the warps of a block have eight row tiles and go along K for a run.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256, WARPS = THREADS / WARP, RUN = 4;

// s * 2^e, in two steps: either factor is a normal number for |e| up to 252.
DEVICE float scaled(float s, int e) {
    return ieee_mul(ieee_mul(s, power_of_two(e / 2)), power_of_two(e - e / 2));
}

// What is found out about all matrices, in this order; `_Surveyed` (cuquant/cuda/trellis.py) reads it.
enum Surveyed {
    GREATEST,  // of the scales' magnitudes, as bits of a float
    LEAST,     // of those that are not 0
    NEGATIVE,  // 1 where any su is -1
    DIFFER,    // 1 where a matrix has another su than the first
};

// `found` is 0 before, but LEAST, of which all bits are set.
extern "C" __global__ void __launch_bounds__(THREADS)
survey(const u8* storage, s64 matrices, int N, int K, u32* found) {
    const Record<Format> record = {N, K};
    const s64 scales = s64(record.groups()) * N, first = s64(blockIdx.x) * THREADS + threadIdx.x;
    u32 greatest = 0, least = ~0u;
    bool negative = false, differs = false;
    for (s64 matrix = blockIdx.y; matrix < matrices; matrix += gridDim.y) {
        const u8* const from = storage + matrix * record.bytes();
        for (s64 i = first; i < scales; i += s64(gridDim.x) * THREADS) {
            const u32 size = magnitude(reinterpret_cast<const float*>(from + record.scales_at())[i]);
            greatest = max(greatest, size), least = min(least, size ? size : ~0u);
        }
        for (s64 k = first; k < K; k += s64(gridDim.x) * THREADS) {
            const u8 sign = from[record.su_at() + k];
            negative |= sign != 1, differs |= sign != storage[record.su_at() + k];
        }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        greatest = max(greatest, __shfl_xor_sync(~0u, greatest, step));
        least = min(least, __shfl_xor_sync(~0u, least, step));
    }
    negative = __any_sync(~0u, negative), differs = __any_sync(~0u, differs);
    if (threadIdx.x % WARP > 0) return;
    atomicMax(found + GREATEST, greatest), atomicMin(found + LEAST, least);
    if (negative) found[NEGATIVE] = 1;
    if (differs) found[DIFFER] = 1;
}

// Signs of columns, none beyond K: as bits that a float16 number's are changed by, [matrices][pitch]; and as the words of
// core/column_signs.cuh, which begin rows of as many bytes.
extern "C" __global__ void __launch_bounds__(THREADS)
sign_bits(const u8* storage, s64 matrices, int N, int K, u16* bits, int pitch, u32* words) {
    const Record<Format> record = {N, K};
    for (s64 i = s64(blockIdx.x) * THREADS + threadIdx.x; i < matrices * pitch; i += s64(gridDim.x) * THREADS) {
        const s64 matrix = i / pitch;
        const int own = int(i - matrix * pitch);  // a column, and a word: there are a sixteenth as many, or four
        const u8* const signs = storage + matrix * record.bytes() + record.su_at();
        auto negative = [&](int k) { return k < K && signs[k] != 1; };
        bits[i] = negative(own) ? 0x8000 : 0;
        if (own >= (K + 63) / 64 * 4) continue;
        u32 word = 0;
        for (int p = 0; p < 8; p++) {
            const int first = own / 4 * 64 + p * 8 + own % 4 * 2;
            word |= u32(negative(first)) << (15 - p) | u32(negative(first + 1)) << (31 - p);
        }
        words[matrix * (pitch / 2) + own] = word;
    }
}

// The warp's row tile, and where its matrix is; tiles [begin, end) along K.
struct Run {
    s64 matrix, tile, record;  // numbers of the first tile in the fragment layout, and of its record in the group plane
    int row_tile, begin, end;
};

DEVICE bool run_of(s64 index, s64 matrices, const Record<Format>& record, Run& run) {
    const u32 tiles = (record.K + 63) / 64, runs = (tiles + RUN - 1) / RUN;
    const u32 bands = (record.tiles_n() + WARPS - 1) / WARPS;
    if (index >= matrices * bands * runs) return false;
    const s64 band = index / runs;
    run.matrix = band / bands;
    run.row_tile = int(band % bands) * WARPS + threadIdx.x / WARP;
    run.begin = int(index % runs) * RUN, run.end = min(run.begin + RUN, int(tiles));
    const s64 row = run.matrix * record.tiles_n() + run.row_tile;
    run.tile = row * tiles + run.begin;
    run.record = row * groups_of<Format>(tiles) + run.begin / Format::GROUP_TILES;
    if (run.row_tile >= record.tiles_n()) run.end = run.begin;
    return true;
}

static_assert(RUN % Format::GROUP_TILES == 0, "runs begin with a group");

// A lane's scale of tile `tile` in the fragment layout, that of row g + 8 j and block b (lane = 4 g + 2 j + b), or null
// if it has none: of larger groups those of the first block stand for all.
DEVICE u32* scale_at(u8* scale, u8* group, const Run& run, int tile, int lane) {
    if constexpr (Format::GROUP_BYTES == 0)
        return reinterpret_cast<u32*>(scale + (run.tile + tile - run.begin) * Format::SCALE_BYTES) + lane;
    if (lane % 2 || tile % Format::GROUP_TILES) return nullptr;
    const s64 record = run.record + (tile - run.begin) / Format::GROUP_TILES;
    return reinterpret_cast<u32*>(group + record * Format::GROUP_BYTES) + lane / 2;
}

// Loads two rows of a storage tile, k and k + 1, k even: words[e][j] has index (k + e, g + 8 j) in bits BITS * g on.
template <class F>
DEVICE void load_two(const u8* row, u32 (&words)[2][2]) {
    if constexpr (F::BITS == 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(row);
        words[0][0] = v.x, words[0][1] = v.x >> 16, words[1][0] = v.y, words[1][1] = v.y >> 16;
    } else if constexpr (F::BITS == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(row);
        words[0][0] = v.x, words[0][1] = v.y, words[1][0] = v.z, words[1][1] = v.w;
    } else {
        u32 v[3];
#pragma unroll
        for (int w = 0; w < 3; w++) v[w] = reinterpret_cast<const u32*>(row)[w];
        words[0][0] = v[0], words[0][1] = __funnelshift_r(v[0], v[1], 24);
        words[1][0] = __funnelshift_r(v[1], v[2], 16), words[1][1] = v[2] >> 8;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
to_fragments(const u8* storage, s64 matrices, int N, int K, u8* low, u8* high, u8* scale, u8* group,
             int lift) {
    using F = Format;
    const Record<F> record = {N, K};
    const int lane = threadIdx.x % WARP, g = lane / 4, i = lane % 4;
    Run run;
    for (s64 index = blockIdx.x; run_of(index, matrices, record, run); index += gridDim.x) {
        const u8* const from = storage + run.matrix * record.bytes();
        const float* const scales = reinterpret_cast<const float*>(from + record.scales_at());
        // The scale that is this lane's to write: row g + 8 j, block b for lane 4 g + 2 j + b.
        const int n = run.row_tile * 16 + g + i / 2 * 8;
        const bool negative = n < N && from[record.sv_at() + n] != 1;
        for (int tile = run.begin; tile < run.end; tile++) {
            const s64 at = run.tile + tile - run.begin;
            LaneShare<F> share = {};
            u32 codes[2][2][2] = {};  // [block][rows g, g + 8][element of a pair], byte m
#pragma unroll
            for (int part = 0; part < 8; part++) {  // m = 2 (h & 1) + t of each block
                const int h = part / 2, m = h % 2 * 2 + part % 2;
                if (tile * 4 + h >= record.tiles_k()) continue;
                u32 words[2][2];
                load_two<F>(from + record.tile_at(tile * 4 + h, run.row_tile) + (2 * i + part % 2 * 8) * F::ROW_BYTES,
                            words);
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        codes[h / 2][j][e] |= (words[e][j] >> F::BITS * g & F::MASK) << 8 * m;
            }
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    Pairs<F>::put(share, b, j, spread_bits(codes[b][j][0]) | spread_bits(codes[b][j][1]) << 1);
            store_low(low + at * F::LOW_BYTES, share, lane);
            if constexpr (F::HIGH_BYTES > 0) reinterpret_cast<u32*>(high + at * F::HIGH_BYTES)[lane] = share.high[0];
            const int group_of_scale = (tile * 2 + i % 2) * 32 / F::GROUP;
            u32 bits = 0;
            if (n < N && group_of_scale < record.groups())
                bits = __float_as_int(scaled(scales[s64(group_of_scale) * N + n], lift)) ^ (negative ? 1u << 31 : 0);
            if (u32* const place = scale_at(scale, group, run, tile, lane)) *place = bits;
        }
    }
}

// Indices and scales, into records whose signs are there.
extern "C" __global__ void __launch_bounds__(THREADS)
from_fragments(u8* storage, s64 matrices, int N, int K, const u8* low, const u8* high, u8* scale, u8* group,
               int lift) {
    using F = Format;
    __shared__ __align__(16) u8 staged[WARPS][64 * 16];  // [k][n], a byte each
    const Record<F> record = {N, K};
    const int lane = threadIdx.x % WARP, g = lane / 4, i = lane % 4;
    u8* const own = staged[threadIdx.x / WARP];
    Run run;
    for (s64 index = blockIdx.x; run_of(index, matrices, record, run); index += gridDim.x) {
        u8* const to = storage + run.matrix * record.bytes();
        float* const scales = reinterpret_cast<float*>(to + record.scales_at());
        const int n = run.row_tile * 16 + g + i / 2 * 8;
        const bool negative = n < N && to[record.sv_at() + n] != 1;
        for (int tile = run.begin; tile < run.end; tile++) {
            const s64 at = run.tile + tile - run.begin;
            LaneShare<F> share = {};
            load_low(share, low + at * F::LOW_BYTES, lane);
            if constexpr (F::HIGH_BYTES > 0)
                share.high[0] = reinterpret_cast<const u32*>(high + at * F::HIGH_BYTES)[lane];
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    u32 unused;
                    u32 pairs = Pairs<F>::get(share, b, j, unused);
                    if constexpr (F::BITS == 2) pairs &= 0x0f0f0f0f;
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        const u32 codes = gather_bits(pairs >> e);
#pragma unroll
                        for (int m = 0; m < 4; m++)
                            own[(32 * b + 8 * m + 2 * i + e) * 16 + g + 8 * j] = u8(codes >> 8 * m);
                    }
                }
            __syncwarp();
#pragma unroll
            for (int k = lane; k < 64; k += WARP)
                if (tile * 4 + k / 16 < record.tiles_k())
                    store_row<F>(to + record.tile_at(tile * 4 + k / 16, run.row_tile) + k % 16 * F::ROW_BYTES,
                                 reinterpret_cast<const uint4*>(own)[k]);
            __syncwarp();
            const int group_of_scale = (tile * 2 + i % 2) * 32 / F::GROUP;
            const u32* const place = scale_at(scale, group, run, tile, lane);
            if (place && n < N && group_of_scale < record.groups())
                scales[s64(group_of_scale) * N + n] = scaled(__int_as_float(*place ^ (negative ? 1u << 31 : 0)), -lift);
        }
    }
}

// Rows ids[0 .. rows) of the matrices of a stack, counted through, as one matrix: its indices and scales.
extern "C" __global__ void __launch_bounds__(THREADS)
take_rows(const u8* storage, int N, int K, const s64* ids, int rows, u8* to) {
    using F = Format;
    const Record<F> source = {N, K}, target = {rows, K};
    const s64 thread = s64(blockIdx.x) * THREADS + threadIdx.x;
    auto home = [&](s64 id) { return storage + id / N * source.bytes(); };
    if (thread < s64(target.tiles_k()) * 16 * target.tiles_n()) {  // a row of a tile
        const s64 tile = thread / 16;
        const int k = int(thread % 16), tile_k = int(tile / target.tiles_n()), tile_n = int(tile % target.tiles_n());
        u32 codes[4] = {};
#pragma unroll
        for (int n = 0; n < 16; n++) {
            if (tile_n * 16 + n >= rows) break;
            const s64 id = ids[tile_n * 16 + n];
            const int row = int(id % N), bit = row % 16 * F::BITS;
            const u8* const from = home(id) + source.tile_at(tile_k, row / 16) + k * F::ROW_BYTES;
            const u32 bits = from[bit / 8] | (bit % 8 + F::BITS > 8 ? from[bit / 8 + 1] << 8 : 0);
            codes[n / 4] |= (bits >> bit % 8 & F::MASK) << 8 * (n % 4);
        }
        store_row<F>(to + target.tile_at(tile_k, tile_n) + k * F::ROW_BYTES,
                     make_uint4(codes[0], codes[1], codes[2], codes[3]));
    }
    if (thread < s64(target.groups()) * rows) {
        const int group = int(thread / rows), n = int(thread % rows), row = int(ids[n] % N);
        reinterpret_cast<float*>(to + target.scales_at())[thread] =
            reinterpret_cast<const float*>(home(ids[n]) + source.scales_at())[s64(group) * N + row];
        if (group == 0) to[target.sv_at() + n] = home(ids[n])[source.sv_at() + row];
    }
    if (thread < K) to[target.su_at() + thread] = home(ids[0])[source.su_at() + thread];
}

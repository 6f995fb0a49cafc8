// Trellis matrices: storage layout <-> fragment layout (the picture is in core/tile.cuh), and what must be known of
// them before.
//
// A warp takes a tile of 16 x 64 weights, four 16 x 16 tiles of storage. Neighbours in storage are tiles of other rows,
// in the fragment layout tiles of other columns: the warps of a block have eight row tiles and go along K for a run.
#include "../core/ptx.cuh"
#include CUQUANT_FORMAT
#include "../formats/trellis_tile.cuh"

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256, WARPS = THREADS / WARP, RUN = 8;

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
    bool whole;  // RUN tiles, of which all is in the matrix
};

// No matrices that a GPU holds have 2^32 runs of eight row tiles.
DEVICE bool run_of(u32 index, s64 matrices, const Record<Format>& record, Run& run) {
    const u32 tiles = (record.K + 63) / 64, runs = (tiles + RUN - 1) / RUN;
    const u32 bands = (record.tiles_n() + WARPS - 1) / WARPS, band = index / runs, matrix = band / bands;
    if (matrix >= matrices) return false;
    run.matrix = matrix;
    run.row_tile = int(band - matrix * bands) * WARPS + threadIdx.x / WARP;
    run.begin = int(index - band * runs) * RUN, run.end = min(run.begin + RUN, int(tiles));
    const s64 row = run.matrix * record.tiles_n() + run.row_tile;
    run.tile = row * tiles + run.begin;
    run.record = row * groups_of<Format>(tiles) + run.begin / Format::GROUP_TILES;
    run.whole = (run.begin + RUN) * 64 <= record.K && (run.row_tile + 1) * 16 <= record.N;
    if (run.row_tile >= record.tiles_n()) run.end = run.begin;
    return true;
}

static_assert(RUN % Format::GROUP_TILES == 0, "runs begin with a group");

// What a lane moves of a run: of each tile two rows of a storage tile (formats/trellis_tile.cuh), and a scale, of row g + 8 j
// of the row tile and of block b (lane = 4 g + 2 j + b); of larger groups those of the first block stand for all.
struct Own {
    using F = Format;
    using Turn = TrellisTile<F>;

    const Run& run;
    const Record<F>& record;
    const int lane, k, n;
    s64 rows_at, scales_at;  // in the record, of the run's first tile
    u32 sign;                // of the row

    DEVICE Own(const Run& run, const Record<F>& record, const u8* row_signs)
        : run(run), record(record), lane(threadIdx.x % WARP), k(Turn::k_of(lane)),
          n(run.row_tile * 16 + lane / 4 + lane / 2 % 2 * 8) {
        rows_at = record.tile_at(run.begin * 4 + k / 16, run.row_tile) + k % 16 * F::ROW_BYTES;
        scales_at = record.scales_at() + (s64(group(0)) * record.N + n) * 4;
        sign = n < record.N && row_signs[n] != 1 ? 1u << 31 : 0;
    }

    // Of tile t of the run.
    DEVICE int group(int t) const { return ((run.begin + t) * 2 + lane % 2) * 32 / F::GROUP; }
    DEVICE s64 row_of(int t) const { return rows_at + t * (s64(record.tiles_n()) * F::TILE_BYTES * 4); }
    DEVICE s64 scale_of(int t) const {
        const int groups = F::GROUP == 32 ? 2 * t : t / F::GROUP_TILES;
        return scales_at + s64(groups) * record.N * 4;
    }
    DEVICE bool has_rows(int t) const { return (run.begin + t) * 4 + k / 16 < record.tiles_k(); }

    // Whether a scale is this lane's in the fragment layout, and whether there is one in storage.
    DEVICE bool has_place(int t) const { return F::GROUP_BYTES == 0 || (lane % 2 == 0 && t % F::GROUP_TILES == 0); }
    DEVICE bool has_scale(int t) const { return n < record.N && group(t) < record.groups(); }

    DEVICE u32* place(u8* scale, u8* group, int t) const {
        if constexpr (F::GROUP_BYTES == 0) return reinterpret_cast<u32*>(scale + (run.tile + t) * F::SCALE_BYTES) + lane;
        return reinterpret_cast<u32*>(group + (run.record + t / F::GROUP_TILES) * F::GROUP_BYTES) + lane / 2;
    }
};

// The planes of the fragment layout, and the power of two that scales are multiplied by there.
struct Made {
    u8 *low, *high, *scale, *group;
    int lift;
};

// TILES tiles of a run, from tile `first` on. All of a run is in the matrix, a single tile may be in part: without a test for
// each all are worked on at once.
template <int TILES>
DEVICE void tiles_to_fragments(const Own& own, int first, const u8* from, const Made& to) {
    using F = Format;
    constexpr bool WHOLE = TILES == RUN;
    u32 words[TILES][TrellisTile<F>::WORDS] = {};
    float scales[TILES] = {};
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int t = first + i;
        if (WHOLE || own.has_rows(t)) TrellisTile<F>::load(from + own.row_of(t), words[i]);
        if (own.has_place(t) && (WHOLE || own.has_scale(t)))
            scales[i] = *reinterpret_cast<const float*>(from + own.scale_of(t));
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int t = first + i;
        const s64 tile = own.run.tile + t;
        LaneShare<F> share = {};
        TrellisTile<F>::to_share(words[i], share, own.lane);
        store_low(to.low + tile * F::LOW_BYTES, share, own.lane);
        if constexpr (F::HIGH_BYTES > 0) reinterpret_cast<u32*>(to.high + tile * F::HIGH_BYTES)[own.lane] = share.high[0];
        if (!own.has_place(t)) continue;
        const u32 bits = __float_as_int(scaled(scales[i], to.lift)) ^ own.sign;
        *own.place(to.scale, to.group, t) = WHOLE || own.has_scale(t) ? bits : 0;
    }
}

template <int TILES>
DEVICE void tiles_from_fragments(const Own& own, int first, const Made& from, u8* to) {
    using F = Format;
    constexpr bool WHOLE = TILES == RUN;
    LaneShare<F> shares[TILES] = {};
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int t = first + i;
        const s64 tile = own.run.tile + t;
        load_low(shares[i], from.low + tile * F::LOW_BYTES, own.lane);
        if constexpr (F::HIGH_BYTES > 0)
            shares[i].high[0] = reinterpret_cast<const u32*>(from.high + tile * F::HIGH_BYTES)[own.lane];
        if (own.has_place(t)) shares[i].scale = *own.place(from.scale, from.group, t);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int t = first + i;
        u32 words[TrellisTile<F>::WORDS];
        TrellisTile<F>::from_share(shares[i], words, own.lane);
        if (WHOLE || own.has_rows(t)) TrellisTile<F>::store(to + own.row_of(t), words);
        if (own.has_place(t) && (WHOLE || own.has_scale(t)))
            *reinterpret_cast<float*>(to + own.scale_of(t)) =
                scaled(__int_as_float(shares[i].scale ^ own.sign), -from.lift);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
to_fragments(const u8* storage, s64 matrices, int N, int K, u8* low, u8* high, u8* scale, u8* group,
             int lift) {
    const Record<Format> record = {N, K};
    const Made to = {low, high, scale, group, lift};
    Run run;
    for (u32 index = blockIdx.x; run_of(index, matrices, record, run); index += gridDim.x) {
        const u8* const from = storage + run.matrix * record.bytes();
        const Own own(run, record, from + record.sv_at());
        if (run.whole) {
            tiles_to_fragments<RUN>(own, 0, from, to);
        } else {
#pragma unroll 1
            for (int t = 0; t < run.end - run.begin; t++) tiles_to_fragments<1>(own, t, from, to);
        }
    }
}

// Signs of the columns of a run, if it is of a matrix's first row tile, and of its rows, if it is their first one, to the record;
// zeros fill it up.
DEVICE void store_signs(const Run& run, const Record<Format>& record, const u8* su, const u8* sv, u8* to) {
    const int lane = threadIdx.x % WARP;
    if (run.row_tile == 0)
        for (int k = run.begin * 64 + lane; k < min(run.end * 64, record.K); k += WARP) to[record.su_at() + k] = su[k];
    if (run.begin > 0) return;
    const int n = run.row_tile * 16 + lane;
    if (lane < 16 && n < record.N) to[record.sv_at() + n] = sv[n];
    if (run.row_tile == record.tiles_n() - 1 && record.sv_at() + record.N + lane < record.bytes())
        to[record.sv_at() + record.N + lane] = 0;
}

// Records of what the planes have and of signs, [matrices][K] and [matrices][N].
extern "C" __global__ void __launch_bounds__(THREADS)
from_fragments(u8* storage, s64 matrices, int N, int K, u8* low, u8* high, u8* scale, u8* group, int lift, const u8* su,
               const u8* sv) {
    const Record<Format> record = {N, K};
    const Made from = {low, high, scale, group, lift};
    Run run;
    for (u32 index = blockIdx.x; run_of(index, matrices, record, run); index += gridDim.x) {
        u8* const to = storage + run.matrix * record.bytes();
        const Own own(run, record, sv + run.matrix * N);
        if (run.whole) {
            tiles_from_fragments<RUN>(own, 0, from, to);
        } else {
#pragma unroll 1
            for (int t = 0; t < run.end - run.begin; t++) tiles_from_fragments<1>(own, t, from, to);
        }
        store_signs(run, record, su + run.matrix * K, sv + run.matrix * N, to);
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

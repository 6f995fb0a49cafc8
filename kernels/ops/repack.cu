// Storage layout <-> fragment layout (the picture is in core/tile.cuh).
//
// A block of threads takes runs of 16 rows x RUN tiles, one after the other, of one row tile: to fragments all of them, or,
// where row tiles are few and rows have no factors, a part. On the way back each run has a block of its own. In storage a row
// of blocks starts at any address, so its bytes pass through shared memory, which keeps their places in 16-byte words: these
// are moved as such; on the way back, what the row has of its first and last word, in pairs of bytes (byte by byte where
// blocks have an odd length).
//
//     row r in shared memory    |..bbbbbb|bbbbbbbb|bbbbbbbb|bbb.....|    b: its blocks, from `begin` to `end`
//
// Rows and columns beyond the matrix have code 0 and scale 0.
#include "../core/ptx.cuh"
#include "../formats/lift_rows.cuh"
#include CUQUANT_FORMAT

static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

// Whole tiles and whole blocks of a row, which a warp takes at once: more than one of the former or of the latter.
constexpr int SPAN_TILES = Format::COLUMNS > 64 ? Format::COLUMNS / 64 : 1;
constexpr int SPAN_BLOCKS = Format::COLUMNS < 64 ? 64 / Format::COLUMNS : 1;
constexpr int SPAN_BYTES = SPAN_BLOCKS * Format::BLOCK_BYTES;  // of a row in storage
constexpr int ROWS = 16, RUN = CUQUANT_RUN;                   // tiles along K
constexpr int RUN_BLOCKS = RUN / SPAN_TILES * SPAN_BLOCKS;
constexpr int THREADS = CUQUANT_THREADS, WARPS = THREADS / WARP, ROW_THREADS = THREADS / ROWS;
constexpr int OWN_SPANS = RUN / SPAN_TILES / WARPS;           // of a warp
constexpr int PITCH = ((RUN_BLOCKS * Format::BLOCK_BYTES + 15) / 16 + 1 | 1) * 16;  // eight rows in different banks
constexpr int IMAGE = ROWS * PITCH + 16;                      // of a run's rows; bytes beyond blocks are read
constexpr bool GROUPED = Format::GROUP_BYTES > 0;
static_assert(RUN % Format::GROUP_TILES == 0, "groups of tiles do not cross runs");
static_assert(OWN_SPANS * SPAN_TILES * WARPS == RUN, "every warp has as many tiles of a run");
// Whether a block takes all of a row tile, so that it knows the peaks of rows when their scales, or the group plane, are to be
// lifted; these may wait in shared memory until then.
constexpr bool WHOLE_ROWS = CUQUANT_TO_FRAGMENTS && ROW_FACTORS<Format>;

struct Run {
    s64 row_tile, first_tile, first_group, first_row;  // over all matrices
    int rows, tiles;            // that the matrix has of it
    int bytes;                  // of each row
    s64 row_bytes, column;      // of the matrix in storage; where in its rows the run starts
};

// Tiles along K, and runs of them.
DEVICE u32 tiles_along(int blocks) { return (u32(blocks) + SPAN_BLOCKS - 1) / SPAN_BLOCKS * SPAN_TILES; }
DEVICE u32 runs_of(u32 tiles_k) { return (tiles_k + RUN - 1) / RUN; }

// Run `number` of a row tile; these are numbered over all matrices, one below the other.
DEVICE Run run_at(u32 row_tile, u32 number, u32 tiles_k, int N, int blocks) {
    const u32 first = number * RUN, row_tiles = (u32(N) + ROWS - 1) / ROWS;
    u32 matrix = 0, own = row_tile;
    if (row_tile >= row_tiles) matrix = row_tile / row_tiles, own = row_tile % row_tiles;  // a division takes long
    Run run;
    run.row_tile = row_tile;
    run.first_tile = s64(row_tile) * tiles_k + first;
    run.first_group = s64(row_tile) * groups_of<Format>(tiles_k) + first / Format::GROUP_TILES;
    run.first_row = s64(matrix) * N + own * ROWS;
    run.rows = min(N - int(own * ROWS), ROWS);
    run.tiles = min(int(tiles_k - first), RUN);
    run.bytes = min(blocks - int(first) / SPAN_TILES * SPAN_BLOCKS, RUN_BLOCKS) * Format::BLOCK_BYTES;
    run.row_bytes = s64(blocks) * Format::BLOCK_BYTES;
    run.column = s64(first / SPAN_TILES) * SPAN_BYTES;
    return run;
}

// Row r of a run: bytes begin .. end of the 16-byte words from storage + at. Rows that are not there have no bytes.
struct Row {
    s64 at;
    int begin, end;
};

DEVICE int begin_of(const u8* storage, const Run& run, int r) {
    const u32 at = u32(run.first_row + r) * u32(run.row_bytes) + u32(run.column);
    return int((u32(reinterpret_cast<u64>(storage)) + at) % 16);
}

DEVICE Row row_of(const u8* storage, const Run& run, int r) {
    const int begin = begin_of(storage, run, r);
    const s64 at = (run.first_row + r) * run.row_bytes + run.column;
    return {at - begin, begin, begin + (r < run.rows ? run.bytes : 0)};
}

// What a row has of its first and of its last word, in units of UNIT bytes, thread by thread.
constexpr int UNIT = Format::BLOCK_BYTES % 2 ? 1 : 2, UNITS = 16 / UNIT;

template <class Do>
DEVICE void for_edges(const Row& row, int k, const Do& what) {
    const int last = row.end / 16;
#pragma unroll
    for (int e = k; e < 2 * UNITS; e += ROW_THREADS) {
        const bool tail = e >= UNITS;
        // Where first and last word are one, or the first is whole, others have it.
        if (tail ? last > 0 : row.begin > 0 || last == 0) {
            const int at = tail ? last * 16 + (e - UNITS) * UNIT : e * UNIT;
            what(at, at >= row.begin && at < row.end);
        }
    }
}

DEVICE void copy_unit(u8* to, const u8* from) {
    if constexpr (UNIT == 1)
        *to = *from;
    else
        *reinterpret_cast<u16*>(to) = *reinterpret_cast<const u16*>(from);
}

// Formats with ROW_FACTORS: which of a tile's rows g and g + 8 the scale is of that a lane has, or its part of the group
// plane; and whether that is one of minimums, or of zero points.
DEVICE int row8_of(int lane) { return GROUPED ? lane % 2 : lane / 2 % 2; }

DEVICE bool has_minimum(int lane) { return Format::HAS_MIN && lane / 2 % 2; }

// Do `what` with every span of a run (WHOLE: of RUN tiles) that the warp has, given its number among them, its first tile, and
// where it starts in a row.
template <bool WHOLE, int AT_ONCE = OWN_SPANS, class Do>
DEVICE void for_spans(const Run& run, const Do& what) {
#pragma unroll AT_ONCE
    for (int own = 0; own < OWN_SPANS; own++) {
        const int span = own * WARPS + threadIdx.x / WARP;
        if (WHOLE || span * SPAN_TILES < run.tiles) what(own, span * SPAN_TILES, span * SPAN_BYTES);
    }
}

// Start to copy what storage has of a run, `bytes` in all, to images of its rows. What else is in a row's first and last
// word does no harm, but behind the last block of a matrix, where tiles want zeros.
DEVICE void fetch(const u8* storage, s64 bytes, const Run& run, u8* images) {
    const int r = threadIdx.x / ROW_THREADS, k = threadIdx.x % ROW_THREADS;
    const Row row = row_of(storage, run, r);
    u64 address = reinterpret_cast<u64>(storage + row.at);
    asm volatile("" : "+l"(address));  // once, rather than anew for every word
    const u8* const from = reinterpret_cast<const u8*>(address);
    u8* const to = images + r * PITCH;
    const int words = row.end > row.begin ? (row.end + 15) / 16 : 0;
    const bool exact = run.bytes != run.tiles / SPAN_TILES * SPAN_BYTES || row.at < 0 || row.at + words * 16 > bytes ||
                       run.rows < ROWS;
    if (!exact) {
#pragma unroll
        for (int word = k; word < PITCH / 16; word += ROW_THREADS)
            if (word < words) copy_async_ahead(to + word * 16, from + word * 16);
        return copy_commit();
    }
#pragma unroll 1
    for (int word = k * 16; word < PITCH; word += ROW_THREADS * 16) {
        if (word >= row.begin && word + 16 <= row.end) {
            copy_async_ahead(to + word, from + word);
        } else {
            *reinterpret_cast<uint4*>(to + word) = make_uint4(0, 0, 0, 0);
            for (int byte = max(word, row.begin); byte < min(word + 16, row.end); byte++) to[byte] = from[byte];
        }
    }
    copy_commit();
}

// Whether a lane has a part of the records of the group plane, and where it is in that of tile t of the run, given the run's
// first one.
constexpr int PARTS = Format::GROUP_BYTES / 16;  // of two bytes, of rows g and g + 8

DEVICE bool in_group(int lane) { return lane % 4 < PARTS; }

DEVICE u16* group_at(u8* first, int t, int lane) {
    u8* const record = first + t / Format::GROUP_TILES * Format::GROUP_BYTES;
    return reinterpret_cast<u16*>(record) + lane / 4 * PARTS + lane % 4;
}

// The lane's shares of a span, from the rows of storage, and back.
template <class F>
DEVICE void gather(LaneShare<F> (&shares)[SPAN_TILES], const u8* row, const u8* row8, int lane) {
    if constexpr (SPAN_TILES > 1)
        F::gather(shares, row, row8, lane);
    else
        shares[0] = F::gather(row, row8, lane);
}

template <class F>
DEVICE void scatter(const LaneShare<F> (&shares)[SPAN_TILES], u8* row, u8* row8, int lane) {
    if constexpr (SPAN_TILES > 1)
        F::scatter(shares, row, row8, lane);
    else
        F::scatter(shares[0], row, row8, lane);
}

template <class F>
DEVICE void make_canonical(LaneShare<F>& share) {
    if constexpr (F::SCALING == E4M3) share.scale = F::canonical(share.scale);
}

static_assert(LEAST == GREATEST + 1 && LEAST_EXPONENT == GREATEST_EXPONENT + 1, "extremes are neighbours");

// The least and the greatest of the numbers so far, as atomicMax can find them from zeros on: the former inverted.
struct RunningExtremes {
    u32 greatest = 0, least = ~0u;

    DEVICE void add(u32 value) { greatest = max(greatest, value), least = min(least, value); }

    // What all threads of a block have, to two neighbours, by way of two words of shared memory that were 0. Few blocks have
    // more than is known: a read is cheaper than an atomic operation, and one of a block than one of each warp (the same
    // word's reads wait for each other: 128 us in place of 84 for mxfp4).
    DEVICE void store(u32* shared, u32* to) {
#pragma unroll
        for (int step = 16; step; step /= 2) {
            greatest = max(greatest, __shfl_xor_sync(~0u, greatest, step));
            least = min(least, __shfl_xor_sync(~0u, least, step));
        }
        if (threadIdx.x % WARP == 0) atomicMax(shared, greatest), atomicMax(shared + 1, ~least);
        __syncthreads();
        if (threadIdx.x < 2 && shared[threadIdx.x] > reinterpret_cast<volatile u32*>(to)[threadIdx.x])
            atomicMax(to + threadIdx.x, shared[threadIdx.x]);
    }
};

// What bounds the weights of a block, or of both whose scales a lane has, where it has two.
template <class F>
DEVICE void add_peaks(const LaneShare<F>& share, RunningExtremes& peaks) {
    auto add = [&](float peak) {  // which may be the bits of a small integer
        if (__float_as_int(peak)) peaks.add(__float_as_int(peak));
    };
    if constexpr (F::CODING == CODEBOOK && F::SCALING == STEP_BYTES)
        add(F::peak(share, 0)), add(F::peak(share, 1));
    else
        add(F::peak(share));
}

// Whether the block whose scale a lane has, of tile t of a run, is the matrix's.
DEVICE bool is_there(const Run& run, int t, int lane) {
    const int block = t / SPAN_TILES * SPAN_BLOCKS + (SPAN_BLOCKS > 1 ? lane % 2 : 0);
    return lane / 4 + lane / 2 % 2 * 8 < run.rows && block * Format::BLOCK_BYTES < run.bytes;
}

// One of the two kernels is compiled: their runs differ.
#if CUQUANT_TO_FRAGMENTS
// `found`, zeros, become what was seen (formats/seen.cuh): GREATEST has the bits of the greatest magnitude that a weight may
// have, and LEAST those of the least such bound of a block that is not 0, inverted; the bits of NaN are greater than any
// number's.
//
// Of formats with ROW_FACTORS scales are lifted, and the row plane is filled, when a row tile is done (lift_rows.cuh). E8M0
// scales are as they were: ops/center.cu has to know the greatest and the least exponent.
// A block has `room` bytes of shared memory: for two runs, and, if that is more, for a row tile's scales or group plane.
extern "C" __global__ void __launch_bounds__(THREADS, CUQUANT_RESIDENT)
to_fragments(const u8* storage, int N, int blocks, u8* low, u8* high, u8* scale, u8* group,
             s64 bytes, u32* factors, int room, u32* found) {
    static_assert(IMAGE == CUQUANT_IMAGE, "host and device disagree about shared memory");
    let_successor_start();
    const int lane = threadIdx.x % WARP, g = lane / 4;
    RunningExtremes peaks, exponents;
    __shared__ u32 row_peaks[ROWS], extremes[4];
    if (threadIdx.x < ROWS) row_peaks[threadIdx.x] = 0;
    if (threadIdx.x < 4) extremes[threadIdx.x] = 0;
    const u32 tiles_k = tiles_along(blocks), runs = runs_of(tiles_k);
    const u32 row_tile = blockIdx.x, last = runs * (blockIdx.y + 1) / gridDim.y - 1;
    u32 number = runs * blockIdx.y / gridDim.y;
    const s64 row_tile_first = s64(row_tile) * tiles_k, row_group_first = s64(row_tile) * groups_of<Format>(tiles_k);
    // Where scales, or the group plane, of a row tile wait to be lifted.
    const bool keeps = WHOLE_ROWS && room > 2 * IMAGE;
    u8* const kept = dynamic_shared() + 2 * IMAGE;
    u8* const row_scales = keeps && !GROUPED ? kept : scale + row_tile_first * Format::SCALE_BYTES;
    u8* const row_groups = keeps && GROUPED ? kept : group + row_group_first * Format::GROUP_BYTES;
    u32 row_peak = 0;
    Run next = run_at(row_tile, number, tiles_k, N, blocks);
    fetch(storage, bytes, next, dynamic_shared());
    for (int image = 0;; image ^= IMAGE) {
        const Run run = next;
        const u8* const own = dynamic_shared() + image;
        const u8* const rows[2] = {own + g * PITCH + begin_of(storage, run, g),
                                   own + (g + 8) * PITCH + begin_of(storage, run, g + 8)};
        copy_wait<0>();
        __syncthreads();  // this run is there, and all have read the one before
        if (number < last) {
            next = run_at(row_tile, number + 1, tiles_k, N, blocks);
            fetch(storage, bytes, next, dynamic_shared() + (image ^ IMAGE));
        }
        u8* const groups = row_groups + (run.first_group - row_group_first) * Format::GROUP_BYTES;
        auto put_tile = [&](LaneShare<Format> share, int t) {
            const s64 tile = run.first_tile + t;
            add_peaks(share, peaks);
            make_canonical(share);
            if constexpr (Format::SCALING == E8M0)
                if (is_there(run, t, lane)) exponents.add(share.scale);
            if constexpr (ROW_FACTORS<Format> && GROUPED)
                row_peak = max(row_peak, group_peak_to_lift<Format>(share.group, row8_of(lane), has_minimum(lane)));
            else if constexpr (ROW_FACTORS<Format>)
                row_peak = max(row_peak, peak_to_lift<Format>(share.scale));
            store_low(low + tile * Format::LOW_BYTES, share, lane);
#pragma unroll
            for (int w = 0; w < Format::HIGH_BYTES / 128; w++)
                reinterpret_cast<u32*>(high + tile * Format::HIGH_BYTES)[w * 32 + lane] = share.high[w];
            u8* const scales = row_scales + (run.first_tile - row_tile_first + t) * Format::SCALE_BYTES;
            if constexpr (Format::SCALE_BYTES == 128)
                reinterpret_cast<u32*>(scales)[lane] = share.scale;
            else if constexpr (Format::SCALE_BYTES == 64)
                reinterpret_cast<u16*>(scales)[lane] = u16(share.scale);
            else if constexpr (Format::SCALE_BYTES > 0)
                scales[lane] = u8(share.scale);
            if constexpr (Format::GROUP_BYTES > 0)
                if (t % Format::GROUP_TILES == 0 && in_group(lane)) *group_at(groups, t, lane) = u16(share.group);
        };
        auto repack_span = [&](int, int t, int at) {
            LaneShare<Format> shares[SPAN_TILES] = {};
            gather<Format>(shares, rows[0] + at, rows[1] + at, lane);
#pragma unroll
            for (int part = 0; part < SPAN_TILES; part++) put_tile(shares[part], t + part);
        };
        // Without a test for each span some are worked on at once, which saves up to a sixth of the time.
        if (run.tiles == RUN)
            for_spans<true>(run, repack_span);
        else
            for_spans<false, 1>(run, repack_span);
        if (number++ == last) break;
    }
    if constexpr (WHOLE_ROWS) {
        constexpr int OTHER = GROUPED ? 2 : 1;  // the lane that has the rest of the row's
        row_peak = max(row_peak, __shfl_xor_sync(~0u, row_peak, OTHER));
        if (!(lane & OTHER)) atomicMax(&row_peaks[g + row8_of(lane) * 8], row_peak);
        __syncthreads();
        Lift<Format, THREADS>::run(GROUPED ? row_groups : row_scales, scale + row_tile_first * Format::SCALE_BYTES,
                                   group + row_group_first * Format::GROUP_BYTES, row_peaks, tiles_k, found);
        store_factors<Format>(factors + s64(row_tile) * 8, row_peaks);
    }
    peaks.store(extremes, found + GREATEST);
    if constexpr (Format::SCALING == E8M0) exponents.store(extremes + 2, found + GREATEST_EXPONENT);
}

#else
// Told that one block of a multiprocessor is enough, ptxas takes more registers. It has to for sm_120 alone, where it would spill.
constexpr int LEAST_RESIDENT = __CUDA_ARCH__ >= 1200 ? 1 : 0;

// `offset`: what has been added to scales that are exponents.
extern "C" __global__ void __launch_bounds__(THREADS, LEAST_RESIDENT)
from_fragments(u8* storage, int N, int blocks, const u8* low, const u8* high, const u8* scale, u8* group,
               const u32* factors, int offset) {
    __shared__ __align__(16) u8 shared[IMAGE];
    const int lane = threadIdx.x % WARP, g = lane / 4;
    const u32 tiles_k = tiles_along(blocks), runs = runs_of(tiles_k);
    const Run run = run_at(blockIdx.x / runs, blockIdx.x % runs, tiles_k, N, blocks);
    u8* const rows[2] = {shared + g * PITCH + begin_of(storage, run, g),
                         shared + (g + 8) * PITCH + begin_of(storage, run, g + 8)};
    int L = 0;
    if constexpr (ROW_FACTORS<Format>)
        L = lift_by<Format>(factors[run.row_tile * 8 + g] >> row8_of(lane) * 16 & 0xffff, row8_of(lane));
    LaneShare<Format> shares[OWN_SPANS][SPAN_TILES] = {};  // all on their way at once
    auto take_tile = [&](LaneShare<Format>& share, int t) {
        const s64 tile = run.first_tile + t;
        load_low(share, low + tile * Format::LOW_BYTES, lane);
#pragma unroll
        for (int w = 0; w < Format::HIGH_BYTES / 128; w++)
            share.high[w] = reinterpret_cast<const u32*>(high + tile * Format::HIGH_BYTES)[w * 32 + lane];
        const u8* scales = scale + tile * Format::SCALE_BYTES;
        if constexpr (Format::SCALE_BYTES == 128)
            share.scale = reinterpret_cast<const u32*>(scales)[lane];
        else if constexpr (Format::SCALE_BYTES == 64)
            share.scale = reinterpret_cast<const u16*>(scales)[lane];
        else if constexpr (Format::SCALE_BYTES > 0)
            share.scale = scales[lane];
        if constexpr (Format::GROUP_BYTES > 0)
            if (in_group(lane)) share.group = *group_at(group + run.first_group * Format::GROUP_BYTES, t, lane);
    };
    for_spans<false>(run, [&](int own, int t, int) {
#pragma unroll
        for (int part = 0; part < SPAN_TILES; part++) take_tile(shares[own][part], t + part);
    });
    for_spans<false>(run, [&](int own, int, int at) {
#pragma unroll
        for (int part = 0; part < SPAN_TILES; part++) {
            LaneShare<Format>& share = shares[own][part];
            if constexpr (ROW_FACTORS<Format> && GROUPED)
                share.group = lifted_group<Format>(share.group, L, row8_of(lane), has_minimum(lane), -1);
            else if constexpr (ROW_FACTORS<Format>)
                share.scale = lifted<Format>(share.scale, L, row8_of(lane), -1);
            if constexpr (Format::SCALING == E8M0) share.scale -= offset;
        }
        scatter<Format>(shares[own], rows[0] + at, rows[1] + at, lane);
    });
    __syncthreads();
    const int r = threadIdx.x / ROW_THREADS, k = threadIdx.x % ROW_THREADS;
    const Row row = row_of(storage, run, r);
    u8* const to = storage + row.at;
    const u8* const image = shared + r * PITCH;
    for_edges(row, k, [&](int at, bool exists) {
        if (exists) copy_unit(to + at, image + at);
    });
    const int last = row.end / 16;
#pragma unroll
    for (int word = k; word < PITCH / 16; word += ROW_THREADS)
        if (word < last && word * 16 >= row.begin)
            reinterpret_cast<uint4*>(to)[word] = reinterpret_cast<const uint4*>(image)[word];
}
#endif

// Who computes which output tiles, and which of their columns (wgmma core).
#pragma once
#include "warpgroup.cuh"

#if __CUDA_ARCH__ == 900
// Columns [begin, end), in steps of 64, of the output tile at row tile `first_row` of W and batch row `first_m`. Sums of
// columns that do not begin with the first are left in place `slot`; of an output tile whose last columns others have,
// the sums of these will be in `parts` places from there on. Of a grouped product, whose works are the batch tiles, rows
// end before `end_m`.
struct Segment {
    int first_row, first_m, end_m, matrix, begin, end, slot, parts;
};

// The segments of one cluster: output tiles, dealt out round by round. Of the `rest` that the last round has (STREAM) the
// last clusters are the owners, and the first are helpers. Owners give as many of their last columns as make all done at
// the same time. What is given lies one after the other, and helpers have equal shares of it, which are the first thing
// that they do:
//
//      tiles, by owner     |    0    |    1    |    2    | ...
//      shares, by helper   |      0      |      1      | ...
//      places of sums      |    0    | 1 |  2  |    3  | ...     the number of the helper plus that of the tile
template <int WIDTH, bool STREAM>
struct Shares {
    static constexpr int MOST_PARTS = 3;  // helpers for each such tile: what comes from many is added up for long
    int tiles, cluster, clusters;         // tiles: steps of 64 columns
    int whole, pieces, segments;          // output tiles that it has to itself; parts that it helps with; all
    u32 kept;                             // in shared memory, what follows, which is asked for rarely
    int tile, slot, parts, given, from, to;

    // To pass sums on takes as long as `passing` steps.
    DEVICE Shares(int outputs, int rest, int passing, int tiles, int cluster, int clusters)
        : tiles(tiles), cluster(cluster), clusters(clusters), pieces(0), slot(0), parts(0), from(0), to(0) {
        bool owns = false;
        if constexpr (STREAM) {
            const int helpers = min(clusters - rest, MOST_PARTS * rest), owners = clusters - rest;
            given = rest ? uniform((tiles * helpers / (rest + helpers) - passing) / WIDTH) : 0;
            if (given <= 0 || rest * given < helpers) rest = 0;
            outputs -= rest;
            owns = rest && cluster >= owners;
            const int all = rest * given;
            int at = 0;
            if (owns) {
                at = cluster - owners, slot = ((at * given + 1) * helpers - 1) / all;
                parts = ((at + 1) * helpers + rest - 1) / rest - slot;
                slot += at;
            } else if (rest && cluster < helpers) {
                from = all * cluster / helpers, to = all * (cluster + 1) / helpers;
                at = from / given, slot = cluster + at;
                from -= at * given, to -= at * given;
                pieces = uniform((to + given - 1) / given);
            }
            tile = outputs + at;
        }
        whole = outputs <= clusters ? outputs > cluster : uniform((outputs - cluster + clusters - 1) / clusters);
        segments = pieces + whole + owns;
    }

    // By every warp that asks for more, to 32 bytes of its own.
    DEVICE void keep(u32 place) {
        kept = place;
        store_shared(kept, {tile, slot, parts, given});
        store_shared(kept + 16, {from, to, 0, 0});
        __syncwarp();
    }

    // The first place of sums that it is to leave or to get, and in how many it is to get some.
    DEVICE int first_slot() const { return load_shared_int(kept + 4); }
    DEVICE int others() const { return uniform(load_shared_int(kept + 8)); }

    // What `segment_of` makes of segment i's output tile, its columns, and where sums are.
    template <class SegmentOf>
    DEVICE auto find(int i, const SegmentOf& segment_of) const {
        if (STREAM && (i < pieces || i - pieces == whole)) {
            const int4 part = load_shared(kept), share = load_shared(kept + 16);
            const int tile = uniform(part.x), slot = uniform(part.y), parts = uniform(part.z), given = uniform(part.w);
            const int before = tiles - given * WIDTH;
            if (i >= pieces) return segment_of(tile, 0, before, slot, parts);
            const int from = i ? 0 : uniform(share.x), to = min(given, uniform(share.y) - i * given);
            return segment_of(tile + i, before + from * WIDTH, before + to * WIDTH, slot + i, 0);
        }
        return segment_of(cluster + (i - pieces) * clusters, 0, tiles, 0, 0);
    }
};

// Divisions are slow, and nothing is asked for before them: SOON, where there are registers for it, short products do
// without. They have one batch tile of one matrix.
template <int ROW_TILES, int BATCH, int WIDTH, bool STREAM, bool SOON>
struct Schedule {
    int blocks_n, blocks_m;  // of a matrix: row and batch tiles; SOON the latter 0 if there is one, of one matrix
    Shares<WIDTH, STREAM> shares;

    DEVICE Schedule(const Problem& p, int cluster, int clusters)
        : Schedule(p, (p.M + BATCH - 1) / BATCH, int(p.extent[0] * p.extent[1] * p.extent[2]), cluster, clusters) {}

    // Output tiles in bands of 8 batch tiles, so that what runs together shares rows of W and of x in the L2 cache.
    DEVICE Segment operator[](int i) const {
        return shares.find(i, [&](int work, int begin, int end, int slot, int parts) -> Segment {
            if (SOON && blocks_m == 0) return {work * ROW_TILES, 0, 0, 0, begin, end, slot, parts};
            int matrix = work / (blocks_n * blocks_m), within = work % (blocks_n * blocks_m);
            int band = within / (8 * blocks_n), height = min(8, blocks_m - band * 8), rest = within - band * 8 * blocks_n;
            const int first_row = rest / height * ROW_TILES, first_m = (band * 8 + rest % height) * BATCH;
            return {first_row, first_m, 0, matrix, begin, end, slot, parts};
        });
    }

private:
    DEVICE Schedule(const Problem& p, int batch_tiles, int matrices, int cluster, int clusters)
        : blocks_n((p.N + ROW_TILES * 16 - 1) / (ROW_TILES * 16)),
          blocks_m(SOON && batch_tiles * matrices == 1 ? 0 : batch_tiles),
          shares(blocks_n * batch_tiles * matrices, p.streamed, p.passing, (p.K + 63) / 64, cluster, clusters) {}
};

// What the copying warpgroup tells the others, who would all have to work it out: a segment at a time, in places one
// after the other. Segments have a stage or more. While one is stored, its stages being free, all stages may be taken
// for those after it, and one more is told before it waits.
template <int STAGES>
struct Told {
    static constexpr int PLACES = STAGES + 2;
    int4 rows[PLACES], columns[PLACES];

    // By one thread, before it arrives at the barrier of the segment's first stage.
    DEVICE void tell(int i, const Segment& s) {
        rows[i % PLACES] = {s.first_row, s.first_m, s.end_m, s.matrix};
        columns[i % PLACES] = {s.begin, s.end, s.slot, s.parts};
    }

    // Anew each time: the compiler would keep it in registers.
    DEVICE Segment operator[](int i) const {
        const int4 r = load_shared(shared_address(rows + i % PLACES)), c = load_shared(shared_address(columns + i % PLACES));
        return {uniform(r.x), uniform(r.y), uniform(r.z), uniform(r.w),
                uniform(c.x), uniform(c.y), uniform(c.z), uniform(c.w)};
    }
};

template <bool FIRST, class A, class B>
struct Either {
    using Type = A;
};

template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};

// Shared are the last round's tiles, if they are at most p.streamed.
template <int ROW_TILES, int WIDTH, bool STREAM, class P>
struct GroupSchedule {
    const P& p;
    int count;  // of works
    Shares<WIDTH, STREAM> shares;

    DEVICE GroupSchedule(const P& p, int block, int blocks)
        : GroupSchedule(p, uniform(load_work(p.works).count), block, blocks) {}

    // In bands of 8 works: what runs together shares rows of W and of x.
    DEVICE Segment operator[](int i) const {
        return shares.find(i, [&](int at, int begin, int end, int slot, int parts) -> Segment {
            const int band = at / (8 * blocks_n()), rest = at - band * 8 * blocks_n(), height = min(8, count - band * 8);
            const Work work = load_work(p.works + uniform(band * 8 + rest % height));
            const int first_row = uniform(rest / height) * ROW_TILES, first_m = uniform(work.first);
            return {first_row, first_m, uniform(work.first + work.rows), uniform(work.matrix), begin, end, slot, parts};
        });
    }

private:
    DEVICE GroupSchedule(const P& p, int count, int block, int blocks)
        : p(p), count(count),
          shares(blocks_n() * count, rest_of(blocks_n() * count, blocks), p.passing, (p.K + 63) / 64, block, blocks) {}

    DEVICE int blocks_n() const { return (p.N + ROW_TILES * 16 - 1) / (ROW_TILES * 16); }

    DEVICE int rest_of(int outputs, int blocks) const {
        const int rest = outputs % blocks;
        return rest > p.streamed ? 0 : rest;
    }
};
#endif

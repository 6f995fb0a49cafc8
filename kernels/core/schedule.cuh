// Who computes which output tiles, and which of their columns (wgmma core).
#pragma once
#include "warpgroup.cuh"

#if __CUDA_ARCH__ == 900
// Columns [begin, end), in steps of 64, of the output tile at row tile `first_row` of W and batch row `first_m`.
struct Segment {
    int first_row, first_m, matrix, begin, end;
};

// The segments of one cluster: whole tiles, then (STREAM) its share of the last `streamed` ones.
template <int WIDTH, bool STREAM>
struct Shares {
    int tiles;                             // steps of 64 columns
    int cluster, clusters, whole, shared;  // output tiles that this cluster has to itself, and first one that it shares
    int from, to, segments;                // its steps of the shared tiles, the first's beginning being 0

    DEVICE Shares(int outputs, int streamed, int tiles, int cluster, int clusters)
        : tiles(tiles), cluster(cluster), clusters(clusters) {
        if constexpr (STREAM) outputs -= streamed;
        whole = segments = outputs <= clusters ? outputs > cluster : uniform((outputs - cluster + clusters - 1) / clusters);
        if constexpr (STREAM) {
            const u32 steps = streamed * (tiles / WIDTH), share = clusters - 1 - cluster;
            const int first = uniform(steps * share / clusters * WIDTH);
            const int end = uniform(steps * (share + 1) / clusters * WIDTH);
            const int skipped = uniform(first / tiles);
            shared = outputs + skipped, from = first - skipped * tiles, to = end - skipped * tiles;
            segments += uniform((to + tiles - 1) / tiles);
        }
    }

    // What `segment_of` makes of segment i's output tile and columns.
    template <class SegmentOf>
    DEVICE auto find(int i, const SegmentOf& segment_of) const {
        if (!STREAM || i < whole) return segment_of(cluster + i * clusters, 0, tiles);
        const int piece = i - whole;
        return segment_of(shared + piece, piece ? 0 : from, min(tiles, to - piece * tiles));
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
        return shares.find(i, [&](int work, int begin, int end) -> Segment {
            if (SOON && blocks_m == 0) return {work * ROW_TILES, 0, 0, begin, end};
            int matrix = work / (blocks_n * blocks_m), within = work % (blocks_n * blocks_m);
            int band = within / (8 * blocks_n), height = min(8, blocks_m - band * 8), rest = within - band * 8 * blocks_n;
            return {rest / height * ROW_TILES, (band * 8 + rest % height) * BATCH, matrix, begin, end};
        });
    }

private:
    DEVICE Schedule(const Problem& p, int blocks_m, int matrices, int cluster, int clusters)
        : blocks_n((p.N + ROW_TILES * 16 - 1) / (ROW_TILES * 16)), blocks_m(SOON && blocks_m * matrices == 1 ? 0 : blocks_m),
          shares(blocks_n * blocks_m * matrices, p.streamed, (p.K + 63) / 64, cluster, clusters) {}
};

// The same of a grouped product, whose works are the batch tiles; `end_m` is where a segment's end.
struct GroupSegment : Segment {
    int end_m;
};

// What the copying warpgroup tells the others, who would all have to wait for it: a segment at a time, in places one
// after the other. Segments have a stage or more. While one is stored, its stages being free, all stages may be taken
// for those after it, and one more is told before it waits.
template <int STAGES>
struct Told {
    static constexpr int PLACES = STAGES + 2;
    int4 rows[PLACES], columns[PLACES];

    // By one thread, before it arrives at the barrier of the segment's first stage.
    DEVICE void tell(int i, const GroupSegment& s) {
        rows[i % PLACES] = {s.first_row, s.first_m, s.matrix, s.end_m};
        columns[i % PLACES] = {s.begin, s.end, 0, 0};
    }

    // Anew each time: the compiler would keep it in registers.
    DEVICE GroupSegment operator[](int i) const {
        const int4 r = load_shared(rows + i % PLACES), c = load_shared(columns + i % PLACES);
        return {{uniform(r.x), uniform(r.y), uniform(r.z), uniform(c.x), uniform(c.y)}, uniform(r.w)};
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

// Shared out is what is left for up to p.streamed blocks, or so that each has a step.
template <int ROW_TILES, int WIDTH, bool STREAM, class P>
struct GroupSchedule {
    const P& p;
    int count;  // of works
    Shares<WIDTH, STREAM> shares;

    DEVICE GroupSchedule(const P& p, int block, int blocks)
        : GroupSchedule(p, uniform(load_work(p.works).count), block, blocks) {}

    // In bands of 8 works: what runs together shares rows of W and of x.
    DEVICE GroupSegment operator[](int i) const {
        return shares.find(i, [&](int at, int begin, int end) -> GroupSegment {
            const int band = at / (8 * blocks_n()), rest = at - band * 8 * blocks_n(), height = min(8, count - band * 8);
            const Work work = load_work(p.works + uniform(band * 8 + rest % height));
            return {{uniform(rest / height) * ROW_TILES, uniform(work.first), uniform(work.matrix), begin, end},
                    uniform(work.first + work.rows)};
        });
    }

private:
    DEVICE GroupSchedule(const P& p, int count, int block, int blocks)
        : p(p), count(count),
          shares(blocks_n() * count, streamed(blocks_n() * count, blocks), (p.K + 63) / 64, block, blocks) {}

    DEVICE int blocks_n() const { return (p.N + ROW_TILES * 16 - 1) / (ROW_TILES * 16); }

    DEVICE int streamed(int outputs, int blocks) const {
        const int rest = outputs % blocks;
        if (rest > p.streamed) return 0;
        if (outputs >= blocks) return rest ? rest + blocks : 0;
        return outputs * ((p.K + 63) / 64 / WIDTH) >= blocks ? rest : 0;
    }
};
#endif

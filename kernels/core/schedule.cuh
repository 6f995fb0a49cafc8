// Who computes which output tiles, and which of their columns (wgmma core).
#pragma once
#include "warpgroup.cuh"

#if __CUDA_ARCH__ == 900
// Columns [begin, end), in steps of 64, of the output tile at row tile `first_row` of W and batch row `first_m`.
struct Segment {
    int first_row, first_m, matrix, begin, end;
};

// The segments of one cluster: whole tiles, then (STREAM) its share of the last `streamed` ones.
template <int ROW_TILES, int BATCH, int WIDTH, bool STREAM>
struct Schedule {
    int blocks_n, blocks_m, tiles;         // of a matrix: row and batch tiles; steps of 64 columns
    int cluster, clusters, whole, shared;  // output tiles that this cluster has to itself, and first one that it shares
    int from, to, segments;                // its steps of the shared tiles, the first's beginning being 0

    DEVICE Schedule(const Problem& p, int cluster, int clusters) : cluster(cluster), clusters(clusters) {
        blocks_n = (p.N + ROW_TILES * 16 - 1) / (ROW_TILES * 16), blocks_m = (p.M + BATCH - 1) / BATCH;
        tiles = (p.K + 63) / 64;
        int works = blocks_n * blocks_m * int(p.extent[0] * p.extent[1] * p.extent[2]);
        if constexpr (STREAM) works -= p.streamed;
        whole = segments = uniform((works - cluster + clusters - 1) / clusters);
        if constexpr (STREAM) {
            const u32 steps = p.streamed * (tiles / WIDTH), share = clusters - 1 - cluster;
            const int first = uniform(steps * share / clusters * WIDTH);
            const int end = uniform(steps * (share + 1) / clusters * WIDTH);
            const int skipped = uniform(first / tiles);
            shared = works + skipped, from = first - skipped * tiles, to = end - skipped * tiles;
            segments += uniform((to + tiles - 1) / tiles);
        }
    }

    DEVICE Segment operator[](int i) const {
        if (!STREAM || i < whole) return segment(cluster + i * clusters, 0, tiles);
        const int piece = i - whole;
        return segment(shared + piece, piece ? 0 : from, min(tiles, to - piece * tiles));
    }

private:
    // Output tiles in bands of 8 batch tiles, so that what runs together shares rows of W and of x in the L2 cache.
    DEVICE Segment segment(int work, int begin, int end) const {
        int matrix = work / (blocks_n * blocks_m), within = work % (blocks_n * blocks_m);
        int band = within / (8 * blocks_n), height = min(8, blocks_m - band * 8), rest = within - band * 8 * blocks_n;
        return {rest / height * ROW_TILES, (band * 8 + rest % height) * BATCH, matrix, begin, end};
    }
};

// The same of a grouped product, whose works are the batch tiles; `end_m` is where a segment's end.
struct GroupSegment : Segment {
    int end_m;
};

template <bool FIRST, class A, class B>
struct Either {
    using Type = A;
};

template <class A, class B>
struct Either<false, A, B> {
    using Type = B;
};

template <int ROW_TILES>
struct GroupSchedule {
    const Work* works;
    int blocks_n, tiles, count, first, step, segments;

    template <class P>
    DEVICE GroupSchedule(const P& p, int block, int blocks) : works(p.works), first(block), step(blocks) {
        blocks_n = (p.N + ROW_TILES * 16 - 1) / (ROW_TILES * 16), tiles = (p.K + 63) / 64;
        count = uniform(load_work(works).count);
        segments = uniform((blocks_n * count - block + blocks - 1) / blocks);
    }

    // In bands of 8 works: what runs together shares rows of W and of x.
    DEVICE GroupSegment operator[](int i) const {
        const int at = first + i * step, band = at / (8 * blocks_n), rest = at - band * 8 * blocks_n;
        const int height = min(8, count - band * 8);
        const Work work = load_work(works + uniform(band * 8 + rest % height));
        return {{uniform(rest / height) * ROW_TILES, uniform(work.first), uniform(work.matrix), 0, tiles},
                uniform(work.first + work.rows)};
    }
};
#endif

// The product that a kernel computes, y = act(x W^T + bias) + residual, as cuquant/cuda/problem.py packs it.
#pragma once
#include "codec.cuh"

constexpr int BATCH_AXES = 3;

// Whether W's columns may have signs, which products give to x or to W.
template <class F>
constexpr bool SIGNED_COLUMNS = F::SCALING == SINGLE;

struct Problem {
    static constexpr bool GROUPED = false, GATED = false;
    static constexpr int TABLES = 1;
    alignas(64) u64 map[16];  // x as the copy engine reads it (wgmma core), in whole boxes
    u64 rest_map[16];         // what the last box has, if it is not whole
    u64 out_map[16];          // out as it writes it, if results are `straight` and of 16 bits
    const u8 *low, *high, *scale;  // planes of W, all matrices of a stack one after the other in each
    const u16* x;             // rows of K float16 numbers
    const float* unscale;     // per batch row, the power of two that its float16 row was divided by; or null
    void* out;
    const void* bias;      // or null
    const void* residual;  // or null
    float* partials;       // sums that a block leaves for another
    u32* flags;            // whether they are there (wgmma core), or how many are (mma core): zeros between launches
    const u16* values;  // of a codebook
    const u8* group;    // of W's planes the one of groups
    s64 x_row;             // stride of x in elements
    s64 out_row, out_column, residual_row, residual_column;
    // Leading axes, slowest first, padded with ones: extents, and strides in matrices of W, in elements of x, out
    // and residual.
    s64 extent[BATCH_AXES], w_axis[BATCH_AXES], x_axis[BATCH_AXES], out_axis[BATCH_AXES], residual_axis[BATCH_AXES];
    s64 x_row_axis[BATCH_AXES];  // as x_axis, in rows; 0 where x was not converted
    int M, N, K, chunk;          // chunk: tiles of 64 columns that the decode core stages at a time
    int out_dtype, bias_dtype, residual_dtype, activation;
    int bias_stacked;      // bias has a row of N for every matrix of W
    int streamed;          // output tiles that blocks share
    int passing;           // steps of 64 columns that passing their sums on takes (wgmma core); of the mma core `parts_of`
    float factor;          // what sums are multiplied by (`Weight.factor` in problem.py)
    int straight;          // whether scale, bias and one rounding make results, in rows of whole pieces
    const u16* signs;      // or null: of W's columns, [matrix of W][K], the bits that x is changed by (decode core), or the words
                           // that W is (wgmma core: column_signs.cuh); of EXL3 `suh_of` (decode core)
    const u32* rows;       // W's row plane, if its format has one; of EXL3 `svh_of`
};

// How many blocks share each of the tiles that are shared (mma core).
DEVICE int parts_of(const Problem& p) { return p.passing; }

// Float16 factors that an EXL3 matrix has in place of signs and of a row plane: of columns, for x before it is turned, and of
// rows, for sums after they are.
DEVICE const u16* suh_of(const Problem& p) { return p.signs; }
DEVICE const u16* svh_of(const Problem& p) { return reinterpret_cast<const u16*>(p.rows); }

// Some rows of x and out that have one matrix of the stack to themselves; `count` is how many works there are.
struct Work {
    int matrix, first, rows, count;
};

constexpr int NOWHERE = -1;

// Ids [tokens][top_k] of experts, of 64 or 32 bits. A token with an id that is none is lost: it takes part in nothing.
struct Routing {
    const void* ids;
    int wide, tokens, top_k, experts;

    DEVICE int operator()(int token, int slot) const {
        const s64 at = s64(token) * top_k + slot;
        return expert(wide ? static_cast<const s64*>(ids)[at] : static_cast<const int*>(ids)[at]);
    }

    // From the L2 cache, as load_work.
    DEVICE int fresh(int entry) const {
        if (wide) return expert(__ldcg(static_cast<const s64*>(ids) + entry));
        return expert(__ldcg(static_cast<const int*>(ids) + entry));
    }

    DEVICE int expert(s64 id) const { return id < 0 || id >= experts ? NOWHERE : int(id); }

    DEVICE bool lost(int token) const {
        bool lost = false;
        for (int slot = 0; slot < top_k; slot++) lost |= (*this)(token, slot) == NOWHERE;
        return lost;
    }
};

// A product in which the rows of x are sorted by their matrix of W (a mixture of experts): a work at a time. How many
// works there are, only the GPU knows; those beyond have no rows. Results lie in rows of N.
//
// Plain, act(x W^T), times what `residual` has in the same place, float32. Gated, act(x W^T) * (x V^T) at once, where V
// has the format and the shape of W, and of two TABLES a codebook of its own; float32, or (wgmma core) float16 over powers
// of two, levels (levels.cuh).
//
// Without a list of works, for at most a warp's lanes of ids (entries), blocks find their work themselves: rows of out
// are those of the entries, rows of x every `share` entries'.
template <bool GATED_, int TABLES_>
struct Grouped : Problem {
    static constexpr bool GROUPED = true, GATED = GATED_;
    static constexpr int TABLES = TABLES_;
    const Work* works;  // or null
    s64 apart;          // bytes from W to V
    Routing routing;
    int batch, share;  // rows of a work, at most; entries of a row of x
    int early;         // whether the works, or ids, are there before the kernel before this one is done (`begin`)
    int box_steps;     // steps of 64 columns that a copy of x brings: one, or a stage's (wgmma core)
    u8* levels;        // of results of 16 bits (core/levels.cuh)
    const u16* out_signs;    // or null: of their columns, as `signs` has those of x
    const u16* values_of_v;  // V's codebook
    float factor_of_v;       // as `factor`
};
static_assert(sizeof(Grouped<true, 1>) == sizeof(Problem) + 128, "problem.py packs one after the other");

// V's codebook.
template <class P>
DEVICE const u16* values_of_v(const P& p) {
    if constexpr (P::TABLES > 1)
        return p.values_of_v;
    else
        return p.values;
}

// What sums with W, or those with V, are multiplied by.
template <class P>
DEVICE float side_factor_of(const P& p, bool second) {
    if constexpr (P::GATED)
        return second ? p.factor_of_v : p.factor;
    else
        return p.factor;
}

// How many bytes V's planes are beyond W's.
template <class P>
DEVICE s64 apart_of(const P& p) {
    if constexpr (P::GATED)
        return p.apart;
    else
        return 0;
}

// W's planes, or V's.
template <class P>
DEVICE Planes side_of(const P& p, const Planes& w, bool second) {
    if constexpr (P::GATED) {
        const s64 apart = second ? apart_of(p) : 0;
        return {w.low + apart, w.high + apart, w.scale + apart, w.group + apart, w.rows + apart / 4};
    } else {
        return w;
    }
}

// From the L2 cache: what an L1 cache has of it may be older.
DEVICE Work load_work(const Work* work) {
    Work w;
    asm volatile("ld.global.cg.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.matrix), "=r"(w.first), "=r"(w.rows), "=r"(w.count) : "l"(work) : "memory");
    return w;
}

// The batch rows of a block, and the matrix that they are multiplied by.
struct Span {
    int first, end;
    u32 matrix;
};

// Where lanes of a warp have an entry each: `entries` from 0 to the end are the work's. All warps find the same.
template <class P>
DEVICE Span span_of_entries(const P& p, int* entries) {
    const Routing& r = p.routing;
    const int lane = threadIdx.x % WARP, token = lane / r.top_k;
    int id = token < r.tokens ? r.fresh(lane) : NOWHERE;
    const u32 bad = __ballot_sync(~0u, token < r.tokens && id == NOWHERE);
    if (bad & ~0u >> (WARP - r.top_k) << token * r.top_k) id = NOWHERE;
    u32 left = __ballot_sync(~0u, id != NOWHERE);
    for (int work = blockIdx.z; left;) {
        const u32 least = warp_min(left >> lane & 1 ? id : ~0u);
        const u32 mine = __ballot_sync(~0u, id == int(least));
        const int count = __popc(mine), works = (count + p.batch - 1) / p.batch;
        if (work < works) {
            const int at = __popc(mine & ((1u << lane) - 1)) - work * p.batch;
            if (id == int(least) && at >= 0 && at < p.batch) entries[at] = lane;
            __syncwarp();
            return {0, min(p.batch, count - work * p.batch), least};
        }
        work -= works, left &= ~mine;
    }
    return {0, 0, 0};
}

// Blocks along y share the rows; of a grouped product blocks along z have a work each.
template <int BATCH, class P>
DEVICE Span span_of(const P& p, int* entries = nullptr) {
    if constexpr (P::GROUPED) {
        if (entries && !p.works) return span_of_entries(p, entries);
        const Work work = load_work(p.works + blockIdx.z);
        return {work.first, work.first + work.rows, u32(work.matrix)};
    } else {
        return {int(blockIdx.y) * BATCH, p.M, blockIdx.z};
    }
}

// A kernel's beginning, before it asks for W (the rules are in ptx.cuh). A grouped product must know the works first; its
// successor starts only when it has waited, so that this knows them, too.
template <class P>
DEVICE void begin(const P& p) {
    if constexpr (!P::GROUPED)
        let_successor_start();
    else if (!p.early)
        wait_for_predecessor();
}

template <class P>
DEVICE void wait_for_operands() {
    wait_for_predecessor();
    if constexpr (P::GROUPED) let_successor_start();
}

// One matrix product of a batch: the problem with its pointers moved there.
struct Matrix {
    Planes w;
    const u16* x;
    const float* unscale;
    const u16* signs;
    s64 bias, out, residual;  // offsets in elements
    int axis[BATCH_AXES];     // index along each axis that x has, else 0
};

// Indices along the leading axes of the matrix of this number. (By way of these matrix_of would take 60 instructions more.)
DEVICE void indices_of(const Problem& p, u32 matrix, u32 (&index)[BATCH_AXES]) {
#pragma unroll
    for (int axis = BATCH_AXES - 1; axis >= 0; axis--) {
        const u32 extent = u32(p.extent[axis]);
        index[axis] = extent > 1 ? matrix % extent : 0;
        if (extent > 1) matrix /= extent;
    }
}

// The planes of one of W's matrices.
template <class F>
DEVICE Planes planes_of(const Problem& p, s64 w) {
    const s64 tiles = w * ((p.N + 15) / 16) * ((p.K + 63) / 64);
    Planes planes = {p.low + tiles * F::LOW_BYTES, p.high + tiles * F::HIGH_BYTES, p.scale + tiles * F::SCALE_BYTES,
                     p.group, p.rows};
    if constexpr (ROW_FACTORS<F>) planes.rows += w * ((p.N + 15) / 16 * 8);
    if constexpr (F::GROUP_BYTES > 0)
        planes.group += w * ((p.N + 15) / 16) * groups_of<F>((p.K + 63) / 64) * F::GROUP_BYTES;
    return planes;
}

template <class F>
DEVICE Matrix matrix_of(const Problem& p, u32 index) {
    Matrix at;
    s64 w = 0, x = 0, x_rows = 0, out = 0, residual = 0;
#pragma unroll
    for (int axis = BATCH_AXES - 1; axis >= 0; axis--) {
        u32 extent = u32(p.extent[axis]), i = 0;  // 64-bit division is a function call
        if (extent > 1) i = index % extent, index /= extent;
        w += i * p.w_axis[axis], x += i * p.x_axis[axis], x_rows += i * p.x_row_axis[axis];
        out += i * p.out_axis[axis], residual += i * p.residual_axis[axis];
        at.axis[axis] = p.x_axis[axis] ? int(i) : 0;
    }
    at.w = planes_of<F>(p, w);
    at.x = p.x + x, at.unscale = p.unscale ? p.unscale + x_rows : nullptr;
    if constexpr (SIGNED_COLUMNS<F>) at.signs = p.signs ? p.signs + w * p.K : nullptr;
    at.bias = p.bias_stacked ? w * p.N : 0, at.out = out, at.residual = residual;
    return at;
}

// The operands of a matrix, soon: what follows from a matrix's number takes a block of 16 warps 0.4 us, which is a twelfth
// of a short product. Mostly there is but one matrix; and all experts have the same rows of x and of results. It takes
// registers.
template <class F>
DEVICE Matrix matrix_soon(const Problem& p, u32 index) {
    Matrix at = {planes_of<F>(p, 0), p.x, p.unscale, p.signs, 0, 0, 0, {}};
    if (index) at = matrix_of<F>(p, index);
    return at;
}

template <class F, bool GATED, int TABLES>
DEVICE Matrix matrix_soon(const Grouped<GATED, TABLES>& p, u32 index) {
    const u16* signs = nullptr;
    if constexpr (SIGNED_COLUMNS<F>) signs = p.signs ? p.signs + s64(index) * p.K : nullptr;
    return {planes_of<F>(p, index), p.x, p.unscale, signs, 0, 0, 0, {}};
}

// Rows of x on their way to shared memory, by all threads of a block (decode core).
//
// By way of registers: asynchronous copies are waited for in order, behind those of the rings. `wait` is called when a thread
// knows what to ask for, `meanwhile` while pieces are on their way, for as many as it has at once.
#pragma once
#include "problem.cuh"

// From column `first` on, `pieces` of 8 columns of each row, SIGNED with the signs of W's columns, TOGETHER of them at once.
template <bool SIGNED, int THREADS, int TOGETHER, class P, class Row, class Wait, class Meanwhile>
DEVICE void stage_rows(const P& p, const Matrix& at, const Row& x_row, int batch, int first, int pieces, u8* to,
                       int row_bytes, const Wait& wait, const Meanwhile& meanwhile) {
    // Pieces are counted through the rows, one after the other; a division for each would take longer than its load.
    const int rows = THREADS / pieces, rest = THREADS % pieces;
    auto advance = [&](int& m, int& piece) {
        m += rows, piece += rest;
        if (piece >= pieces) m++, piece -= pieces;
    };
    int m = threadIdx.x / pieces, piece = threadIdx.x % pieces;
#pragma unroll 1
    do {
        const u16 *from[TOGETHER], *signs_from[TOGETHER];
        int to_m = m, to_piece = piece;
#pragma unroll
        for (int u = 0; u < TOGETHER; u++, advance(m, piece)) {
            const int column = first + piece * 8;
            const bool exists = m < batch && column < p.K;
            from[u] = exists ? at.x + x_row(m) * p.x_row + column : nullptr;
            signs_from[u] = SIGNED && exists && at.signs ? at.signs + column : nullptr;
        }
        wait();
        uint4 x[TOGETHER], signs[TOGETHER];
#pragma unroll
        for (int u = 0; u < TOGETHER; u++) {
            x[u] = signs[u] = make_uint4(0, 0, 0, 0);
            if (from[u]) x[u] = *reinterpret_cast<const uint4*>(from[u]);
            if (SIGNED && signs_from[u]) signs[u] = *reinterpret_cast<const uint4*>(signs_from[u]);
        }
        meanwhile();
#pragma unroll
        for (int u = 0; u < TOGETHER; u++, advance(to_m, to_piece)) {
            if constexpr (SIGNED) x[u] = flip(x[u], signs[u]);
            if (to_m < batch) *reinterpret_cast<uint4*>(to + to_m * row_bytes + to_piece * 16) = x[u];
        }
    } while (m < batch);
}

// Stages rows from `from` on that follow each other: a thread has ROWS of them at a time, in the same columns, and COLUMNS
// pieces of each, THREADS apart. From one to the next only additions lead. Not done, and false, where few rows are there,
// or threads would ask more often than with as many pieces counted through the rows.
template <bool SIGNED, int THREADS, int ROWS, int COLUMNS, class Wait, class Meanwhile>
DEVICE bool stage_columns(const u16* from, s64 x_row, const u16* signs_from, int batch, int columns, int pieces, u8* to,
                          int row_bytes, const Wait& wait, const Meanwhile& meanwhile) {
    constexpr int AT_ONCE = THREADS * COLUMNS;
    const int asked = (pieces + AT_ONCE - 1) / AT_ONCE * ((batch + ROWS - 1) / ROWS);
    if (batch <= ROWS / 2 || (asked - 1) * ROWS * AT_ONCE >= batch * pieces) return false;
    const int beside = pieces < THREADS ? THREADS / pieces : 1;  // threads that have the same columns
    const int own = pieces < THREADS ? threadIdx.x / pieces : 0, mine = threadIdx.x - own * pieces;
    const int have = own < beside ? batch - own : 0, step = beside * row_bytes;
    s64 on = beside * x_row * 2;
    asm volatile("" : "+l"(on));  // lest it be worked out anew for every row
    from += own * x_row, to += own * row_bytes;
#pragma unroll 1
    for (int piece = mine; piece - mine < pieces; piece += AT_ONCE) {
        const u8* next = reinterpret_cast<const u8*>(from + piece * 8);
        u8* place = to + piece * 16;
#pragma unroll 1
        for (int m = 0; m < batch; m += ROWS * beside) {
            wait();
            uint4 x[ROWS][COLUMNS], signs[COLUMNS];
#pragma unroll
            for (int r = 0; r < ROWS; r++, next += on)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    x[r][c] = make_uint4(0, 0, 0, 0);
                    if (m + r * beside < have && (piece + c * THREADS) * 8 < columns)
                        x[r][c] = *reinterpret_cast<const uint4*>(next + c * THREADS * 16);
                }
#pragma unroll
            for (int c = 0; SIGNED && c < COLUMNS; c++) {
                signs[c] = make_uint4(0, 0, 0, 0);
                const int column = (piece + c * THREADS) * 8;
                if (have > 0 && column < columns && signs_from)
                    signs[c] = *reinterpret_cast<const uint4*>(signs_from + column);
            }
            meanwhile();
#pragma unroll
            for (int r = 0; r < ROWS; r++, place += step)
#pragma unroll
                for (int c = 0; c < COLUMNS; c++) {
                    if constexpr (SIGNED) x[r][c] = flip(x[r][c], signs[c]);
                    if (m + r * beside < have && piece + c * THREADS < pieces)
                        *reinterpret_cast<uint4*>(place + c * THREADS * 16) = x[r][c];
                }
        }
    }
    return true;
}

// Panels (panels.cuh) of a cache of float16 numbers alone, which the copy engine brings as they are multiplied. Its boxes of 64
// tokens and 64 channels of a head are rows of 128 bytes, whose eighths change places with the token.
//
//   memory  -- boxes -->  keys                              -- products -->  scores
//                         values  -- looked through -->             -->      sums
//
// Of the warpgroup of keys a thread asks for boxes, as soon as their places are left, and two warps tell what is known of tokens.
// The warpgroup of values looks for numbers that are not finite, which weights of 0 would not keep from sums. Whose token has some
// becomes zeros, and so do rows behind the last token.
#pragma once
#include "../core/ptx_90.cuh"
#include "panels.cuh"

#if __CUDA_ARCH__ == 900
// CUtensorMaps of keys and of values [tokens of all sequences, heads, DIM].
struct __align__(64) PanelMaps {
    u8 maps[2][128];
};

struct DirectPanels {
    static constexpr int BLOCKS = PANEL / PANEL_ROWS;  // of 64 channels

    const PanelRing& ring;
    const int count, panels;  // of the block's tokens

    DEVICE DirectPanels(const PanelRing& ring, const Share& share)
        : ring(ring), count(max(0, share.cuts[1][0] - share.cuts[0][0])), panels((count + PANEL_TOKENS - 1) / PANEL_TOKENS) {}

    static DEVICE void prefetch_maps(const PanelMaps& maps) { prefetch_map(&maps.maps[0]), prefetch_map(&maps.maps[1]); }

    // By one thread: of tokens from this row of the tensors on.
    DEVICE void copy(const PanelMaps& maps, int row, int head) const {
#pragma unroll 1
        for (int panel = 0; panel < panels; panel++, row += PANEL_TOKENS)
#pragma unroll
            for (int values = 0; values < 2; values++) {
                const u32 barrier = values ? ring.landed(panel) : ring.full(panel);
                barrier_wait(ring.empty(panel, values), ring.parity(panel) ^ 1);
                barrier_expect(barrier, PANEL);
#pragma unroll
                for (int block = 0; block < BLOCKS; block++)
                    copy_box<1>((values ? ring.values(panel) : ring.keys(panel)) + block * PANEL_ROWS, maps.maps[values], barrier,
                                block * 64, row, head, 0, 0);
            }
    }

    // By a thread for each token of a panel: slots of the block's tokens.
    DEVICE void tell(const int* slots, int least_last, int token) const {
        const auto slot_of = [&](int at) { return at >= count ? NO_SLOT : CUQUANT_MASKED ? slots[at] : 0; };
        int slot = slot_of(token);
#pragma unroll 1
        for (int panel = 0; panel < panels; panel++) {
            const int next = slot_of((panel + 1) * PANEL_TOKENS + token);  // on its way while the place is waited for
            barrier_wait(ring.empty(panel, false), ring.parity(panel) ^ 1);
            tell_slot(ring.about(panel), token, slot, least_last);
            barrier_arrive(ring.full(panel), true);
            slot = next;
        }
    }

    // By a warpgroup, two threads for each token.
    DEVICE void look_through(int thread) const {
        constexpr int PIECES = BLOCKS * 4;  // of 16 bytes, in an order for which lanes that are served together meet all banks
        const int token = thread / 2, half = thread % 2;
#pragma unroll 1
        for (int panel = 0; panel < panels; panel++) {
            const u32 row = ring.values(panel) + (BLOCKS == 2 ? half * PANEL_ROWS : 0) + token * 128;
            const auto place = [&](int k) { return row + (k ^ half * 4 ^ token % 8) * 16; };
            barrier_wait(ring.landed(panel), ring.parity(panel));
            u32 zeros = 0;  // or NaN
#pragma unroll
            for (int k = 0; k < PIECES; k++) {
                const int4 v = load_shared(place(k));
                zeros = fma_half2(v.x, 0, zeros), zeros = fma_half2(v.y, 0, zeros);
                zeros = fma_half2(v.z, 0, zeros), zeros = fma_half2(v.w, 0, zeros);
            }
            const bool there = panel * PANEL_TOKENS + token < count;
            const u32 spoils = (zeros | __shfl_xor_sync(~0u, zeros, 1)) & 0x7fff7fff;
            if (spoils || !there)
#pragma unroll
                for (int k = 0; k < PIECES; k++) store_shared(place(k), make_int4(0, 0, 0, 0));
            const u32 scale = __float_as_int(there && spoils ? INFINITE : 1.f), about = ring.about(panel);
            if (half == 0) store_shared_int(about + About::scale(true, token), scale);
            tell_largest_scale(about, thread, scale);
            store_box_fence();  // what warpgroups multiply is read as the copy engine reads
            barrier_arrive(ring.full(panel), true);
        }
    }
};
#endif

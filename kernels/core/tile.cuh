// One 16 x 64 tile of weights in a warp's registers, and its products with a batch of activations.
//
// The weight is operand A, the activations are operand B: C^T [rows of W x batch] = W X^T. With lane = 4 g + i a
// lane holds, of each 16 columns (a step h = 0..3 of the tile), rows g and g + 8 at columns 2i, 2i+1, 2i+8, 2i+9:
//
//     register   row     columns          nibbles of word h     byte of the 8-bit words
//     a0         g       2i,   2i+1       0, 4                  0, 2 of row g's
//     a1         g + 8   2i,   2i+1       1, 5                  0, 2 of row g + 8's
//     a2         g       2i+8, 2i+9       2, 6                  1, 3 of row g's
//     a3         g + 8   2i+8, 2i+9       3, 7                  1, 3 of row g + 8's
//
// One-bit plane: bit 2h + (r & 1) + 8 (r >> 1) + 16 e of the lane's word is element e of register r at step h.
// The same bytes feed integer products, whose columns within 16 then run 2i, 2i+8, 2i+1, 2i+9.
#pragma once
#include "ptx.cuh"

// Where the planes of all tiles start; a tile's share is its number times the plane's bytes per tile.
struct Planes {
    const u8* low;
    const u8* fifth;
    const u8* scale;
};

template <class F>
struct Tile {
    u32 low[F::LOW_BYTES / 128];
    u32 fifth;
    u32 scale[F::SCALE_BYTES / 32];  // rows g and g + 8, two blocks each

    DEVICE void load(const Planes& planes, s64 tile, int lane) {
#pragma unroll
        for (int part = 0; part < F::LOW_BYTES / 512; part++) {
            uint4 v = load_stream(reinterpret_cast<const uint4*>(planes.low + tile * F::LOW_BYTES + part * 512) + lane);
            low[part * 4 + 0] = v.x, low[part * 4 + 1] = v.y, low[part * 4 + 2] = v.z, low[part * 4 + 3] = v.w;
        }
        if constexpr (F::HAS_FIFTH) fifth = __ldg(reinterpret_cast<const u32*>(planes.fifth + tile * 128) + lane);
        if constexpr (F::HAS_MIN) {
            uint4 v = __ldg(reinterpret_cast<const uint4*>(planes.scale + tile * 128) + lane / 4);
            scale[0] = v.x, scale[1] = v.y, scale[2] = v.z, scale[3] = v.w;
        } else {
            uint2 v = __ldg(reinterpret_cast<const uint2*>(planes.scale + tile * 64) + lane / 4);
            scale[0] = v.x, scale[1] = v.y;
        }
    }

    // Operand A of step h in float16: the codes less their offset, exact. A code q under the bits of 1024 reads
    // as the float16 number 1024 + q.
    DEVICE void to_half(int h, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if constexpr (F::BITS == 8) {
                u32 word = low[(h >> 1) * 4 + (h & 1) * 2 + (r & 1)] ^ 0x80808080;  // signed to offset 128
                a[r] = sub_half2(__byte_perm(word, 0x64646464, r < 2 ? 0x4240 : 0x4341), 0x64806480);
            } else {
                u32 bits = and_or(low[h] >> 4 * r, 0x000f000f, 0x64006400);
                if constexpr (F::HAS_FIFTH) {
                    int at = 2 * h + (r & 1) + 8 * (r >> 1);  // moved to bit 4
                    bits = and_or(at < 4 ? fifth << (4 - at) : fifth >> (at - 4), 0x00100010, bits);
                }
                a[r] = sub_half2(bits, 0x64006400 + F::OFFSET * 0x00010001);
            }
        }
    }

    // Operand A of block b (steps 2b and 2b + 1) in bytes: the codes as stored, without their offset.
    DEVICE void to_int8(int b, u32 (&a)[4]) const {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            if constexpr (F::BITS == 8) {
                a[r] = low[b * 4 + r];
            } else {
                int h = 2 * b + (r >> 1);
                a[r] = low[h] >> 4 * (r & 1) & 0x0f0f0f0f;
                if constexpr (F::HAS_FIFTH) a[r] |= (fifth >> (2 * h + (r & 1)) & 0x01010101) << 4;
            }
        }
    }

    // Scale d of block b; row8 = 1 for row g + 8.
    DEVICE float d(int b, int row8) const {
        u32 bits = F::HAS_MIN ? scale[row8 * 2 + b] : scale[row8] >> 16 * b;
        return half_to_float(u16(bits));
    }

    // Minimum m of block b, in formats that have one.
    DEVICE float m(int b, int row8) const { return half_to_float(u16(scale[F::HAS_MIN ? row8 * 2 + b : 0] >> 16)); }
};

// Accumulators of one row tile: element (row g, batch 2i), (g, 2i+1), (g+8, 2i), (g+8, 2i+1) of each batch group.
template <int GROUPS>
using Accumulators = float[GROUPS][4];

// Products with float16 activations. The tile's scales multiply float32 sums over 32 columns, so weights enter
// as exact integers whatever the magnitude of the scales.
template <int GROUPS>
struct HalfBatch {
    static constexpr int ELEMENT_BYTES = 2;
    u32 b[GROUPS][4];   // columns 0-7, 8-15, 16-23, 24-31 of the block
    float sums[GROUPS][2];  // of batch rows 2i, 2i+1 over the block; used with minimums only

    // Bytes from a batch row's start at which a lane's share of a load begins: matrix l / 8 is 8 columns.
    static DEVICE int lane_offset(int lane) { return lane / 8 * 16; }

    // One block; `row(group)` is the shared address of this lane's batch row in the tile.
    template <class Rows>
    DEVICE void load(const Rows& row, const float4*, int block, int) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) load_matrices(b[group], row(group) + block * 64);
    }

    // Sums over the block's columns, by a product with ones: every row of the result is the sum.
    DEVICE void add_up() {
        const u32 ones[4] = {0x3c003c00, 0x3c003c00, 0x3c003c00, 0x3c003c00};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            float c[4] = {0, 0, 0, 0};
            mma_half(c, ones, b[group][0], b[group][1]);
            mma_half(c, ones, b[group][2], b[group][3]);
            sums[group][0] = c[0], sums[group][1] = c[1];
        }
    }

    template <class F>
    DEVICE void multiply(Accumulators<GROUPS>& acc, const Tile<F>& tile, int block) const {
        u32 a0[4], a1[4];
        tile.to_half(2 * block, a0);
        tile.to_half(2 * block + 1, a1);
        const float d[2] = {tile.d(block, 0), tile.d(block, 1)};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            float c[4] = {0, 0, 0, 0};
            mma_half(c, a0, b[group][0], b[group][1]);
            mma_half(c, a1, b[group][2], b[group][3]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                acc[group][j] += d[j >> 1] * c[j];
                if constexpr (F::HAS_MIN) acc[group][j] += tile.m(block, j >> 1) * sums[group][j & 1];
            }
        }
    }
};

#if __CUDA_ARCH__ >= 800
// Products with 8-bit activations: exact integer sums over 32 columns, then both scales. Where the weight's codes
// have an offset or a minimum, it multiplies the activations' own sum, d * sum(q).
template <int GROUPS>
struct Int8Batch {
    static constexpr int ELEMENT_BYTES = 1;
    u32 b[GROUPS][2];
    float4 scale[GROUPS];  // d and d * sum(q) of batch row 2i, then of 2i + 1

    static DEVICE int lane_offset(int lane) { return lane / 8 % 2 * 16; }

    // One block; `scales` are the block's, of the whole batch.
    template <class Rows>
    DEVICE void load(const Rows& row, const float4* scales, int block, int lane) {
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                         : "=r"(b[group][0]), "=r"(b[group][1]) : "r"(row(group) + block * 32));
            scale[group] = __ldg(scales + group * 4 + lane % 4);
        }
    }

    DEVICE void add_up() {}

    template <class F>
    DEVICE void multiply(Accumulators<GROUPS>& acc, const Tile<F>& tile, int block) const {
        u32 a[4];
        tile.to_int8(block, a);
        const float d[2] = {tile.d(block, 0), tile.d(block, 1)};
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            int c[4] = {0, 0, 0, 0};
            mma_int8(c, a, b[group][0], b[group][1]);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float da = j & 1 ? scale[group].z : scale[group].x, sum = j & 1 ? scale[group].w : scale[group].y;
                if constexpr (F::HAS_MIN)
                    acc[group][j] += d[j >> 1] * (da * float(c[j])) + tile.m(block, j >> 1) * sum;
                else
                    acc[group][j] += d[j >> 1] * (da * float(c[j]) - F::OFFSET * sum);
            }
        }
    }
};
#endif

// EXL3: W^T = diag(suh) H V H diag(svh), of which tiles of 16 x 16 numbers of V are rings of steps (core/procedure.cuh).
//
// Storage of a matrix is one record: rings of BITS * 8 words each, the highest bit first, [K / 16][N / 16] | suh, float16
// [K] | svh, float16 [N]. K and N are multiples of 128, the side of H.
//
// The fragment layout has V alone: activations are multiplied by suh and turned before a product (ops/exl3.cu), results
// turned and multiplied by svh after it (there, too) or in its end (core/results.cuh).
#pragma once
#include "../core/procedure.cuh"
#include "../core/turned.cuh"

template <int BITS_, Generator GENERATOR_>
struct Exl3Tile : Ungrouped {
    static constexpr int BITS = BITS_, BLOCK_BYTES = 32 * BITS;  // of a ring
    static constexpr Generator GENERATOR = GENERATOR_;
    static constexpr Coding CODING = PROCEDURE;
    static constexpr Scaling SCALING = UNSCALED;
    static constexpr bool HAS_MIN = false;

    // Bytes of a 16 x 64 tile in each plane of the fragment layout.
    static constexpr int LOW_BYTES = BITS < 2 ? 128 : BITS < 4 ? 256 : BITS < 8 ? 512 : 1024, HIGH_BYTES = BITS * 128 - LOW_BYTES;
    static constexpr int SCALE_BYTES = 0;
};

// Where the bits of an E2M1 code are in half a word of the fragment layout (core/e2m1.cuh).
#pragma once
#include "share.cuh"

DEVICE int e2m1_sign_at(int r) { return r == 0 ? 15 : r == 1 ? 12 : r == 2 ? 14 : 13; }

DEVICE u32 place_e2m1(u32 code, int r) { return (code & 7) << (9 - 3 * r) | (code >> 3) << e2m1_sign_at(r); }

DEVICE u32 e2m1_at(u32 word, int r) { return (word >> (9 - 3 * r) & 7) | (word >> e2m1_sign_at(r) & 1) << 3; }

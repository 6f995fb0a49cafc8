// Where the bits of E2M1 codes are in a word of the fragment layout (core/e2m1.cuh): its halves have four places each. Two
// codes at a time, from bit 0 of the halves on.
#pragma once
#include "share.cuh"

DEVICE int e2m1_sign_at(int r) { return r == 0 ? 15 : r == 1 ? 12 : r == 2 ? 14 : 13; }

DEVICE u32 place_e2m1(u32 two, int r) {
    return (two & 0x00070007) << (9 - 3 * r) | (two & 0x00080008) << (e2m1_sign_at(r) - 3);
}

DEVICE u32 e2m1_at(u32 word, int r) {
    return (word >> (9 - 3 * r) & 0x00070007) | (word >> (e2m1_sign_at(r) - 3) & 0x00080008);
}

// Two bytes to bytes 0 and 2 of a word, and back.
DEVICE u32 bytes_to_halves(const u8* p) { return p[0] | p[1] << 16; }

DEVICE void halves_to_bytes(u8* p, u32 two) { p[0] = u8(two), p[1] = u8(two >> 16); }

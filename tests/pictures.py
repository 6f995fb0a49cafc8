"""Words of the fragment layout from the picture in kernels/core/places.cuh."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PICTURES = {
    2: ["D d B b C c A a"],
    3: ["D1:0 c0 B0 b0 A0 a0", "D1:1 c1 B1 b1 A1 a1", "D1:2 C1 D0 d1 C0 d0"],
    4: ["B b A a", "D d C c"],
    5: ["D1:0 b0 A0 a0", "D1:1 C0 B0 c0", "D1:2 b1 A1 a1", "D1:3 C1 B1 c1", "D1:4 d1 D0 d0"],
    6: ["A d:3-0 a", "B D:5-2 b", "C d:5-4 D:1-0 c"],
}
"""Of a half of every word, from the highest bit on: codes, of which a word may have some bits. a and b are
the columns of a block's first step, c and d of its second one, b and d those eight further on; upper case is
row g + 8. Behind the letter is the block; without, words are those of each block, one after the other (of 6
bits the first two, and after both blocks' the third)."""


def lane_words(bits: int, codes: NDArray[Any], lane: int) -> list[int]:
    """Words of a lane, those of the low plane first, of a tile's codes [16, 64]."""
    g, i = divmod(lane, 4)
    pictures = PICTURES[bits]
    if bits in (2, 4):
        pictures = [of_block(picture, b) for b in (0, 1) for picture in pictures]
    elif bits == 6:
        first = [of_block(picture, b) for b in (0, 1) for picture in pictures[:2]]
        pictures = first + [of_block(pictures[2], b) for b in (0, 1)]
    words = []
    for picture in pictures:
        word = 0
        for e in (0, 1):
            half = ""
            for token in picture.split():
                name, _, part = token.partition(":")
                n, block = "abcd".index(name[0].lower()), int(name[1])
                row, column = g + 8 * name[0].isupper(), 32 * block + 16 * (n // 2) + 8 * (n % 2) + 2 * i + e
                code = f"{int(codes[row, column]):0{bits}b}"  # the highest bit first
                top, _, bottom = part.partition("-")
                half += code[bits - 1 - int(top) : bits - int(bottom or top)] if part else code
            assert len(half) == 16
            word |= int(half, 2) << 16 * e
        words.append(word)
    return words


def of_block(picture: str, block: int) -> str:
    return " ".join(token[0] + str(block) + token[1:] for token in picture.split())


def assert_pictured(bits: int, codes: NDArray[Any], low: NDArray[Any], high: NDArray[Any]) -> None:
    """That the planes' bytes of a tile, of codes [16, 64], are those of the picture."""
    plane = low.view(np.uint32)
    own = plane.reshape(-1, 32).T if bits < 4 else plane.reshape(32, -1)
    words = np.concatenate([own, high.view(np.uint32).reshape(-1, 32).T], axis=1)
    for lane in range(32):
        assert [int(word) for word in words[lane]] == lane_words(bits, codes, lane), lane

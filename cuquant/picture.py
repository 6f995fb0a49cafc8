"""What all plots have in common; it needs matplotlib."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#6a51a3", "#7f6000")
"""Colours of lines in order; told apart by colour-blind people too."""


class Picture(Figure):
    """A figure that a notebook shows wherever it came from."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()

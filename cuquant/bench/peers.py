"""Other libraries' products with 4-bit weights in groups of 32: torch's tinygemm, gemlite; where installed.

A weight is the same for all of them: codes 0..15, a scale and a zero point per group of 32 along K,
W = (code - zero) * scale: 5 bits per weight with 16-bit scales and zero points. None of these libraries is a
dependency: a peer that is missing, or that does not take a shape, has no time.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

from .. import device
from ..testing import nmse
from .timing import captured_us, rotation

GROUP = 32
BITS = 4
"""Formats of as many bits per code are compared with the peers."""
BITS_PER_WEIGHT = BITS + 2 * 16 / GROUP
WRONG = 1e-4
"""NMSE beyond which a result is wrong; rounding weights and results to bfloat16 costs 1e-5."""
CHECKED_COLUMNS = 64

Product = Callable[[Any], Any]
"""x (M, K) to x @ W.T (M, N), torch tensors on the GPU."""


class Int4(NamedTuple):
    """A weight (N, K): codes uint8 (N, K); scales and integer zero points (N, K / GROUP), both float32."""

    codes: Any
    scales: Any
    zeros: Any

    def rows(self, index: Any) -> Any:
        """Rows of the dequantized weight, float64."""
        scales, zeros = (a[index].double().repeat_interleave(GROUP, dim=1) for a in (self.scales, self.zeros))
        return (self.codes[index].double() - zeros) * scales


class Peer(ABC):
    """A library's product: how it takes its weight, and which shapes it takes."""

    name: ClassVar[str]
    package: ClassVar[str]
    """The distribution and module that it is in."""
    dtype: ClassVar[str]
    """Dtype of x, of the result and of the scales."""
    multiple: ClassVar[tuple[int, int]]
    """Numbers that N and K must be multiples of."""

    @property
    def key(self) -> str:
        """The key of its time in a record's cell."""
        return f"{self.name}_us"

    @abstractmethod
    def product(self, w: Int4) -> Product:
        """The product with one weight, packed."""


class Tinygemm(Peer):
    """torch's own int4 product (2.5 or later): bfloat16, W = (code - 8) * scale + offset."""

    name, package, dtype = "tinygemm", "torch", "bfloat16"
    multiple = (8, 128)
    INNER_TILES = 8

    def product(self, w: Int4) -> Product:
        import torch

        pairs = (w.codes[:, ::2] << 4 | w.codes[:, 1::2]).contiguous()
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, self.INNER_TILES)
        offsets = (8 - w.zeros) * w.scales
        groups = torch.stack([w.scales.T, offsets.T], dim=-1).to(torch.bfloat16).contiguous()
        return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, groups)


class Gemlite(Peer):
    """gemlite's Triton kernels, as it tunes them by default: float16."""

    name, package, dtype = "gemlite", "gemlite", "float16"
    multiple = (32, 32)

    def product(self, w: Int4) -> Product:
        import torch
        from gemlite.core import DType, GemLiteLinear

        n, k = w.codes.shape
        linear = GemLiteLinear(
            BITS,
            group_size=GROUP,
            in_features=k,
            out_features=n,
            input_dtype=DType.FP16,
            output_dtype=DType.FP16,
        )
        linear.pack(w.codes, w.scales.to(torch.float16), w.zeros.to(torch.float16), None)
        result: Product = linear
        return result


PEERS: dict[str, Peer] = {peer.name: peer for peer in (Tinygemm(), Gemlite())}


def installed(names: Iterable[str] | None = None) -> list[Peer]:
    """The named peers, or those whose package is here. Nothing is imported; ValueError for a missing one."""
    here = [peer for peer in PEERS.values() if find_spec(peer.package)]
    if names is None:
        return here
    wanted = [PEERS[name] for name in names]
    for peer in wanted:
        if peer not in here:
            raise ValueError(f"{peer.name} is not installed: it is in the package {peer.package}")
    return wanted


def measure(peer: Peer, n: int, k: int, batches: Sequence[int]) -> dict[int, float]:
    """Microseconds of x @ W.T by rows of x, for a weight (n, k).

    Weights are rotated past the L2 cache, the calls captured and replayed, as for this library's own. A shape
    that the peer does not take has no times; what fails, or computes something else, has none and a warning.
    """
    times: dict[int, float] = {}
    if n % peer.multiple[0] or k % peer.multiple[1]:
        return times
    try:
        with torch_on_gpu() as torch:
            products = []
            for _ in range(rotation(int(n * k * BITS_PER_WEIGHT / 8))):
                w = _random(torch, peer, n, k)
                products.append(peer.product(w))
            for m in batches:
                x = torch.randn(m, k, device="cuda").to(getattr(torch, peer.dtype))
                _check(torch, products[-1], w, x)
                times[m] = graph_us(torch, [lambda p=p, x=x: p(x) for p in products])  # type: ignore[misc]
    except Exception as error:  # whatever another library raises must not end a run of hours
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        found = f"{len(times)} of {len(batches)} times"
        warnings.warn(f"{peer.name}, {n}x{k}: {found}: {reason}", stacklevel=2)
    return times


@contextmanager
def torch_on_gpu() -> Iterator[Any]:
    """torch on CuPy's current GPU; the memory that it keeps is given back at the end."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("this torch has no CUDA")
    with torch.cuda.device(device.cupy().cuda.Device().id):
        try:
            yield torch
        finally:
            torch.cuda.empty_cache()


def _random(torch: Any, peer: Peer, n: int, k: int) -> Int4:
    """A random weight: scales of the peer's type, and zero points such that (8 - zero) * scale is too,
    exactly."""
    groups = (n, k // GROUP)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
    scales = torch.rand(groups, device="cuda") * 0.004 + 0.002
    zeros = torch.randint(6, 10, groups, device="cuda").float()
    return Int4(codes, scales.to(getattr(torch, peer.dtype)).float(), zeros)


def _check(torch: Any, product: Product, w: Int4, x: Any) -> None:
    """RuntimeError unless the product is x @ W.T, in float64 over random columns and all rows."""
    columns = torch.randperm(w.codes.shape[0], device="cuda")[:CHECKED_COLUMNS]
    y, reference = product(x)[:, columns], x.double() @ w.rows(columns).T
    error = nmse(*(a.double().cpu().numpy() for a in (y, reference)))
    if not error <= WRONG:
        raise RuntimeError(f"wrong result for {x.shape[0]} rows of x: NMSE {error:.3g}")


def graph_us(torch: Any, calls: list[Callable[[], Any]]) -> float:
    """Microseconds of a call as `timing.graph_us`, by torch's own capture, which its allocator knows of."""
    stream = device.cupy().cuda.Stream(non_blocking=True)
    theirs = torch.cuda.ExternalStream(stream.ptr)
    with torch.cuda.stream(theirs):
        for call in calls:  # compile, tune
            call()
        stream.synchronize()

        def captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=theirs):
                for call in calls:
                    call()
            replay: Callable[[], Any] = graph.replay
            return replay

        return captured_us(stream, captured, calls)

"""Compile a kernel on first use, and launch it.

CuPy compiles through NVRTC and keeps the result on disk; here a kernel is compiled once per process and
device, also when threads ask for it together. Launches go to the CUDA driver itself: it has clusters of
blocks and launches that overlap their predecessor, which CuPy's launch lacks, and a prepared one costs the
host a few microseconds less.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .. import device
from ..plan import Gpu, Kernel, Plan
from ..plan.tuning import Tuned
from . import sources, streams

Item = TypeVar("Item")
Result = TypeVar("Result")

_functions: dict[tuple[int, Kernel], Any] = {}
_modules: dict[tuple[Any, ...], Any] = {}
_lock, _disk_lock = threading.Lock(), threading.Lock()
_IN_TURN = {"activations", "exl3", "gemm", "moe", "moe_exl3", "attention"}
"""Files whose kernels run one after the other: none of them divides L1 caches anew."""
_CLUSTER_DIMENSION, _PROGRAMMATIC_SERIALIZATION = 4, 6


class KernelError(RuntimeError):
    """A kernel did not compile; the message has its name, its options and the compiler's log."""


def launch(plan: Plan, *arguments: Any) -> None:
    """Start a plan's kernel on the current device and stream. Arguments are arrays, NumPy scalars, and bytes
    of structs, behind what their alignment needs."""
    members = [_packed(argument) for argument in arguments]
    packing, offsets = layout(tuple(code for code, _ in members))
    launch_packed(plan, packing.pack(*(value for _, value in members)), offsets)


def launch_packed(plan: Plan, arguments: bytes | bytearray, offsets: tuple[int, ...] = (0,)) -> None:
    """Start a plan's kernel with the arguments as the kernel finds them in memory, each at its offset."""
    stream = streams.current()
    own = prepared(device.cupy().cuda.runtime.getDevice(), plan, len(arguments), offsets)
    own.arguments[:] = arguments
    own(*stream)


def prepared(device_id: int, plan: Plan, size: int, offsets: tuple[int, ...] = (0,)) -> _Launch:
    """What starts a plan's kernel, on a stream that it may overlap its predecessor on or not
    (`streams.current`), with so many bytes of `arguments` at these offsets, which are to be written right
    before. Only the thread that asks may use it, and who asks next for an equal plan has the same."""
    known = _prepared.known
    key = device_id, id(plan), size, offsets
    found = known.get(key)
    if found is None:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        launch = _prepared.launch(device_id, plan, size, offsets)
        found = known[key] = launch, plan  # the plan, so that no other has its id
    return found[0]


class Call(NamedTuple):
    """A launch whose arguments are known but for addresses: the first of them, and those behind `numbers`."""

    plan: Plan
    packing: struct.Struct
    offsets: tuple[int, ...]
    numbers: tuple[int, ...]
    last: tuple[int, ...]

    def __call__(self, first: int, *addresses: int) -> None:
        packed = self.packing.pack(first, *self.numbers, *addresses, *self.last)
        launch_packed(self.plan, packed, self.offsets)


def call(plan: Plan, codes: str, numbers: tuple[int, ...], last: tuple[int, ...] = ()) -> Call:
    """A launch with arguments of these types, as `struct` has them."""
    return Call(plan, *layout(tuple(codes)), numbers, last)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class _Launch:
    """One thread's launch of a plan on a device: everything but the stream and the arguments is filled in."""

    def __init__(self, device_id: int, plan: Plan, size: int, offsets: tuple[int, ...]) -> None:
        self._function = ctypes.c_void_p(_function(device_id, plan.kernel).kernel.ptr)
        self._buffer = ctypes.create_string_buffer(size)
        self.arguments = memoryview(self._buffer).cast("B")
        attributes = (_Attribute * 2)()
        count = 0
        if plan.cluster > 1:
            attributes[0].id, count = _CLUSTER_DIMENSION, 1
            attributes[0].value[:3] = plan.cluster, 1, 1
        self._counts = count, count
        if plan.overlaps and _capability(device_id) >= 90:
            attributes[count].id = _PROGRAMMATIC_SERIALIZATION
            attributes[count].value[0] = 1
            self._counts = count, count + 1
        self._overlaps = True
        self._config = _Config(plan.grid, (plan.block, 1, 1), plan.shared, None, attributes, self._counts[1])
        start = ctypes.addressof(self._buffer)
        self._arguments = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
        self._call = (ctypes.byref(self._config), self._function, self._arguments, None)
        self._start = device.driver().cuLaunchKernelEx

    def __call__(self, stream: int, overlaps: bool) -> None:
        self._config.stream = stream
        if overlaps is not self._overlaps:
            self._overlaps, self._config.count = overlaps, self._counts[overlaps]
        status = self._start(*self._call)
        if status:
            device.once_more(status, self._start, *self._call)


class _Prepared(threading.local):
    """Launches of this thread: the driver reads their memory while the interpreter may run another thread."""

    def __init__(self) -> None:
        self.launch = lru_cache(maxsize=1024)(_Launch)
        self.known: dict[tuple[int, int, int, tuple[int, ...]], tuple[_Launch, Plan]] = {}
        """Launches by the plans' identities, which are found sooner: many plans are equal."""


_prepared = _Prepared()
_MOST_KNOWN = 8192
"""Plans of a thread; then it starts anew."""


def encode_map(
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzled: bool = True,
) -> bytes:
    """A CUtensorMap of float16 numbers, fastest axis first: strides in bytes of all axes but the first.

    The copy engine writes boxes of it in rows of 128 bytes, swizzled, or as they are, with zeros beyond the
    dims.
    """
    rank = len(dims)
    result = (ctypes.c_uint64 * 32)()
    start = (-ctypes.addressof(result)) % 64  # the driver wants 64-byte alignment
    encode = device.driver().cuTensorMapEncodeTiled
    given = (
        ctypes.c_void_p(ctypes.addressof(result) + start),
        6,  # CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        0,  # no interleave
        3 if swizzled else 0,  # CU_TENSOR_MAP_SWIZZLE_128B
        2,  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
        0,  # zeros outside
    )
    status = encode(*given)
    if status:
        device.once_more(status, encode, *given)
    return bytes(result)[start : start + 128]


def _packed(argument: Any) -> tuple[str, Any]:
    """A scalar of its own type, a struct's bytes, or the address of an array or None."""
    if isinstance(argument, bytes):
        return f"{len(argument)}s", argument
    if isinstance(argument, np.generic):
        return argument.dtype.char, argument.item()
    return "Q", 0 if argument is None else argument.data.ptr


@cache
def layout(codes: tuple[str, ...]) -> tuple[struct.Struct, tuple[int, ...]]:
    """A C struct of these members, and their offsets."""
    ends = (struct.calcsize("@" + "".join(codes[: i + 1])) for i in range(len(codes)))
    offsets = tuple(end - struct.calcsize(code) for end, code in zip(ends, codes, strict=True))
    return struct.Struct("@" + "".join(codes)), offsets


@cache
def _capability(device_id: int) -> int:
    return int(device.cupy().cuda.Device(device_id).compute_capability)


def capability() -> int:
    """Compute capability of the current device: 90 for sm_90."""
    return _capability(device.cupy().cuda.runtime.getDevice())


@cache
def _multiprocessors(device_id: int) -> int:
    return int(device.cupy().cuda.Device(device_id).attributes["MultiProcessorCount"])


@cache
def _memory(device_id: int) -> float:
    """An H200's memory has 3201 MHz and 6144 bits; 1 where the driver does not say what it has."""
    attributes = device.cupy().cuda.Device(device_id).attributes
    kilohertz, bits = (attributes.get(name, 0) for name in ("MemoryClockRate", "GlobalMemoryBusWidth"))
    return round(kilohertz * bits / (3_201_000 * 6144), 2) or 1.0


@cache
def _tuned(device_id: int) -> Tuned | None:
    file = device.tuned_file()
    try:
        return Tuned.read(file) or None
    except (OSError, ValueError) as error:
        warnings.warn(f"{file} is not used ({error}): remove it, or tune anew", stacklevel=2)
        return None


_planned_for: ContextVar[Gpu | None] = ContextVar("_planned_for", default=None)


def gpu() -> Gpu:
    """The current device, as plans go by it."""
    number = device.cupy().cuda.runtime.getDevice()
    return _planned_for.get() or Gpu(capability(), _multiprocessors(number), _tuned(number), _memory(number))


@contextmanager
def planned_for(gpu: Gpu) -> Iterator[None]:
    """Inside, products that are planned anew are planned for this one."""
    token = _planned_for.set(gpu)
    try:
        yield
    finally:
        _planned_for.reset(token)


def read_tuned() -> None:
    """Plan by what the file of tuned products holds now."""
    _tuned.cache_clear()


def _function(device_id: int, kernel: Kernel) -> Any:
    """The compiled function, compiled now if no thread has done so."""
    with _lock:
        function = _functions.get((device_id, kernel))
        if function is None:
            function = _module(device_id, kernel).get_function(kernel.entry)
            # Beyond this a function must ask, counted what the kernel itself declares.
            if kernel.max_shared + function.shared_size_bytes > 48 << 10:
                function.max_dynamic_shared_size_bytes = kernel.max_shared
            if kernel.op in _IN_TURN:
                function.preferred_shared_memory_carveout = 100
            _functions[device_id, kernel] = function
    return function


def _module(device_id: int, kernel: Kernel) -> Any:
    """The compiled module; kernels of one file with the same constants share it."""
    key = _key(device_id, kernel)
    if key not in _modules:
        _modules[key] = _compiled(device_id, kernel)
    return _modules[key]


def _key(device_id: int, kernel: Kernel) -> tuple[Any, ...]:
    return device_id, kernel.op, kernel.format, kernel.constants


def _compiled(device_id: int, kernel: Kernel) -> Any:
    cupy = device.cupy()
    code = sources.flatten(kernel.op, kernel.format)
    # wgmma is in sm_90a alone; CuPy would ask for sm_90.
    target = ("-arch=sm_90a",) if _capability(device_id) == 90 else ()
    module = cupy.RawModule(code=code, options=("--std=c++17", *target, *kernel.defines))
    try:
        _compile(module)
    except cupy.cuda.compiler.CompileException as error:
        options = " ".join(kernel.defines)
        raise KernelError(
            f"{kernel.op}.cu for {kernel.format} did not compile ({options}):\n{error}"
        ) from None
    return module


def _compile(module: Any) -> None:
    """Compile, or read what was compiled; without the disk where it cannot be written (full, read-only)."""
    from_memory = _in_memory()  # as it is now: another thread may come to the same
    try:
        module.compile()
    except OSError as error:
        if from_memory:
            raise
        with _disk_lock:
            first = not _in_memory()
            os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        if first:
            warnings.warn(
                f"compiled kernels cannot be kept in {device.kernel_cache()} ({error}): every "
                "process will compile them anew",
                stacklevel=2,
            )
        module.compile()


def _in_memory() -> bool:
    """Whether CuPy leaves the disk alone."""
    return os.environ.get("CUPY_CACHE_IN_MEMORY", "0") == "1"


def compile_ahead(kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """Compile kernels for the current device, on all processors; yields each one that is ready.

    Those that are ready already are left out.
    """
    device_id = device.cupy().cuda.runtime.getDevice()
    wanted = {key: kernel for kernel in kernels for key in [_key(device_id, kernel)] if key not in _modules}

    def one(key: tuple[Any, ...]) -> tuple[Any, ...]:
        module = _compiled(device_id, wanted[key])
        with _lock:
            _modules.setdefault(key, module)
        return key

    for key in in_threads(one, wanted):
        yield wanted[key]


def in_threads(call: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What a call gives for each of the items, in any order, on the current device and all processors: of
    work that lets other threads run, as compiling does."""
    cuda = device.cupy().cuda
    device_id = cuda.runtime.getDevice()

    def one(item: Item) -> Result:
        with cuda.Device(device_id):  # a thread has its own
            return call(item)

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for done in as_completed([pool.submit(one, item) for item in items]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)  # an interruption waits only for those under way

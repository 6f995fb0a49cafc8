"""Arrays, numbers, words and devices, wherever they are arguments."""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .. import device

FLOATS = FLOAT16, BFLOAT16, FLOAT32 = (
    np.dtype(np.float16),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(np.float32),
)
FLOAT_NAMES = "float16, bfloat16 or float32"
NAMED_FLOATS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "fp16": "float16", "fp32": "float32"}
NAMED_FLOATS |= {name: name for name in NAMED_FLOATS.values()}
"""Names under which people ask for floats, and NumPy's. To NumPy "f16" is of 16 bytes."""


def float_dtype(dtype: Any) -> np.dtype[Any]:
    """One of float16, bfloat16, float32, from their names, or from anything that NumPy takes as a dtype."""
    try:
        given = np.dtype(NAMED_FLOATS.get(dtype.lower(), dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        raise TypeError(f"dtype {dtype!r} is not one of {FLOAT_NAMES}") from None
    if given not in FLOATS:
        renamed = isinstance(dtype, str) and dtype != given.name
        name = f"dtype {dtype!r} (NumPy's {given})" if renamed else f"dtype {given}"
        raise TypeError(f"{name} is not one of {FLOAT_NAMES}")
    return given


def array(value: Any, what: str, of: str = FLOAT_NAMES, *, in_place: bool = False) -> Any:
    """A NumPy or CuPy array that shares memory with `value`, theirs or DLPack's (a torch tensor).

    Memory of another GPU, of which CuPy makes a copy here, is an error if it must be `in_place`.
    """
    if type(value) is np.ndarray or device.is_cuda(value):
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array; its mask would be lost: pass .filled(value)")
    if isinstance(value, np.ndarray):
        # A matrix has two axes whatever is done to it.
        return value if type(value) is np.ndarray else value.view(np.ndarray)
    torch = sys.modules.get("torch")
    tensors = getattr(torch, "Tensor", ())  # not yet there while another thread imports it
    if torch is not None and isinstance(value, tensors) and value.dtype == torch.bfloat16:
        # NumPy's DLPack and the CUDA array interface lack the type: the same bytes go as integers.
        return array(value.view(torch.int16), what, in_place=in_place).view(ml_dtypes.bfloat16)
    if hasattr(value, "__cuda_array_interface__"):
        made = device.cupy().asarray(value)
        return _in_place(made, value, what) if in_place else made
    if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
        try:
            return np.from_dlpack(value)
        except (TypeError, RuntimeError, BufferError) as error:
            raise TypeError(f"{what}: NumPy cannot take this {type(value).__name__}: {error}") from None
    given = f"a scalar of {type(value).__name__}" if isinstance(value, np.generic) else a_or_an(value)
    remedy = ": its .dequantize() is one" if is_quantized(value) or is_transposed(value) else ""
    if of in _ASARRAY and what != "out" and isinstance(value, (list, tuple)):
        remedy = f": pass numpy.asarray({what}{_ASARRAY[of]})"
    elif hasattr(value, "to_numpy") and what != "out":  # a table of pandas, or a column
        remedy = (
            f": pass {what}.to_numpy(numpy.float32)" if of == FLOAT_NAMES else f": pass {what}.to_numpy()"
        )
    raise TypeError(f"{what} is {given}; a NumPy or CuPy array of {of} is needed{remedy}")


_ASARRAY = {FLOAT_NAMES: ", numpy.float32", "numbers": ", numpy.float32", "integers": ""}
"""What numpy.asarray takes beside a list, to make an array of these."""


def a_or_an(value: Any) -> str:
    """The name of a value's type with its article: "a list", "an int"; None is None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if re.match('[aeio]|u(?!int|ser|uid|func|ni)|nd', name.lower()) else 'a'} {name}"


def _in_place(made: Any, value: Any, what: str) -> Any:
    """CuPy's array of what is another library's, if it is no copy, whose results nobody would see."""
    if made.size and made.data.ptr != value.__cuda_array_interface__["data"][0]:
        here = device.cupy().cuda.runtime.getDevice()
        raise ValueError(
            f"{what} is not in the memory of GPU {here}, the current device: move the arrays to one GPU, and "
            "make it the current one (with cupy.cuda.Device(n):)"
        )
    return made


def floats(value: Any, what: str) -> Any:
    """`array` in place, of dtype float16, bfloat16 or float32, where kernels can read it."""
    result = array(value, what, in_place=True)
    if result.dtype not in FLOATS:
        remedy = "make it with dtype=numpy.float32" if what == "out" else f"pass {what}.astype(numpy.float32)"
        remedy = f": {remedy}" if result.dtype.kind in "biuf" else ""
        raise TypeError(f"{what} has dtype {result.dtype}; allowed are {FLOAT_NAMES}{remedy}")
    return readable(result, what)


def numbers(value: Any, what: str) -> Any:
    """An array of numbers of any kind but complex ones."""
    result = array(value, what, "numbers")
    if result.dtype.kind not in "fiu" and result.dtype not in FLOATS:
        raise TypeError(f"{what} has dtype {result.dtype}; numbers are needed")
    return result


def readable(array: Any, what: str) -> Any:
    """The array, whose numbers, if they are a GPU's, start at multiples of their size."""
    size = array.itemsize
    if device.is_cuda(array) and not (array.flags.c_contiguous and array.data.ptr % size == 0):
        steps = [step for step, extent in zip(array.strides, array.shape, strict=True) if extent > 1]
        if any(place % size for place in (array.data.ptr, *steps)):
            raise ValueError(
                f"{what} has numbers of {size} bytes that start between multiples of {size} bytes, where no "
                f"GPU can read or write them (address {array.data.ptr:#x}, strides {array.strides}): pass an "
                "array with memory of its own"
            )
    return array


def typed(value: Any, what: str, dtype: Any) -> Any:
    """`array` of NumPy's, of one dtype."""
    result = on_cpu(array(value, what, str(np.dtype(dtype))), what)
    if result.dtype != dtype:
        raise TypeError(f"{what} has dtype {result.dtype}; {np.dtype(dtype)} is needed")
    return result


def on_cpu(value: Any, what: str) -> Any:
    """An array that is NumPy's."""
    if device.is_cuda(value):
        raise TypeError(f"{what} is a CuPy array, and this works on NumPy arrays only: pass {what}.get()")
    return value


def one_of(value: Any, what: str, allowed: tuple[int, ...]) -> int:
    """One of some integers."""
    choices = (" and " if len(allowed) == 2 else ", ").join(map(str, allowed))
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {a_or_an(value)}; allowed are {choices}") from None
    if number not in allowed:
        raise ValueError(f"{what} is {number}; allowed are {choices}")
    return number


def flag(value: Any, what: str) -> bool:
    """True or False, of Python or NumPy."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} is {a_or_an(value)}; allowed are True and False")
    return bool(value)


def text(value: Any) -> str:
    """A str that is to become tokens, in UTF-8."""
    if not isinstance(value, str):
        instead = ": pass text.decode()" if isinstance(value, (bytes, bytearray)) else ""
        raise TypeError(f"text is {a_or_an(value)}; a str is needed{instead}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text is no text in Unicode: {error}") from None
    return value


def patterns(value: Any, what: str) -> tuple[str, ...]:
    """Shell patterns of names, one or several."""
    if isinstance(value, str):
        return (value,)
    needed = "a pattern of names, or several, is needed"
    if isinstance(value, bytes) or not isinstance(value, Iterable):
        raise TypeError(f"{what} is {a_or_an(value)}; {needed}")
    several = tuple(value)
    for each in several:
        if not isinstance(each, str):
            raise TypeError(f"{what} has {a_or_an(each)} in it; {needed}")
    return several


def choice(value: Any, what: str, allowed: tuple[str, ...]) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{what} is {value!r}; allowed are {', '.join(map(repr, allowed))}")
    return value


def is_on_gpu(**operands: Any) -> bool:
    """Whether arrays are on a GPU: all on one device, a GPU being the current one. None is skipped."""
    on_gpu = _on_gpu(operands)
    if on_gpu:
        _current_gpu(operands)
    return on_gpu


def require_one_device(**operands: Any) -> None:
    """All arrays on one device, a GPU being the current one; None is skipped."""
    is_on_gpu(**operands)


def require_one_place(**operands: Any) -> None:
    """All arrays, or the bytes of quantized ones, on one device, the current one or not."""
    arrays = {name: storage(operand) for name, operand in operands.items()}
    if _on_gpu(arrays) and len({a.data.device_id for a in arrays.values()}) > 1:
        _current_gpu(arrays)


def _on_gpu(operands: dict[str, Any]) -> bool:
    """Whether all arrays are on a GPU, or none; None is skipped."""
    on_gpu = [device.is_cuda(a) for a in operands.values() if a is not None]
    if True in on_gpu and False in on_gpu:
        where = {name: device.of(a) for name, a in operands.items() if a is not None}
        places = ", ".join(f"{name} on {place}" for name, place in where.items())
        raise TypeError(
            f"operands are on different devices: {places}; move them with to_device or cupy.asarray"
        )
    return on_gpu[0]


def _current_gpu(operands: dict[str, Any]) -> None:
    """CuPy arrays are the current device's, where kernels are launched."""
    current = device.cupy().cuda.runtime.getDevice()
    if any(a is not None and a.data.device_id != current for a in operands.values()):
        where = ", ".join(f"{n} on GPU {a.data.device_id}" for n, a in operands.items() if a is not None)
        raise ValueError(
            f"{where}; the current device is GPU {current}: move the arrays to one GPU, and make it the "
            "current one (with cupy.cuda.Device(n):)"
        )


def require_memory(why: str, instead: str) -> None:
    """Nothing is copied or converted into memory of its own while a CUDA graph is captured: the graph would
    write there each time, and others have that memory by then. `instead` says what can be done."""
    if device.is_capturing():
        raise RuntimeError(f"{why}, for which a CUDA graph has no memory: {instead}")


def row_name(flat: int, shape: tuple[int, ...]) -> str:
    """Index of a flat row number, as a person would write it: 5, or (1, 5) for stacks."""
    index = [int(i) for i in np.unravel_index(flat, shape[:-1])] if len(shape) > 1 else [0]
    return str(index[0]) if len(index) == 1 else str(tuple(index))


def shape(value: Any) -> tuple[int, ...]:
    """A tuple of dimensions; one may stand for itself."""
    try:
        one = hasattr(value, "__index__") and np.ndim(value) == 0
        result = tuple(operator.index(n) for n in ((value,) if one else value))
    except TypeError:
        raise TypeError(f"shape {value!r} is not a tuple of integers") from None
    if any(n < 0 for n in result):
        raise ValueError(f"shape {result} has a negative dimension")
    return result


def shape_of_rows(value: Any) -> tuple[int, ...]:
    """A shape that has a last axis."""
    result = shape(value)
    if not result:
        raise ValueError("shape is (), that of a scalar; one axis or more is needed")
    return result


def tensors(value: Any, taken: str) -> Mapping[str, Any]:
    """A mapping whose keys are names that tensors can have in a safetensors file, of which one is taken."""
    if not isinstance(value, Mapping):
        raise TypeError(
            f"tensors is {a_or_an(value)}; a mapping of names to arrays is needed: save(path, tensors)"
        )
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"a tensor is named {name!r}; names are str")
        in_utf8 = not any("\ud800" <= c <= "\udfff" for c in name)
        if name in ("__metadata__", taken) or not in_utf8:
            raise ValueError(f"a safetensors file can have no tensor named {name!r}")
    return value


def path(value: Any) -> Path:
    """A path that is not empty: Path makes the working folder of such a one."""
    if isinstance(value, str) and not value:
        raise FileNotFoundError("the path is empty")
    return Path(value)


def model_path(value: Any) -> Path:
    """The path of a model's file."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(
            f"a model is the path of a file, or a cuquant.Model that is open, not {a_or_an(value)}"
        )
    return path(value)


def require_still_as_opened(path: Path, place: Path, opened: os.stat_result, closed: bool) -> None:
    """A file that is open, and is still what it was when it was opened. Another file may have taken its place
    since: the open one is whole then."""
    if closed:
        raise ValueError(f"{path}: the file is closed: open the model again")
    with suppress(OSError):
        now = os.stat(place)
        same = (opened.st_size, opened.st_mtime_ns) == (now.st_size, now.st_mtime_ns)
        if os.path.samestat(opened, now) and not same:
            raise ValueError(f"{path} was changed since it was opened: open the model again")


def require_same_by_name(path: Path, opened: os.stat_result) -> None:
    """A file that is open is what its path leads to, as for those who opened it by its path since."""
    now = os.stat(path)
    if not os.path.samestat(opened, now) or opened.st_mtime_ns != now.st_mtime_ns:
        raise ValueError(f"{path} was replaced or changed while it was opened: read it again")


def new_path(value: Any) -> Path:
    """Where a file is to be written."""
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"target is {a_or_an(value)}; the path of the new file is needed")
    return path(value)


def model_target(value: Any) -> Path:
    """Where a model is to be written: its name says as what."""
    target = new_path(value)
    if target.suffix.lower() not in (".gguf", ".safetensors"):
        raise ValueError(
            f"target is {str(target)!r}; its name must end in .gguf or .safetensors, and says what is written"
        )
    return target


def require_another_file(target: Path, read: Any, what: str) -> None:
    """A target that is not the file of what is read, which it would replace."""
    if target.exists() and os.path.samefile(target, read):
        raise ValueError(f"{target} is the file of the {what} that is being read")


def pickle_error(value: Any, contents: str) -> TypeError:
    """The error for a pickle or deep copy of what reads a mapped file; a dict of it has its contents."""
    name = type(value).__name__
    return TypeError(
        f"a {name} reads a file that is mapped into memory, and cannot be pickled or copied deeply: pass the "
        f"path of the file, or dict({name.lower()}) for the {contents}"
    )


def safetensors_path(value: Any) -> Path:
    """Where a safetensors file is to be: not under a name by which programs know GGUF files."""
    target = path(value)
    if target.suffix.lower() == ".gguf":
        raise ValueError(
            f"{target} would be a safetensors file by the name of a GGUF file: name it *.safetensors "
            "(cuquant.quantize_file makes GGUF files, of models)"
        )
    return target


def require_no_folder(path: Path) -> None:
    """A path of one file."""
    if path.is_dir():
        raise IsADirectoryError(
            f"{path} is a folder, not a file; cuquant.read_safetensors reads checkpoints in folders"
        )


def require_mappable(path: Path) -> None:
    """A path of one file that can be mapped into memory, if there is one."""
    require_no_folder(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no ordinary file: nothing else can be mapped into memory")


def device_name(name: Any) -> str:
    """ "cpu" or "cuda"."""
    if name not in ("cpu", "cuda"):
        other = " (the current GPU: `with cupy.cuda.Device(1):` has another)"
        raise ValueError(
            f"unknown device {name!r}; allowed are 'cpu' and 'cuda'{other * str(name).startswith('cuda')}"
        )
    return str(name)


def usable_device(name: Any) -> str:
    """ "cpu" or "cuda", by default the GPU where one can be used; RuntimeError, which says why, where it is
    asked for and cannot be used."""
    chosen = device.default() if name is None else device_name(name)
    if chosen == "cuda":
        device.cupy()
    return chosen


def storage(operand: Any) -> Any:
    """The array that holds an operand's bytes: a quantized array's own, or the array itself."""
    return operand.storage if is_quantized(operand) else operand


def is_quantized(value: Any) -> bool:
    """Whether a value is a QuantizedArray (known by a class attribute: that module imports this one)."""
    return getattr(type(value), "is_quantized_array", False)


def is_transposed(value: Any) -> bool:
    return getattr(type(value), "is_transposed_array", False)


def described(value: Any) -> str:
    if is_transposed(value):
        return f"{described(value.T)}.T"
    shape = getattr(value, "shape", None)
    name = f"{value.format} array" if is_quantized(value) else type(value).__name__
    return name if shape is None else f"{name} {tuple(shape)}"


LARGEST_INDEX = np.iinfo(np.int32).max


def count(
    value: Any, what: str, least: int = 1, most: int = LARGEST_INDEX, needed: str = "an integer is needed"
) -> int:
    """An integer from `least` to `most`, which int32 holds."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {a_or_an(value)}; {needed}") from None
    if not least <= number <= most:
        raise ValueError(f"{what} is {number}; allowed are {least} to {most}")
    return number


def is_many(lost: int, size: int) -> bool:
    """Whether so many of a tensor's numbers are lost that it has to be said, as single groups that are nearly
    0 have not: more than a hundredth."""
    return lost > 0.01 * size

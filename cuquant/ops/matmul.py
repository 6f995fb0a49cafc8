"""Matrix products with quantized weights."""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import check, debug, device, formats, repeats
from ..array import QuantizedArray, Transposed
from ..debug import shown
from ..formats import Format
from .quantize import quantize


class Product(NamedTuple):
    """A checked y = act(x @ W.T + bias) + residual: the problem that a backend solves.

    x (..., M, K) is a float array or q8_1 activations, w (..., N, K) is quantized or a float array,
    bias is (N,) or (..., N) with w's leading axes, residual is (..., M, N); bias and residual may be None.
    If it `quantizes`, floats x count as q8_1 blocks of them do.
    """

    x: Any
    w: Any
    bias: Any
    activation: str | None
    residual: Any
    quantizes: bool = False


@shown
def linear(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    residual: Any = None,
    out: Any = None,
    dtype: Any = None,
    x_format: str | Format | None = None,
) -> Any:
    """y = act(x @ W.T + bias) + residual, accumulated in float32 and rounded once.

    Parameters
    ----------
    x : array (..., M, K) or (K,)
        float16, bfloat16 or float32; or a QuantizedArray of format q8_1.
    w : QuantizedArray (..., N, K)
        Leading axes broadcast against x's as in `numpy.matmul`. A plain float array is multiplied as it is.
    bias : float array (N,), or (..., N) with w's leading axes, optional
    activation : None, "relu", "gelu" (tanh form), "gelu_erf" or "silu"
    residual : float array of y's shape, optional
        May be `out` itself.
    out : float array of y's shape, optional
        Written in place, whatever its strides, and returned; must not overlap x, w or bias.
    dtype : float16, bfloat16 or float32, also as "f16", "bf16" or "f32", optional
        Of the result; by default out's, else x's (float32 for q8_1, and with `x_format`).
    x_format : "q8_1", optional
        Multiply ``quantize(x, "q8_1")`` in place of the floats x: the same result, to the bit. On a GPU no
        blocks are stored, and a short row of float16 is quantized by the product itself; but not for weights
        that are plain, EXL3's or have signs of columns (trellis), or other rows of more than 65536 numbers.

    Returns
    -------
    y : array (..., M, N), or (..., N) for a vector x, where the operands live.

    Raises
    ------
    TypeError, ValueError
        Before any work: dtypes, shapes, devices or memory of the operands do not fit (the message says how).
    """
    words = activation, dtype, x_format
    y = _again(words, x, w, bias, residual, out)
    if y is not None:
        return y
    x, w = check.activations(x, w), check.weights(w)
    shape = check.product_shape(x.shape, w.shape)
    if quantizes := x_format is not None:
        check.require_activation_format(x, x_format, formats.get("q8_1"))
    check.require_activation(activation)
    bias, residual = check.bias(bias, w.shape), check.residual(residual, shape)
    y = None if out is None else check.floats(out, "out")
    result = check.result_dtype(x, y, dtype, quantizes)
    arrays = {"x": check.storage(x), "W": check.storage(w), "bias": bias}
    on_gpu = check.is_on_gpu(**arrays, residual=residual, out=y)
    backend: Any = device.backend(on_gpu)
    if y is not None:
        check.require_output(y, shape, arrays, residual, on_gpu)
    if x_format is not None and not (on_gpu and backend.can_quantize(x, w)):
        if on_gpu:
            before = f"x is quantized before the product with a {check.described(w)}"
            check.require_memory(before, "leave out x_format")
        added = {"bias": bias, "activation": activation, "residual": residual}
        return linear(quantize(x, x_format), w, out=out, dtype=dtype, **added)
    if y is None:
        y = backend.empty(shape, result)
    if x.ndim == 1:
        work = backend.product(
            Product(_row(x), w, bias, activation, _row(residual), quantizes), y[..., None, :]
        )
    else:
        work = backend.product(Product(x, w, bias, activation, residual, quantizes), y)
    if work is not None:
        given, weight = None if out is None else y, w.fragments()
        alike = weight.repeats, words, work, x, (bias,), residual, given
        repeats.remember(*alike, result=y, weights=(weight.buffer,))
    return y if out is None else out


def matmul(
    a: Any, b: Any, *, out: Any = None, dtype: Any = None, x_format: str | Format | None = None
) -> Any:
    """Matrix product in which one operand is a quantized weight: ``x @ W.T`` or ``W @ x``.

    Parameters
    ----------
    a, b : arrays
        Either x (..., M, K) or (K,) and W.T of a QuantizedArray (..., N, K); or a QuantizedArray W and
        x (..., K, M) or (K,). x is float16, bfloat16, float32, or quantized to q8_1, whose blocks run along
        K: in W @ x it is q (K,), or q.T of q (..., M, K).
    out, dtype, x_format
        As in `linear`.

    Returns
    -------
    array (..., M, N) for x @ W.T, (..., N, M) for W @ x; (..., N) for a vector.

    Raises
    ------
    TypeError, ValueError
        As in `linear`; and where the product would contract a weight along N: its blocks run along K.
    """
    if type(b) is Transposed and not debug.is_on():  # in a loop of products each step of a call counts
        y = _again((None, dtype, x_format), a, b.T, None, None, out)
        if y is not None:
            return y
    if isinstance(a, QuantizedArray) and not a.format.for_activations:
        if isinstance(b, Transposed):
            return _left(a, b.T, out, dtype, x_format)
        if isinstance(b, QuantizedArray) and b.format.for_activations:
            check.require_right_activations(b, check.weights(a))
            return _left(a, b, out, dtype, x_format)
        x = check.floats(b, "x")
        check.require_right_operand(x.shape, check.weights(a).shape)
        return _left(a, x if x.ndim == 1 else x.swapaxes(-1, -2), out, dtype, x_format)
    if isinstance(b, Transposed):
        return linear(a, b.T, out=out, dtype=dtype, x_format=x_format)
    raise check.product_error(a, b)


def _again(words: tuple[Any, ...], x: Any, w: Any, bias: Any, residual: Any, out: Any) -> Any:
    """The product, if there was one like it before."""
    found = repeats.find(repeats.of(w), words, x, (bias,), residual, out)
    return None if found is None else device.backend(True).repeat(*found, x, out)


def _left(w: QuantizedArray, x: Any, out: Any, dtype: Any, x_format: str | Format | None) -> Any:
    """W @ x.T as the transpose of x @ W.T."""
    if x.ndim == 1:
        return linear(x, w, out=out, dtype=dtype, x_format=x_format)
    if out is None:
        return linear(x, w, dtype=dtype, x_format=x_format).swapaxes(-1, -2)
    to = check.array(out, "out", in_place=True)
    *lead, m, n = check.product_shape(x.shape, w.shape)
    check.require_output_shape(to, (*lead, n, m))
    linear(x, w, out=to.swapaxes(-1, -2), dtype=dtype, x_format=x_format)
    return out


def _row(vector: Any) -> Any:
    """A vector (..., K) as a matrix of one row (..., 1, K)."""
    if isinstance(vector, QuantizedArray):
        return QuantizedArray._made(vector.format, vector.blocks[None], vector.rows)
    return None if vector is None else vector[..., None, :]

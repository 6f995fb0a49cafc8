"""What NumPy and operators make of packed blocks, which are no numbers: products, and errors that say so."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from . import check


@cache
def _matmul() -> Callable[..., Any]:
    """The product, which needs arrays to be defined; an import at each call would take a microsecond."""
    from .ops.matmul import matmul

    return matmul


def _refused(operator: str) -> Any:
    def method(self: Any, *others: Any) -> Any:
        raise check.arithmetic_error(self, operator)

    return method


def _ufunc(self: Any, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
    """What NumPy's functions make of it: of `numpy.matmul`, and so of `x @ W.T`, the product; of
    `x == W` whether both are one."""
    plain = method == "__call__" and not options
    if plain and ufunc.__name__ == "matmul":
        return _matmul()(*operands)
    if plain and ufunc.__name__ in ("equal", "not_equal"):
        return (operands[0] is operands[1]) == (ufunc.__name__ == "equal")
    raise check.ufunc_error(self, ufunc.__name__, method, options)


_COMPARISONS = (np.array_equal, np.array_equiv)
"""Functions of NumPy's that answer False where `__array__` raises an error."""


class _OfTheClass:
    """NumPy looks `__array_ufunc__` up in a class, and gets the function; CuPy in an array, where it is None:
    that leaves `x @ W.T` to __rmatmul__."""

    def __get__(self, array: Any, kind: type) -> Any:
        return _ufunc if array is None else None


class Packed:
    """Products, and operators that numbers have and packed blocks have not: without these NumPy's errors lead
    astray."""

    __array_ufunc__ = _OfTheClass()
    __slots__ = ()
    __add__ = __radd__ = _refused("+")
    __sub__ = __rsub__ = __neg__ = _refused("-")
    __mul__ = __rmul__ = _refused("*")
    __truediv__ = __rtruediv__ = _refused("/")
    __floordiv__ = __rfloordiv__ = _refused("//")
    __mod__ = __rmod__ = _refused("%")
    __pow__ = __rpow__ = _refused("**")
    __abs__ = _refused("abs")
    __lt__ = __gt__ = __le__ = __ge__ = _refused("comparison")  # Python turns 0 < W round

    def __matmul__(self, other: Any) -> Any:
        return NotImplemented if check.is_multiplying_itself(other) else _matmul()(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _matmul()(other, self)

    def __bool__(self) -> NoReturn:
        raise check.truth_error(self)

    def __contains__(self, value: Any) -> NoReturn:
        raise check.comparison_error(self, "the operator in")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """What NumPy's functions make of it: `stack` and `concatenate` one array, others errors of
        `__array__`, which two of them hide."""
        if func in _COMPARISONS:
            raise check.comparison_error(self, f"numpy.{func.__name__}")
        if func in (np.concatenate, np.stack) and set(kwargs) <= {"axis"}:
            from .ops.join import FUNCTIONS

            return FUNCTIONS[func](*args, **kwargs)
        check.require_no_other_function(self, func.__name__)
        if hasattr(func, "_implementation") and all(issubclass(t, (np.ndarray, Packed)) for t in types):
            return func._implementation(*args, **kwargs)
        return NotImplemented

    if not TYPE_CHECKING:  # which would take any attribute for one

        def __getattr__(self, name: str) -> Any:
            check.require_no_array_attribute(self, name)
            return object.__getattribute__(self, name)  # what a property has raised, or Python's own error

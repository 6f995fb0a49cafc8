"""The weight formats, one module each; a module dropped in this folder is a new format."""

from importlib import import_module as _import_module
from pkgutil import iter_modules as _iter_modules

from .base import Format, by_ggml_type, by_type_name, get, names, names_of_read_only, of_forks, register
from .parameters import describe, described

for _module in _iter_modules(__path__):
    _import_module(f"{__name__}.{_module.name}")

__all__ = [
    "Format",
    "by_ggml_type",
    "by_type_name",
    "describe",
    "described",
    "get",
    "names",
    "names_of_read_only",
    "of_forks",
    "register",
]

"""Quantized weights of checkpoints that others wrote, in safetensors files: which tensors make one.

    found by           beside it                                  may be there       kind
    .qweight           .qzeros .scales                            .g_idx             GPTQ, AWQ
    .trellis           .suh .svh, or .su .sv                      .mcg .mul1         EXL3
    .weight_packed     .weight_scale, of floats, .weight_shape    .weight_zero_point compressed-tensors, int4
                                                                  .weight_g_idx
                       .weight_scale .weight_global_scale         .weight_g_idx      the same, NVFP4
                       .weight_scale, of bytes                    .weight_g_idx      the same, MXFP4
    .weight_scale_2    .weight .weight_scale                      (.pre_quant_scale of 1)    ModelOpt, NVFP4
    _blocks            _scales                                                       gpt-oss, MXFP4
    .blocks            .scales                                                       the same, OpenAI's names

What the tensors mean is in int4.py, exl3.py and fp4.py; what the checkpoint's configuration says of them, in
configuration.py.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import check
from ..array import QuantizedArray
from ..formats.exl3 import GENERATORS
from ..render import counted, escaped
from .configuration import gptq_version, group_sizes
from .exl3 import from_exl3
from .fp4 import from_mxfp4, from_nvfp4
from .int4 import Stated, awq_weight, gptq_weight, pack_quantized_weight
from .safetensors import KEY
from .shards import Others, Tensors, opened, others
from .words import named_like

READ = "GPTQ, AWQ, EXL3, compressed-tensors (4 bits), ModelOpt's NVFP4 and gpt-oss's MXFP4"
"""What can be read."""


def read_safetensors(
    path: str | os.PathLike[str],
    version: int | None = None,
    names: str | Iterable[str] = "*",
    device: str | None = None,
) -> dict[str, Any]:
    """The quantized weights of a checkpoint that others wrote, or of one file of it.

    Read are weights of 4 bits of GPTQ, AWQ and compressed-tensors (llm-compressor's W4A16, NVFP4 and MXFP4),
    NVFP4 of NVIDIA's ModelOpt, the experts of gpt-oss in MXFP4, and EXL3. Codes and scales are taken as they
    are (see `from_gptq`, `from_awq`, `from_pack_quantized`, `from_nvfp4`, `from_mxfp4`, `from_exl3`). The
    tensors of a weight are found by their names, in whichever file they are; whether GPTQ or AWQ wrote it is
    told from the shapes. Other tensors are left alone, scales of activations among them.

    Parameters
    ----------
    path : str or path
        A safetensors file; of a checkpoint of several files its folder, or its *.safetensors.index.json. Of
        one file of several those weights can be read that have all of their tensors in it (`names` chooses
        them).
    version : 1 or 2, optional
        Of GPTQ weights, see `from_gptq`. By default what the configuration beside the files says as
        "checkpoint_format", "gptq" (1) or "gptq_v2" (2), in quantize_config.json or under
        "quantization_config" in config.json; 1 where nothing says it.
    names : str, or several
        Shell patterns of the weights to read: "*.layers.0.*" are those of one layer.
    device : "cpu" or "cuda", optional
        Where weights are put: by default on the GPU where one can be used.

    Returns
    -------
    dict of "name.weight" to QuantizedArray of shape (N, K), in alphabetical order
        gpt-oss's experts are stacks (E, N, K), "name.gate_up_proj" and "name.down_proj" (in OpenAI's files
        "name.mlp1_weight" and "name.mlp2_weight"); of the former gate and up have every other row. Empty for
        one file of several (…-00002-of-00003.safetensors) that has nothing of such weights.

    Raises
    ------
    TypeError, ValueError
        The file is no safetensors file, or has no such weight; files of the checkpoint are missing; a pattern
        matches no weight; a weight lacks a tensor, which another file may have, or is of two kinds; of one
        file of several, another has a tensor that changes what those of a weight mean, as zero points do; or
        what makes the weight refuses it (the message names the file and the tensor). Of GPTQ weights also
        where the configuration says another `version`, or, without one, two, or is no JSON; of int4 weights
        where it says groups of other sizes than a weight has, or nothing says it and they are no power of 2.
    OSError
        A file cannot be read.
    RuntimeError
        `device` is "cuda", and there is no GPU.

    Warns
    -----
    UserWarning
        Nothing says the version, and all zero points of the GPTQ weights would be 9: version 2 stores them so
        where weights are symmetric. Or of one file of several neither all others nor an index are beside it,
        and they may have tensors that change weights which were read: zero points or an order of weights
        (g_idx), the codebook of EXL3, or pre_quant_scale of ModelOpt.
    """
    version = None if version is None else check.gptq_version(version)
    target = check.usable_device(device)
    path, names = check.path(path), check.patterns(names, "names")
    with opened(path) as tensors:
        found = _found(tensors)
        rest = others(path)
        part = rest is not None  # it may have only what is not quantized
        own = any(KEY in (file.metadata() or {}) for file in tensors.files.values())
        if not found and (own or not part):
            wrote = "; cuquant wrote it, and cuquant.load reads it" if own else ""
            ends = ", ".join(f"*{kind.found}" for kind in _KINDS)
            raise ValueError(f"{path} has no weight of {READ}: no tensor named {ends}{wrote}")
        if part:
            _check_alone(tensors)
        chosen = named_like(found, names, f"weight of {path.name}", "names") if found else []
        for name in chosen:  # all, before any is made
            found[name].check(tensors, rest)
        gptq = [found[name].prefix for name in chosen if found[name].is_gptq(tensors)]
        stated = gptq_version(path, version) if gptq else None
        said = _Said(stated or 1, group_sizes(path))
        read = {name: found[name].read(tensors, said).to_device(target) for name in chosen}
        if gptq and stated is None and all(_stored_as_8(tensors, prefix) for prefix in gptq):
            warnings.warn(
                f"{path}: no configuration beside it says the version of its GPTQ weights. They were read as "
                "version 1, and all zero points are 9; by version 2 they were 8, as of symmetric weights: "
                "pass version=2, or version=1 if 9 is right",
                UserWarning,
                stacklevel=2,
            )
        if rest is not None and not rest.are_all:
            _warn_of_unknown(path, [found[name] for name in chosen], tensors)
        return read


_EIGHTS = np.uint32(0x88888888).astype(np.int32)
"""A word of zero points of 8."""
_ELSEWHERE = "; another file of the checkpoint may: pass its folder, or its *.safetensors.index.json"


class _Said(NamedTuple):
    """What is known of int4 weights beside their tensors."""

    version: int
    """Version of GPTQ weights."""
    groups: Stated


class _Kind(NamedTuple):
    """How weights are stored."""

    found: str
    """How the name of the tensor ends by which a weight is found."""
    beside: tuple[tuple[str, ...], ...]
    """How the names of the tensors end that it needs; the second of each where there is not the first."""
    make: Callable[[Tensors, str, _Said], QuantizedArray]
    """Makes a weight of its tensors, given how their names begin."""
    weight: str = ".weight"
    """How the name of the weight ends."""
    type: str = ""
    """Type of the tensor by which it is found, where others' names may end so."""
    maybe: tuple[str, ...] = ()
    """How the names end of tensors that not every weight has, and that change what the others mean."""


class _Stored(NamedTuple):
    """A weight of a checkpoint."""

    kind: _Kind
    prefix: str

    @property
    def name(self) -> str:
        """Name of the tensor by which it was found."""
        return self.prefix + self.kind.found

    def check(self, tensors: Tensors, rest: Others | None) -> None:
        """ValueError where a tensor is missing or in another file, or there are two for one."""
        hint = "" if rest is None else _ELSEWHERE
        there = [[end for end in ends if self.prefix + end in tensors] for ends in self.kind.beside]
        for twice in (found for found in there if len(found) > 1):
            listed = " and a ".join(map(_word, twice))
            raise ValueError(f"{tensors.named(self.name)}: there is a {listed} of this weight")
        missing = [_word(ends[0]) for ends, found in zip(self.kind.beside, there, strict=True) if not found]
        elsewhere = set() if rest is None else rest.tensors
        missing += [_word(end) for end in self._absent(tensors) if self.prefix + end in elsewhere]
        if missing:
            raise ValueError(f"{tensors.named(self.name)} has no {' and no '.join(missing)} beside it{hint}")
        shape = f"{self.prefix}.weight_shape"
        if self.kind.make is _compressed and tensors.type(self.name) != "U8" and shape not in tensors:
            raise ValueError(
                f"{tensors.named(self.name)} has no weight_shape beside it, which tells codes of 4 bits from "
                f"those of 8{hint}"
            )

    def _absent(self, tensors: Tensors) -> list[str]:
        return [end for end in self.kind.maybe if self.prefix + end not in tensors]

    def unknown(self, tensors: Tensors) -> list[str]:
        """Name ends of the absent tensors that may well be in another file."""
        ends = self._absent(tensors)
        if self.kind.make is _exl3:
            return ends if len(ends) == len(_CODEBOOKS) else []  # one at most
        if self.kind.make is _gptq_or_awq:
            return ends if self.is_gptq(tensors) else []  # AWQ keeps weights in their order
        if self.kind.make is _compressed:  # the type of NVFP4's scales tells it from MXFP4
            of_it = _OF_FP4 if tensors.type(self.name) == "U8" else _OF_INTEGERS
            return [end for end in ends if end in of_it]
        return ends

    def is_gptq(self, tensors: Tensors) -> bool:
        """Whether the weight is GPTQ's: not AWQ's, nor of another kind."""
        return self.kind.make is _gptq_or_awq and not _is_awq(tensors, self.prefix)

    def read(self, tensors: Tensors, said: _Said) -> QuantizedArray:
        try:
            return self.kind.make(tensors, self.prefix, said)
        except TypeError as error:
            raise TypeError(f"{tensors.named(self.name)}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{tensors.named(self.name)}: {error}") from None


def _warn_of_unknown(path: Path, weights: list[_Stored], tensors: Tensors) -> None:
    """UserWarning at read_safetensors where files that are not there may have tensors of its weights."""
    unknown = {weight.prefix: ends for weight in weights if (ends := weight.unknown(tensors))}
    if unknown:
        words = " or ".join(sorted({_word(end) for ends in unknown.values() for end in ends}))
        warnings.warn(
            f"{path}: neither an index that lists it nor all other files of its checkpoint are beside it, "
            f"and they may have {words} of weights that were read without "
            f"({counted(len(unknown), 'weight')}, the first is {escaped(min(unknown))}), and would then be "
            "other numbers: pass the folder of all files",
            UserWarning,
            stacklevel=3,
        )


def _word(end: str) -> str:
    return end[1:]


def _found(tensors: Tensors) -> dict[str, _Stored]:
    """The weights, by the names that they get; ValueError where one is of two kinds."""
    weights: dict[str, _Stored] = {}
    for name in sorted(tensors):
        for kind in _KINDS:
            if not name.endswith(kind.found) or (kind.type and tensors.type(name) != kind.type):
                continue
            stored = _Stored(kind, name.removesuffix(kind.found))
            made = stored.prefix + kind.weight
            if made in weights:
                both = sorted({_word(kind.found), _word(weights[made].kind.found)})
                raise ValueError(f"{tensors.named(name)}: there is a {' and a '.join(both)} of this weight")
            weights[made] = stored
    return dict(sorted(weights.items()))


def _check_alone(tensors: Tensors) -> None:
    """ValueError where a file has parts of a weight whose codes another has."""
    for name in tensors:
        for end, found, types in _TELLING:
            prefix = name.removesuffix(end)
            if prefix == name or any(prefix + each in tensors for each in found):
                continue
            if not types or tensors.type(name) in types:
                missing = " or ".join(map(_word, found))
                raise ValueError(f"{tensors.named(name)} has no {missing} beside it{_ELSEWHERE}")


def _gptq_or_awq(tensors: Tensors, prefix: str, said: _Said) -> QuantizedArray:
    qweight, qzeros, scales = (tensors[f"{prefix}.{part}"] for part in ("qweight", "qzeros", "scales"))
    if _is_awq(tensors, prefix):
        return awq_weight(qweight, qzeros, scales, said.groups)
    return gptq_weight(qweight, qzeros, scales, tensors.get(f"{prefix}.g_idx"), said.version, said.groups)


def _is_awq(tensors: Tensors, prefix: str) -> bool:
    """Whether codes are packed along N, as zero points are."""
    return tensors.shape(f"{prefix}.qweight")[-1:] == tensors.shape(f"{prefix}.qzeros")[-1:]


def _stored_as_8(tensors: Tensors, prefix: str) -> bool:
    """Whether all zero points of a GPTQ weight are 8 in the file."""
    return bool((tensors[f"{prefix}.qzeros"] == _EIGHTS).all())


def _exl3(tensors: Tensors, prefix: str, _: _Said) -> QuantizedArray:
    suh, svh = (
        tensors[f"{prefix}.{new if f'{prefix}.{new}' in tensors else old}"]
        for new, old in (("suh", "su"), ("svh", "sv"))
    )
    return from_exl3(tensors[f"{prefix}.trellis"], suh, svh, _codebook(tensors, prefix))


def _codebook(tensors: Tensors, prefix: str) -> str:
    """The codebook of an EXL3 weight: a tensor of its name has what states are multiplied by."""
    there = [codebook for codebook in map(_word, _CODEBOOKS) if f"{prefix}.{codebook}" in tensors]
    if len(there) > 1:
        raise ValueError(f"there is an {' and a '.join(there)} of this weight")
    for codebook in there:
        name = f"{prefix}.{codebook}"
        factor = tensors[name]
        if factor.dtype.kind not in "iu":
            raise TypeError(f"{escaped(name)} has dtype {factor.dtype}; an integer is needed")
        found = [int(number) & 0xFFFFFFFF for number in factor.flat]
        if found != [GENERATORS[codebook]]:
            shown, known = ", ".join(map(hex, found)) or "empty", GENERATORS[codebook]
            raise ValueError(f"{escaped(name)} is {shown}; {known:#x} alone is known")
        return codebook
    return "3inst"


def _compressed(tensors: Tensors, prefix: str, said: _Said) -> QuantizedArray:
    """Make a weight of compressed-tensors: integers in words, or E2M1 in bytes with scales of either kind."""
    codes, scales = tensors[f"{prefix}.weight_packed"], tensors[f"{prefix}.weight_scale"]
    order = tensors.get(f"{prefix}.weight_g_idx")
    if codes.dtype != np.uint8:
        zeros, shape = (tensors.get(f"{prefix}.{part}") for part in ("weight_zero_point", "weight_shape"))
        return pack_quantized_weight(codes, scales, zeros, shape, order, said.groups)
    factor = tensors.get(f"{prefix}.weight_global_scale")
    if factor is None:
        made, group = from_mxfp4(codes, scales), 32
    else:
        made, group = from_nvfp4(codes, scales, check.one_over(factor, "weight_global_scale")), 16
    check.require_groups(made.shape[-1], group, {}, order, "weight_g_idx")
    return made


def _modelopt(tensors: Tensors, prefix: str, _: _Said) -> QuantizedArray:
    before = tensors.get(f"{prefix}.pre_quant_scale")
    if before is not None and (before.astype(np.float32) != 1).any():
        raise ValueError(
            "there is a pre_quant_scale, by which inputs of this weight are multiplied (NVFP4_AWQ): it "
            "cannot be read"
        )
    codes, scales = tensors[f"{prefix}.weight"], tensors[f"{prefix}.weight_scale"]
    return from_nvfp4(codes, scales, check.one_number(tensors[f"{prefix}.weight_scale_2"], "weight_scale_2"))


def _gpt_oss(tensors: Tensors, prefix: str, _: _Said) -> QuantizedArray:
    return from_mxfp4(tensors[f"{prefix}_blocks"], tensors[f"{prefix}_scales"])


def _gpt_oss_of_openai(tensors: Tensors, prefix: str, _: _Said) -> QuantizedArray:
    return from_mxfp4(tensors[f"{prefix}.blocks"], tensors[f"{prefix}.scales"])


_CODEBOOKS = (".mcg", ".mul1")
"""Name ends of codebooks, of which an EXL3 weight has one at most."""
_OF_FP4 = (".weight_g_idx",)
_OF_INTEGERS = (".weight_zero_point", *_OF_FP4)
"""Name ends of tensors that a compressed-tensors weight may have, by what its codes are: FP4, or integers."""
_KINDS = (
    _Kind(".qweight", ((".qzeros",), (".scales",)), _gptq_or_awq, maybe=(".g_idx",)),
    _Kind(".trellis", ((".suh", ".su"), (".svh", ".sv")), _exl3, maybe=_CODEBOOKS),
    _Kind(
        ".weight_packed",
        ((".weight_scale",),),
        _compressed,
        maybe=(*_OF_INTEGERS, ".weight_global_scale"),
    ),
    _Kind(".weight_scale_2", ((".weight",), (".weight_scale",)), _modelopt, maybe=(".pre_quant_scale",)),
    _Kind("_blocks", (("_scales",),), _gpt_oss, weight="", type="U8"),
    _Kind(".blocks", ((".scales",),), _gpt_oss_of_openai, weight="", type="U8"),
)
_INTEGERS = ("I32", "I64", "U32")
_TELLING: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (".qzeros", (".qweight",), ()),
    (".scales", (".qweight",), ("F16", "BF16", "F32")),
    (".g_idx", (".qweight",), _INTEGERS),
    *((end, (".trellis",), ()) for end in (".suh", ".su", ".svh", ".sv")),
    *((end, (".trellis",), _INTEGERS) for end in _CODEBOOKS),
    (".weight_shape", (".weight_packed",), ()),
    *((end, (".weight_packed", ".weight"), _INTEGERS) for end in _OF_INTEGERS),
    (".weight_global_scale", (".weight_packed",), ()),
    (".weight_scale", (".weight_scale_2", ".weight_packed"), ("F8_E4M3",)),
    (".pre_quant_scale", (".weight_scale_2", ".weight"), ()),
    ("_scales", ("_blocks",), ("U8",)),
    (".scales", (".blocks",), ("U8",)),
)
"""Names' ends that tell of a weight, those by one of which it would be found, or one of others' that is not
read, and types, where tensors of others have such names as well."""

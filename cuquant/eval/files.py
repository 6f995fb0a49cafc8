"""Evaluating several model files on one text, with results on disk that survive an interruption."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import check
from ..device import default as default_device
from ..io import mixture
from ..io.atomic import check_rewrite, rewrite
from ..io.model import Model, opened
from ..render import to_json
from .evaluate import Text, distinct, evaluate, text_or_tokens
from .kv import distinct_widths
from .report import Evaluation, Evaluations

_KIND = "cuquant evaluations"


def evaluate_files(
    models: str | os.PathLike[str] | Model | Iterable[str | os.PathLike[str] | Model],
    *,
    results: str | os.PathLike[str] | None = None,
    text: str | os.PathLike[str] | None = None,
    tokens: Any = None,
    base: str | os.PathLike[str] | Model | None = None,
    formats: Any = (),
    ctx: int = 512,
    chunks: int | None = None,
    activations: str = "f16",
    kv_bits: Any = (),
    device: str | None = None,
    progress: bool = False,
) -> Evaluations:
    """Evaluate models one after the other on the same text, each as `evaluate` does.

    Parameters
    ----------
    models : path or Model, or several
    results : path, optional
        A JSON file that gets each model's result as soon as it is there (whole or not at all). Models that it
        holds, by path, size and time of change of all their files, are not evaluated again: run the same call
        once more after an interruption, or with more models. Other processes may add results at the same
        time, which this one takes over. Settings are in it, too, among them the device that was used and
        cuquant's version.
    text, tokens, base, formats, ctx, chunks, activations, kv_bits, device, progress
        As in `evaluate`.

    Returns
    -------
    Evaluations: a table of all rows, with the file's name before each (and folders that tell it apart).

    Raises
    ------
    OSError, ValueError
        Before any evaluation: there are no models; there can be no file `results`, it is no such file, or one
        of another text, base, version or options (which, it says); a model's file is missing or damaged.
        After one: `results` cannot be written any more, or another process has made it one of other settings;
        that result is lost.
    UnsupportedModel, GGUFError, TypeError, ValueError
        As `evaluate`. Results so far stay on disk.
    """
    from .. import __version__  # which the package has once its modules are there

    # A Model is a mapping; another is refused as a model is.
    one = isinstance(models, (str, bytes, os.PathLike, Mapping)) or not isinstance(models, Iterable)
    listed: Any = [models] if one else models
    several = list(listed)
    if not several:
        raise ValueError("there are no models to evaluate: models is empty")
    formats, widths = distinct(formats), [kv.text for kv in distinct_widths(kv_bits)]
    given, target = text_or_tokens(text, tokens), None if results is None else Path(results)
    if target is not None:
        check_rewrite(target)
    options: dict[str, Any] = {"ctx": ctx, "chunks": chunks, "activations": activations}
    settings = {
        "cuquant version": __version__,
        "device": _devices(several, device),
        "text": _fingerprint(given),
        "base": None if base is None else _stamp(base),
        "formats": [_spelled(f) for f in formats],
        "kv_bits": widths,
    } | {name: json.loads(json.dumps(value, default=_plain)) for name, value in options.items()}
    known = {} if target is None else _read(target, settings)
    stamps = [(model, json.dumps(_stamp(model))) for model in several]
    done = []
    for model, stamp in stamps:
        if stamp not in known:
            known[stamp] = evaluate(
                model,
                **({"text": given} if isinstance(given, Text) else {"tokens": given}),
                base=base,
                formats=formats,
                kv_bits=widths,
                device=device,
                progress=progress,
                **options,
            )
            if target is not None:
                _save(target, settings, known)
        done.append(known[stamp])
    return Evaluations(done)


def _devices(models: Iterable[Any], device: str | None) -> str:
    """Devices on which models are evaluated, "cpu+cuda": by default a model that is open has its own."""
    if device is not None:
        return check.device_name(device)
    own = (model.device if isinstance(model, Model) else default_device() for model in models)
    return "+".join(sorted(set(own)))


def _stamp(path: str | os.PathLike[str] | Model) -> list[Any]:
    """A model's path, size and time of change; a list of them for each file of a split one."""
    with opened(path, "cpu") as model:
        files = model._stamps
    stamps = [[str(part.resolve()), status.st_size, status.st_mtime_ns] for part, status in files]
    return stamps if len(stamps) > 1 else stamps[0]


def _fingerprint(given: Text | NDArray[np.integer[Any]]) -> str:
    """SHA-256 of what is evaluated."""
    if isinstance(given, np.ndarray):
        return hashlib.sha256(np.ascontiguousarray(given, np.int64).tobytes()).hexdigest()
    return hashlib.sha256(given.encode()).hexdigest()


def _spelled(fmt: Any) -> str:
    """What a format, mixture or recipe is called in settings: by its name, or by parameters that none has."""
    kind = mixture.get(fmt)
    if isinstance(kind, mixture.Recipe):
        return str({pattern: _spelled(each) for pattern, each in kind.rules})
    named = str(kind) in mixture.names() and mixture.get(str(kind)) == kind
    return str(kind) if named else repr(kind)


def _plain(value: Any) -> Any:
    """What JSON lacks: NumPy's numbers, and others as text."""
    return value.item() if isinstance(value, np.generic) else str(value)


def _read(path: Path, settings: dict[str, Any]) -> dict[str, Evaluation]:
    """Results by file that were made with these settings; none where there is no file yet."""
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["kind"] != _KIND:
            raise KeyError
        others = stored["settings"]
        if not isinstance(others, dict):
            raise TypeError
        found = {json.dumps(e["file"]): Evaluation.from_dict(e["evaluation"]) for e in stored["evaluations"]}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ValueError(f"{path} is not a file of cuquant's evaluations: name another") from None
    differing = [key for key in {**others, **settings} if others.get(key) != settings.get(key)]
    if differing:
        raise ValueError(
            f"{path} has results of other settings ({', '.join(sorted(differing))}): "
            "remove it, or name another"
        )
    return found


def _save(path: Path, settings: dict[str, Any], known: dict[str, Evaluation]) -> None:
    """Write all results; `known` gets those that other processes have added since."""

    def merged() -> str:
        known.update(_read(path, settings))
        evaluations = [{"file": json.loads(stamp), "evaluation": e.to_dict()} for stamp, e in known.items()]
        return to_json({"kind": _KIND, "settings": settings, "evaluations": evaluations}) + "\n"

    rewrite(path, merged)

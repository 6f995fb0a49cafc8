"""Evaluating several model files on one text, with results on disk that survive an interruption."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..io.atomic import replacing
from ..render import to_json
from .evaluate import distinct, evaluate
from .report import Evaluation, Evaluations

_KIND = "cuquant evaluations"


def evaluate_files(
    models: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    results: str | os.PathLike[str] | None = None,
    text: str | os.PathLike[str] | None = None,
    tokens: Any = None,
    base: str | os.PathLike[str] | None = None,
    formats: Any = (),
    progress: bool = False,
    **options: Any,
) -> Evaluations:
    """Evaluate GGUF models one after the other on the same text, each as `evaluate` does.

    Parameters
    ----------
    models : path, or several
    results : path, optional
        A JSON file that gets each model's result as soon as it is there (whole or not at all). Models that it
        holds, by path, size and time of change, are not evaluated again: run the same call once more after an
        interruption, or with more models.
    text, tokens, base, formats, progress, and ctx, chunks, activations, kv_bits, device
        As in `evaluate`; base is a path here.

    Returns
    -------
    Evaluations: a table of all rows, with the file's name before each.

    Raises
    ------
    ValueError
        `results` is no such file, or one of another text, base or options (which, it says); and what
        `evaluate` raises. Results so far stay on disk.
    """
    if isinstance(models, (str, os.PathLike)):
        models = [models]
    formats = distinct(formats)
    settings = {
        "text": _fingerprint(text, tokens),
        "base": None if base is None else _stamp(Path(base)),
        "formats": [str(f) for f in formats],
    } | {name: json.loads(json.dumps(value, default=str)) for name, value in options.items()}
    target = None if results is None else Path(results)
    known = {} if target is None else _read(target, settings)
    done = []
    for model in models:
        stamp = json.dumps(_stamp(Path(model)))
        if stamp not in known:
            known[stamp] = evaluate(
                model, text=text, tokens=tokens, base=base, formats=formats, progress=progress, **options
            )
            if target is not None:
                _write(target, settings, known)
        done.append(known[stamp])
    return Evaluations(done)


def _stamp(path: Path) -> list[Any]:
    """A file's path, size and time of change."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]


def _fingerprint(text: Any, tokens: Any) -> str:
    """SHA-256 of what is evaluated."""
    if isinstance(text, os.PathLike):
        return hashlib.sha256(Path(text).read_bytes()).hexdigest()
    if isinstance(text, str):
        return hashlib.sha256(text.encode()).hexdigest()
    return hashlib.sha256(np.ascontiguousarray(tokens, np.int64).tobytes()).hexdigest()


def _read(path: Path, settings: dict[str, Any]) -> dict[str, Evaluation]:
    """Results by file that were made with these settings; none where there is no file yet."""
    if not path.exists():
        return {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["kind"] != _KIND:
            raise KeyError
        others = stored["settings"]
        found = {json.dumps(e["file"]): Evaluation.from_dict(e["evaluation"]) for e in stored["evaluations"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not a file of cuquant's evaluations: name another") from None
    differing = [key for key in {**others, **settings} if others.get(key) != settings.get(key)]
    if differing:
        raise ValueError(
            f"{path} has results of other settings ({', '.join(sorted(differing))}): "
            "remove it, or name another"
        )
    return found


def _write(path: Path, settings: dict[str, Any], known: dict[str, Evaluation]) -> None:
    from .. import __version__

    evaluations = [{"file": json.loads(stamp), "evaluation": e.to_dict()} for stamp, e in known.items()]
    stored = {"kind": _KIND, "cuquant": __version__, "settings": settings, "evaluations": evaluations}
    with replacing(path) as part:
        part.write_text(to_json(stored) + "\n", encoding="utf-8")

"""Floor 1: passages and the reference's answers as files, so that `verify` needs neither torch nor the model.

    golden/written.json           names, words, noise, what was not applicable
    golden/written.safetensors    "<passage>/<array>": the inputs, the tokens, and of the answers the kept logits in
                                  float32 and what is known of every place

Like `golden`, the same passages and answers give the same bytes, and nothing that is read is trusted.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import disk
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.passages import Asked, Free, Known, Passage, Seen, sha256

WORDS, ARRAYS = "written.json", "written.safetensors"
VERSION = 1

_TYPES: dict[str, Any] = {
    "index": np.int64,
    "values": np.float32,
    "top": np.int64,
    "second": np.int64,
    "margin": np.float32,
    "peak": np.float32,
    "loss": np.float32,
    "finite": np.bool_,
    "there": np.bool_,
    "tokens": np.int64,
    "lengths": np.int64,
    "input_ids": np.int64,
    "attention_mask": np.int64,
}
_INPUTS = ("input_ids", "attention_mask")


def write(directory: Path, asked: Asked) -> None:
    """Writes both files into `directory` (made when missing). ConversionError: no room."""
    from safetensors.numpy import save

    arrays: dict[str, np.ndarray] = {}
    words: list[dict[str, Any]] = []
    for each in asked.passages:
        arrays |= {f"{each.name}/{name}": each.inputs[name] for name in _INPUTS}
        arrays[f"{each.name}/tokens"] = each.tokens
        known = asked.known.get(each.name)
        if known is not None:
            arrays |= {f"{each.name}/seen/{f.name}": getattr(known.seen, f.name) for f in fields(Seen)}
            if known.free is not None:
                arrays |= {f"{each.name}/free/{f.name}": getattr(known.free, f.name) for f in fields(Free)}
        words.append(
            {
                "name": each.name,
                "about": each.about,
                "prompt": each.prompt,
                "new": each.new,
                "encodes": each.encodes,
                "known": known is not None,
                "free": known is not None and known.free is not None,
            }
        )
    data = {
        "version": VERSION,
        "sha256": sha256(asked.passages),
        "scale": asked.scale,
        "noise": dict(asked.noise),
        "eos": list(asked.eos),
        "not_applicable": dict(asked.not_applicable),
        "own": list(asked.own),
        "notes": list(asked.notes),
        "passages": words,
    }
    packed = {name: np.asarray(array, _TYPES[name.rpartition("/")[2]], order="C") for name, array in arrays.items()}
    with disk.disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ARRAYS).write_bytes(save(packed))
        disk.write_json_atomic(directory / WORDS, data)


def there(directory: Path) -> bool:
    """Whether a golden of what is written lies here."""
    return (directory / WORDS).is_file()


def read(directory: Path) -> Asked:
    """As it was written. UsageError: a file is missing. DriftError: one is damaged, or they do not fit each other."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = directory / WORDS
    try:
        data = json.loads(disk.inside(directory, WORDS).read_text(encoding="utf-8"))
        arrays = load_file(disk.inside(directory, ARRAYS))
    except OSError as error:
        raise UsageError(f"{directory} holds no answers of a model that writes: {error}; convert again") from error
    except (ValueError, RecursionError, SafetensorError) as error:
        raise DriftError(f"{path} or {ARRAYS} beside it is damaged ({error}); restore it or convert again") from error
    passages: list[Passage] = []
    known: dict[str, Known] = {}
    try:
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}, this nlpconvert reads {VERSION}")
        for word in data["passages"]:
            name = str(word["name"])

            def take(key: str, name: str = name) -> np.ndarray:
                array = arrays.pop(f"{name}/{key}")
                if array.dtype != _TYPES[key.rpartition("/")[2]]:
                    raise ValueError(f"{name}/{key} is {array.dtype}")
                return array

            passage = Passage(
                name,
                str(word["about"]),
                {key: take(key) for key in _INPUTS},
                take("tokens"),
                int(word["prompt"]),
                int(word["new"]),
                bool(word["encodes"]),
            )
            passages.append(passage)
            if word["known"]:
                seen = Seen(**{f.name: take(f"seen/{f.name}") for f in fields(Seen)})
                free = Free(**{f.name: take(f"free/{f.name}") for f in fields(Free)}) if word["free"] else None
                _check(passage, seen, free)
                known[name] = Known(seen, free)
        if arrays:
            raise ValueError(f"{next(iter(arrays))} belongs to no passage")
        if sha256(passages) != data["sha256"]:
            raise ValueError("the passages are not those that the answers are about")
        return Asked(
            passages,
            known,
            float(data["scale"]),
            {str(name): float(value) for name, value in data["noise"].items()},
            tuple(int(each) for each in data["eos"]),
            {str(name): str(why) for name, why in data["not_applicable"].items()},
            tuple(str(each) for each in data["own"]),
            tuple(str(each) for each in data["notes"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DriftError(f"{path} does not fit the arrays beside it ({error}); convert again") from error


def _check(passage: Passage, seen: Seen, free: Free | None) -> None:
    """ValueError where the parts do not fit each other."""
    shape = passage.tokens.shape
    places = (seen.top, seen.second, seen.margin, seen.peak, seen.loss, seen.finite, seen.there)
    if any(array.shape != shape for array in places):
        raise ValueError(f"{passage.name}: answers of another shape than {shape}")
    if seen.index.ndim != 2 or seen.index.shape[1] != 2 or seen.values.shape[:1] != seen.index.shape[:1]:
        raise ValueError(f"{passage.name}: an index of another form")
    if ((seen.index < 0) | (seen.index >= np.array(shape))).any() or seen.values.ndim != 2:
        raise ValueError(f"{passage.name}: an index out of its passage")
    if free is not None:
        rows = len(passage.tokens)
        if free.lengths.shape != (rows,) or any(
            array.shape != free.tokens.shape for array in (free.second, free.margin, free.peak)
        ):
            raise ValueError(f"{passage.name}: free texts of another shape")
        if free.tokens.ndim != 2 or len(free.tokens) != rows or (free.lengths > free.tokens.shape[1]).any():
            raise ValueError(f"{passage.name}: free texts of another shape")

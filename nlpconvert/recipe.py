"""Floor 1: the recipe: what was decided for every layer and by which numbers, to be read, committed and replayed.

`recipe.json` is for people: a layer's module path, precision, strength, scale, the drift it introduces, the candidates
with their drift and latency. The per-channel numbers lie beside it in `recipe.safetensors`, whose hash it holds.
Replaying measures and chooses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import disk
from nlpconvert.errors import UsageError
from nlpconvert.integers import Preparation

FILE = "recipe.json"
ARRAYS = "recipe.safetensors"
SCHEMA = 1

LAYER_ARRAYS = ("bias", "importance")
"""What a layer has for every channel: kept in ARRAYS."""

PRECISIONS = ("int8", "int8-weight", "int4-weight", "float32")


@dataclass(frozen=True)
class Layer:
    """One linear layer. `name` is its module path in the checkpoint, `site` that of the first layer which shares its
    input. `share` is its part of all linear FLOPs; `drift` what quantizing its site alone moved the outputs (relative
    energy, 0.0 where it was not measured); `why` says why a layer is not quantized.
    """

    name: str
    site: str
    precision: str
    share: float
    drift: float = 0.0
    why: str = ""
    block: int = 0  # weights with one scale (4 and 8 bit weight-only)
    zero_points: bool = False  # whether every block has one
    strength: float = 0.0  # power of its inputs' size that the weights are multiplied by
    bias: np.ndarray | None = None  # what is taken off the bias: (outputs,)
    importance: np.ndarray | None = None  # mean square of every input: (inputs,)


@dataclass(frozen=True)
class Candidate:
    """One way that was measured: `drift` in the task's own measure as text, `used` the share of the tolerance,
    `latency` over the plain float32 file's in the same run (0.0 where it was not measured)."""

    name: str
    drift: str
    used: float
    latency: float
    share: float
    chosen: bool = False
    note: str = ""


@dataclass(frozen=True)
class Recipe:
    """All decisions. `kind`: "static", "weight-only", "dynamic". `base`: the step whose graph is changed: "onnx" or
    "onnx-optimized". `activation`: "int8" or "uint8". `largest`: the largest integer of an 8-bit weight."""

    step: str
    kind: str
    base: str
    parent_sha256: str
    layers: tuple[Layer, ...]
    sites: Mapping[str, Preparation] = field(default_factory=dict)
    activation: str = "int8"
    largest: int = 127
    candidates: tuple[Candidate, ...] = ()
    search: Mapping[str, Any] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Part of the linear FLOPs that is not floating point; what a site's outliers cost is taken off."""
        total = 0.0
        for layer in self.layers:
            if layer.precision == "float32":
                continue
            site = self.sites.get(layer.site)
            apart = len(site.outliers) / len(site.shift) if site is not None and layer.precision == "int8" else 0.0
            total += layer.share * (1 - apart)
        return total

    def layer(self, name: str) -> Layer:
        """The layer of that name. UsageError when the recipe does not know it: it is another model's."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise UsageError(f"the recipe says nothing about {name}: it is another model's")


def write(recipe: Recipe, directory: Path) -> None:
    """Writes both files into `directory`."""
    from safetensors.numpy import save

    arrays: dict[str, np.ndarray] = {}
    sites: dict[str, Any] = {}
    for name, site in recipe.sites.items():
        arrays[f"{name}/shift"], arrays[f"{name}/multiplier"] = site.shift, site.multiplier
        sites[name] = {
            "scale": site.scale,
            "strength": site.strength,
            "outliers": list(site.outliers),
            "error": site.error,
        }
    layers = []
    for layer in recipe.layers:
        row = asdict(replace(layer, bias=None, importance=None))
        for kind in LAYER_ARRAYS:
            if (array := getattr(layer, kind)) is not None:
                arrays[f"{layer.name}/{kind}"] = array
            del row[kind]
        layers.append(row)
    data = {
        "schema": SCHEMA,
        "step": recipe.step,
        "kind": recipe.kind,
        "base": recipe.base,
        "parent_sha256": recipe.parent_sha256,
        "activation": recipe.activation,
        "largest": recipe.largest,
        "share": round(recipe.share, 6),
        "candidates": [asdict(each) for each in recipe.candidates],
        "search": dict(recipe.search),
        "sites": sites,
        "layers": layers,
    }
    with disk.disk_errors(directory):
        (directory / ARRAYS).write_bytes(save({name: np.ascontiguousarray(value) for name, value in arrays.items()}))
        data["arrays_sha256"] = disk.sha256_file(directory / ARRAYS)
        disk.write_json_atomic(directory / FILE, data)


def read(path: Path) -> Recipe:
    """The recipe at `path` (recipe.json, its arrays beside it). UsageError where it cannot be read or does not fit."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise UsageError(f"{path}: schema {data['schema']}; this version reads {SCHEMA}")
        beside = path.parent / ARRAYS
        if disk.sha256_file(beside) != data["arrays_sha256"]:
            raise UsageError(f"{beside} is not the file that {path.name} was written with; take both from one run")
        arrays = load_file(beside)
        sites = {
            name: Preparation(
                shift=arrays[f"{name}/shift"],
                multiplier=arrays[f"{name}/multiplier"],
                scale=float(row["scale"]),
                outliers=tuple(int(i) for i in row["outliers"]),
                strength=float(row["strength"]),
                error=float(row["error"]),
            )
            for name, row in data["sites"].items()
        }
        layers = tuple(
            Layer(**row, bias=arrays.get(f"{row['name']}/bias"), importance=arrays.get(f"{row['name']}/importance"))
            for row in data["layers"]
        )
        unknown = [layer for layer in layers if layer.precision not in PRECISIONS]
        if unknown:
            raise UsageError(f"{path}: {unknown[0].name} has the precision {unknown[0].precision!r}")
        for name, site in sites.items():
            if not (np.isfinite(site.shift).all() and np.isfinite(site.multiplier).all() and 0 < site.scale < 1e6):
                raise UsageError(f"{path}: the scales of {name} are not sane")
        return Recipe(
            step=str(data["step"]),
            kind=str(data["kind"]),
            base=str(data["base"]),
            parent_sha256=str(data["parent_sha256"]),
            layers=layers,
            sites=sites,
            activation=str(data["activation"]),
            largest=int(data["largest"]),
            candidates=tuple(Candidate(**row) for row in data["candidates"]),
            search=data["search"],
        )
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise UsageError(f"{path} is no recipe that can be replayed ({type(error).__name__}: {error})") from error


def told(candidates: Sequence[Candidate]) -> list[str]:
    """The table of candidates, a line each."""
    if not candidates:
        return []
    names = max(len(each.name) for each in candidates)
    drifts = max(len(each.drift) for each in candidates)
    lines = []
    for each in candidates:
        latency = f"{each.latency:.2f} x float32" if each.latency else "not timed"
        mark = "  <- chosen" if each.chosen else f"  {each.note}" if each.note else ""
        lines.append(f"{each.name:<{names}}  {each.drift:<{drifts}}  {each.share:6.1%} in integers  {latency}{mark}")
    return lines

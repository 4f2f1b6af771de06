"""Floor 3: whether the model that is trained computes what the artifact does: a condition of training it.

Each layer is given the input that it has in ONNX Runtime and has to answer the same, to float32 noise. Over all layers
that cannot be asked: a value that lies between two integers goes either way on the last digit, and all that follow go
with it. There the drift from float32 has to be as large.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert.artifact import Artifact
from nlpconvert.errors import DriftError
from nlpconvert.inputs import case_tokens
from nlpconvert.recipe import Recipe
from nlpconvert.search import Bench

if TYPE_CHECKING:
    from nlpconvert.training.fake_quant import FakeQuantized

LAYER = 1e-3
"""Relative difference of a layer's answers to the same input: float32 noise, and a value that is rounded otherwise."""
DRIFT = 2.0
"""The simulation's drift may be so many times the artifact's, or as small a part of it."""

STUDENT = Path("student")
"""Stands for the model in PyTorch where a bench is asked for a file's score."""


@dataclass
class Held(Bench):
    """A bench that scores the model in PyTorch too, on the same texts by the same rule."""

    student: FakeQuantized | None = None

    def open(self, path: Path, base: Artifact | None = None) -> Any:
        """A session on a file, or the student."""
        if path != STUDENT:
            return super().open(path, base)
        assert self.student is not None
        return _Session(self.student)


class _Session:
    """The student as a session."""

    def __init__(self, student: FakeQuantized) -> None:
        self.run = student.run

    def close(self) -> None:
        """Nothing is held open."""


def check(student: FakeQuantized, bench: Held, made: Recipe, base: Artifact, artifact: Artifact) -> dict[str, Any]:
    """How near the student is to an artifact of the recipe `made` on the graph of `base`. DriftError where it is not
    the same."""
    from nlpconvert.backends import onnxruntime
    from nlpconvert.convert import derived, retrained

    names = {layer.name for layer in made.layers if layer.precision == "int8"}
    inner = retrained.values(derived.load(artifact).graph)
    places = [
        each
        for each in retrained.places(derived.load(base).graph, names)
        if each.input in inner and each.output in inner
    ]
    if not places:
        raise DriftError(f"no layer of {artifact.step} can be held against PyTorch: nothing was trained")
    wanted = sorted({name for each in places for name in (each.input, each.output)})
    tapped = derived.tap(artifact.path, bench.scratch / "tapped", wanted)
    session = onnxruntime.open_file(tapped, threads=bench.work.options.threads, data=artifact.directory)
    case = sorted(bench.cases, key=case_tokens)[len(bench.cases) // 2]
    try:
        values = session.tap(case.inputs, wanted)
    finally:
        session.close()
    apart = {
        each.layer: _relative(values[each.output], student.layer(each.layer, values[each.input], each.biased))
        for each in places
    }
    worst = max(apart, key=lambda name: apart[name])
    if not apart[worst] <= LAYER:
        raise DriftError(
            f"PyTorch does not compute {worst} as ONNX Runtime does: {apart[worst]:.1e} apart on the same input, and "
            f"{LAYER:.0e} is allowed; nothing was trained"
        )
    simulated = bench.score(STUDENT).energy ** 0.5
    measured = bench.score(artifact.path, artifact).energy ** 0.5
    if not measured / DRIFT <= simulated <= measured * DRIFT:
        raise DriftError(
            f"with these layers the model in PyTorch drifts by {simulated:.1e} and the artifact by {measured:.1e}: "
            "they are not the same, and nothing was trained"
        )
    return {
        "layers": len(apart),
        "of": len(names),
        "worst_layer": apart[worst],
        "drift_simulated": simulated,
        "drift_artifact": measured,
    }


def _relative(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Root mean square of the difference over the reference's; a shape of another kind is infinitely far."""
    if reference.shape != candidate.shape:
        return float("inf")
    size = float(np.linalg.norm(reference.astype(np.float64)))
    return float(np.linalg.norm(candidate.astype(np.float64) - reference)) / (size or 1.0)

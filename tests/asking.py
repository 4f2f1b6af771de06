"""Making one artifact of a tiny model and asking it, without the line around it: what several rooms' tests share."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import disk, probes, source
from nlpconvert.artifact import STEPS, Artifact
from nlpconvert.convert import onnx, torchscript
from nlpconvert.inputs import Item, Row, collate
from nlpconvert.models import Facts
from nlpconvert.source import Loaded
from tests import tiny

CLOSE = {"rtol": 1e-5, "atol": 2e-5}
"""Two float32 computations of one answer, for outputs of order 1: what `tiny.scale` gives."""


def loaded(row: tiny.Tiny, directory: Path, **values: Any) -> Loaded:
    """The reference of a tiny model, through a checkpoint in `directory`."""
    return source.load(str(tiny.save(row, directory, **values)))


def make(step: str, model: Loaded, directory: Path, **options: Any) -> Artifact:
    """The artifact of "torchscript" or "onnx" in `directory`, as the line would make it."""
    directory.mkdir(parents=True, exist_ok=True)
    example = probes.export_example(model.facts, model.encode)
    if step == "torchscript":
        made = torchscript.convert(model.module, example, model.facts, directory, **options)
    else:
        options = {"companions": model.directory, "parameter_bytes": model.parameter_bytes, **options}
        made = onnx.convert(model.module, example, model.facts, directory, **options)
    return Artifact(
        step=step,
        path=directory / made.file,
        format=STEPS[step].format,
        precision="float32",
        task=model.facts.task,
        inputs=made.inputs,
        outputs=made.outputs,
        files=disk.hash_tree(directory),
        parent="source",
        parent_sha256="",
        made_by={**made.made_by, "notes": list(made.notes)},
    )


def ask(artifact: Artifact, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One pass through the artifact as it lies on disk."""
    module = {"torchscript": "torchscript", "onnx": "onnxruntime"}[artifact.format]
    session = importlib.import_module(f"nlpconvert.backends.{module}").open(artifact, threads=1)
    try:
        answers: dict[str, np.ndarray] = session.run(batch)
        return answers
    finally:
        session.close()


def batch(
    facts: Facts, lengths: Sequence[int], *, left: bool = False, width: int | None = None, target: int = 5
) -> dict[str, np.ndarray]:
    """Rows of drawn ids of these lengths; the n-th row is the same whatever stands beside it."""
    items = []
    for number, length in enumerate(lengths):
        rng = np.random.default_rng(number)
        ids, types = rng.integers(6, facts.vocab_size, 600)[:length], np.arange(length) * 2 // max(length, 1)
        top = max(facts.type_vocab_size - 1, 0)
        row = Row(tuple(map(int, ids)), tuple(int(min(each, top)) for each in types))
        items.append(Item((row,), tuple(map(int, rng.integers(6, facts.vocab_size, target)))))
    return collate(facts, items, left=left, length=width)

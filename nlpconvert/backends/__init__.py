"""Floor 2: how an artifact is run, one file per runtime, opened by the artifact's format.

Each file has `open(artifact, *, device, threads) -> Session`. A runtime that is missing raises MissingPackage, an
artifact that this machine cannot run raises CannotRunHere; both say which and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

Batch = Mapping[str, np.ndarray]


class Session(Protocol):
    """An opened artifact: arrays in by name, arrays out by name."""

    provider: str
    """What really runs it: "CPUExecutionProvider", "cuda:0 NVIDIA ...", ..."""
    precision: str
    """The arithmetic that really runs: "float32", "float32 arithmetic on float16 weights", ..."""

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """One forward pass. Shapes as the artifact's specs say; ids are int64."""
        ...

    def close(self) -> None:
        """Free what the session holds."""
        ...


class Tapping(Protocol):
    """A session that can also give back inner tensors by name."""

    def tap(self, batch: Batch, names: Sequence[str]) -> dict[str, np.ndarray]:
        """One forward pass that returns the inner tensors `names`."""
        ...

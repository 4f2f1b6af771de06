"""Floor 1, validators: how many decisions would change on more text of the same kind, told from the margins.

Counting changes among a hundred texts cannot tell 0.1 % from 1 %. The reference's margins between its best two scores,
and how far the candidate moves such margins, can: taking the two for independent, every margin meets every movement,
in either direction, and the share of those pairs in which the movement is the larger is the share to expect.
"""

from __future__ import annotations

import numpy as np

from nlpconvert.golden import Reference
from nlpconvert.inputs import Case
from nlpconvert.models import OutputRow
from nlpconvert.validators.scored import blocks, scored_by


class Margins:
    """Sees one output's decisions case by case."""

    def __init__(self, output: OutputRow) -> None:
        self._output = output
        self._margins: list[np.ndarray] = []
        self._moved: list[np.ndarray] = []

    def add(self, case: Case, reference: Reference, candidate: np.ndarray) -> None:
        """One case. Raises ValueError where mask or shapes do not fit."""
        for block in blocks(self._output, reference, candidate, scored_by(case, self._output, reference)):
            if block.reference.shape[1] < 2:
                continue
            best = np.argsort(block.reference, axis=1)[:, -2:]
            before = np.diff(np.take_along_axis(block.reference, best, axis=1), axis=1)[:, 0]
            after = np.diff(np.take_along_axis(block.candidate, best, axis=1), axis=1)[:, 0]
            self._margins.append(before)
            self._moved.append(after - before)

    def expected(self) -> float:
        """Share of decisions that are expected to change: 0.0 without any, 1.0 where something is not finite."""
        if not self._margins:
            return 0.0
        margins, moved = np.concatenate(self._margins), np.concatenate(self._moved)
        if not np.isfinite(moved).all():
            return 1.0
        sizes = np.sort(np.abs(moved))
        larger = len(sizes) - np.searchsorted(sizes, margins, side="right")
        return float(larger.mean() / len(sizes) / 2)

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


class TextMargins:
    """Sees texts that the reference wrote itself and now reads again: one is written the same as long as no token is.

    Only the best two scores of the reference are kept.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self._margins: list[np.ndarray] = []
        self._moved: list[np.ndarray] = []
        self.changed = 0

    @property
    def rows(self) -> int:
        """Texts that a candidate has answered."""
        return len(self._margins)

    def reference(self, name: str, logits: np.ndarray, real: np.ndarray, sure: float = 0.0) -> None:
        """The reference's logits of a case, (rows, tokens, vocabulary), and which tokens count, bool (rows, tokens).

        A text in which the best score was ever less than `sure` above the next is left out.
        """
        best = np.argsort(-logits, axis=2, kind="stable")[:, :, :2]
        scores = np.take_along_axis(logits, best, axis=2).astype(np.float64)
        margins = scores[:, :, 0] - scores[:, :, 1]
        unsure = (margins < sure) & real
        self._kept[name] = best, margins, real & ~unsure.any(axis=1, keepdims=True)

    def fresh(self) -> TextMargins:
        """The same reference, and no candidate's answers yet."""
        found = TextMargins()
        found._kept = self._kept
        return found

    def add(self, name: str, logits: np.ndarray) -> None:
        """A candidate's logits of a case. Raises KeyError for a case without reference."""
        best, margins, counted = self._kept[name]
        scores = np.take_along_axis(logits, best, axis=2).astype(np.float64)
        moved = scores[:, :, 0] - scores[:, :, 1] - margins
        other = logits.argmax(axis=2) != best[:, :, 0]
        for row, inside in enumerate(counted):
            if inside.any():
                self._margins.append(margins[row, inside])
                self._moved.append(moved[row, inside])
                self.changed += bool(other[row, inside].any())

    def expected(self) -> float:
        """Share of texts that are expected to change at a token, as `Margins.expected` tells it of one decision."""
        if not self._margins:
            return 0.0
        moved = np.concatenate(self._moved)
        if not np.isfinite(moved).all():
            return 1.0
        sizes = np.sort(np.abs(moved))
        kept = [
            np.prod(1 - (len(sizes) - np.searchsorted(sizes, margins, side="right")) / len(sizes) / 2)
            for margins in self._margins
        ]
        return float(1 - np.mean(kept))

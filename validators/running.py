"""Floor 1, validators: what is kept while cases come in: problems, sums of a case, worst and mean of a measure."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nlpconvert.validators.findings import Element, Score
from nlpconvert.validators.scored import Block, Floats


class Problems:
    """What fails whatever the numbers are: each said once, with the first case and how many showed it."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, list[str]]] = {}

    def add(self, text: str, case: str, detail: str = "") -> None:
        """One problem seen in one case."""
        cases = self._found.setdefault(text, (detail, []))[1]
        if case not in cases:
            cases.append(case)

    def worded(self) -> list[str]:
        """A sentence for each."""
        return [
            f"{text}{f': {detail}' if detail else ''} "
            + (f"(case {cases[0]})" if len(cases) == 1 else f"(in {len(cases)} cases, first {cases[0]})")
            for text, (detail, cases) in self._found.items()
        ]


class CaseScore:
    """Sums over one case."""

    def __init__(self) -> None:
        self.scored = self.decisions = self.changed = self.positions = 0
        self.worst_abs = self.worst_rel = self.kl = 0.0
        self.cosine = 1.0
        self.rows_changed: set[int] = set()


class Running:
    """Mean and worst of a measure over vectors."""

    def __init__(self, pick: Callable[[Floats], np.intp]) -> None:
        self.pick = pick  # np.argmin where less is worse, np.argmax where more is
        self.count = 0
        self.total = 0.0
        self.worst = math.nan
        self.case = ""
        self.index: tuple[int, ...] = ()

    def add(self, values: Floats, case: str) -> int | None:
        """Add values; the index of the new worst, if it is among them."""
        i = int(self.pick(values))
        value = float(values[i])
        new = not self.count or int(self.pick(np.array([self.worst, value]))) == 1
        self.count += len(values)
        self.total += float(values.sum())
        if not new:
            return None
        self.worst, self.case = value, case
        return i

    def score(self) -> Score | None:
        """As data; None when there were no values."""
        if not self.count:
            return None
        return Score(self.count, self.total / self.count, self.worst, self.case, self.index)


def element(block: Block, i: int, j: int, difference: float, case: str, shape: tuple[int, ...]) -> Element:
    """One element of a block as a finding."""
    return Element(block.at(i, j), float(block.reference[i, j]), float(block.candidate[i, j]), difference, case, shape)

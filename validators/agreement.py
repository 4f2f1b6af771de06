"""Floor 1, validators: agreement that no single element shows: top-k, nearest neighbours, label sequences, spans.

Each takes the cases as they come and is told as data at the end. None of them decides; what decides is `tolerance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlpconvert.golden import Reference
from nlpconvert.inputs import Case
from nlpconvert.models import OutputRow
from nlpconvert.validators.scored import Bools, Floats, scored_by

TOP = 5
"""How many of the best are held against each other."""
MOST_ROWS = 512
"""Rows among which nearest neighbours are looked for."""
SAME_TEXT = 1 - 1e-6
"""Rows whose cosine in the reference is above this are one text: neither is the other's neighbour."""
BINS = 64
"""Powers of two in a histogram: 2**-56 to 2**7."""
LOWEST = -56


@dataclass(frozen=True)
class TopK:
    """Mean share of the reference's k best that are among the candidate's k best: |R & C| / k, over `count` vectors."""

    k: int
    count: int
    agreement: float

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TopK:
        """The reverse of `findings.plain`."""
        return cls(data["k"], data["count"], float(data["agreement"]))


@dataclass(frozen=True)
class Neighbours:
    """Embeddings among themselves: of how many rows, whose nearest neighbour (by cosine) changed.

    `correlation`, `worst`: Spearman's rank correlation of a row's cosines to all others, mean and worst over rows
    (Spearman 1904; ranks without correction for ties).
    """

    rows: int
    changed: int
    correlation: float
    worst: float

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Neighbours:
        """The reverse of `findings.plain`."""
        return cls(data["rows"], data["changed"], float(data["correlation"]), float(data["worst"]))


@dataclass(frozen=True)
class Units:
    """Sequences of labels, or answer spans: how many there are, and how many differ in any of their decisions."""

    count: int
    changed: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Units:
        """The reverse of `findings.plain`."""
        return cls(data["count"], data["changed"])


class TopKs:
    """Running top-k agreement of one output."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0

    def add(self, reference: Floats, candidate: Floats) -> None:
        """Vectors in rows, (vectors, width); nothing where a vector is hardly longer than k."""
        if reference.shape[1] < 2 * TOP or not len(reference):
            return
        ours = np.argpartition(reference, -TOP, axis=1)[:, -TOP:]
        theirs = np.argpartition(candidate, -TOP, axis=1)[:, -TOP:]
        self.total += float((ours[:, :, None] == theirs[:, None, :]).any(axis=2).sum()) / TOP
        self.count += len(reference)

    def found(self) -> TopK | None:
        """None where no vector was long enough."""
        return TopK(TOP, self.count, self.total / self.count) if self.count else None


class Near:
    """Collects the rows of an output of one vector a text."""

    def __init__(self) -> None:
        self._reference: list[Floats] = []
        self._candidate: list[Floats] = []
        self._rows = 0

    def add(self, reference: Floats, candidate: Floats) -> None:
        """Rows (rows, hidden); those past MOST_ROWS are left out."""
        room = MOST_ROWS - self._rows
        self._reference.append(reference[:room].astype(np.float32))
        self._candidate.append(candidate[:room].astype(np.float32))
        self._rows += len(self._reference[-1])

    def found(self) -> Neighbours | None:
        """None where fewer than three texts differ from each other."""
        if self._rows < 3:
            return None
        ours, theirs = _unit(np.concatenate(self._reference)), _unit(np.concatenate(self._candidate))
        alike = np.triu(ours @ ours.T > SAME_TEXT, 1).any(axis=0)
        ours, theirs = ours[~alike], theirs[~alike]
        if len(ours) < 3 or not np.isfinite(theirs).all():
            return None
        others = ~np.eye(len(ours), dtype=np.bool_)
        before = (ours @ ours.T)[others].reshape(len(ours), -1)
        after = (theirs @ theirs.T)[others].reshape(len(ours), -1)
        correlation = _spearman(before, after)
        changed = int((before.argmax(axis=1) != after.argmax(axis=1)).sum())
        return Neighbours(len(ours), changed, float(correlation.mean()), float(correlation.min()))


def _unit(rows: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    found: np.ndarray = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    return found


def _spearman(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Pearson's correlation of ranks, row by row."""
    middle = (before.shape[1] - 1) / 2
    one = before.argsort(axis=1).argsort(axis=1).astype(np.float64) - middle
    two = after.argsort(axis=1).argsort(axis=1).astype(np.float64) - middle
    found: np.ndarray = (one * two).sum(axis=1) / np.sqrt((one**2).sum(axis=1) * (two**2).sum(axis=1))
    return found


class Sequences:
    """Rows of token decisions: a row counts as changed when any of its decisions is."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = 0

    def add(self, mask: Bools, rows_changed: set[int]) -> None:
        """One case: its mask (batch, sequence), and the rows that hold a changed decision."""
        self.count += int(mask.any(axis=1).sum())
        self.changed += len(rows_changed)

    def found(self) -> Units | None:
        """None without rows."""
        return Units(self.count, self.changed) if self.count else None


class Spans:
    """Question answering: a span is the pair of best start and best end; it changed when either did."""

    def __init__(self, outputs: Sequence[OutputRow]) -> None:
        self._outputs = [o for o in outputs if o.measure == "position"]
        self._found = Units(0, 0)

    def add(self, case: Case, answers: Mapping[str, Reference], candidate: Mapping[str, np.ndarray]) -> None:
        """One case; nothing where an output is missing or of another shape, which is the tally's to say."""
        if len(self._outputs) < 2:
            return
        changed: Any = None
        rows: Any = None
        for output in self._outputs:
            reference, given = answers.get(output.name), candidate.get(output.name)
            if reference is None or given is None or given.shape != reference.shape:
                return
            try:
                mask = scored_by(case, output, reference)
            except ValueError:
                return
            rows = mask.any(axis=1)
            ours = np.where(mask, reference.values, -np.inf).argmax(axis=1)
            theirs = np.where(mask, given, -np.inf).argmax(axis=1)
            differ = np.asarray(ours != theirs)
            changed = differ if changed is None else np.logical_or(changed, differ)
        self._found = Units(self._found.count + int(rows.sum()), self._found.changed + int((changed & rows).sum()))

    def found(self) -> Units | None:
        """None without spans."""
        return self._found if self._found.count else None


class Histogram:
    """How many elements differ by how much, in powers of two: exponents come free with a float."""

    def __init__(self) -> None:
        self.counts: np.ndarray = np.zeros(BINS, np.int64)
        self.equal = 0

    def add(self, differences: Floats) -> None:
        """Absolute differences of any shape; what is not finite is left out."""
        flat = differences.reshape(-1)
        flat = flat[np.isfinite(flat)]
        _, exponents = np.frexp(flat)
        zeros = int(len(flat) - np.count_nonzero(flat))
        self.equal += zeros
        # frexp gives 2**(e-1) <= x < 2**e, and an exponent of 0 for zero: those are taken out again
        places = np.clip(exponents - 1 - LOWEST, 0, BINS - 1)
        self.counts += np.bincount(places, minlength=BINS)
        self.counts[-1 - LOWEST] -= zeros

    def found(self) -> dict[str, Any] | None:
        """{"edges": powers of ten of the bins' edges, "counts": elements, "equal": exactly equal ones}; trimmed."""
        there = np.flatnonzero(self.counts)
        if not len(there):
            return {"edges": [], "counts": [], "equal": self.equal} if self.equal else None
        first, last = int(there[0]), int(there[-1])
        edges = [round((LOWEST + k) * 0.30102999566398120, 3) for k in range(first, last + 2)]
        return {"edges": edges, "counts": [int(n) for n in self.counts[first : last + 1]], "equal": self.equal}

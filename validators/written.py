"""Floor 1, validators: how far a model that writes has moved, token by token. Arrays in, data out.

The same tokens through reference and candidate, by position and by phase (the prompt, single steps,
chunks, the whole text at once, rows that changed places, a row alone), and over the length. The units are
those of `tolerance`: `rel` is |difference| / (scale + |reference|), KL is in nats; what is allowed is there. What is
written freely, and perplexity, are `written_texts`; which fault a pattern speaks of is `written_why`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from nlpconvert.passages import Passage, Seen
from nlpconvert.validators.measures import divergences, share
from nlpconvert.validators.tally import CASE_FACTOR, NEAR_TIE, UNKNOWN_NOISE
from nlpconvert.validators.tolerance import Tolerance

# -- teacher-forced ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One element of the logits: passage, row, the real token's number in its row, the token whose score it is."""

    passage: str
    row: int
    position: int
    token: int
    reference: float
    candidate: float


@dataclass(frozen=True)
class Off:
    """One position past what is allowed: passage, row, place in the batch's tokens, number in its row, and by how many
    times."""

    passage: str
    row: int
    place: int
    position: int
    used: float


@dataclass(frozen=True)
class PhaseDrift:
    """What one phase measured. `positions`: whose best token was compared; `kept`: whose every score was."""

    name: str
    positions: int
    kept: int
    measured: float
    used: float
    out_of_tolerance: int
    worst: Place | None
    worst_abs: float
    worst_rel: float
    rms_rel: float
    kl: float
    worst_kl: float
    changed: int
    near_ties: int
    nonfinite: int
    first_nonfinite: Place | None
    decided_by: str = ""
    not_judged: str = ""

    @property
    def agrees(self) -> bool:
        """Whether it compared something and all of it is within the tolerance, or is not judged."""
        return bool(self.not_judged) or (self.kept > 0 and not self.nonfinite and self.used <= 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "agrees": self.agrees}


class Phase:
    """Running sums of one phase. `noise`: the reference's floor in the unit of `rel`, None where it is not known."""

    def __init__(
        self, name: str, scale: float, tolerance: Tolerance, noise: float | None, not_judged: str = ""
    ) -> None:
        self.name = name
        self._scale = scale
        self._tolerance = tolerance
        self._noise = UNKNOWN_NOISE if noise is None else noise
        self._not_judged = not_judged
        self.positions = self.kept = self.changed = self.near_ties = self.nonfinite = 0
        self._worst: Place | None = None
        self._worst_abs = self._worst_rel = self._worst_kl = self._square = self._kl = 0.0
        self._first: Place | None = None
        self._cases: dict[str, float] = {}
        self._case_changed: dict[str, tuple[int, int]] = {}
        self.off: list[Off] = []
        self.points: list[tuple[int, float, float]] = []

    def fresh(self) -> Phase:
        """An empty one of the same kind."""
        return Phase(self.name, self._scale, self._tolerance, self._noise)

    def add(self, passage: Passage, reference: Seen, candidate: Seen, where: np.ndarray) -> None:
        """One passage; `where` says which places are this phase's, bool (batch, total). Padding never counts."""
        real = passage.real
        number = np.cumsum(real, axis=1) - 1
        where = where & real & reference.there & candidate.there
        broken = where & ~candidate.finite & reference.finite
        if broken.any():
            self.nonfinite += int(broken.sum())
            by_time = np.argwhere(broken.T)[0]
            row, place = int(by_time[1]), int(by_time[0])
            here = Place(passage.name, row, int(number[row, place]), -1, math.nan, math.nan)
            self._first = self._first or here
            self.off += [Off(passage.name, int(r), int(p), int(number[r, p]), math.inf) for r, p in np.argwhere(broken)]
        good = where & candidate.finite & reference.finite
        self._decisions(passage.name, reference, candidate, good)
        chosen = good[reference.index[:, 0], reference.index[:, 1]]
        if not chosen.any():
            return
        index = reference.index[chosen]
        theirs, ours = reference.values[chosen].astype(np.float64), candidate.values[chosen].astype(np.float64)
        apart = np.abs(ours - theirs)
        relative = share(apart, self._scale + np.abs(theirs))
        divergence = divergences(theirs, ours)
        self.kept += len(index)
        self._square += float((relative**2).mean(axis=1).sum())
        self._kl += float(divergence.sum())
        self._worst_kl = max(self._worst_kl, float(divergence.max()))
        self._worst_abs = max(self._worst_abs, float(apart.max()))
        i, token = (int(each) for each in np.unravel_index(int(relative.argmax()), relative.shape))
        if self._worst is None or relative[i, token] > self._worst_rel:
            row, place = (int(each) for each in index[i])
            self._worst_rel = float(relative[i, token])
            self._worst = Place(
                passage.name, row, int(number[row, place]), token, float(theirs[i, token]), float(ours[i, token])
            )
        self._cases[passage.name] = float(divergence.mean())
        used = self._used(apart, relative, divergence)
        for (row, place), each, square, kl in zip(index, used, (relative**2).mean(axis=1), divergence, strict=True):
            self.points.append((int(number[row, place]), float(square), float(kl)))
            if each > 1:
                self.off.append(Off(passage.name, int(row), int(place), int(number[row, place]), float(each)))

    def _decisions(self, name: str, reference: Seen, candidate: Seen, good: np.ndarray) -> None:
        changed = good & (reference.top != candidate.top)
        may_move = NEAR_TIE * self._noise * (self._scale + reference.peak)
        near = changed & (reference.margin <= may_move) & (candidate.top == reference.second)
        self.positions += int(good.sum())
        self.changed += int(changed.sum())
        self.near_ties += int(near.sum())
        self._case_changed[name] = (int(changed.sum()) - int(near.sum()), int(good.sum()))

    def _used(self, apart: np.ndarray, relative: np.ndarray, divergence: np.ndarray) -> np.ndarray:
        """How much of what is allowed each kept position uses up; a single one may have more KL than the mean may."""
        if self._tolerance.measure == "changed":
            return np.zeros(len(apart))
        values = {"abs": apart.max(axis=1), "rel": relative.max(axis=1), "kl": divergence / CASE_FACTOR}
        return np.array([self._tolerance.used(float(each)) for each in values[self._tolerance.measure]])

    def found(self) -> PhaseDrift:
        """What was measured."""
        kl = self._kl / self.kept if self.kept else 0.0
        measured = {
            "abs": self._worst_abs,
            "rel": self._worst_rel,
            "kl": kl,
            "changed": (self.changed - self.near_ties) / self.positions if self.positions else 0.0,
        }[self._tolerance.measure]
        decided_by = ""
        if self._tolerance.measure == "kl" and self._cases:
            name, alone = max(self._cases.items(), key=lambda item: item[1])
            if alone / CASE_FACTOR > measured:
                measured, decided_by = alone / CASE_FACTOR, name
        return PhaseDrift(
            name=self.name,
            positions=self.positions,
            kept=self.kept,
            measured=measured,
            used=math.inf if self.nonfinite else self._tolerance.used(measured),
            out_of_tolerance=len({(each.passage, each.row, each.place) for each in self.off}),
            worst=self._worst,
            worst_abs=self._worst_abs,
            worst_rel=self._worst_rel,
            rms_rel=math.sqrt(self._square / self.kept) if self.kept else 0.0,
            kl=kl,
            worst_kl=self._worst_kl,
            changed=self.changed,
            near_ties=self.near_ties,
            nonfinite=self.nonfinite,
            first_nonfinite=self._first,
            decided_by=decided_by,
            not_judged=self._not_judged,
        )


# -- over the length ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bin:
    """Positions `first` to `last` (the first token of a row is 0): root mean square of `rel`, and mean KL."""

    first: int
    last: int
    positions: int
    rms: float
    kl: float


@dataclass(frozen=True)
class Curve:
    """The error over positions. `slope`: of its binary logarithm over that of the position; None where too few tell."""

    bins: tuple[Bin, ...]
    slope: float | None
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


GROWS = 0.25
"""A slope of less is none: less than a fifth more at twice the length."""


def curve(points: Sequence[tuple[int, float, float]]) -> Curve:
    """The curve over (position, mean square of `rel`, KL) of single positions: bins that double in width."""
    bins = []
    first, last = 0, 7
    while first <= max((point[0] for point in points), default=-1):
        inside = [point for point in points if first <= point[0] <= last]
        if inside:
            mean = [sum(point[n] for point in inside) / len(inside) for n in (1, 2)]
            bins.append(Bin(first, last, len(inside), math.sqrt(mean[0]), mean[1]))
        first, last = last + 1, 2 * last + 1
    usable = [each for each in bins if each.rms > 0]
    if not usable:
        return Curve(tuple(bins), None, "there is no error that could grow")
    if len(usable) < 3:
        return Curve(tuple(bins), None, "too few lengths to tell whether the error grows")
    x = np.log2([math.sqrt((each.first + 1) * (each.last + 1)) for each in usable])
    y = np.log2([each.rms for each in usable])
    weight = np.array([float(each.positions) for each in usable])
    x = x - np.average(x, weights=weight)
    slope = float((weight * x * y).sum() / (weight * x * x).sum())
    factor = f"times {2**slope:.2g} at twice the length"
    if slope >= GROWS:
        return Curve(tuple(bins), slope, f"the error grows with the length: {factor}")
    if slope <= -GROWS:
        return Curve(tuple(bins), slope, f"the error shrinks with the length: {factor}")
    return Curve(tuple(bins), slope, f"the error does not grow with the length: {factor}")


def scale_of(seen: Mapping[str, Seen]) -> float:
    """Root mean square of all kept logits of the reference."""
    total = count = 0.0
    for each in seen.values():
        values = each.values[np.isfinite(each.values)].astype(np.float64)
        total += float((values**2).sum())
        count += values.size
    return math.sqrt(total / count) if count else 0.0

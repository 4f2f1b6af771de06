"""Floor 1, validators: does a row's answer depend on its companions? Arrays in, a RowsReport out.

The same text stands in several cases (Case.twins): alone, with a long companion, under extra padding. Its candidate
answers are held against each other here; whether each of them is right is `parity`'s question. This decides nothing: it
says how large the dependence is, and whether it is the artifact's own or the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from nlpconvert.golden import Answers
from nlpconvert.inputs import KINDS, Case
from nlpconvert.models import OutputRow
from nlpconvert.validators.findings import plain
from nlpconvert.validators.measures import cosines
from nlpconvert.validators.scored import scored, token_axis

OWN_FACTOR = 10
FLOOR = 1e-5
"""A pair is flagged where the candidate's difference is above 10 * max(the reference's own, floor * scale), where floor
is the reference's noise, or 1e-5 where that was not measured."""
HELD = 1 << 18
"""Elements held of one row of one output: of a vocabulary's logits a few of the row's tokens, evenly spaced."""

Real = npt.NDArray[np.intp]
Key = tuple[str, int]  # case and row


@dataclass(frozen=True)
class RowDiff:
    """One output and one kind of twins: the pair that differs most; of flagged ones, most beyond what it may.

    `worst_abs` and `cosine` (of the least similar token or row) are the candidate's between the two answers;
    `reference_abs` is the reference's own for the same pair, None where the reference was sampled elsewhere.
    """

    name: str
    pairs: int
    flagged: int
    worst_abs: float
    cosine: float
    reference_abs: float | None
    case: str
    row: int
    twin: str
    twin_row: int
    kind: str = "company"
    own: bool = False
    """The reference differs in this pair too, beyond its noise: what is seen is the model's own."""


@dataclass(frozen=True)
class RowsReport:
    """What was found over all pairs. `problems`: pairs that could not be held against each other, and why."""

    outputs: tuple[RowDiff, ...]
    pairs: int
    problems: tuple[str, ...] = ()

    @property
    def flagged(self) -> bool:
        """Whether the artifact, beyond the model itself, answers a row by its company."""
        return any(o.flagged for o in self.outputs)

    def broken(self) -> list[str]:
        """A sentence for each output and kind in which the artifact, beyond the model itself, answers otherwise."""
        return [
            f"{o.name}: {KINDS[o.kind]} must not matter, and differs by {o.worst_abs:.1e} between row {o.row} of "
            f"{o.case} and row {o.twin_row} of {o.twin}{_own(o)}; so in {o.flagged} of {o.pairs} pairs"
            for o in self.outputs
            if o.flagged
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**plain(self), "flagged": self.flagged}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RowsReport:
        """The reverse of to_dict."""
        outputs = tuple(
            RowDiff(
                name=o["name"],
                pairs=o["pairs"],
                flagged=o["flagged"],
                worst_abs=float(o["worst_abs"]),
                cosine=float(o["cosine"]),
                reference_abs=None if o["reference_abs"] is None else float(o["reference_abs"]),
                case=o["case"],
                row=o["row"],
                twin=o["twin"],
                twin_row=o["twin_row"],
                kind=o.get("kind", "company"),
                own=o.get("own", False),
            )
            for o in data["outputs"]
        )
        return cls(outputs, data["pairs"], tuple(data["problems"]))


def _own(found: RowDiff) -> str:
    return "" if found.reference_abs is None else f" (PyTorch's own {found.reference_abs:.1e})"


@dataclass(frozen=True)
class _Held:
    """One row's answer in one output: the kept real tokens (by their order among the real ones) and their vectors."""

    tokens: Real
    candidate: npt.NDArray[Any]
    known: Real  # which of the real tokens the reference kept
    reference: npt.NDArray[Any]


class Rows:
    """Takes the cases one by one and holds a row's answer only until its last twin has come."""

    def __init__(
        self,
        cases: Sequence[Case],
        outputs: Sequence[OutputRow],
        scales: Mapping[str, float],
        noise: Mapping[str, float] | None = None,
    ) -> None:
        self._outputs = tuple(outputs)
        self._scales = scales
        self._noise = noise or {}
        asked = {case.name for case in cases}
        pairs: dict[tuple[Key, Key], str] = {}
        for case in cases:
            for twin in case.twins:
                if twin.case in asked:
                    first, second = sorted(((case.name, twin.row), (twin.case, twin.other_row)))
                    pairs[first, second] = twin.kind
        self._waiting: list[tuple[Key, Key, str]] = [(*pair, kind) for pair, kind in sorted(pairs.items())]
        self._held: dict[Key, dict[str, _Held]] = {}
        self._ids: dict[Key, list[int]] = {}
        self._found: dict[tuple[str, str], list[tuple[float, RowDiff]]] = {}
        self._compared = 0
        self._problems: list[str] = []

    def add(self, case: Case, candidate: Mapping[str, np.ndarray], answers: Answers | None = None) -> None:
        """One case's answers: the candidate's, and the reference's where known.

        An output that is missing, or whose shape does not fit the case, is left out: it is `parity`'s to report.
        """
        for row in sorted({key[1] for pair in self._waiting for key in pair[:2] if key[0] == case.name}):
            key = (case.name, row)
            self._held[key] = {
                output.name: held
                for output in self._outputs
                if output.name in candidate
                and (held := _hold(case, row, output, candidate[output.name], answers or {})) is not None
            }
            self._ids[key] = _real_ids(case, row)
        waiting = []
        for first, second, kind in self._waiting:
            if first in self._held and second in self._held:
                self._pair(first, second, kind)
            else:
                waiting.append((first, second, kind))
        self._waiting = waiting
        wanted = {key for pair in waiting for key in pair[:2]}
        self._held = {key: held for key, held in self._held.items() if key in wanted}
        self._ids = {key: ids for key, ids in self._ids.items() if key in wanted}

    def _pair(self, first: Key, second: Key, kind: str) -> None:
        if self._ids[first] != self._ids[second]:
            self._problems.append(f"row {first[1]} of {first[0]} and row {second[1]} of {second[0]} hold other tokens")
            return
        self._compared += 1
        for output in self._outputs:
            one, other = self._held[first].get(output.name), self._held[second].get(output.name)
            if one is None or other is None or not len(one.tokens) or not len(other.tokens):
                continue
            worst, cosine = _difference(output, one.tokens, one.candidate, other.tokens, other.candidate)
            own: float | None = None
            if len(np.intersect1d(one.known, other.known)):
                own, _ = _difference(output, one.known, one.reference, other.known, other.reference)
            floor = self._noise.get(output.name, FLOOR) * self._scales[output.name]
            allowed = OWN_FACTOR * max(own or 0.0, floor)
            excess = worst / allowed if allowed > 0 else (np.inf if worst > 0 else 0.0)
            excess = np.inf if np.isnan(worst) else excess
            models_own = own is not None and not own <= OWN_FACTOR * floor
            diff = RowDiff(output.name, 1, int(excess > 1), worst, cosine, own, *first, *second, kind, models_own)
            self._found.setdefault((output.name, kind), []).append((excess, diff))

    def again(
        self, case: Case, first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], answers: Answers
    ) -> None:
        """The same batch run twice: all that is scored has to be the same."""
        for output in self._outputs:
            one, two, reference = first.get(output.name), second.get(output.name), answers.get(output.name)
            if one is None or two is None or reference is None or not one.shape == two.shape == reference.shape:
                continue
            try:
                mask = scored(case, output, one.shape)
            except ValueError:
                continue
            if not mask.any():
                continue
            difference = np.abs(one[mask].astype(np.float64) - two[mask])
            # What is not finite in both, and the same, is parity's to report.
            difference[one[mask] == two[mask]] = 0.0
            rows = np.nanmax(np.where(np.isnan(difference), np.inf, difference).reshape(mask.sum(), -1), axis=1)
            worst = float(rows.max())
            row = int(np.argwhere(mask)[int(rows.argmax())][0])
            floor = self._noise.get(output.name, FLOOR) * self._scales[output.name]
            excess = worst / (OWN_FACTOR * floor) if floor else (np.inf if worst else 0.0)
            diff = RowDiff(output.name, 1, int(excess > 1), worst, 1.0, 0.0, case.name, row, case.name, row, "repeat")
            self._found.setdefault((output.name, "repeat"), []).append((excess, diff))

    def report(self) -> RowsReport:
        """What was found so far; pairs of which one side never came (not applicable) are left out."""
        outputs = []
        for found in self._found.values():
            worst = max(found, key=_rank)[1]
            flagged = sum(diff.flagged for _, diff in found)
            outputs.append(replace(worst, pairs=len(found), flagged=flagged))
        return RowsReport(tuple(outputs), self._compared, tuple(self._problems))


def row_differences(
    cases: Sequence[Case],
    outputs: Sequence[OutputRow],
    scales: Mapping[str, float],
    candidates: Mapping[str, Mapping[str, np.ndarray]],
    answers: Mapping[str, Answers] | None = None,
) -> RowsReport:
    """All cases at once, by case name; where they do not fit in memory together, feed `Rows` instead."""
    rows = Rows(cases, outputs, scales)
    for case in cases:
        if case.name in candidates:
            rows.add(case, candidates[case.name], (answers or {}).get(case.name))
    return rows.report()


def _real_ids(case: Case, row: int) -> list[int]:
    """The real tokens of a row, in order."""
    ids = case.inputs.get("input_ids")
    if ids is None:
        return []
    mask = case.inputs.get("attention_mask")
    kept = ids[row] if mask is None else ids[row][mask[row] != 0]
    return [int(n) for n in np.ravel(kept)]


def _hold(case: Case, row: int, output: OutputRow, candidate: np.ndarray, answers: Answers) -> _Held | None:
    """A row's scored answer, cut to what is held; None where the candidate's shape does not fit the case."""
    reference = answers.get(output.name)
    shape = candidate.shape if reference is None else reference.shape
    if candidate.shape != shape or len(shape) < len(output.axes) or row >= shape[0]:
        return None
    try:
        mask = scored(case, output, shape)
    except ValueError:
        return None
    none = np.zeros(0, dtype=np.intp)
    if token_axis(output) is None:
        tokens = np.flatnonzero(mask[row : row + 1])
        known = tokens if reference is not None else none
        values = reference.values[row].reshape(1, -1)[known] if reference is not None else np.zeros((0, 1))
        return _Held(tokens, candidate[row].reshape(1, -1)[tokens], known, values)
    places = np.flatnonzero(mask[row])
    width = int(np.prod(shape[2:]))
    count = min(len(places), max(4, HELD // max(width, 1)))
    tokens = np.unique(np.linspace(0, len(places) - 1, count).round().astype(np.intp)) if count else none
    answer = candidate[row, places[tokens]].reshape(len(tokens), width)
    if reference is None:
        return _Held(tokens, answer, none, np.zeros((0, width)))
    if reference.index is None:
        return _Held(tokens, answer, tokens, reference.values[row, places[tokens]].reshape(-1, width))
    kept = np.flatnonzero((reference.index[:, 0] == row) & mask[row][reference.index[:, 1]])
    known = np.searchsorted(places, reference.index[kept, 1])
    return _Held(tokens, answer, known, reference.values[kept].reshape(len(kept), width))


def _difference(
    output: OutputRow, tokens: Real, values: npt.NDArray[Any], other_tokens: Real, other: npt.NDArray[Any]
) -> tuple[float, float]:
    """Worst absolute difference and worst cosine over the tokens that both hold; NaN where one is not finite."""
    _, here, there = np.intersect1d(tokens, other_tokens, return_indices=True)
    one = values[here].astype(np.float64)
    two = other[there].astype(np.float64)
    if output.measure == "position":  # the vector runs along the row
        one, two = one.reshape(1, -1), two.reshape(1, -1)
    if not (np.isfinite(one).all() and np.isfinite(two).all()):
        return (0.0, 1.0) if np.array_equal(one, two) else (float("nan"), float("nan"))
    return float(np.abs(one - two).max()), float(cosines(one, two).min())


def _rank(found: tuple[float, RowDiff]) -> tuple[float, float]:
    """Flagged pairs by how far they are past the line, the others by their difference."""
    excess, diff = found
    return max(excess, 1.0), diff.worst_abs

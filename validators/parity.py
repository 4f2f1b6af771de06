"""Floor 1, validators: does the candidate answer as the reference does? Arrays in, a Comparison out.

Streaming: one case at a time, float64 arithmetic over bounded chunks. What counts is in `scored`, what is allowed in
`tolerance`, what is found in `findings`; the report's wording is in `report`.

The number held against the tolerance (`OutputDiff.measured`), over all scored entries of an output:

    abs      largest |candidate - reference|
    rel      largest |candidate - reference| / (scale + |reference|), scale as `scales` gives it
    cosine   smallest cosine of a vector; 1 where both are zero, 0 where one is
    changed  share of decisions that really changed (near ties stand apart), or, if more, the largest
             (changed - 2) / (10 * decisions) of one case
    kl       mean KL(reference || candidate), or, if more, a tenth of the largest mean of one case

The second halves of the last two are there so that one broken case (a left-padded batch of eight tokens among
thousands) fails, as it should, and two decisions that flip in a short text do not.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from nlpconvert.golden import Answers, Reference
from nlpconvert.inputs import Case
from nlpconvert.models import OutputRow
from nlpconvert.validators import statistics
from nlpconvert.validators.agreement import Spans
from nlpconvert.validators.findings import Comparison, OutputDiff
from nlpconvert.validators.running import Problems
from nlpconvert.validators.scored import blocks, scored_by
from nlpconvert.validators.tally import Tally
from nlpconvert.validators.tolerance import Tolerance

__all__ = ["Comparison", "Judge", "OutputDiff", "scales"]

SENTINEL = 1e30
"""Values of this size stand for minus infinity (float32's smallest number in a masked logit) and set no scale."""


def scales(outputs: Sequence[OutputRow], cases: Iterable[Case], answers: Mapping[str, Answers]) -> dict[str, float]:
    """Root mean square of the reference's scored elements, for each output over all cases, in the output's unit.

    `answers` are by case name; a case without any is passed over, as are values that are not finite or stand for
    minus infinity. 0.0 where nothing is scored.
    """
    squares = dict.fromkeys((o.name for o in outputs), 0.0)
    counts = dict.fromkeys(squares, 0)
    for case in cases:
        for output in outputs:
            reference = answers.get(case.name, {}).get(output.name)
            if reference is None:
                continue
            try:
                mask = scored_by(case, output, reference)
            except ValueError:
                continue  # what does not fit is the Judge's to report, with the case
            for block in blocks(output, reference, _shaped(reference), mask):
                values = block.reference[np.abs(block.reference) < SENTINEL]
                squares[output.name] += float(values @ values)
                counts[output.name] += values.size
    return {name: math.sqrt(squares[name] / counts[name]) if counts[name] else 0.0 for name in squares}


def _shaped(reference: Reference) -> np.ndarray:
    """An array of the reference's full shape that costs nothing, for where only the reference is read."""
    return np.broadcast_to(np.zeros((), reference.values.dtype), reference.shape)


class Judge:
    """Holds a candidate's answers against the reference's, case by case.

    `outputs` are the rows the artifact must give, no more and no fewer; `scales`, `tolerances` and `noise` (floors in
    the unit of `rel`) are by their names. `cases`: tolerances by case, then output, of cases that are judged apart.
    """

    def __init__(
        self,
        outputs: Sequence[OutputRow],
        scales: Mapping[str, float],
        tolerances: Mapping[str, Tolerance],
        noise: Mapping[str, float] | None = None,
        cases: Mapping[str, Mapping[str, Tolerance]] | None = None,
    ) -> None:
        self._outputs = tuple(outputs)
        floors = noise or {}
        self._tallies = {o.name: Tally(o, scales[o.name], tolerances[o.name], floors.get(o.name)) for o in outputs}
        self._apart = {
            case: {o.name: Tally(o, scales[o.name], own[o.name], floors.get(o.name), case) for o in outputs}
            for case, own in (cases or {}).items()
        }
        self._spans = Spans(outputs)
        self._cases = 0
        self._raised = 0
        self._not_applicable: list[tuple[str, str]] = []
        self._problems = Problems()

    def add(self, case: Case, answers: Answers, candidate: Mapping[str, np.ndarray]) -> None:
        """One case: the reference's answers and the candidate's, by output name."""
        self._cases += 1
        extra = sorted(set(candidate) - set(self._tallies))
        for name in extra:
            self._problems.add(f"the artifact gives {name}, which the reference does not have", case.name)
        self._spans.add(case, answers, candidate)
        for output in self._outputs:
            tally = self._apart.get(case.name, self._tallies)[output.name]
            reference = answers.get(output.name)
            if reference is None:
                tally.problem("the reference has no answer for it", case.name)
            elif output.name not in candidate:
                instead = f"it gives {', '.join(extra)} instead" if extra else ""
                tally.problem("the artifact does not give it", case.name, instead)
            else:
                tally.add(case, reference, np.asarray(candidate[output.name]))

    def raised(self, case_name: str, reason: str) -> None:
        """A case that the reference answers and at which the artifact failed: a failure of every output."""
        self._raised += 1
        for tally in self._apart.get(case_name, self._tallies).values():
            tally.problem("the artifact failed where the reference answers", case_name, reason)

    def not_applicable(self, case_name: str, reason: str) -> None:
        """A case that is not asked: the reference itself cannot answer it, or the artifact is not made for it."""
        self._not_applicable.append((case_name, reason))

    def comparison(self) -> Comparison:
        """All that was found so far."""
        problems = self._problems.worded()
        if not self._cases:
            problems.append(f"nothing was compared: {self._why_nothing()}")
        asked = self._cases + self._raised
        diffs = tuple(self._tallies[o.name].diff() for o in self._outputs) if asked else ()
        if self._apart:
            if all(not diff.elements and not diff.problems[1:] for diff in diffs):
                diffs = ()  # every case that was asked has a tolerance of its own
            of_cases = (tally for apart in self._apart.values() for tally in apart.values())
            diffs += tuple(tally.diff() for tally in of_cases if tally.elements or tally.broken)
        diffs = tuple(map(_told, diffs))
        return Comparison(diffs, self._cases, tuple(self._not_applicable), tuple(problems), self._spans.found())

    def _why_nothing(self) -> str:
        if self._raised:
            return f"the artifact failed at all {self._raised} cases"
        left_out = len(self._not_applicable)
        return f"none of the {left_out} cases is applicable" if left_out else "no cases"


def _told(diff: OutputDiff) -> OutputDiff:
    """With what its count of decisions can say: the interval of the changed share, and what so few cannot show."""
    if diff.decisions is None:
        return diff
    count, changed = diff.decisions.count, diff.decisions.changed - diff.decisions.near_ties
    # Without a change the exact interval needs no scipy, whose import is half a second.
    interval: tuple[float, float] | None = (0.0, 1 - ((1 - statistics.LEVEL) / 2) ** (1 / count))
    if changed:
        # scipy comes with the extras that run anything; without it there is no interval, and nothing else changes.
        found = statistics.share_interval(changed, count) if importlib.util.find_spec("scipy") else None
        interval = None if found is None else (found.low, found.high)
    return replace(diff, interval=interval, detectable=statistics.unseen_share(count))

"""Floor 3: the reference's answers to the probe set, computed before any exporter touches the model.

The model is asked through a callable; which framework stands behind it is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nlpconvert import golden
from nlpconvert.errors import DriftError, UsageError, first_line
from nlpconvert.golden import Answers, Reference
from nlpconvert.inputs import Case
from nlpconvert.models import OutputRow
from nlpconvert.progress import Progress

Call = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]

REPEATED = 2
"""So many cases are run twice: a reference that differs from itself cannot judge anything."""


@dataclass(frozen=True)
class Asked:
    """Answers by case name; `not_applicable` says why the reference itself cannot answer a case."""

    answers: Mapping[str, Answers]
    not_applicable: Mapping[str, str]
    notes: tuple[str, ...] = ()


def ask(call: Call, cases: Sequence[Case], outputs: Sequence[OutputRow], budget: int, progress: Progress) -> Asked:
    """Asks the reference every case, keeping at most `budget` bytes of answers (and one case's at a time).

    Raises DriftError when a case run twice does not give the same bits, or when no case can be answered; UsageError
    when an output is not finite in every case.
    """
    answers: dict[str, Answers] = {}
    refused: dict[str, str] = {}
    plan: golden.Plan | None = None
    repeats = REPEATED
    progress.start("reference", len(cases))
    for case in cases:
        progress.advance()
        try:
            given = call(case.inputs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            refused[case.name] = f"the reference raised {type(error).__name__}: {first_line(error)}"
            continue
        if plan is None:
            # The first case that is answered tells the sizes of the fixed axes.
            plan = golden.plan(cases, outputs, {name: array.shape for name, array in given.items()}, budget)
        if repeats and min(array.shape[0] for array in case.inputs.values()) > 1:
            repeats -= 1
            _same(case, given, call(case.inputs))
        answers[case.name] = {name: plan.keep(case, name, array) for name, array in given.items()}
    if plan is None:
        reasons = next(iter(refused.values()), "there are no cases")
        raise DriftError(f"PyTorch itself can answer none of the {len(cases)} probe cases: {reasons}")
    for row in outputs:
        broken = [name for name, given in answers.items() if not np.isfinite(given[row.name].values).all()]
        if len(broken) == len(answers):
            raise UsageError(
                f"PyTorch's own {row.name} is not finite in any of the {len(answers)} probe cases (NaN or infinite "
                "weights?): nothing can be judged by it"
            )
    return Asked(answers, refused, plan.notes)


def whole(given: Mapping[str, np.ndarray]) -> Answers:
    """A session's answers as references, nothing left out."""
    return {name: Reference(array, array.shape) for name, array in given.items()}


def _same(case: Case, first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
    for name, array in first.items():
        if not np.array_equal(array, second[name], equal_nan=True):
            moved = float(np.nanmax(np.abs(array.astype(np.float64) - second[name])))
            raise DriftError(
                f"PyTorch is not deterministic: {name} of case {case.name} moved {moved:.1e} between two runs of the "
                "same input, so nothing can be judged by it (is dropout on, or does the model draw random numbers?)"
            )

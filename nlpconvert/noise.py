"""Floor 3: the noise floor: how far the reference's own answers are from what they would be without rounding.

Measured on some of the probes, worst over their scored elements, in the unit of the tolerance `rel`
(|difference| / (scale + |reference|)):

    float64      PyTorch's float32 answers against its float64 ones
    threads      against those of another number of threads
    companions   a text's answer alone against the same in company and under padding

The largest of them is the floor. Where a model's answer truly depends on the company (XLNet), that is not noise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nlpconvert.errors import first_line
from nlpconvert.golden import Answers
from nlpconvert.inputs import Case, case_tokens
from nlpconvert.models import OutputRow
from nlpconvert.progress import Progress
from nlpconvert.reference import Call
from nlpconvert.validators import parity
from nlpconvert.validators.measures import share
from nlpconvert.validators.rows import Rows
from nlpconvert.validators.scored import blocks, scored_by

TOKENS = 2000
WORK = 2e11
"""Products that all passes of one kind may take: tokens times parameters. A float64 pass of that is some seconds."""
BY_LAYER = 2
"""Cases that are asked where float64 is had layer by layer."""
OWN = 10
"""Companions that move an answer by more than so many times the rest of the noise are the model's own doing."""

Context = Callable[[], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True)
class Noise:
    """By output: "float64", "threads", "companions" and "floor"; how float64 was had, and by which cases."""

    outputs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    float64: str = ""
    cases: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as the manifest keeps it."""
        return {"outputs": self.outputs, "float64": self.float64, "cases": list(self.cases)}


def floors(kept: Mapping[str, Any]) -> dict[str, float]:
    """Noise floors by output from what a manifest keeps; empty where none were measured."""
    outputs = kept.get("outputs", {})
    return {name: float(found["floor"]) for name, found in outputs.items() if float(found["floor"]) > 0}


@dataclass(frozen=True)
class Arithmetics:
    """The reference's other arithmetics, as contexts to ask it in; `by_layer` where float64 does not fit whole."""

    float64: Context
    other_threads: Context
    by_layer: bool


def measure(
    call: Call,
    cases: Sequence[Case],
    answers: Mapping[str, Answers],
    outputs: Sequence[OutputRow],
    parameters: int,
    arithmetics: Arithmetics,
    progress: Progress,
) -> Noise:
    """Asks some of the cases again in other arithmetics. `answers`: the float32 ones, by case.

    A reference that cannot compute in float64 leaves the other two; what was measured stands in `float64`.
    """
    chosen = _some([case for case in cases if case.name in answers and not case.from_data], parameters)
    if arithmetics.by_layer:
        chosen = chosen[:BY_LAYER]  # every pass widens all weights anew
    if not chosen:
        return Noise()
    scales = parity.scales(outputs, cases, answers)
    progress.start("noise floor", 2 * len(chosen))
    rows = Rows(chosen, outputs, scales)
    threads: dict[str, float] = {}
    with arithmetics.other_threads():
        for case, given in _asked(call, chosen, progress):
            _add(threads, case, answers[case.name], given, outputs, scales)
            rows.add(case, given)
    wide: dict[str, float] = {}
    how = "layer by layer, which leaves out what lies between layers" if arithmetics.by_layer else "the whole model"
    try:
        with arithmetics.float64():
            for case, given in _asked(call, chosen, progress):
                _add(wide, case, answers[case.name], given, outputs, scales)
    except Exception as error:  # a library raises whatever it likes, and the other two stand without it
        how = f"not measured: {first_line(error)}"
    together: dict[str, float] = {}
    for diff in rows.report().outputs:
        apart = diff.worst_abs / scales[diff.name] if scales[diff.name] else 0.0
        if np.isfinite(apart) and apart <= OWN * max(threads.get(diff.name, 0.0), wide.get(diff.name, 0.0)):
            together[diff.name] = max(together.get(diff.name, 0.0), apart)
    found = {}
    for output in outputs:
        parts = {
            "float64": wide.get(output.name, 0.0),
            "threads": threads.get(output.name, 0.0),
            "companions": together.get(output.name, 0.0),
        }
        found[output.name] = {**parts, "floor": max(parts.values())}
    return Noise(found, how, tuple(case.name for case in chosen))


def _some(cases: Sequence[Case], parameters: int) -> list[Case]:
    """Cases from the first on as far as the tokens go; at least one."""
    left = min(TOKENS, int(WORK / max(parameters, 1)))
    chosen = []
    for case in cases:
        if case_tokens(case) <= left:
            chosen.append(case)
            left -= case_tokens(case)
    return chosen or sorted(cases, key=case_tokens)[:1]


def _asked(call: Call, cases: Sequence[Case], progress: Progress) -> Iterator[tuple[Case, Mapping[str, np.ndarray]]]:
    for case in cases:
        progress.advance()
        yield case, call(case.inputs)


def _add(
    found: dict[str, float],
    case: Case,
    answers: Answers,
    given: Mapping[str, np.ndarray],
    outputs: Sequence[OutputRow],
    scales: Mapping[str, float],
) -> None:
    """The worst difference of one case, into `found` by output. What is not finite in either is passed over."""
    for output in outputs:
        reference, other = answers.get(output.name), given.get(output.name)
        if reference is None or other is None or other.shape != reference.shape:
            continue
        for block in blocks(output, reference, other, scored_by(case, output, reference)):
            with np.errstate(invalid="ignore", over="ignore"):
                apart = share(np.abs(block.candidate - block.reference), scales[output.name] + np.abs(block.reference))
            apart = apart[np.isfinite(apart)]
            if apart.size:
                found[output.name] = max(found.get(output.name, 0.0), float(apart.max()))

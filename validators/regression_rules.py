"""Floor 1, validators: what counts as a regression: the factor, the slack and the sign test that `regression` and
`regression_written` share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from nlpconvert.validators.findings import plain

FACTOR = 1.5
SLACK = 3
"""By other instruction sets (SSE4, AVX2) the same TorchScript files are up to 1.6 times the noise from PyTorch, where
the reference was made 0.04 to 0.55 times (five trained models)."""
NOISE = 5e-6
"""Unbroken float32 exports of MiniLM are 1.2e-6 to 1.3e-5 from PyTorch in the unit of `rel`, by whose kernels run."""
ALPHA = 0.05
SCALES = 1.1


@dataclass(frozen=True)
class Regression:
    """One thing that is worse. `kind` is one of

    loss, changed (decisions), nonfinite, problem, output, cases, elements, rows (an answer depends on what must not
    matter), tolerance, provider, probes, unmeasured.

    `output` is "" for what concerns the whole step. `text` is a sentence without the step's name; `before` and `after`
    are the numbers in it, None where there are none. `times`: after / before of a loss, 0 where that says nothing.
    """

    kind: str
    output: str
    text: str
    before: float | None = None
    after: float | None = None
    times: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        found: dict[str, Any] = plain(self)
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Regression:
        """The reverse of to_dict."""
        before, after = (None if data[key] is None else float(data[key]) for key in ("before", "after"))
        return cls(data["kind"], data["output"], data["text"], before, after, float(data["times"]))


def scatter(before: int, after: int) -> float:
    """P[Binomial(before + after, 1/2) >= after]: how often two equally good artifacts would change so many more."""
    total = before + after
    ways = sum(math.comb(total, k) for k in range(after, total + 1))
    return float(Fraction(ways, 2**total))

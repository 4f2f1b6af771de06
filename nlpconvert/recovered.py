"""Floor 3: what a recovery is asked to do, and what came of it. Doing it is `recovering`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nlpconvert import manifest
from nlpconvert.artifact import Outcome
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.validators.findings import Comparison

TRAIN = ("weights", "scales", "all")


@dataclass(frozen=True)
class Wishes:
    """How to train. `rate` is a factor on both learning rates; `hidden` what the distance of the layers' hidden states
    weighs in the loss; `all_int8` puts what stayed in float32 into integers first."""

    train: str = "weights"
    steps: int = 300
    batch: int = 16
    rate: float = 1.0
    hidden: float = 0.0
    seed: int = 0
    all_int8: bool = False
    model: str | None = None

    def check(self) -> None:
        """UsageError for a wish that cannot be met."""
        if self.train not in TRAIN:
            raise UsageError(f'--train "{self.train}" is unknown: it is one of {", ".join(TRAIN)}')
        for name, value, least in (("--steps", self.steps, 1), ("--batch", self.batch, 1), ("--seed", self.seed, 0)):
            if value < least:
                raise UsageError(f"{name} {value}: at least {least}")
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise UsageError(f"--rate {self.rate:g}: more than 0")
        if not (math.isfinite(self.hidden) and self.hidden >= 0):
            raise UsageError(f"--hidden {self.hidden:g}: 0 or more")


@dataclass(frozen=True)
class Recovered:
    """What came of it. `before` and `after`: outcomes of the same goldens under the same tolerance; `replaced`: whether
    the new one is in the step's place now; `record`: what the manifest keeps of the training."""

    step: str
    before: Outcome
    after: Outcome
    replaced: bool
    record: Mapping[str, Any]

    @property
    def exit_code(self) -> int:
        """The new artifact's; 1 where it was worse and so was not taken."""
        return self.after.exit_code if self.replaced else DriftError.exit_code

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "step": self.step,
            "replaced": self.replaced,
            "exit_code": self.exit_code,
            "before": manifest.outcome_to_json(self.before),
            "after": manifest.outcome_to_json(self.after),
            "recovered": dict(self.record),
        }


def far(outcome: Outcome) -> tuple[float, float]:
    """How far a judged artifact is: the share of the tolerance that its worst output uses, infinite where something
    else is wrong with it; and the largest relative difference, for two that use as much."""
    if outcome.verdict is None:
        return math.inf, math.inf
    found = Comparison.from_dict(outcome.verdict["comparison"])
    moved = max((each.relative_l2 for each in found.outputs), default=math.inf)
    if outcome.verdict["structure"] or found.problems or any(each.problems for each in found.outputs):
        return math.inf, moved
    return max((each.used for each in found.outputs), default=math.inf), moved


def told(outcome: Outcome) -> dict[str, Any]:
    """A verdict in a few numbers, by output: what was measured, on average, relative, and of how many."""
    assert outcome.verdict is not None
    return {
        each.name: {
            "measure": each.tolerance.measure,
            "allowed": each.tolerance.text,
            "measured": each.measured,
            "used": each.used,
            "mean_cosine": None if each.cosine is None else each.cosine.mean,
            "relative_l2": each.relative_l2,
            "vectors": each.vectors,
        }
        for each in Comparison.from_dict(outcome.verdict["comparison"]).outputs
    }


def finite(value: float) -> float | None:
    return round(value, 8) if math.isfinite(value) else None

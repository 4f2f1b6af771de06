"""Floor 1, validators: what scoring a step on labelled data has found, as data that can be kept and shown.

Types only. How the numbers come about is `paired` and `statistics`; their words are floor 4's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nlpconvert.validators.statistics import Interval


@dataclass(frozen=True)
class Scored:
    """One score. Differences are candidate minus reference; all that is None needs a reference.

    `top` is the largest the score can be, None for no limit. `chance`: how likely so bad a difference is by the choice
    of rows alone, one-sided. `worse`, `better`: rows that only the reference, only the candidate answers rightly (None
    where a row is not simply right or wrong). `detectable`: the smallest true change for the worse that this sample
    shows at `level` (one-sided) with 80 % power; None where the rows do not tell. `average`: over what an F1 is a mean;
    `labels`: where its labels come from; both "" for a score that has neither.
    """

    name: str
    better_is: str
    top: float | None
    candidate: float
    interval: Interval
    reference: float | None = None
    difference: float | None = None
    difference_interval: Interval | None = None
    chance: float | None = None
    worse: int | None = None
    better: int | None = None
    detectable: float | None = None
    level: float = 0.95
    average: str = ""
    labels: str = ""


@dataclass(frozen=True)
class Changed:
    """Rows whose decision the candidate changed, right or wrong; `unseen`: what no sample so small can see."""

    count: int
    rows: int
    interval: Interval
    unseen: float


@dataclass(frozen=True)
class Tripped:
    """What became of one condition of --fail-if.

    `status`: "passes", "fails", "not shown" (it does not fail, but rows so few could not have shown what was asked
    for: `warning` says so) or "not judged" (the step is what the others are held against).
    """

    text: str
    status: str
    reason: str
    warning: str = ""

    @property
    def failed(self) -> bool:
        """Whether the condition was met."""
        return self.status == "fails"


@dataclass(frozen=True)
class Scores:
    """A step on labelled data. `status`: "scored", "drift" or "not run" (`reason` says why).

    `data_sha256` is of the file, `arguments` are the flags that ask this again. `reference`: what the step is held
    against, in words ("" for nothing: then there is the score alone). `broken`: rows whose answer is not finite.
    `warnings`: sentences that say why passing may be worth less than it looks, of the conditions and of the data; the
    caller puts them among the step's notes.
    """

    step: str
    metric: str
    status: str
    reason: str = ""
    data: str = ""
    data_sha256: str = ""
    arguments: str = ""
    rows: int = 0
    reference: str = ""
    provider: str = ""
    precision: str = ""
    scores: tuple[Scored, ...] = ()
    changed: Changed | None = None
    broken: int = 0
    fail_if: tuple[Tripped, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether a condition of --fail-if was met, or the step could not be scored for what it is."""
        return self.status == "drift" or any(each.failed for each in self.fail_if)

    @property
    def exit_code(self) -> int:
        """The exit code this alone ends in."""
        return 4 if self.status == "not run" else int(self.failed)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        conditions = [{**asdict(each), "failed": each.failed} for each in self.fail_if]
        return {**asdict(self), "fail_if": conditions, "failed": self.failed}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Scores:
        """The reverse of `to_dict`. Fields that are not known here are left out."""
        values = {name: value for name, value in data.items() if name in Scores.__dataclass_fields__}
        values["scores"] = tuple(_scored(each) for each in data.get("scores", ()))
        values["fail_if"] = tuple(_tripped(each) for each in data.get("fail_if", ()))
        values["notes"] = tuple(data.get("notes", ()))
        values["warnings"] = tuple(data.get("warnings", ()))
        if data.get("changed") is not None:
            values["changed"] = Changed(**{**data["changed"], "interval": Interval(**data["changed"]["interval"])})
        return Scores(**values)


def _tripped(data: Mapping[str, Any]) -> Tripped:
    """Data of before there was a status has `failed` alone."""
    status = data.get("status") or ("fails" if data.get("failed") else "passes")
    return Tripped(data["text"], status, data["reason"], data.get("warning", ""))


def _scored(data: Mapping[str, Any]) -> Scored:
    intervals = ("interval", "difference_interval")
    values = {name: value for name, value in data.items() if name in Scored.__dataclass_fields__}
    return Scored(**{**values, **{name: Interval(**data[name]) for name in intervals if data.get(name) is not None}})

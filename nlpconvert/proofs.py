"""Floor 1: what a gate saw of an artifact that was broken on purpose, as data: frozen, plain JSON both ways.

How it is found out is `proving`'s, how it is worded `report_proof`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nlpconvert.errors import DriftError
from nlpconvert.validators.findings import plain


@dataclass(frozen=True)
class Trial:
    """One break and what became of it: `status` is "seen", "not seen" or "does not apply".

    `module` is what was broken, by its path in the checkpoint ("" where there is none or none is recorded), `what` the
    change in words. Seen: by which `output` in which `case`, at how many `times` the tolerance (infinite where no
    tolerance would help), `reason` in the gate's own words. Else `reason` says why.
    """

    name: str
    words: str
    gross: bool
    status: str
    what: str = ""
    module: str = ""
    output: str = ""
    case: str = ""
    times: float = math.nan
    reason: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The reverse of `plain`."""
        return cls(**{**data, "times": float(data["times"])})


@dataclass(frozen=True)
class Smallest:
    """The smallest nudge of one weight that the gate sees: `share` of it (0.001 is 0.1 %), None where none was seen.

    `unseen` is the largest that was not seen: the edge lies between the two.
    """

    module: str
    what: str
    share: float | None
    unseen: float
    judgings: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Smallest:
        """The reverse of `plain`."""
        share = None if data["share"] is None else float(data["share"])
        return cls(data["module"], data["what"], share, float(data["unseen"]), data["judgings"])


@dataclass(frozen=True)
class Proof:
    """What the gate saw of the breaks of one artifact."""

    step: str
    format: str
    precision: str
    tolerances: tuple[str, ...]
    trials: tuple[Trial, ...]
    smallest: Smallest | None = None

    @property
    def seen(self) -> tuple[Trial, ...]:
        """The breaks that tripped the gate."""
        return tuple(trial for trial in self.trials if trial.status == "seen")

    @property
    def unseen(self) -> tuple[Trial, ...]:
        """Those that passed it."""
        return tuple(trial for trial in self.trials if trial.status == "not seen")

    @property
    def holds(self) -> bool:
        """Whether every gross break was seen, and there was one."""
        gross = [trial for trial in self.trials if trial.gross and trial.status != "does not apply"]
        return bool(gross) and all(trial.status == "seen" for trial in gross)

    @property
    def exit_code(self) -> int:
        """0 where it holds, else 1."""
        return 0 if self.holds else DriftError.exit_code

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**plain(self), "holds": self.holds}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Proof:
        """The reverse of `to_dict`."""
        return cls(
            data["step"],
            data["format"],
            data["precision"],
            tuple(data["tolerances"]),
            tuple(Trial.from_dict(trial) for trial in data["trials"]),
            None if data["smallest"] is None else Smallest.from_dict(data["smallest"]),
        )

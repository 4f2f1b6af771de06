"""Floor 1, validators: what a model writes of its own against what the reference wrote; and perplexity on known text.

What a precision may do to either is the table ALLOWED here; teacher-forced scores are `written`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from nlpconvert.errors import UsageError
from nlpconvert.passages import Free, Passage, Seen
from nlpconvert.validators.tally import NEAR_TIE, UNKNOWN_NOISE

SURE = 0.05
"""Fewer identical texts than allowed count where chance alone would give so few in less than this share of samples."""


SHOWN = 20
"""Differences of free texts that are kept in a verdict."""


@dataclass(frozen=True)
class Allowed:
    """One row of the table: what a precision may do to what is written. None: shown, not judged.

    `perplexity`: candidate's over reference's at most. `identical`: share of free texts that are the reference's, near
    ties aside. `kind`: "encoder-decoder" (its source decides nearly every token), "*" for any.
    """

    precision: str
    kind: str
    perplexity: float | None
    identical: float | None


ALLOWED: tuple[Allowed, ...] = (
    Allowed("float32", "*", None, 1.0),
    Allowed("float16", "*", 1.001, None),
    Allowed("bfloat16", "*", 1.005, None),
    Allowed("int8", "encoder-decoder", 1.01, 0.99),
    Allowed("int8", "*", 1.01, None),
    Allowed("int4", "*", 1.05, None),
)


def allowed(precision: str, encodes: bool) -> Allowed:
    """The table's row. Raises UsageError where there is none."""
    kind = "encoder-decoder" if encodes else "decoder"
    for row in ALLOWED:
        if row.precision == precision and row.kind in ("*", kind):
            return row
    raise UsageError(f"what {precision} may do to what is written is not known: no row for it in validators/written.py")


# -- perplexity --------------------------------------------------------------------------------------------------------


@dataclass
class Perplexity:
    """Of known tokens, by the ones before them: exp of the mean loss, reference's and candidate's."""

    tokens: int = 0
    reference_loss: float = 0.0
    candidate_loss: float = 0.0

    def add(self, passage: Passage, reference: Seen, candidate: Seen) -> None:
        """One passage; a loss that is not finite in the candidate's stays so."""
        both = passage.real[:, :-1] & passage.real[:, 1:]
        both = both & reference.there[:, :-1] & candidate.there[:, :-1] & np.isfinite(reference.loss[:, :-1])
        self.tokens += int(both.sum())
        self.reference_loss += float(reference.loss[:, :-1][both].sum(dtype=np.float64))
        self.candidate_loss += float(candidate.loss[:, :-1][both].sum(dtype=np.float64))

    @property
    def ratio(self) -> float:
        """Candidate's perplexity over the reference's: above 1 is worse."""
        if not self.tokens:
            return math.nan
        return math.exp(min((self.candidate_loss - self.reference_loss) / self.tokens, 700.0))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        count = max(self.tokens, 1)
        return {
            "tokens": self.tokens,
            "reference": math.exp(min(self.reference_loss / count, 700.0)),
            "candidate": math.exp(min(self.candidate_loss / count, 700.0)),
            "ratio": self.ratio,
        }


# -- free --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where a free text first differs: `position` counts new tokens from 0; `margin` is the reference's own, between
    its best token and the next. What follows a near tie is not judged."""

    passage: str
    row: int
    position: int
    reference: int
    candidate: int
    margin: float
    near_tie: bool


@dataclass
class Texts:
    """Free texts held against the reference's."""

    rows: int = 0
    identical: int = 0
    differences: list[Difference] = field(default_factory=list)

    def add(
        self,
        passage: str,
        reference: Free,
        tokens: np.ndarray,
        lengths: Sequence[int],
        scale: float,
        noise: float | None,
    ) -> None:
        """One batch: tokens int64 (batch, n) and how many of each row are its own."""
        may = NEAR_TIE * (UNKNOWN_NOISE if noise is None else noise)
        for row, own in enumerate(reference.lengths):
            self.rows += 1
            theirs, ours = reference.tokens[row, :own], tokens[row, : lengths[row]]
            size = min(len(theirs), len(ours))
            apart = np.flatnonzero(theirs[:size] != ours[:size])
            if not len(apart) and len(theirs) == len(ours):
                self.identical += 1
                continue
            # One that ended where the other went on: the token there differs, or the end was seen otherwise.
            at = int(apart[0]) if len(apart) else min(size, own - 1)
            margin, peak = float(reference.margin[row, at]), float(reference.peak[row, at])
            other = int(ours[at]) if at < len(ours) else -1
            near = bool(len(apart) and margin <= may * (scale + peak) and other == reference.second[row, at])
            self.differences.append(Difference(passage, row, at, int(theirs[at]), other, margin, near))

    @property
    def real(self) -> list[Difference]:
        """The differences that are no near ties."""
        return [each for each in self.differences if not each.near_tie]

    def shown(self) -> list[Difference]:
        """The first of them, those that count before near ties."""
        return sorted(self.differences, key=lambda each: each.near_tie)[:SHOWN]

    @property
    def share(self) -> float:
        """Of the texts that are judged, how many are the reference's; not a number without any."""
        judged = self.rows - (len(self.differences) - len(self.real))
        return self.identical / judged if judged else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        near = len(self.differences) - len(self.real)
        return {
            "rows": self.rows,
            "identical": self.identical,
            "near_ties": near,
            "share": self.share,
            "differences": [asdict(each) for each in self.shown()],
        }

    def too_few(self, least: float) -> bool:
        """Whether fewer are identical than `least` allows, and not by the luck of so small a sample."""
        judged = self.rows - (len(self.differences) - len(self.real))
        wrong = len(self.real)
        if not wrong or self.share >= least:
            return False
        return least >= 1 or _tail(wrong, judged, 1 - least) < SURE


def _tail(wrong: int, count: int, chance: float) -> float:
    """Probability of `wrong` or more among `count` when each goes wrong with `chance` (binomial)."""
    return sum(math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(wrong, count + 1))

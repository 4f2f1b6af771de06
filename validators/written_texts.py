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
from nlpconvert.passages import Free, Passage, Seen, from_data
from nlpconvert.validators.tally import NEAR_TIE, UNKNOWN_NOISE

CHANCE = 0.05
"""Fewer identical texts than allowed count where chance alone would give so few in less than this share of samples."""
LEAST_TOKENS = 64
"""Where texts had to be left out, perplexity over fewer tokens than these says nothing."""
SURE = math.log(2)
"""By so much the best score leads where a token is twice as likely as the next."""


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
    """Of known tokens, by the ones before them: exp of the mean loss, reference's and candidate's.

    A text that the reference finds less likely than a guess among all tokens says nothing of either, and is left out.
    """

    tokens: int = 0
    reference_loss: float = 0.0
    candidate_loss: float = 0.0
    left_out: int = 0

    def add(self, passage: Passage, reference: Seen, candidate: Seen) -> None:
        """One passage; a loss that is not finite in the candidate's stays so."""
        both = passage.real[:, :-1] & passage.real[:, 1:]
        both = both & reference.there[:, :-1] & candidate.there[:, :-1] & np.isfinite(reference.loss[:, :-1])
        chance = math.log(reference.values.shape[1])
        for row in np.flatnonzero(both.any(axis=1)):
            theirs = reference.loss[row, :-1][both[row]].astype(np.float64)
            if theirs.mean() >= chance:
                self.left_out += 1
                continue
            self.tokens += len(theirs)
            self.reference_loss += float(theirs.sum())
            self.candidate_loss += float(candidate.loss[row, :-1][both[row]].sum(dtype=np.float64))

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
            "left_out": self.left_out,
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
    unsure: bool = False


@dataclass
class Texts:
    """Free texts held against the reference's.

    `sure`: of texts that are not the user's own only those are judged in which the reference's margin is nowhere less;
    0 for all. What a model goes on with that it never learnt to go on from is decided by next to nothing.
    """

    sure: float = 0.0
    rows: int = 0
    identical: int = 0
    judged: int = 0
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
        least = 0.0 if from_data(passage) else self.sure
        for row, own in enumerate(reference.lengths):
            self.rows += 1
            unsure = float(reference.margin[row, :own].min(initial=math.inf)) < least
            theirs, ours = reference.tokens[row, :own], tokens[row, : lengths[row]]
            size = min(len(theirs), len(ours))
            apart = np.flatnonzero(theirs[:size] != ours[:size])
            if not len(apart) and len(theirs) == len(ours):
                self.identical += 1
                self.judged += not unsure
                continue
            # One that ended where the other went on: the token there differs, or the end was seen otherwise.
            at = int(apart[0]) if len(apart) else min(size, own - 1)
            margin, peak = float(reference.margin[row, at]), float(reference.peak[row, at])
            other = int(ours[at]) if at < len(ours) else -1
            near = bool(len(apart) and margin <= may * (scale + peak) and other == reference.second[row, at])
            self.judged += not (unsure or near)
            self.differences.append(Difference(passage, row, at, int(theirs[at]), other, margin, near, unsure))

    @property
    def real(self) -> list[Difference]:
        """The differences that count: no near ties, and not where the reference itself is unsure."""
        return [each for each in self.differences if not each.near_tie and not each.unsure]

    def shown(self) -> list[Difference]:
        """The first of them, those that count before the others."""
        return sorted(self.differences, key=lambda each: (each.unsure, each.near_tie))[:SHOWN]

    @property
    def share(self) -> float:
        """Of the texts that are judged, how many are the reference's; not a number without any."""
        return 1 - len(self.real) / self.judged if self.judged else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "rows": self.rows,
            "identical": self.identical,
            "judged": self.judged,
            "near_ties": sum(each.near_tie for each in self.differences),
            "share": self.share,
            "differences": [asdict(each) for each in self.shown()],
        }

    def too_few(self, least: float) -> bool:
        """Whether fewer are identical than `least` allows, and not by the luck of so small a sample."""
        wrong = len(self.real)
        if not wrong or self.share >= least:
            return False
        return least >= 1 or _tail(wrong, self.judged, 1 - least) < CHANCE


def _tail(wrong: int, count: int, chance: float) -> float:
    """Probability of `wrong` or more among `count` when each goes wrong with `chance` (binomial)."""
    return sum(math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(wrong, count + 1))

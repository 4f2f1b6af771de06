"""Floor 1, validators: one score of a candidate beside the reference's on the same rows, and what the rows can say.

Where every row is simply right or wrong the exact methods are taken (binomial, McNemar, Tango), else the paired
bootstrap; `statistics` has the formulas.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

import numpy as np

from nlpconvert.validators import metrics, statistics
from nlpconvert.validators.metrics import Answers, Score
from nlpconvert.validators.scores import Changed, Scored
from nlpconvert.validators.statistics import LEVEL, Interval, Resampling


class Paired:
    """One score over rows: the candidate's numbers and, where there is a reference, its own for the same rows."""

    def __init__(self, score: Score, candidate: np.ndarray, reference: np.ndarray | None = None) -> None:
        """`candidate`, `reference`: float64 (rows, numbers). ValueError without a row or with unlike shapes."""
        if not len(candidate) or (reference is not None and candidate.shape != reference.shape):
            raise ValueError("candidate and reference have to have answered the same rows, and at least one")
        self.score = score
        self.rows = len(candidate)
        self._candidate, self._reference = candidate, reference
        self.candidate = metrics.value(score.formula, candidate)
        self.reference = None if reference is None else metrics.value(score.formula, reference)
        self.binary = _binary(score, candidate) and (reference is None or _binary(score, reference))
        self._sign = 1.0 if score.better == "higher" else -1.0

    @property
    def difference(self) -> float | None:
        """Candidate minus reference."""
        return None if self.reference is None else self.candidate - self.reference

    @property
    def worsening(self) -> float:
        """By how much the candidate is worse than the reference: positive for worse. Only with a reference."""
        assert self.difference is not None
        return -self._sign * self.difference

    @cached_property
    def discordant(self) -> tuple[int, int] | None:
        """Rows that only the reference, and that only the candidate answers rightly; None where rows are graded."""
        if self._reference is None or not self.binary:
            return None
        moved = self._candidate[:, 0] - self._reference[:, 0]
        return int((moved < 0).sum()), int((moved > 0).sum())

    @cached_property
    def _resampling(self) -> Resampling:
        formula = self.score.formula
        reference = None if self._reference is None else metrics.resampled(formula, self._reference)
        return statistics.resample(self.rows, metrics.resampled(formula, self._candidate), reference)

    def interval(self, level: float = LEVEL) -> Interval:
        """Of the candidate's own score."""
        if self.binary:
            return statistics.share_interval(int(self._candidate[:, 0].sum()), self.rows, level)
        return statistics.percentiles(self._resampling.candidate, level)

    def difference_interval(self, level: float = LEVEL) -> Interval:
        """Of the difference. Only with a reference."""
        if self.discordant is not None:
            return statistics.paired_shares(*self.discordant, self.rows, level)
        return statistics.percentiles(self._resampling.differences, level)

    def chance_of_worsening(self) -> float:
        """How likely so bad a difference is by the choice of rows alone, were the two equally good: one-sided."""
        if self.discordant is not None:
            return statistics.mcnemar(*self.discordant)
        return statistics.resampled_chance(self._sign * self._resampling.differences)

    def chance_of_passing(self, bound: float) -> float:
        """How likely the true score is on the better side of `bound` though the observed one is not: one-sided."""
        if self.binary:
            from scipy import stats

            hits = int(self._candidate[:, 0].sum())
            return float(stats.binomtest(hits, self.rows, min(max(bound, 0.0), 1.0), alternative="less").pvalue)
        return statistics.resampled_chance(self._sign * self._resampling.candidate, self._sign * bound)

    @cached_property
    def _spread(self) -> float:
        return float(np.std(self._resampling.differences, ddof=1))

    def detectable(self, level: float = LEVEL) -> float | None:
        """The smallest true worsening that these rows show; None where nothing moved, so that they do not tell."""
        if self.discordant is not None:
            return statistics.detectable_share(self.rows, sum(self.discordant), level)
        found = statistics.detectable(self._spread, level)
        return found if found > 0 and np.isfinite(found) else None

    def rows_for(self, worsening: float, level: float = LEVEL) -> float | None:
        """Rows of this kind that would show such a worsening; None where these do not tell."""
        if self.discordant is not None:
            return statistics.rows_for_share(min(worsening, 1.0), sum(self.discordant) / self.rows, level)
        least = self.detectable(level)
        return None if least is None else self.rows * (least / worsening) ** 2

    def scored(self) -> Scored:
        """All of it as data."""
        own = Scored(self.score.name, self.score.better, self.score.top, self.candidate, self.interval())
        if self.reference is None:
            return own
        worse, better = self.discordant or (None, None)
        return Scored(
            own.name,
            own.better_is,
            own.top,
            own.candidate,
            own.interval,
            reference=self.reference,
            difference=self.difference,
            difference_interval=self.difference_interval(),
            chance=self.chance_of_worsening(),
            worse=worse,
            better=better,
            detectable=self.detectable(),
        )


def pairs(scores: Sequence[Score], candidate: Answers, reference: Answers | None) -> dict[str, Paired]:
    """Every score of a metric, by name."""
    return {
        score.name: Paired(score, candidate.rows(score.name), None if reference is None else reference.rows(score.name))
        for score in scores
    }


def changed(candidate: Sequence[Hashable], reference: Sequence[Hashable]) -> Changed | None:
    """Rows whose decision is another than the reference's; None where nothing is decided."""
    if not candidate or candidate[0] is None:
        return None
    count = sum(ours != theirs for ours, theirs in zip(candidate, reference, strict=True))
    rows = len(candidate)
    return Changed(count, rows, statistics.share_interval(count, rows), statistics.unseen_share(rows))


def _binary(score: Score, rows: np.ndarray) -> bool:
    """Whether every row counts once and is right or wrong."""
    if score.formula != "ratio":
        return False
    return bool((rows[:, 1] == 1).all() and np.isin(rows[:, 0], (0.0, 1.0)).all())

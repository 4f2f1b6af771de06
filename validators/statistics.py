"""Floor 1, validators: what a sample can say: intervals, paired tests, and the smallest change it could have shown.

Counts and rows in, numbers out. Which metric is meant and what is done about it stands elsewhere (`metrics`,
`fail_if`). All comparisons are paired: the reference and the candidate have answered the same rows. Differences are
candidate minus reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
POWER = 0.8
RESAMPLES = 4000
SEED = 0
_BLOCK = 2**20
"""Row numbers that are drawn at a time, so that many rows do not exhaust the memory."""

Resampled = Callable[[np.ndarray], np.ndarray]
"""Row numbers (resamples, rows) to a metric's value for each resample: float64 (resamples,)."""


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval and how it was computed, in words."""

    low: float
    high: float
    level: float
    method: str


@dataclass(frozen=True)
class Resampling:
    """Values of a metric over the same resamples of the rows: reference's and candidate's, (resamples,) each.

    `reference` is None where there is only one model.
    """

    candidate: np.ndarray
    reference: np.ndarray | None = None

    @property
    def differences(self) -> np.ndarray:
        """Candidate minus reference. Only where there is a reference."""
        assert self.reference is not None
        difference: np.ndarray = self.candidate - self.reference
        return difference


def share_interval(hits: int, count: int, level: float = LEVEL) -> Interval:
    """Clopper-Pearson's interval of a share: exact, its coverage is never below `level`.

    (Clopper and Pearson, Biometrika 26, 1934; scipy.stats.binomtest.) ValueError without a trial.
    """
    from scipy import stats

    if count < 1:
        raise ValueError("there is no interval of a share of nothing")
    found = stats.binomtest(hits, count).proportion_ci(confidence_level=level, method="exact")
    return Interval(float(found.low), float(found.high), level, "exact binomial")


def unseen_share(count: int, probability: float = LEVEL) -> float:
    """The smallest true share of which a sample of `count` shows at least one with this probability.

    None among n is seen with probability (1 - share)**n, so it is 1 - (1 - probability)**(1/n): 1.5 % for 200 rows.
    """
    return float(-np.expm1(math.log1p(-probability) / count))


def mcnemar(worse: int, better: int) -> float:
    """The probability, were neither model better, of at least `worse` rows among the discordant ones: one-sided.

    McNemar's exact test (Psychometrika 12, 1947): the discordant rows fall either way like a fair coin's throws. 1.0
    without any.
    """
    from scipy import stats

    if worse + better == 0:
        return 1.0
    return float(stats.binomtest(worse, worse + better, 0.5, alternative="greater").pvalue)


def paired_shares(worse: int, better: int, count: int, level: float = LEVEL) -> Interval:
    """The interval of a difference of two shares of right answers to the same `count` rows: (better - worse) / count.

    Tango's score interval (Statistics in Medicine 17, 1998): the differences d at which the score statistic
    (better - worse - count * d) / sqrt(count * (2q + d * (1 - d))) stays within the normal quantiles, q being the
    most likely share of rows that turned worse, given d. Unlike a bootstrap it does not shrink to nothing where few
    rows or none are discordant.
    """
    from scipy import optimize, stats

    limit = float(stats.norm.ppf((1 + level) / 2))

    def score(difference: float) -> float:
        """The statistic at a difference; it falls where the difference grows."""
        linear = -better - worse + (2 * count - better + worse) * difference
        rest = -worse * difference * (1 - difference)
        root = math.sqrt(max(linear * linear - 8 * count * rest, 0.0))
        share = (root - linear) / (4 * count)
        variance = count * (2 * share + difference * (1 - difference))
        excess = better - worse - count * difference
        if variance <= 0:
            return math.copysign(math.inf, excess) if excess else 0.0
        return excess / math.sqrt(variance)

    observed, edge = (better - worse) / count, 1 - 1e-12
    ends = []
    for sign, end in ((1.0, -edge), (-1.0, edge)):

        def gap(difference: float, sign: float = sign) -> float:
            return min(max(score(difference) - sign * limit, -1e6), 1e6)

        start = min(max(observed, -edge), edge)
        crosses = gap(end) * gap(start) < 0
        ends.append(float(optimize.brentq(gap, min(end, start), max(end, start))) if crosses else float(round(end)))
    return Interval(ends[0], ends[1], level, "Tango's score interval")


def resample(
    rows: int, candidate: Resampled, reference: Resampled | None = None, *, resamples: int = RESAMPLES, seed: int = SEED
) -> Resampling:
    """A paired bootstrap: rows are drawn with replacement, and both models are scored on each draw.

    Seeded: the same rows give the same numbers. (Efron and Tibshirani, An Introduction to the Bootstrap, 1993; paired,
    for translation: Koehn, EMNLP 2004.)
    """
    ours, theirs = [], []
    for index in _draws(rows, resamples, seed):
        ours.append(candidate(index))
        if reference is not None:
            theirs.append(reference(index))
    return Resampling(np.concatenate(ours), np.concatenate(theirs) if theirs else None)


def _draws(rows: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    most = max(_BLOCK // rows, 1)
    for start in range(0, resamples, most):
        yield rng.integers(0, rows, size=(min(most, resamples - start), rows))


def counts(index: np.ndarray) -> np.ndarray:
    """How often each row was drawn: (resamples, rows) of row numbers to (resamples, rows) of counts, float64.

    With it a metric that rests on sums over rows is one matrix product for all resamples.
    """
    resamples, rows = index.shape
    places = index + np.arange(resamples)[:, None] * rows
    return np.bincount(places.ravel(), minlength=resamples * rows).reshape(resamples, rows).astype(np.float64)


def percentiles(values: np.ndarray, level: float = LEVEL) -> Interval:
    """The percentile interval of resampled values (Efron and Tibshirani, chapter 13)."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level, f"bootstrap, {len(values):,} resamples of the rows")


def resampled_chance(values: np.ndarray, bound: float = 0.0) -> float:
    """The share of resampled values that are not below `bound`: how likely it is that chance alone put it there.

    One is added above and below, so that it is never 0 (Davison and Hinkley, Bootstrap Methods, 1997, section 4.2).
    """
    return float((1 + np.count_nonzero(values >= bound)) / (1 + len(values)))


def detectable_share(count: int, discordant: int, level: float = LEVEL, power: float = POWER) -> float:
    """The smallest true drop of a share of right answers that `count` paired rows show with this power.

    "Show": a one-sided paired test at `level` tells it from no drop. From the sample size of McNemar's test,
    n = (z_level * sqrt(p) + z_power * sqrt(p - d**2))**2 / d**2 for a drop d among a share p of discordant rows
    (Miettinen, Biometrics 24, 1968; Connor, Biometrics 43, 1987). p is the observed share, or d itself where that is
    more: a drop needs as many discordant rows. 1.0 where no drop could be shown.
    """
    from scipy import optimize

    observed = discordant / count
    if rows_for_share(1.0, observed, level, power) > count:
        return 1.0
    found: float = optimize.brentq(lambda drop: rows_for_share(drop, observed, level, power) - count, 1e-9, 1.0)
    return float(found)


def rows_for_share(drop: float, discordance: float, level: float = LEVEL, power: float = POWER) -> float:
    """Rows that show such a drop of a share of right answers, by the formula of `detectable_share`."""
    share = max(discordance, drop)
    wanted = _z(level) * math.sqrt(share) + _z(power) * math.sqrt(max(share - drop * drop, 0.0))
    return (wanted / drop) ** 2


def detectable(spread: float, level: float = LEVEL, power: float = POWER) -> float:
    """The smallest true change of any metric that a sample shows with this power: (z_level + z_power) * spread.

    `spread`: the standard deviation of the paired difference over resamples. (The normal theory of the power of a
    one-sided test: Cohen, Statistical Power Analysis, 1988; Bloom, Evaluation Review 19, 1995.)
    """
    return (_z(level) + _z(power)) * spread


def _z(probability: float) -> float:
    from scipy import stats

    return float(stats.norm.ppf(probability))

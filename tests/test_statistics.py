"""Statistics: against scipy, worked examples, and by simulation: an interval covers as often as it says."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import optimize, stats

from nlpconvert.validators import statistics


def test_a_shares_interval_is_exact() -> None:
    found = statistics.share_interval(3, 200)
    assert (found.low, found.high) == pytest.approx(
        (stats.beta.ppf(0.025, 3, 198), stats.beta.ppf(0.975, 4, 197)), abs=1e-12
    )
    assert statistics.share_interval(0, 20).low == 0.0
    assert statistics.share_interval(20, 20).high == 1.0
    with pytest.raises(ValueError, match="of nothing"):
        statistics.share_interval(0, 0)


def test_what_a_sample_cannot_see() -> None:
    """200 texts cannot see a change below 1.5 %: the rule of three, 3/n, is its approximation."""
    assert statistics.unseen_share(200) == pytest.approx(1 - 0.05 ** (1 / 200), rel=1e-12)
    assert f"{statistics.unseen_share(200):.1%}" == "1.5%"
    assert (1 - statistics.unseen_share(37)) ** 37 == pytest.approx(0.05)


def test_mcnemar_counts_coins() -> None:
    assert statistics.mcnemar(5, 0) == pytest.approx(1 / 32)
    assert statistics.mcnemar(0, 0) == 1.0
    assert statistics.mcnemar(0, 4) == 1.0
    # Bishop, Fienberg and Holland's crime example as statsmodels' documentation has it would be two-sided; here one.
    assert statistics.mcnemar(10, 2) == pytest.approx(float(stats.binom.sf(9, 12, 0.5)))


def test_tangos_interval_is_the_inverse_of_mcnemars_statistic() -> None:
    """At difference 0 the score is McNemar's (b - c) / sqrt(b + c)."""
    worse, better, count = 14, 4, 300
    chance = stats.norm.sf((worse - better) / np.sqrt(worse + better))
    found = statistics.paired_shares(worse, better, count, level=1 - 2 * chance)
    assert found.high == pytest.approx(0.0, abs=1e-9)
    assert found.low < (better - worse) / count < found.high


@pytest.mark.parametrize(("worse", "better", "count"), [(1, 0, 44), (9, 3, 150), (2, 6, 60)])
def test_tangos_interval_ends_where_the_score_does(worse: int, better: int, count: int) -> None:
    """Its closed form against the definition: the most likely discordance, found by search, and the score there."""
    found = statistics.paired_shares(worse, better, count)
    for end, quantile in ((found.low, 1.959964), (found.high, -1.959964)):

        def unlikely(share: float, end: float = end) -> float:
            parts = np.array([share, share + end, 1 - 2 * share - end])
            return -float((np.array([worse, better, count - worse - better]) * np.log(parts)).sum())

        bounds = (max(0.0, -end) + 1e-12, (1 - end) / 2 - 1e-12)
        share = optimize.minimize_scalar(unlikely, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        score = (better - worse - count * end) / np.sqrt(count * (2 * share + end * (1 - end)))
        assert score == pytest.approx(quantile, abs=1e-3)


@pytest.mark.parametrize(("worse", "better", "count"), [(0, 0, 50), (3, 0, 50), (0, 50, 50), (50, 0, 50), (0, 0, 1)])
def test_tangos_interval_holds_at_the_edges(worse: int, better: int, count: int) -> None:
    found = statistics.paired_shares(worse, better, count)
    assert -1 <= found.low <= (better - worse) / count <= found.high <= 1
    assert found.high - found.low > 1 / count, "a sample never knows it all"


@pytest.mark.parametrize("discordance", [0.02, 0.1])
def test_tangos_interval_covers_as_often_as_it_says(discordance: float) -> None:
    rng = np.random.default_rng(1)
    drop, rows, trials = discordance / 2, 200, 400
    drawn = rng.multinomial(rows, [(discordance + drop) / 2, (discordance - drop) / 2, 1 - discordance], size=trials)
    inside = 0
    for worse, better, _ in drawn:
        found = statistics.paired_shares(int(worse), int(better), rows)
        inside += found.low <= -drop <= found.high
    assert 0.92 <= inside / trials <= 0.985


def test_a_bootstraps_interval_covers_as_often_as_it_says() -> None:
    """The difference of two means over paired, skewed scores."""
    rng = np.random.default_rng(2)
    rows, trials, inside = 120, 200, 0
    for trial in range(trials):
        reference = rng.exponential(1.0, rows)
        candidate = reference + rng.normal(0.1, 0.5, rows)
        found = statistics.resample(
            rows,
            lambda index, scores=candidate: scores[index].mean(axis=1),
            lambda index, scores=reference: scores[index].mean(axis=1),
            resamples=1000,
            seed=trial,
        )
        interval = statistics.percentiles(found.differences)
        inside += interval.low <= 0.1 <= interval.high
    assert 0.90 <= inside / trials <= 0.985


def test_a_bootstrap_agrees_with_scipys() -> None:
    rng = np.random.default_rng(3)
    reference = rng.normal(size=80)
    candidate = reference + rng.normal(0.2, 0.3, 80)

    def difference(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return np.mean(x, axis=axis) - np.mean(y, axis=axis)

    theirs = stats.bootstrap(
        (candidate, reference), difference, paired=True, method="percentile", n_resamples=20000, rng=0
    ).confidence_interval
    ours = statistics.percentiles(
        statistics.resample(
            80, lambda i: candidate[i].mean(axis=1), lambda i: reference[i].mean(axis=1), resamples=20000
        ).differences
    )
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=4e-3)


def test_resampling_is_seeded_and_paired() -> None:
    scores = np.arange(50.0)
    one, two = (statistics.resample(50, lambda i: scores[i].mean(axis=1)) for _ in range(2))
    assert np.array_equal(one.candidate, two.candidate)
    assert len(one.candidate) == statistics.RESAMPLES >= 2000
    same = statistics.resample(50, lambda i: scores[i].mean(axis=1), lambda i: scores[i].mean(axis=1))
    assert not same.differences.any()


def test_counts_stand_for_the_drawn_rows() -> None:
    index = np.array([[0, 0, 2], [1, 2, 1]])
    assert statistics.counts(index).tolist() == [[2, 0, 1], [0, 2, 1]]


def test_blocks_of_draws_are_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = np.random.default_rng(0).normal(size=30)
    whole = statistics.resample(30, lambda i: scores[i].mean(axis=1), resamples=100)
    monkeypatch.setattr(statistics, "_BLOCK", 70)
    parts = statistics.resample(30, lambda i: scores[i].mean(axis=1), resamples=100)
    assert np.array_equal(whole.candidate, parts.candidate)


def test_the_chance_of_a_drop_is_never_nothing() -> None:
    assert statistics.resampled_chance(np.full(999, -1.0)) == pytest.approx(1 / 1000)
    assert statistics.resampled_chance(np.zeros(999)) == 1.0


def test_a_detectable_drop_is_detected_with_its_power() -> None:
    """By simulation: of samples with just that drop, McNemar's test sees about 80 %."""
    rows, discordant = 2000, 60
    drop = statistics.detectable_share(rows, discordant)
    share = discordant / rows
    assert 0.005 < drop < share
    rng = np.random.default_rng(4)
    drawn = rng.multinomial(rows, [(share + drop) / 2, (share - drop) / 2, 1 - share], size=800)
    seen = np.mean([statistics.mcnemar(int(worse), int(better)) <= 0.05 for worse, better, _ in drawn])
    assert 0.72 <= seen <= 0.86


def test_without_discordant_rows_a_drop_needs_a_handful() -> None:
    """Where every discordant row is worse, five must be there before a fair coin is doubted."""
    drop = statistics.detectable_share(200, 0)
    assert 0.025 < drop < 0.04
    assert statistics.rows_for_share(drop, 0.0) == pytest.approx(200, rel=1e-3)
    assert statistics.detectable_share(2, 0) == 1.0
    assert statistics.detectable_share(1000, 10) < statistics.detectable_share(1000, 40)


def test_a_detectable_change_of_a_mean() -> None:
    assert statistics.detectable(0.01) == pytest.approx(0.02486, abs=1e-4)
    assert statistics.detectable(0.01, level=0.5) == pytest.approx(0.0084, abs=1e-4)

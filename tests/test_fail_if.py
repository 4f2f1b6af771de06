"""The grammar of --fail-if, and what a condition says of a sample."""

from __future__ import annotations

import numpy as np
import pytest

from nlpconvert.errors import UsageError
from nlpconvert.validators import fail_if, metrics
from nlpconvert.validators.fail_if import Condition
from nlpconvert.validators.paired import Paired


def one(text: str, metric: str = "accuracy") -> Condition:
    (found,) = fail_if.parse(text, metric)
    return found


@pytest.mark.parametrize(
    ("text", "metric", "score", "kind", "value", "relative", "level"),
    [
        ("accuracy drops by 0.5% at 95%", "accuracy", "accuracy", "moves", 0.005, False, 0.95),
        ("Accuracy  drops by .5 % at 0.99", "accuracy", "accuracy", "moves", 0.005, False, 0.99),
        ("accuracy drops by 0.005", "accuracy", "accuracy", "moves", 0.005, False, None),
        ("accuracy below 0.9", "accuracy", "accuracy", "bound", 0.9, False, None),
        ("accuracy below 90% at 95%", "accuracy", "accuracy", "bound", 0.9, False, 0.95),
        ("perplexity rises by 2% at 95%", "perplexity", "perplexity", "moves", 0.02, True, 0.95),
        ("perplexity rises by 0.3", "perplexity", "perplexity", "moves", 0.3, False, None),
        ("perplexity above 40", "perplexity", "perplexity", "bound", 40.0, False, None),
        ("bleu drops by 0.5%", "bleu", "bleu", "moves", 0.5, False, None),
        ("bleu drops by 0.5", "bleu", "bleu", "moves", 0.5, False, None),
        ("exact_match drops by 1%", "bleu", "exact_match", "moves", 0.01, False, None),
        ("squad drops by 1%", "squad", "f1", "moves", 0.01, False, None),
    ],
)
def test_grammar(
    text: str, metric: str, score: str, kind: str, value: float, relative: bool, level: float | None
) -> None:
    found = one(text, metric)
    assert (found.score, found.kind, found.relative, found.level) == (score, kind, relative, level)
    assert found.value == pytest.approx(value)


def test_several_are_separated_by_commas() -> None:
    found = fail_if.parse("accuracy drops by 1% at 95%, accuracy below 0.8,", "accuracy")
    assert [each.kind for each in found] == ["moves", "bound"]
    assert fail_if.needs_reference(found) is found[0]
    assert fail_if.needs_reference(found[1:]) is None


@pytest.mark.parametrize(
    ("text", "metric", "said"),
    [
        ("", "accuracy", "is empty"),
        ("accuracy falls by 1%", "accuracy", 'cannot read "accuracy falls by 1%"; write it like "accuracy drops by'),
        ("accuracy drops by -1%", "accuracy", "cannot read"),
        ("accuracy drops by 1% at 95% sharp", "accuracy", "cannot read"),
        ("f1 drops by 1%", "accuracy", "is about f1, and --metric accuracy measures accuracy"),
        ("squad drops by 1%", "accuracy", "is about squad"),
        ("accuracy rises by 1%", "accuracy", 'higher is better, so .* would fail a good one; say "drops by"'),
        ("accuracy above 0.9", "accuracy", 'say "below"'),
        ("perplexity drops by 1%", "perplexity", 'lower is better.*say "rises by"'),
        ("perplexity above 5%", "perplexity", "give a number"),
        ("accuracy drops by 5", "accuracy", "says nothing: accuracy runs from 0 to 1; 5% is 0.05"),
        ("accuracy drops by 0%", "accuracy", "above 0"),
        ("bleu drops by 200", "bleu", "runs from 0 to 100"),
        ("accuracy drops by 1% at 30%", "accuracy", "between 50% and 99.9%"),
        ("accuracy drops by 1% at 100%", "accuracy", "between 50% and 99.9%"),
        ("accuracy drops by 1% at 95", "accuracy", "between 50% and 99.9%"),
        ("accuracy drops by 0.5", "accuracy", r"has no % and would be a drop of 50 points: write 0\.5%$"),
        ("accuracy drops by 0.3 at 95%", "accuracy", "would be a drop of 30 points: write 0.3% or 30%"),
        ("squad drops by .2", "squad", "write .2% or 20%"),
        ("accuracy drops by 100%", "accuracy", "hardly can fail: a model that lost 100 % of the scale"),
        ("f1 drops by 50% at 95%", "f1", "hardly can fail"),
        ("bleu drops by 60", "bleu", "lost 60 % of the scale"),
    ],
)
def test_what_is_no_condition(text: str, metric: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fail_if.parse(text, metric)


def pair(rows: int, worse: int, better: int, right: float = 0.9) -> Paired:
    """Accuracy over rows of which so many turned; the reference is right in `right` of them."""
    reference, candidate = np.ones((rows, 2)), np.ones((rows, 2))
    wrong = round(rows * (1 - right))
    reference[:wrong, 0] = candidate[:wrong, 0] = 0
    candidate[:better, 0] = 1
    candidate[wrong : wrong + worse, 0] = 0
    return Paired(metrics.METRICS["accuracy"].scores[0], candidate, reference)


def test_a_drop_fails_when_it_is_large_and_no_chance() -> None:
    condition = one("accuracy drops by 0.5% at 95%")
    found = fail_if.judge(condition, pair(1000, 30, 10))
    assert found.failed and "it dropped by 2 %, which chance alone does in 0.11 % of samples" in found.reason
    assert not fail_if.judge(condition, pair(1000, 4, 0)).failed, "too small"
    by_chance = fail_if.judge(condition, pair(1000, 20, 12))
    assert not by_chance.failed and "in 10.8 % of samples" in by_chance.reason
    assert fail_if.judge(one("accuracy drops by 0.5%"), pair(1000, 20, 12)).failed, "without a level the drop decides"
    assert fail_if.judge(condition, pair(1000, 0, 20)).reason == "no drop"
    assert found.status == "fails"


def test_the_limit_itself_fails() -> None:
    """0.005 has no binary form: a drop of exactly five in a thousand is one of 0.5 %."""
    for right in np.linspace(0.5, 0.95, 10):
        assert fail_if.judge(one("accuracy drops by 0.5%"), pair(1000, 5, 0, right)).failed


def test_a_sample_that_could_not_have_shown_it_says_so() -> None:
    found = fail_if.judge(one("accuracy drops by 0.5% at 95%"), pair(200, 1, 0))
    assert not found.failed
    assert found.warning.startswith(
        "200 rows cannot show a drop below 3.1 % at 95 %, and 0.5 % was asked for: give about"
    )
    assert found.status == "not shown"
    enough = fail_if.judge(one("accuracy drops by 4% at 95%"), pair(200, 1, 0))
    assert (enough.status, enough.warning) == ("passes", "")
    assert not fail_if.judge(one("accuracy drops by 0.5% at 95%"), pair(1000, 30, 10)).warning, "it did show it"


def test_the_rows_it_asks_for_are_enough() -> None:
    condition = one("accuracy drops by 0.5% at 95%")
    warning = fail_if.judge(condition, pair(200, 1, 1)).warning
    needed = int(warning.rpartition("about ")[2].removesuffix(" rows").replace(",", ""))
    assert not fail_if.judge(condition, pair(needed, needed // 200, needed // 200)).warning
    assert fail_if.judge(condition, pair(needed // 2, needed // 400, needed // 400)).warning


def test_bounds_are_about_the_score_itself() -> None:
    assert fail_if.judge(one("accuracy below 0.95"), pair(200, 0, 0)).failed
    assert not fail_if.judge(one("accuracy below 0.9"), pair(200, 0, 0)).failed
    nearly = one("accuracy below 0.91 at 95%")
    unsure = fail_if.judge(nearly, pair(200, 0, 0))
    assert unsure.status == "not shown", "it is below, but rows by chance explain that"
    assert unsure.warning.startswith("200 rows cannot show at 95 %")
    assert fail_if.judge(one("accuracy below 0.95 at 95%"), pair(200, 0, 0)).failed


@pytest.mark.parametrize(("level", "rows"), [(0.95, 5), (0.8, 3), (0.75, 2), (0.99, 7), (0.999, 10)])
def test_the_fewest_rows_are_those_of_the_test_itself(level: float, rows: int) -> None:
    condition = one(f"accuracy drops by 1% at {level}")
    assert fail_if.least_rows(level) == rows
    fail_if.check((condition,), rows)
    assert fail_if.judge(condition, pair(rows, rows, 0, 1.0)).failed, "all rows lost"
    said = rf"cannot fail on {rows - 1} rows?: .* at {100 * level:g} % it takes {rows} rows at least"
    with pytest.raises(UsageError, match=said):
        fail_if.check((condition,), rows - 1)
    fail_if.check((one("accuracy drops by 1%"), one(f"accuracy below 0.9 at {level}")), 1)


def test_a_condition_that_the_reference_s_own_score_makes_impossible_is_refused() -> None:
    """0.67 to 0.00 on three rows is no drop at 95 %, nor is the loss of all four rows that were right among 100."""
    with pytest.raises(UsageError, match=r"cannot fail: the reference itself is right in 2 of 3 rows, .* it takes 5"):
        fail_if.judge(one("accuracy drops by 1% at 95%"), pair(3, 2, 0, 2 / 3))
    with pytest.raises(UsageError, match="right in 4 of 100 rows"):
        fail_if.judge(one("accuracy drops by 1% at 95%"), pair(100, 4, 0, 0.04))
    with pytest.raises(UsageError, match=r"own accuracy is 0\.0400, so it cannot drop so far; are these labels this"):
        fail_if.judge(one("accuracy drops by 10%"), pair(100, 4, 0, 0.04))
    assert fail_if.judge(one("accuracy drops by 4%"), pair(100, 4, 0, 0.04)).failed
    with pytest.raises(UsageError, match=r"cannot fail on 20 rows: .*at 95 % it takes 29 rows at least"):
        fail_if.judge(one("accuracy below 0.1 at 95%"), pair(20, 0, 0))
    assert fail_if.judge(one("accuracy below 0.1 at 95%"), pair(29, 29, 0, 1.0)).failed


def test_a_correlation_may_fall_below_nothing() -> None:
    rows = np.arange(12.0)
    low = Paired(metrics.METRICS["spearman"].scores[0], np.stack([-rows, rows], 1), np.stack([np.zeros(12), rows], 1))
    assert fail_if.judge(one("spearman drops by 20%", "spearman"), low).failed


def test_what_the_others_are_held_against_is_not_judged() -> None:
    alone = Paired(metrics.METRICS["accuracy"].scores[0], np.ones((10, 2)))
    found = fail_if.judge(one("accuracy drops by 1% at 95%"), alone)
    assert (found.status, found.failed, found.reason) == ("not judged", False, "it is what the others are held against")


def test_one_row_is_one_row() -> None:
    reference = np.array([[60.0, 20.0]])
    found = fail_if.judge(
        one("perplexity rises by 2%", "perplexity"),
        Paired(metrics.METRICS["perplexity"].scores[0], reference, reference),
    )
    assert found.status == "not shown" and "1 rows" not in found.warning
    assert fail_if.judge(one("accuracy drops by 1%"), pair(1, 0, 0, 1.0)).warning.startswith("1 row cannot show")


def lms(rise: float, rows: int = 100) -> Paired:
    rng = np.random.default_rng(0)
    reference = np.stack([rng.normal(60, 10, rows), np.full(rows, 20.0)], axis=1)
    candidate = reference + np.stack([20 * rise + rng.normal(0, 0.05, rows), np.zeros(rows)], axis=1)
    return Paired(metrics.METRICS["perplexity"].scores[0], candidate, reference)


def test_a_percentage_of_perplexity_is_relative() -> None:
    condition = one("perplexity rises by 2% at 95%", "perplexity")
    found = fail_if.judge(condition, lms(0.03))
    assert found.failed and "it rose by 3 %" in found.reason
    small = fail_if.judge(condition, lms(0.01))
    assert not small.failed and not small.warning and "it rose by 0.99 %" in small.reason
    assert fail_if.judge(condition, lms(-0.01)).reason == "no rise"
    assert fail_if.judge(one("perplexity rises by 0.3", "perplexity"), lms(0.03)).failed
    assert fail_if.judge(one("perplexity above 20 at 95%", "perplexity"), lms(0.0)).reason.startswith("it is 2")


def test_what_is_not_finite_fails() -> None:
    broken = np.array([[np.inf, 3.0]])
    found = fail_if.judge(
        one("perplexity rises by 2%", "perplexity"), Paired(metrics.METRICS["perplexity"].scores[0], broken, broken)
    )
    assert found.failed and "not finite" in found.reason


def test_false_alarms_are_as_rare_as_said() -> None:
    """By simulation: a candidate that changes rows in either direction alike fails in at most 5 % of samples."""
    rng = np.random.default_rng(7)
    condition = one("accuracy drops by 0.5% at 95%")
    turned = rng.multinomial(400, [0.01, 0.01, 0.98], size=300)
    alarms = sum(fail_if.judge(condition, pair(400, int(worse), int(better))).failed for worse, better, _ in turned)
    assert alarms / 300 <= 0.07
    dropped = rng.multinomial(400, [0.05, 0.005, 0.945], size=100)
    seen = sum(fail_if.judge(condition, pair(400, int(worse), int(better))).failed for worse, better, _ in dropped)
    assert seen / 100 > 0.9

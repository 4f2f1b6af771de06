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
    assert not fail_if.judge(one("accuracy drops by 4% at 95%"), pair(200, 1, 0)).warning
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
    assert not fail_if.judge(nearly, pair(200, 0, 0)).failed, "it is below, but rows by chance explain that"
    assert fail_if.judge(one("accuracy below 0.95 at 95%"), pair(200, 0, 0)).failed


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

"""regression: each way of being worse is seen, worded, and told from what repeating explains."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from nlpconvert.errors import UsageError
from nlpconvert.validators import regression
from nlpconvert.validators.findings import CaseDrift, Comparison, Decisions, Element, OutputDiff, Score
from nlpconvert.validators.regression import loosened, regressions
from nlpconvert.validators.regression_rules import FACTOR, NOISE, Regression, scatter
from nlpconvert.validators.rows import RowDiff, RowsReport
from nlpconvert.validators.tolerance import Tolerance, parse

NAME = "the baseline main/nlpconvert.json"


def bound(text: str, multiple: float | None = None) -> Tolerance:
    """The table's bound of that text."""
    (found,) = parse(text)
    return replace(found, given=False, multiple=multiple)


def diff(text: str = "cosine>=0.99", measured: float = 0.9949, **more: Any) -> OutputDiff:
    """An output as `parity` would record it: two cases, 768 elements."""
    tolerance = bound(text) if isinstance(text, str) else text
    measure = tolerance.measure
    values: dict[str, Any] = {
        "name": "sentence_embedding",
        "dtype": "float32",
        "unit": "row",
        "tolerance": tolerance,
        "scale": 2.0,
        "agrees": tolerance.holds(measured),
        "measured": measured,
        "used": tolerance.used(measured),
        "would_pass_at": {measure: measured},
        "elements": 768,
        "vectors": 2,
        "out_of_tolerance": 0,
        "worst": Element((0, 1), 3.0, 3.1, 0.1, "alone", (1, 384)),
        "relative_l2": 0.01,
        "cosine": Score(2, 0.999, measured, "left-padded", (0,)) if measure == "cosine" else None,
        "kl": Score(2, measured, measured, "left-padded", (0,)) if measure == "kl" else None,
        "cases": {"alone": CaseDrift(0.1, 0.4, 384), "left-padded": CaseDrift(0.2, 0.6, 384)},
    }
    return OutputDiff(**{**values, **more})


def verdict(*outputs: OutputDiff, not_applicable: tuple[tuple[str, str], ...] = (), **more: Any) -> dict[str, Any]:
    """A verdict through JSON, as a manifest gives it back."""
    comparison = Comparison(outputs, 2, not_applicable)
    found = {"comparison": comparison.to_dict(), "probe_sha256": "7" * 64, "provider": "CPUExecutionProvider", **more}
    return dict(json.loads(json.dumps(found, allow_nan=False)))


def found(old: OutputDiff, new: OutputDiff) -> tuple[Regression, ...]:
    return regressions(verdict(old), verdict(new), NAME)


def texts(old: OutputDiff, new: OutputDiff) -> list[str]:
    return [each.text for each in found(old, new)]


# -- the loss ----------------------------------------------------------------------------------------------------------


def test_the_same_again_is_no_regression() -> None:
    for output in (diff(), diff("rel<=5e-5", 1e-6), diff("kl<=0.01", 0.002), diff("abs<=1e-3", 1e-5)):
        assert found(output, output) == ()


def test_a_loss_inside_the_tolerance_is_worded_with_both_numbers_and_the_factor() -> None:
    (one,) = found(diff(), diff(measured=0.99121))
    assert one.text == (
        "sentence_embedding: cosine 0.99490 -> 0.99121 (1.7 times the loss, worst in case left-padded), inside the "
        "tolerance cosine>=0.99 but worse than the baseline main/nlpconvert.json"
    )
    assert (one.kind, one.output, one.before, one.after) == ("loss", "sentence_embedding", 0.9949, 0.99121)
    assert one.times == pytest.approx(0.00879 / 0.0051)
    assert Regression.from_dict(json.loads(json.dumps(one.to_dict()))) == one


def test_out_of_its_tolerance_it_says_so() -> None:
    (text,) = texts(diff("kl<=0.01", 0.002), diff("kl<=0.01", 0.02))
    assert text == (
        "sentence_embedding: kl 0.002 -> 0.02 (10 times the loss, worst in case left-padded), outside kl<=0.01 and "
        "worse than the baseline main/nlpconvert.json"
    )


@pytest.mark.parametrize("loss", [1e-4, 5e-3, 0.2])
@pytest.mark.parametrize(("text", "upward"), [("cosine>=0.5", False), ("kl<=1", True), ("rel<=0.9", True)])
def test_the_factor_is_where_it_turns(text: str, upward: bool, loss: float) -> None:
    old = diff(text, loss if upward else 1 - loss)
    for factor, regressed in ((0.2, False), (1.0, False), (FACTOR - 0.05, False), (FACTOR + 0.2, True)):
        new = diff(text, loss * factor if upward else 1 - loss * factor)
        assert bool(found(old, new)) is regressed, factor


def test_a_few_units_of_noise_are_what_repeating_explains() -> None:
    """From 1.1 to 1.6 times the noise is none, nor is what another processor moves where there was nothing."""
    for noise in (3e-7, 2e-6, 1e-5):
        told = {"noise": noise}
        assert not found(diff("rel<=1e-3", 1.1 * noise, **told), diff("rel<=1e-3", 1.6 * noise, **told))
        assert not found(diff("rel<=1e-3", 0.0, **told), diff("rel<=1e-3", 2 * noise, **told))
        assert found(diff("rel<=1e-3", 1.1 * noise, **told), diff("rel<=1e-3", 8 * noise, **told))
    # MiniLM through the kernels of the reference, and through another runtime's; the noise was not measured.
    assert not found(diff("rel<=5e-5", 1.2e-6), diff("rel<=5e-5", 1.3e-5))
    assert found(diff("rel<=5e-5", 1.2e-6), diff("rel<=5e-5", 4e-5))


def test_noise_counts_for_a_cosine_by_its_angle() -> None:
    """Where there was no drift an angle of three times the noise is none, and its cosine is as near to 1 as that."""
    exact = diff("cosine>=0.99", 1.0, noise=1e-3)
    angle = 3e-3
    assert not found(exact, diff("cosine>=0.99", 1 - angle**2 / 2 * 0.9, noise=1e-3))
    assert found(exact, diff("cosine>=0.99", 1 - angle**2 / 2 * 1.2, noise=1e-3))


def test_abs_takes_the_size_of_the_worst_element() -> None:
    small, large = (Element((0, 1), value, value, 0.0, "alone", (1, 384)) for value in (0.0, 1e4))
    assert found(diff("abs<=1", 1e-4, worst=small), diff("abs<=1", 1e-3))
    assert not found(diff("abs<=1", 1e-4, worst=large), diff("abs<=1", 1e-3))


def test_from_nothing_the_factor_is_not_a_number() -> None:
    (one,) = found(diff("rel<=1e-2", 0.0), diff("rel<=1e-2", 1e-3))
    assert "rel 0 -> 0.001 (there was none)" in one.text and math.isinf(one.times)
    assert Regression.from_dict(json.loads(json.dumps(one.to_dict(), allow_nan=False))) == one


def test_large_factors_are_whole_numbers() -> None:
    (text,) = texts(diff("rel<=0.1", 1e-6, noise=1e-7), diff("rel<=0.1", 5.02e-3, noise=1e-7))
    assert "rel 1e-06 -> 0.00502 (5,020 times the loss)" in text


def test_a_cosine_near_one_has_the_digits_that_tell() -> None:
    (text,) = texts(diff("cosine>=0.999", 0.9999993), diff("cosine>=0.999", 0.9999901))
    assert "cosine 0.999999300 -> 0.999990100 (14 times the loss" in text


def test_noise_that_was_recorded_is_what_counts() -> None:
    assert regression.noise_of(diff(noise=2e-4)) == 2e-4
    assert regression.noise_of(diff()) == NOISE


# -- decisions ---------------------------------------------------------------------------------------------------------


def decided(changed: int, near_ties: int = 0, count: int = 1000, **more: Any) -> OutputDiff:
    share = (changed - near_ties) / count
    return diff("changed<=5%", share, name="logits", decisions=Decisions(count, changed, near_ties), **more)


@pytest.mark.parametrize(
    ("before", "after", "regressed"),
    [(0, 1, False), (0, 4, False), (0, 5, True), (1, 2, False), (1, 6, False), (1, 7, True), (20, 30, False),
     (20, 33, True), (7, 3, False)],
)  # fmt: skip
def test_decisions_are_held_against_each_other_by_the_binomial(before: int, after: int, regressed: bool) -> None:
    """One decision more is scatter; the numbers are where P[Bin(before + after, 1/2) >= after] passes 5 %."""
    assert bool(found(decided(before), decided(after))) is regressed
    assert (scatter(before, after) < regression.ALPHA) is regressed


def test_scatter_is_the_binomial_tail() -> None:
    from scipy.stats import binom

    for before, after in ((0, 5), (3, 9), (100, 140), (2000, 2100)):
        assert scatter(before, after) == pytest.approx(binom.sf(after - 1, before + after, 0.5), rel=1e-9)


def test_changed_decisions_are_worded_as_counts() -> None:
    (text,) = texts(decided(1), decided(9))
    assert text == (
        "logits: 1 -> 9 of 1,000 decisions changed, inside the tolerance changed<=5% but worse than the baseline "
        "main/nlpconvert.json"
    )


def test_near_ties_are_the_references_own() -> None:
    assert not found(decided(1), decided(9, near_ties=7))


def test_few_decisions_do_not_hide_a_drift_that_grew() -> None:
    """No decision changed, and the logits are three times as far off."""
    (one,) = found(decided(1, relative_l2=0.01), decided(1, relative_l2=0.03))
    assert one.text == (
        "logits: relative L2 0.01 -> 0.03 (3 times the loss), inside the tolerance changed<=5% but worse than the "
        "baseline main/nlpconvert.json"
    )
    assert not found(decided(1, relative_l2=0.01), decided(1, relative_l2=0.014))


# -- what is no longer compared, and bounds ----------------------------------------------------------------------------


def kinds(old: OutputDiff, new: OutputDiff) -> list[str]:
    return [each.kind for each in found(old, new)]


def test_an_output_that_is_gone() -> None:
    (one,) = regressions(verdict(diff(), decided(0)), verdict(diff()), NAME)
    assert (one.kind, one.text) == ("output", f"logits is no longer compared, as it was in {NAME}")


def test_a_case_that_is_gone_is_told_once_with_its_reason() -> None:
    less = {"cases": {"alone": CaseDrift(0.1, 0.4, 384)}, "elements": 384}
    why = (("left-padded", "it lies outside the profile"),)
    new = verdict(diff(**less), decided(0, **less), not_applicable=why)
    (one,) = regressions(verdict(diff(), decided(0)), new, NAME)
    assert one.text == f"case left-padded is no longer compared (it lies outside the profile), as it was in {NAME}"
    # In one output only.
    (one,) = regressions(verdict(diff(), decided(0)), verdict(diff(), decided(0, **less)), NAME)
    assert one.text == f"logits: case left-padded is no longer compared, as it was in {NAME}" and one.output == "logits"


def test_fewer_elements_in_the_same_cases() -> None:
    assert texts(diff(), diff(elements=700)) == [f"sentence_embedding: 700 elements compared; 768 in {NAME}"]
    assert not texts(diff(elements=700), diff())


def test_a_case_with_a_bound_of_its_own_now_is_still_compared() -> None:
    """It moved into a diff of its own; that its bound is wider than the output's was is told."""
    cases = diff().cases
    rest = diff(cases={"alone": cases["alone"]}, elements=384)
    apart = diff("cosine>=0.9", 0.95, cases={"left-padded": cases["left-padded"]}, elements=384, only="left-padded")
    (one,) = regressions(verdict(diff()), verdict(rest, apart), NAME)
    assert one.text == (
        f"sentence_embedding in case left-padded: the tolerance was loosened, cosine>=0.99 in {NAME} and cosine>=0.9 "
        "now"
    )
    assert regressions(verdict(rest, apart), verdict(rest, apart), NAME) == ()


@pytest.mark.parametrize(
    ("old", "new", "loose"),
    [
        (bound("cosine>=0.99"), bound("cosine>=0.98"), True),
        (bound("cosine>=0.99"), bound("cosine>=0.999"), False),
        (bound("kl<=0.01"), bound("kl<=0.02"), True),
        (bound("rel<=2e-5"), bound("rel<=1e-5"), False),
        (bound("rel<=1e-5", 10), bound("rel<=2e-5", 10), False),  # the same multiple of another noise
        (bound("rel<=2e-5", 10), bound("rel<=1e-5", 20), True),
        (bound("rel<=1e-5", 10), bound("rel<=2e-5"), True),
        (bound("rel<=1e-5"), bound("kl<=0.02"), False),
    ],
)
def test_a_loosened_bound(old: Tolerance, new: Tolerance, loose: bool) -> None:
    assert loosened(old, new) is loose


def test_a_loosened_bound_is_said_aloud_and_another_measure_too() -> None:
    (text,) = texts(diff(), diff("cosine>=0.9"))
    assert text == f"sentence_embedding: the tolerance was loosened, cosine>=0.99 in {NAME} and cosine>=0.9 now"
    new = diff("rel<=1e-2", 1e-3, would_pass_at={"rel": 1e-3, "cosine": 0.9949})
    (text,) = texts(diff(), new)
    assert text == (
        f"sentence_embedding: judged by rel<=0.01, and by cosine>=0.99 in {NAME}: which of them allows more "
        "cannot be told"
    )
    assert kinds(diff(), replace(new, would_pass_at={"rel": 1e-3})) == ["unmeasured", "tolerance"]
    assert kinds(diff(), replace(new, would_pass_at={"rel": 1e-3, "cosine": 0.98})) == ["loss", "tolerance"]


# -- broken, and not to be compared ------------------------------------------------------------------------------------


def test_what_is_not_finite_now() -> None:
    place = Element((0, 1), 1.0, math.nan, math.nan, "alone", (1, 384))
    broken = diff(nonfinite=3, first_nonfinite=place, agrees=False)
    assert texts(diff(), broken) == [f"sentence_embedding: 3 elements not finite, first in case alone; 0 in {NAME}"]
    assert texts(diff(), diff(padded_nonfinite=1)) == [
        f"sentence_embedding: 1 element at padded positions not finite; none in {NAME}"
    ]
    assert not texts(broken, broken) and not texts(broken, diff())


def test_a_problem_that_was_not_there() -> None:
    broken = diff(problems=("its shape is not the reference's: (2, 3), not (2, 4) (case alone)",), agrees=False)
    (text,) = texts(diff(), broken)
    assert text.startswith("sentence_embedding: its shape is not the reference's") and text.endswith(
        f"; not so in {NAME}"
    )


def test_what_fails_the_whole_step_and_did_not() -> None:
    new = verdict(diff(), structure=["it says int8, but none of its 4 products with a weight is computed in it"])
    (one,) = regressions(verdict(diff(), structure=[]), new, NAME)
    assert (one.kind, one.output) == ("problem", "")
    assert one.text == f"it says int8, but none of its 4 products with a weight is computed in it; not so in {NAME}"
    assert regressions(new, new, NAME) == ()


def rows(flagged: int, kind: str = "company") -> dict[str, Any]:
    found = RowDiff("logits", 6, flagged, 0.25, 0.97, 1e-7, "alone", 0, "mixed", 2, kind)
    return RowsReport((found,), 6).to_dict()


def test_an_answer_that_depends_on_its_company_now() -> None:
    """Below float32 that does not fail a step; that it is new does."""
    (one,) = regressions(verdict(diff(), rows=rows(0)), verdict(diff(), rows=rows(4)), NAME)
    assert one.text == (
        "logits: row alone or in company: row 0 of alone and row 2 of mixed differ by 2.5e-01, beyond the model's own; "
        f"not so in {NAME}"
    )
    assert one.kind == "rows" and one.after == 4
    assert not regressions(verdict(diff(), rows=rows(1)), verdict(diff(), rows=rows(4)), NAME)
    assert not regressions(verdict(diff(), rows=rows(0)), verdict(diff(), rows=rows(0)), NAME)
    # What the baseline did not ask is nothing new, nor where it has no rows at all.
    assert not regressions(verdict(diff(), rows=rows(0)), verdict(diff(), rows=rows(4, "padding-left")), NAME)
    assert not regressions(verdict(diff()), verdict(diff(), rows=rows(4)), NAME)


@pytest.mark.parametrize("hashes", [("7" * 64, "8" * 64), ("", "")])
def test_other_probes_are_no_agreement(hashes: tuple[str, str]) -> None:
    """The numbers are not held against each other; a bound that was loosened is told all the same."""
    old, new = verdict(diff(), probe_sha256=hashes[0]), verdict(diff("cosine>=0.5", 0.6), probe_sha256=hashes[1])
    first, second = regressions(old, new, NAME)
    assert (first.kind, second.kind) == ("probes", "tolerance")
    assert first.text == (
        f"{NAME} was measured with other probes, so the numbers cannot be compared; make it again with these"
    )


def test_another_provider_is_no_agreement() -> None:
    new = verdict(diff(measured=0.9), provider="CUDAExecutionProvider")
    (one,) = regressions(verdict(diff()), new, NAME)
    assert one.text == (
        f"{NAME} ran on CPUExecutionProvider and this on CUDAExecutionProvider, so the numbers cannot be compared"
    )
    assert not regressions(verdict(diff(), provider="cpu (torch 2.13.0)"), verdict(diff()), NAME)
    assert regressions(verdict(diff(), provider="abacus"), verdict(diff()), NAME)[0].kind == "provider"


def test_the_worst_comes_first() -> None:
    less = {"cases": {"alone": CaseDrift(0.1, 0.4, 384)}}
    old = verdict(diff("rel<=0.1", 1e-3, name="a"), diff("rel<=0.1", 1e-3, name="b"), diff(name="c"), diff(name="d"))
    new = verdict(
        diff("rel<=0.1", 2e-3, name="a"), diff("rel<=0.1", 9e-3, name="b"), diff("cosine>=0.9", name="c"),
        diff(name="d", **less),
    )  # fmt: skip
    assert [(each.kind, each.output) for each in regressions(old, new, NAME)] == [
        ("cases", "d"), ("loss", "b"), ("loss", "a"), ("tolerance", "c"),
    ]  # fmt: skip


def test_a_verdict_that_cannot_be_read_is_told() -> None:
    for broken in ({}, {"comparison": {}}, {"comparison": None}, {**verdict(diff()), "comparison": {"outputs": [{}]}}):
        with pytest.raises(UsageError, match=r"main/nlpconvert\.json: its verdict cannot be read"):
            regressions(broken, verdict(diff()), NAME)


# -- a noise that was measured larger ----------------------------------------------------------------------------------


def test_a_larger_noise_now_excuses_nothing() -> None:
    """Slack comes from the baseline's noise alone; where that was not measured it is NOISE."""
    old, new = diff("rel<=1e-3", 1e-6, noise=3e-7), diff("rel<=1e-3", 4e-6, noise=1e-4)
    assert kinds(old, new) == ["loss"]
    assert kinds(diff("rel<=1e-3", 1e-6), diff("rel<=1e-3", 4e-5, noise=1e-4)) == ["loss"]
    assert not kinds(replace(old, noise=1e-4), new)


def test_the_same_multiple_of_a_larger_noise_is_a_loosened_bound() -> None:
    old = diff(bound("rel<=1e-5", 10), 1e-6, noise=1e-6)
    (text,) = texts(old, diff(bound("rel<=4e-5", 10), 1e-6, noise=4e-6))
    assert text == (
        f"sentence_embedding: the tolerance was loosened, noise<=10 (rel<=1e-05) in {NAME} and noise<=10 (rel<=4e-05) "
        "now"
    )
    # By less than the factor it is scatter; of another model the noise is another.
    assert not texts(old, diff(bound("rel<=1.4e-5", 10), 1e-6, noise=1.4e-6))
    new = verdict(diff(bound("rel<=4e-5", 10), 1e-6, noise=4e-6))
    assert not regressions(verdict(old), new, NAME, same_source=False)
    assert loosened(bound("rel<=1e-5", 20), bound("rel<=4e-5", 10), same_noise=True)
    assert not loosened(bound("rel<=1e-5", 20), bound("rel<=4e-5", 10))


def test_a_case_without_a_number_by_the_new_bound_was_compared() -> None:
    """As judged anew by another measure: `recheck` names them."""
    old = verdict(diff("rel<=1e-3", 1e-4))
    new = diff("cosine>=0.9", 0.99, would_pass_at={"rel": 1e-4, "cosine": 0.99}, cases={})
    kept = {name: {"worst_abs": 0.1, "used": "nan", "scored": 384} for name in ("alone", "left-padded")}
    bare = regressions(old, verdict(new), NAME)
    assert [each.kind for each in bare] == ["cases", "tolerance"]
    told = regressions(old, verdict(new, recheck={"unnumbered": {"sentence_embedding": kept}}), NAME)
    assert [each.kind for each in told] == ["tolerance"]
    del kept["alone"]
    told = regressions(old, verdict(new, recheck={"unnumbered": {"sentence_embedding": kept}}), NAME)
    assert [each.kind for each in told] == ["cases", "tolerance"] and told[0].text.startswith("case alone is no longer")

"""overlap and regression: verdicts on other probes are held against each other over the cases that both have, with real
verdicts over arrays; and baseline's sentence about a bound that cannot fail."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlpconvert import judging, manifest, models, runtimes
from nlpconvert.golden import Reference
from nlpconvert.inputs import Case, cases_sha256
from nlpconvert.models import OutputRow
from nlpconvert.plan import Options
from nlpconvert.progress import Silent
from nlpconvert.validators import overlap, parity
from nlpconvert.validators.baseline import Baseline
from nlpconvert.validators.findings import Comparison
from nlpconvert.validators.regression import regressions
from nlpconvert.validators.rows import RowDiff, RowsReport
from nlpconvert.validators.tolerance import parse

NAME = "the baseline main/nlpconvert.json"

TOKENS = ("batch", "sequence", "width")
ROWS = {
    "embedding": (OutputRow("out", TOKENS, "embedding"), ("cosine>=0.5", "abs<=2.5", "rel<=0.9")),
    "decisions": (OutputRow("out", TOKENS, "decisions"), ("changed<=50%", "rel<=0.9")),
    "distribution": (OutputRow("out", TOKENS, "distribution"), ("kl<=0.7", "changed<=50%")),
    "position": (OutputRow("out", ("batch", "sequence"), "position"), ("changed<=90%",)),
}  # fmt: skip


def asked(measure: str, text: str, names: Sequence[str], spoil: Mapping[str, float]) -> dict[str, Any]:
    """A real verdict over the named cases; `spoil`: by case, how large the candidate's error is (0.05)."""
    row, (tolerance,) = ROWS[measure][0], parse(text)
    cases, answers, candidates = [], {}, {}
    for name in names:
        rng = np.random.default_rng(ord(name))
        shape = (int(rng.integers(2, 5)), int(rng.integers(3, 9)))
        mask = np.ones(shape, np.int64)
        mask[1:, -1] = 0
        cases.append(Case(name, {"input_ids": rng.integers(0, 99, shape), "attention_mask": mask}))
        values = rng.normal(size=(*shape, 16)[: len(row.axes)]).astype(np.float32)
        answers[name] = {"out": Reference(values, values.shape)}
        error = spoil.get(name, 0.05) * rng.normal(size=values.shape)
        candidates[name] = {"out": (values + error).astype(np.float32)}
    judge = parity.Judge([row], parity.scales([row], cases, answers), {"out": tolerance}, {"out": 1e-7})
    for each in cases:
        judge.add(each, answers[each.name], candidates[each.name])
    hashes = {each.name: cases_sha256([each])[:16] for each in cases}
    comparison = judge.comparison().to_dict()
    more = {"probe_sha256": cases_sha256(cases), "case_sha256": hashes, "cases": len(cases), "provider": "cpu"}
    return dict(json.loads(json.dumps({"comparison": comparison, **more}, allow_nan=False)))


EVERY = [(measure, text) for measure, (_, texts) in ROWS.items() for text in texts]


@pytest.mark.parametrize(("measure", "text"), EVERY)
def test_the_same_artifact_over_more_cases_is_no_regression(measure: str, text: str) -> None:
    """Numbers over the shared cases are those of a run with them alone, whatever the new cases are like."""
    old, new = asked(measure, text, "abcd", {}), asked(measure, text, "aebfcgd", {"e": 0.5, "f": 0.4, "g": 0.5})
    assert regressions(old, new, NAME) == ()
    (first,), (second,) = (Comparison.from_dict(each["comparison"]).outputs for each in (old, new))
    shared = frozenset("abcd")
    assert overlap.probes(old, new) == overlap.Probes(shared, "", 4, 7)
    if measure == "position":
        assert overlap.uncounted(old, new) == ("out",)
    elif text.startswith("changed"):
        assert first.decisions is not None and first.decisions.changed > 0
        assert overlap.decisions(second, shared) == (first.decisions.changed, first.decisions.count)
    else:
        scale = (first.scale / second.scale) if text.startswith("rel") else 1.0
        assert overlap.measured(second, first.tolerance.measure, shared) == pytest.approx(first.measured * scale, 0.1 if
            text.startswith("rel") else 1e-9)  # fmt: skip
    assert second.measured != first.measured


@pytest.mark.parametrize(("measure", "text"), EVERY)
def test_what_got_worse_in_a_shared_case_is_seen_and_says_over_how_many(measure: str, text: str) -> None:
    old = asked(measure, text, "abcd", {})
    worse = regressions(old, asked(measure, text, "aebfcgd", dict.fromkeys("abcd", 0.4)), NAME)
    assert {each.kind for each in worse} <= {"loss", "changed"} and worse
    assert all("over the 4 shared cases" in each.text for each in worse)
    # Fewer cases now: those that are gone are told, and the rest is compared.
    gone = regressions(old, asked(measure, text, "ac", {}), NAME)
    assert [each.text for each in gone] == [f"case b and 1 more are no longer compared, as it was in {NAME}"]


def test_the_scale_of_other_cases_hides_nothing() -> None:
    """Large answers in new cases make the unit of `rel` large: `abs` stands for it."""
    old, new = asked("embedding", "rel<=0.9", "abcd", {}), asked("embedding", "rel<=0.9", "abcde", {"a": 0.2})
    (output,) = new["comparison"]["outputs"]
    output["scale"] *= 100
    for each in output["cases"].values():
        each["used"] /= 100
    (one,) = regressions(old, new, NAME)
    assert one.text.startswith("out: abs ") and one.text.count("over the 4 shared cases") == 1


def test_what_is_broken_in_a_new_case_alone_is_nothing_that_got_worse() -> None:
    """It fails by itself; in a shared case it is told."""
    old, names = asked("embedding", "cosine>=0.5", "ab", {}), "abc"
    assert regressions(old, asked("embedding", "cosine>=0.5", names, {"c": math.nan}), NAME) == ()
    (one,) = regressions(old, asked("embedding", "cosine>=0.5", names, {"b": math.nan}), NAME)
    assert one.kind == "nonfinite" and "first in case b" in one.text


def test_a_row_of_a_new_case_was_not_asked_before() -> None:
    old, new = (asked("embedding", "cosine>=0.5", names, {}) for names in ("ab", "abc"))
    for twin, told in (("c", []), ("b", ["rows"])):
        found = RowsReport((RowDiff("out", 6, 1, 0.25, 0.97, 1e-7, "a", 0, twin, 2, "company"),), 6).to_dict()
        calm = RowsReport((RowDiff("out", 6, 0, 0.0, 1.0, 1e-7, "a", 0, "b", 2, "company"),), 6).to_dict()
        assert [e.kind for e in regressions({**old, "rows": calm}, {**new, "rows": found}, NAME)] == told


def test_probes_that_cannot_be_held_against_each_other() -> None:
    """A case that asks something else, none that both have, and a verdict without hashes."""
    old = asked("embedding", "cosine>=0.5", "ab", {})
    other = asked("embedding", "cosine>=0.5", "abc", {})
    other["case_sha256"]["b"] = "0" * 16
    (one,) = regressions(old, other, NAME)
    assert one.kind == "probes" and one.text == (
        f"{NAME} was measured with other probes (case b asks something else there), so the numbers cannot be compared; "
        "make it again with these"
    )
    (one, *_) = regressions(old, asked("embedding", "cosine>=0.5", "cd", {}), NAME)
    assert one.kind == "probes" and "(no case is in both)" in one.text
    without = {key: value for key, value in asked("embedding", "cosine>=0.5", "abc", {}).items() if "case" not in key}
    assert [each.kind for each in regressions(old, without, NAME)] == ["probes"]


def test_another_measure_now_is_answered_where_the_worst_is_shared() -> None:
    """The worst cosine of all cases was kept with its place, and what each case uses up of its bound alone."""
    old = asked("embedding", "cosine>=0.5", "abcd", {})
    near, far = (asked("embedding", "rel<=0.9", "abcde", spoil) for spoil in ({"a": 0.5}, {"e": 0.5}))
    assert [each.kind for each in regressions(old, near, NAME)] == ["loss", "tolerance"]
    found = regressions(old, far, NAME)
    assert [each.kind for each in found] == ["unmeasured", "tolerance"]
    assert found[0].text.endswith("is not measured over the 4 shared cases")


def test_a_real_one_over_some_of_its_cases(classifier_out: Path) -> None:
    """A verdict on a few of the cases, and one on all of them, of the same bytes: no number is worse over the few."""
    whole = manifest.read(classifier_out)
    probes = judging.stored_probes(whole, classifier_out)
    few = replace(probes, cases=probes.cases[:7], sha256="8" * 64)
    artifact = whole.artifact("onnx", classifier_out)
    rows = models.facts_from_data(whole.facts).outputs
    for text in ("", "changed<=5%"):
        given = parse(text) if text else ()
        session = runtimes.open_artifact(artifact, Options())
        verdicts = [judging.judge(session, artifact, rows, each, given, Silent())[1] for each in (few, probes)]
        session.close()
        assert regressions(*verdicts) == ()
        gone = [each.kind for each in regressions(*reversed(verdicts))]
        assert gone == ["cases"]


# -- the sentence about a bound that cannot fail -----------------------------------------------------------------------


def said(measure: str, text: str, *blocks: list[list[float]]) -> str:
    constant = Baseline(1.0, parse(text)[0])
    for block in blocks:
        constant.add(np.array(block, np.float64))
    return constant.verdict()


def test_a_bound_too_wide_is_not_the_references_fault() -> None:
    wide = "this bound is wider than the answers differ from text to text: an artifact that always gave the first"
    hardly = "the reference hardly depends on its input: an artifact that always gave the first"
    apart, alike = [[1.0, -1.0], [-1.0, 0.5]], [[1.0, -1.0], [1.0002, -1.0]]
    assert said("abs", "abs<=1e30", apart).startswith(wide)
    assert said("abs", "abs<=1e30", alike).startswith(hardly)
    assert said("abs", "abs<=1e30", alike, apart).startswith(wide)
    assert said("abs", "abs<=1e-3", apart) == ""
    assert said("changed", "changed<=60%", apart).startswith(wide)
    assert said("kl", "kl<=10", apart).startswith(wide) and said("kl", "kl<=10", alike).startswith(hardly)
    # They differ, and decide the same every time.
    assert said("changed", "changed<=60%", [[1.0, -1.0], [3.0, 0.5]]).startswith(hardly)

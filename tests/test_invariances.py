"""Tests of what must not matter: company, order, padding, a second run. A session that lets it matter is a drift.

The sessions are the tiny classifier's own ONNX artifact with one thing spoilt (dict in, dict out).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlpconvert import judging, manifest, models, report, runtimes
from nlpconvert.artifact import Artifact, Outcome
from nlpconvert.errors import UsageError
from nlpconvert.judging import Bounds, Probes
from nlpconvert.manifest import Manifest
from nlpconvert.plan import Options
from nlpconvert.progress import Silent
from nlpconvert.validators.tolerance import parse

Arrays = dict[str, np.ndarray]


class Spoilt:
    """The artifact's session with `change` applied to each answer."""

    def __init__(self, session: Any, change: Callable[[Any, Arrays], Arrays]) -> None:
        self.provider, self.precision = session.provider, session.precision
        self._session, self._change = session, change

    def run(self, batch: Any) -> Arrays:
        return self._change(batch, {name: array.copy() for name, array in self._session.run(batch).items()})

    def close(self) -> None: ...


class Fixture:
    """The ONNX artifact of the tiny classifier, open."""

    def __init__(self, out: Path) -> None:
        self.record: Manifest = manifest.read(out)
        self.artifact: Artifact = self.record.artifact("onnx", out)
        self.session = runtimes.open_artifact(self.artifact, Options())
        self.probes: Probes = judging.stored_probes(self.record, out)
        self.outputs = models.facts_from_data(self.record.facts).outputs

    def judge(
        self,
        change: Callable[[Any, Arrays], Arrays] = lambda _, answers: answers,
        given: Any = (),
        precision: str = "float32",
    ) -> Outcome:
        artifact = replace(self.artifact, precision=precision)
        agrees, verdict, _ = judging.judge(
            Spoilt(self.session, change), artifact, self.outputs, self.probes, given, Silent()
        )
        return Outcome("onnx", "agrees" if agrees else "drift", artifact=artifact, verdict=verdict)


@pytest.fixture(scope="module")
def onnx(classifier_out: Path) -> Iterator[Fixture]:
    fixture = Fixture(classifier_out)
    yield fixture
    fixture.session.close()


def text(outcome: Outcome) -> str:
    return "\n".join(report.verdict_lines(outcome))


WIDE = parse("rel<=0.9")
"""Wider than what is spoilt: what fails then fails by its invariance alone."""


def test_unspoilt_it_agrees_and_says_what_was_tried(onnx: Fixture) -> None:
    outcome = onnx.judge()
    assert outcome.status == "agrees"
    said = text(outcome)
    assert "row alone or in company" in said and "a second run" in said and "rows in another order" in said
    assert "padding at the left      differs by" in said and "depends on it in the model itself" in said


def by_place(_: Any, answers: Arrays) -> Arrays:
    return {name: array + 0.01 * np.arange(len(array), dtype=np.float32)[:, None] for name, array in answers.items()}


def by_length(batch: Any, answers: Arrays) -> Arrays:
    return {name: array + np.float32(1e-3) * batch["input_ids"].shape[1] for name, array in answers.items()}


def by_run() -> Callable[[Any, Arrays], Arrays]:
    draw = np.random.default_rng(0)
    return lambda _, answers: {
        name: array + draw.normal(0, 0.01, array.shape).astype(np.float32) for name, array in answers.items()
    }


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (by_place, ["identical rows", "rows in another order"]),
        (by_length, ["padding at the right", "row alone or in company"]),
        (by_run(), ["a second run"]),
    ],
    ids=["place", "length", "run"],
)
def test_what_must_not_matter_and_does_is_a_drift(
    onnx: Fixture, change: Callable[[Any, Arrays], Arrays], kinds: list[str]
) -> None:
    outcome = onnx.judge(change, WIDE)
    assert outcome.verdict is not None
    assert all(output["agrees"] for output in outcome.verdict["comparison"]["outputs"])
    assert outcome.status == "drift"
    for kind in kinds:
        assert f"logits: {kind} must not matter, and differs by" in text(outcome)


def test_below_float32_it_is_told_and_does_not_decide(onnx: Fixture) -> None:
    outcome = onnx.judge(by_length, parse("changed<=40%"), precision="int8")
    assert outcome.verdict is not None and outcome.verdict["rows"]["flagged"]
    assert "beyond the model's own" in text(outcome)
    problems = [p for p in outcome.verdict["structure"] if "must not matter" in p]
    assert problems == []


# -- a factor that the task's measure does not see ---------------------------------------------------------------------


def test_a_doubled_answer_is_seen_below_float32_too(onnx: Fixture) -> None:
    doubled = onnx.judge(lambda _, answers: {n: a * np.float32(2) for n, a in answers.items()}, precision="int8")
    assert doubled.status == "drift"
    assert "its values are 100% off (relative L2), which changed does not see" in text(doubled)


# -- tolerances of one output and one case -----------------------------------------------------------------------------


def shifted(names: set[str], probes: Probes) -> Callable[[Any, Arrays], Arrays]:
    """Answers moved by 0.01 in the cases named."""
    inputs = [case.inputs["input_ids"] for case in probes.cases if case.name in names]

    def change(batch: Any, answers: Arrays) -> Arrays:
        hit = any(batch["input_ids"] is each for each in inputs)
        return {n: a + np.float32(0.01) if hit else a for n, a in answers.items()}

    return change


def test_a_case_may_have_its_own_tolerance(onnx: Fixture) -> None:
    change = shifted({"masked-row"}, onnx.probes)
    assert onnx.judge(change).status == "drift"
    lenient = onnx.judge(change, Bounds(cases={"masked-row": parse("abs<=0.02")}))
    assert lenient.status == "agrees", text(lenient)
    assert lenient.verdict is not None
    names = [(o["name"], o["only"]) for o in lenient.verdict["comparison"]["outputs"]]
    assert names == [("logits", ""), ("logits", "masked-row")]
    # Stricter for one case than for the rest, it fails by that case alone.
    strict = onnx.judge(change, Bounds(parse("abs<=0.02"), cases={"masked-row": parse("abs<=1e-4")}))
    assert strict.status == "drift"
    assert "logits[masked-row]" in text(strict)


def test_an_output_may_have_its_own_tolerance(onnx: Fixture) -> None:
    change = shifted({"masked-row"}, onnx.probes)
    assert onnx.judge(change, Bounds(outputs={"logits": parse("abs<=0.02")[0]})).status == "agrees"
    with pytest.raises(UsageError, match="judges none"):
        onnx.judge(change, Bounds(parse("cosine>=0.9"), outputs={"logits": parse("abs<=0.02")[0]}))


def test_only_a_case_of_its_own_is_asked(onnx: Fixture) -> None:
    probes = replace(onnx.probes, cases=[c for c in onnx.probes.cases if c.name == "masked-row"])
    agrees, verdict, _ = judging.judge(
        onnx.session, onnx.artifact, onnx.outputs, probes, Bounds(cases={"masked-row": parse("abs<=0.02")}), Silent()
    )
    assert agrees and [o["only"] for o in verdict["comparison"]["outputs"]] == ["masked-row"]

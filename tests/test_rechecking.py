"""rechecking: recorded measurements answer for another bound what a run with that bound answers, or refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nlpconvert import manifest, pipeline, report
from nlpconvert.artifact import Outcome
from nlpconvert.comparing import against_baseline
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.judging import Bounds
from nlpconvert.plan import Options
from nlpconvert.rechecking import recheck
from nlpconvert.validators.findings import Comparison, OutputDiff
from nlpconvert.validators.tolerance import parse

Edit = Callable[[dict[str, Any]], None]


def again(out: Path, text: str, step: str = "onnx") -> Outcome:
    return recheck(manifest.read(out), step, out, parse(text))


def refused(out: Path, text: str, step: str = "onnx") -> str:
    with pytest.raises(UsageError) as caught:
        again(out, text, step)
    return str(caught.value)


def copy(out: Path, to: Path, edit: Edit | None = None, step: str = "onnx") -> Path:
    """A copy whose record of a step is edited: as if it had been measured so."""
    shutil.copytree(out, to / "out")
    path = to / "out" / manifest.FILE
    data = json.loads(path.read_text())
    if edit is not None:
        edit(data["steps"][step])
    path.write_text(json.dumps(data))
    return to / "out"


def outputs(outcome: Outcome) -> dict[str, OutputDiff]:
    assert outcome.verdict is not None
    return {output.name: output for output in Comparison.from_dict(outcome.verdict["comparison"]).outputs}


@pytest.mark.parametrize("text", ["cosine>=0.999", "cosine>=0.9999999", "cosine>=0.9999999999999999", "cosine>=0.01"])
def test_it_answers_as_a_run_does(features_out: Path, text: str) -> None:
    """Status, bounds, numbers, problems and notes are the same: tighter, too tight, or so wide that it cannot fail."""
    fresh, (run,) = again(features_out, text), pipeline.verify(features_out, options=Options(tolerance=text))
    assert fresh.status == run.status
    for name, output in outputs(run).items():
        mine = outputs(fresh)[name]
        for field in ("tolerance", "agrees", "measured", "used", "problems", "notes", "would_pass_at", "elements"):
            assert getattr(mine, field) == getattr(output, field), (name, field)


def test_decisions_answer_as_a_run_does(classifier_out: Path) -> None:
    for text in ("changed<=0.1%", "changed<=0%", "changed<=20%", "changed<=95%"):
        fresh, (run,) = again(classifier_out, text), pipeline.verify(
            classifier_out, steps=["onnx"], options=Options(tolerance=text)
        )  # fmt: skip
        assert (fresh.status, outputs(fresh)["logits"].problems) == (run.status, outputs(run)["logits"].problems), text
        assert outputs(fresh)["logits"].out_of_tolerance == outputs(run)["logits"].out_of_tolerance


def test_it_says_that_nothing_was_run_and_whose_measurements_these_are(features_out: Path) -> None:
    found = again(features_out, "cosine>=0.999")
    record = manifest.read(features_out)
    cpu = (record.steps["onnx"].outcome.verdict or {})["host"]["cpu"]
    assert found.notes[-1] == (
        "nothing was run: last_hidden_state by cosine>=0.999, pooler_output by cosine>=0.999, from the measurements "
        f"recorded on {cpu}, CPUExecutionProvider, in the manifest of {record.created}"
    )
    assert found.verdict is not None and found.verdict["recheck"]["recorded"] == record.created
    assert found.seconds == 0
    lines = list(report.verdict_lines(found, verbose=True))
    assert f"  note                     {found.notes[-1]}" in lines


def worse(by: float) -> Edit:
    """The recorded worst cosine of every output, and what follows from it."""

    def edit(step: dict[str, Any]) -> None:
        for output in step["verdict"]["comparison"]["outputs"]:
            output["cosine"]["worst"] = output["would_pass_at"]["cosine"] = 1 - by

    return edit


def test_past_the_bound_it_is_a_drift_and_says_what_would_pass(features_out: Path, tmp_path: Path) -> None:
    out = copy(features_out, tmp_path, worse(0.008))
    assert again(out, "cosine>=0.99").status == "agrees"
    found = again(out, "cosine>=0.995")
    assert found.status == "drift" and found.exit_code == 1
    text = "\n".join(report.verdict_lines(found))
    assert "would pass at    cosine>=0.992" in text and "onnx disagrees with pytorch: 2 of 2 outputs" in text


def test_one_output_by_a_bound_of_its_own(features_out: Path, tmp_path: Path) -> None:
    out = copy(features_out, tmp_path, worse(0.008))
    (tight,), (wide,) = parse("cosine>=0.995"), parse("cosine>=0.9")
    found = recheck(manifest.read(out), "onnx", out, Bounds((wide,), {"pooler_output": tight}))
    assert {name: output.agrees for name, output in outputs(found).items()} == {
        "last_hidden_state": True, "pooler_output": False,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["rel<=1e-3", "abs<=1e-3", "noise<=20"])
def test_what_judges_every_element_is_refused(features_out: Path, text: str) -> None:
    shown = "rel<=0.001" if text.startswith("rel") else "abs<=0.001" if text.startswith("abs") else text
    assert refused(features_out, text) == (
        f"onnx: {shown} judges every element of last_hidden_state, and only the worst of each output is kept: run "
        "verify without --recheck"
    )


def test_the_bound_that_it_had_needs_no_answer(features_out: Path) -> None:
    record = manifest.read(features_out)
    before = Comparison.from_dict((record.steps["onnx"].outcome.verdict or {})["comparison"])
    given = {output.name: replace(output.tolerance.asked(), given=True) for output in before.outputs}
    found = recheck(record, "onnx", features_out, Bounds(outputs=given))
    assert found.status == "agrees" and "every output by the bound it had" in found.notes[-1]


def test_a_case_alone_cannot_be_told(features_out: Path) -> None:
    with pytest.raises(UsageError, match=r"onnx: cosine>=0.9 of the case \S+ alone cannot be told from what is kept"):
        case = manifest.read(features_out).golden.cases[0]["name"]
        recheck(
            manifest.read(features_out),
            "onnx",
            features_out,
            Bounds(parse("cosine>=0.99"), {}, {case: parse("cosine>=0.9")}),
        )


def test_what_was_not_kept_or_never_measured_is_refused(features_out: Path, tmp_path: Path) -> None:
    def forgotten(step: dict[str, Any]) -> None:
        for output in step["verdict"]["comparison"]["outputs"]:
            del output["would_pass_at"]["cosine"]

    out = copy(features_out, tmp_path / "a", forgotten)
    assert (
        refused(out, "cosine>=0.99") == "onnx: cosine of last_hidden_state was not kept: run verify without --recheck"
    )

    def not_run(step: dict[str, Any]) -> None:
        step.update(status="not run", reason="no GPU", verdict=None)

    assert refused(copy(features_out, tmp_path / "b", not_run), "cosine>=0.99") == (
        "onnx holds no measurements to judge anew (not run: no GPU): run verify without --recheck"
    )
    assert "there is no step 'trt'" in refused(features_out, "cosine>=0.99", "trt")
    assert "judges none of this model's outputs" in refused(features_out, "kl<=0.1")
    with pytest.raises(UsageError, match="give it with --tolerance"):
        recheck(manifest.read(features_out), "onnx", features_out, ())

    def others(step: dict[str, Any]) -> None:
        step["verdict"]["probe_sha256"] = "0" * 64

    assert "was measured with other probes" in refused(copy(features_out, tmp_path / "c", others), "cosine>=0.99")

    def unreadable(step: dict[str, Any]) -> None:
        del step["verdict"]["comparison"]["outputs"][0]["scale"]

    assert "cannot be read (KeyError" in refused(copy(features_out, tmp_path / "d", unreadable), "cosine>=0.99")


def test_files_that_are_not_those_that_were_measured(features_out: Path, tmp_path: Path) -> None:
    out = copy(features_out, tmp_path / "a")
    with (out / "onnx" / "config.json").open("a") as file:
        file.write(" ")
    found = again(out, "cosine>=0.99")
    assert found.status == "drift" and found.verdict is None
    assert found.reason == "onnx/config.json has changed since it was measured: these measurements are not its own"

    stale = copy(features_out, tmp_path / "b", lambda step: step.update(stale=True))
    assert again(stale, "cosine>=0.99").reason.startswith("it is stale: source")

    golden = copy(features_out, tmp_path / "c")
    with (golden / "golden" / "golden.json").open("a") as file:
        file.write(" ")
    with pytest.raises(DriftError, match=r"golden/golden\.json has changed since it was recorded"):
        again(golden, "cosine>=0.99")


def test_what_failed_for_another_reason_still_does(features_out: Path, tmp_path: Path) -> None:
    def structure(step: dict[str, Any]) -> None:
        step["verdict"]["structure"] = ["an axis is fixed"]
        step["status"] = "drift"

    assert again(copy(features_out, tmp_path / "a", structure), "cosine>=0.5").status == "drift"

    def otherwise(step: dict[str, Any]) -> None:
        step.update(status="drift", reason="its tokenizer gives other ids")

    found = again(copy(features_out, tmp_path / "b", otherwise), "cosine>=0.5")
    assert (found.status, found.reason) == ("drift", "its tokenizer gives other ids")

    def gross(step: dict[str, Any]) -> None:
        step["verdict"]["comparison"]["outputs"][0]["relative_l2"] = 1.0

    found = again(copy(features_out, tmp_path / "c", gross), "cosine>=0.5")
    assert found.status == "drift"
    assert outputs(found)["last_hidden_state"].problems == (
        "its values are 100% off (relative L2), which cosine does not see: a factor, or another scale?",
    )


def test_against_a_baseline_no_case_counts_as_lost(classifier_out: Path) -> None:
    """What a case uses up of the other bound was not kept; it was compared all the same."""
    record = manifest.read(classifier_out)
    found = again(classifier_out, "changed<=1%")
    assert found.verdict is not None
    kept = found.verdict["recheck"]["unnumbered"]["logits"]
    assert len(kept) == found.verdict["cases"] and {each["used"] for each in kept.values()} == {"nan"}
    assert json.loads(json.dumps(found.verdict["recheck"], allow_nan=False))
    (held,) = against_baseline([found], record, classifier_out, record=record, asked=["onnx"])
    assert held.verdict is not None
    assert [each["kind"] for each in held.verdict["regressions"]] == ["tolerance"]
    assert "no longer compared" not in held.reason
    same = again(classifier_out, "changed<=0.5%")
    (held,) = against_baseline([same], record.with_step(found), classifier_out, record=record, asked=["onnx"])
    assert held.status == "agrees"

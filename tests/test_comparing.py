"""comparing and report_diff: two manifests side by side, and fresh outcomes against a baseline. Manifests made by hand
for what is told, and a real artifact that got worse inside its tolerance."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from nlpconvert import comparing, disk, manifest, pipeline, report_diff
from nlpconvert.artifact import STEPS, Artifact, Outcome, TensorSpec
from nlpconvert.comparing import against_baseline, diff
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.manifest import Golden, Manifest
from nlpconvert.plan import Options
from nlpconvert.validators.findings import CaseDrift, Comparison, OutputDiff
from nlpconvert.validators.tolerance import parse

SOURCE = "5" * 64
HOST = {"cpu": "AMD EPYC", "machine": "x86_64", "cpu_flags": ["avx2", "avx512_vnni"], "cpus": 2}
VERSIONS = {"onnxruntime": "1.31.0"}
MAIN = "main/nlpconvert.json"


def output(text: str = "cosine>=0.99", measured: float = 0.9949, name: str = "sentence_embedding") -> OutputDiff:
    (bound,) = parse(text)
    return OutputDiff(
        name, "float32", "row", bound, 1.0, bound.holds(measured), measured, bound.used(measured),
        {bound.measure: measured}, 384, 1, 0, cases={"alone": CaseDrift(0.1, 0.4, 384)},
    )  # fmt: skip


def verdict(*outputs: OutputDiff, **more: Any) -> dict[str, Any]:
    found = {
        "comparison": Comparison(outputs, 1).to_dict(), "probe_sha256": "7" * 64, "provider": "CPUExecutionProvider",
        "precision": "float32", "cases": 1, "tokens": 9, "host": HOST, "versions": VERSIONS, **more,
    }  # fmt: skip
    return dict(json.loads(json.dumps(found)))


def artifact(step: str, sha256: str = "1") -> Artifact:
    row = STEPS[step]
    spec = (TensorSpec("x", "int64", ("batch", "sequence")),)
    files = {row.file: sha256, "config.json": "2"}
    return Artifact(
        step, Path(step) / row.file, row.format, row.precision, "sentence-embedding", spec, spec, files, row.parent, "5"
    )


def outcome(step: str, *outputs: OutputDiff, sha256: str = "1", status: str = "", **more: Any) -> Outcome:
    found = verdict(*outputs, **more) if outputs else None
    status = status or ("agrees" if all(o.agrees for o in outputs) else "drift")
    return Outcome(step, status, artifact=artifact(step, sha256), verdict=found, bytes=1_000_000)


def record(*outcomes: Outcome, stale: tuple[str, ...] = (), **more: Any) -> Manifest:
    values: Mapping[str, Any] = {
        "source": {"sha256": SOURCE, "task": "sentence-embedding"},
        "facts": {},
        "golden": Golden({}, ({"name": "alone"},), "7" * 64),
        "host": HOST,
        "versions": VERSIONS,
        "nlpconvert": "0.1.0",
        "created": "2026-11-30T18:00:00+00:00",
        **more,
    }
    steps = {o.step: manifest.Record(o, o.step in stale) for o in outcomes}
    return Manifest(**values, steps=steps)


def written(directory: Path, made: Manifest) -> Path:
    directory.mkdir()
    made.write(directory)
    return directory


# -- two manifests -----------------------------------------------------------------------------------------------------

BEFORE = record(
    outcome("onnx", output("rel<=5e-05", 1e-6)),
    outcome("onnx-int8", output(), output(name="pooled")),
    outcome("onnx-fp16", output("cosine>=0.999", 0.99995)),
    outcome("torchscript", output("rel<=5e-05", 1e-6)),
)
AFTER = record(
    outcome("onnx", output("rel<=0.001", 1e-6)),
    outcome("onnx-int8", output(measured=0.99121), output(name="pooled"), sha256="3"),
    replace(outcome("onnx-fp16", status="not run"), reason="no such device", verdict=None),
    outcome("onnx-int4", output("cosine>=0.95", 0.97)),
    versions={"onnxruntime": "1.32.0"},
    host={**HOST, "cpu_flags": ["avx2"]},
)

LINES = """\
old       old   2026-11-30T18:00:00+00:00
new       new   2026-11-30T18:00:00+00:00
source    the same checkpoint 555555555555, sentence-embedding
probes    the same, 1 case
versions  onnxruntime 1.31.0 -> 1.32.0
host      cpu flags lost avx512_vnni

step         status               size            output              measured                       of its bound                         files
onnx-fp16    agrees -> not run    1.0 MB                                                                                                  the same bytes
torchscript  agrees -> not there  1.0 MB -> none
onnx-int8    agrees               1.0 MB          sentence_embedding  cosine 0.9949000 -> 0.9912100  51% -> 88% of cosine>=0.99           model.onnx has changed
                                                  pooled              cosine 0.9949000               51% of cosine>=0.99
onnx         agrees               1.0 MB          sentence_embedding  rel 1e-06                      2% of rel<=5e-05 -> 0% of rel<=0.001  the same bytes
onnx-int4    not there -> agrees  none -> 1.0 MB

onnx-fp16: it agreed, and is not run now: no such device
torchscript: it agreed, and is not there now
onnx-int8: sentence_embedding: cosine 0.99490 -> 0.99121 (1.7 times the loss), inside the tolerance cosine>=0.99 but worse than the old one
onnx: sentence_embedding: the tolerance was loosened, rel<=5e-05 in the old one and rel<=0.001 now"""  # noqa: E501


def squeezed(text: str) -> list[list[str]]:
    """Lines by their cells: how wide a column is does not matter."""
    return [[cell for cell in line.split("  ") if cell] for line in text.splitlines()]


def test_the_words_of_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "old", BEFORE)
    written(tmp_path / "new", AFTER)
    found = diff("old", "new")
    cells = [[cell.strip() for cell in line] for line in squeezed("\n".join(report_diff.lines(found)))]
    assert cells == [[cell.strip() for cell in line] for line in squeezed(LINES)]
    assert [step.step for step in found.steps] == ["onnx-fp16", "torchscript", "onnx-int8", "onnx", "onnx-int4"]
    (change,) = found.steps[3].outputs
    assert change.loosened and (change.bound_before, change.bound_after) == ("rel<=5e-05", "rel<=0.001")
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["steps"][2]["worse"][0]["kind"] == "loss" and data["versions"][0]["after"] == "1.32.0"


def test_the_same_twice_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "old", BEFORE)
    found = diff(path, path / manifest.FILE)
    assert all(step.same for step in found.steps)
    lines = list(report_diff.lines(found))
    assert "versions  the same" in lines and "host      the same" in lines
    assert not list(report_diff.aloud(found)) and lines[-1].startswith("torchscript")


def test_another_checkpoint_other_probes_and_a_stale_step(tmp_path: Path) -> None:
    other = record(
        outcome("onnx", output("rel<=5e-05", 4e-5), probe_sha256="8" * 64),
        outcome("onnx-int8", output()),
        stale=("onnx-int8",),
        source={"sha256": "6" * 64, "task": "fill-mask"},
        golden=Golden({}, ({"name": "alone"}, {"name": "two"}), "8" * 64),
    )
    found = diff(written(tmp_path / "old", BEFORE), written(tmp_path / "new", other))
    lines = list(report_diff.lines(found))
    assert "source    another task and checkpoint: sentence-embedding 555555555555 -> fill-mask 666666666666" in lines
    assert "probes    others: 1 case -> 2 cases; the numbers cannot be compared" in lines
    assert "onnx-int8: it agreed, and is STALE now" in lines
    assert [each.kind for step in found.steps if step.step == "onnx" for each in step.worse] == ["probes"]


def test_a_verdict_that_cannot_be_read_does_not_end_it(tmp_path: Path) -> None:
    broken = record(replace(outcome("onnx", output()), verdict={"comparison": {}}))
    found = diff(written(tmp_path / "old", BEFORE), written(tmp_path / "new", broken))
    assert any("cannot be read" in line for line in report_diff.lines(found))


def test_nothing_on_either_side(tmp_path: Path) -> None:
    path = written(tmp_path / "old", record())
    assert list(report_diff.lines(diff(path, path)))[-1] == "neither holds a step"


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name, what in (("gone", "is not there"), ("empty", "holds no nlpconvert.json"), ("text.json", "is not JSON"),
                       ("list.json", "has to be an object")):  # fmt: skip
        with pytest.raises(UsageError, match=what):
            comparing.read(tmp_path / name)


# -- fresh outcomes against a baseline ---------------------------------------------------------------------------------


def held(fresh: Outcome, baseline: Manifest, **options: Any) -> Outcome:
    (found,) = against_baseline([fresh], baseline, MAIN, asked=[fresh.step], **options)
    return found


def test_worse_inside_the_tolerance_is_a_drift() -> None:
    found = held(outcome("onnx-int8", output(measured=0.99121)), record(outcome("onnx-int8", output())))
    assert found.status == "drift"
    assert found.reason == (
        "sentence_embedding: cosine 0.99490 -> 0.99121 (1.7 times the loss), inside the tolerance cosine>=0.99 but "
        "worse than the baseline main/nlpconvert.json"
    )
    assert found.verdict is not None
    assert found.verdict["baseline"] == {"path": MAIN, "compared": True, "reason": ""}
    assert [each["kind"] for each in found.verdict["regressions"]] == ["loss"]
    assert found.notes == ()


def test_as_good_or_better_agrees() -> None:
    for measured in (0.9949, 0.9951, 0.9999):
        found = held(outcome("onnx-int8", output(measured=measured)), record(outcome("onnx-int8", output())))
        assert found.status == "agrees" and found.verdict is not None and found.verdict["regressions"] == []


def test_where_else_it_was_measured_is_noted() -> None:
    fresh = outcome(
        "onnx-int8", output(measured=0.99121), host={**HOST, "cpu": "Xeon", "cpu_flags": ["avx2"]},
        versions={"onnxruntime": "1.32.0", "numpy": "2"},
    )  # fmt: skip
    mine = record(fresh, source={"sha256": "6" * 64, "task": "sentence-embedding"})
    found = held(fresh, record(outcome("onnx-int8", output())), record=mine)
    assert found.notes == (
        "the baseline is of another checkpoint: 555555555555 there, 666666666666 here",
        "the baseline was measured elsewhere: cpu AMD EPYC -> Xeon, cpu flags lost avx512_vnni -> none, "
        "onnxruntime 1.31.0 -> 1.32.0",
    )


def test_many_regressions_are_counted() -> None:
    old = record(outcome("onnx-int8", *(output(name=name) for name in "abcde")))
    found = held(outcome("onnx-int8", *(output(measured=0.991, name=name) for name in "abcde")), old)
    assert found.reason.count("worse than the baseline") == 3 and found.reason.endswith("; and 2 more")
    assert found.verdict is not None and len(found.verdict["regressions"]) == 5


def test_what_fails_by_itself_keeps_its_words_and_says_that_it_agreed() -> None:
    found = held(outcome("onnx-int8", output(measured=0.9)), record(outcome("onnx-int8", output())))
    assert (found.status, found.reason) == ("drift", "")
    assert found.notes[-1] == "it agreed in the baseline main/nlpconvert.json"
    stale = Outcome("onnx-int8", "drift", "it is stale: onnx, from which it was made, was replaced since")
    found = held(stale, record(outcome("onnx-int8", output())))
    assert found.reason == stale.reason and found.notes == ("it agreed in the baseline main/nlpconvert.json",)


def test_what_is_not_run_stays_so_and_what_is_skipped_is_worse() -> None:
    """Not run is never a pass, and is no drift: nobody knows. In both it is nothing new."""
    agreed = record(outcome("trt", output()), outcome("onnx-int8", output()))
    not_run = replace(outcome("trt", status="not run"), reason="no GPU", verdict=None)
    found = held(not_run, agreed)
    assert (found.status, found.reason, found.exit_code) == ("not run", "no GPU", 4)
    assert found.notes == ("it agreed in the baseline main/nlpconvert.json",)
    assert held(not_run, record(not_run)) == not_run
    skipped = held(Outcome("trt", "skipped", "tensorrt is not installed"), agreed)
    assert (skipped.status, skipped.exit_code) == ("drift", 1)
    assert (
        skipped.reason
        == "it agreed in the baseline main/nlpconvert.json, and is skipped here: tensorrt is not installed"
    )


def test_a_step_that_is_gone_is_a_drift_unless_it_was_not_asked_for() -> None:
    baseline = record(
        outcome("onnx", output()), outcome("onnx-int8", output()), outcome("onnx-fp16", output()),
        Outcome("trt", "skipped", "x"), stale=("onnx-fp16",),
    )  # fmt: skip
    found = against_baseline([outcome("onnx", output())], baseline, MAIN)
    assert [(each.step, each.status) for each in found] == [("onnx", "agrees"), ("onnx-int8", "drift")]
    assert found[1].reason == "it agreed in the baseline main/nlpconvert.json, and is not there any more"
    assert len(against_baseline([outcome("onnx", output())], baseline, MAIN, asked=["onnx"])) == 1


def test_a_new_step_is_noted_and_nothing_compared_is_a_failure() -> None:
    fresh = [outcome("onnx", output()), outcome("onnx-int8", output())]
    found = against_baseline(fresh, record(outcome("onnx", output())), MAIN)
    assert [each.status for each in found] == ["agrees", "agrees"]
    assert found[1].notes == ("not compared with the baseline main/nlpconvert.json: it holds no such step",)
    assert found[1].verdict is not None and found[1].verdict["baseline"]["compared"] is False
    not_run = replace(outcome("onnx", status="not run"), verdict=None)
    for baseline in (record(), record(not_run)):
        with pytest.raises(DriftError, match=r"holds no measurements of onnx, onnx-int8: nothing was compared"):
            against_baseline(fresh, baseline, MAIN)


def test_a_baseline_of_another_task_is_refused() -> None:
    baseline = record(outcome("onnx", output()), source={"sha256": SOURCE, "task": "fill-mask"})
    with pytest.raises(UsageError, match=r"the baseline main/nlpconvert\.json is of the task fill-mask, not sentence"):
        against_baseline([outcome("onnx", output())], baseline, MAIN)


def test_other_probes_fail_with_what_to_do() -> None:
    found = held(outcome("onnx", output(), probe_sha256="8" * 64), record(outcome("onnx", output())))
    assert found.status == "drift" and found.reason == (
        "the baseline main/nlpconvert.json was measured with other probes, so the numbers cannot be compared; make it "
        "again with these"
    )


# -- a real one --------------------------------------------------------------------------------------------------------


def test_an_artifact_that_got_worse_inside_its_tolerance(features_out: Path, tmp_path: Path) -> None:
    """Unbroken it is as good as its baseline, on one thread and on two; a weight up by 1 % agrees with PyTorch by the
    wide tolerance that was given, and is worse than the baseline all the same."""
    out = tmp_path / "out"
    shutil.copytree(features_out, out)
    baseline = comparing.read(features_out)
    for threads in (1, 2):
        (fresh,) = pipeline.verify(out, options=Options(threads=threads))
        assert held(fresh, baseline, record=manifest.read(out)).status == "agrees"

    path = out / "onnx" / "model.onnx"
    model = onnx.load(str(path))
    (tensor,) = [each for each in model.graph.initializer if "encoder.layer.1.intermediate.dense.weight" in each.name]
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.01), tensor.name))
    (path.parent / "model.onnx.data").unlink()
    onnx.save(model, str(path))
    record = manifest.read(out)
    kept = record.artifact("onnx", out)
    files = disk.hash_tree(kept.directory)
    record.with_step(replace(record.outcome("onnx", out), artifact=replace(kept, files=files))).write(out)

    (fresh,) = pipeline.verify(out, options=Options(tolerance="cosine>=0.99"))
    assert fresh.status == "agrees"
    found = held(fresh, baseline, record=record)
    assert found.status == "drift" and found.verdict is not None
    assert {each["kind"] for each in found.verdict["regressions"]} == {"loss", "tolerance"}
    assert "inside the tolerance cosine>=0.99 but worse than the baseline main/nlpconvert.json" in found.reason
    # Judged by its own, it fails by itself, and what is worse stands beside it.
    (fresh,) = pipeline.verify(out)
    found = held(fresh, baseline)
    assert found.status == "drift" and found.reason == "" and found.notes[-1].startswith("it agreed in the baseline")


# -- other probes, of which both have some -----------------------------------------------------------------------------

HASHES = {"alone": "a" * 16}
MORE = {**HASHES, "text-1": "b" * 16, "text-2": "c" * 16}


def widened(measured: float = 0.9949, alone: float = 0.51) -> OutputDiff:
    """The same output where two cases more were asked, one of which is the worst."""
    cases = {
        "alone": CaseDrift(0.1, alone, 384),
        "text-1": CaseDrift(0.3, 0.8, 384),
        "text-2": CaseDrift(0.1, 0.2, 384),
    }
    return replace(output(measured=measured), cases=cases, elements=3 * 384, vectors=3)


def test_a_baseline_whose_cases_are_all_there_is_compared_over_them() -> None:
    baseline = record(outcome("onnx-int8", output(), case_sha256=HASHES))
    asked = {"probe_sha256": "8" * 64, "case_sha256": MORE}
    found = held(outcome("onnx-int8", widened(0.992), **asked), baseline)
    assert (found.status, found.notes) == (
        "agrees", ("held against the baseline main/nlpconvert.json over the one shared case (1 there, 3 here)",)
    )  # fmt: skip
    assert found.verdict is not None and found.verdict["baseline"] == {
        "path": MAIN, "compared": True, "reason": "", "cases": 1
    }  # fmt: skip
    found = held(outcome("onnx-int8", widened(0.991, alone=0.9), **asked), baseline)
    assert found.status == "drift" and found.reason == (
        "sentence_embedding: cosine 0.99490 -> 0.99100 (1.8 times the loss, worst in case alone, over the one shared "
        "case), inside the tolerance cosine>=0.99 but worse than the baseline main/nlpconvert.json"
    )


def test_a_difference_tells_what_each_step_was_measured_with(tmp_path: Path) -> None:
    """The goldens were widened on both sides; one side's step is from before."""
    golden = Golden({}, ({"name": "alone"}, {"name": "text-1"}, {"name": "text-2"}), "8" * 64)
    before = record(
        outcome("onnx-int8", output(), case_sha256=HASHES), outcome("onnx", output(), case_sha256=HASHES), golden=golden
    )
    after = record(
        outcome("onnx-int8", widened(0.992), probe_sha256="8" * 64, case_sha256=MORE, cases=3),
        outcome("onnx", output(), probe_sha256="9" * 64, cases=2),
        golden=golden,
    )
    found = diff(written(tmp_path / "old", before), written(tmp_path / "new", after))
    lines = list(report_diff.lines(found))
    assert "probes    the same, 3 cases, but measured with others: onnx, onnx-int8" in lines
    assert lines[-2:] == [
        "onnx: measured with other probes, 1 case in the old one, 2 cases in the new one: the numbers cannot be "
        "compared",
        "onnx-int8: measured with other probes, 1 case in the old one, 3 cases in the new one: compared over the one "
        "case that both have",
    ]
    assert {step.step: step.shared for step in found.steps} == {"onnx": None, "onnx-int8": 1}
    assert json.loads(json.dumps(found.to_dict()))["steps"][0]["probes"]["after"].endswith("(2 cases)")
    again = diff(tmp_path / "new", written(tmp_path / "other", record(*_outcomes(after))))
    assert "probes    others: 3 cases -> 1 case" in list(report_diff.lines(again))
    assert all(step.same for step in again.steps) and again.differs


def _outcomes(made: Manifest) -> list[Outcome]:
    return [kept.outcome for kept in made.steps.values()]


def test_whether_anything_differs(tmp_path: Path) -> None:
    """Machine, versions and when are no difference by themselves; files, numbers, steps and what was asked are."""
    old = written(tmp_path / "old", BEFORE)
    elsewhere = replace(
        BEFORE, host={"cpu": "Xeon"}, versions={"onnxruntime": "2"}, created="2027-01-01T00:00:00+00:00"
    )
    steps = _outcomes(BEFORE)
    others = {
        "bytes": record(replace(steps[0], artifact=artifact("onnx", "9")), *steps[1:]),
        "gone": record(*steps[1:]),
        "worse": record(outcome("onnx", output("rel<=5e-05", 1.1e-6)), *steps[1:]),
        "checkpoint": record(*steps, source={"sha256": "6" * 64, "task": "sentence-embedding"}),
        "probes": record(*steps, golden=Golden({}, ({"name": "alone"},), "8" * 64)),
        "stale": record(*steps, stale=("onnx",)),
    }
    assert not diff(old, old).differs
    assert not diff(old, written(tmp_path / "elsewhere", elsewhere)).differs
    for name, other in others.items():
        assert diff(old, written(tmp_path / name, other)).differs, name

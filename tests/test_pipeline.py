"""The line: what is made again and what is not, where it stops, what the manifest holds, and the Python interface."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import nlpconvert
from nlpconvert import disk, golden, manifest, pipeline, plan, report
from nlpconvert.artifact import Outcome
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.pipeline import Options
from tests import tiny

ROOT = Path(__file__).resolve().parent.parent


def copy(out: Path, to: Path, *without: str) -> Path:
    """A copy of an OUT in which `without` were never made."""
    shutil.copytree(out, to / "out", ignore=shutil.ignore_patterns(*without, "logs"))
    record = manifest.read(to / "out")
    steps = {name: step for name, step in record.steps.items() if name not in without}
    dataclasses.replace(record, steps=steps).write(to / "out")
    return to / "out"


def times(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}


def statuses(outcomes: list[Outcome]) -> dict[str, str]:
    return {outcome.step: outcome.status for outcome in outcomes}


class Said:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.started: list[str] = []

    def start(self, what: str, total: int | None = None) -> None:
        self.started.append(what)

    def advance(self, by: int = 1) -> None:
        """Not looked at."""

    def line(self, text: str) -> None:
        self.lines.append(text)


# -- adding to an OUT --------------------------------------------------------------------------------------------------


def test_a_step_that_is_added_reuses_golden_and_parent(classifier: Path, classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path, "trt")
    before = {name: times(out / name) for name in ("golden", "onnx", "torchscript")}
    said = Said()
    onnx, trt = nlpconvert.convert_step("trt", str(classifier), out, progress=said)
    assert (onnx.step, onnx.status, onnx.reused) == ("onnx", "agrees", True)
    assert onnx.verdict is not None and onnx.artifact is not None
    assert onnx.artifact.path == out / "onnx" / "model.onnx"
    assert (trt.step, trt.reused) == ("trt", False)
    assert {name: times(out / name) for name in before} == before
    assert "reference" not in said.started and "onnx: convert" not in said.started
    (row, _) = report.table_rows([onnx, trt])
    assert row["seconds"] == "reused"


def test_a_step_alone_makes_its_parent_first(classifier: Path, tmp_path: Path) -> None:
    onnx, trt = pipeline.convert_step("trt", str(classifier), tmp_path / "out")
    assert (onnx.step, onnx.status, onnx.reused) == ("onnx", "agrees", False)
    assert trt.step == "trt"
    assert trt.artifact is not None and onnx.artifact is not None
    assert (trt.artifact.parent, trt.artifact.parent_sha256) == ("onnx", onnx.artifact.sha256)
    assert manifest.reasons_to_rebuild(manifest.read(tmp_path / "out"), "trt", tmp_path / "out") == []


def test_a_parent_that_was_changed_is_not_built_on(classifier: Path, classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path, "trt")
    before = manifest.read(out).artifact("onnx", out).files
    (out / "onnx" / "config.json").write_text("{}")
    with pytest.raises(
        UsageError, match=r"onnx cannot be built on: onnx/config\.json has changed; --force rebuilds it"
    ):
        pipeline.convert_step("trt", str(classifier), out)
    assert not (out / "trt").exists()
    onnx, _ = pipeline.convert_step("trt", str(classifier), out, options=Options(force=True))
    assert (onnx.status, onnx.reused) == ("agrees", False)
    assert onnx.artifact is not None and onnx.artifact.files == before, "the same model gives the same files"


def test_a_parent_that_drifted_stops_the_line(classifier: Path, classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path, "trt")
    record = manifest.read(out)
    record.with_step(dataclasses.replace(record.outcome("onnx", out), status="drift")).write(out)
    onnx, trt = pipeline.convert_step("trt", str(classifier), out)
    assert (onnx.status, onnx.reused) == ("drift", True)
    assert (trt.status, trt.reason) == ("skipped", "the line stopped at onnx")
    assert pipeline.exit_code([onnx, trt]) == 1


def test_an_interrupted_run_is_repaired(classifier: Path, classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path, "torchscript")
    (out / "onnx").rename(out / ".onnx.nlpconvert.old-123")
    (out / ".onnx.nlpconvert.new-123").mkdir()
    (out / ".torchscript.nlpconvert.new-123").mkdir()
    (out / ".lock").write_text("")
    said = Said()
    assert statuses(pipeline.convert_step("torchscript", str(classifier), out, progress=said)) == {
        "torchscript": "agrees"
    }
    assert any("was put back" in line for line in said.lines)
    assert {entry.name for entry in out.iterdir() if entry.name.startswith(".")} == set()
    assert statuses(pipeline.verify(out, steps=["onnx", "torchscript"])) == {"onnx": "agrees", "torchscript": "agrees"}


# -- where the line stops ----------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    from nlpconvert.convert import torchscript

    def fail(module: Any, example: Any, facts: Any, directory: Path, **_: Any) -> None:
        (directory / "half").write_text("made")
        raise error

    monkeypatch.setattr(torchscript, "convert", fail)


def test_the_line_stops_at_the_first_failure(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ConversionError("it cannot be traced", detail="because\nof this"))
    out = tmp_path / "out"
    torchscript, onnx, trt = outcomes = pipeline.run(str(classifier), out)
    assert (torchscript.status, torchscript.reason) == ("failed", "it cannot be traced")
    assert torchscript.notes == (f"the log is {out / 'logs' / 'torchscript.log'}",)
    assert (out / "logs" / "torchscript.log").read_text() == "because\nof this\n"
    assert (onnx.status, onnx.reason) == ("skipped", "the line stopped at torchscript")
    assert trt.status == "skipped"
    assert pipeline.exit_code(outcomes) == 3
    assert {entry.name for entry in out.iterdir()} <= {"golden", "logs", manifest.FILE}
    assert statuses(pipeline.verify(out)) == {"torchscript": "failed"}


def test_keep_going_makes_what_does_not_rest_on_it(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, ValueError("out of nowhere"))
    out = tmp_path / "out"
    outcomes = pipeline.run(str(classifier), out, to=["torchscript", "onnx"], options=Options(keep_going=True))
    assert statuses(outcomes) == {"torchscript": "failed", "onnx": "agrees"}
    assert outcomes[0].reason == "ValueError: out of nowhere"
    log = out / "logs" / "torchscript.log"
    assert outcomes[0].notes == (f"the log is {log}",)
    assert "Traceback" in log.read_text()
    assert pipeline.exit_code(outcomes) == 3
    # A failed one may be made again without --force: there is nothing to replace.
    monkeypatch.undo()
    assert statuses(pipeline.convert_step("torchscript", str(classifier), out)) == {"torchscript": "agrees"}


def test_what_is_made_from_a_failed_step_is_skipped(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nlpconvert.convert import onnx

    def fail(*_: Any, **__: Any) -> None:
        raise ConversionError("no exporter could")

    monkeypatch.setattr(onnx, "convert", fail)
    outcomes = pipeline.run(str(classifier), tmp_path / "out", to=["trt"], options=Options(keep_going=True))
    assert statuses(outcomes) == {"onnx": "failed", "trt": "skipped"}
    assert outcomes[1].reason == "onnx, which it is made from, failed"


def test_a_failure_with_force_leaves_the_old_step_and_its_record(
    classifier: Path, classifier_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copy(classifier_out, tmp_path)
    before = disk.hash_tree(out / "torchscript"), manifest.read(out).steps
    failing(monkeypatch, MemoryError())
    (outcome,) = pipeline.convert_step("torchscript", str(classifier), out, options=Options(force=True))
    assert (outcome.status, outcome.reason) == ("failed", "out of memory")
    assert (disk.hash_tree(out / "torchscript"), manifest.read(out).steps) == before
    assert statuses(pipeline.verify(out, steps=["torchscript"])) == {"torchscript": "agrees"}


# -- the manifest ------------------------------------------------------------------------------------------------------


def test_the_manifest_says_everything(classifier: Path, classifier_out: Path) -> None:
    data = json.loads((classifier_out / manifest.FILE).read_text())
    assert data["source"]["task"] == "text-classification"
    assert data["source"]["files"]["model.safetensors"] == disk.sha256_file(classifier / "model.safetensors")
    files = {"golden.json", "inputs.safetensors", "outputs.safetensors", "tables.safetensors"}
    assert set(data["golden"]["files"]) == files
    assert len(data["golden"]["cases"]) == 24
    assert {"torch", "transformers", "onnx", "onnxruntime", "nlpconvert"} <= set(data["versions"])
    assert data["host"]["cpu_flags"] and data["host"]["python"]
    assert list(data["steps"]) == ["torchscript", "onnx", "trt"]
    for name, step in data["steps"].items():
        assert step["artifact"]["files"] == disk.hash_tree(classifier_out / name), "sidecars too"
        assert step["bytes"] == sum(path.stat().st_size for path in (classifier_out / name).iterdir())
        assert step["stale"] is False
    onnx = data["steps"]["onnx"]
    assert {"model.onnx", "model.onnx.data", "config.json", "tokenizer.json"} <= set(onnx["artifact"]["files"])
    assert (onnx["artifact"]["parent"], onnx["artifact"]["parent_sha256"]) == ("source", data["source"]["sha256"])
    assert onnx["artifact"]["path"] == "onnx/model.onnx"
    assert {spec["name"] for spec in onnx["artifact"]["inputs"]} == {"input_ids", "attention_mask", "token_type_ids"}
    assert onnx["artifact"]["outputs"] == [{"name": "logits", "dtype": "float32", "shape": ["batch", 2]}]
    assert data["steps"]["trt"]["artifact"]["parent_sha256"] == onnx["artifact"]["files"]["model.onnx"]
    verdict = onnx["verdict"]
    assert (verdict["provider"], verdict["precision"]) == ("CPUExecutionProvider", "float32")
    assert verdict["probe_sha256"] == data["golden"]["probe_sha256"]
    assert verdict["cases"] == 24 and verdict["structure"] == []
    assert verdict["host"]["cpu_flags"] and verdict["versions"]["onnxruntime"]
    assert [tolerance["measure"] for tolerance in onnx["tolerances"]] == ["rel"]


def test_options_and_tolerances_that_were_given_are_recorded(classifier: Path, tmp_path: Path) -> None:
    options = Options(tolerance="changed<=0.5%", threads=1)
    (outcome,) = pipeline.convert_step("torchscript", str(classifier), tmp_path / "out", options=options)
    assert outcome.status == "agrees"
    record = manifest.read(tmp_path / "out").record("torchscript")
    assert record.options == {"tolerance": "changed<=0.5%", "threads": 1}
    ((tolerance),) = record.tolerances
    assert (tolerance["measure"], tolerance["value"], tolerance["given"]) == ("changed", 0.005, True)


def test_verify_judges_by_the_tolerance_that_was_given(classifier: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (outcome,) = pipeline.convert_step("torchscript", str(classifier), out, options=Options(tolerance="abs<=1e-20"))
    assert outcome.status == "drift"
    assert statuses(pipeline.verify(out)) == {"torchscript": "drift"}, "the same verdict again"
    assert statuses(pipeline.verify(out, options=Options(tolerance="abs<=1e-3"))) == {"torchscript": "agrees"}
    record = manifest.read(out)
    steps = {"torchscript": dataclasses.replace(record.steps["torchscript"], tolerances=({"measure": "abs"},))}
    dataclasses.replace(record, steps=steps).write(out)
    with pytest.raises(UsageError, match="the manifest's tolerances of torchscript cannot be read"):
        pipeline.verify(out)


def test_a_log_of_each_step_is_kept_beside_them(classifier_out: Path) -> None:
    assert {path.name for path in (classifier_out / "logs").iterdir()} == {"torchscript.log", "onnx.log", "trt.log"}


# -- the user's own text -----------------------------------------------------------------------------------------------

ROWS = [f"the {n}th text of the person who uses it" for n in range(10)]


def as_txt(path: Path) -> Path:
    path.write_text("\n".join(ROWS) + "\n\n")
    return path


def as_jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps({"body": row, "label": 1}) + "\n" for row in ROWS))
    return path


def as_csv(path: Path) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *([row, 0] for row in ROWS)])
    return path


@pytest.mark.parametrize(
    ("make", "name", "columns"),
    [(as_txt, "a.txt", ""), (as_jsonl, "a.jsonl", "text=body"), (as_csv, "a.csv", "")],
)
def test_data_joins_the_probe_set(make: Any, name: str, columns: str, classifier: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = Options(data=make(tmp_path / name), columns=columns)
    (outcome,) = pipeline.convert_step("torchscript", str(classifier), out, options=options)
    assert outcome.status == "agrees" and outcome.verdict is not None
    assert outcome.verdict["cases"] == 26
    cases, answers = golden.read(out / "golden")
    ours = [case for case in cases if case.from_data]
    assert [case.name for case in ours] == ["data-0001", "data-0002"]
    assert [case.inputs["input_ids"].shape[0] for case in ours] == [8, 2]
    assert answers["data-0002"]["logits"].shape == (2, 2)
    assert [row["name"] for row in manifest.read(out).golden.cases][-2:] == ["data-0001", "data-0002"]
    (again,) = pipeline.verify(out, cases=["data-0002"])
    assert again.verdict is not None and again.verdict["cases"] == 1
    assert list(again.verdict["comparison"]["outputs"][0]["cases"]) == ["data-0002"]


def test_a_step_that_is_added_is_judged_by_the_same_data(
    classifier: Path, classifier_out: Path, tmp_path: Path
) -> None:
    out = copy(classifier_out, tmp_path, "trt", "torchscript")
    options = Options(data=as_txt(tmp_path / "a.txt"), force=True)
    assert statuses(pipeline.convert_step("torchscript", str(classifier), out, options=options)) == {
        "torchscript": "agrees"
    }
    before = times(out / "golden")
    (outcome,) = pipeline.convert_step("torchscript", str(classifier), out, options=Options(force=True))
    assert outcome.verdict is not None and outcome.verdict["cases"] == 26
    assert times(out / "golden") == before
    # Those that lay there are held against the larger probe set from now on.
    (onnx,) = pipeline.verify(out, steps=["onnx"])
    assert onnx.status == "agrees" and onnx.verdict is not None and onnx.verdict["cases"] == 26


def test_data_needs_a_tokenizer(features: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--data needs the model's tokenizer"):
        pipeline.run(str(features), tmp_path / "out", options=Options(data=as_txt(tmp_path / "a.txt")))
    assert not (tmp_path / "out").exists()


def test_a_golden_over_its_budget_is_sampled_and_says_so(tmp_path: Path) -> None:
    """A large vocabulary: a megabyte holds a tenth of what PyTorch answers."""
    model = tiny.save(tiny.ROWS["gpt2"], tmp_path / "model", vocab_size=2000)
    out = tmp_path / "out"
    options = Options(golden_budget=2**20)
    (outcome,) = pipeline.convert_step("torchscript", str(model), out, options=options)
    assert outcome.status == "agrees"
    sampled = [row["sampled"]["logits"] for row in manifest.read(out).golden.cases if row["sampled"]]
    assert sampled and all(0 < row["kept"] < row["of"] for row in sampled)
    assert (out / "golden" / "outputs.safetensors").stat().st_size < 1.2 * 2**20
    assert statuses(pipeline.verify(out)) == {"torchscript": "agrees"}


# -- the Python interface ----------------------------------------------------------------------------------------------


def test_import_loads_nothing() -> None:
    code = """
import sys, nlpconvert
assert "nlpconvert.pipeline" not in sys.modules
assert nlpconvert.run.__module__ == "nlpconvert.pipeline"
assert {"run", "verify", "convert_step"} <= set(nlpconvert.__all__)
print([name for name in ("numpy", "torch", "onnx", "typer", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        _ = nlpconvert.walk


def test_outcomes_are_frozen_values(classifier_out: Path) -> None:
    outcomes = nlpconvert.verify(classifier_out, steps=["onnx"], cases=["alone"])
    assert [type(outcome) for outcome in outcomes] == [Outcome]
    with pytest.raises(dataclasses.FrozenInstanceError):
        outcomes[0].status = "agrees"  # type: ignore[misc]
    assert outcomes[0].artifact is not None
    assert isinstance(outcomes[0].artifact.files, Mapping)
    again = nlpconvert.verify(str(classifier_out), steps=["onnx", "onnx"], cases=["alone"])
    assert statuses(again) == {"onnx": "agrees"} and len(again) == 1


def test_the_worst_exit_code_counts() -> None:
    def code(*kinds: str, forgiven: tuple[str, ...] = ()) -> int:
        return pipeline.exit_code([Outcome(f"step-{n}", kind) for n, kind in enumerate(kinds)], forgiven)

    assert code("agrees", "skipped") == 0
    assert code("agrees", "not run") == 4
    assert code("agrees", "not run", forgiven=("step-1",)) == 0
    assert code("not run", forgiven=("step-0",)) == 4
    assert code("agrees", "drift", "not run") == 1
    assert code("failed", "drift", "not run") == 3


def test_steps_come_after_their_parents() -> None:
    assert [row.name for row in plan.steps(["trt", "torchscript", "onnx"])] == ["onnx", "trt", "torchscript"]
    assert [row.name for row in plan.steps(None)] == ["torchscript", "onnx", "trt"]


def test_a_parent_that_cannot_be_run_is_a_note(
    classifier_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an artifact itself answers is judged all the same. (A trace stands in for the engine that has a parent.)"""
    out = copy(classifier_out, tmp_path, "trt")
    record = manifest.read(out)
    outcome = record.outcome("torchscript", out)
    assert outcome.artifact is not None
    above = record.artifact("onnx", out).sha256
    artifact = dataclasses.replace(outcome.artifact, parent="onnx", parent_sha256=above)
    record.with_step(dataclasses.replace(outcome, artifact=artifact)).write(out)
    (verified,) = pipeline.verify(out, steps=["torchscript"])
    assert verified.status == "agrees" and verified.verdict is not None
    assert "parent_comparison" in verified.verdict

    (out / "onnx" / "model.onnx").write_bytes(b"edited")
    (verified,) = pipeline.verify(out, steps=["torchscript"])
    assert verified.status == "agrees" and verified.verdict is not None
    assert "parent_comparison" not in verified.verdict
    assert verified.notes == ("not compared with onnx, from which it was made: onnx/model.onnx has changed",)

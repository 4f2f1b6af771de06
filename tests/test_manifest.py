"""manifest: what is read is checked field by field, what lies in OUT against its hashes, and staleness is passed on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nlpconvert
from nlpconvert import disk, host, manifest
from nlpconvert.artifact import Artifact, Outcome, TensorSpec
from nlpconvert.errors import UsageError
from nlpconvert.manifest import FILE, Golden, Manifest, check_out, read, reasons_to_rebuild, tampered

SOURCE = "5" * 64
INPUTS = (TensorSpec("input_ids", "int64", ("batch", "sequence")),)
OUTPUTS = (TensorSpec("logits", "float32", ("batch", 2)),)


def outcome(out: Path, step: str, parent: str = "source", parent_sha256: str = SOURCE, text: str = "") -> Outcome:
    """A step made on disk: a main file and a sidecar in a folder."""
    directory = out / step
    (directory / "deep").mkdir(parents=True, exist_ok=True)
    (directory / "model.onnx").write_text(text or step)
    (directory / "deep" / "model.onnx.data").write_text("data" + text)
    files = disk.hash_tree(directory)
    made_by = {"exporter": "torch.onnx", "opset": 18}
    made = Artifact(
        step, directory / "model.onnx", "onnx", "float32", "text-classification", INPUTS, OUTPUTS, files, parent,
        parent_sha256, made_by,
    )  # fmt: skip
    verdict = {"agrees": True, "worst": 1e-6, "diffs": [{"name": "logits"}]}
    return Outcome(step, "agrees", "", made, verdict, seconds=1.5, bytes=12, notes=("a note",))


def main_sha256(result: Outcome) -> str:
    """Hash of the outcome's main file."""
    assert result.artifact is not None
    return result.artifact.sha256


def whole(out: Path) -> Manifest:
    """An OUT with a golden and three steps, each made from the one before, written."""
    (out / "golden").mkdir(parents=True)
    (out / "golden" / "inputs.safetensors").write_text("inputs")
    kept = Golden(
        disk.hash_tree(out / "golden"),
        ({"name": "short", "about": "one text", "tokens": 3, "sampled": {}},),
        "7" * 64,
        {"empty": "the reference raised IndexError"},
    )
    made = Manifest(
        {"sha256": SOURCE, "task": "text-classification", "name": "bert"}, {"model_type": "bert"}, kept,
        host.host_facts(), host.versions(),
    )  # fmt: skip
    onnx = outcome(out, "onnx")
    fp16 = outcome(out, "onnx-fp16", "onnx", main_sha256(onnx))
    trt = outcome(out, "trt-fp16", "onnx-fp16", main_sha256(fp16))
    made = made.with_step(onnx, tolerances=("abs<=1e-3",), options={"opset": 18}).with_step(fp16).with_step(trt)
    made = made.with_step(Outcome("trt", "skipped", "tensorrt is not installed"))
    made.write(out)
    return made


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """Every field of every type; the artifact comes back with its path below OUT, wherever OUT lies now."""
    made = whole(tmp_path / "out")
    assert read(tmp_path / "out") == made
    assert {path.name for path in (tmp_path / "out").iterdir()} == {FILE, "golden", "onnx", "onnx-fp16", "trt-fp16"}
    (tmp_path / "out").rename(tmp_path / "moved")
    again = read(tmp_path / "moved")
    assert again.outcome("onnx", tmp_path / "moved") == outcome(tmp_path / "moved", "onnx")
    assert again.record("onnx").tolerances == ("abs<=1e-3",) and again.record("onnx").options == {"opset": 18}
    assert again.record("trt").outcome == Outcome("trt", "skipped", "tensorrt is not installed")
    text = (tmp_path / "moved" / FILE).read_text()
    assert str(tmp_path) not in text
    assert json.loads(text)["schema"] == 2 and json.loads(text)["nlpconvert"] == nlpconvert.__version__


def test_types_go_to_json_and_back() -> None:
    """The three conversions by themselves, through a text."""
    made = Artifact(
        "onnx", Path("onnx/m.onnx"), "onnx", "float32", "t", INPUTS, OUTPUTS, {"m.onnx": "1"}, "source", "5"
    )
    results: list[tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = [
        (OUTPUTS[0], manifest.spec_to_json, manifest.spec_from_json),
        (made, manifest.artifact_to_json, manifest.artifact_from_json),
        (Outcome("onnx", "drift", "moved", made, {"a": 1}, 2.0, 3, True, ("n",)), manifest.outcome_to_json,
         manifest.outcome_from_json),
        (Outcome("trt", "not run", "no device"), manifest.outcome_to_json, manifest.outcome_from_json),
    ]  # fmt: skip
    for value, there, back in results:
        assert back(json.loads(disk.json_text(there(value)))) == value


def test_an_artifact_recorded_while_still_aside(tmp_path: Path) -> None:
    """The place that is written down is OUT/<step>, not the directory that it was built in."""
    made = whole(tmp_path)
    aside = outcome(tmp_path, ".onnx.nlpconvert.new-1")
    assert aside.artifact is not None
    built = dataclasses.replace(aside, step="onnx", artifact=dataclasses.replace(aside.artifact, step="onnx"))
    assert made.with_step(built).artifact("onnx", tmp_path).path == tmp_path / "onnx" / "model.onnx"


# --- hostile and broken manifests ------------------------------------------------------------------------------------


def break_at(*keys: str | int, value: Any) -> Callable[[Any], None]:
    """Set a value deep in the JSON; the marker REMOVE takes it away."""

    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        if value is REMOVE:
            del data[keys[-1]]
        else:
            data[keys[-1]] = value

    return change


REMOVE = object()
ART = ("steps", "onnx", "artifact")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (break_at("schema", value=3), r"newer nlpconvert \(.*schema 3; this is .*schema 2\); upgrade nlpconvert"),
        (break_at("schema", value=0), r"older nlpconvert .*schema 0.*run the conversion again into a new directory"),
        (break_at("schema", value=REMOVE), r"schema is missing"),
        (break_at("schema", value=True), r"schema has to be a whole number, and is true"),
        (break_at("schema", value="1"), r'schema has to be a whole number, and is "1"'),
        (break_at("source", "sha256", value=REMOVE), r"source.sha256 is missing"),
        (break_at("source", value=[]), r"source has to be an object, and is \[\]"),
        (break_at("golden", "files", value={"../x": "1"}), r"golden.files: '../x' is not a path inside"),
        (break_at("golden", "files", value={"x": 1}), r"golden.files.x has to be a text, and is 1"),
        (break_at("golden", "cases", value=["a"]), r"golden.cases has to be an object"),
        (break_at("golden", "cases", value=REMOVE), r"golden.cases is missing"),
        (break_at("steps", "onnx", value=None), r"steps.onnx has to be an object, and is null"),
        (break_at("steps", "onnx", "status", value="fine"), r"steps.onnx.status: 'fine' is not a status"),
        (break_at("steps", "onnx", "seconds", value="1"), r"steps.onnx.seconds has to be a number"),
        (break_at("steps", "onnx", "stale", value=0), r"steps.onnx.stale has to be true or false, and is 0"),
        (break_at("steps", "onnx", "verdict", value="agrees"), r"steps.onnx.verdict has to be an object"),
        (break_at("steps", "onnx", "step", value="trt"), r"artifact.step: 'onnx' stands under 'trt'"),
        (break_at("steps", "trt", "step", value="onnx"), r"steps.trt.step: 'onnx' stands under 'trt'"),
        (break_at(*ART, "step", value="../other"), r"step: '../other' cannot be the name of a step"),
        (break_at(*ART, "step", value="golden"), r"step: 'golden' cannot be the name of a step"),
        (break_at(*ART, "path", value="/etc/passwd"), r"path: '/etc/passwd' is not one of the files"),
        (break_at(*ART, "path", value="onnx/../../model.onnx"), r"is not one of the files of the step's own"),
        (break_at(*ART, "path", value="onnx/other.onnx"), r"is not one of the files of the step's own"),
        (break_at(*ART, "files", "/etc/passwd", value="1"), r"files: '/etc/passwd' is not a path inside"),
        (break_at(*ART, "files", "deep/../../x", value="1"), r"is not a path inside"),
        (break_at(*ART, "format", value="os"), r"format: 'os' is not known"),
        (break_at(*ART, "inputs", 0, "shape", 0, value=1.5), r"inputs\[0\].shape has to hold numbers and names"),
        (break_at(*ART, "inputs", 0, "name", value=REMOVE), r"inputs\[0\].name is missing"),
    ],
)
def test_a_broken_manifest_is_one_line(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    """The line names the file and the field, and what to do where there is something to do."""
    whole(tmp_path)
    data = json.loads((tmp_path / FILE).read_text())
    change(data)
    (tmp_path / FILE).write_text(json.dumps(data))
    with pytest.raises(UsageError, match=message) as told:
        read(tmp_path)
    assert str(tmp_path / FILE) in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]"])
def test_what_is_no_manifest(tmp_path: Path, text: bytes) -> None:
    """Cut off, not UTF-8, nested without end, not an object."""
    (tmp_path / FILE).write_bytes(text)
    with pytest.raises(UsageError, match=r"is not JSON|has to be an object"):
        read(tmp_path)


def test_no_manifest(tmp_path: Path) -> None:
    """Missing, a directory of that name, and a link to a file elsewhere."""
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(UsageError, match=r"holds no nlpconvert.json; give a directory that `nlpconvert run` has made"):
        read(out)
    (out / FILE).mkdir()
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read(out)
    (out / FILE).rmdir()
    (tmp_path / "elsewhere").write_text("{}")
    (out / FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="leads out"):
        read(out)


def test_a_path_that_leads_out_through_a_link(tmp_path: Path) -> None:
    """Words cannot tell: a step's directory, or a file in it, that is a link out of OUT."""
    out = tmp_path / "out"
    made = whole(out)
    (out / "onnx" / "deep" / "model.onnx.data").rename(tmp_path / "data")
    (out / "onnx" / "deep" / "model.onnx.data").symlink_to(tmp_path / "data")
    with pytest.raises(UsageError, match="leads out"):
        made.artifact("onnx", out)
    (out / "onnx-fp16").rename(tmp_path / "fp16")
    (out / "onnx-fp16").symlink_to(tmp_path / "fp16")
    with pytest.raises(UsageError, match="leads out"):
        tampered(made, "onnx-fp16", out)


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    """The line names the steps there are; a step without an artifact says why."""
    made = whole(tmp_path)
    with pytest.raises(UsageError, match=r"no step 'trt-int8' here; there is onnx, onnx-fp16, trt-fp16, trt$"):
        made.artifact("trt-int8", tmp_path)
    with pytest.raises(UsageError, match=r"trt holds no artifact: skipped, tensorrt is not installed$"):
        made.artifact("trt", tmp_path)


# --- may this OUT be used? -------------------------------------------------------------------------------------------


def test_an_out_with_nothing_in_it(tmp_path: Path) -> None:
    """Absent, empty, holding only our own bookkeeping, or only the golden of a first run that was killed."""
    assert check_out(tmp_path / "out", SOURCE, "t") is None
    assert check_out(tmp_path, SOURCE, "t") is None
    with disk.lock(tmp_path):
        (tmp_path / ".onnx.nlpconvert.new-1").mkdir()
        (tmp_path / "golden").mkdir()
        assert check_out(tmp_path, SOURCE, "t") is None


def test_an_out_of_the_same_source(tmp_path: Path) -> None:
    """It is added to."""
    assert check_out(tmp_path, SOURCE, "t") is None
    made = whole(tmp_path)
    assert check_out(tmp_path, SOURCE, "text-classification") == made


def test_an_out_that_is_refused(tmp_path: Path) -> None:
    """A file, somebody's directory, another source, another task: both are named."""
    (tmp_path / "file").write_text("")
    (tmp_path / "home" / "golden").mkdir(parents=True)
    (tmp_path / "home" / "letters").mkdir()
    whole(tmp_path / "out")
    for name, source, task, message in (
        ("file", SOURCE, "t", "is not a directory"),
        ("home", SOURCE, "t", r"is not empty and holds no nlpconvert.json; give a new directory"),
        ("out", "6" * 64, "text-classification", f"checkpoint {SOURCE[:12]}, not .* of checkpoint {'6' * 12}; give"),
        ("out", SOURCE, "fill-mask", r"holds text-classification of .*, not fill-mask of"),
    ):
        with pytest.raises(UsageError, match=message):
            check_out(tmp_path / name, source, task)


# --- is it still what it was? ----------------------------------------------------------------------------------------


def test_every_file_that_differs_is_named(tmp_path: Path) -> None:
    """Untouched: nothing. Then a sidecar changed, the main file missing, one added, in the golden too."""
    made = whole(tmp_path)
    assert [tampered(made, step, tmp_path) for step in ("onnx", "onnx-fp16", "golden")] == [[], [], []]
    (tmp_path / "onnx" / "deep" / "model.onnx.data").write_text("dat4")
    (tmp_path / "onnx" / "model.onnx").unlink()
    (tmp_path / "onnx" / "extra.bin").write_text("x")
    assert tampered(made, "onnx", tmp_path) == [
        "onnx/deep/model.onnx.data has changed",
        "onnx/extra.bin was added",
        "onnx/model.onnx is missing",
    ]
    (tmp_path / "golden" / "inputs.safetensors").write_text("other")
    assert tampered(made, "golden", tmp_path) == ["golden/inputs.safetensors has changed"]
    (tmp_path / "golden" / "inputs.safetensors").unlink()
    (tmp_path / "golden").rmdir()
    assert tampered(made, "golden", tmp_path) == ["golden/inputs.safetensors is missing"]
    (tmp_path / "onnx-fp16" / "more").symlink_to("/etc/hostname")
    (line,) = tampered(made, "onnx-fp16", tmp_path)
    assert "leads out" in line


def test_staleness_is_passed_on(tmp_path: Path) -> None:
    """A parent whose files changed makes all that came from it stale, however far; the rest is left alone."""
    made = whole(tmp_path).with_step(outcome(tmp_path, "torchscript"))
    assert made.made_from("onnx") == ("onnx-fp16", "trt-fp16") and made.made_from("trt-fp16") == ()
    marked = made.mark_stale("onnx")
    assert {name for name, record in marked.steps.items() if record.stale} == {"onnx-fp16", "trt-fp16"}
    same = made.with_step(outcome(tmp_path, "onnx"))
    assert not any(record.stale for record in same.steps.values())
    # Only the sidecar differs: the main file's hash is the same.
    (tmp_path / "onnx" / "deep" / "model.onnx.data").write_text("other weights")
    before = made.artifact("onnx", tmp_path)
    rebuilt = dataclasses.replace(before, files=disk.hash_tree(tmp_path / "onnx"))
    assert rebuilt.sha256 == before.sha256
    changed = made.with_step(Outcome("onnx", "agrees", artifact=rebuilt))
    assert {name for name, record in changed.steps.items() if record.stale} == {"onnx-fp16", "trt-fp16"}
    # Verified again, a stale one stays stale; made again, it no longer is, but what came from it still is.
    kept = changed.record("onnx-fp16").outcome
    assert changed.with_step(dataclasses.replace(kept, reused=True)).record("onnx-fp16").stale
    again = changed.with_step(outcome(tmp_path, "onnx-fp16", "onnx", rebuilt.sha256, text="new"))
    assert [again.record(step).stale for step in ("onnx-fp16", "trt-fp16")] == [False, True]


def test_a_circle_of_parents_ends(tmp_path: Path) -> None:
    """A hostile manifest may say that two steps were made from each other."""
    made = whole(tmp_path)
    looped = made.with_step(outcome(tmp_path, "onnx", "trt-fp16", "1"))
    assert looped.made_from("onnx") == ("onnx-fp16", "trt-fp16")


def test_reasons_to_rebuild(tmp_path: Path) -> None:
    """None for what is whole; not made, stale, of another parent, changed on disk."""
    made = whole(tmp_path)
    assert [reasons_to_rebuild(made, step, tmp_path) for step in ("onnx", "onnx-fp16", "trt-fp16")] == [[], [], []]
    assert reasons_to_rebuild(made, "onnx-int8", tmp_path) == ["onnx-int8 has not been made yet"]
    assert reasons_to_rebuild(made, "trt", tmp_path) == ["trt was not made: skipped"]
    assert reasons_to_rebuild(made.mark_stale("onnx"), "trt-fp16", tmp_path) == [
        "onnx-fp16, from which trt-fp16 was made, has been replaced since"
    ]
    other = {**made.steps, "onnx": made.with_step(outcome(tmp_path / "x", "onnx", text="x")).record("onnx")}
    assert reasons_to_rebuild(dataclasses.replace(made, steps=other), "onnx-fp16", tmp_path) == [
        "onnx-fp16 was made from another onnx than the one recorded"
    ]
    elsewhere = dataclasses.replace(made, source={**made.source, "sha256": "6" * 64})
    assert reasons_to_rebuild(elsewhere, "onnx", tmp_path) == [
        "onnx was made from another source than the one recorded"
    ]
    (tmp_path / "onnx" / "model.onnx").write_text("edited")
    assert reasons_to_rebuild(made, "onnx", tmp_path) == ["onnx/model.onnx has changed"]


# --- where it was made -----------------------------------------------------------------------------------------------


def test_host_facts_are_plain_json() -> None:
    """They go into the manifest as they are; flags are words of the table."""
    facts = host.host_facts()
    assert json.loads(disk.json_text(facts)) == facts
    assert {"platform", "machine", "cpu", "cpu_flags", "cpus", "python"} == set(facts)
    assert set(facts["cpu_flags"]) <= set(host.CPU_FLAGS) and facts["cpus"] >= 1


def test_versions_of_what_is_installed() -> None:
    """What is not installed is left out, not guessed."""
    found = host.versions(("numpy", "no-such-package-here"))
    assert list(found) == ["numpy"] and found["numpy"][0].isdigit()
    assert "numpy" in host.versions()

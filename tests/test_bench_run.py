"""`nlpconvert bench` on real artifacts: the document, the table, the page; what cannot run, and what has changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer

from nlpconvert import bench_command, html_bench, manifest, report_bench
from nlpconvert.bench import benching, subjects
from nlpconvert.bench.benching import Wishes
from nlpconvert.bench.worker import Failed, Worker
from nlpconvert.errors import UsageError
from nlpconvert.plan import Options

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = json.loads((ROOT / "nlpconvert" / "data" / "bench.schema.json").read_text("utf-8"))
SMALL: dict[str, Any] = {"batches": [1, 4], "lengths": [4, 16], "budget": 0.5}


@pytest.fixture(scope="module")
def document(classifier_out: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One benchmark, with texts and a queue whose goal is wide."""
    data = tmp_path_factory.mktemp("data") / "texts.jsonl"
    texts = ["a", "some words", "rather more words than before", "ab cd"] * 3
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    wishes = Wishes(**SMALL, steps=["onnx", "trt"], arrivals=20, p99=5.0, instances=[1])
    return benching.bench(classifier_out, wishes, Options(threads=1, data=data))


def test_the_document_keeps_to_its_schema(document: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(json.loads(report_bench.to_json(document)), SCHEMA)


def test_every_artifact_that_runs_here_and_pytorch_are_timed_in_every_cell(document: dict[str, Any]) -> None:
    rows = {each["step"]: each for each in document["subjects"]}
    assert list(rows) == ["pytorch", "onnx", "trt"]
    for name in ("pytorch", "onnx"):
        assert rows[name]["reason"] == ""
        cells = [(cell["batch"], cell["length"]) for cell in rows[name]["cells"]]
        assert sorted(cells) == [(1, 4), (1, 16), (4, 4), (4, 16)]
        assert all(
            cell["passes"] >= 3 and cell["p50_low"] <= cell["p50"] <= cell["p50_high"] for cell in rows[name]["cells"]
        )
        assert rows[name]["peak_bytes"] > rows[name]["runtime_bytes"] > 10_000_000
        assert rows[name]["load_seconds"] > 0
    assert rows["pytorch"]["times_pytorch"] == pytest.approx(1)
    assert rows["onnx"]["verdict"] == "agrees"
    assert rows["onnx"]["drift"] < 1e-4
    assert document["host"]["threads"] == 1
    assert document["gemm"]["float32"] > 1e8


def test_what_cannot_run_here_is_a_row_with_its_reason(document: dict[str, Any]) -> None:
    row = next(each for each in document["subjects"] if each["step"] == "trt")
    assert row["cells"] == []
    assert row["reason"]
    assert benching.exit_code(document) == 0
    assert benching.exit_code(document, ["trt"]) == 4


def test_texts_are_put_into_batches_in_every_way(document: dict[str, Any]) -> None:
    texts = document["texts"]
    assert (texts["count"], texts["lengths"]["max"]) == (12, max(texts["lengths"].values()))
    ways = next(each for each in texts["subjects"] if each["step"] == "onnx")["ways"]
    waste = {(way["policy"], way["padding"]): way["waste"] for way in ways if way["batch"] == 4}
    assert waste["sorted", "longest"] < waste["as they come", "longest"] < waste["as they come", "limit"]
    timed = {(way["policy"], way["padding"], way["batch"]) for way in ways if way["texts_per_second"]}
    assert {("as they come", "longest", 1), ("sorted", "longest", 4), ("as they come", "longest", 4)} <= timed
    best = texts["best"][0]
    assert best["times_pytorch_alone"] == pytest.approx(best["texts_per_second"] / best["pytorch_alone_per_second"])
    assert best["share_of_limit"] > 0


def test_the_queue_says_what_to_serve(document: dict[str, Any]) -> None:
    queue = document["batching"]
    assert set(queue["steps"]) == {"onnx"}
    assert queue["met"] is True
    assert document["recommended"]["step"] == queue["step"]
    assert document["recommended"]["max_batch_size"] == queue["steps"][queue["step"]]["max_batch_size"]


def test_a_person_reads_it(document: dict[str, Any]) -> None:
    said = "\n".join(report_bench.lines(document))
    assert "1 thread" in said
    assert "times PyTorch one at a time" in said
    assert re.search(r"onnx, 20 requests/s, p99 below 5.00 s: max_batch_size \d", said)
    table = report_bench.table_rows(document)
    assert [row["step"] for row in table] == ["pytorch", "onnx", "trt"]
    assert table[2]["verdict"].startswith("not run: ")
    header, cells = report_bench.cell_table(document, "throughput")
    assert header == ["batch", "length", "pytorch", "onnx"]
    assert len(cells) == 4


def test_the_page_opens_offline_and_escapes_what_it_is_given(document: dict[str, Any]) -> None:
    page = html_bench.render({**document, "source": {**document["source"], "model": "<script>x</script>"}})
    assert page.startswith("<!doctype html>")
    assert "<script>x" not in page
    assert not re.search(r"(?:src|href)=\"https?:", page)
    assert page.count("<svg") == 2 * 2 + 1 + 1  # by length, drift, a queue for each artifact
    assert "Throughput against batch, 16 tokens" in page


@pytest.mark.slow
def test_torchscript_is_timed_and_its_instances_too(classifier_out: Path) -> None:
    wishes = Wishes(**SMALL, steps=["torchscript"], arrivals=20, texts=False)
    found = benching.bench(classifier_out, wishes, Options(threads=2))
    row = found["subjects"][1]
    assert (row["step"], row["reason"]) == ("torchscript", "")
    assert found["texts"] is None
    step = found["batching"]["steps"]["torchscript"]
    assert set(step["slower_by_instances"]) == {"1", "2"}
    assert found["batching"]["met"] is None  # no goal was given
    jsonschema.validate(json.loads(report_bench.to_json(found)), SCHEMA)


def test_a_changed_artifact_is_not_opened(classifier_out: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(classifier_out, out)
    (out / "onnx" / "model.onnx").write_bytes(b"something else")
    found = subjects.subjects(manifest.read(out), out, ["onnx"], None)[1]
    assert found.reason.endswith("has changed since it was verified; it was not opened")
    assert found.changed
    worker = Worker("onnx")  # nor does a process open it
    try:
        said = worker.open(out, Options(threads=1), None, [(1, 4)])
    finally:
        worker.close()
    assert said == {"reason": found.reason, "changed": True}


def test_without_the_model_pytorch_is_not_run_and_says_so(classifier_out: Path) -> None:
    record = manifest.read(classifier_out)
    moved = manifest.from_json(
        {**json.loads(json.dumps(record.to_json())), "source": {**record.source, "path": "/nowhere"}}
    )
    found = subjects.subjects(moved, classifier_out, [], None)
    assert found[0].reason == "the model is no longer where it was: give --model"
    with pytest.raises(UsageError, match="give that one as --model"):
        subjects.subjects(record, classifier_out, [], str(ROOT / "fixtures" / "bert-text-classifier"))


def test_an_unknown_step_is_refused(classifier_out: Path) -> None:
    with pytest.raises(UsageError, match="there is no step 'onnx-int9'"):
        benching.bench(classifier_out, Wishes(steps=["onnx-int9"]))


# -- the processes -----------------------------------------------------------------------------------------------------


def test_a_process_that_dies_is_told_and_leaves_nothing(classifier_out: Path) -> None:
    worker = Worker("onnx")
    try:
        assert worker.open(classifier_out, Options(threads=1), None, [(1, 4)])["first_seconds"] > 0
        assert worker.turn("c", 0.0, 1, (2, 8))[0] > 0
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(Failed, match="was killed by signal 9"):
            worker.turn("c", 0.0, 1, (2, 8))
    finally:
        worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are stopped between turns on Linux only")
def test_a_process_stands_still_between_turns_and_ends_with_its_parent(classifier_out: Path, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    program = (
        "import sys, time; from pathlib import Path; from nlpconvert.bench.worker import Worker; "
        "from nlpconvert.plan import Options; worker = Worker('onnx'); "
        f"worker.open(Path({str(classifier_out)!r}), Options(threads=1), None, [(1, 4)]); "
        f"Path({str(told)!r}).write_text(str(worker.pid)); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    try:
        pid = int(_until(lambda: told.read_text() if told.is_file() else ""))
        assert _until(lambda: _state(pid)) == "T"
    finally:
        parent.kill()
        parent.wait()
    assert _until(lambda: "gone" if _state(pid) in ("", "Z") else "") == "gone"


def _until(look: Any) -> str:
    """What `look` gives, once it gives anything; AssertionError after 20 s."""
    for _ in range(400):
        found: str = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("nothing came")


def _state(pid: int) -> str:
    """The letter of a process's state, "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_writes_table_json_and_page(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    unmet = {**document["batching"]["steps"]["onnx"], "met": False, "largest_rate_in_goal": 0.0}
    found = {**document, "batching": {**document["batching"], "met": False, "steps": {"onnx": unmet}, "step": "onnx"}}
    monkeypatch.setattr(benching, "bench", lambda *given: asked.extend(given) or found)
    with pytest.raises(typer.Exit) as ended:
        bench_command.bench(
            Path("out"), batch="1,2", length="8", steps="onnx", budget=0.2, arrivals="600/min", p99="50ms",
            instances="1", threads=1, json=tmp_path / "b.json", html=tmp_path / "b.html", quiet=True, verbose=True,
        )  # fmt: skip
    assert ended.value.exit_code == 1
    assert asked[1] == Wishes(
        steps=["onnx"], batches=[1, 2], lengths=[8], budget=0.2, arrivals=10.0, p99=0.05, instances=[1]
    )
    said = capsys.readouterr().out
    assert "this does NOT meet the goal; not even a single request would" in said
    assert "texts a second" in said
    assert json.loads((tmp_path / "b.json").read_text(encoding="utf-8")) == json.loads(json.dumps(found))
    assert (tmp_path / "b.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch": "1,x"}, "--batch"),
        ({"arrivals": "often"}, "--arrivals"),
        ({"arrivals": "10/s", "p99": "50"}, "--p99"),
        ({"p99": "50ms"}, "give --arrivals"),
        ({"length": "65"}, "the model takes 64 tokens at most"),
        ({"json": Path("/nowhere/b.json")}, "there is no directory"),
    ],
)
def test_a_wrong_option_is_one_line_before_any_work(classifier_out: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bench_command.bench(classifier_out, quiet=True, **given)

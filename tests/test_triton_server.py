"""A Triton of our own: started, asked, stopped. Quick tests start a shell script in its place, slow ones a real one."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nlpconvert import pipeline
from nlpconvert.artifact import Outcome
from nlpconvert.errors import DriftError, MissingPackage
from nlpconvert.plan import Options
from nlpconvert.progress import Silent
from nlpconvert.settings import Settings
from nlpconvert.triton import repository, server, serving
from nlpconvert.triton.repository import Wanted
from tests.conftest import ROOT


def script(path: Path, body: str) -> Path:
    """A program that stands where tritonserver is expected."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def running(program: str) -> list[str]:
    """Command lines of processes that this test has started and that still run."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            state = (place / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if program in line and state not in "ZX" and int(place.name) != os.getpid():
            found.append(line)
    return found


# -- the program ------------------------------------------------------------------------------------------------------


def test_no_tritonserver_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackage, match="there is no tritonserver on PATH"):
        server.find(None)
    with pytest.raises(MissingPackage, match="is no program that can be started"):
        server.find(tmp_path / "nothing")
    program = script(tmp_path / "tritonserver", "exit 0")
    assert server.find(None) == program == server.find(program)


def test_a_backend_that_is_missing_is_told_apart(tmp_path: Path) -> None:
    line = (
        "E1130 22:15:16.057354 19116 model_lifecycle.cc:642] \\\"failed to load 'm' version 1: Invalid argument: "
        "unable to find backend library for backend 'onnxruntime', try specifying runtime on the model config.\\\""
    )
    program = script(tmp_path / "tritonserver", f'echo "{line}"; exit 1')
    with (
        pytest.raises(server.BackendMissing, match="backend library for backend 'onnxruntime'"),
        server.running(program, tmp_path, Silent()),
    ):
        pytest.fail("it is not ready")


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("failed to load 'm': unable to open model.onnx.data", True),
        ("failed to load 'm': ModuleNotFoundError: No module named 'torch'", False),
        ("cannot bind", False),
    ],
)
def test_why_it_did_not_start(said: str, refused: bool, tmp_path: Path) -> None:
    program = script(tmp_path / "tritonserver", f'echo "E1130 22:15:16.05 1 x.cc:1] {said}"; exit 1')
    with (
        pytest.raises(server.DidNotStart, match=said.split(":")[0]) as raised,
        server.running(program, tmp_path, Silent()),
    ):
        pytest.fail("it is not ready")
    assert raised.value.refused is refused


def test_one_that_is_never_ready_is_stopped_with_its_children(tmp_path: Path) -> None:
    mark = f"9{os.getpid()}"
    program = script(tmp_path / "tritonserver", f"trap '' TERM; sleep {mark} & sleep {mark}")
    started = time.monotonic()
    with (
        pytest.raises(server.DidNotStart, match=r"was not ready within 0\.5 s"),
        server.running(program, tmp_path, Silent(), start=0.5),
    ):
        pytest.fail("it is not ready")
    assert time.monotonic() - started < 5
    assert running(f"sleep {mark}") == []


# -- a real one -------------------------------------------------------------------------------------------------------


def checked(out: Path, repo: Path, program: Path, **given: bool) -> list[Outcome]:
    """What a check finds."""
    return serving.check(
        out, repo, tritonserver=program, options=Options(), progress=Silent(), settings=Settings(), **given
    )


def converted(fixtures: Path, name: str, tmp_path: Path, step: str = "onnx", **options: str) -> Path:
    """OUT of a fixture with one ONNX step."""
    out = tmp_path / name
    outcomes = pipeline.convert_step(step, str(fixtures / name), out, options=Options(**options))  # type: ignore[arg-type]
    assert all(outcome.status == "agrees" for outcome in outcomes), outcomes
    return out


def together(outcome: Outcome) -> dict[str, object]:
    """What was found of requests that came at once."""
    assert outcome.verdict is not None, outcome
    found: dict[str, object] = outcome.verdict["served"]["together"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tokenizer", "grpc"),
    [
        ("bert-text-classifier", True, False),
        ("bert-token-classifier", True, True),
        ("t5-seq2seq", False, False),
        ("gpt2-lm", False, False),
    ],
)
def test_what_triton_serves_is_what_was_verified(
    name: str, tokenizer: bool, grpc: bool, fixtures_dir: Path, tritonserver: Path, tmp_path: Path
) -> None:
    out, repo = converted(fixtures_dir, name, tmp_path), tmp_path / "repo"
    repository.write(out, "onnx", repo, Wanted(name="m", backend="python", tokenizer=tokenizer))
    (outcome,) = checked(out, repo, tritonserver, grpc=grpc)
    assert outcome.status == "agrees", (outcome.reason, outcome.verdict and outcome.verdict["structure"])
    found = together(outcome)
    assert found["in_flight"] == 200 and isinstance(found["executions"], int) and isinstance(found["rows"], int)
    assert found["executions"] < found["rows"] == found["requests"]
    assert any(("texts gave the ids" if tokenizer else "tokens, one by one") in note for note in outcome.notes)
    assert running(str(repo)) == []


@pytest.fixture(scope="module")
def served(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """OUT and a repository of the text classifier."""
    place = tmp_path_factory.mktemp("served")
    out = converted(fixtures_dir, "bert-text-classifier", place)
    repository.write(out, "onnx", place / "repo", Wanted(name="m", backend="python"))
    return out, place / "repo"


@pytest.mark.slow
def test_a_backend_that_this_triton_lacks_is_not_run(
    served: tuple[Path, Path], tritonserver: Path, tmp_path: Path
) -> None:
    out, repo = served[0], tmp_path / "repo"
    repository.write(out, "onnx", repo, Wanted(name="m", max_batch=8))
    written, python = checked(out, repo, tritonserver)
    assert (written.step, written.status) == ("onnx", "not run")
    assert (python.step, python.status) == ("onnx (python backend)", "agrees")
    assert "python backend" in python.verdict["served"]["backend"] + " backend"  # type: ignore[index]
    assert pipeline.exit_code([written, python]) == 4
    assert pipeline.exit_code([written, python], ["onnx"]) == 0


@pytest.mark.slow
def test_padding_that_is_read_as_text_is_caught(served: tuple[Path, Path], tritonserver: Path, tmp_path: Path) -> None:
    """A batcher that forgets the mask: every request alone is right, in a batch of mixed lengths it is not."""
    out, repo = served[0], Path(shutil.copytree(served[1], tmp_path / "repo"))
    serving_json = repo / "m" / "1" / "serving.json"
    serving_json.write_text(serving_json.read_text().replace('"attention_mask": 0', '"attention_mask": 1'))
    with pytest.raises(DriftError, match=r"m/1/serving\.json has changed since it was written; nothing was started"):
        checked(out, repo, tritonserver)
    (outcome,) = checked(out, repo, tritonserver, force=True)
    assert outcome.status == "drift" and outcome.verdict is not None
    assert outcome.verdict["served"]["alone"]["agrees"]
    assert not together(outcome)["agrees"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("config.pbtxt", 'name: "input_ids"', 'name: "ids"', "did not start"),  # its warm-up fails
        ("config.pbtxt", "TYPE_FP32", "TYPE_FP16", "logits is float16"),
        ("1/model.onnx.data", "", "", "did not start"),
    ],
)
def test_a_wrong_repository_is_caught_when_forced(
    file: str, old: str, new: str, said: str, served: tuple[Path, Path], tritonserver: Path, tmp_path: Path
) -> None:
    out, repo = served[0], Path(shutil.copytree(served[1], tmp_path / "repo"))
    place = repo / "m" / file
    if old:
        place.write_text(place.read_text().replace(old, new))
    else:
        place.unlink()
    (outcome,) = checked(out, repo, tritonserver, force=True)
    assert outcome.status == "drift" and said in outcome.reason, outcome


@pytest.mark.slow
def test_dynamic_quantization_is_warned_of_and_seen(fixtures_dir: Path, tritonserver: Path, tmp_path: Path) -> None:
    out = converted(fixtures_dir, "bert-text-classifier", tmp_path, "onnx-int8", int8_method="dynamic")
    made = repository.write(out, "onnx-int8", tmp_path / "repo", Wanted(name="m", backend="python"))
    assert any("depends on the rows that share its batch" in note for note in made.notes)
    (outcome,) = checked(out, tmp_path / "repo", tritonserver)
    found = together(outcome)
    assert isinstance(found["moved"], float) and found["moved"] > 1e-3
    assert any("another batch differs by" in note for note in outcome.notes)


INTERRUPTED = """
import signal, sys
from pathlib import Path
from nlpconvert.plan import Options
from nlpconvert.progress import Silent
from nlpconvert.settings import Settings
from nlpconvert.triton import serving
class Tell(Silent):
    def start(self, what, total=None):
        print(what, flush=True)
# As at a terminal: a run in the background ignores Ctrl-C, and so would this one.
signal.signal(signal.SIGINT, signal.default_int_handler)
out, repo, program = map(Path, sys.argv[1:])
serving.check(out, repo, tritonserver=program, options=Options(), progress=Tell(), settings=Settings())
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["start tritonserver", "verify", "verify, all at once"])
def test_nothing_is_left_running_after_an_interrupt(
    when: str, served: tuple[Path, Path], tritonserver: Path, tmp_path: Path
) -> None:
    out, repo = served[0], Path(shutil.copytree(served[1], tmp_path / "repo"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, out, repo, tritonserver],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert any(line.strip() == when for line in process.stdout)  # it got so far
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT)
    assert running(str(repo)) == []
    assert not list(Path("/dev/shm").glob(f"nlpconvert-{process.pid}-*"))


@pytest.mark.slow
def test_it_listens_on_the_loopback_and_no_port_is_left_open(
    served: tuple[Path, Path], tritonserver: Path, tmp_path: Path
) -> None:
    with server.running(tritonserver, served[1], Silent()) as ports:
        for port in ports:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)

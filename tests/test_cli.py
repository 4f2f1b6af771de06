"""The command line as a person meets it: one line and the right exit code for whatever is wrong, and nothing destroyed.

Most run in this process (`cli._main`); what only a process of its own shows (signals, a terminal, blocked packages)
starts one.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from nlpconvert import cli, disk, engines, manifest
from nlpconvert.artifact import STEPS
from nlpconvert.errors import EXIT_CODES
from nlpconvert.terminal import Stop, Terminal

ROOT = Path(__file__).resolve().parent.parent

without_gpu = pytest.mark.skipif(engines.find_gpu()[0] is not None, reason="says what happens where there is no GPU")


def run(*arguments: object) -> int:
    return cli._main([str(argument) for argument in arguments])


def start(*arguments: object, **more: Any) -> subprocess.Popen[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "nlpconvert", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more.pop("env", {})}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes)


def copy(directory: Path, to: Path, name: str = "copy") -> Path:
    shutil.copytree(directory, to / name)
    return to / name


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def one_line(capfd: pytest.CaptureFixture[str]) -> str:
    """What was said, which is one line on standard error."""
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("nlpconvert: ")
    assert said.err.count("\n") == 1, said.err
    return said.err


# -- a wrong command line ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--to", "onxx"], "there is no step 'onxx'; the steps are torchscript, onnx, onnx-optimized,"),
        (["--to", ","], "no step was asked for"),
        (["--device", "gpu"], '--device "gpu" is unknown: it is one of cpu, cuda'),
        (["--provider", "openvino"], '--provider "openvino" is unknown: it is one of cpu, cuda, tensorrt'),
        (["--threads", "0"], "Invalid value for '--threads'"),
        (["--threads", "two"], "Invalid value for '--threads'"),
        (["--golden-budget", "0"], "Invalid value for '--golden-budget'"),
        (["--allow-unverified", "trt,foo"], "there is no step 'foo'"),
        (["--tolerance", "good"], "tolerance 'good' is not understood"),
        (["--tolerance", "cosine<=0.9"], "cosine is better when it is larger; write cosine>=..."),
        (["--tolerance", "kl<=0.1"], "tolerance kl<=0.1 judges none of this model's outputs"),
        (["--columns", "text=body"], "--columns renames columns of --data, and no --data is given"),
        (["--opset", "99"], "--opset 99 is not between 18 and 23"),
        (["--method", "magic"], "--method magic is not one of trace, script"),
        (["--runtime", "openvino"], '--runtime "openvino" is unknown'),
        (["--task", "poetry"], "poetry"),
        (["--min", "1x1"], "--opt and --max are missing"),
        (["--min", "1x9", "--opt", "8x8", "--max", "32x64"], "--min is over --opt for sequence (9 > 8)"),
        (["--min", "1x1", "--opt", "8x8", "--max", "32x65"], "over this model's limit of 64 tokens"),
        (["--min", "1x1", "--opt", "8", "--max", "32x64"], '--opt "8" is incomplete, sequence is missing'),
        (["--data", "nothing.txt"], "nothing.txt: no such file"),
        (["--wrong"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line_and_nothing_is_done(
    more: list[str], expected: str, classifier: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("run", classifier, "-o", tmp_path / "out", "--quiet", *more) == 2
    assert expected in one_line(capfd)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--step", "onnx-int8"], "there is no step 'onnx-int8'; in "),
        (["--case", "nowhere"], "there is no case 'nowhere' in "),
        (["--tolerance", "kl<=0.1", "--step", "onnx"], "judges none of this model's outputs"),
        (["--device", "gpu"], "--device"),
        (["--provider", "openvino"], "--provider"),
        (["--threads", "0"], "--threads"),
        (["--tolerance", ""], "--tolerance is empty"),
        (["--allow-unverified", "foo"], "there is no step 'foo'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_of_verify(
    more: list[str], expected: str, classifier_out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", classifier_out, "--quiet", *more) == 2
    assert expected in one_line(capfd)


@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "model"], ["verify"], ["nonsense"], ["verify", "nowhere"], ["verify", "nlpconvert"]]
)
def test_an_incomplete_command_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert run(*arguments) == 2
    one_line(capfd)


def test_an_option_that_the_builder_would_ignore(
    classifier: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ["--runtime", "tensorrt-rtx", "--timing-cache", "cache", "--quiet"]
    assert run("trt", classifier, "-o", tmp_path / "out", *more) == 2
    assert "tensorrt-rtx ignores --timing-cache" in one_line(capfd)


@without_gpu
def test_a_device_that_is_not_there_is_5(classifier: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("onnx", classifier, "-o", tmp_path / "out", "--device", "cuda", "--quiet") == 5
    assert "device cuda is not there" in one_line(capfd)
    assert not (tmp_path / "out").exists()


# -- a wrong model -----------------------------------------------------------------------------------------------------


def _no_config(model: Path) -> None:
    (model / "config.json").unlink()


def _bad_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def _truncated(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _unknown_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "bort", "architectures": ["BortModel"]}))


def _refused_architecture(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "longformer"}))


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (shutil.rmtree, "copy"),
        (_no_config, "config.json"),
        (_bad_config, "config.json"),
        (_truncated, "model.safetensors"),
        (_no_weights, "no weights"),
        (_unknown_architecture, "does not know the model type 'bort'"),
        (_refused_architecture, "longformer"),
    ],
)
def test_a_broken_model_is_one_line(
    break_it: Callable[[Path], Any],
    expected: str,
    classifier: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = copy(classifier, tmp_path)
    break_it(model)
    assert run("run", model, "-o", tmp_path / "out", "--quiet") == 2
    assert expected in one_line(capfd)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "is empty"),
        ("binary.txt", b"\x00\x01\x02", "NUL byte"),
        ("latin.txt", b"caf\xe9\n", "is not UTF-8"),
        ("data.parquet", b"PAR1", "cannot tell what kind of file this is"),
        ("data.jsonl", b"plain text\n", "line 1"),
        ("data.csv", b"body,label\nhello,1\n", "text"),
    ],
)
def test_a_wrong_data_file_is_one_line(
    name: str,
    content: bytes,
    expected: str,
    classifier: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    assert run("onnx", classifier, "-o", tmp_path / "out", "--data", tmp_path / name, "--quiet") == 2
    said = one_line(capfd)
    assert name in said
    assert expected in said
    assert not (tmp_path / "out").exists()


# -- a wrong OUT -------------------------------------------------------------------------------------------------------


def hashes(directory: Path) -> dict[str, str]:
    return disk.hash_tree(directory)


def test_out_of_another_source_is_refused(
    features: Path, classifier_out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = hashes(classifier_out)
    assert run("onnx", features, "-o", classifier_out, "--force", "--quiet") == 2
    assert "holds text-classification of checkpoint" in one_line(capfd)
    assert hashes(classifier_out) == before


def test_a_directory_that_is_not_ours_is_refused(
    classifier: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    assert run("run", classifier, "-o", tmp_path, "--force", "--quiet") == 2
    assert "is not empty and holds no nlpconvert.json" in one_line(capfd)
    assert run("run", classifier, "-o", tmp_path / "thesis.txt", "--force", "--quiet") == 2
    assert "is not a directory" in one_line(capfd)
    assert names(tmp_path) == {"thesis.txt"}


def test_an_out_inside_an_out_is_refused(
    classifier: Path, classifier_out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = hashes(classifier_out)
    assert run("onnx", classifier, "-o", classifier_out / "onnx" / "sub", "--quiet") == 2
    assert f"lies inside {classifier_out}" in one_line(capfd)
    assert hashes(classifier_out) == before


def test_a_checkpoint_that_answers_nan_is_refused(
    classifier: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.numpy import load_file, save_file

    model = copy(classifier, tmp_path, "model")
    weights = load_file(model / "model.safetensors")
    weights["classifier.bias"][0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert run("onnx", model, "-o", tmp_path / "out", "--quiet") == 2
    assert "PyTorch's own logits is not finite in any of the" in one_line(capfd)
    assert not (tmp_path / "out").exists()


def test_a_step_that_exists_needs_force(
    classifier: Path, classifier_out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = hashes(classifier_out)
    for command in ("onnx", "torchscript", "trt", "run"):
        assert run(command, classifier, "-o", classifier_out, "--quiet") == 2
        assert "exists; --force replaces it when the new one is whole" in one_line(capfd)
    assert hashes(classifier_out) == before


def test_a_default_run_says_what_is_left_to_make(
    features: Path, features_out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("run", features, "-o", features_out, "--quiet") == 2
    assert "or --to torchscript,trt makes only what is not there" in one_line(capfd)


def test_force_replaces_a_step_and_makes_stale_what_was_made_from_it(
    classifier: Path, classifier_out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = copy(classifier_out, tmp_path)
    before = manifest.read(out)
    assert run("onnx", classifier, "-o", out, "--force", "--opset", "18", "--quiet") == 0
    after = manifest.read(out)
    assert after.artifact("onnx", out).sha256 != before.artifact("onnx", out).sha256
    assert after.artifact("onnx", out).made_by["opset"] == 18
    assert [after.record(step).stale for step in ("torchscript", "onnx", "trt")] == [False, False, True]
    assert after.record("torchscript") == before.record("torchscript")
    capfd.readouterr()
    assert run("verify", out, "--allow-unverified", "trt") == 1
    assert "it is stale: onnx, from which it was made, was replaced since" in capfd.readouterr().out


def test_two_processes_on_one_out(
    classifier: Path, classifier_out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = copy(classifier_out, tmp_path)
    holding = "import sys, pathlib, nlpconvert.disk as d\nwith d.lock(pathlib.Path(sys.argv[1]), 'nlpconvert run'):\n"
    holding += "    print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", holding, str(out)],
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert run("onnx", classifier, "-o", out, "--force", "--quiet") == 2
        assert f"{out} is in use by process {holder.pid} (nlpconvert run, since " in one_line(capfd)
        holder.communicate("")
    assert hashes(out) == hashes(classifier_out)


# -- a full disk and Ctrl-C --------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte, where this process may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("step", ["onnx", "torchscript"])
def test_a_full_disk_leaves_the_old_step_whole(
    step: str, classifier: Path, classifier_out: Path, small: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = small / "out"
    shutil.copytree(classifier_out, out, ignore=shutil.ignore_patterns("trt", "logs"))
    with (small / "ballast").open("wb") as file:
        file.write(b"\0" * (shutil.disk_usage(small).free - 60_000))
    before = hashes(out / step)
    assert run(step, classifier, "-o", out, "--force") == 3
    said = capfd.readouterr()
    assert f"FAILED: no room left for {out}" in said.out
    assert "Traceback" not in said.out + said.err
    assert hashes(out / step) == before
    assert not [name for name in names(out) if ".new-" in name or ".old-" in name]
    (small / "ballast").unlink()
    assert run("verify", out, "--step", step, "--quiet") == 0


def test_a_disk_that_is_full_from_the_start(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("safetensors.numpy.save", full)
    assert run("onnx", classifier, "-o", tmp_path / "out", "--quiet") == 3
    assert "no room left for" in one_line(capfd)
    assert run("onnx", classifier, "-o", tmp_path / "out", "--quiet", "--verbose") == 3
    assert "[Errno 28] No space left on device" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def interrupt(process: subprocess.Popen[str], at: str, number: int = signal.SIGINT) -> str:
    """A signal (Ctrl-C) once `at` is said on standard error; what was said in all."""
    said = ""
    assert process.stderr is not None
    for line in process.stderr:
        said += line
        if line.startswith(at):
            time.sleep(0.3)
            process.send_signal(number)
            break
    out, rest = process.communicate(timeout=60)
    return said + rest + out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_what_was_there(number: int, classifier: Path, classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path)
    before = hashes(out / "onnx"), (out / manifest.FILE).read_text()
    process = start("onnx", classifier, "-o", out, "--force")
    said = interrupt(process, "onnx: convert", number)
    assert process.returncode == 130, said
    assert "nlpconvert: interrupted" in said
    assert "Traceback" not in said
    assert hashes(out / "onnx") == before[0]
    assert json.loads((out / manifest.FILE).read_text())["steps"] == json.loads(before[1])["steps"]
    assert names(out) - {"logs"} == names(classifier_out) - {"logs"}, "no half artifact, no lock"
    assert run("verify", out, "--step", "onnx", "--quiet") == 0


def test_a_stop_that_python_drops_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal raises inside a finalizer is printed and dropped; the next word to the person raises it again."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    class Dying:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        monkeypatch.setattr(Terminal, "stop_asked", Stop())
        monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
        Dying()
        with Terminal(quiet=True) as terminal, pytest.raises(KeyboardInterrupt):
            terminal.advance()
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


def test_ctrl_c_of_a_first_run_leaves_an_out_that_can_be_used(classifier: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start("run", classifier, "-o", out, "--to", "torchscript,onnx")
    assert process.returncode is None
    said = interrupt(process, "onnx: convert")
    assert process.returncode == 130, said
    assert names(out) == {"golden", "logs", "torchscript", manifest.FILE}
    assert run("verify", out, "--quiet") == 0
    assert run("run", classifier, "-o", out, "--to", "onnx", "--quiet") == 0


# -- what is missing ---------------------------------------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """`find_spec`, by which the product looks for a package, does not see these."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in packages else find(name, *rest)
    )


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        ("onnx", "onnxscript", "cpu"),
        ("onnx", "onnxruntime", "cpu"),
        ("torchscript", "torch", "cpu"),
        ("trt", "polygraphy", "trt-rtx"),
        ("trt", "onnxscript", "cpu"),
        ("run", "transformers", "cpu"),
    ],
)
def test_a_missing_extra_is_5_and_named(
    command: str,
    package: str,
    extra: str,
    classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    without(monkeypatch, package)
    assert run(command, classifier, "-o", tmp_path / "out", "--quiet") == 5
    assert f"{package} is not installed: pip install 'nlpconvert[{extra}]'" in one_line(capfd)
    assert not (tmp_path / "out").exists()


def test_without_an_engine_builder_a_default_run_skips_the_engine(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "polygraphy")
    assert run("run", classifier, "-o", tmp_path / "out") == 0
    said = capfd.readouterr().out
    assert "skipped: polygraphy is not installed: pip install 'nlpconvert[trt-rtx]'" in said
    assert "trt" not in manifest.read(tmp_path / "out").steps
    assert run("run", classifier, "-o", tmp_path / "out2", "--to", "trt", "--quiet") == 5
    assert run("run", classifier, "-o", tmp_path / "out2", "--runtime", "tensorrt", "--quiet") == 5


def test_a_missing_runtime_is_4_in_verify(
    classifier_out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    without(monkeypatch, "onnxruntime")
    assert run("verify", classifier_out, "--step", "onnx") == 4
    assert "not run: onnxruntime is not installed: pip install 'nlpconvert[verify]'" in capfd.readouterr().out


@without_gpu
def test_a_device_that_is_not_there_is_4_in_verify(classifier_out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("verify", classifier_out, "--step", "torchscript", "--device", "cuda") == 4
    assert run("verify", classifier_out, "--step", "onnx", "--provider", "cuda") == 4
    assert "not run: ONNX Runtime here has no CUDAExecutionProvider" in capfd.readouterr().out


# -- exit codes and documents ------------------------------------------------------------------------------------------


@without_gpu
def test_verify_on_a_machine_without_a_gpu(classifier_out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in classifier_out.rglob("*")}
    assert run("verify", classifier_out) == 4
    assert run("verify", classifier_out, "--allow-unverified", "trt") == 0
    assert run("verify", classifier_out, "--step", "trt", "--allow-unverified", "trt") == 4, "nothing was verified"
    said = capfd.readouterr()
    assert "not run: no NVIDIA GPU" in said.out
    assert "torchscript" in said.out
    assert {path: path.stat().st_mtime_ns for path in classifier_out.rglob("*")} == before, "verify writes nothing"


def test_quiet_says_nothing_when_all_is_well(classifier_out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("verify", classifier_out, "--step", "onnx", "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    assert run("verify", classifier_out, "--step", "onnx", "--quiet", "--tolerance", "abs<=1e-12") == 1
    said = capfd.readouterr()
    assert said.out.startswith("onnx disagrees with pytorch: 1 of 1 outputs out of tolerance")
    assert f"Again: nlpconvert verify {classifier_out} --tolerance 'abs<=1e-12' --step onnx --case " in said.out
    assert said.err == ""


@without_gpu
def test_quiet_says_why_a_step_was_not_run(classifier_out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("verify", classifier_out, "--case", "alone", "--quiet") == 4
    assert capfd.readouterr().out.startswith("trt: not run: no NVIDIA GPU")
    assert run("verify", classifier_out, "--case", "alone", "--quiet", "--allow-unverified", "trt") == 0
    assert capfd.readouterr() == ("", "")


def test_verbose_and_plain_progress_lines(classifier_out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("verify", classifier_out, "--step", "onnx", "--verbose") == 0
    said = capfd.readouterr()
    assert "onnx agrees with pytorch: 1 output within tolerance" in said.out
    assert "allowed          |candidate - reference| <=" in said.out
    assert said.err == "verify, 24 cases ...\n"
    assert "\x1b" not in said.out + said.err


@without_gpu
def test_json_is_all_that_is_on_standard_output(
    classifier: Path, classifier_out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("verify", classifier_out, "--json", "-", "--verbose") == 4
    said = capfd.readouterr()
    steps = {step["step"]: step for step in json.loads(said.out)["steps"]}
    assert {name: step["exit_code"] for name, step in steps.items()} == {"torchscript": 0, "onnx": 0, "trt": 4}
    assert steps["onnx"]["verdict"]["provider"] == "CPUExecutionProvider"
    assert "agrees" in said.err

    assert run("torchscript", classifier, "-o", tmp_path / "out", "--json") == 0
    (step,) = json.loads(capfd.readouterr().out)["steps"]
    assert (step["step"], step["status"]) == ("torchscript", "agrees")
    assert set(step["files"]) == {"model.pt"}


@without_gpu
def test_junit_and_json_files(classifier_out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    junit, data = tmp_path / "new" / "junit.xml", tmp_path / "verdict.json"
    assert run("verify", classifier_out, "--junit", junit, "--json", data, "--case", "alone") == 4
    suites = ElementTree.parse(junit).getroot()
    assert {suite.get("name"): suite.get("skipped") for suite in suites}["trt"] == "1"
    assert suites.get("failures") == suites.get("errors") == "0"
    assert len(json.loads(data.read_text())["steps"]) == 3
    assert "agrees" in capfd.readouterr().out

    (tmp_path / "file").write_text("")
    assert run("verify", classifier_out, "--step", "onnx", "--junit", tmp_path / "file" / "junit.xml", "--quiet") == 2
    assert "cannot write" in one_line(capfd)


def test_a_bar_on_a_terminal(classifier_out: Path) -> None:
    ours, theirs = pty.openpty()
    with start("verify", classifier_out, "--step", "onnx", stderr=theirs, env={"TERM": "xterm"}) as process:
        out, _ = process.communicate(timeout=120)
        os.close(theirs)
        seen = b""
        with os.fdopen(ours, "rb", buffering=0) as screen:
            while True:
                try:
                    part = screen.read(4096)
                except OSError as error:  # Linux: the other end is closed
                    assert error.errno == errno.EIO
                    break
                if not part:
                    break
                seen += part
    assert process.returncode == 0
    assert b"\x1b[" in seen
    assert b"verify" in seen
    assert b"24/24" in seen or b"/24" in seen
    assert "agrees" in out and "\x1b" not in out, "standard output is not the terminal"


def test_help_shows_the_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["run", "--help"], ["verify", "--help"], ["onnx", "--help"]):
        assert run(*arguments) == 0
        said = " ".join(capfd.readouterr().out.replace("│", " ").split())
        for row in EXIT_CODES:
            assert f"{row.code} {row.meaning}" in said
    assert run() in (0, 2)


def test_help_and_version_load_nothing_heavy() -> None:
    heavy = "numpy torch transformers onnx onnxruntime polygraphy".split()
    code = "import sys; from nlpconvert import cli; cli._main(['--help']); "
    code += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    with start("--version") as process:
        assert process.communicate() == ("nlpconvert 0.1.0\n", "")
    assert process.returncode == 0


@without_gpu
def test_doctor(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("doctor") == 0
    said = capfd.readouterr().out
    assert "GPU       no NVIDIA GPU with a driver here" in said
    assert re.search(r"^torchscript +made here  yes$", said, re.MULTILINE)
    assert run("doctor", "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert [row["step"] for row in facts["steps"]] == list(STEPS)
    assert facts["gpu"] is None

    without(monkeypatch, "torch", "onnxruntime", "polygraphy")
    assert run("doctor") == 0
    said = capfd.readouterr().out
    assert "made here  torch is not installed: pip install 'nlpconvert[cpu]'" in said
    assert "run here   onnxruntime is not installed: pip install 'nlpconvert[verify]'" in said


@pytest.mark.parametrize("closed", ["1", "2", "12"])
def test_closed_streams_are_no_fault(closed: str, classifier_out: Path) -> None:
    command = f'exec {sys.executable} -m nlpconvert verify "$0" --step onnx {" ".join(f"{n}>&-" for n in closed)}'
    done = subprocess.run(["sh", "-c", command, str(classifier_out)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert ("agrees" in done.stdout) == ("1" not in closed)


def test_names_that_the_terminal_cannot_write(classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path, "zwölf äpfel")
    with start(
        "verify", out, "--step", "onnx", "--tolerance", "abs<=1e-12", env={"PYTHONIOENCODING": "ascii"}
    ) as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert "zw\\xf6lf \\xe4pfel' --tolerance" in said, "and quoted for the shell"


def test_an_output_that_is_full(classifier_out: Path) -> None:
    with open("/dev/full", "w") as full, start("verify", classifier_out, "--step", "onnx", stdout=full) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said.splitlines()[-1] == "nlpconvert: [Errno 28] No space left on device"


def test_a_reader_that_goes_away_is_no_drift(classifier_out: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start("verify", classifier_out, "--step", "onnx", stdout=writing) as process:
        os.close(writing)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 141, said
    assert "Traceback" not in said


def test_a_fault_of_our_own_is_no_drift(
    classifier_out: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fault(*_: object, **__: object) -> None:
        raise AttributeError("a fault")

    monkeypatch.setattr("nlpconvert.pipeline.verify", fault)
    assert run("verify", classifier_out, "--quiet") == 3
    said = capfd.readouterr().err
    assert "AttributeError: a fault" in said
    assert said.endswith("this is a fault of nlpconvert itself, not of the model; please report it\n")

"""The command `triton`: what it says, what it refuses before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nlpconvert import triton_command
from nlpconvert.errors import MissingPackage, NlpconvertError, UsageError

app = typer.Typer()
app.command()(triton_command.triton)


def ask(*words: object) -> str:
    """Standard output and error of the command; what it raises is raised."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, NlpconvertError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_repository_is_told_in_two_lines(classifier_out: Path, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    said = ask(classifier_out, "--step", "onnx", "-o", repo, "--name", "m", "--tokenizer", "--max-delay", "5ms")
    assert f"{repo}: m, m_tokenizer, m_text\n" in said
    assert "by the onnxruntime backend, batches of 32 at most, waits 5 ms, 1 at a time (given)" in said
    assert "nlpconvert: the onnxruntime backend batches requests of one length only" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which artifact is to be served\\? give --step: torchscript, onnx, trt"),
        (("--step", "onnx-int8"), "there is no step 'onnx-int8' here"),
        (("--step", "onnx", "--grpc"), "--grpc is about asking a server: give --check as well"),
        (("--step", "onnx", "--max-delay", "soon"), "is no time: write for example 5ms"),
        (("--step", "onnx", "--backend", "tensorrt"), "does not run onnx: give onnxruntime or python"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], said: str, classifier_out: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        ask(classifier_out, "-o", tmp_path / "repo", *words)
    assert not (tmp_path / "repo").exists()


def test_without_a_server_nothing_is_written(
    classifier_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackage, match="there is no tritonserver on PATH"):
        ask(classifier_out, "--step", "onnx", "-o", tmp_path / "repo", "--check")
    assert not (tmp_path / "repo").exists()


def test_a_repository_that_is_there_is_asked_as_it_is(classifier_out: Path, tmp_path: Path) -> None:
    repo, program = tmp_path / "repo", tmp_path / "tritonserver"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    ask(classifier_out, "--step", "onnx", "-o", repo, "-q")
    check = (classifier_out, "-o", repo, "--check", "--tritonserver", program)
    with pytest.raises(UsageError, match="is asked as it is; leave out what describes a new one"):
        ask(*check, "--max-batch", 4)
    with pytest.raises(UsageError, match="serves onnx, not torchscript"):
        ask(*check, "--step", "torchscript")

"""benchmarks/: each one's code runs on a tiny input and prints its ratio. How large a ratio is, no test says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "benchmarks" / "run.py"


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of benchmarks/run.py, with one round each and the README left alone."""
    readme = (RUN.parent / "README.md").read_bytes()
    process = subprocess.run(
        [sys.executable, str(RUN), *map(str, arguments), "--repeats", "1", "--threads", "1", "--no-write"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (RUN.parent / "README.md").read_bytes() == readme
    return process.returncode, process.stdout, process.stderr


def ratios(printed: str, what: str) -> list[float]:
    """The ratios of the rows whose first cell holds these words."""
    rows = [line for line in printed.splitlines() if line.startswith("|") and what in line]
    return [float(found) for row in rows for found in re.findall(r"\*\*(-?[0-9.]+)\*\*", row)]


def test_startup_prints_its_ratio_and_the_machine() -> None:
    code, printed, errors = run("startup")
    assert code in (0, 1), errors
    assert re.search(r"^\d+ cores, ", printed)
    (ratio,) = ratios(printed, "`import typer`")
    assert ratio > 0
    assert re.search(r"\d\.\d\d s \(cpu \d\.\d\d s\)", printed)


def test_a_name_that_is_not_there() -> None:
    code, _, errors = run("speed")
    assert code == 2
    assert "there is no benchmark speed; there are startup, convert, verify, quantize, memory" in errors


@pytest.mark.slow
def test_convert_prints_both_ratios_and_where_the_time_goes(minilm: Path) -> None:
    code, printed, errors = run("convert", "--model", minilm)
    assert code in (0, 1), errors
    assert len(ratios(printed, "/ bare script")) == 2
    for phase in ("imports", "reference", "trace", "decompose", "optimise", "save", "hash", "judge", "passes"):
        assert re.search(rf"\| (&nbsp;)*{phase}", printed), phase


@pytest.mark.slow
def test_verify_prints_its_ratios(minilm: Path) -> None:
    code, printed, errors = run("verify", "--model", minilm)
    assert code in (0, 1), errors
    assert len(ratios(printed, "bare script over ONNX Runtime")) == len(ratios(printed, "and the passes")) == 2


@pytest.mark.slow
def test_write_prints_its_ratios_and_whether_the_tokens_are_the_same(tmp_path: Path) -> None:
    code, printed, errors = run("write", "--parameters", "3e4", "--scratch", tmp_path)
    assert code in (0, 1), errors
    assert len(ratios(printed, "PyTorch's `generate`")) == len(ratios(printed, "its cache / without")) == 8
    assert "All sides wrote the same tokens." in printed


@pytest.mark.slow
def test_locate_prints_its_ratios(tmp_path: Path) -> None:
    code, printed, errors = run("locate", "--parameters", "3e4", "--scratch", tmp_path)
    assert code == 1, errors  # as for memory
    assert len(ratios(printed, "peak")) >= 2


@pytest.mark.slow
def test_memory_prints_its_ratio(tmp_path: Path) -> None:
    code, printed, errors = run("memory", "--parameters", "3e4", "--scratch", tmp_path)
    assert code == 1, errors  # beside the libraries such a model's weights are nothing
    assert ratios(printed, "peak / bytes of the weights")[0] > 1.3
    assert "(missed)" in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_serve_holds_predictions_against_a_real_triton(
    minilm: Path, tritonserver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NLPCONVERT_TRITONSERVER", str(tritonserver))
    code, printed, errors = run("serve", "--model", minilm)
    assert code in (0, 1), errors
    assert len(ratios(printed, "p50")) == len(ratios(printed, "throughput")) == 4
    assert "ms taken out" in printed

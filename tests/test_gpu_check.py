"""scripts/gpu_check.sh: what it reports and how it exits, on this machine and with a played interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nlpconvert import engines

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "gpu_check.sh"


def check(directory: Path, python: str) -> tuple[int, str]:
    """Exit status and report of one run."""
    process = subprocess.run(
        ["bash", str(SCRIPT), str(directory / "report")],
        env={**os.environ, "PYTHON": python, "FIXTURES": "bert"},
        capture_output=True,
        text=True,
        check=False,
    )
    report = directory / "report" / "gpu_report.md"
    return process.returncode, report.read_text() if report.exists() else process.stderr


def played(directory: Path, *, missing: str = "", codes: str = "0") -> str:
    """An interpreter that sees a GPU, lacks what `missing` maps to, and whose conversions end in `codes`."""
    script = directory / "python"
    script.write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in\n'
        "  *gpu_check.py\\ gpu) echo 'Played GPU' ;;\n"
        f"  *gpu_check.py\\ missing*) {missing or ':'} ;;\n"
        f"  *gpu_check.py\\ pytorch*|*nlpconvert*) echo 'last line'; {codes} ;;\n"
        "  *) exit 0 ;;\n"
        "esac\n"
    )
    script.chmod(0o755)
    return str(script)


def test_without_a_gpu_every_part_says_so(tmp_path: Path) -> None:
    if engines.find_gpu()[0] is not None:
        pytest.skip("this machine has a GPU")
    status, report = check(tmp_path, sys.executable)
    assert status == 4
    for part in ("pytorch", "torchscript", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx"):
        assert f"| {part} | - | not run here: no GPU |" in report
    assert "Nothing could run here." in report


def test_what_agrees_and_what_is_missing(tmp_path: Path) -> None:
    python = played(tmp_path, missing='case "$*" in *tensorrt) echo tensorrt ;; esac', codes="exit 0")
    status, report = check(tmp_path, python)
    assert status == 0
    assert "- GPU: Played GPU" in report
    assert "| tensorrt | - | not installed: tensorrt |" in report
    assert "| onnxruntime-cuda | bert | agrees |" in report
    assert "All 8 that could run agreed." in report


def test_what_was_not_run_is_no_pass(tmp_path: Path) -> None:
    status, report = check(tmp_path, played(tmp_path, codes="exit 4"))
    assert status == 4
    assert "| tensorrt-rtx | bert | not run here (see tensorrt-rtx-bert.log): last line |" in report


def test_drift_fails(tmp_path: Path) -> None:
    python = played(tmp_path, codes='case "$*" in *onnx*) exit 1 ;; esac')
    status, report = check(tmp_path, python)
    assert status == 1
    assert "| onnxruntime-cuda | bert | FAILED, exit 1 (see onnxruntime-cuda-bert.log) |" in report
    assert "1 of the parts that could run did not agree." in report


def test_a_package_that_cannot_be_imported_fails(tmp_path: Path) -> None:
    status, report = check(tmp_path, played(tmp_path, missing="exit 1", codes="exit 0"))
    assert status == 1
    assert "FAILED, its packages cannot be imported" in report


def test_no_python_is_a_wrong_start(tmp_path: Path) -> None:
    status, said = check(tmp_path, str(tmp_path / "nowhere"))
    assert status == 2
    assert "is not Python 3.11 or newer: set PYTHON" in said

"""scripts/gpu_check.sh: what it reports and how it exits, on this machine and with a played interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from nlpconvert import engines

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "gpu_check.sh"


def check(directory: Path, python: str, fixtures: str = "bert") -> tuple[int, str]:
    """Exit status and report of one run."""
    process = subprocess.run(
        ["bash", str(SCRIPT), str(directory / "report")],
        env={**os.environ, "PYTHON": python, "FIXTURES": fixtures},
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
        f"  *gpu_check.py\\ pytorch*|*gpu_check.py\\ write*|*nlpconvert*) echo 'last line'; {codes} ;;\n"
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


# -- writing -----------------------------------------------------------------------------------------------------------


def test_only_models_that_write_are_asked_to(tmp_path: Path) -> None:
    python = played(tmp_path, codes='case "$*" in *write*trt-fp16*) exit 1 ;; esac')
    status, report = check(tmp_path, python, "gpt2-lm bert-text-classifier t5-seq2seq")
    assert status == 1
    assert "| tensorrt-rtx-write | gpt2-lm | agrees |" in report
    assert "| tensorrt-fp16-write | t5-seq2seq | FAILED, exit 1 (see tensorrt-fp16-write-t5-seq2seq.log) |" in report
    assert "-write | bert-text-classifier" not in report


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/gpu_check.py as a module."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT.with_suffix(".py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_parts_are_asked_for_by_what_they_are_of(script: ModuleType) -> None:
    assert script._of("tensorrt-rtx-fp16-write") == "tensorrt-rtx" and script._of("tensorrt-int8") == "tensorrt"
    assert script._of("onnxruntime-cuda") == "onnxruntime-cuda" and script._of("tensorrtx") == ""
    assert script.main(["missing", "tensorrt-rtx-fp16"]) == 0
    assert script.main(["missing", "nothing"]) == 2


def test_where_two_texts_part(script: ModuleType) -> None:
    reference = np.array([[3, 1, 2], [3, 1, 0], [3, 1, 2]])
    logits = [np.array([[0, 9.0, 10, 20]] * 3), np.array([[0, 10, 9.999, 0]] * 3), np.array([[8.0, 0, 10, 0]] * 3)]
    same = reference.copy()
    same[1, 2] = 7  # behind its end a row's tokens mean nothing
    lines, agrees = script.parted(reference, same, (3, 2, 3), logits, 1e-3)
    assert agrees and lines[1] == "row 1: 2 tokens, the same"
    near = reference.copy()
    near[0, 1:] = 2, 3
    lines, agrees = script.parted(reference, near, (3, 2, 3), logits, 1e-3)
    assert agrees and lines[0] == "row 0: 1 tokens the same, then a near tie, logits 1.0e-04 of the largest apart"
    wrong = reference.copy()
    wrong[2, 2] = 0
    lines, agrees = script.parted(reference, wrong, (3, 2, 3), logits, 1e-3)
    assert not agrees and lines[2] == "row 2: 2 tokens the same, then DRIFT, logits 2.0e-01 of the largest apart"
    assert not script.parted(reference, reference[:, :2], (3, 2, 3), logits, 1e-3)[1]

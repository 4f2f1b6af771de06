"""`verify` as CI runs it: a machine with the base and the `verify` extra alone, and OUT moved there without the model.

In the processes started here torch, transformers and all that only converting needs cannot be imported or found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nlpconvert import manifest

ROOT = Path(__file__).resolve().parent.parent
ABSENT = "torch transformers onnxscript onnx_ir polygraphy tensorrt tensorrt_rtx huggingface_hub sentencepiece".split()

# Python runs a sitecustomize by itself: whatever looks for a package asks these finders, and finds nothing.
BLOCKER = f"""
import sys

ABSENT = {ABSENT!r}


class Blind:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in ABSENT else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Blind(finder) for finder in sys.meta_path]
"""


@pytest.fixture
def moved(classifier: Path, classifier_out: Path, tmp_path: Path) -> Path:
    """What a checkout holds: manifest, golden and artifacts, under another name; its model exists nowhere."""
    out = tmp_path / "checkout" / "artifacts"
    shutil.copytree(classifier_out, out, ignore=shutil.ignore_patterns("logs", ".*"))
    text = (out / manifest.FILE).read_text()
    assert str(classifier) in text
    (out / manifest.FILE).write_text(text.replace(str(classifier), str(tmp_path / "gone")))
    return out


def program(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in the bare environment, run in the checkout."""
    (tmp_path / "blocker").mkdir(exist_ok=True)
    (tmp_path / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "blocker"), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path / "checkout", env=environment, capture_output=True, text=True
    )


def verify(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return program(tmp_path, "-m", "nlpconvert", "verify", "artifacts", *arguments)


def test_the_environment_is_bare(moved: Path, tmp_path: Path) -> None:
    """The blocker does what it says; else the tests below would show nothing."""
    for name in ABSENT:
        done = program(tmp_path, "-c", f"import importlib.util as u; print(u.find_spec({name!r})); import {name}")
        assert (done.returncode, done.stdout) == (1, "None\n"), name
        assert f"ModuleNotFoundError: No module named '{name}'" in done.stderr


def test_onnx_is_verified_and_the_rest_is_not_run(moved: Path, tmp_path: Path) -> None:
    done = verify(tmp_path, "--json", "-")
    assert done.returncode == 4, done.stderr
    steps = {step["step"]: step for step in json.loads(done.stdout)["steps"]}
    assert steps["onnx"]["status"] == "agrees"
    assert steps["onnx"]["verdict"]["cases"] == 24
    assert (steps["torchscript"]["status"], steps["torchscript"]["reason"]) == (
        "not run",
        "torch is not installed: pip install 'nlpconvert[cpu]'",
    )
    assert (steps["trt"]["status"], steps["trt"]["reason"]) == (
        "not run",
        "polygraphy is not installed: pip install 'nlpconvert[trt-rtx]'",
    )
    assert "Traceback" not in done.stderr


def test_one_step_or_what_is_forgiven_is_enough(moved: Path, tmp_path: Path) -> None:
    assert verify(tmp_path, "--step", "onnx", "--quiet").returncode == 0
    assert verify(tmp_path, "--allow-unverified", "torchscript,trt", "--case", "alone").returncode == 0
    alone = verify(tmp_path, "--step", "torchscript", "--allow-unverified", "torchscript")
    assert alone.returncode == 4, "nothing at all was verified"


def test_a_broken_artifact_is_seen_without_torch(moved: Path, tmp_path: Path) -> None:
    weights = moved / "onnx" / "model.onnx.data"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(bytes(data))
    done = verify(tmp_path, "--step", "onnx")
    assert done.returncode == 1
    assert "onnx/model.onnx.data has changed since it was verified" in done.stdout


def test_an_out_that_cannot_be_written_to(moved: Path, tmp_path: Path) -> None:
    """A checkout may be read-only (for root it is not, but the times say whether anything was written)."""
    before = {path: path.stat().st_mtime_ns for path in (moved, *moved.rglob("*"))}
    for path in before:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert verify(tmp_path, "--step", "onnx").returncode == 0
    finally:
        for path in before:
            path.chmod(0o755 if path.is_dir() else 0o644)
    assert {path: path.stat().st_mtime_ns for path in (moved, *moved.rglob("*"))} == before


def test_doctor_and_making_name_the_extra(moved: Path, tmp_path: Path) -> None:
    done = program(tmp_path, "-m", "nlpconvert", "doctor")
    assert done.returncode == 0, done.stderr
    assert "made here  torch is not installed: pip install 'nlpconvert[cpu]'" in done.stdout
    assert "run here   yes, on the CPU" in done.stdout
    done = program(tmp_path, "-m", "nlpconvert", "onnx", "model", "-o", "new")
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        "nlpconvert: onnx cannot be made here: torch is not installed: pip install 'nlpconvert[cpu]'\n"
    )

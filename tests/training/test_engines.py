"""training/engines: an engine by its name, and what is said where ONNX Runtime for training is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from nlpconvert.errors import MissingPackage, UsageError
from nlpconvert.training import engines
from tests.training.objectives import loaded

Version = namedtuple("Version", "major minor")


@pytest.mark.parametrize("name", engines.ENGINES)
def test_each_by_its_name(classifier: Path, name: str) -> None:
    engine = engines.make(name, loaded(classifier), threads=1)
    assert engine.name == name
    assert "classifier.weight" in engine.parameters


def test_a_name_that_is_none(classifier: Path) -> None:
    with pytest.raises(UsageError, match="there is no engine 'jax': ort and torch are"):
        engines.make("jax", loaded(classifier))


@pytest.mark.parametrize("found", [None, "without training"])
def test_without_the_flavour_that_trains(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == "onnxruntime" else None)
    with pytest.raises(MissingPackage) as raised:
        engines.require_ort()
    said = str(raised.value)
    assert said.startswith("ONNX Runtime for training is not installed: pip install 'nlpconvert[training]' into")
    assert "excludes them; it ends with Python 3.12), or train with --engine torch" in said
    assert raised.value.exit_code == 5


def test_beyond_the_last_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "version_info", Version(3, 13))
    with pytest.raises(
        MissingPackage, match=r"take Python 3\.11 or 3\.12, as there is none for 3\.13, and pip install"
    ):
        engines.require_ort()


def test_the_engine_of_pytorch_needs_no_onnx() -> None:
    words = (
        "import sys; sys.modules.update(onnx=None, onnxruntime=None); "
        "from nlpconvert.training import engines, gradients; print('loaded')"
    )
    ended = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=False)
    assert ended.stdout == "loaded\n", ended.stderr[-500:]

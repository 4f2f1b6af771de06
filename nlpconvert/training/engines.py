"""Floor 2: the engines by their names, and what a person is told whose installation lacks one."""

from __future__ import annotations

import importlib.util
import sys

from nlpconvert.errors import MissingPackage, UsageError
from nlpconvert.training import Engine
from nlpconvert.training.eager import EagerEngine
from nlpconvert.training.losses import Objective

ENGINES = ("ort", "torch")


def make(name: str, objective: Objective, *, threads: int | None = None) -> Engine:
    """The engine "ort" or "torch" over an objective. `threads`: ONNX Runtime's; PyTorch's are the process's.

    Raises MissingPackage where ONNX Runtime for training is not installed, ConversionError where it cannot train the
    model.
    """
    if name == "torch":
        return EagerEngine(objective)
    if name != "ort":
        raise UsageError(f"there is no engine {name!r}: {' and '.join(ENGINES)} are")
    require_ort()
    from nlpconvert.training.ort import OrtEngine

    return OrtEngine(objective, threads=threads)


def require_ort() -> None:
    """Raises MissingPackage where `import onnxruntime` does not bring the flavour that trains."""
    if importlib.util.find_spec("onnxruntime") is not None and importlib.util.find_spec("onnxruntime.training"):
        return
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    advice = "pip install 'nlpconvert[training]'"
    if sys.version_info >= (3, 13):
        advice = f"take Python 3.11 or 3.12, as there is none for {version}, and {advice}"
    raise MissingPackage(
        f"ONNX Runtime for training is not installed: {advice} into an environment of its own (it is the same module "
        "as the other flavours of ONNX Runtime and excludes them; it ends with Python 3.12), or train with "
        "--engine torch"
    )

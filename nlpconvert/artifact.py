"""Floor 0: what an artifact, a step and an outcome are.

Types only, all frozen. How they lie on disk is `manifest` and `disk`; how they are made is `convert/`, how they are run
`backends/`, how they are judged `validators/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type (numpy's name: "int64", "float32") and shape of an input or output.

    A dynamic axis is a string: ("batch", "sequence", 384).
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Step:
    """One row of the table of steps: what is made, from what, into which file."""

    name: str
    parent: str
    format: str  # "torchscript" | "onnx" | "tensorrt": names the backend that runs it
    precision: str
    file: str
    extra: str  # what to pip install for making it


STEPS: dict[str, Step] = {
    row.name: row
    for row in (
        Step("torchscript", "source", "torchscript", "float32", "model.pt", "cpu"),
        Step("onnx", "source", "onnx", "float32", "model.onnx", "cpu"),
        Step("onnx-optimized", "onnx", "onnx", "float32", "model.onnx", "cpu"),
        Step("onnx-fp16", "onnx", "onnx", "float16", "model.onnx", "cpu"),
        Step("onnx-bf16", "onnx", "onnx", "bfloat16", "model.onnx", "cpu"),
        Step("onnx-int8", "onnx", "onnx", "int8", "model.onnx", "cpu"),
        Step("onnx-int4", "onnx", "onnx", "int4", "model.onnx", "cpu"),
        Step("onnx-qdq", "onnx", "onnx", "int8", "model.onnx", "cpu"),
        Step("trt", "onnx", "tensorrt", "float32", "model.engine", "trt-rtx"),
        Step("trt-fp16", "onnx-fp16", "tensorrt", "float16", "model.engine", "trt-rtx"),
        Step("trt-bf16", "onnx-bf16", "tensorrt", "bfloat16", "model.engine", "trt-rtx"),
        Step("trt-int8", "onnx-qdq", "tensorrt", "int8", "model.engine", "trt-rtx"),
    )
}


FOREIGN = "foreign"
"""The step of a file that another tool made."""


@dataclass(frozen=True)
class Made:
    """What a converter hands back: the facts about the files it has written into the directory it was given."""

    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    made_by: Mapping[str, Any]
    """Exporter or builder, versions, options, device, notes: plain JSON values."""
    notes: tuple[str, ...] = ()
    """Lines for the person: a fallback taken, a size flagged."""


@dataclass(frozen=True)
class Artifact:
    """A converted model as it lies on disk.

    `path` is the main file; `files` gives the sha256 of every file of the step's directory by its path relative to that
    directory; `parent` names the step it was made from and `parent_sha256` that step's main file (the checkpoint's hash
    for "source").
    """

    step: str
    path: Path
    format: str
    precision: str
    task: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: Mapping[str, str]
    parent: str
    parent_sha256: str
    made_by: Mapping[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """The step's directory."""
        return self.path.parent

    @property
    def encoder(self) -> Path | None:
        """The encoder's own file, of an artifact of two; None of one that is whole in its main file."""
        own = self.made_by.get("encoder")
        name = own.get("file") if isinstance(own, Mapping) else None
        return self.directory / name if isinstance(name, str) and name in self.files else None

    @property
    def graphs(self) -> tuple[Path, ...]:
        """The main file, and the encoder's where there is one."""
        return (self.path,) if self.encoder is None else (self.path, self.encoder)

    @property
    def sha256(self) -> str:
        """Hash of the main file."""
        return self.files[self.path.name]


@dataclass(frozen=True)
class Outcome:
    """What became of one step.

    `status` is one of: "agrees", "drift", "failed", "not run" (made, but this machine cannot run it), "skipped"
    (not asked for by name and not installed). `verdict` is the plain-data form of the validators' findings, as the
    manifest keeps it; None when nothing was measured.
    """

    step: str
    status: str
    reason: str = ""
    artifact: Artifact | None = None
    verdict: Mapping[str, Any] | None = None
    seconds: float = 0.0
    bytes: int = 0
    reused: bool = False
    notes: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The exit code this outcome alone ends in."""
        return {"agrees": 0, "skipped": 0, "drift": 1, "failed": 3, "not run": 4}[self.status]

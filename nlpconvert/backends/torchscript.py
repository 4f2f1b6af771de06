"""Floor 2: runs TorchScript artifacts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from nlpconvert.artifact import Artifact
from nlpconvert.backends import Batch
from nlpconvert.errors import CannotRunHere, DriftError


class TorchScriptSession:
    """A loaded TorchScript file on one device."""

    def __init__(self, module: torch.jit.ScriptModule, artifact: Artifact, device: str) -> None:
        self._module = module
        self._inputs = [spec.name for spec in artifact.inputs]
        # A foreign file's own names need not be words that Python takes as keywords.
        self._in_order = bool(artifact.made_by.get("foreign"))
        self._device = device
        self.provider = f"{device} (torch {torch.__version__})"
        self.precision = artifact.precision

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """Arrays by input name to arrays by output name."""
        tensors = {name: torch.from_numpy(batch[name]).to(self._device) for name in self._inputs}
        with torch.inference_mode():
            answers = self._module(*tensors.values()) if self._in_order else self._module(**tensors)
        return {name: tensor.cpu().numpy() for name, tensor in _named(answers).items()}

    def close(self) -> None:
        """Frees the module."""
        del self._module


def _named(answers: Any) -> dict[str, torch.Tensor]:
    """What a traced module gives, by name; the entries of a tuple, which have none, are "0", "1", ..."""
    if isinstance(answers, dict):
        return answers
    entries = answers if isinstance(answers, tuple | list) else (answers,)
    return {str(n): entry for n, entry in enumerate(entries) if isinstance(entry, torch.Tensor)}


def input_names(path: Path) -> tuple[str, ...]:
    """Names of the inputs of a TorchScript file's forward, in order. DriftError where it cannot be read."""
    forward: Any = _load(path, "cpu").forward
    return tuple(argument.name for argument in forward.schema.arguments[1:])


def _load(path: Path, device: str) -> torch.jit.ScriptModule:
    try:
        module: torch.jit.ScriptModule = torch.jit.load(str(path), map_location=device).eval()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        line = next((part.strip()[:200] for part in str(error).splitlines() if part.strip()), type(error).__name__)
        raise DriftError(f"torch cannot open {path.name}: {line}") from error
    return module


def open(artifact: Artifact, *, device: str = "cpu", threads: int | None = None) -> TorchScriptSession:
    """Opens a traced file on the device it was traced on.

    A trace holds its device as constants, so another one is refused with CannotRunHere. DriftError where the file
    cannot be read.
    """
    traced_on = str(artifact.made_by.get("device", "cpu"))
    if device != traced_on:
        raise CannotRunHere(f"it was traced on {traced_on} and holds that device as constants; {device} was asked for")
    if device == "cuda" and not torch.cuda.is_available():
        raise CannotRunHere("it was traced on cuda, and there is no CUDA device here")
    if threads is not None:
        torch.set_num_threads(threads)
    module = _load(artifact.path, device)
    # The profiling executor recompiles for the first shapes it sees, which costs more than it brings here and has its
    # own rounding; the graph as written is what is judged.
    torch.jit.set_fusion_strategy([("DYNAMIC", 0)])
    return TorchScriptSession(module, artifact, device)

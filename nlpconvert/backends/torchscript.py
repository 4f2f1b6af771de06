"""Floor 2: runs TorchScript artifacts."""

from __future__ import annotations

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
        self._device = device
        self.provider = f"{device} (torch {torch.__version__})"
        self.precision = artifact.precision

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """Arrays by input name to arrays by output name."""
        tensors = {name: torch.from_numpy(batch[name]).to(self._device) for name in self._inputs}
        with torch.inference_mode():
            answers = self._module(**tensors)
        return {name: tensor.cpu().numpy() for name, tensor in answers.items()}

    def close(self) -> None:
        """Frees the module."""
        del self._module


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
    try:
        module = torch.jit.load(str(artifact.path), map_location=device).eval()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        line = next((part.strip()[:200] for part in str(error).splitlines() if part.strip()), type(error).__name__)
        raise DriftError(f"torch cannot open {artifact.path.name}: {line}") from error
    # The profiling executor recompiles for the first shapes it sees, which costs more than it brings here and has its
    # own rounding; the graph as written is what is judged.
    torch.jit.set_fusion_strategy([("DYNAMIC", 0)])
    return TorchScriptSession(module, artifact, device)

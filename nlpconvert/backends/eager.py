"""Floor 2: PyTorch as it would be served: the loaded model itself, no checks in the way, nothing compiled."""

from __future__ import annotations

import numpy as np
import torch

from nlpconvert.backends import Batch


class EagerSession:
    """An attached model (`source.Loaded.module`) in eval mode, without gradients."""

    precision = "float32"

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._device = next(module.parameters()).device
        attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
        self.provider = f"{self._device} (torch {torch.__version__}{f', {attention}' if attention else ''})"

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """Arrays by input name to arrays by output name."""
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in batch.items()}
        with torch.inference_mode():
            answers = self._module(**tensors)
        return {name: tensor.cpu().numpy() for name, tensor in answers.items()}

    def close(self) -> None:
        """Frees the model."""
        del self._module


def open(module: torch.nn.Module, threads: int | None = None) -> EagerSession:
    """A session on a loaded model; `threads` holds for torch as a whole."""
    if threads is not None:
        torch.set_num_threads(threads)
    return EagerSession(module.eval())

"""Floor 2: gradients by PyTorch itself: the reference of every other engine, and an engine to train with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nlpconvert.training import Batch
from nlpconvert.training.losses import Objective


class EagerEngine:
    """Autograd over the objective, on the device where the model is.

    `dropout` may be turned off, as the comparison of gradients does.
    """

    name = "torch"

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.dropout = True
        self._trained = objective.parameters_trained

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """What is trained, by the names of the checkpoint's module."""
        return self._trained

    def step(self, batch: Batch, seed: int) -> float:
        """The mean loss, gradients into `.grad` (see Engine). A batch without a target: 0.0 and gradients of 0.

        Draws from torch's own generator, whose state is moved by it.
        """
        tensors = self.objective.tensors(batch)
        self.clear()
        if batch.targets == 0:
            return 0.0
        torch.manual_seed(seed)
        self.objective.train(self.dropout)
        with torch.enable_grad():
            loss = self.objective(*tensors)[0]
        loss.backward()
        return float(loss.detach())

    def clear(self) -> None:
        """Gradients of 0, in the tensors that hold them."""
        held = []
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                held.append(parameter.grad)
        if held:
            torch._foreach_zero_(held)

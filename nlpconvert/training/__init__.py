"""Training: gradients by ONNX Runtime or PyTorch, verified before the first step, and what training needs around them.

What the rooms of this folder hand to each other stands here: a batch, and an engine that makes gradients of one.
`losses` puts loss and model into one module, `graph` makes its gradient graph, `ort` and `eager` are the engines,
`gradients` compares them; `batches` reads data, `world` and `ranks` know the other processes, `optimizers` and `states`
keep what is trained, `loop` is the training itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """Rows as the model reads them, and what would be right.

    `inputs`: the model's inputs by name, int64 of shape (rows, tokens), as `inputs.collate` makes them. `labels`: what
    the loss reads by name (`labels`, or `start_positions` and `end_positions`), int64; -100 is no target. `targets`:
    how many targets count in the loss, after the shift of a language model. The loss of a batch is the mean over its
    targets, so batches are put together by weighting each with `targets`.
    """

    inputs: Mapping[str, np.ndarray]
    labels: Mapping[str, np.ndarray]
    targets: int


class Engine(Protocol):
    """Makes gradients. `parameters`: what is trained, by the names of the checkpoint's module, tied ones once.

    `dropout`: as the model's config has it, or off.
    """

    name: str
    dropout: bool

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]: ...

    def step(self, batch: Batch, seed: int) -> float:
        """The mean loss over the batch's targets; each parameter's `.grad` is overwritten with that loss's gradient.

        `.grad` stays the same tensor from step to step (never None). `seed` decides dropout: the same seed, batch and
        weights give the same bits.
        """
        ...

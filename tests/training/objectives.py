"""What the tests of training share: objectives of fixtures and tiny models, and models of one odd operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch

from nlpconvert import source
from nlpconvert.models import TASKS, Facts
from nlpconvert.training import Batch, gradients
from nlpconvert.training.eager import EagerEngine
from nlpconvert.training.gradients import Verdict
from nlpconvert.training.graph import GradientGraph
from nlpconvert.training.losses import Objective, with_loss
from nlpconvert.training.ort import OrtEngine


def loaded(directory: Path) -> Objective:
    """A checkpoint with the loss of its own task."""
    model = source.load(str(directory))
    return with_loss(model.module, model.facts.task, model.facts)


def held(engine: Any) -> dict[str, np.ndarray]:
    """Copies of an engine's gradients."""
    return {name: each.grad.numpy().copy() for name, each in engine.parameters.items()}


def judged(objective: Objective, batch: Batch | None = None, **keywords: Any) -> Verdict:
    """The verdict on ONNX Runtime's gradients of one batch, the example's where none is given."""
    engine = OrtEngine(objective, threads=1, **keywords)
    return gradients.verify(engine, EagerEngine(objective), batch or objective.example())


class Odd(torch.nn.Module):
    """A classifier of tokens with one operator of choice in its middle; ids below 40, 8 wide, 4 classes."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embeddings = torch.nn.Embedding(40, 8)
        self.before = torch.nn.Linear(8, 8)
        self.after = torch.nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.before(self.embeddings(input_ids)) * attention_mask.unsqueeze(-1)
        return {"logits": self.after(self.config.middle(state))}


def odd(middle: Callable[[torch.Tensor], torch.Tensor]) -> Objective:
    """The objective of `Odd` with an operator on (batch, sequence, 8)."""
    torch.manual_seed(0)
    facts = Facts(
        model_type="odd",
        task="token-classification",
        inputs=("input_ids", "attention_mask"),
        outputs=TASKS["token-classification"].outputs,
        vocab_size=40,
        pad_id=0,
        eos_id=None,
        decoder_start_id=None,
        max_length=None,
        positions="own",
        type_vocab_size=0,
        constants=(),
        pairs=False,
    )
    return with_loss(Odd(SimpleNamespace(middle=middle)), facts.task, facts)


# -- what a hook may do to a graph -------------------------------------------------------------------------------------


def maker(graph: GradientGraph, output: str) -> onnx.NodeProto:
    """The node that makes an output of the graph."""
    return next(node for node in graph.model.graph.node if output in node.output)


def scale(parameter: str, factor: float) -> Callable[[GradientGraph], None]:
    """A hook that multiplies one parameter's gradient."""

    def hook(graph: GradientGraph) -> None:
        output = graph.gradients[parameter]
        node = maker(graph, output)
        node.output[list(node.output).index(output)] = "unscaled"
        constant = onnx.numpy_helper.from_array(np.array(factor, np.float32), "factor")
        graph.model.graph.initializer.append(constant)
        graph.model.graph.node.append(onnx.helper.make_node("Mul", ["unscaled", "factor"], [output]))

    return hook

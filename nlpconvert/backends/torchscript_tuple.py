"""Floor 2: a TorchScript file with a dict of outputs, as one with a tuple: what Triton's pytorch backend takes.

Its outputs "must be of type Tensor, List[str] or Tuple"; names come from the configuration, in the tuple's order. The
graph inside is the same one, called by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch


def write(source: Path, target: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Writes `target`: the module of `source` with its outputs in this order. RuntimeError where it cannot be."""
    inner = torch.jit.load(str(source), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    wrapper = torch.nn.Module()
    wrapper.inner = inner
    scripted = torch.jit.script(wrapper.eval())
    arguments = ", ".join(f"{name}: Tensor" for name in inputs)
    passed = ", ".join(f"{name}={name}" for name in inputs)
    given = ", ".join(f'given["{name}"]' for name in outputs)
    scripted.define(f"def forward(self, {arguments}):\n    given = self.inner({passed})\n    return ({given},)\n")
    torch.jit.save(scripted, str(target))

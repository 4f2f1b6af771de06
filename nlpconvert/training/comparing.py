"""Floor 2: an engine against PyTorch over some steps: losses, and the weights that come of them.

Both begin with the same weights, see the same rows and make the same kind of step, with dropout off: what differs then
is the engine, and rounding. Steps carry rounding on and let it grow, more so with a high learning rate; how far is
measured by PyTorch itself, which takes the same steps in float64. An optimizer such as Adam divides a gradient by
its own size, so an element whose gradient is rounding noise moves at full speed in a direction that says nothing; such
elements are counted and left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from nlpconvert.training.loop import Loop

LOSS_TOLERANCE = 1e-4
"""Largest relative difference of a step's loss, where PyTorch's own noise allows no more."""
WEIGHTS_TOLERANCE = 1e-3
"""The same of what a parameter has moved by: the difference as a share of that movement (Euclidean norms)."""
MANY = 10.0
"""So many times what PyTorch in float32 is off from float64 is allowed."""
NOISE = 1e-6
"""An element whose gradient never was more than this share of the largest of all is rounding noise, and so is one that
never was more than MANY times what its parameter's gradient is off from float64."""


@dataclass(frozen=True)
class Moved:
    """One parameter: by how much it moved in PyTorch, how far off the engine is, how far PyTorch from float64.

    `left_out` of `elements` are not looked at.
    """

    name: str
    moved: float
    difference: float
    noise: float
    left_out: int
    elements: int

    @property
    def share(self) -> float:
        """The difference as a share of the movement."""
        return self.difference / self.moved if self.moved else float("inf") if self.difference else 0.0

    @property
    def allowed(self) -> float:
        """The largest share that is right."""
        return max(WEIGHTS_TOLERANCE, MANY * self.noise / self.moved if self.moved else 0.0)


@dataclass(frozen=True)
class Comparison:
    """Losses step by step as (engine's, PyTorch's, PyTorch's in float64), and every parameter, the worst first."""

    engine: str
    losses: tuple[tuple[float, float, float], ...]
    weights: tuple[Moved, ...]

    @property
    def worst_loss(self) -> float:
        """The largest relative difference of a loss."""
        return max((_relative(ours, right) for ours, right, _ in self.losses), default=float("inf"))

    @property
    def allowed_loss(self) -> float:
        """The largest that is right."""
        return max([LOSS_TOLERANCE, *(MANY * _relative(right, exact) for _, right, exact in self.losses)])

    @property
    def agrees(self) -> bool:
        """Whether something was compared and nothing is further off than is allowed."""
        return (
            bool(self.losses and self.weights)
            and self.worst_loss <= self.allowed_loss
            and all(each.share <= each.allowed for each in self.weights)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: the losses, the five worst parameters, and the verdict."""
        return {
            "engine": self.engine,
            "agrees": self.agrees,
            "steps": len(self.losses),
            "losses": [list(each[:2]) for each in self.losses],
            "worst_loss": self.worst_loss,
            "allowed_loss": self.allowed_loss,
            "parameters": len(self.weights),
            "elements": sum(each.elements for each in self.weights),
            "left_out": sum(each.left_out for each in self.weights),
            "worst_weights": [
                {**asdict(each), "share": each.share, "allowed": each.allowed} for each in self.weights[:5]
            ],
        }


def compare(ours: Loop, theirs: Loop, exact: Loop, steps: int) -> Comparison:
    """Steps of three loops over the same data: the engine's, PyTorch's, and PyTorch's in float64.

    Their weights, which begin alike, are changed.
    """
    for loop in (ours, theirs, exact):
        loop.engine.dropout = False
    before = {name: each.detach().clone() for name, each in theirs.engine.parameters.items()}
    largest = {name: torch.zeros_like(each) for name, each in before.items()}
    losses, least = [], {}
    for step in range(steps):
        losses.append((ours.step(step)["loss"], theirs.step(step)["loss"], exact.step(step)["loss"]))
        for name, parameter in theirs.engine.parameters.items():
            right, truth = parameter.grad, exact.engine.parameters[name].grad
            assert right is not None and truth is not None
            torch.maximum(largest[name], right.abs(), out=largest[name])
            if step == 0:  # the weights are still the same
                least[name] = MANY * float((right - truth).square().mean().sqrt())
        ours.progress.advance()
    smallest = NOISE * max(float(each.max()) for each in largest.values())
    found = []
    for name, start in before.items():
        told = (largest[name] > max(smallest, least[name])) | (largest[name] == 0)
        first, right, truth = (loop.engine.parameters[name].detach()[told] for loop in (ours, theirs, exact))
        moved, difference, noise = (float(each.norm()) for each in (right - start[told], first - right, truth - right))
        found.append(Moved(name, moved, difference, noise, int((~told).sum()), start.numel()))
    found.sort(key=lambda each: -each.share / each.allowed)
    return Comparison(ours.engine.name, tuple(losses), tuple(found))


def _relative(value: float, right: float) -> float:
    return abs(value - right) / max(abs(right), 1e-12)

"""Floor 2: training a student until it answers as its reference does, on texts without labels.

The loss of a batch is how far the student's outputs are from the reference's, each by what its task judges it by, and
if it is wanted how far the layers' hidden states are. AdamW, a linear warm-up and a cosine down to nothing; a score on
other texts decides which step is kept. What the student computes is `fake_quant`'s, what a score is the caller's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from nlpconvert.errors import DriftError
from nlpconvert.models import OutputRow

Tensors = Mapping[str, torch.Tensor]

SECONDARY = 0.25
"""What an output that the task is not for weighs in the loss."""
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""
LEAST = 1e-12
"""What an energy is divided by at least."""
CLIP = 1.0
"""The gradient's norm at most, over all that is trained."""


class Student(Protocol):
    """What is trained, and the reference that it is to answer like."""

    def answers(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """The student's outputs by name, with gradients."""
        ...

    def reference(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """The reference's outputs by name."""
        ...


@dataclass(frozen=True)
class Group:
    """Parameters with a learning rate of their own."""

    parameters: Sequence[torch.nn.Parameter]
    rate: float


@dataclass(frozen=True)
class Plan:
    """How it is trained. `hidden`: what the distance of hidden states weighs; `every`: steps between two scores."""

    steps: int
    every: int
    hidden: float = 0.0


@dataclass(frozen=True)
class Scored:
    """A score at a step (smaller is better; 0 steps: before any) and the mean loss since the one before."""

    step: int
    score: float
    loss: float


@dataclass(frozen=True)
class Trained:
    """All scores, and the step whose numbers the student has now."""

    scores: tuple[Scored, ...]
    best: int
    losses: tuple[float, ...] = field(default=(), repr=False)


def train(
    student: Student,
    groups: Sequence[Group],
    batches: Iterator[Mapping[str, np.ndarray]],
    outputs: Sequence[OutputRow],
    plan: Plan,
    *,
    score: Callable[[], float],
    watched: Sequence[torch.nn.Module] = (),
    on_step: Callable[[int, float], None] | None = None,
    threads: int | None = None,
) -> Trained:
    """Trains the groups' parameters in place and leaves them as they were at the best score.

    `batches` never ends. `watched`: modules whose outputs are hidden states, (batch, sequence, hidden), for
    `plan.hidden`. Raises DriftError where the loss, or a gradient, is no number.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    parameters = [each for group in groups for each in group.parameters]
    optimizer = torch.optim.AdamW(
        [{"params": list(group.parameters), "lr": group.rate} for group in groups], betas=(0.9, 0.99), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, plan))
    best = copy.deepcopy([each.detach() for each in parameters])
    scores = [Scored(0, score(), math.nan)]
    losses: list[float] = []
    hidden = Hidden(watched if plan.hidden else ())
    with hidden.kept():
        for step in range(1, plan.steps + 1):
            batch = {name: torch.from_numpy(array).to(parameters[0].device) for name, array in next(batches).items()}
            loss = _loss(student, batch, outputs, hidden, plan.hidden)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1] + float(norm)):
                _put(parameters, best)
                what = f"loss {losses[-1]:g}, gradient {float(norm):g}"
                raise DriftError(f"the loss is no number at step {step} of {plan.steps} ({what}): try a smaller --rate")
            optimizer.step()
            schedule.step()
            if on_step is not None:
                on_step(step, losses[-1])
            if step % plan.every == 0 or step == plan.steps:
                scores.append(Scored(step, score(), float(np.mean(losses[scores[-1].step :]))))
                if scores[-1].score < min(each.score for each in scores[:-1]):
                    best = copy.deepcopy([each.detach() for each in parameters])
    _put(parameters, best)
    return Trained(tuple(scores), min(scores, key=lambda each: each.score).step, tuple(losses))


def _rate(step: int, plan: Plan) -> float:
    """Share of the learning rate at a step that begins (from 0)."""
    warm = max(int(WARM_UP * plan.steps), 1)
    if step < warm:
        return (step + 1) / warm
    done = min((step - warm) / max(plan.steps - warm, 1), 1.0)
    return (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def _put(parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


# -- the loss ----------------------------------------------------------------------------------------------------------


def _loss(
    student: Student, batch: Tensors, outputs: Sequence[OutputRow], hidden: Hidden, weight: float
) -> torch.Tensor:
    hidden.take()  # what a score left there
    wanted = student.reference(batch)
    states = hidden.take()
    given = student.answers(batch)
    total = torch.zeros((), device=next(iter(given.values())).device)
    for row in outputs:
        mask = scored(row, batch)
        far = distance(row, wanted[row.name], given[row.name], mask).mean()
        total = total + (SECONDARY if row.secondary else 1.0) * far
    if states:
        pairs = zip(states, hidden.take(), strict=True)
        far = torch.stack([_relative(before, after, batch) for before, after in pairs]).mean()
        total = total + weight * far
    return total


def scored(row: OutputRow, batch: Tensors) -> torch.Tensor | None:
    """Where an output stands on real tokens, bool (batch, its sequence axis); None where it has no such axis."""
    names = {"sequence": "attention_mask", "decoder_sequence": "decoder_attention_mask"}
    masks = [batch[names[axis]] != 0 for axis in row.axes if axis in names and names[axis] in batch]
    return masks[0] if masks else None


def distance(
    row: OutputRow, reference: torch.Tensor, candidate: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """(vectors,): how far each of an output's vectors on real tokens is from the reference's, by what it is judged by.

    Embeddings: 1 - cosine and half the relative squared error, which are alike where both are small. Distributions and
    positions: KL(reference || candidate) in nats. Decisions: that and half the relative squared error of the logits,
    whose margins are what is decided by. Scores: the squared error, over the reference's.
    """
    if row.measure == "position":
        if mask is not None:
            lowest = torch.finfo(reference.dtype).min
            reference, candidate = (each.masked_fill(~mask, lowest) for each in (reference, candidate))
    elif mask is not None and mask.shape == reference.shape[:2]:
        reference, candidate = reference[mask], candidate[mask]
    before, after = (each.reshape(-1, each.shape[-1]) for each in (reference, candidate))
    if row.measure == "embedding":
        return 1 - torch.nn.functional.cosine_similarity(before, after, dim=-1) + _energy(before, after) / 2
    if row.measure in ("distribution", "position"):
        return _divergence(before, after)
    if row.measure == "decisions":
        centered = (each - each.mean(-1, keepdim=True) for each in (before, after))
        return _divergence(before, after) + _energy(*centered) / 2
    return (after - before).square().sum(-1) / before.square().mean().clamp_min(LEAST)


def _energy(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Squared error of each vector over the reference's."""
    return (after - before).square().sum(-1) / before.square().sum(-1).clamp_min(LEAST)


def _divergence(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    wanted = torch.log_softmax(before, dim=-1)
    return (wanted.exp() * (wanted - torch.log_softmax(after, dim=-1))).sum(-1)


def _relative(before: torch.Tensor, after: torch.Tensor, batch: Tensors) -> torch.Tensor:
    """Squared error of hidden states on real tokens over the reference's spread."""
    mask = batch.get("attention_mask")
    if mask is not None and mask.shape == before.shape[:2]:
        before, after = before[mask != 0], after[mask != 0]
    spread = (before - before.mean(0, keepdim=True)).square().sum().clamp_min(LEAST)
    return (after - before).square().sum() / spread


class Hidden:
    """The outputs of watched modules, pass by pass."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = modules
        self._states: list[torch.Tensor] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While it lasts, what the modules give is kept."""
        hooks = [module.register_forward_hook(self._keep) for module in self._modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _keep(self, module: torch.nn.Module, inputs: object, output: object) -> None:
        state = output[0] if isinstance(output, tuple) else output
        if isinstance(state, torch.Tensor):
            self._states.append(state)

    def take(self) -> list[torch.Tensor]:
        """What was kept since the last time."""
        states, self._states = self._states, []
        return states


def blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """A transformer's layers: the members of its longest list of modules that are all of one class."""
    lists = [each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each) > 1]
    alike = [list(each) for each in lists if len({type(member) for member in each}) == 1]
    return max(alike, key=len, default=[])

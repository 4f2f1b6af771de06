"""Floor 2: an engine's gradients against autograd's, every parameter, before the first step.

The truth is autograd in float64. How far autograd in float32 is from it is the noise, and an engine is right that is
not MANY times as far. A parameter's error is the Euclidean norm of the difference: one wrong element counts with its
full size, wherever it is. Per parameter

    allowed = MANY * max(noise of the parameter, usual * its norm)
    allowed = MANY * max(noise of the parameter, EPS * largest * sqrt(its elements))    where it is not resolved

`usual` is the median of noise / norm over the parameters (never below EPS = 2^-23, float32's spacing at 1): the few
elements of a bias may happen to be rounded well. Not resolved is a gradient a hundredth of which or more is noise in
autograd itself: its truth is 0, such as the bias of an attention's keys, which softmax takes no notice of, and what is
found is left over of terms as large as any. `largest` is the root mean square of the elements where that is largest.

MANY is measured: over the fixtures and tiny models of 22 architectures, 32 batches each of 1 to 16 rows, ONNX Runtime
was never beyond 7 times. What is refused is then some 3e-5 of a gradient; the wrong ones that were met are 1e-1.
A gradient that is smaller than what is allowed is told from nothing; `weak` names those.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nlpconvert.errors import DriftError
from nlpconvert.training import Batch, Engine
from nlpconvert.training.eager import EagerEngine
from nlpconvert.training.losses import Objective

EPS = 2.0**-23
MANY = 30.0
RESOLVED = 0.01
LOSS = "loss"


@dataclass(frozen=True)
class Row:
    """One parameter (or the loss): Euclidean norms of its true gradient, of the engine's error and of the noise.

    `at`, `found` and `right`: the element that is furthest off, and both values. `problem`: what is wrong, "" for
    nothing.
    """

    name: str
    norm: float
    error: float
    noise: float
    allowed: float
    at: tuple[int, ...]
    found: float
    right: float
    problem: str = ""

    @property
    def off(self) -> float:
        """The error as a share of the gradient's size."""
        return self.error / self.norm if self.norm else math.inf if self.error else 0.0


@dataclass(frozen=True)
class Verdict:
    """What was found, the row that is furthest beyond what is allowed first. `truth`: what it was held against."""

    engine: str
    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    truth: str

    @property
    def agrees(self) -> bool:
        """Whether something was compared and all of it is right."""
        return len(self.rows) > 1 and not self.problems and not any(row.problem for row in self.rows)

    @property
    def weak(self) -> tuple[str, ...]:
        """Parameters whose gradient on this batch is smaller than what is allowed."""
        return tuple(row.name for row in self.rows if row.norm <= row.allowed)

    @property
    def times(self) -> float:
        """The worst error, in multiples of the noise that MANY stands for."""
        return max((row.error / row.allowed * MANY for row in self.rows if row.allowed), default=0.0)

    def lines(self, most: int = 5) -> list[str]:
        """The verdict in words: one line, then the worst parameters where it does not agree."""
        if self.agrees:
            return [
                f"gradients of {self.engine} agree with autograd's: {len(self.rows) - 1} parameters, the worst error "
                f"{self.times:.2g} times the noise of float32 (allowed: {MANY:g} times)"
            ]
        wrong = [row for row in self.rows if row.problem]
        said = [f"{row.name}: {row.problem}" for row in wrong[:most]]
        rest = [f"and {len(wrong) - most} parameters more"] if len(wrong) > most else []
        return [f"gradients of {self.engine} are wrong", *self.problems, *said, *rest]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: the verdict, and the worst row."""
        worst = self.rows[0] if self.rows else None
        return {
            "engine": self.engine,
            "agrees": self.agrees,
            "parameters": len(self.rows) - 1,
            "truth": self.truth,
            "times_noise": self.times,
            "allowed_times": MANY,
            "worst": None if worst is None else worst.name,
            "worst_off": None if worst is None or not math.isfinite(worst.off) else worst.off,
            "weak": list(self.weak),
            "problems": [*self.problems, *(f"{row.name}: {row.problem}" for row in self.rows if row.problem)],
        }


def verify(engine: Engine, reference: EagerEngine, batch: Batch) -> Verdict:
    """The engine's gradients of one batch against autograd's, with dropout off in both.

    Weights are not changed; `.grad` holds what the engine made of the batch afterwards. Takes the memory of the weights
    three times besides.
    """
    if batch.targets == 0:
        return Verdict(engine.name, (), ("the batch has no targets, so that nothing was compared",), "")
    near, near_loss = _float32(reference, batch)
    before = _checksums(reference.parameters)
    problems = []
    for parameter in engine.parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.fill_(math.nan)  # what the engine does not write, or adds to, shows
    loss = _without_dropout(engine, batch)
    changed = [name for name, each in _checksums(reference.parameters).items() if each != before[name]]
    problems += [f"the engine's step changed the weights of {name}" for name in changed]
    missing = sorted(set(reference.parameters) - set(engine.parameters))
    problems += [f"{name} is trained, and the engine has no gradient for it" for name in missing]
    extra = sorted(set(engine.parameters) - set(reference.parameters))
    problems += [f"the engine trains {name}, which is not trained by the reference" for name in extra]

    rows: dict[str, Row] = {}

    def compare(name: str, right: torch.Tensor) -> None:
        found = engine.parameters[name].grad if name in engine.parameters else None
        if found is not None:
            rows[name] = _row(name, found, right, near[name])

    right_loss, truth = _truth(reference.objective, batch, compare)
    rows[LOSS] = _row(LOSS, *(torch.tensor(value, dtype=torch.float64) for value in (loss, right_loss, near_loss)))
    problems += [
        f"autograd itself has no gradient for {name}" for name in near if name not in rows | dict.fromkeys(missing)
    ]
    judged = _judged(rows, {name: each.numel() for name, each in near.items()})
    return Verdict(engine.name, tuple(judged), tuple(problems), truth)


def require(verdict: Verdict) -> None:
    """Raises DriftError (exit 1) where an engine's gradients are wrong: which, how far off, and what to do."""
    if verdict.agrees:
        return
    first, *rest = verdict.lines()
    what = rest[0] if rest else "nothing was compared"
    others = sum(bool(row.problem) for row in verdict.rows) + len(verdict.problems) - 1
    more = f" (and {others} more)" if others > 0 else ""
    advice = "train with --engine torch" if verdict.engine != EagerEngine.name else "look at the data and the weights"
    raise DriftError(f"{first}: {what}{more}; nothing was trained: {advice}", detail="\n".join(rest))


# -- the three sides ---------------------------------------------------------------------------------------------------


def _without_dropout(engine: Engine, batch: Batch) -> float:
    was = engine.dropout
    engine.dropout = False
    try:
        return engine.step(batch, 0)
    finally:
        engine.dropout = was


def _float32(reference: EagerEngine, batch: Batch) -> tuple[dict[str, torch.Tensor], float]:
    """Autograd's own gradients, as copies, and its loss."""
    loss = _without_dropout(reference, batch)
    return {n: each.grad.detach().clone() for n, each in reference.parameters.items() if each.grad is not None}, loss


def _truth(objective: Objective, batch: Batch, seen: Callable[[str, torch.Tensor], None]) -> tuple[float, str]:
    """The loss in float64, and what it is; each parameter's gradient goes to `seen` and is let go of.

    A model that cannot be computed in float64 is asked in float32 with the rows in reverse order.
    """
    try:
        return _differentiate(objective, objective.tensors(batch), torch.float64, seen), "autograd in float64"
    except RuntimeError:  # a layer that insists on float32
        backwards = tuple(each.flip(0) for each in objective.tensors(batch))
        return _differentiate(objective, backwards, torch.float32, seen), "autograd in float32, rows in reverse order"


def _differentiate(
    objective: Objective,
    tensors: tuple[torch.Tensor, ...],
    kind: torch.dtype,
    seen: Callable[[str, torch.Tensor], None],
) -> float:
    objective.eval()
    trained = objective.parameters_trained
    names = {id(parameter): name for name, parameter in trained.items()}
    state: dict[str, torch.Tensor] = {}
    for name, parameter in objective.named_parameters():
        state[name] = parameter.detach().to(kind, copy=True) if parameter.is_floating_point() else parameter
        if id(parameter) in names:
            leaf: Any = state[name].requires_grad_()
            leaf.register_post_accumulate_grad_hook(_letting_go(names[id(parameter)], seen))
    for name, buffer in objective.named_buffers():
        state[name] = buffer.to(kind) if buffer.is_floating_point() else buffer
    with torch.enable_grad():
        loss = torch.func.functional_call(objective, state, tensors)[0]
    loss.backward()
    return float(loss.detach())


def _letting_go(name: str, seen: Callable[[str, torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        seen(name, parameter.grad)
        parameter.grad = None

    return hook


def _checksums(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, int]:
    """A sum over the bits of each parameter."""
    return {name: int(each.detach().view(torch.int32).sum()) for name, each in parameters.items()}


# -- what they differ by -----------------------------------------------------------------------------------------------


def _row(name: str, found: torch.Tensor, right: torch.Tensor, near: torch.Tensor) -> Row:
    """The numbers of one parameter; what is allowed comes later, when those of all are there."""
    found, near = found.detach().to(right), near.to(right)
    difference = (found - right).abs()
    # A value that is none is the worst there is.
    worst = int(difference.nan_to_num(math.inf, math.inf).argmax())
    problem = ""
    if not bool(right.isfinite().all()):
        problem = "autograd itself gives values that are not finite"
    elif not bool(found.isfinite().all()):
        count = int((~found.isfinite()).sum())
        problem = f"{count:,} of {found.numel():,} elements are not finite"
    return Row(
        name,
        norm=float(right.norm()),
        error=float(difference.norm()),
        noise=float((near - right).norm()),
        allowed=0.0,
        at=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), found.shape)),
        found=float(found.reshape(-1)[worst]),
        right=float(right.reshape(-1)[worst]),
        problem=problem or ("stays 0" if bool(right.any()) and not bool(found.any()) else ""),
    )


def _judged(rows: Mapping[str, Row], sizes: Mapping[str, int]) -> list[Row]:
    """Rows with what is allowed and what is wrong, the furthest beyond it first."""
    gradients = {name: row for name, row in rows.items() if name != LOSS and math.isfinite(row.norm)}
    largest = max((row.norm / math.sqrt(sizes[name]) for name, row in gradients.items()), default=0.0)
    resolved = {name for name, row in gradients.items() if row.noise < RESOLVED * row.norm} | {LOSS}
    shares = [row.noise / row.norm for name, row in gradients.items() if name in resolved]
    usual = max(statistics.median(shares) if shares else 0.0, EPS)
    judged = []
    for name, row in rows.items():
        floor = usual * row.norm if name in resolved else EPS * largest * math.sqrt(sizes[name])
        allowed = MANY * max(row.noise if math.isfinite(row.noise) else 0.0, floor)
        problem = row.problem
        if row.error <= allowed and problem == "stays 0":
            problem = ""  # so is its true gradient, as far as float32 tells
        elif not problem and not row.error <= allowed:
            times = row.error / allowed * MANY if allowed else math.inf
            problem = (
                f"off by {row.off:.2%} of its size, {times:.2g} times the noise (allowed: {MANY:g}); worst at "
                f"{list(row.at)}: {row.found:.4g}, right is {row.right:.4g}"
            )
        judged.append(Row(**{**vars(row), "allowed": allowed, "problem": problem}))
    return sorted(judged, key=lambda row: (not row.problem, -_beyond(row)))


def _beyond(row: Row) -> float:
    if not math.isfinite(row.error):
        return math.inf
    return row.error / row.allowed if row.allowed else math.inf if row.error else 0.0

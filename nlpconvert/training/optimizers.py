"""Floor 2: what is done with gradients: groups with and without decay, optimizers, the learning rate, clipping.

Gradients come from an engine, already summed over ranks; here a step is made of them. The optimizers are PyTorch's but
for LAMB, which it does not have.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nlpconvert.errors import UsageError

_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names, in lower case, of what does not decay: the patterns of transformers' Trainer."""


def decays(module: torch.nn.Module, names: Iterable[str]) -> dict[str, bool]:
    """For each parameter of a module whether it decays: not biases, not what normalizes; embeddings do.

    As `Trainer.get_decay_parameter_names` of transformers says, by the names above and by the class of the layer
    (GPT-2 calls its layer norms `ln_1`).
    """
    norms = {name for name, layer in module.named_modules() if isinstance(layer, torch.nn.LayerNorm)}
    return {name: name.rpartition(".")[0] not in norms and not _NO_DECAY.search(name.lower()) for name in names}


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's direction, scaled for each tensor by the norm of its weights over the norm of its step.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2020), algorithm 2, with
    Adam's bias correction: r = m' / (sqrt(v') + eps), u = r + decay * w, w -= lr * |w| / |u| * u; the ratio is 1 where
    one of the norms is 0. Norms are not clamped.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step from the parameters' `.grad`."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["step"] += 1
                count, mean, square = int(state["step"]), state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(weight.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
                update = square.div(1 - beta2**count).sqrt_().add_(group["eps"])
                update = mean.div(1 - beta1**count).div_(update).add_(weight, alpha=group["weight_decay"])
                size, length = float(weight.norm()), float(update.norm())
                weight.add_(update, alpha=-group["lr"] * (size / length if size > 0 and length > 0 else 1.0))
        return loss


def _adamw(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.999), eps=1e-8, fused=True)


def _lamb(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return Lamb(groups, lr=lr)


def _sgd(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=lr)


@dataclass(frozen=True)
class OptimizerRow:
    """One row: an optimizer, and the learning rate that it is started with where none is given."""

    name: str
    rate: float
    make: Callable[[list[dict[str, Any]], float], torch.optim.Optimizer]


OPTIMIZERS: dict[str, OptimizerRow] = {
    row.name: row
    for row in (
        OptimizerRow("adamw", 5e-5, _adamw),
        OptimizerRow("lamb", 1e-3, _lamb),
        OptimizerRow("sgd", 1e-2, _sgd),
    )
}


def named(name: str) -> OptimizerRow:
    """The row of an optimizer. UsageError for a name that is none."""
    if name not in OPTIMIZERS:
        raise UsageError(f"--optimizer {name}: it is one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def make(
    name: str, module: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """The optimizer of a name over an engine's parameters, in two groups. UsageError for a name that is none."""
    row = named(name)
    decaying = decays(module, parameters)
    groups: list[dict[str, Any]] = [
        {"params": [each for key, each in parameters.items() if decaying[key] is wanted], "weight_decay": decay}
        for wanted, decay in ((True, weight_decay), (False, 0.0))
    ]
    return row.make([group for group in groups if group["params"]], lr)


def warmup_steps(warmup: float, steps: int) -> int:
    """Steps of warm-up: `warmup` itself, or that share of all steps where it is below 1."""
    return math.ceil(warmup * steps) if warmup < 1 else int(warmup)


def factor(step: int, steps: int, warmup: int) -> float:
    """What the learning rate is multiplied by at a step (from 0) of `steps`: up from 0 during `warmup`, then down to 0.

    As `transformers.get_linear_schedule_with_warmup` has it.
    """
    if step < warmup:
        return step / max(1, warmup)
    return max(0.0, (steps - step) / max(1, steps - warmup))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(parameters: Sequence[torch.nn.Parameter], most: float) -> float:
    """The norm of all gradients together; where it is more than `most` (0: no limit) they are scaled to that, in place.

    A norm that is not finite is told and nothing is changed.
    """
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = float(torch.stack(torch._foreach_norm(gradients)).norm()) if gradients else 0.0
    if most and math.isfinite(norm) and norm > most:
        torch._foreach_mul_(gradients, most / norm)
    return norm

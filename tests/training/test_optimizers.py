"""Groups as transformers' Trainer has them, LAMB against its formula, the schedule, clipping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.trainer_pt_utils import get_parameter_names

from nlpconvert import source
from nlpconvert.errors import UsageError
from nlpconvert.training import optimizers
from nlpconvert.training.optimizers import Lamb, clip, factor, warmup_steps
from tests.training import running

TRAINER = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@pytest.mark.parametrize("fixture", ["bert-text-classifier", "gpt2-lm", "t5-seq2seq", "llama-lm"])
def test_what_decays_is_what_decays_in_transformers(fixture: str) -> None:
    """Embeddings decay; biases and layer norms do not, whatever they are called."""
    module = source.load(str(running.FIXTURES / fixture)).module
    names = [name for name, _ in module.named_parameters()]
    theirs = set(get_parameter_names(module, [torch.nn.LayerNorm], TRAINER)) & set(names)
    assert {name for name, decays in optimizers.decays(module, names).items() if decays} == theirs
    assert any("embed" in name or "wte" in name or "shared" in name for name in theirs)
    assert not any(name.endswith("bias") for name in theirs)


def test_groups_hold_every_parameter_once() -> None:
    module = source.load(str(running.FIXTURES / "gpt2-lm")).module
    parameters = dict(module.named_parameters())
    made = optimizers.make("adamw", module, parameters, 1e-3, 0.1)
    held = [id(each) for group in made.param_groups for each in group["params"]]
    assert sorted(held) == sorted(id(each) for each in parameters.values())
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    with pytest.raises(UsageError, match="it is one of adamw, lamb, sgd"):
        optimizers.make("adam", module, parameters, 1e-3, 0.1)


# -- LAMB --------------------------------------------------------------------------------------------------------------


class Formula:
    """Algorithm 2 of You et al. (2020) with bias correction, in float64 numpy, tensor by tensor."""

    def __init__(self, lr: float, decay: float, eps: float = 1e-6) -> None:
        self.lr, self.decay, self.eps, self.count = lr, decay, eps, 0
        self.mean: dict[str, np.ndarray] = {}
        self.square: dict[str, np.ndarray] = {}

    def step(self, weights: dict[str, np.ndarray], gradients: Mapping[str, np.ndarray], plain: set[str]) -> None:
        self.count += 1
        for name, gradient in gradients.items():
            mean = 0.9 * self.mean.get(name, 0.0) + 0.1 * gradient
            square = 0.999 * self.square.get(name, 0.0) + 0.001 * gradient**2
            self.mean[name], self.square[name] = mean, square
            ratio = mean / (1 - 0.9**self.count) / (np.sqrt(square / (1 - 0.999**self.count)) + self.eps)
            update = ratio + (0.0 if name in plain else self.decay) * weights[name]
            size, length = np.linalg.norm(weights[name]), np.linalg.norm(update)
            trust = size / length if size > 0 and length > 0 else 1.0
            weights[name] = weights[name] - self.lr * trust * update


def test_lamb_on_a_quadratic() -> None:
    """0.5 |A w - b|^2, the gradient known; one tensor begins at 0, where the ratio is 1."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(6, 5)), rng.normal(size=6)
    weights = {"w": rng.normal(size=5), "zero": np.zeros(6)}
    ours = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in weights.items()}
    made = Lamb([{"params": list(ours.values())}], lr=0.02, weight_decay=0.1)
    formula = Formula(0.02, 0.1)
    losses = []
    for _ in range(50):
        residual = a @ weights["w"] + weights["zero"] - b
        formula.step(weights, {"w": a.T @ residual, "zero": residual}, set())
        made.zero_grad()
        loss = 0.5 * (torch.tensor(a) @ ours["w"] + ours["zero"] - torch.tensor(b)).square().sum()
        loss.backward()
        losses.append(float(loss.detach()))
        made.step()
    for name, value in weights.items():
        assert np.allclose(ours[name].detach().numpy(), value, rtol=1e-10, atol=1e-12), name
    assert losses[-1] < 0.5 * losses[0]


def test_lamb_on_bert(tmp_path: Path) -> None:
    """The fixture's own gradients through the formula in float64, tensor by tensor, ten steps."""
    path = running.rows(running.CLASSIFIER, tmp_path)
    parts = running.build(running.CLASSIFIER, path, optimizer="lamb", lr=2e-3, clip=0.0, steps=10)
    parameters = parts.loop.engine.parameters
    decaying = optimizers.decays(parts.loaded.module, parameters)
    weights = {name: each.detach().double().numpy().copy() for name, each in parameters.items()}
    before = {name: value.copy() for name, value in weights.items()}
    formula = Formula(0.0, 0.01)
    for step in range(10):
        line = parts.loop.step(step)
        formula.lr = line["learning_rate"]
        gradients = {n: each.grad.double().numpy().copy() for n, each in parameters.items() if each.grad is not None}
        formula.step(weights, gradients, {name for name, decays in decaying.items() if not decays})
    for name, each in parameters.items():
        moved = np.linalg.norm(weights[name] - before[name])
        off = np.linalg.norm(each.detach().double().numpy() - weights[name])
        assert moved > 0 and off <= 1e-4 * moved + 1e-7 * np.linalg.norm(weights[name]), (name, off, moved)


# -- the rate, and clipping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_the_schedule_is_transformers(warmup: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([weight], lr=1.0)
    schedule = transformers.get_linear_schedule_with_warmup(theirs, warmup, 12)
    for step in range(12):
        assert factor(step, 12, warmup) == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)
        theirs.step()
        schedule.step()


def test_warmup_is_steps_or_a_share() -> None:
    assert [warmup_steps(each, 200) for each in (0, 0.06, 10, 1)] == [0, 12, 10, 1]


def test_clipping_scales_all_by_one_number() -> None:
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    for weight, value in zip(weights, (3.0, 4.0), strict=True):
        weight.grad = torch.zeros_like(weight)
        weight.grad.view(-1)[0] = value
    held = [weight.grad for weight in weights]
    assert clip(weights, 0.0) == 5.0 and float(weights[0].grad[0]) == 3.0  # type: ignore[index]
    assert clip(weights, 1.0) == 5.0
    assert [float(weight.grad.view(-1)[0]) for weight in weights] == pytest.approx([0.6, 0.8])  # type: ignore[union-attr]
    assert all(weight.grad is each for weight, each in zip(weights, held, strict=True)), "the engine's own tensors"
    weights[0].grad[0] = math.inf  # type: ignore[index]
    assert clip(weights, 1.0) == math.inf and float(weights[1].grad.view(-1)[0]) == pytest.approx(0.8)  # type: ignore[union-attr]

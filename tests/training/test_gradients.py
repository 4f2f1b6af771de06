"""training/gradients: what is right agrees for every architecture; what is wrong is named with how far it is off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nlpconvert.errors import ConversionError, DriftError
from nlpconvert.training import Batch, gradients
from nlpconvert.training.eager import EagerEngine
from nlpconvert.training.gradients import MANY, Row, Verdict
from nlpconvert.training.losses import Objective
from tests import tiny
from tests.conftest import FIXTURES
from tests.training.objectives import judged, loaded, odd

QUICK = ("albert", "bart", "mpnet", "opt", "gpt_neo")
SLOW = (
    *("distilbert", "roberta", "electra", "deberta-v2", "modernbert", "camembert", "big_bird", "qwen3", "gemma3"),
    *("bloom", "gpt_neox", "marian", "pegasus"),
)
REFUSED = {
    "xlnet": r"has no gradient for Einsum \(at /model/transformer/layer.0/rel_attn/Einsum and 19 more\)",
    "m2m_100": r"skips layers at random in training \(encoder_layerdrop 0.05",
}


def of(name: str, directory: Path) -> Objective:
    row = tiny.ROWS[name]
    return loaded(tiny.save(replace(row, model=row.model.replace("MPNetModel", "MPNetForMaskedLM")), directory / name))


# -- no false alarm ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIXTURES)
def test_the_fixtures_agree_at_other_shapes_than_the_traced_one(fixtures_dir: Path, name: str) -> None:
    objective = loaded(fixtures_dir / name)
    from nlpconvert.training.ort import OrtEngine

    engine, reference = OrtEngine(objective, threads=2), EagerEngine(objective)
    for shape in ({}, {"rows": 1, "tokens": 20, "targets": 3}, {"rows": 8, "tokens": 13, "targets": 11}):
        verdict = gradients.verify(engine, reference, objective.example(**shape))
        assert verdict.agrees, verdict.lines()
        assert len(verdict.rows) == len(objective.parameters_trained) + 1
        assert verdict.truth == "autograd in float64"
        gradients.require(verdict)


@pytest.mark.parametrize("name", QUICK)
def test_more_architectures_agree(tmp_path: Path, name: str) -> None:
    _agrees(of(name, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_yet_more_architectures_agree(tmp_path: Path, name: str) -> None:
    _agrees(of(name, tmp_path))


def _agrees(objective: Objective) -> None:
    verdict = judged(objective, objective.example(rows=4, tokens=12, targets=9, seed=1))
    assert verdict.agrees, verdict.lines()
    assert 0 < verdict.times < MANY


@pytest.mark.parametrize("name", REFUSED)
def test_architectures_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConversionError, match=REFUSED[name]):
        judged(of(name, tmp_path))


def test_a_true_gradient_of_0_is_no_false_alarm_and_is_said(classifier: Path) -> None:
    verdict = judged(loaded(classifier))
    assert verdict.agrees
    assert [name for name in verdict.weak if not name.endswith("key.bias")] == []
    assert len(verdict.weak) == 2
    noise = next(row for row in verdict.rows if row.name == verdict.weak[0])
    assert noise.off > 0.1  # all noise, in both


def test_autograd_itself_is_an_engine_to_verify(classifier: Path) -> None:
    objective = loaded(classifier)
    verdict = gradients.verify(EagerEngine(objective), EagerEngine(objective), objective.example())
    assert verdict.agrees
    assert verdict.times <= 1.001  # its error is the noise


def test_the_engine_is_left_as_it_was(classifier: Path) -> None:
    objective = loaded(classifier)
    engine = EagerEngine(objective)
    before = {name: each.detach().clone() for name, each in engine.parameters.items()}
    gradients.verify(engine, EagerEngine(objective), objective.example())
    assert engine.dropout
    assert all(torch.equal(each, before[name]) for name, each in engine.parameters.items())


def test_a_model_that_insists_on_float32_is_judged_all_the_same() -> None:
    fixed = torch.nn.Linear(8, 8).requires_grad_(False)
    verdict = judged(odd(lambda state: fixed(state)))
    assert verdict.agrees, verdict.lines()
    assert verdict.truth == "autograd in float32, rows in reverse order"


# -- what is wrong -----------------------------------------------------------------------------------------------------


class Wrong:
    """Autograd with one thing wrong, done to the gradients after the step."""

    name = "wrong"

    def __init__(self, objective: Objective, spoil: Any = lambda _: None, factor: float = 1.0) -> None:
        self.inner, self.spoil, self.factor = EagerEngine(objective), spoil, factor
        self.dropout = True

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        return self.inner.parameters

    def step(self, batch: Batch, seed: int) -> float:
        self.inner.dropout = self.dropout
        loss = self.inner.step(batch, seed)
        self.spoil(self.parameters)
        return loss * self.factor


def spoiled(objective: Objective, *wrong: Any, **more: float) -> Verdict:
    return gradients.verify(Wrong(objective, *wrong, **more), EagerEngine(objective), objective.example())


QUERY = "bert.encoder.layer.1.attention.self.query.weight"


@pytest.fixture(scope="module")
def objective(classifier: Path) -> Objective:
    return loaded(classifier)


def grad(parameters: Mapping[str, torch.nn.Parameter], name: str) -> torch.Tensor:
    found = parameters[name].grad
    assert found is not None
    return found


def test_a_gradient_that_is_scaled(objective: Objective) -> None:
    verdict = spoiled(objective, lambda all_: grad(all_, QUERY).mul_(1.001))
    assert [row.name for row in verdict.rows if row.problem] == [QUERY]
    with pytest.raises(DriftError) as raised:
        gradients.require(verdict)
    line = str(raised.value)
    assert line.startswith(f"gradients of wrong are wrong: {QUERY}: off by 0.10% of its size, ")
    assert "times the noise (allowed: 30); worst at [" in line
    assert line.endswith("nothing was trained: train with --engine torch")
    assert raised.value.exit_code == 1


def test_one_wrong_element(objective: Objective) -> None:
    def spoil(parameters: Mapping[str, torch.nn.Parameter]) -> None:
        grad(parameters, QUERY)[3, 5] += 1e-3 * grad(parameters, QUERY).norm()

    row = spoiled(objective, spoil).rows[0]
    assert (row.name, row.at) == (QUERY, (3, 5))


def test_values_that_are_none(objective: Objective) -> None:
    verdict = spoiled(objective, lambda all_: grad(all_, QUERY)[0].fill_(np.nan))
    assert "32 of 1,024 elements are not finite" in verdict.rows[0].problem
    assert verdict.rows[0].at == (0, 0)
    assert verdict.to_dict()["worst_off"] is None


def test_a_parameter_that_nothing_arrives_at(objective: Objective) -> None:
    verdict = spoiled(objective, lambda all_: grad(all_, QUERY).zero_())
    assert (verdict.rows[0].name, verdict.rows[0].problem) == (QUERY, "stays 0")


def test_a_gradient_that_is_not_written(objective: Objective) -> None:
    class Adds(Wrong):
        def step(self, batch: Batch, seed: int) -> float:
            before = grad(self.parameters, QUERY).clone()
            loss = super().step(batch, seed)
            grad(self.parameters, QUERY).add_(before)
            return loss

    verdict = gradients.verify(Adds(objective), EagerEngine(objective), objective.example())
    assert verdict.rows[0].name == QUERY
    assert "not finite" in verdict.rows[0].problem


def test_a_wrong_loss(objective: Objective) -> None:
    verdict = spoiled(objective, factor=1.001)
    assert verdict.rows[0].name == "loss"
    assert "off by 0.10% of its size" in verdict.rows[0].problem
    assert not verdict.agrees


def test_a_parameter_that_the_engine_does_not_know(objective: Objective) -> None:
    class Fewer(Wrong):
        @property
        def parameters(self) -> Mapping[str, torch.nn.Parameter]:
            return {name: each for name, each in self.inner.parameters.items() if name != QUERY}

    verdict = gradients.verify(Fewer(objective), EagerEngine(objective), objective.example())
    assert verdict.problems == (f"{QUERY} is trained, and the engine has no gradient for it",)
    with pytest.raises(DriftError, match=f"{QUERY} is trained, and the engine has no gradient for it; nothing was"):
        gradients.require(verdict)


def test_a_step_that_changes_weights(objective: Objective) -> None:
    def spoil(parameters: Mapping[str, torch.nn.Parameter]) -> None:
        with torch.no_grad():
            parameters[QUERY][0, 0] *= 1 + 1e-7

    before = objective.parameters_trained[QUERY].detach().clone()
    try:
        verdict = spoiled(objective, spoil)
    finally:
        objective.parameters_trained[QUERY].data.copy_(before)
    assert verdict.problems == (f"the engine's step changed the weights of {QUERY}",)


def test_nothing_compared_is_no_agreement(objective: Objective) -> None:
    batch = replace(objective.example(), targets=0)
    verdict = gradients.verify(EagerEngine(objective), EagerEngine(objective), batch)
    assert not verdict.agrees
    with pytest.raises(DriftError, match="the batch has no targets, so that nothing was compared"):
        gradients.require(verdict)
    assert not Verdict("ort", (), (), "").agrees


def test_the_words_of_a_verdict() -> None:
    right = Row("a", norm=1.0, error=2e-7, noise=1e-7, allowed=3e-6, at=(0,), found=1.0, right=1.0)
    verdict = Verdict("ort", (right, replace(right, name="loss")), (), "autograd in float64")
    assert verdict.lines() == [
        "gradients of ort agree with autograd's: 1 parameters, the worst error 2 times the noise of float32 "
        "(allowed: 30 times)"
    ]
    assert verdict.to_dict() == {
        "engine": "ort",
        "agrees": True,
        "parameters": 1,
        "truth": "autograd in float64",
        "times_noise": pytest.approx(2.0),
        "allowed_times": 30.0,
        "worst": "a",
        "worst_off": 2e-7,
        "weak": [],
        "problems": [],
    }
    wrong = [replace(right, name=f"p{number}", problem="stays 0") for number in range(7)]
    assert replace(verdict, rows=tuple(wrong)).lines()[-1] == "and 2 parameters more"

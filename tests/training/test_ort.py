"""training/ort: steps of ONNX Runtime on PyTorch's own tensors: repeatable, equal to eager's, without a copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.training import Batch, Engine
from nlpconvert.training.eager import EagerEngine
from nlpconvert.training.losses import Objective
from nlpconvert.training.ort import OrtEngine
from tests.training.objectives import held, loaded

TRAINED = ("bert-text-classifier", "gpt2-lm", "t5-seq2seq")


@pytest.fixture(scope="module")
def objective(classifier: Path) -> Objective:
    return loaded(classifier)


@pytest.fixture(scope="module")
def engine(objective: Objective) -> OrtEngine:
    return OrtEngine(objective, threads=2)


def batches(objective: Objective, count: int) -> list[Batch]:
    shapes = [(8, 12, 9), (5, 17, 4), (8, 9, 12), (3, 12, 9)]
    return [
        objective.example(rows, tokens, targets, seed=number)
        for number, (rows, tokens, targets) in zip(range(count), shapes * count, strict=False)
    ]


def trained(engine: Engine, data: list[Batch], steps: int, rate: float = 1e-3) -> list[float]:
    """The losses of some steps of AdamW."""
    optimizer = torch.optim.AdamW(engine.parameters.values(), lr=rate, weight_decay=0.01)
    losses = []
    for step in range(steps):
        losses.append(engine.step(data[step % len(data)], step))
        torch.nn.utils.clip_grad_norm_(engine.parameters.values(), 1.0)
        optimizer.step()
    return losses


def curves(directory: Path, steps: int) -> tuple[list[float], list[float]]:
    """Losses of both engines at a rate of fine-tuning, each batch met once.

    Batches that are learned by heart have a loss near 0, where float32 itself is a thousandth apart from one order of
    additions to another.
    """
    found = []
    for kind in (OrtEngine, EagerEngine):
        objective = loaded(directory)
        engine = kind(objective)
        engine.dropout = False
        found.append(trained(engine, batches(objective, steps), steps, rate=1e-4))
    return found[0], found[1]


# -- equal to eager ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRAINED)
def test_loss_curves_are_equal(fixtures_dir: Path, name: str) -> None:
    ours, theirs = curves(fixtures_dir / name, 8)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert len(set(theirs)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_loss_curves_are_equal_over_50_steps(fixtures_dir: Path, name: str) -> None:
    ours, theirs = curves(fixtures_dir / name, 50)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert np.mean(theirs[-8:]) < np.mean(theirs[:8])


# -- the same again ----------------------------------------------------------------------------------------------------


def run(directory: Path, steps: int = 6) -> tuple[list[float], dict[str, np.ndarray]]:
    objective = loaded(directory)
    engine = OrtEngine(objective, threads=2)
    losses = trained(engine, batches(objective, 4), steps)
    return losses, {name: each.detach().numpy().copy() for name, each in engine.parameters.items()}


@pytest.mark.parametrize("name", ["bert-text-classifier", "t5-seq2seq"])
def test_two_runs_have_the_same_bits_with_two_threads_and_dropout(fixtures_dir: Path, name: str) -> None:
    first, weights = run(fixtures_dir / name)
    again, others = run(fixtures_dir / name)
    assert first == again
    assert all(np.array_equal(weights[name], others[name]) for name in weights)


def test_a_step_repeats_with_its_seed_whatever_came_before(engine: OrtEngine) -> None:
    one, other = batches(engine.objective, 2)
    first = engine.step(one, 3)
    gradients = held(engine)
    different = engine.step(one, 4)
    engine.step(other, 3)
    assert engine.step(one, 3) == first != different
    assert all(np.array_equal(each, gradients[name]) for name, each in held(engine).items())


def test_dropout_draws_and_can_be_turned_off(engine: OrtEngine) -> None:
    (batch,) = batches(engine.objective, 1)
    drawn = {engine.step(batch, seed) for seed in range(4)}
    engine.dropout = False
    fixed = {engine.step(batch, seed) for seed in range(4)}
    engine.dropout = True
    assert len(drawn) == 4
    assert len(fixed) == 1


def test_gradients_with_dropout_are_those_of_the_loss_that_was_drawn(fixtures_dir: Path) -> None:
    """Against the slope of the loss along the gradient, with the same places dropped: no other engine draws alike."""
    engine = OrtEngine(loaded(fixtures_dir / "bert-text-classifier"), threads=1)
    (batch,) = batches(engine.objective, 1)
    for seed in (0, 1):
        engine.step(batch, seed)
        along = {name: torch.from_numpy(each) for name, each in held(engine).items()}
        slope = sum(float((each.double() ** 2).sum()) for each in along.values())
        far = 1e-2 / slope**0.5
        ends = []
        for way in (1, -2):
            with torch.no_grad():
                for name, each in engine.parameters.items():
                    each.add_(along[name], alpha=way * far / slope**0.5)
            ends.append(engine.step(batch, seed))
        with torch.no_grad():
            for name, each in engine.parameters.items():
                each.add_(along[name], alpha=far / slope**0.5)
        measured = (ends[0] - ends[1]) / (2 * far / slope**0.5)
        assert measured == pytest.approx(slope, rel=1e-2)


# -- on PyTorch's tensors ----------------------------------------------------------------------------------------------


def test_gradients_stay_in_their_tensors(engine: OrtEngine) -> None:
    one, other = batches(engine.objective, 2)
    engine.step(one, 0)
    tensors = {name: each.grad for name, each in engine.parameters.items()}
    engine.step(other, 0)
    assert all(each.grad is tensors[name] for name, each in engine.parameters.items())


def test_weights_changed_in_place_are_seen(engine: OrtEngine) -> None:
    (batch,) = batches(engine.objective, 1)
    engine.dropout = False
    before = engine.step(batch, 0)
    with torch.no_grad():
        engine.parameters["classifier.bias"][0] += 1
    after = engine.step(batch, 0)
    with torch.no_grad():
        engine.parameters["classifier.bias"][0] -= 1
    assert engine.step(batch, 0) == pytest.approx(before, rel=1e-6)
    engine.dropout = True
    assert after != before


def test_tensors_that_moved_are_bound_anew(engine: OrtEngine) -> None:
    """An optimizer that lets go of gradients, and weights that were loaded into new memory."""
    (batch,) = batches(engine.objective, 1)
    loss = engine.step(batch, 0)
    gradients = held(engine)
    for each in engine.parameters.values():
        each.grad = None
        each.data = each.data.clone()
    assert engine.step(batch, 0) == loss
    assert all(np.array_equal(each, gradients[name]) for name, each in held(engine).items())


def test_gradients_in_one_flat_buffer(engine: OrtEngine) -> None:
    """As ranks hold them for one all-reduce."""
    (batch,) = batches(engine.objective, 1)
    engine.step(batch, 0)
    gradients = held(engine)
    flat = torch.full((sum(each.numel() for each in engine.parameters.values()),), np.nan)
    at = 0
    for each in engine.parameters.values():
        each.grad = flat[at : at + each.numel()].view_as(each)
        at += each.numel()
    engine.step(batch, 0)
    assert all(np.array_equal(each, gradients[name]) for name, each in held(engine).items())
    assert bool(flat.isfinite().all())


def test_a_batch_without_targets_moves_nothing(engine: OrtEngine) -> None:
    (batch,) = batches(engine.objective, 1)
    engine.step(batch, 0)
    nothing = Batch(batch.inputs, {"labels": np.full(8, -100)}, 0)
    assert engine.step(nothing, 0) == 0.0
    assert not any(each.any() for each in held(engine).values())


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_label_out_of_range_reads_no_memory(engine: OrtEngine) -> None:
    (batch,) = batches(engine.objective, 1)
    with pytest.raises(UsageError, match="labels holds 2, which is no class"):
        engine.step(replace(batch, labels={"labels": np.full(8, 2)}), 0)


def test_an_id_out_of_range(engine: OrtEngine) -> None:
    (batch,) = batches(engine.objective, 1)
    ids = batch.inputs["input_ids"].copy()
    ids[0, 0] = 120
    with pytest.raises(ConversionError, match=r"ONNX Runtime failed in a training step: .*indices element out of data"):
        engine.step(replace(batch, inputs={**batch.inputs, "input_ids": ids}), 0)


def test_a_model_of_another_type(classifier: Path) -> None:
    objective = loaded(classifier)
    objective.to(torch.float64)
    with pytest.raises(UsageError, match=r"trains float32 on the CPU and the model is torch\.float64 on cpu"):
        OrtEngine(objective)


def test_weights_that_are_not_in_one_piece(classifier: Path) -> None:
    objective = loaded(classifier)
    engine = OrtEngine(objective, threads=1)
    weight = objective.parameters_trained["classifier.weight"]
    weight.data = weight.data.t().contiguous().t()
    with pytest.raises(UsageError, match=r"model\.classifier\.weight is not contiguous"):
        engine.step(objective.example(), 0)


def test_nothing_is_said_on_the_terminal(classifier: Path, capfd: pytest.CaptureFixture[str]) -> None:
    engine = OrtEngine(loaded(classifier), threads=2)
    engine.step(engine.objective.example(), 0)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""

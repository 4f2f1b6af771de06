"""training/losses: every task's loss is Hugging Face's own, and what is trained is what the loss reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nlpconvert import source
from nlpconvert.errors import UsageError
from nlpconvert.models import TASKS
from nlpconvert.training import Batch
from nlpconvert.training.eager import EagerEngine
from nlpconvert.training.losses import LOSSES, Objective, with_loss
from tests import tiny
from tests.conftest import FIXTURES


def loaded(directory: Path, **keywords: Any) -> Objective:
    model = source.load(str(directory), **keywords)
    return with_loss(model.module, model.facts.task, model.facts)


def own_loss(objective: Objective, batch: Batch) -> float:
    """What the model's class says itself when it is given the labels."""
    tensors = {name: torch.from_numpy(array) for name, array in {**batch.inputs, **batch.labels}.items()}
    objective.eval()
    with torch.no_grad():
        return float(type(objective.model).forward(objective.model, **tensors).loss)


def engine_loss(objective: Objective, batch: Batch) -> float:
    engine = EagerEngine(objective)
    engine.dropout = False
    return engine.step(batch, 0)


@pytest.mark.parametrize("name", FIXTURES)
def test_the_loss_is_hugging_faces_own(fixtures_dir: Path, name: str) -> None:
    objective = loaded(fixtures_dir / name)
    for batch in (objective.example(), objective.example(rows=2, tokens=11, targets=9, seed=1)):
        assert engine_loss(objective, batch) == pytest.approx(own_loss(objective, batch), rel=1e-6)


@pytest.mark.parametrize("name", ["albert", "bart"])
def test_the_loss_of_more_heads(tmp_path: Path, name: str) -> None:
    objective = loaded(tiny.save(tiny.ROWS[name], tmp_path / "model"))
    batch = objective.example()
    assert engine_loss(objective, batch) == pytest.approx(own_loss(objective, batch), rel=1e-6)


def test_the_loss_of_multiple_choice(tmp_path: Path) -> None:
    row = replace(tiny.ROWS["bert"], model="BertForMultipleChoice")
    objective = loaded(tiny.save(row, tmp_path / "model"))
    batch = objective.example()
    assert batch.inputs["input_ids"].ndim == 3
    assert engine_loss(objective, batch) == pytest.approx(own_loss(objective, batch), rel=1e-6)


def test_every_task_with_a_head_has_a_row() -> None:
    assert set(LOSSES) == {name for name, task in TASKS.items() if task.suffix != "Model"}
    for row in LOSSES.values():
        assert row.classes in {axis for output in TASKS[row.task].outputs for axis in output.axes}


def test_labels_of_minus_100_do_not_count(fixtures_dir: Path) -> None:
    objective = loaded(fixtures_dir / "bert-token-classifier")
    batch = objective.example(rows=2)
    first = {name: array[:1] for name, array in batch.inputs.items()}
    alone = Batch(first, {"labels": batch.labels["labels"][:1]}, 6)
    labels = batch.labels["labels"].copy()
    labels[1] = -100
    assert batch.labels["labels"][0, -1] == -100
    masked = engine_loss(objective, Batch(batch.inputs, {"labels": labels}, 6))
    assert masked == pytest.approx(engine_loss(objective, alone), rel=1e-6)


def test_targets_are_counted_after_the_shift(fixtures_dir: Path) -> None:
    assert loaded(fixtures_dir / "gpt2-lm").example(rows=3, tokens=7).targets == 3 * 6 - 1
    assert loaded(fixtures_dir / "t5-seq2seq").example(rows=3, targets=5).targets == 3 * 5 - 1


def test_the_sum_over_targets_is_the_sum_of_its_parts(fixtures_dir: Path) -> None:
    """What accumulation and ranks rest on: batches put together by weighting each with its targets."""
    objective = loaded(fixtures_dir / "gpt2-lm")
    batch = objective.example(rows=4, tokens=9)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        labels = batch.labels["labels"][rows]
        parts.append(
            Batch(
                {name: array[rows] for name, array in batch.inputs.items()},
                {"labels": labels},
                int((labels[:, 1:] != -100).sum()),
            )
        )
    assert [part.targets for part in parts] == [7, 24]
    whole = engine_loss(objective, batch) * batch.targets
    assert sum(engine_loss(objective, part) * part.targets for part in parts) == pytest.approx(whole, rel=1e-6)


# -- what is trained ---------------------------------------------------------------------------------------------------


def test_all_that_the_loss_reads_is_trained(fixtures_dir: Path) -> None:
    objective = loaded(fixtures_dir / "bert-text-classifier")
    assert set(objective.parameters_trained) == {name for name, _ in objective.model.named_parameters()}
    assert objective.notes == ()


def test_what_the_loss_does_not_read_is_left_out_and_said(tmp_path: Path) -> None:
    """Weight decay would shrink it otherwise, since its gradient is 0 and not None."""
    objective = loaded(tiny.save(tiny.ROWS["xlnet"], tmp_path / "model"))
    assert "transformer.mask_emb" not in objective.parameters_trained
    assert "the loss does not read them: transformer.mask_emb" in objective.notes[0]


def test_tables_of_sines_stay_fixed(tmp_path: Path) -> None:
    objective = loaded(tiny.save(tiny.ROWS["marian"], tmp_path / "model"))
    assert not [name for name in objective.parameters_trained if "embed_positions" in name]
    assert "fixed by the architecture: model.decoder.embed_positions.weight" in objective.notes[0]


def test_tied_weights_stand_once(fixtures_dir: Path) -> None:
    names = set(loaded(fixtures_dir / "t5-seq2seq").parameters_trained)
    assert "shared.weight" in names
    assert not names & {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_task_without_a_loss(features: Path) -> None:
    with pytest.raises(UsageError, match="feature-extraction has no loss to train with: text-classification"):
        loaded(features)


def test_a_task_that_the_model_is_not_loaded_for(classifier: Path) -> None:
    model = source.load(str(classifier))
    with pytest.raises(UsageError, match="loaded for text-classification, not token-classification"):
        with_loss(model.module, "token-classification", model.facts)


@pytest.mark.parametrize(
    ("kind", "words"), [("multi_label_classification", "several labels at once"), ("regression", "a number")]
)
def test_labels_that_are_not_one_class(tmp_path: Path, kind: str, words: str) -> None:
    model = source.load(str(tiny.save(tiny.ROWS["bert"], tmp_path / "model", problem_type=kind)))
    with pytest.raises(UsageError, match=f"{words}.*{kind}"):
        with_loss(model.module, model.facts.task, model.facts)


@pytest.mark.parametrize(
    ("name", "label", "size"),
    [("bert-text-classifier", 4, 4), ("gpt2-lm", -7, None), ("bert-question-answering", 7, 7)],
)
def test_a_label_out_of_range(fixtures_dir: Path, name: str, label: int, size: int | None) -> None:
    objective = loaded(fixtures_dir / name)
    batch = objective.example(tokens=7)
    labels = {key: array.copy() for key, array in batch.labels.items()}
    next(iter(labels.values())).flat[-1] = label
    size = size or objective.facts.vocab_size
    with pytest.raises(UsageError, match=rf"holds {label}, which is no class of .*: they are 0 to {size - 1}"):
        EagerEngine(objective).step(replace(batch, labels=labels), 0)


def test_a_batch_without_its_labels(classifier: Path) -> None:
    objective = loaded(classifier)
    with pytest.raises(UsageError, match="has no labels; it needs input_ids"):
        EagerEngine(objective).step(Batch(objective.example().inputs, {}, 1), 0)


# -- the engine of PyTorch ---------------------------------------------------------------------------------------------


def test_a_step_repeats_with_its_seed_and_keeps_the_gradients_tensors(fixtures_dir: Path) -> None:
    engine = EagerEngine(loaded(fixtures_dir / "gpt2-lm"))
    batch = engine.objective.example()
    first = engine.step(batch, 3)
    held = {name: each.grad for name, each in engine.parameters.items()}
    copies = {name: each.clone() for name, each in held.items() if each is not None}
    other = engine.step(batch, 4)
    assert engine.step(batch, 3) == first != other
    for name, each in engine.parameters.items():
        assert each.grad is held[name]
        assert torch.equal(each.grad, copies[name])


def test_without_dropout_the_seed_says_nothing(classifier: Path) -> None:
    engine = EagerEngine(loaded(classifier))
    engine.dropout = False
    batch = engine.objective.example()
    assert engine.step(batch, 3) == engine.step(batch, 4)


def test_a_batch_without_targets_moves_nothing(classifier: Path) -> None:
    engine = EagerEngine(loaded(classifier))
    batch = engine.objective.example()
    engine.step(batch, 0)
    nothing = Batch(batch.inputs, {"labels": np.full(3, -100)}, 0)
    assert engine.step(nothing, 0) == 0.0
    assert not any(each.grad.any() for each in engine.parameters.values() if each.grad is not None)


def test_the_models_answers_stand_behind_the_loss(fixtures_dir: Path) -> None:
    objective = loaded(fixtures_dir / "t5-seq2seq").eval()
    loss, *answers = objective(*objective.tensors(objective.example(rows=2, targets=5)))
    assert loss.shape == ()
    assert [tuple(each.shape) for each in answers] == [(2, 5, objective.facts.vocab_size)]
    assert objective.answers == ("logits",)

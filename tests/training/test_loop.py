"""The loop: what stops it, what is logged, what an epoch counts for."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from nlpconvert.errors import DriftError
from nlpconvert.training import Batch
from nlpconvert.training.batches import Deal
from nlpconvert.training.loop import Log, Plan, Score, total_steps
from tests.training import running


def test_steps_and_epochs() -> None:
    deal = Deal(20, 4, 2)  # three steps an epoch
    plans = [Plan(), Plan(epochs=2), Plan(epochs=2, steps=4), Plan(epochs=2, steps=50), Plan(steps=50)]
    assert [total_steps(plan, deal) for plan in plans] == [9, 6, 4, 6, 50]


def judge_of(values: list[float], higher: bool = True, sound: list[bool] | None = None):  # type: ignore[no-untyped-def]
    def judge(epoch: int, loss: float) -> Score:
        return Score(values[epoch - 1], higher, sound[epoch - 1] if sound else True, {"verdict": "agrees"})

    return judge


@pytest.mark.parametrize(
    ("values", "higher", "sound", "best"),
    [
        ([0.5, 0.9, 0.7], True, None, 2),
        ([0.5, 0.9, 0.7], False, None, 1),
        ([0.5, 0.5, 0.5], True, None, 1),
        ([float("nan"), 0.1, 0.1], True, None, 2),
        ([0.9, 0.1, 0.2], True, [False, True, True], 3),
        ([0.1, 0.9, 0.2], True, [True, False, True], 3),
        ([0.1, 0.9, 0.2], True, [False, False, False], 2),
    ],
)
def test_the_best_epoch_is_sound(
    tmp_path: Path, values: list[float], higher: bool, sound: list[bool] | None, best: int
) -> None:
    """An epoch whose export drifted never takes the place of one whose export agreed."""
    loop = running.build(running.CLASSIFIER, running.rows(running.CLASSIFIER, tmp_path, count=4), epochs=3).loop
    told: list[int] = []
    memory = loop.run(judge_of(values, higher, sound), better=told.append)
    assert memory.best_epoch == told[-1] == best and memory.epochs is not None and len(memory.epochs) == 3


def test_patience_ends_it(tmp_path: Path) -> None:
    path = running.rows(running.CLASSIFIER, tmp_path, count=4)
    loop = running.build(running.CLASSIFIER, path, epochs=9, patience=2, out=tmp_path / "out").loop
    memory = loop.run(judge_of([0.1, 0.5, 0.4, 0.5, 0.9]))
    assert memory.epochs is not None and len(memory.epochs) == 4 and memory.best_epoch == 2
    assert memory.why == "no better for 2 epochs"
    again = running.build(running.CLASSIFIER, path, epochs=9, patience=2, out=tmp_path / "out").loop
    assert again.states is not None
    found = again.states.newest()
    assert found is not None
    again.resume(found)
    assert again.run(judge_of([]), found.step) == memory, "it has ended, and stays so"


def test_a_line_a_step(tmp_path: Path) -> None:
    path = running.rows(running.CLASSIFIER, tmp_path, count=12)
    more: list[object] = []
    log = Log(tmp_path / "train.jsonl", more.append)
    with log.opened(0):
        running.build(running.CLASSIFIER, path, epochs=2, warmup=2, lr=1e-3, log=log).loop.run(judge_of([1, 1]))
    lines = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and [line["epoch"] for line in lines] == [1, 1, 2, 2]
    assert [line["targets"] for line in lines] == [8, 4, 8, 4] and len(more) == 6, "epochs are told too"
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.0, 5e-4, 1e-3, 5e-4])
    assert all(line["loss"] > 0 and line["gradient_norm"] > 0 and line["seconds"] > 0 for line in lines)


def test_a_log_goes_on_after_its_checkpoint(tmp_path: Path) -> None:
    """Lines past the checkpoint are taken away, and one that was cut by a kill."""
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "lo')
    log = Log(path)
    with log.opened(2):
        log.write({"step": 3, "loss": 2})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1}, {"step": 2, "loss": 1}, {"step": 3, "loss": 2}
    ]  # fmt: skip


@pytest.mark.parametrize("engine", ["torch", "ort"])
def test_a_loss_that_is_no_number_stops_it(tmp_path: Path, engine: str) -> None:
    """A learning rate far too high: the checkpoint of the broken weights goes, the one before stays."""
    path = running.rows(running.CLASSIFIER, tmp_path)
    loop = running.build(
        running.CLASSIFIER, path, engine=engine, optimizer="sgd", lr=1e30, clip=0.0, warmup=2, batch=4,
        checkpoint_every=1, out=tmp_path / "out",
    ).loop  # fmt: skip
    with pytest.raises(DriftError) as found:
        loop.run(judge_of([0.5] * 9))
    assert loop.states is not None
    said, good = str(found.value), loop.states.newest()
    assert good is not None and f"the last good checkpoint is {good.path}" in said and "\n" not in said
    assert said.startswith(("the loss is nan at step", "the loss is inf at step", "the norm of the gradients is"))
    again = running.build(running.CLASSIFIER, path, optimizer="sgd", batch=4, out=tmp_path / "out").loop
    again.resume(good)
    assert all(bool(each.isfinite().all()) for each in again.engine.parameters.values())


def test_a_step_without_any_target_changes_nothing(tmp_path: Path) -> None:
    path = running.write(tmp_path / "d.jsonl", [{"text": "a"}, {"text": "one two three"}])
    loop = running.build("gpt2-lm", path, batch=1, epochs=1).loop
    empty = next(step for step in range(2) if not loop.data.batch(loop.deal.step(step, 0)[0]).targets)
    before = [each.detach().clone() for each in loop.engine.parameters.values()]
    line = loop.step(empty)
    assert (line["loss"], line["targets"], line["gradient_norm"]) == (0.0, 0, 0.0)
    after = loop.engine.parameters.values()
    assert all(torch.equal(each, old) for each, old in zip(after, before, strict=True))


def test_accumulation_calls_the_engine_once_a_batch(tmp_path: Path) -> None:
    path = running.rows(running.CLASSIFIER, tmp_path, count=10)
    loop = running.build(running.CLASSIFIER, path, batch=3, accumulate=2, epochs=1).loop
    seen: list[tuple[int, int]] = []
    step = loop.engine.step

    def watched(batch: Batch, seed: int) -> float:
        seen.append((batch.targets, seed))
        return step(batch, seed)

    loop.engine.step = watched  # type: ignore[method-assign]
    loop.run(judge_of([1.0]))
    assert [targets for targets, _ in seen] == [3, 3, 3, 1] and len({seed for _, seed in seen}) == 4


def test_tensorboard_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own writer stands in here as a list: which numbers, under which names, at which step."""
    told: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, directory: str) -> None:
            assert directory == str(tmp_path)

        def add_scalar(self, *scalar: Any) -> None:
            told.append(scalar)

        def close(self) -> None:
            told.append(("closed", 0.0, 0))

    room = types.ModuleType("torch.utils.tensorboard")
    room.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", room)
    monkeypatch.delitem(sys.modules, "nlpconvert.training.board", raising=False)
    board = importlib.import_module("nlpconvert.training.board").Board(tmp_path)
    board.write({"step": 2, "loss": 0.5, "learning_rate": 1e-3, "gradient_norm": 3.0, "targets": 8})
    board.write({"step": 2, "score": 0.9, "scores": {"accuracy": {"pytorch": 0.9, "onnx": None}}})
    board.close()
    monkeypatch.delitem(sys.modules, "nlpconvert.training.board")
    assert told == [
        ("train/loss", 0.5, 2), ("train/learning_rate", 1e-3, 2), ("train/gradient_norm", 3.0, 2),
        ("eval/accuracy/pytorch", 0.9, 2), ("closed", 0.0, 0),
    ]  # fmt: skip


def unlike(fixture: str, into: Path, first: int, count: int) -> Path:
    """A fixture's rows with other labels or targets than it has learned, so that there is something to learn."""
    rows = [json.loads(line) for line in running.rows(fixture, into, first, count).read_text().splitlines()]
    moods = ["negative", "neutral", "positive", "mixed"]
    for row in rows:
        if "label" in row:
            row["label"] = moods[(moods.index(row["label"]) + 1) % 4]
        if "target" in row:
            row["target"] = row["target"][::-1]
    return running.write(into / f"unlike-{first}.jsonl", rows)


@pytest.mark.slow
@pytest.mark.parametrize("fixture", ["bert-text-classifier", "gpt2-lm", "t5-seq2seq"])
def test_both_engines_come_to_the_same(tmp_path: Path, fixture: str) -> None:
    """Fifty steps without dropout: losses within 1e-4 of each other, and the same score on rows that were held out."""
    path, held_out = unlike(fixture, tmp_path, 0, 100), unlike(fixture, tmp_path, 100, 6)
    losses, scores = [], []
    for engine in ("ort", "torch"):
        parts = running.build(fixture, path, engine=engine, batch=2, epochs=1)
        losses.append([parts.loop.step(step)["loss"] for step in range(50)])
        _, data = running.data_of(fixture, held_out)
        parts.objective.eval()
        with torch.no_grad():
            loss, logits = parts.objective(*parts.objective.tensors(data.batch(range(6))))[:2]
        scores.append((float(loss), logits.argmax(-1)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[1][-1] < losses[1][0] or fixture == "gpt2-lm"
    assert scores[0][0] == pytest.approx(scores[1][0], rel=1e-4) and torch.equal(scores[0][1], scores[1][1])

"""Checkpoints: whole or not there, of this run or refused, and with them a run that goes on bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nlpconvert.errors import UsageError
from nlpconvert.training import optimizers
from nlpconvert.training.loop import Log, Score
from nlpconvert.training.states import STATE, WEIGHTS, States
from tests.training import running


class Toy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 2)


def stepped(kind: str, count: int = 2) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
    """Parameters and an optimizer after some steps."""
    toy = Toy()
    parameters = dict(toy.named_parameters())
    optimizer = optimizers.make(kind, toy, parameters, 0.1, 0.01)
    for number in range(count):
        for each in parameters.values():
            each.grad = torch.full_like(each, 0.1 + number)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("kind", ["adamw", "lamb", "sgd"])
def test_parameters_and_optimizer_come_back_bit_by_bit(tmp_path: Path, kind: str) -> None:
    parameters, optimizer = stepped(kind)
    states = States(tmp_path, {"--seed": 1})
    states.save(2, parameters, optimizer, {"loss": 0.1 + 0.2})
    others, other = stepped(kind, 0)
    found = States(tmp_path, {"--seed": 1}).newest()
    assert found is not None and found.step == 2 and found.memory == {"loss": 0.1 + 0.2}
    states.load(found, others, other)
    for both in ((parameters, optimizer), (others, other)):
        for each in both[0].values():
            each.grad = torch.full_like(each, 0.3)
        both[1].step()
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pt", ".pkl", ".bin")], "no pickle"


def test_the_last_two_and_the_best_are_kept(tmp_path: Path) -> None:
    parameters, optimizer = stepped("adamw")
    states = States(tmp_path, {})
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 2)):
        states.save(step, parameters, optimizer, {}, best)
    assert sorted(path.name for path in states.directory.iterdir()) == [f"step-0000000{step}" for step in (2, 4, 5)]


def test_another_run_is_refused_by_name(tmp_path: Path) -> None:
    parameters, optimizer = stepped("adamw")
    States(tmp_path, {"--data": "a" * 64, "--lr": 1e-4}).save(1, parameters, optimizer, {})
    with pytest.raises(UsageError, match=r"was made with another --data \(aaaaaaaaaaaa, now bbbbbbbbbbbb\)"):
        States(tmp_path, {"--data": "b" * 64, "--lr": 1e-4}).newest()
    with pytest.raises(UsageError, match=r"another --lr \(0.0001, now 0.001\)"):
        States(tmp_path, {"--data": "a" * 64, "--lr": 1e-3}).newest()


@pytest.mark.parametrize("harm", ["state", "weights", "cut"])
def test_what_is_not_whole_is_passed_over(tmp_path: Path, harm: str) -> None:
    """The one before is taken: of a checkpoint whose state is gone, whose weights changed, or were cut."""
    parameters, optimizer = stepped("adamw")
    states = States(tmp_path, {})
    states.save(1, parameters, optimizer, {}, best=1)
    last = states.save(2, parameters, optimizer, {}, best=1)
    if harm == "state":
        (last / STATE).unlink()
    else:
        data = bytearray((last / WEIGHTS).read_bytes())
        data[-1] ^= 1
        (last / WEIGHTS).write_bytes(bytes(data) if harm == "weights" else bytes(data[:-5]))
    found = states.newest()
    assert found is not None and found.step == 1


# -- a run that goes on ------------------------------------------------------------------------------------------------


def judged(epoch: int, loss: float) -> Score:
    """The mean loss, lower is better."""
    return Score(loss, False)


def weights(parts: running.Parts) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in parts.loop.engine.parameters.items()}


@pytest.mark.parametrize(
    ("fixture", "engine"), [("bert-text-classifier", "ort"), ("gpt2-lm", "ort"), ("t5-seq2seq", "torch")]
)
def test_resumed_is_uninterrupted_dropout_included(tmp_path: Path, fixture: str, engine: str) -> None:
    """Six steps of three epochs; and the same, broken off at the end of the second."""
    path = running.rows(fixture, tmp_path, count=15)
    asked: dict[str, Any] = {"engine": engine, "dropout": True, "batch": 4, "accumulate": 2, "epochs": 3, "warmup": 2}
    whole_log, log = Log(tmp_path / "whole.jsonl"), Log(tmp_path / "train.jsonl")
    with whole_log.opened(0):
        whole = running.build(fixture, path, out=tmp_path / "whole", log=whole_log, **asked)
        whole.loop.run(judged)
    broken = running.build(fixture, path, out=tmp_path / "out", log=log, checkpoint_every=3, **asked)
    with log.opened(0), pytest.raises(KeyboardInterrupt):
        broken.loop.run(stopping)
    going_on = running.build(fixture, path, out=tmp_path / "out", log=log, checkpoint_every=3, **asked)
    assert going_on.loop.states is not None
    found = going_on.loop.states.newest()
    assert found is not None and found.step == 3, "in the middle of the second epoch"
    with log.opened(found.step):
        going_on.loop.resume(found)
        going_on.loop.run(judged, found.step)
    assert all(torch.equal(each, weights(whole)[name]) for name, each in weights(going_on).items())
    lines = [
        [json.loads(line) for line in (tmp_path / f).read_text().splitlines()] for f in ("whole.jsonl", "train.jsonl")
    ]
    assert [[line["step"], line["loss"]] for line in lines[0]] == [[line["step"], line["loss"]] for line in lines[1]]
    assert len(lines[0]) == 6 and whole.loop.memory == going_on.loop.memory


def stopping(epoch: int, loss: float) -> Score:
    """Breaks a run off at the end of its second epoch."""
    if epoch == 2:
        raise KeyboardInterrupt
    return judged(epoch, loss)


def test_dropout_differs_from_step_to_step_and_is_the_seed(tmp_path: Path) -> None:
    path = running.rows(running.CLASSIFIER, tmp_path, count=8)
    first, again, other = (
        running.build(running.CLASSIFIER, path, dropout=True, seed=seed, steps=2, lr=1e-9).loop for seed in (1, 1, 2)
    )
    losses = [[loop.step(step)["loss"] for step in range(2)] for loop in (first, again, other)]
    assert losses[0] == losses[1] != losses[2] and losses[0][0] != losses[0][1]


CHILD = """
    import sys
    from pathlib import Path
    from nlpconvert.training.loop import Score
    from tests.training import running
    out, path = Path(sys.argv[1]), Path(sys.argv[2])
    parts = running.build(running.CLASSIFIER, path, out=out, dropout=True, batch=4, steps=400, checkpoint_every=1)
    found = parts.loop.states.newest()
    print("found", None if found is None else found.step, flush=True)
    parts.loop.run(lambda epoch, loss: Score(loss, False), 0 if found is None else parts.loop.resume(found))
"""


def test_a_kill_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL while checkpoints are written after every step: the next start goes on from one of the last two."""
    path, out = running.rows(running.CLASSIFIER, tmp_path), tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(running.ROOT), os.environ.get("PYTHONPATH", "")])}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(out), str(path)],
        env=environment, stdout=subprocess.DEVNULL, cwd=running.ROOT,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not list(out.glob("checkpoints/step-0000000[5-9]")) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    newest = max(int(each.name[5:]) for each in (out / "checkpoints").glob("step-*"))
    parts = running.build(running.CLASSIFIER, path, out=out, dropout=True, batch=4, steps=400)
    assert parts.loop.states is not None
    found = parts.loop.states.newest()
    assert found is not None and newest - 1 <= found.step <= newest and newest >= 5
    parts.loop.resume(found)
    whole = running.build(running.CLASSIFIER, path, dropout=True, batch=4, steps=400)
    for step in range(found.step):
        whole.loop.step(step)
    assert all(torch.equal(each, weights(whole)[name]) for name, each in weights(parts).items())

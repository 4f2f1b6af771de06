"""Two processes are one, with unequal numbers of targets; and one's failure is soon the failure of all, in its words.

Real processes under torchrun or with Open MPI's variables, gloo between them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nlpconvert.training.ranks import Gradients, Ranks
from nlpconvert.training.world import World
from tests.training import running


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(running.ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **more}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(program: str, *arguments: str, size: int = 2) -> list[subprocess.Popen[str]]:
    """A program as Open MPI would start it: variables alone, and nobody who stops the others when one ends."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), *arguments],
            env=environment(
                OMPI_COMM_WORLD_RANK=str(rank),
                OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
                OMPI_COMM_WORLD_SIZE=str(size),
                OMPI_COMM_WORLD_LOCAL_SIZE=str(size),
                MASTER_PORT=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=running.ROOT,
        )
        for rank in range(size)
    ]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit codes and what was said; none takes long."""
    found = []
    try:
        for each in processes:
            said = each.communicate(timeout=60)[0]
            found.append((each.returncode, said))
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
                each.communicate()
    return found


# -- sums --------------------------------------------------------------------------------------------------------------


def test_gradients_are_weighted_with_their_targets() -> None:
    """Means over 1 and over 3 targets are a mean over 4; the tensors of `.grad` stay the engine's own."""
    weights = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]
    gradients = Gradients(weights, Ranks(World()))
    held = [each.grad for each in weights]
    for loss, targets in ((4.0, 1), (8.0, 3)):
        for each in weights:
            assert each.grad is not None
            each.grad.fill_(loss)
        gradients.add(loss, targets)
    assert gradients.finish() == (7.0, 4)
    assert [each.grad.tolist() for each in weights if each.grad is not None] == [[7.0, 7.0], [7.0]]
    assert all(each.grad is tensor for each, tensor in zip(weights, held, strict=True))
    assert gradients.finish() == (0.0, 0) and weights[0].grad is not None and not weights[0].grad.any()


def test_unequal_micro_batches_are_one_batch(tmp_path: Path) -> None:
    """Rows of very different lengths, as three batches or as one."""
    texts = [{"text": "word " * count} for count in (40, 3, 2, 17, 5, 30)]
    path = running.write(tmp_path / "d.jsonl", texts)
    one = running.build("gpt2-lm", path, batch=6, steps=3)
    three = running.build("gpt2-lm", path, batch=2, accumulate=3, steps=3)
    for step in range(3):
        line, other = one.loop.step(step), three.loop.step(step)
        assert line["targets"] == other["targets"] and line["loss"] == pytest.approx(other["loss"], rel=1e-6)
    for name, each in one.loop.engine.parameters.items():
        assert torch.allclose(each, three.loop.engine.parameters[name], atol=5e-5), name


TRAINING = """
    import json, os, sys
    from pathlib import Path
    import torch
    from safetensors.torch import save_file
    from nlpconvert.training import ranks, world
    from tests.training import running
    out, path, fixture, engine = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    here = world.find(os.environ, os.getppid())
    ranks.use_threads(1, here)
    with ranks.meet(here) as together:
        loop = running.build(fixture, path, engine=engine, batch=4, size=2, epochs=2, ranks=together).loop
        lines = [loop.step(step) for step in range(loop.steps)]
        held = {name: each.detach().clone() for name, each in loop.engine.parameters.items()}
        save_file(held, out / f"rank{here.rank}.safetensors")
        if here.first:
            (out / "lines.json").write_text(json.dumps(lines))
"""


@pytest.mark.parametrize(
    ("fixture", "engine"), [("gpt2-lm", "ort"), pytest.param("bert-text-classifier", "torch", marks=pytest.mark.slow)]
)
def test_two_ranks_are_one(tmp_path: Path, fixture: str, engine: str) -> None:
    """Under torchrun: 21 rows, which neither ranks nor batches divide; of GPT-2 with unequal numbers of targets."""
    path = running.rows(fixture, tmp_path, count=21)
    program = tmp_path / "train.py"
    program.write_text(textwrap.dedent(TRAINING), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program),
         str(tmp_path), str(path), fixture, engine],
        env=environment(), capture_output=True, text=True, cwd=running.ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    one = running.build(fixture, path, engine=engine, batch=8, epochs=2).loop
    lines = json.loads((tmp_path / "lines.json").read_text())
    assert len(lines) == one.steps == 6 and {line["targets"] for line in lines} != {lines[0]["targets"]}
    for step, line in enumerate(lines):
        alone = one.step(step)
        assert line["targets"] == alone["targets"] and line["loss"] == pytest.approx(alone["loss"], rel=1e-6), step
    ranks = [load_file(tmp_path / f"rank{rank}.safetensors") for rank in range(2)]
    for name, each in one.engine.parameters.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), f"the ranks' own {name} differ"
        assert torch.allclose(ranks[0][name], each, rtol=0, atol=5e-5), name


# -- ends --------------------------------------------------------------------------------------------------------------

FAILING = """
    import os, sys, time
    import torch
    from nlpconvert.errors import DriftError, NlpconvertError, UsageError
    from nlpconvert.training import ranks, world
    how, who = sys.argv[1], int(sys.argv[2])
    here = world.find(os.environ, os.getppid())
    began = time.monotonic()
    try:
        with ranks.meet(here) as together:
            together.sum(torch.ones(3))
            began = time.monotonic()
            if here.rank == who or how == "all":
                if how == "kill":
                    os.kill(os.getpid(), 9)
                raise UsageError("d.jsonl, line 7: the model has no label 9") if how != "fault" else ValueError("odd")
            together.sum(torch.ones(3))
            print("went on")
    except ranks.RankFailed as error:
        print("FAILED", error, "|", error.heard, error.exit_code, time.monotonic() - began < 10)
    except NlpconvertError as error:
        print("OWN", error)
"""


@pytest.mark.parametrize("who", [0, 1])
def test_a_ranks_error_ends_all_in_its_words(who: int) -> None:
    found = ended(start(FAILING, "error", str(who)))
    words = "d.jsonl, line 7: the model has no label 9"
    if who == 0:
        assert f"OWN {words}" in found[0][1]
        assert f"FAILED rank 0 ended the run: {words} | True 2 True" in found[1][1]
    else:
        assert f"FAILED rank 1 ended the run: {words} | True 2 True" in found[0][1]
        assert f"FAILED {words} | True 2 True" in found[1][1], "the first rank has said it"


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_dies_is_named(who: int) -> None:
    found = ended(start(FAILING, "kill", str(who)))
    assert found[who][0] == -9
    assert f"FAILED rank {who} has ended without a word (killed, or out of memory)" in found[1 - who][1]
    assert f"| {who != 0} 1 True" in found[1 - who][1], "where the first one is gone, another speaks"


def test_an_error_that_all_have_is_said_once() -> None:
    found = ended(start(FAILING, "all", "0"))
    assert "OWN" in found[0][1] and "FAILED" in found[1][1] and "True 2 True" in found[1][1]


def test_a_fault_of_one_rank_is_told_to_the_others() -> None:
    found = ended(start(FAILING, "fault", "1"))
    assert "FAILED rank 1 ended the run: ValueError: odd | True 3" in found[0][1]
    assert "ValueError: odd" in found[1][1] and found[1][0] == 1


def test_ranks_that_do_not_meet_are_one_line() -> None:
    program = """
    import datetime, os
    from nlpconvert.errors import CannotRunHere
    from nlpconvert.training import ranks, world
    ranks.MEETING = datetime.timedelta(seconds=1)
    try:
        with ranks.meet(world.find(os.environ, 1)):
            print("met")
    except CannotRunHere as error:
        print("ALONE", str(error).count(chr(10)), error)
    """
    began = time.monotonic()
    processes = start(program)
    processes[1].kill()
    said = ended(processes)[0][1]
    assert (
        "ALONE 0 rank 0 of 2 (Open MPI) did not meet the others at 127.0.0.1:" in said and time.monotonic() - began < 30
    )

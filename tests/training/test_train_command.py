"""The command `train`: what OUT holds, what is refused in one line, going on, several ranks, both engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from nlpconvert import cli, manifest, training_run
from nlpconvert.training import world
from tests.training import running

MODEL = str(running.FIXTURES / running.CLASSIFIER)
QUICK = ["--epochs", "1", "--batch", "8", "--threads", "1"]


def train(*words: object) -> int:
    """The command in this process; its exit code."""
    with pytest.raises(SystemExit) as found:
        cli.main(["train", *map(str, words)])
    return int(found.value.code or 0)


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "nlpconvert", "train", *map(str, words)]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(running.ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "training.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(autouse=True)
def _signals() -> Any:
    """`main` takes the signals for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An OUT of one epoch by ONNX Runtime, with an evaluation."""
    folder = tmp_path_factory.mktemp("trained")
    data, dev = running.rows(running.CLASSIFIER, folder), running.rows(running.CLASSIFIER, folder, first=100, count=40)
    assert train(MODEL, "--data", data, "--eval", dev, "-o", folder / "out", *QUICK, "-q") == 0
    return folder / "out"


def test_what_out_holds(trained: Path) -> None:
    """A checkpoint, its export with a verdict, the log, the record: and the weights are the trained ones."""
    names = {path.name for path in trained.iterdir()}
    assert names == {"model", "converted", "checkpoints", "train.jsonl", "training.json"}
    held = record(trained)
    assert held["status"] == "finished" and held["exit_code"] == 0 and held["best"]["epoch"] == 1
    assert held["engine"]["name"] == "ort" and held["engine"]["opset"] == 17
    assert held["gradients"]["agrees"] and held["gradients"]["parameters"] > 50
    epoch = held["epochs"][0]
    assert epoch["verdict"] == "agrees" and epoch["worst"] < 1e-4
    assert 0.8 < epoch["scores"]["accuracy"]["pytorch"] <= 1 and epoch["score"] == held["best"]["score"]
    assert held["curve"]["step"] == [1, 2, 3] and len(held["curve"]["loss"]) == 3
    assert held["world"]["size"] == 1 and held["asked"]["--seed"] == 0 and "torch" in held["versions"]
    weights, before = (load_file(Path(each) / "model.safetensors") for each in (trained / "model", MODEL))
    last = load_file(trained / "checkpoints" / "step-00000003" / "weights.safetensors")
    assert all(np.array_equal(weights[name], last[name]) for name in last)
    assert any(not np.array_equal(weights[name], before[name]) for name in before)


def test_what_comes_of_it_is_what_other_commands_take(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`verify` of the export, and a conversion of the checkpoint, which is the export's source."""
    assert manifest.read(trained / "converted").source["path"] == str(trained / "model")
    with pytest.raises(SystemExit) as found:
        cli.main(["verify", str(trained / "converted")])
    assert not found.value.code and "agrees" in capsys.readouterr().out
    from nlpconvert import checkpoint

    info = checkpoint.describe(str(trained / "model"))
    assert info.sha256 == manifest.read(trained / "converted").source_sha256 and info.task == "text-classification"


def test_a_finished_run_is_not_begun_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = trained.parent / "bert-text-classifier-0-24.jsonl"
    assert train(MODEL, "--data", data, "-o", trained, *QUICK) == 2
    assert "holds a run of training: --resume goes on with it, or give another -o" in capsys.readouterr().err
    assert train(MODEL, "--data", data, "-o", trained, *QUICK, "--resume", "--lr", "1e-3") == 2
    assert "was made with another --" in capsys.readouterr().err
    dev = trained.parent / "bert-text-classifier-100-40.jsonl"
    before = record(trained)
    assert train(MODEL, "--data", data, "--eval", dev, "-o", trained, *QUICK, "--resume") == 0
    after = record(trained)
    assert after["epochs"] == before["epochs"] and after["curve"] == before["curve"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["--epochs", "0"], "--epochs 0: it is 1 or more", 2),
        (["--batch", "0"], "--batch 0: it is 1 or more", 2),
        (["--lr", "-1"], "--lr -1: it is more than 0", 2),
        (["--lr", "nan"], "--lr nan", 2),
        (["--warmup", "-1"], "--warmup -1: it is 0 or more", 2),
        (["--optimizer", "adam"], "--optimizer adam: it is one of adamw, lamb, sgd", 2),
        (["--engine", "jax"], "--engine jax: it is one of ort, torch", 2),
        (["--eval", "none.jsonl"], "--eval none.jsonl: no such file", 2),
        (["--metric", "f1"], "--metric f1 is of --eval, and no --eval is given", 2),
        (["--engine", "torch", "--verify"], "--verify holds an engine against PyTorch", 2),
        (["--task", "fill-mask"], "is not trained here", 2),
        (["--columns", "text=body"], "has no column 'body'", 2),
        (["--tolerance", "abs<1"], "tolerance abs<1", 2),
        (["--tolerance", "kl<=0.1"], "kl", 2),
        (["--threads", "5000"], "--threads 5000: from 1 to 1024", 2),
    ],
)
def test_bad_wishes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str, code: int
) -> None:
    data = running.rows(running.CLASSIFIER, tmp_path, count=4)
    extra = ["--allow-missing-weights"] if "fill-mask" in words else []
    assert train(MODEL, "--data", data, "-o", tmp_path / "out", *words, *extra, "-q") == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("nlpconvert: ") and said in lines[0], lines
    assert not (tmp_path / "out").exists(), "nothing is left"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "a", "label": 9}, "line 2: the model has no label 9"),
        ({"text": "a", "label": "cross"}, "line 2: the model has no label 'cross'"),
        ({"text": "a"}, "line 2: has no 'label'"),
    ],
)
@pytest.mark.parametrize("option", ["--data", "--eval"])
def test_bad_rows_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], said: str, option: str
) -> None:
    good = running.write(tmp_path / "good.jsonl", [{"text": "b", "label": 0}] * 3)
    bad = running.write(tmp_path / "bad.jsonl", [{"text": "b", "label": 0}, row])
    files = ["--data", bad] if option == "--data" else ["--data", good, "--eval", bad]
    assert train(MODEL, *files, "-o", tmp_path / "out", "-q", "--engine", "torch") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0] and str(bad) in lines[0], lines


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = running.rows(running.CLASSIFIER, tmp_path, count=4), tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    assert train(MODEL, "--data", data, "-o", out, "-q") == 2
    assert "is not empty and holds something else, no training.json" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_an_empty_shard_is_one_line(tmp_path: Path) -> None:
    """Three rows for four ranks."""
    from nlpconvert.errors import UsageError
    from nlpconvert.training.ranks import Ranks

    data = running.rows(running.CLASSIFIER, tmp_path, count=3)
    four = Ranks(world.World(0, 0, 4, "torchrun"))
    run = training_run.Run(
        MODEL, tmp_path / "out", training_run.Wishes(data), training_run.Options(), training_run.Silent(), four, "torch"
    )
    with pytest.raises(UsageError, match="3 rows for 4 ranks: the shard of rank 3 is empty"):
        run.trained()


@pytest.mark.slow
def test_without_the_training_flavour_it_says_which_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nlpconvert.errors import MissingPackage
    from nlpconvert.training import engines

    def missing() -> None:
        raise MissingPackage("ONNX Runtime for training is not installed")

    monkeypatch.setattr(engines, "require_ort", missing)
    data = running.rows(running.CLASSIFIER, tmp_path, count=4)
    assert train(MODEL, "--data", data, "-o", tmp_path / "out", "--engine", "ort") == 5
    assert train(MODEL, "--data", data, "-o", tmp_path / "out", "--verify") == 5
    capfd.readouterr()
    assert train(MODEL, "--data", data, "-o", tmp_path / "out", *QUICK) == 0
    assert "engine: torch (PyTorch itself; pip install 'nlpconvert[training]'" in capfd.readouterr().err
    assert record(tmp_path / "out")["engine"]["name"] == "torch"


def test_a_wrong_gradient_ends_it_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is broken on purpose: exit 1, the parameter named, nothing trained."""
    from nlpconvert.training.ort import OrtEngine

    step = OrtEngine.step

    def broken(self: OrtEngine, batch: Any, seed: int) -> float:
        loss = step(self, batch, seed)
        gradient = self.parameters["bert.embeddings.position_embeddings.weight"].grad
        assert gradient is not None
        gradient.mul_(1.01)
        return loss

    monkeypatch.setattr(OrtEngine, "step", broken)
    data = running.rows(running.CLASSIFIER, tmp_path, count=8)
    assert train(MODEL, "--data", data, "-o", tmp_path / "out", *QUICK, "--engine", "ort", "-q") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "bert.embeddings.position_embeddings.weight" in lines[0], lines
    assert not list((tmp_path / "out").glob("checkpoints/*")) and not (tmp_path / "out" / "model").exists()
    assert train(MODEL, "--data", data, "-o", tmp_path / "v", "--verify", "--json", "-q") == 1
    assert json.loads(capsys.readouterr().out)["gradients"]["agrees"] is False


def test_a_loss_that_is_no_number_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = running.rows(running.CLASSIFIER, tmp_path), tmp_path / "out"
    words = ["--optimizer", "sgd", "--lr", "1e30", "--clip", "0", "--warmup", "2", "--checkpoint-every", "1"]
    assert train(MODEL, "--data", data, "-o", out, *words, "--batch", "4", "-q") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "training is stopped; the last good checkpoint is" in lines[0], lines
    held = record(out)
    assert held["status"] == "stopped" and held["exit_code"] == 1 and held["why"] in lines[0]


# -- the comparison with PyTorch ---------------------------------------------------------------------------------------


def test_verify_compares_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = running.rows(running.CLASSIFIER, tmp_path)
    assert train(MODEL, "--data", data, "-o", tmp_path / "out", "--verify", "--steps", "5", "--batch", "8") == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said] == [[each, "agree"] for each in ("gradients", "losses", "weights")]
    assert "5 steps" in said[1] and not (tmp_path / "out").exists()


def test_a_drifting_engine_is_seen_by_its_losses_and_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that are right once and wrong by 3 % afterwards."""
    from nlpconvert.training.ort import OrtEngine

    step = OrtEngine.step
    calls: list[int] = []

    def drifting(self: OrtEngine, batch: Any, seed: int) -> float:
        loss = step(self, batch, seed)
        calls.append(1)
        if len(calls) > 1:
            for name, each in self.parameters.items():
                if each.grad is not None and "layer.0" in name:
                    each.grad.mul_(1.03)
        return loss

    monkeypatch.setattr(OrtEngine, "step", drifting)
    data = running.rows(running.CLASSIFIER, tmp_path)
    words = ["--verify", "--steps", "5", "--batch", "8", "--optimizer", "sgd"]
    assert train(MODEL, "--data", data, "-o", tmp_path / "out", *words) == 1
    assert "DISAGREE" in capsys.readouterr().out


# -- whole runs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_and_gone_on_with(tmp_path: Path) -> None:
    """SIGKILL in the middle; --resume ends with the very bits of a run that was left alone, dropout on."""
    data = running.rows(running.CLASSIFIER, tmp_path, count=32)
    words = ["--data", data, "--epochs", "1", "--batch", "1", "--accumulate", "2", "--checkpoint-every", "2", "-q"]
    out = tmp_path / "out"
    child = subprocess.Popen(command(MODEL, "-o", out, *words), env=environment(), cwd=running.ROOT)
    try:
        until = time.monotonic() + 90
        while not list(out.glob("checkpoints/step-0000000[2-9]")) and time.monotonic() < until:
            time.sleep(0.005)
    finally:
        child.kill()
        child.wait()
    assert record(out)["status"] == "running" and not (out / "model").exists()
    assert train(MODEL, "-o", out, *words, "--resume") == 0
    assert train(MODEL, "-o", tmp_path / "whole", *words) == 0
    found, right = (load_file(each / "model" / "model.safetensors") for each in (out, tmp_path / "whole"))
    assert all(np.array_equal(found[name], right[name]) for name in right)
    assert record(out)["curve"]["loss"] == record(tmp_path / "whole")["curve"]["loss"]
    assert not [path for path in out.rglob("*") if ".nlpconvert." in path.name], "nothing half-made is left"


def under_torchrun(*words: object) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nlpconvert"]
    return subprocess.run(
        [*run, "train", *map(str, words)],
        env=environment(), capture_output=True, text=True, cwd=running.ROOT, timeout=240,
    )  # fmt: skip


@pytest.mark.slow
def test_two_ranks_are_one_to_the_end(tmp_path: Path) -> None:
    data = running.rows(running.CLASSIFIER, tmp_path, count=21)
    words = ["--data", data, "--epochs", "1", "--no-dropout", "--lr", "1e-4"]
    done = under_torchrun(MODEL, "-o", tmp_path / "two", *words, "--batch", "4")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("finished after 3 steps") == 1 and "2 ranks" in done.stdout
    assert train(MODEL, "-o", tmp_path / "one", *words, "--batch", "8", "-q") == 0
    two, one = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("two", "one"))
    assert all(np.allclose(two[name], one[name], rtol=0, atol=5e-5) for name in one)
    assert record(tmp_path / "two")["curve"]["loss"] == pytest.approx(
        record(tmp_path / "one")["curve"]["loss"], rel=1e-6
    )


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    """One of two ranks, started as mpirun would: the other ends within seconds, in one line, and can go on."""
    data, out = running.rows(running.CLASSIFIER, tmp_path, count=32), tmp_path / "out"
    words = ["--data", data, "-o", out, "--epochs", "40", "--batch", "1", "--checkpoint-every", "2", "-q"]

    def start(rank: int) -> subprocess.Popen[str]:
        told = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in (
            ("RANK", rank), ("LOCAL_RANK", rank), ("SIZE", 2), ("LOCAL_SIZE", 2))}  # fmt: skip
        return subprocess.Popen(
            command(MODEL, *words), env=environment() | told, cwd=running.ROOT, stderr=subprocess.PIPE, text=True
        )

    ranks = [start(rank) for rank in range(2)]
    try:
        until = time.monotonic() + 120
        while not list(out.glob("checkpoints/step-*")) and time.monotonic() < until:
            time.sleep(0.01)
        ranks[1].kill()
        said = ranks[0].communicate(timeout=60)[1]
    finally:
        for each in ranks:
            if each.poll() is None:
                each.kill()
            each.communicate()
    assert ranks[0].returncode == 1
    assert [line for line in said.splitlines() if line] == [
        "nlpconvert: rank 1 has ended without a word (killed, or out of memory): the run is ended on all ranks; "
        "--resume goes on from the last checkpoint"
    ]

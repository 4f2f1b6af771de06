"""Models that write, through the whole line: exported with their cache, judged while they write, verified again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import nlpconvert
from nlpconvert import cli, disk, generation, manifest, models, pipeline
from nlpconvert.artifact import Outcome
from nlpconvert.backends import writing
from nlpconvert.source import load
from nlpconvert.writer import encodes
from tests import tiny, writers
from tests.test_cached import ALL as DECODERS
from tests.test_cached import MORE as MORE_DECODERS
from tests.test_cached import each, free
from tests.test_cached_pair import ALL as PAIRS
from tests.test_cached_pair import MORE as MORE_PAIRS

ROWS = {**tiny.ROWS, **MORE_DECODERS, **MORE_PAIRS}
QUICK = ("gpt2", "t5")
NEW = 200
LIMITS = ("n_positions", "max_position_embeddings")


def converted(name: str, folder: Path) -> tuple[Path, Path]:
    """A tiny model that can take 300 tokens, and its OUT."""
    values = {limit: 300 for limit in LIMITS if limit in ROWS[name].values}
    model = tiny.save(ROWS[name], folder / "model", **values)
    (outcome,) = pipeline.convert_step("onnx", str(model), folder / "out")
    assert outcome.status == "agrees", (outcome.reason, outcome.verdict)
    return model, folder / "out"


@pytest.mark.parametrize("name", each((*DECODERS, *PAIRS), QUICK))
def test_200_tokens_are_pytorchs_and_weights_stand_once(name: str, tmp_path: Path) -> None:
    model, out = converted(name, tmp_path)
    record = manifest.read(out)
    artifact, facts = record.artifact("onnx", out), models.facts_from_data(record.facts)
    verdict = record.record("onnx").outcome.verdict
    assert verdict is not None
    written = verdict["written"]
    assert written["problems"] == [] and written["texts"]["identical"] == written["texts"]["rows"] > 0
    assert {each["name"] for each in written["phases"]} >= {"prompt", "single steps", "cached against uncached"}

    loaded = load(str(model))
    data = sum(path.stat().st_size for path in artifact.directory.glob("*.data"))
    # At this size GPT-Neo's masks and M2M-100's table of positions, which are buffers, weigh as much as parameters.
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in loaded.module.buffers())
    assert data <= 1.05 * (loaded.parameter_bytes + buffers)

    rng = np.random.default_rng(0)
    plain = [each for each in range(facts.vocab_size) if each not in facts.special_ids]
    batch = generation.pad_for(facts, [rng.choice(plain, n).tolist() for n in (3, 14, 9, 1)])
    writer = writing.open(artifact, facts, threads=1)
    made = generation.generate(writer, batch, generation.Settings(max_new_tokens=NEW, pad=facts.pad_id))
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    theirs: Any = free(ROWS[name], loaded).generate(**tensors, do_sample=False, max_new_tokens=NEW)
    np.testing.assert_array_equal(made.tokens, theirs[:, -NEW:].numpy())
    assert not encodes(facts) or artifact.encoder is not None


@pytest.fixture(scope="module")
def gpt2_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted("gpt2", tmp_path_factory.mktemp("line"))[1]


def rewire(out: Path, names: dict[str, str]) -> None:
    """Gives outputs of the graph each other's names, as a careless exporter would, and records the file as its own."""
    writers.rename(out / "onnx" / "model.onnx", names)
    data = json.loads((out / manifest.FILE).read_text())
    data["steps"]["onnx"]["artifact"]["files"] = disk.hash_tree(out / "onnx")
    (out / manifest.FILE).write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("swapped", "words"),
    [
        (("present.0.key", "present.1.key"), "looks like               the keys of layers 0 and 1 are swapped"),
        (("present.1.key", "present.1.value"), "looks like               key and value of layer 1 are swapped"),
    ],
    ids=["layers", "key-and-value"],
)
def test_a_cache_that_is_wired_wrongly_fails_the_build(
    swapped: tuple[str, str],
    words: str,
    gpt2_out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Every prompt read at once is answered exactly as before: only writing with the cache shows it."""
    out = tmp_path / "out"
    shutil.copytree(gpt2_out, out)
    one, two = swapped
    rewire(out, {one: two, two: one})
    assert cli._main(["verify", str(out), "--step", "onnx"]) == 1
    told = capfd.readouterr().out
    assert "onnx disagrees with pytorch" in told and "single steps" in told and "DRIFT" in told
    assert words in told, told
    assert "prompt                   agrees" in told


def test_goldens_without_passages_are_asked_anew(gpt2_out: Path, tmp_path: Path) -> None:
    """An OUT of a version that knew no passages: verify says what it can, a new step asks PyTorch again."""
    out = tmp_path / "out"
    shutil.copytree(gpt2_out, out)
    for name in ("written.json", "written.safetensors"):
        (out / "golden" / name).unlink()
    data = json.loads((out / manifest.FILE).read_text())
    data["golden"]["files"] = disk.hash_tree(out / "golden")
    (out / manifest.FILE).write_text(json.dumps(data))
    (outcome,) = pipeline.verify(out)
    assert outcome.status == "agrees" and outcome.verdict is not None and "written" not in outcome.verdict
    found = {each.step: each for each in pipeline.convert_step("torchscript", str(gpt2_out.parent / "model"), out)}
    assert found["torchscript"].status == "agrees" and (out / "golden" / "written.json").is_file()
    again: list[Outcome] = pipeline.verify(out, steps=["onnx"])
    assert again[0].verdict is not None and again[0].verdict["written"]["texts"]["rows"] > 0


def test_generate_from_python(gpt2_out: Path) -> None:
    made: Any = nlpconvert.generate(gpt2_out / "onnx", ["5 7 9"], ids=True, max_new_tokens=4)
    assert len(made.rows) == 1 and len(made.rows[0].ids) == 4


def copied(gpt2_out: Path, out: Path, change: Callable[[Path], None]) -> Path:
    """A copy of OUT with its artifact changed and recorded as its own."""
    shutil.copytree(gpt2_out, out)
    change(out / "onnx")
    data = json.loads((out / manifest.FILE).read_text())
    data["steps"]["onnx"]["artifact"]["files"] = disk.hash_tree(out / "onnx")
    (out / manifest.FILE).write_text(json.dumps(data))
    return out


def test_other_generation_settings_are_not_the_checkpoints(gpt2_out: Path, tmp_path: Path) -> None:
    def change(onnx_dir: Path) -> None:
        path = onnx_dir / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 5, "repetition_penalty": 1.8}))

    (outcome,) = pipeline.verify(copied(gpt2_out, tmp_path / "out", change))
    assert outcome.status == "drift"
    assert outcome.reason.startswith("onnx/generation_config.json is not the checkpoint's generation_config.json")


def test_a_cache_that_does_not_come_out_is_a_drift_with_reports(
    gpt2_out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def change(onnx_dir: Path) -> None:
        model = onnx.load(onnx_dir / "model.onnx", load_external_data=False)
        (lost,) = [value for value in model.graph.output if value.name == "present.1.value"]
        model.graph.output.remove(lost)
        (onnx_dir / "model.onnx").write_bytes(model.SerializeToString())

    out, junit = copied(gpt2_out, tmp_path / "out", change), tmp_path / "v.xml"
    assert cli._main(["verify", str(out), "--junit", str(junit)]) == 1
    told = capfd.readouterr().out
    assert "output present.1.value is missing" in told
    assert "the graph takes past_key_values.1.value and gives nothing back for it" in told
    assert junit.is_file()


def test_weights_that_are_cut_off_are_told(gpt2_out: Path, tmp_path: Path) -> None:
    def change(onnx_dir: Path) -> None:
        data = (onnx_dir / "model.onnx.data").read_bytes()
        (onnx_dir / "model.onnx.data").write_bytes(data[: len(data) // 2])

    (outcome,) = pipeline.verify(copied(gpt2_out, tmp_path / "out", change))
    assert outcome.status == "drift" and outcome.reason.startswith("model.onnx.data is cut off: it is ")

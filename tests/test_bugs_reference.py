"""Public bug reports on modes, element types and the reference (C): what we answer instead.

| report | what goes wrong | test |
|---|---|---|
| O-16 | traced in training mode | test_o16_*; test_torchscript.py::test_o16_training_mode_is_refused |
| O-17 | an exporter leaves dropout on in the reference | test_o17_*; test_onnx.py::test_o17_* |
| O-18 | bfloat16 checkpoints | test_o18_a_bfloat16_checkpoint; test_source.py::test_reference_is_float32 |
| O-19 | Marian's bias and tied output lost | test_o19_*; test_architectures.py[marian] |
| O-20 | masks of float32's smallest number | test_o20_every_mask_is_finite (in float32) |

D (graph optimisation), F (quantisation) and G (other engines) are about steps that do not exist yet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nlpconvert import forward, pipeline, source
from nlpconvert.artifact import Artifact
from nlpconvert.convert import torchscript
from nlpconvert.source import Loaded
from tests import tiny
from tests.asking import CLOSE, ask, batch, loaded, make


def to_bfloat16(directory: Path) -> Path:
    file = directory / "model.safetensors"
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return directory


# -- O-16, O-17 --------------------------------------------------------------------------------------------------------


def test_o16_dropout_of_the_config_is_off(tmp_path: Path) -> None:
    """However high it is set: loaded in eval mode, traced in eval mode, and twice the same answer."""
    model = loaded(tiny.ROWS["bert"], tmp_path / "model", hidden_dropout_prob=0.9, attention_probs_dropout_prob=0.9)
    artifact = make("torchscript", model, tmp_path / "torchscript")
    asked = batch(model.facts, [9, 4])
    first, second = ask(artifact, asked)["logits"], ask(artifact, asked)["logits"]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, forward.call(model.module, asked)["logits"], **CLOSE)


def test_o16_a_trace_with_dropout_is_a_drift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the converter's own check, the verdict sees it."""
    own = torchscript._trace

    def in_training_mode(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Any:
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.train()
        try:
            return own(module, inputs)
        finally:
            module.eval()

    monkeypatch.setattr(torch.jit, "freeze", lambda module: module)
    monkeypatch.setattr(torchscript, "_trace", in_training_mode)
    model = tiny.save(tiny.ROWS["bert"], tmp_path / "model")
    (outcome,) = pipeline.run(str(model), tmp_path / "out", to=["torchscript"])
    assert outcome.status == "drift"


def test_o17_the_reference_is_asked_before_any_exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter that spoils the model it was given changes no golden: a second, careful run agrees with it."""
    own = torchscript.convert

    def careless(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
        module.train()
        with torch.no_grad():
            next(module.parameters()).mul_(2.0)
        module.eval()
        return own(module, *args, **options)

    model = tiny.save(tiny.ROWS["bert"], tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(torchscript, "convert", careless)
        (spoiled,) = pipeline.run(str(model), tmp_path / "out", to=["torchscript"])
    assert spoiled.status == "drift"
    goldens = (tmp_path / "out" / "golden" / "outputs.safetensors").read_bytes()
    options = pipeline.Options(force=True)
    (careful,) = pipeline.run(str(model), tmp_path / "out", to=["torchscript"], options=options)
    assert careful.status == "agrees"
    assert (tmp_path / "out" / "golden" / "outputs.safetensors").read_bytes() == goldens


# -- O-18, O-19 --------------------------------------------------------------------------------------------------------


def test_o18_a_bfloat16_checkpoint(tmp_path: Path) -> None:
    """The reference and the artifact compute in float32 on the stored values; the stored type is recorded."""
    model = to_bfloat16(tiny.save(tiny.ROWS["bert"], tmp_path / "model"))
    (outcome,) = pipeline.run(str(model), tmp_path / "out", to=["torchscript"])
    assert outcome.status == "agrees" and outcome.artifact is not None
    assert [spec.dtype for spec in outcome.artifact.outputs] == ["float32"]
    recorded = json.loads((tmp_path / "out" / "nlpconvert.json").read_text())
    assert recorded["source"]["dtype"] == "bfloat16"


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """In bfloat16, with a random final_logits_bias."""
    directory = to_bfloat16(tiny.save(tiny.ROWS["marian"], tmp_path_factory.mktemp("marian") / "model"))
    assert load_file(directory / "model.safetensors")["final_logits_bias"].abs().max() > 0.3
    return source.load(str(directory))


@pytest.mark.parametrize("step", ["torchscript", pytest.param("onnx", marks=pytest.mark.slow)])
def test_o19_marians_bias_and_tied_output(step: str, marian: Loaded, tmp_path: Path) -> None:
    artifact = make(step, marian, tmp_path / step)
    asked = batch(marian.facts, [9, 4])
    answer = ask(artifact, asked)["logits"]
    np.testing.assert_allclose(answer, forward.call(marian.module, asked)["logits"], **CLOSE)
    # By hand, from what is stored: the decoder's states times the embedding, plus the bias.
    stored = load_file(marian.directory / "model.safetensors")
    bias = marian.module.get_buffer("final_logits_bias")
    assert torch.equal(bias, stored["final_logits_bias"].float())
    with torch.no_grad():
        tensors = {name: torch.from_numpy(array) for name, array in asked.items()}
        states = marian.module.get_submodule("model")(**tensors).last_hidden_state
        expected = states @ stored["model.shared.weight"].float().T + bias
    np.testing.assert_allclose(answer, expected.numpy(), **CLOSE)
    assert np.abs(answer - (expected - bias).numpy()).max() > 0.3


# -- O-20 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        ("bert", "sdpa", "torchscript"),
        ("bert", "eager", "torchscript"),
        ("gpt2", "sdpa", "torchscript"),
        ("gpt2", "eager", "torchscript"),
        ("gpt2", "sdpa", "onnx"),
        pytest.param(("bert", "eager", "onnx"), marks=pytest.mark.slow),
        pytest.param(("bert", "sdpa", "onnx"), marks=pytest.mark.slow),
        pytest.param(("gpt2", "eager", "onnx"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def attending(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Artifact]:
    """A model with one attention implementation, and one artifact of it."""
    name, attention, step = request.param
    folder = tmp_path_factory.mktemp(name)
    model = tiny.save(tiny.ROWS[name], folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "attn_implementation": attention}))
    reference = source.load(str(model))
    assert reference.module.config._attn_implementation == attention  # type: ignore[union-attr]
    return reference, make(step, reference, folder / step)


@pytest.mark.parametrize("mask", ["right", "left", "holes", "zero"])
def test_o20_every_mask_is_finite(mask: str, attending: tuple[Loaded, Artifact]) -> None:
    model, artifact = attending
    asked = batch(model.facts, [12, 8, 4], left=mask == "left")
    if mask == "holes":
        asked["attention_mask"][0, 2:9:3] = 0
    if mask == "zero":
        asked["attention_mask"][1] = 0
    answer, reference = ask(artifact, asked)["logits"], forward.call(model.module, asked)["logits"]
    assert np.isfinite(answer).all()
    real = asked["attention_mask"] == 1 if answer.ndim == 3 else asked["attention_mask"].any(-1)
    np.testing.assert_allclose(answer[real], reference[real], **CLOSE)

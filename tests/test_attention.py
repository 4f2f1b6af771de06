"""Attentions put together again: what is proven, what is left alone, and the masks that no fusion may touch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from nlpconvert import forward
from nlpconvert.artifact import Artifact
from nlpconvert.convert import attention
from nlpconvert.disk import hash_tree
from nlpconvert.source import Loaded
from tests import tiny
from tests.asking import CLOSE, ask, batch, loaded, make
from tests.test_optimize import fused, operators


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Artifact]:
    folder = tmp_path_factory.mktemp("bert")
    model = loaded(tiny.ROWS["bert"], folder / "model")
    return model, make("onnx", model, folder / "onnx")


# -- masks -------------------------------------------------------------------------------------------------------------


def test_the_smallest_number_as_a_mask_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's Attention gives zeros for a row without a key, where T5 weighs all alike: why MASKED is there."""
    monkeypatch.setattr(attention, "MASKED", float(np.finfo(np.float32).min))
    model = loaded(tiny.ROWS["t5"], tmp_path / "model")
    parent = make("onnx", model, tmp_path / "onnx")
    rows = batch(model.facts, [9, 4])
    rows["attention_mask"][1] = 0
    reference = ask(parent, rows)["logits"]
    assert np.abs(ask(fused(parent, tmp_path / "fused"), rows)["logits"] - reference)[1].max() > 0.01
    monkeypatch.undo()
    np.testing.assert_allclose(ask(fused(parent, tmp_path / "again"), rows)["logits"], reference, **CLOSE)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_o23_all_optimization_levels_agree(name: str, tmp_path: Path) -> None:
    values = {"hidden_act": "gelu_new"} if name == "bert" else {}
    model = loaded(tiny.ROWS[name], tmp_path / "model", **values)
    parent = make("onnx", model, tmp_path / "onnx")
    made = [fused(parent, tmp_path / target, target) for target in ("cpu", "cuda")]
    rows = batch(model.facts, [9, 4, 6])
    rows["attention_mask"][2] = 0
    reference = forward.call(model.module, rows)["logits"]
    levels = onnxruntime.GraphOptimizationLevel
    for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_BASIC, levels.ORT_ENABLE_EXTENDED, levels.ORT_ENABLE_ALL):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = level
        for each in made:
            session = onnxruntime.InferenceSession(str(each.path), options, providers=["CPUExecutionProvider"])
            fed = {value.name: rows[value.name] for value in session.get_inputs()}
            np.testing.assert_allclose(session.run(["logits"], fed)[0], reference, **CLOSE, err_msg=str(level))


# -- what cannot be proven is not fused --------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_attention_heads": 8}, "the graph has 4 heads, config.json says 8"),
        ({"num_attention_heads": 0}, "the graph has 4 heads, config.json says 0"),
        ({}, "the graph has 4 heads, config.json says no number"),
        (None, "the graph has 4 heads, config.json says no number"),
        ([], "the graph has 4 heads, config.json says no number"),
    ],
)
def test_o22_another_number_of_heads(
    target: str, config: Any, said: str, bert: tuple[Loaded, Artifact], tmp_path: Path
) -> None:
    model, parent = bert
    shutil.copytree(parent.directory, tmp_path / "onnx")
    file = tmp_path / "onnx" / "config.json"
    file.unlink() if config is None else file.write_text(json.dumps(config))
    changed = Artifact(**{**vars(parent), "path": tmp_path / "onnx" / "model.onnx", "files": hash_tree(file.parent)})
    made = fused(changed, tmp_path / "fused", target)
    assert made.made_by["fused"]["attention"] == [0, 2]
    notes = made.made_by["notes"]
    assert any(note.startswith("fused: 0 of 2 attentions") for note in notes)
    assert [note for note in notes if said in note] == [
        f"not fused: attention: bert.encoder.layer.{n}.attention.self: {said}" for n in range(2)
    ]
    rows = batch(model.facts, [9, 4], left=True)
    np.testing.assert_allclose(ask(made, rows)["logits"], ask(parent, rows)["logits"], **CLOSE)


def test_o24_pruned_heads(tmp_path: Path) -> None:
    """A layer with 3 of its 4 heads is left alone, the other one is fused."""
    model = loaded(tiny.ROWS["bert"], tmp_path / "model")
    layer = next(each for name, each in model.module.named_modules() if name.endswith("encoder.layer.0.attention"))
    layer.self.num_attention_heads, layer.self.all_head_size = 3, 24
    for name in ("query", "key", "value"):
        whole = getattr(layer.self, name)
        part = torch.nn.Linear(32, 24)
        part.load_state_dict({"weight": whole.weight[:24], "bias": whole.bias[:24]})
        setattr(layer.self, name, part.eval())
    dense = torch.nn.Linear(24, 32)
    dense.load_state_dict({"weight": layer.output.dense.weight[:, :24], "bias": layer.output.dense.bias})
    layer.output.dense = dense.eval()
    made = fused(make("onnx", model, tmp_path / "onnx"), tmp_path / "fused")
    assert made.made_by["fused"]["attention"] == [1, 2]
    assert "layer.0.attention.self: the graph has 3 heads, config.json says 4" in made.made_by["not_fused"][0]
    for left in (False, True):
        rows = batch(model.facts, [9, 4], left=left)
        np.testing.assert_allclose(ask(made, rows)["logits"], forward.call(model.module, rows)["logits"], **CLOSE)


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_o24_heads_wider_than_the_model(target: str, tmp_path: Path) -> None:
    """Llama with 4 heads of 16 and a hidden size of 32; keys and values in two groups."""
    model = loaded(tiny.ROWS["llama"], tmp_path / "model", head_dim=16)
    made = fused(make("onnx", model, tmp_path / "onnx"), tmp_path / "fused", target)
    assert made.made_by["fused"]["attention"] == [2, 2]
    if target == "cpu":  # each key is there once, not once for every query of its group
        assert operators(made.path)["Expand"] < operators(tmp_path / "onnx" / "model.onnx")["Expand"]
    for left in (False, True):
        rows = batch(model.facts, [9, 4], left=left)
        np.testing.assert_allclose(ask(made, rows)["logits"], forward.call(model.module, rows)["logits"], **CLOSE)


@pytest.mark.parametrize("opset", [18, 23])
def test_parents_of_other_opsets(opset: int, bert: tuple[Loaded, Artifact], tmp_path: Path) -> None:
    """From opset 23 on the exporter writes the standard's Attention itself."""
    model, _ = bert
    parent = make("onnx", model, tmp_path / "onnx", opset=opset)
    rows = batch(model.facts, [9, 4], left=True)
    for target in ("cpu", "cuda"):
        made = fused(parent, tmp_path / target, target)
        assert made.made_by["opset"] == (23 if target == "cpu" else opset)
        assert made.made_by["fused"]["attention"] == ([0, 0] if opset == 23 else [2, 2])
        already = "2 attentions stand in the parent as one operator already" in made.made_by["notes"]
        assert already == (opset == 23)
        np.testing.assert_allclose(ask(made, rows)["logits"], ask(parent, rows)["logits"], **CLOSE)

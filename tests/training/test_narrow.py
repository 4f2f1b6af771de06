"""training/narrow: what reads one token of a state has only that one computed, and all else is left as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from nlpconvert.training import graph, narrow
from nlpconvert.training.losses import Objective
from nlpconvert.training.ort import OrtEngine
from tests.training.objectives import held, judged, loaded


def moved(objective: Objective) -> tuple[int, onnx.ModelProto]:
    model = graph.trace(objective)
    graph._save_statistics(model)
    model = graph.infer(model)
    count = narrow.read_first(model)
    return count, graph.infer(model)


def shapes(model: onnx.ModelProto) -> dict[str, list[str]]:
    return {
        each.name: [dim.dim_param or str(dim.dim_value) for dim in each.type.tensor_type.shape.dim]
        for each in model.graph.value_info
    }


def test_the_last_layer_of_a_classifier_computes_one_token(fixtures_dir: Path) -> None:
    count, model = moved(loaded(fixtures_dir / "bert-text-classifier"))
    found = shapes(model)
    layers = [f"/model/bert/encoder/layer.{number}" for number in range(3)]
    wide = [found[f"{layer}/intermediate/dense/MatMul_output_0"] for layer in layers]
    assert wide == [["batch", "sequence", "256"], ["batch", "sequence", "256"], ["batch", "1", "256"]]
    assert found[f"{layers[2]}/attention/output/dense/MatMul_output_0"] == ["batch", "1", "96"]
    assert found[f"{layers[2]}/attention/self/query/MatMul_output_0"] == ["batch", "sequence", "96"]
    assert count == 17
    onnx.checker.check_model(model)


def test_loss_and_gradients_are_the_same(fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = loaded(fixtures_dir / "bert-text-classifier")
    batch = objective.example(rows=5, tokens=11)
    losses, gradients = [], []
    for _ in range(2):
        engine = OrtEngine(objective, threads=1)
        engine.dropout = False
        losses.append(engine.step(batch, 0))
        gradients.append(held(engine))
        monkeypatch.setattr(narrow, "read_first", lambda model: 0)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, each in gradients[0].items():
        np.testing.assert_allclose(each, gradients[1][name], rtol=1e-4, atol=1e-6 * np.abs(each).max() + 1e-7)


@pytest.mark.parametrize("name", ["bert-token-classifier", "gpt2-lm", "t5-seq2seq", "bert-question-answering"])
def test_where_every_token_is_read_nothing_moves(fixtures_dir: Path, name: str) -> None:
    assert moved(loaded(fixtures_dir / name))[0] == 0


# -- by hand -----------------------------------------------------------------------------------------------------------

READ: dict[str, tuple[str, int]] = {
    "rows for themselves": ("Relu(x) -> a; Add(a, w) -> b; Gather(b, zero) -> y", 2),
    "a sum with what came before": ("Relu(x) -> a; Add(a, x) -> b; Gather(b, zero) -> y", 2),
    "another token": ("Relu(x) -> a; Gather(a, two) -> y", 1),
    "a product with weights": ("MatMul(x, square) -> a; Tanh(a) -> b; Gather(b, zero) -> y", 2),
    "tokens meet": ("Relu(x) -> a; Softmax(a) -> b; Gather(b, zero) -> y", 0),
    "read elsewhere too": ("Relu(x) -> a; ReduceSum(a) -> z; Gather(a, zero) -> y", 0),
    "an output of the graph": ("Relu(x) -> z; Gather(z, zero) -> y", 0),
    "tokens are added to by other tokens": ("Add(x, tokens) -> a; Gather(a, zero) -> y", 0),
    "two read the same": ("Relu(x) -> a; Gather(a, zero) -> y; Gather(a, two) -> z", 0),
    "a product with a state": ("MatMul(x, states) -> a; Gather(a, zero) -> y", 0),
}


@pytest.mark.parametrize("name", READ)
def test_by_hand(name: str) -> None:
    words, count = READ[name]
    before = by_hand(words)
    after = onnx.ModelProto.FromString(before.SerializeToString())
    assert narrow.read_first(after) == count
    drawn = np.random.default_rng(0)
    given = {"x": drawn.standard_normal((2, 3, 3)), "tokens": drawn.standard_normal((3, 3))}
    given |= {"states": drawn.standard_normal((2, 3, 3)), "w": drawn.standard_normal(3), "square": np.eye(3) + 1}
    feeds = {each.name: given[each.name].astype(np.float32) for each in before.graph.input}
    answers = [ReferenceEvaluator(model).run(None, feeds) for model in (before, after)]
    for ours, theirs in zip(*answers, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def by_hand(words: str) -> onnx.ModelProto:
    """A model from "Relu(x) -> a; ..."; y and z are outputs."""
    nodes = []
    for line in words.split("; "):
        call, out = line.split(" -> ")
        kind, inputs = call.rstrip(")").split("(")
        more: dict[str, int] = {"Gather": {"axis": 1}, "Softmax": {"axis": 1}, "ReduceSum": {"keepdims": 0}}.get(
            kind, {}
        )
        nodes.append(onnx.helper.make_node(kind, inputs.split(", "), [out], name=f"/{out}", **more))
    shape: dict[str, list[str | int]] = {
        "x": ["batch", "sequence", 3],
        "tokens": ["sequence", 3],
        "states": ["batch", 3, 3],
        "w": [3],
        "square": [3, 3],
    }
    read = {name for node in nodes for name in node.input}
    made = [name for node in nodes for name in node.output]
    value: Callable[..., onnx.ValueInfoProto] = onnx.helper.make_tensor_value_info
    kind = onnx.TensorProto.FLOAT
    proto = onnx.helper.make_graph(
        nodes,
        "by-hand",
        [value(name, kind, each) for name, each in shape.items() if name in read],
        [
            value(name, kind, None if name == "y" or "ReduceSum" in words else shape["x"])
            for name in made
            if name in "yz"
        ],
        [
            onnx.numpy_helper.from_array(np.array(each), name)
            for name, each in (("zero", 0), ("two", 2))
            if name in read
        ],
    )
    model = onnx.helper.make_model(proto, opset_imports=[onnx.helper.make_opsetid("", graph.OPSET)], ir_version=8)
    model.graph.value_info.extend(value(name, kind, shape["x"]) for name in made if name not in "yz")
    return model


def test_what_is_moved_is_verified_as_always(classifier: Path) -> None:
    objective = loaded(classifier)
    assert moved(objective)[0] > 0
    assert judged(objective).agrees

"""Breaks of graphs, on small graphs made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from nlpconvert import breaks
from nlpconvert.breaks import Asked, NotApplicable
from nlpconvert.convert import breaking
from nlpconvert.convert.breaking_graph import SCOPES, Graph

WIDTH, INNER, HEADS = 8, 16, 2
RNG = np.random.default_rng(0)


def node(op: str, inputs: list[str], outputs: list[str], module: str = "", domain: str = "", **attributes: Any) -> Any:
    made = helper.make_node(op, inputs, outputs, domain=domain, **attributes)
    if module:
        made.metadata_props.add(key=SCOPES, value=f"['', 'layer', '{module}', 'operation']")
    return made


def block(dtype: Any = np.float32) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Embeddings, one attention-like projection into heads, a feed-forward layer and a normalization."""
    weights = {
        "table": RNG.normal(size=(20, WIDTH)).astype(dtype),
        "positions": RNG.normal(size=(12, WIDTH)).astype(dtype),
        "query.weight": RNG.normal(size=(WIDTH, WIDTH)).astype(dtype),
        "query.bias": RNG.normal(size=WIDTH).astype(dtype),
        "up.weight": RNG.normal(size=(WIDTH, INNER)).astype(dtype),
        "down.weight": RNG.normal(size=(INNER, WIDTH)).astype(dtype),
        "down.bias": RNG.normal(size=WIDTH).astype(dtype),
        "norm.weight": np.ones(WIDTH, dtype),
        "split": np.array([0, 0, HEADS, WIDTH // HEADS], np.int64),
        "joined": np.array([0, 0, WIDTH], np.int64),
        "first": np.array(0, np.int64),
        "step": np.array(1, np.int64),
    }
    nodes = [
        node("Gather", ["table", "input_ids"], ["tokens"], "embeddings.tokens"),
        node("Shape", ["input_ids"], ["length"], start=1, end=2),
        node("Squeeze", ["length"], ["count"]),
        node("Range", ["first", "count", "step"], ["counted"]),
        node("Gather", ["positions", "counted"], ["placed"], "embeddings.positions"),
        node("Add", ["tokens", "placed"], ["hidden"]),
        node("MatMul", ["hidden", "query.weight"], ["product"], "layer.query"),
        node("Add", ["product", "query.bias"], ["query"], "layer.query"),
        node("Reshape", ["query", "split"], ["heads"], "layer"),
        node("Reshape", ["heads", "joined"], ["mixed"], "layer"),
        node("MatMul", ["mixed", "up.weight"], ["wide"], "layer.up"),
        node("Tanh", ["wide"], ["active"], "layer.act"),
        node("MatMul", ["active", "down.weight"], ["narrow"], "layer.down"),
        node("Add", ["narrow", "down.bias"], ["downed"], "layer.down"),
        node("Add", ["downed", "hidden"], ["summed"], "layer"),
        node("LayerNormalization", ["summed", "norm.weight"], ["logits"], "layer.norm", epsilon=1e-12),
    ]
    return nodes, weights


def write(
    directory: Path, nodes: list[Any], weights: Mapping[str, np.ndarray], dtype: int = TensorProto.FLOAT, at: int = 128
) -> Path:
    """model.onnx, with a data file for all tensors of `at` bytes and more."""
    directory.mkdir(exist_ok=True)
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    out = helper.make_tensor_value_info("logits", dtype, ["batch", "sequence", WIDTH])
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "small", [ids], [out], tensors)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    path = directory / "model.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=at)
    return path


def answer(path: Path, data: Path | None = None) -> np.ndarray:
    from nlpconvert.backends import onnxruntime

    session = onnxruntime.open_file(path, threads=1, data=data)
    given = session.run({"input_ids": np.array([[3, 4, 5, 6], [7, 8, 3, 9]])})
    session.close()
    return given["logits"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", *block())


def broken(path: Path, name: str, tmp_path: Path, **asked: Any) -> breaks.Broken:
    directory = tmp_path / "broken"
    directory.mkdir(exist_ok=True)
    return breaking.break_file(path, name, directory, Asked(**asked))


# -- graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module", "what"),
    [
        ("weight-nudged", "layer.down", "down.weight times 1.1"),
        ("heads-swapped", "layer.query", "heads 0 and 1 of query.weight"),
        ("bias-dropped", "layer.down", "down.bias all zeros"),
        ("positions-shifted", "embeddings.positions", "row i + 1 of positions"),
        ("epsilon-changed", "layer.norm", "epsilon 0.1 instead of 1e-12"),
        ("row-zeroed", "embeddings.tokens", "row 4 of table all zeros"),
    ],
)
def test_a_broken_graph_answers_otherwise_and_names_its_module(
    model: Path, tmp_path: Path, name: str, module: str, what: str
) -> None:
    before = {file.name: file.read_bytes() for file in model.parent.iterdir()}
    done = broken(model, name, tmp_path, factor=1.1, token=4)
    assert done.path is not None
    assert (done.module, what in done.what) == (module, True), done
    whole, changed = answer(model), answer(done.path, model.parent)
    assert np.isfinite(changed).all()
    assert np.abs(whole - changed).max() > 1e-3
    assert {file.name: file.read_bytes() for file in model.parent.iterdir()} == before
    assert [file.name for file in (tmp_path / "broken").iterdir()] == ["broken.onnx"], "no copy of the weights"


def test_only_what_is_changed_stands_inside(model: Path, tmp_path: Path) -> None:
    done = broken(model, "weight-nudged", tmp_path, factor=1.5)
    assert done.path is not None
    graph = onnx.load(str(done.path), load_external_data=False).graph
    inside = {t.name for t in graph.initializer if t.data_location != TensorProto.EXTERNAL}
    assert inside == {"down.weight", *(t.name for t in graph.initializer if np.prod(t.dims) < 16)}
    assert np.allclose(Graph(done.path).tensor("down.weight"), Graph(model).tensor("down.weight") * 1.5)


def test_a_tied_head_keeps_its_weight(tmp_path: Path) -> None:
    nodes, weights = block()
    nodes[-1].output[0] = "normed"
    nodes += [
        node("Transpose", ["table"], ["turned"], perm=[1, 0]),
        node("MatMul", ["normed", "turned"], ["scores"], "head"),
        node("Slice", ["scores", "from", "to", "axes"], ["logits"]),
    ]
    weights |= {"from": np.array([0]), "to": np.array([WIDTH]), "axes": np.array([2])}
    path = write(tmp_path / "model", nodes, weights)
    done = broken(path, "row-zeroed", tmp_path, token=4)
    assert done.path is not None
    graph = Graph(done.path)
    assert not graph.tensor("table.broken")[4].any()
    assert "table" in graph.tensors
    assert answer(done.path, path.parent).shape == (2, 4, WIDTH)


def test_half_precision(tmp_path: Path) -> None:
    path = write(tmp_path / "model", *block(np.float16), dtype=TensorProto.FLOAT16)
    assert broken(path, "weight-nudged", tmp_path, factor=1.01).module == "layer.down"
    with pytest.raises(NotApplicable, match=r"float16 cannot hold a step of 1.0e-06"):
        broken(path, "weight-nudged", tmp_path, factor=1.000001)


def quantized() -> tuple[list[Any], dict[str, np.ndarray]]:
    """The block with int8 weights behind a DequantizeLinear, a scale for every output."""
    nodes, weights = block()
    for name in ("query", "down"):
        array = weights.pop(f"{name}.weight")
        scale = (np.abs(array).max(0) / 127).astype(np.float32)
        weights[f"{name}.int8"] = np.round(array / scale).astype(np.int8)
        weights[f"{name}.scale"], weights[f"{name}.zero"] = scale, np.zeros(len(scale), np.int8)
        at = next(i for i, each in enumerate(nodes) if f"{name}.weight" in each.input)
        nodes[at].input[1] = f"{name}.wide"
        names = [f"{name}.int8", f"{name}.scale", f"{name}.zero"]
        nodes.insert(at, node("DequantizeLinear", names, [f"{name}.wide"], axis=1))
    return nodes, weights


def test_a_quantized_weight_is_nudged_by_its_scale(tmp_path: Path) -> None:
    path = write(tmp_path / "model", *quantized())
    done = broken(path, "weight-nudged", tmp_path, factor=1.01)
    assert done.path is not None
    assert (done.module, done.what) == ("layer.down", "down.scale times 1.01")
    doubled = broken(path, "scale-doubled", tmp_path)
    assert doubled.path is not None
    assert np.abs(answer(doubled.path, path.parent) - answer(path)).max() > 1e-2


def test_heads_of_a_quantized_weight_take_their_scales_along(tmp_path: Path) -> None:
    path = write(tmp_path / "model", *quantized())
    done = broken(path, "heads-swapped", tmp_path)
    assert done.path is not None
    whole, swapped = Graph(path), Graph(done.path)
    order = [4, 5, 6, 7, 0, 1, 2, 3]
    assert np.array_equal(swapped.tensor("query.int8"), whole.tensor("query.int8")[:, order])
    inside = {name: swapped.tensor(name) for name in ("query.int8", "query.scale")}
    assert np.array_equal(inside["query.scale"], whole.tensor("query.scale")[order])


def test_blocked_weights_of_four_bits(tmp_path: Path) -> None:
    nodes, weights = block()
    at = next(i for i, each in enumerate(nodes) if "down.weight" in each.input)
    del weights["down.weight"]
    packed = RNG.integers(0, 256, (WIDTH, 1, INNER // 2)).astype(np.uint8)
    weights |= {"down.int4": packed, "down.scales": RNG.random(WIDTH).astype(np.float32)}
    nodes[at] = node(
        "MatMulNBits",
        ["active", "down.int4", "down.scales"],
        ["narrow"],
        "layer.down",
        "com.microsoft",
        K=INNER,
        N=WIDTH,
        bits=4,
        block_size=16,
    )
    path = write(tmp_path / "model", nodes, weights)
    linear = next(each for each in Graph(path).linears if each.module == "layer.down")
    assert (linear.inputs, linear.outputs, linear.scale, linear.bias) == (INNER, WIDTH, "down.scales", "down.bias")
    done = broken(path, "weight-nudged", tmp_path, factor=1.1)
    assert done.path is not None
    assert done.what == "down.scales times 1.1"
    assert np.abs(answer(done.path, path.parent) - answer(path)).max() > 1e-3


def test_a_layer_in_two_products_is_swapped_and_nudged_whole(tmp_path: Path) -> None:
    nodes, weights = block()
    whole = weights.pop("query.weight")
    weights |= {"query.most": whole[:6], "query.rest": whole[6:], "cut": np.array([6, 2])}
    at = next(i for i, each in enumerate(nodes) if "query.weight" in each.input)
    nodes[at : at + 1] = [
        node("Split", ["hidden", "cut"], ["most", "rest"], axis=2),
        node("MatMul", ["most", "query.most"], ["a"], "layer.query"),
        node("MatMul", ["rest", "query.rest"], ["b"], "layer.query"),
        node("Add", ["a", "b"], ["product"], "layer.query"),
    ]
    path = write(tmp_path / "model", nodes, weights)
    found = Graph(path)
    assert {each.weight: (found.block(each), each.bias) for each in found.linears if each.module == "layer.query"} == {
        "query.most": (4, "query.bias"),
        "query.rest": (4, "query.bias"),
    }
    done = broken(path, "heads-swapped", tmp_path)
    assert done.path is not None
    order = [4, 5, 6, 7, 0, 1, 2, 3]
    for name in ("query.most", "query.rest"):
        assert np.array_equal(Graph(done.path).tensor(name), found.tensor(name)[:, order])


def test_a_normalization_that_was_written_out(tmp_path: Path) -> None:
    nodes, weights = block()
    nodes[-1:] = [
        node("Mul", ["summed", "summed"], ["squares"]),
        node("ReduceMean", ["squares", "last"], ["mean"], "layer.norm"),
        node("Add", ["mean", "epsilon"], ["more"], "layer.norm"),
        node("Sqrt", ["more"], ["root"], "layer.norm"),
        node("Div", ["summed", "root"], ["logits"], "layer.norm"),
    ]
    weights |= {"last": np.array([-1]), "epsilon": np.array(1e-6, np.float32)}
    path = write(tmp_path / "model", nodes, weights)
    done = broken(path, "epsilon-changed", tmp_path)
    assert done.path is not None
    assert (done.module, done.what) == ("layer.norm", "epsilon 0.1 instead of 1e-06")
    assert np.abs(answer(done.path, path.parent) - answer(path)).max() > 1e-4


def test_a_frozen_batch_is_declared(model: Path, tmp_path: Path) -> None:
    from nlpconvert.backends import onnxruntime
    from nlpconvert.validators import structure

    done = broken(model, "batch-frozen", tmp_path, batch=3)
    assert done.path is not None
    assert structure.onnx_specs(structure.onnx_graph(done.path))[0][0].shape == (3, "sequence")
    session = onnxruntime.open_file(done.path, threads=1, data=model.parent)
    with pytest.raises(Exception, match="invalid dimensions"):
        session.run({"input_ids": np.zeros((2, 4), np.int64)})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("weight-nudged", "no product with a constant weight"),
        ("heads-swapped", "no projection into two heads"),
        ("bias-dropped", "no layer has a bias"),
        ("positions-shifted", "no table of positions"),
        ("epsilon-changed", "no normalization"),
        ("scale-doubled", "no weight has a scale"),
        ("row-zeroed", "no table of token embeddings"),
    ],
)
def test_what_is_not_there_cannot_be_broken(tmp_path: Path, name: str, reason: str) -> None:
    cast = [node("Cast", ["input_ids"], ["logits"], to=TensorProto.FLOAT)]
    path = write(tmp_path / "model", cast, {})
    with pytest.raises(NotApplicable, match=reason):
        broken(path, name, tmp_path)


def test_data_that_leads_out_is_not_read(model: Path, tmp_path: Path) -> None:
    from nlpconvert.errors import DriftError

    written = onnx.load(str(model), load_external_data=False)
    for tensor in written.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../elsewhere"
    model.write_bytes(written.SerializeToString())
    with pytest.raises(DriftError, match=r"down\.weight cannot be read from its data file"):
        broken(model, "weight-nudged", tmp_path, factor=1.1)

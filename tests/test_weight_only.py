"""Weight-only and dynamic integers: the operators compute what they should, and what is made is judged and replayed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from nlpconvert import blocks, calibration, disk, manifest, pipeline, recipe, search
from nlpconvert.artifact import Outcome
from nlpconvert.convert import dynamic_int8, linear, onnx_graph, weight_only
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.recipe import Layer, Recipe
from tests import asking, tiny

Arrays = dict[str, np.ndarray]
SCOPE = "['', 'encoder', 'encoder.dense', 'linear']"


# -- graphs of one layer -----------------------------------------------------------------------------------------------


def graph_of(nodes: Sequence[onnx.NodeProto], weights: Arrays, channels: int, outputs: int) -> onnx_ir.Model:
    """x (batch, channels) or (batch, sequence, channels) to y, by `nodes`."""
    for node in nodes:
        entry = node.metadata_props.add()
        entry.key, entry.value = onnx_graph.SCOPES, SCOPE
    rank3 = all(node.op_type != "Gemm" for node in nodes)
    axes: list[str | int] = ["batch", "sequence"] if rank3 else ["batch"]
    graph = helper.make_graph(
        list(nodes),
        "one",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*axes, channels])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*axes, outputs])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model))


def one_layer(kind: str, channels: int, outputs: int) -> tuple[onnx_ir.Model, np.ndarray, np.ndarray]:
    """A "MatMul" and an Add, or a "Gemm" with transB; its weight (inputs, outputs) and bias."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal((channels, outputs)) / np.sqrt(channels)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32)
    if kind == "Gemm":
        nodes = [helper.make_node("Gemm", ["x", "w", "b"], ["y"], transB=1)]
        return graph_of(nodes, {"w": weight.T.copy(), "b": bias}, channels, outputs), weight, bias
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    return graph_of(nodes, {"w": weight, "b": bias}, channels, outputs), weight, bias


def of(graph: onnx_ir.Graph, **values: Any) -> Recipe:
    """A recipe that gives every layer of a graph the same values."""
    found = linear.find(graph)
    rows = [Layer(weight.name, weight.name, share=1.0, **values) for weight in found.weights]
    rows += [Layer(name, name, "float32", 0.0, why=why) for name, why in found.left.items()]
    kind = "dynamic" if values["precision"] == "int8" else "weight-only"
    return Recipe("onnx-int4", kind, "onnx", "", tuple(rows))


def asked(model: onnx_ir.Model, batch: Arrays) -> np.ndarray:
    """The first output, by ONNX Runtime, of a graph as it stands."""
    proto = onnx_ir.to_proto(model)
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, batch)[0])


def rows(kind: str, channels: int) -> np.ndarray:
    drawn = np.random.default_rng(1).standard_normal((3, 5, channels)).astype(np.float32)
    return drawn.reshape(-1, channels) if kind == "Gemm" else drawn


@pytest.mark.parametrize("kind", ["MatMul", "Gemm"])
@pytest.mark.parametrize("channels", [96, 40, 200])
@pytest.mark.parametrize(("bits", "block"), [(4, 16), (4, 32), (8, 32), (8, 128)])
@pytest.mark.parametrize("zero_points", [False, True])
def test_the_operator_computes_the_restored_weight(
    kind: str, channels: int, bits: int, block: int, zero_points: bool
) -> None:
    """Within the rounding of what goes in: a scale of max / 127 for every block of a token."""
    model, weight, bias = one_layer(kind, channels, 48)
    importance = np.random.default_rng(2).gamma(1, 1, channels).astype(np.float32)
    taken_off = np.linspace(-1, 1, 48, dtype=np.float32)
    made = of(
        model.graph,
        precision=f"int{bits}-weight",
        block=block,
        zero_points=zero_points,
        strength=0.25,
        importance=importance,
        bias=taken_off,
    )
    weight_only.apply(model.graph, made)
    x = rows(kind, channels)
    factor = blocks.factors(importance, 0.25)
    restored = blocks.restored(weight_only.rounded(made.layers[0], weight))
    expected = (x / factor) @ restored + bias - taken_off
    step = np.abs(x / factor).max(-1, keepdims=True) / 127
    # Every input is rounded by at most half a step, with either sign: four standard deviations of their sum.
    allowed = 4 * step / np.sqrt(12) * np.sqrt(np.square(restored).sum(0))
    found = asked(model, {"x": x})
    assert (np.abs(found - expected) <= allowed + 1e-5).all()
    # And that is the float layer, to the bits it has.
    exact = x @ weight + bias - taken_off
    assert np.abs(found - exact).mean() < (0.1 if bits == 4 else 0.02) * exact.std()


def test_nodes_keep_their_module_and_the_float_weight_goes() -> None:
    model, _, _ = one_layer("Gemm", 64, 32)
    made = of(model.graph, precision="int4-weight", block=32, strength=0.25, importance=np.ones(64, np.float32))
    weight_only.apply(model.graph, made)
    assert [node.op_type for node in model.graph] == ["Mul", "MatMulNBits", "Add"]
    assert {node.metadata_props[onnx_graph.SCOPES] for node in model.graph} == {SCOPE}
    assert model.graph.opset_imports["com.microsoft"] == 1
    assert set(model.graph.initializers) == {"w.int4", "w.scales", "b", "encoder.dense.divisor"}
    attributes = {name: value.value for name, value in model.graph[1].attributes.items()}
    assert attributes == {"K": 64, "N": 32, "bits": 4, "block_size": 32, "accuracy_level": 4}
    assert model.graph.outputs[0].name == "y"


@pytest.mark.parametrize("kind", ["MatMul", "Gemm"])
@pytest.mark.parametrize("largest", [127, 63])
def test_dynamic_computes_the_layer(kind: str, largest: int) -> None:
    model, weight, bias = one_layer(kind, 96, 48)
    dynamic_int8.apply(model.graph, replace(of(model.graph, precision="int8"), largest=largest))
    stored = model.graph.initializers["w.int8"].const_value
    assert stored is not None
    assert np.abs(stored.numpy().astype(int)).max() == largest
    assert "w" not in model.graph.initializers
    assert {node.metadata_props[onnx_graph.SCOPES] for node in model.graph} == {SCOPE}
    x = rows(kind, 96)
    exact = x @ weight + bias
    assert np.abs(asked(model, {"x": x}) - exact).max() < 0.06 * exact.std()


def test_dynamic_depends_on_the_company_and_weight_only_does_not() -> None:
    """One token of a hundred times the size beside the others: what the report of a dynamic artifact warns of."""
    x = rows("MatMul", 96)
    beside = np.concatenate([x, 100 * x[:1]])
    moved = {}
    for precision, apply in (("int8", dynamic_int8.apply), ("int8-weight", weight_only.apply)):
        model, _, _ = one_layer("MatMul", 96, 48)
        apply(model.graph, of(model.graph, precision=precision, block=32))
        moved[precision] = np.abs(asked(model, {"x": beside})[:3] - asked(model, {"x": x})).max()
    assert moved["int8-weight"] == 0
    assert moved["int8"] > 0.1


def test_a_weight_of_three_axes_is_left_and_named() -> None:
    """Quantizing it per channel makes a file that cannot be opened: onnxruntime#25489."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((32, 16)).astype(np.float32),
        "v": rng.standard_normal((3, 16, 24)).astype(np.float32),
    }
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("MatMul", ["m", "v"], ["y"])]
    nodes[1].name = "experts"
    for precision, apply in (("int8", dynamic_int8.apply), ("int4-weight", weight_only.apply)):
        model = graph_of(nodes, weights, 32, 24)
        model.graph[1].metadata_props.clear()
        x = rows("MatMul", 32)
        before = asked(model, {"x": x})
        made = of(model.graph, precision=precision, block=32)
        assert {layer.name: layer.why for layer in made.layers} == {
            "encoder.dense": "",
            "experts": "its weight has 3 axes",
        }
        apply(model.graph, made)
        assert "v" in model.graph.initializers
        assert 0 < np.abs(asked(model, {"x": x}) - before).mean() < 0.2 * before.std()


# -- recipes that do not fit -------------------------------------------------------------------------------------------


def test_a_recipe_that_quantizes_nothing_is_an_error() -> None:
    """onnxruntime#24459: the quantizer said nothing and had done nothing."""
    for apply in (weight_only.apply, dynamic_int8.apply):
        model, _, _ = one_layer("MatMul", 64, 32)
        with pytest.raises(ConversionError, match="no layer was quantized"):
            apply(model.graph, of(model.graph, precision="float32"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"block": 24}, "block of encoder.dense is 24: a power of two from 16 up"),
        ({"block": 8}, "is 8: a power of two"),
        ({"block": 32, "importance": np.ones(7, np.float32)}, "importance of encoder.dense does not fit"),
        ({"block": 32, "bias": np.ones(7, np.float32)}, "bias of encoder.dense does not fit"),
        ({"block": 32, "strength": 0.5}, "no importance of its inputs"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(values: dict[str, Any], expected: str) -> None:
    model, _, _ = one_layer("MatMul", 64, 32)
    with pytest.raises(UsageError, match=expected):
        weight_only.apply(model.graph, of(model.graph, precision="int4-weight", **values))


def test_a_weight_that_is_not_finite_is_told_by_name() -> None:
    for precision, apply in (("int8", dynamic_int8.apply), ("int4-weight", weight_only.apply)):
        model, weight, _ = one_layer("MatMul", 64, 32)
        weight[0, 0] = np.inf
        model.graph.initializers["w"].const_value = onnx_ir.tensor(weight, name="w")
        with pytest.raises(ConversionError, match=r"encoder\.dense: a weight is not finite"):
            apply(model.graph, of(model.graph, precision=precision, block=32))


# -- shared weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["albert", "bert"])
def test_what_was_stored_once_is_stored_once(name: str, tmp_path: Path) -> None:
    """ALBERT's layers share their weights; a masked-LM head is the embedding table, and that stays a float table."""
    row = tiny.ROWS[name] if name == "albert" else replace(tiny.ROWS["bert"], model="BertForMaskedLM")
    model = asking.loaded(row, tmp_path / "model", num_hidden_layers=3, hidden_size=64, vocab_size=2000)
    base = asking.make("onnx", model, tmp_path / "onnx")
    for precision, apply in (("int8", dynamic_int8.apply), ("int4-weight", weight_only.apply)):
        program = onnx_ir.load(base.path)
        found = linear.find(program.graph)
        count = sum(len(weight.nodes) for weight in found.weights)
        assert (count > len(found.weights)) == (name == "albert")
        made = of(program.graph, precision=precision, block=32)
        tables = [layer.name for layer in made.layers if "embedding table" in layer.why]
        assert len(tables) == 1
        apply(program.graph, made)
        product = "MatMulInteger" if precision == "int8" else "MatMulNBits"
        products = [node for node in program.graph if node.op_type == product]
        assert len(products) == count
        assert len({node.inputs[1].name for node in products if node.inputs[1]}) == len(found.weights)
        large = [
            value.const_value.nbytes
            for value in program.graph.initializers.values()
            if value.const_value is not None and value.const_value.nbytes > 2000 * 16 * 3
        ]
        assert len(large) == 1, "the table, once"


# -- through the line --------------------------------------------------------------------------------------------------

BUDGET = 20.0


def int4(model: Path, out: Path, **options: Any) -> Outcome:
    return pipeline.run(str(model), out, to=["onnx-int4"], options=pipeline.Options(threads=1, **options))[-1]


@pytest.fixture(scope="module")
def gpt2(fixtures_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Outcome]]:
    """OUT of the GPT-2 fixture with its int4 step."""
    out = tmp_path_factory.mktemp("gpt2") / "out"
    yield out, int4(fixtures_dir / "gpt2-lm", out)


def test_a_language_model_agrees_in_4_bits(gpt2: tuple[Path, Outcome]) -> None:
    out, outcome = gpt2
    assert outcome.status == "agrees", outcome
    made = recipe.read(out / "onnx-int4" / "recipe.json")
    assert made.share > 0.5
    assert outcome.artifact is not None
    assert outcome.artifact.made_by["layers"]["int4-weight"] >= 12
    assert made.layer("lm_head").why.startswith("its weight is an embedding table too")
    model = onnx.load(str(out / "onnx-int4" / "model.onnx"))
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulNBits") == 12
    size = sum(np.prod(tensor.dims) for tensor in model.graph.initializer if tensor.data_type == TensorProto.FLOAT)
    before = onnx.load(str(out / "onnx" / "model.onnx"))
    table = max(np.prod(tensor.dims) for tensor in before.graph.initializer)
    assert table < size < 1.5 * table


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-lm", "t5-seq2seq"])
def test_other_language_models_agree_in_4_bits(name: str, fixtures_dir: Path, tmp_path: Path) -> None:
    outcome = int4(fixtures_dir / name, tmp_path / "out", search_budget=BUDGET)
    assert outcome.status == "agrees", outcome
    assert outcome.artifact is not None
    assert outcome.artifact.made_by["layers"]["int4-weight"] > 10


def test_a_replay_measures_nothing_and_gives_the_same_bytes(
    gpt2: tuple[Path, Outcome], fixtures_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = gpt2

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a replay measured something")

    monkeypatch.setattr(calibration, "runner", never)
    monkeypatch.setattr(search, "Bench", never)
    again = int4(fixtures_dir / "gpt2-lm", tmp_path / "out", recipe=out / "onnx-int4" / "recipe.json")
    assert again.status == "agrees", again
    for file in ("model.onnx", "model.onnx.data", "recipe.json", "recipe.safetensors"):
        assert (tmp_path / "out" / "onnx-int4" / file).read_bytes() == (out / "onnx-int4" / file).read_bytes(), file


def test_another_models_recipe_is_refused(gpt2: tuple[Path, Outcome], classifier: Path, tmp_path: Path) -> None:
    out, _ = gpt2
    with pytest.raises(UsageError, match="another model's"):
        int4(classifier, tmp_path / "out", recipe=out / "onnx-int4" / "recipe.json")


def a_scale_is_doubled(arrays: Arrays) -> None:
    (name,) = [name for name in arrays if name.endswith("h.1.mlp.c_fc.weight.scales")]
    arrays[name] = arrays[name] * np.float32(2)


def nibbles_are_swapped(arrays: Arrays) -> None:
    (name,) = [name for name in arrays if name.endswith("h.1.mlp.c_fc.weight.int4")]
    arrays[name] = (arrays[name] >> 4) | (arrays[name] << 4)


def a_divisor_is_lost(arrays: Arrays) -> None:
    for name in arrays:
        if name.endswith("divisor"):
            arrays[name] = np.ones_like(arrays[name])


@pytest.mark.parametrize("break_it", [a_scale_is_doubled, nibbles_are_swapped, a_divisor_is_lost])
def test_a_broken_artifact_is_seen(
    break_it: Callable[[Arrays], None], gpt2: tuple[Path, Outcome], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(gpt2[0], out)
    path = out / "onnx-int4" / "model.onnx"
    model = onnx.load(str(path))
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    break_it(arrays)
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(arrays[tensor.name], tensor.name))
    path.with_name("model.onnx.data").unlink()
    onnx.save(model, str(path))
    record = manifest.read(out)
    artifact = record.artifact("onnx-int4", out)
    artifact = replace(artifact, files=disk.hash_tree(artifact.directory))
    record.with_step(replace(record.outcome("onnx-int4", out), artifact=artifact)).write(out)
    (outcome,) = pipeline.verify(out, steps=["onnx-int4"])
    assert outcome.status == "drift"


@pytest.mark.slow
def test_minilm_agrees_in_4_bits(minilm: Path, tmp_path: Path) -> None:
    """With little time for the search: sites that were not measured alone are estimated."""
    outcome = int4(minilm, tmp_path / "out", search_budget=BUDGET)
    assert outcome.status == "agrees", outcome
    assert outcome.artifact is not None
    layers = outcome.artifact.made_by["layers"]
    assert layers["int4-weight"] > 0
    assert layers["float32"] == 0
    assert outcome.artifact.made_by["size_over_parent"] < 0.7

"""The file that static int8 writes: every property it must have, read from the file, and what it computes.

The mix is not searched for here: every layer goes to integers, with no channel, a few or more of them apart.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from nlpconvert import integers, judging, plan, search
from nlpconvert.artifact import STEPS, Artifact
from nlpconvert.backends import onnxruntime as backend
from nlpconvert.convert import derived, linear, static_int8
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.integers import SATURATING, Preparation, Sampler
from nlpconvert.making import Work
from nlpconvert.models import Facts
from nlpconvert.progress import Silent
from nlpconvert.recipe import Layer, Recipe
from tests import asking, tiny

INTEGER_PRODUCTS = ("MatMulIntegerToFloat", "MatMulInteger", "QLinearMatMul", "QGemm")
NOISE = 2e-5
"""Relative difference of two float32 computations of one answer, after a few layers."""

TIED = tiny.Tiny("tied", "BertForMaskedLM", "BertConfig", {**tiny.S, "max_position_embeddings": 64})
ROWS = {**tiny.ROWS, "tied": TIED}


# -- making them -------------------------------------------------------------------------------------------------------


def work_of(parent: Artifact, facts: Facts, scratch: Path, step: str = "onnx-qdq", **options: Any) -> Work:
    """What the line hands to the maker of a step; ids are drawn."""
    nothing: Any = None
    return Work(
        row=STEPS[step],
        options=plan.Options(threads=1, **options),
        record=nothing,
        loaded=None,
        parent=parent,
        new=scratch / "new",
        log=scratch / "log",
        probes=judging.Probes([], {}, {}, ""),
        tolerances=(),
        progress=Silent(),
        facts=facts,
        encode=None,
    )


class Model:
    """A tiny model's ONNX graph with its layers' inputs sampled; files that are made from it."""

    def __init__(self, row: tiny.Tiny, directory: Path, **values: Any) -> None:
        loaded = asking.loaded(row, directory / "model", **values)
        self.facts, self.directory = loaded.facts, directory
        self.modules = [name for name, _ in loaded.module.named_modules()]
        self.parent = asking.make("onnx", loaded, directory / "onnx")
        work = work_of(self.parent, self.facts, directory)
        self.bench = search.Bench(work, self.parent, directory / "scratch", time.perf_counter() + 3600)
        self.static = self.searching()
        self.made: dict[tuple[int, str, int], Path] = {}

    def searching(self, activation: str = "int8", largest: int = 127) -> search.Static:
        return search.Static(self.bench, activation=activation, largest=largest)

    def recipe(self, level: int, activation: str = "int8", largest: int = 127) -> Recipe:
        static = self.static if (activation, largest) == ("int8", 127) else self.searching(activation, largest)
        return static.recipe(dict.fromkeys(static.sites, level))

    def file(self, level: int, activation: str = "int8", largest: int = 127) -> Path:
        """model.onnx with all layers at a level: 0 none of a site's channels apart, 1 a few, 2 more."""
        key = (level, activation, largest)
        if key not in self.made:
            program = derived.load(self.parent)
            static_int8.apply(program.graph, self.recipe(*key))
            directory = self.directory / f"{level}-{activation}-{largest}"
            directory.mkdir()
            derived.write(program, self.parent, directory)
            self.made[key] = directory / "model.onnx"
        return self.made[key]

    def answers(self, path: Path) -> list[dict[str, np.ndarray]]:
        """Over batches of unlike lengths, padded on either side, one row and many."""
        batches = [
            asking.batch(self.facts, [7, 3, 12]),
            asking.batch(self.facts, [40]),
            asking.batch(self.facts, [2, 9], left=self.facts.positions == "mask"),
            asking.batch(self.facts, [1, 5, 8, 4, 4], width=20),
        ]
        session = backend.open_file(path, threads=1)
        return [session.run(each) for each in batches]


_MODELS: dict[str, Model] = {}


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """The model of a row, exported and sampled once for all test files."""

    def get(name: str) -> Model:
        if name not in _MODELS:
            _MODELS[name] = Model(ROWS[name], tmp_path_factory.mktemp(name))
        return _MODELS[name]

    return get


def error(reference: Sequence[Mapping[str, np.ndarray]], candidate: Sequence[Mapping[str, np.ndarray]]) -> float:
    """Root mean square of all differences over that of the reference, the worst output."""
    worst = 0.0
    for name in reference[0]:
        before = np.concatenate([each[name].reshape(-1) for each in reference]).astype(np.float64)
        after = np.concatenate([each[name].reshape(-1) for each in candidate]).astype(np.float64)
        assert np.isfinite(after).all()
        worst = max(worst, float(np.sqrt(np.square(after - before).sum() / np.square(before).sum())))
    return worst


# -- reading them ------------------------------------------------------------------------------------------------------


class Quantized:
    """A quantized file, read for its Q/DQ pairs. Reading asserts what must hold of every one of them."""

    def __init__(self, path: Path, activation: str = "int8") -> None:
        onnx.checker.check_model(str(path))
        graph = onnx.load(str(path)).graph
        self.constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
        self.nodes = list(graph.node)
        self.maker = {name: node for node in self.nodes for name in node.output}
        self.users: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in self.nodes:
            for index, name in enumerate(node.input):
                self.users.setdefault(name, []).append((node, index))
        self.zero = np.array(128, np.uint8) if activation == "uint8" else np.array(0, np.int8)
        self.scales: list[np.ndarray] = []
        self.weights: set[str] = set()
        self.products: list[onnx.NodeProto] = []
        quantized = [node for node in self.nodes if node.op_type == "QuantizeLinear"]
        for node in quantized:
            self._activation(node)
        for node in self.nodes:
            if node.op_type == "DequantizeLinear" and node.input[0] in self.constants:
                self._weight(node)
        for node in self.nodes:
            if node.op_type == "DequantizeLinear" and node.input[0] not in self.constants:
                assert self.maker[node.input[0]] in quantized

    def _activation(self, node: onnx.NodeProto) -> None:
        """x - shift, times multiplier, rounded with one scale, straight back, and into products with a weight alone."""
        scale, zero = self.constants[node.input[1]], self.constants[node.input[2]]
        assert scale.shape == () and scale.dtype == np.float32
        assert zero.shape == () and zero.dtype == self.zero.dtype and zero == self.zero
        self.scales.append(scale)
        multiply = self.maker[node.input[0]]
        subtract = self.maker[multiply.input[0]]
        assert (multiply.op_type, subtract.op_type) == ("Mul", "Sub")
        for each in (multiply, subtract):
            assert self.constants[each.input[1]].ndim == 1
        ((back, index),) = self.users[node.output[0]]
        assert back.op_type == "DequantizeLinear" and index == 0
        assert list(back.input[1:]) == list(node.input[1:])
        for user, index in self.users[back.output[0]]:
            assert (user.op_type, index) == ("MatMul", 0)
            weight = self.maker[user.input[1]]
            assert weight.op_type == "DequantizeLinear" and weight.input[0] in self.constants

    def _weight(self, node: onnx.NodeProto) -> None:
        """int8 in the file, a symmetric scale for each column, behind a DequantizeLinear alone."""
        whole, scale, zero = (self.constants[name] for name in node.input)
        assert whole.dtype == np.int8 and whole.ndim == 2
        assert [helper.get_attribute_value(each) for each in node.attribute if each.name == "axis"] == [1]
        assert scale.dtype == np.float32 and scale.shape == (whole.shape[1],)
        assert zero.dtype == np.int8 and zero.shape == scale.shape and not zero.any()
        # On the right axis: every column fills its own range.
        largest = np.abs(whole.astype(int)).max(0)
        assert set(largest[largest > 0]) in ({127}, {SATURATING})
        self.scales.append(scale)
        self.weights.add(node.input[0])
        ((user, index),) = self.users[node.output[0]]
        assert (user.op_type, index) == ("MatMul", 1)
        assert self.maker[user.input[0]].op_type == "DequantizeLinear"
        self.products.append(user)

    @property
    def floats(self) -> dict[str, np.ndarray]:
        """Matrices in float32."""
        return {name: array for name, array in self.constants.items() if array.ndim >= 2 and array.dtype == np.float32}


def integer_products(path: Path, scratch: Path) -> int:
    """How many products ONNX Runtime really computes on integers, by the graph it runs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(scratch / "running.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    running = Counter(
        node.op_type for node in onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
    )
    return sum(running[kind] for kind in INTEGER_PRODUCTS)


QUICK = ("bert", "gpt2", "albert")
NAMES = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (*QUICK, "llama", "t5", "tied", "roberta", "modernbert", "bart", "xlnet", "deberta-v2", "bloom")
    ],
)


@NAMES
@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_property_of_the_file(name: str, level: int, model_of: Callable[[str], Model], tmp_path: Path) -> None:
    model = model_of(name)
    found = Quantized(model.file(level))
    layers = model.static.found.weights
    assert len(found.weights) == len(layers)  # what layers share is stored once
    assert len(found.products) == sum(len(weight.nodes) for weight in layers)
    for scale in found.scales:
        assert np.isfinite(scale).all() and (scale > 0).all() and (scale < 1e6).all()
    # Nothing but products with a weight: no bias, mask, softmax or normalization is rounded.
    kinds = Counter(node.op_type for node in found.nodes)
    sites = [site for site in model.static.found.sites]
    assert kinds["QuantizeLinear"] == sum(len(site.inputs) for site in sites)
    assert kinds["DequantizeLinear"] == kinds["QuantizeLinear"] + len(found.products)
    assert not any(array.dtype == np.int32 for array in found.constants.values())
    # The float form of a quantized weight is gone; what is apart are a few of its rows.
    before = onnx_ir.load(model.parent.path).graph
    gone = {weight.value.name for weight in layers}
    assert not gone & set(found.constants)
    kept = [array for key, array in found.floats.items() if key not in before.initializers]
    apart = [] if level == 0 else [max(weight.rows // search.LEVELS[level], 1) * weight.columns for weight in layers]
    assert sorted(array.size for array in kept) == sorted(apart)
    # The same for the processor: with unsigned activations ONNX Runtime multiplies integers in every one of them.
    unsigned = Quantized(model.file(level, "uint8"), "uint8")
    assert len(unsigned.products) == len(found.products)
    assert integer_products(model.file(level, "uint8"), tmp_path) == len(found.products)


@NAMES
def test_the_rewrite_moves_nothing_but_noise(name: str, model_of: Callable[[str], Model], tmp_path: Path) -> None:
    model = model_of(name)
    reference = model.answers(model.parent.path)
    for level in (0, 1, 2):
        program = derived.load(model.parent)
        static_int8.rewrite_exactly(program.graph, model.recipe(level))
        directory = tmp_path / str(level)
        directory.mkdir()
        derived.write(program, model.parent, directory)
        assert error(reference, model.answers(directory / "model.onnx")) < NOISE
        assert error(reference, model.answers(model.file(level))) > 10 * NOISE  # and rounding moves something


@NAMES
def test_the_file_computes_what_the_arrays_say(name: str, model_of: Callable[[str], Model]) -> None:
    """Every layer's output in the file against numpy on the same input, from the recipe's numbers alone."""
    model = model_of(name)
    for level in (0, 1):
        made, path = model.recipe(level), model.file(level)
        graph = onnx.load(str(path)).graph
        names = [node.output[0] for node in graph.node]
        before = {w.name: w for w in model.static.found.weights}
        inputs = {w.name: [node.inputs[0].name for node in w.nodes] for w in before.values()}
        biases = {w.name: [linear.bias_of(node) or (node, 2) for node in w.nodes] for w in before.values()}
        outputs = {name: [user.outputs[0].name for user, _ in places] for name, places in biases.items()}
        wanted = sorted({each for w in before for each in (*outputs[w], *inputs[w])} & set(names))
        tapped = derived.tap(path, model.directory / "tapped", wanted)
        session = backend.open_file(tapped, threads=1, data=path.parent)
        answers = session.tap(asking.batch(model.facts, [7, 3, 12]), wanted)
        compared = 0
        for layer in made.layers:
            if layer.precision != "int8":
                continue
            site, array = made.sites[layer.site], before[layer.name].array()
            whole, scale = integers.round_weight(integers.folded(site, array), made.largest)
            assert layer.bias is not None
            for source, target, (user, index) in zip(
                inputs[layer.name], outputs[layer.name], biases[layer.name], strict=True
            ):
                if source not in answers or target not in answers:
                    continue  # an input of the graph itself, or folded away
                rows = answers[source]
                expected = integers.rounded_input(site, rows) @ (whole * scale)
                expected += rows[..., list(site.outliers)] @ array[list(site.outliers)]
                expected += site.shift @ array - layer.bias
                if len(user.inputs) > index and user.op_type in ("Add", "Gemm"):
                    expected += user.inputs[index].const_value.numpy()
                moved = np.abs(answers[target] - expected).max(-1)
                noise = 2e-5 * np.abs(expected).max()
                # Where a value lies halfway between two integers it may go the other way: one step, and no more. What
                # many rows share (padding, a start token) then moves all of them.
                assert (moved < noise).mean() > 0.5, layer.name
                assert moved.max() < 2.01 * site.scale * np.abs(whole * scale).max() + noise, layer.name
                compared += 1
        assert compared > 0.9 * sum(map(len, inputs.values()))


def test_shared_layers_have_one_weight_in_integers(model_of: Callable[[str], Model]) -> None:
    """ALBERT's layers: six matrices for two layers, each used twice."""
    model = model_of("albert")
    found = Quantized(model.file(1))
    stored = {name for name in found.weights if "albert_layers" in name}
    uses = Counter(found.maker[node.input[1]].input[0] for node in found.products)
    assert len(stored) == 6 and all(uses[name] == 2 for name in stored)
    # Their scales, multipliers and rows apart are shared too.
    for part in (".scale", ".multiplier", ".shift"):
        names = [name for name in found.constants if "albert_layers" in name and name.endswith(part)]
        assert len(names) == len(set(names)) and not any(name.endswith(f"{part}.2") for name in found.constants)


@pytest.mark.parametrize("name", ["gpt2", "albert", pytest.param("tied", marks=pytest.mark.slow)])
def test_a_tied_head_stays_one_float_table_and_is_named(name: str, model_of: Callable[[str], Model]) -> None:
    model = model_of(name)
    ((head, reason),) = model.static.found.left.items()
    assert reason == "its weight is an embedding table too, and would have to be stored twice"
    layer = model.recipe(0).layer(head)
    assert (layer.precision, layer.why) == ("float32", reason)
    found = Quantized(model.file(0))
    tables = [array for array in found.floats.values() if array.shape[0] == 120]
    assert len(tables) == 1 and not any(array.shape == (120, 32) for array in map(found.constants.get, found.weights))


def test_a_gemm_with_its_weight_transposed(model_of: Callable[[str], Model]) -> None:
    """BERT's pooler is a Gemm with transB: stored (inputs, outputs) afterwards, with scales of its outputs."""
    model = model_of("bert")
    (weight,) = [each for each in model.static.found.weights if each.transposed]
    assert weight.nodes[0].op_type == "Gemm"
    found = Quantized(model.file(0))
    whole = found.constants[f"{weight.value.name}.int8"]
    made = model.recipe(0)
    inner = integers.folded(made.sites[weight.name], weight.array())
    np.testing.assert_array_equal(whole, integers.round_weight(inner)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "albert", "t5"])
def test_the_file_shrinks(name: str, tmp_path: Path) -> None:
    """At a size where weights are most of the file."""
    wide = {"hidden_size": 256, "intermediate_size": 1024}
    wide = {"gpt2": {"n_embd": 256}, "t5": {"d_model": 256, "d_ff": 1024, "d_kv": 64}}.get(name, wide)
    model = Model(ROWS[name], tmp_path, **wide)
    sizes = [derived.size(model.file(level).parent) for level in (0, 1, 2)]
    before = derived.size(model.parent.directory)
    weights = 4 * sum(weight.rows * weight.columns for weight in model.static.found.weights)
    assert sizes[0] < before - 0.72 * weights
    assert sizes == sorted(sizes) and sizes[2] < before - 0.58 * weights


# -- unsigned activations, smaller weights -----------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [127, SATURATING])
def test_unsigned_activations_are_the_cpus_alone(
    largest: int, model_of: Callable[[str], Model], tmp_path: Path
) -> None:
    """The same integers 128 higher: the same answers, where the processor's products are exact."""
    model = model_of("bert")
    signed, unsigned = (model.file(1, activation, largest) for activation in ("int8", "uint8"))
    found = Quantized(unsigned, "uint8")
    assert max(np.abs(found.constants[name].astype(int)).max() for name in found.weights) == largest
    assert integer_products(unsigned, tmp_path) == len(found.products)
    if largest == SATURATING:
        assert error(model.answers(signed), model.answers(unsigned)) < NOISE


# -- one layer at a time -----------------------------------------------------------------------------------------------


def graph_of(nodes: Iterable[onnx.NodeProto], rank: int, **weights: np.ndarray) -> onnx_ir.Model:
    axes: list[str | int] = ["batch", "sequence"] if rank == 3 else ["batch"]
    graph = helper.make_graph(
        list(nodes),
        "layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*axes, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model))


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def rows(rank: int) -> np.ndarray:
    """One-sided, as after a GELU, with a wide channel."""
    array = np.maximum(np.random.default_rng(9).standard_normal((40, 6, 32)), -0.1).astype(np.float32)
    array[..., 4] *= 30
    return array if rank == 3 else array.reshape(-1, 32)


def recipe_of(program: onnx_ir.Model, x: np.ndarray, outliers: int = 0, **values: Any) -> Recipe:
    """Every layer of a graph whose layers all read x."""
    found = linear.find(program.graph)
    sampler = Sampler(32, 1000)
    sampler.add(x.reshape(-1, 32))
    sample = sampler.sample()
    layers, sites = [], {}
    for site in found.sites:
        arrays = [weight.array() for weight in site.weights]
        prepared = integers.prepare(sample, np.concatenate(arrays, axis=1), outliers=outliers)
        sites[site.name] = prepared
        for weight, array in zip(site.weights, arrays, strict=True):
            bias = integers.moved_mean(prepared, sample.rows, array)
            layers.append(Layer(weight.name, site.name, "int8", weight.flops / found.flops, bias=bias))
    layers += [Layer(name, name, "float32", 0.0, why=why) for name, why in found.left.items()]
    return replace(Recipe("onnx-qdq", "static", "onnx", "", tuple(layers), sites), **values)


def asked(program: onnx_ir.Model, x: np.ndarray) -> np.ndarray:
    proto = onnx_ir.to_proto(program)
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


FORMS: dict[str, tuple[int, list[onnx.NodeProto]]] = {
    "matmul": (3, [helper.make_node("MatMul", ["x", "w"], ["y"], name="n")]),
    "matmul and bias": (
        3,
        [helper.make_node("MatMul", ["x", "w"], ["h"], name="n"), helper.make_node("Add", ["h", "b"], ["y"])],
    ),
    "bias and matmul": (
        3,
        [helper.make_node("MatMul", ["x", "w"], ["h"], name="n"), helper.make_node("Add", ["b", "h"], ["y"])],
    ),
    "product read twice": (
        3,
        [helper.make_node("MatMul", ["x", "w"], ["h"], name="n"), helper.make_node("Mul", ["h", "h"], ["y"])],
    ),
    "gemm": (2, [helper.make_node("Gemm", ["x", "w"], ["y"], name="n")]),
    "gemm and bias": (2, [helper.make_node("Gemm", ["x", "w", "b"], ["y"], name="n")]),
    "gemm transB": (2, [helper.make_node("Gemm", ["x", "wt", "b"], ["y"], name="n", transB=1)]),
    "weight transposed": (
        3,
        [helper.make_node("Transpose", ["wt"], ["t"]), helper.make_node("MatMul", ["x", "t"], ["y"], name="n")],
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outliers", [0, 2])
def test_every_form_of_a_layer(form: str, outliers: int) -> None:
    """Exact without rounding; with it, close, and right on average: the bias takes what rounding moves."""
    rank, nodes = FORMS[form]
    used = {name for node in nodes for name in node.input}
    every = {"w": drawn(32, 48), "wt": drawn(48, 32), "b": drawn(48)}
    weights = {name: array for name, array in every.items() if name in used}
    x = rows(rank)
    reference = asked(graph_of(nodes, rank, **weights), x)
    program = graph_of(nodes, rank, **weights)
    made = recipe_of(program, x, outliers)
    static_int8.rewrite_exactly(program.graph, made)
    np.testing.assert_allclose(asked(program, x), reference, rtol=0, atol=1e-5 * np.abs(reference).max())
    program = graph_of(nodes, rank, **weights)
    static_int8.apply(program.graph, made)
    moved = asked(program, x) - reference
    assert 0 < np.sqrt(np.square(moved).mean() / np.square(reference).mean()) < 0.05
    if form != "product read twice":
        axes = tuple(range(moved.ndim - 1))
        assert (np.abs(moved.mean(axes)) < 0.05 * np.sqrt(np.square(moved).mean(axes))).all()
    assert not {"w", "wt"} & set(program.graph.initializers)


def test_a_bias_that_two_layers_share_is_right_for_both() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["p"], name="p"),
        helper.make_node("Add", ["p", "b"], ["q"]),
        helper.make_node("MatMul", ["x", "w"], ["h"], name="h"),
        helper.make_node("Add", ["h", "b"], ["i"]),
        helper.make_node("Mul", ["q", "i"], ["y"]),
    ]
    weights = {"v": drawn(32, 48), "w": drawn(32, 48) * 2, "b": drawn(48)}
    x = rows(3)
    reference = asked(graph_of(nodes, 3, **weights), x)
    program = graph_of(nodes, 3, **weights)
    static_int8.rewrite_exactly(program.graph, recipe_of(program, x))
    np.testing.assert_allclose(asked(program, x), reference, rtol=0, atol=1e-5 * np.abs(reference).max())


def test_a_layer_that_is_an_output_keeps_its_name() -> None:
    program = graph_of(FORMS["matmul"][1], 3, w=drawn(32, 48))
    static_int8.apply(program.graph, recipe_of(program, rows(3)))
    assert [value.name for value in program.graph.outputs] == ["y"]


def test_only_what_the_recipe_calls_int8_is_changed() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["p"], name="p"),
        helper.make_node("MatMul", ["x", "w"], ["h"], name="h"),
        helper.make_node("Add", ["p", "h"], ["y"]),
    ]
    program = graph_of(nodes, 3, v=drawn(32, 48), w=drawn(32, 48))
    made = recipe_of(program, rows(3))
    layers = tuple(replace(each, precision="float32") if each.name == "h" else each for each in made.layers)
    static_int8.apply(program.graph, replace(made, layers=layers))
    assert {"w", "v.int8"} <= set(program.graph.initializers) and "w.int8" not in program.graph.initializers


def test_nodes_keep_the_module_they_belong_to(model_of: Callable[[str], Model]) -> None:
    """Localization reads it: the rounding of an input belongs to the layer that reads it."""
    from nlpconvert.convert import onnx_graph

    graph = onnx_ir.load(model_of("bert").file(1)).graph
    for node in graph:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert onnx_graph.module_scope(node).startswith("bert."), node.name


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda made: replace(made, sites={}), "the recipe has no scales for n"),
        (lambda made: replace(made, layers=()), "the recipe says nothing about n"),
        (
            lambda made: replace(
                made, sites={"n": Preparation(np.zeros(31, np.float32), np.ones(31, np.float32), 0.1, (), 0.5)}
            ),
            "the recipe's scales of n are for 31 channels, it has 32",
        ),
        (
            lambda made: replace(made, layers=(replace(made.layers[0], bias=np.zeros(47, np.float32)),)),
            "the recipe's bias of n does not fit it",
        ),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused(change: Callable[[Recipe], Recipe], expected: str) -> None:
    program = graph_of(FORMS["matmul"][1], 3, w=drawn(32, 48))
    with pytest.raises(UsageError, match=expected):
        static_int8.apply(program.graph, change(recipe_of(program, rows(3))))


def test_a_weight_that_is_not_finite_is_told() -> None:
    weight = drawn(32, 48)
    made = recipe_of(graph_of(FORMS["matmul"][1], 3, w=weight), rows(3))
    weight[3, 5] = np.inf
    program = graph_of(FORMS["matmul"][1], 3, w=weight)
    with pytest.raises(ConversionError, match="the weight of n is not finite"):
        static_int8.apply(program.graph, made)

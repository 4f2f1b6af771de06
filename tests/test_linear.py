"""Which products of a graph are linear layers, what hangs together, and why the others are left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from nlpconvert.convert import linear
from tests import test_qdq
from tests.test_qdq import Model

model_of = test_qdq.model_of
WIDTH = 32


def graph(nodes: Sequence[onnx.NodeProto], *, rank: int = 3, **weights: np.ndarray) -> onnx_ir.Graph:
    """A graph of one input "x" (..., WIDTH) and one output "y"."""
    shape = ["batch", "sequence", WIDTH][-rank:]
    value = helper.make_tensor_value_info
    made = helper.make_graph(
        nodes,
        "layers",
        [value("x", TensorProto.FLOAT, shape), value("ids", TensorProto.INT64, ["batch"])],
        [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx_ir.from_proto(model).graph


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def node(kind: str, inputs: str, output: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], name=f"{kind}_{output}", **attributes)


# -- what is a layer ---------------------------------------------------------------------------------------------------


def test_a_matmul_and_its_bias() -> None:
    found = linear.find(graph([node("MatMul", "x w", "h"), node("Add", "b h", "y")], w=drawn(WIDTH, 48), b=drawn(48)))
    (weight,) = found.weights
    assert (weight.name, weight.rows, weight.columns, weight.transposed) == ("MatMul_h", WIDTH, 48, False)
    assert weight.flops == found.flops == WIDTH * 48 and not found.left
    place = linear.bias_of(weight.nodes[0])
    assert place is not None and place[0].op_type == "Add" and place[1] == 0


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_gemm_in_both_directions(transposed: int) -> None:
    stored = drawn(48, WIDTH) if transposed else drawn(WIDTH, 48)
    made = graph([node("Gemm", "x w b", "y", transB=transposed)], rank=2, w=stored, b=drawn(48))
    (weight,) = linear.find(made).weights
    assert (weight.rows, weight.columns, weight.transposed) == (WIDTH, 48, bool(transposed))
    np.testing.assert_array_equal(weight.array(), stored.T if transposed else stored)
    place = linear.bias_of(weight.nodes[0])
    assert place is not None and place == (weight.nodes[0], 2)


def test_a_weight_behind_a_transpose() -> None:
    stored = drawn(48, WIDTH)
    made = graph([node("Transpose", "w", "wt", perm=[1, 0]), node("MatMul", "x wt", "y")], w=stored)
    (weight,) = linear.find(made).weights
    assert weight.transposed and (weight.rows, weight.columns) == (WIDTH, 48)
    np.testing.assert_array_equal(weight.array(), stored.T)


def test_products_of_activations_are_none() -> None:
    """Attention's scores, and its weights times the values."""
    made = graph([node("Transpose", "x", "xt", perm=[0, 2, 1]), node("MatMul", "x xt", "y")])
    assert linear.find(made) == linear.Found([], {}, 0)


def test_weights_that_are_not_float32_are_none() -> None:
    made = graph([node("MatMul", "x w", "y")], w=drawn(WIDTH, 48).astype(np.float16))
    assert not linear.find(made).weights


# -- what is left, and why ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "rank", "weights", "reason"),
    [
        ([node("MatMul", "x w", "y")], 3, {"w": drawn(3, WIDTH, 48)}, "its weight has 3 axes"),
        ([node("MatMul", "x w", "y")], 3, {"w": drawn(WIDTH)}, "its weight has 1 axes"),
        ([node("MatMul", "x w", "y")], 3, {"w": drawn(WIDTH, 15)}, "it has 15 outputs: nothing to gain"),
        ([node("Gemm", "x w", "y", transB=1)], 2, {"w": drawn(2, WIDTH)}, "it has 2 outputs: nothing to gain"),
        ([node("Gemm", "x w", "y", alpha=0.5)], 2, {"w": drawn(WIDTH, 48)}, "it scales or transposes its input"),
        (
            [node("Gemm", "x w b", "y", beta=2.0)],
            2,
            {"w": drawn(WIDTH, 48), "b": drawn(48)},
            "it scales or transposes its input",
        ),
        ([node("Gemm", "x w", "y", transA=1)], 2, {"w": drawn(WIDTH, 48)}, "it scales or transposes its input"),
        (
            [node("Gemm", "x w b", "y")],
            2,
            {"w": drawn(WIDTH, 48), "b": drawn(1, 48)},
            "what it adds is no constant bias",
        ),
        (
            [node("Gather", "w ids", "e"), node("Transpose", "w", "wt", perm=[1, 0]), node("MatMul", "x wt", "y")],
            3,
            {"w": drawn(120, WIDTH)},
            "its weight is an embedding table too, and would have to be stored twice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_left_with_a_reason(
    nodes: list[onnx.NodeProto], rank: int, weights: dict[str, np.ndarray], reason: str
) -> None:
    found = linear.find(graph(nodes, rank=rank, **weights))
    assert not found.sites and list(found.left.values()) == [reason]
    assert list(found.left) == [nodes[-1].name]
    assert found.left_flops == weights["w"].size


def test_a_weight_that_is_also_used_the_other_way_round_is_left() -> None:
    """One node multiplies by it, another by its transpose: no column scales fit both."""
    nodes = [
        node("MatMul", "x w", "h"),
        node("Transpose", "w", "wt", perm=[1, 0]),
        node("MatMul", "h wt", "y"),
    ]
    for width in (48, WIDTH):  # a square one would even run
        found = linear.find(graph(nodes, w=drawn(WIDTH, width)))
        assert not found.sites
        assert list(found.left) == ["MatMul_h", "MatMul_y"]
        assert set(found.left.values()) == {"its weight is used transposed too"}
        assert found.flops == 2 * WIDTH * width


def test_a_weight_one_of_whose_uses_cannot_be_rewritten_is_left() -> None:
    nodes = [
        node("Gemm", "x w", "h"),
        node("Gemm", "h w", "y", alpha=2.0),
    ]
    for order in (nodes, [node("Gemm", "x w", "h", alpha=2.0), node("Gemm", "h w", "y")]):
        found = linear.find(graph(order, rank=2, w=drawn(WIDTH, WIDTH)))
        assert not found.sites
        assert set(found.left.values()) == {"it scales or transposes its input"}
        assert found.flops == 2 * WIDTH * WIDTH


# -- what hangs together -----------------------------------------------------------------------------------------------


def test_layers_of_one_input_are_one_site() -> None:
    nodes = [
        node("MatMul", "x q", "a"),
        node("MatMul", "x k", "b"),
        node("Add", "a b", "h"),
        node("MatMul", "h v", "y"),
    ]
    found = linear.find(graph(nodes, q=drawn(WIDTH, WIDTH), k=drawn(WIDTH, WIDTH), v=drawn(WIDTH, 48)))
    assert [(site.name, len(site.inputs), [w.name for w in site.weights]) for site in found.sites] == [
        ("MatMul_a", 1, ["MatMul_a", "MatMul_b"]),
        ("MatMul_y", 1, ["MatMul_y"]),
    ]


def test_a_shared_weight_joins_all_that_its_inputs_feed() -> None:
    """x feeds q and w, h feeds w and k: one preparation has to serve them all."""
    nodes = [
        node("MatMul", "x q", "a"),
        node("Relu", "a", "h"),
        node("MatMul", "h k", "b"),
        node("MatMul", "x w", "c"),
        node("MatMul", "h w", "d"),
        node("Sum", "b c d", "y"),
    ]
    found = linear.find(graph(nodes, q=drawn(WIDTH, WIDTH), k=drawn(WIDTH, WIDTH), w=drawn(WIDTH, WIDTH)))
    (site,) = found.sites
    assert {value.name for value in site.inputs} == {"x", "h"}
    assert [(w.name, len(w.nodes)) for w in site.weights] == [("MatMul_a", 1), ("MatMul_b", 1), ("MatMul_c", 2)]
    assert found.flops == 4 * WIDTH * WIDTH


def test_layers_of_one_name_are_told_apart() -> None:
    nodes = [helper.make_node("MatMul", [a, w], [b], name="dense") for a, w, b in ("xph", "hqi", "iry")]
    found = linear.find(graph(nodes, p=drawn(WIDTH, WIDTH), q=drawn(WIDTH, WIDTH), r=drawn(WIDTH, WIDTH)))
    assert [weight.name for weight in found.weights] == ["dense", "dense#2", "dense#3"]


@pytest.mark.parametrize(
    ("nodes", "weights", "expected"),
    [
        ([node("MatMul", "x w", "y")], {}, None),
        ([node("MatMul", "x w", "h"), node("Add", "h x", "y")], {}, None),
        ([node("MatMul", "x w", "h"), node("Add", "h b", "y")], {"b": drawn(1, WIDTH)}, None),
        ([node("MatMul", "x w", "h"), node("Mul", "h b", "y")], {"b": drawn(WIDTH)}, None),
        ([node("MatMul", "x w", "h"), node("Add", "h b", "i"), node("Add", "h i", "y")], {"b": drawn(WIDTH)}, None),
        ([node("MatMul", "x w", "h"), node("Add", "h b", "y")], {"b": drawn(WIDTH)}, ("Add", 1)),
    ],
)
def test_where_a_bias_is(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], expected: tuple[str, int] | None
) -> None:
    """A vector that is added to nothing but the product."""
    made = graph(nodes, w=drawn(WIDTH, WIDTH), **weights)
    place = linear.bias_of(next(each for each in made if each.op_type == "MatMul"))
    assert (None if place is None else (place[0].op_type, place[1])) == expected


# -- real exports ------------------------------------------------------------------------------------------------------

EMBEDDING_TOO = "its weight is an embedding table too, and would have to be stored twice"
LAYERS = {
    "bert": (13, 9, {"classifier": "it has 2 outputs: nothing to gain"}),
    "gpt2": (8, 8, {"lm_head": EMBEDDING_TOO}),
    "albert": (8, 6, {"predictions.decoder": EMBEDDING_TOO}),
    "llama": (15, 9, {}),
    "t5": (32, 21, {"lm_head": EMBEDDING_TOO}),
}
"""Layers, sites, and what is left."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("bert", "albert") else pytest.mark.slow) for n in LAYERS]
)
def test_layers_have_the_names_of_the_checkpoint(name: str, model_of: Callable[[str], Model]) -> None:
    model = model_of(name)
    found = model.static.found
    layers, sites, left = LAYERS[name]
    assert (len(found.weights), len(found.sites), found.left) == (layers, sites, left)
    for weight in found.weights:
        assert weight.name in model.modules or f"model.{weight.name}" in model.modules, weight.name
    assert found.flops == sum(w.flops for w in found.weights) + found.left_flops
    if name == "albert":
        shared = [w for w in found.weights if "albert_layers" in w.name]
        assert len(shared) == 6 and all(len(w.nodes) == 2 for w in shared)

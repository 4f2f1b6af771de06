"""Counting products: what a file computes in, whatever it calls itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from nlpconvert.validators import compute, structure


def save(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], path: Path) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph), path)
    return path


W8 = np.ones((4, 8), np.int8)
SCALE = np.ones(8, np.float32)
ONE = np.float32(1).reshape(())
ZERO = np.int8(0).reshape(())


def product(*inputs: str) -> onnx.NodeProto:
    return helper.make_node("MatMul", list(inputs), ["y"])


DEQUANTIZE = helper.make_node("DequantizeLinear", ["w", "s"], ["wf"], axis=1)
ROUND = [
    helper.make_node("QuantizeLinear", ["x", "one", "zero"], ["xq"]),
    helper.make_node("DequantizeLinear", ["xq", "one", "zero"], ["xf"]),
]


@pytest.mark.parametrize(
    ("nodes", "weights", "expected"),
    [
        ([product("x", "w")], {"w": np.ones((4, 8), np.float32)}, "float32"),
        ([DEQUANTIZE, product("x", "wf")], {"w": W8, "s": SCALE}, "int8 weights"),
        (
            [*ROUND, DEQUANTIZE, product("xf", "wf")],
            {"w": W8, "s": SCALE, "one": ONE, "zero": ZERO},
            "int8",
        ),
        # Half weights behind a Cast: the arithmetic is float32.
        (
            [helper.make_node("Cast", ["w"], ["wf"], to=TensorProto.FLOAT), product("x", "wf")],
            {"w": np.ones((4, 8), np.float16)},
            "float32",
        ),
        (
            [helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=4, N=8, bits=4)],
            {"w": W8, "s": SCALE},
            "int4 weights",
        ),
    ],
)
def test_the_arithmetic_is_told(
    nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], expected: str, tmp_path: Path
) -> None:
    found = compute.count([structure.onnx_graph(save(nodes, weights, tmp_path / "m.onnx"))])
    assert dict(found.count) == {expected: 1}
    assert found.share == {expected: 1.0}


def test_a_file_that_quantized_nothing_is_found(tmp_path: Path) -> None:
    found = compute.count(
        [structure.onnx_graph(save([product("x", "w")], {"w": np.ones((4, 8), np.float32)}, tmp_path / "m.onnx"))]
    )
    assert compute.problems(found, "float32") == []
    for precision in ("int8", "int4", "float16", "bfloat16"):
        assert compute.problems(found, precision) == [
            f"it says {precision}, but none of its 1 products with a weight is computed in it"
        ]


def test_a_product_of_two_activations_does_not_count(tmp_path: Path) -> None:
    path = save([helper.make_node("Gemm", ["x", "x"], ["y"], transB=1)], {}, tmp_path / "m.onnx")
    assert dict(compute.count([structure.onnx_graph(path)]).count) == {}

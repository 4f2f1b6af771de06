"""Floor 1, validators: is an ONNX file what it says it is? Counts its products with a weight by their arithmetic.

Reads the graph alone, no weights. A quantizer that quantized nothing, and a half-precision file that is float32 under
its casts, answer perfectly: only counting finds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What a file of each precision has to hold at least one product of.
CLAIMS: dict[str, tuple[str, ...]] = {
    "float16": ("float16",),
    "bfloat16": ("bfloat16",),
    "int8": ("int8", "int8 weights"),
    "int4": ("int4 weights",),
}

_PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", "MatMulNBits", "FusedMatMul", "MatMulIntegerToFloat", "QLinearMatMul")
_THROUGH = ("Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze")


@dataclass(frozen=True)
class Products:
    """Products with a constant weight, by arithmetic: how many, and their part of all such products' FLOPs.

    Arithmetics are "float32", "float16", "bfloat16", "int8" (both sides), "int8 weights" and "int4 weights" (the
    activations stay in floating point, or are rounded by blocks inside the operator).
    """

    count: Mapping[str, int]
    share: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"count": dict(self.count), "share": {name: round(part, 6) for name, part in self.share.items()}}


def count(graphs: Sequence[Any]) -> Products:
    """The products of an artifact's GraphProtos."""
    found: dict[str, int] = {}
    flops: dict[str, int] = {}
    for graph in graphs:
        weights = {value.name: value for value in graph.initializer}
        makers = {name: node for node in graph.node for name in node.output}
        for node in graph.node:
            looked = _arithmetic(node, weights, makers) if node.op_type in _PRODUCTS else None
            if looked is not None:
                name, work = looked
                found[name] = found.get(name, 0) + 1
                flops[name] = flops.get(name, 0) + work
    total = sum(flops.values())
    return Products(found, {name: work / total for name, work in flops.items()} if total else {})


def problems(products: Products, precision: str) -> list[str]:
    """What is wrong with a file that claims `precision`, one sentence each."""
    claimed = CLAIMS.get(precision)
    if claimed is None or any(products.count.get(name) for name in claimed):
        return []
    total = sum(products.count.values())
    return [f"it says {precision}, but none of its {total} products with a weight is computed in it"]


def _arithmetic(node: Any, weights: Mapping[str, Any], makers: Mapping[str, Any]) -> tuple[str, int] | None:
    """(arithmetic, multiplications for one row) of a product with a constant weight; None for any other."""
    import onnx

    attributes = {each.name: each for each in node.attribute}
    if node.op_type == "MatMulNBits":
        bits = attributes["bits"].i if "bits" in attributes else 4
        return f"int{bits} weights", attributes["K"].i * attributes["N"].i
    second = {"QLinearMatMul": 3}.get(node.op_type, 1)
    if len(node.input) <= second:
        return None
    weight, dequantized = _constant(node.input[second], weights, makers)
    if weight is None:
        return None
    work = math.prod(weight.dims)
    types = onnx.TensorProto
    if node.op_type in ("MatMulInteger", "MatMulIntegerToFloat", "QLinearMatMul"):
        return "int8", work
    if dequantized:
        before = makers.get(node.input[0])
        rounded = before is not None and before.op_type == "DequantizeLinear"
        bits4 = weight.data_type in (types.INT4, types.UINT4)
        return ("int4 weights" if bits4 else "int8" if rounded else "int8 weights"), work
    named = {types.FLOAT: "float32", types.FLOAT16: "float16", types.BFLOAT16: "bfloat16", types.DOUBLE: "float64"}
    return named.get(weight.data_type, "other"), work


def _constant(name: str, weights: Mapping[str, Any], makers: Mapping[str, Any]) -> tuple[Any, bool]:
    """The initialiser behind a value, through nodes that move or convert it, and whether it is dequantized on the
    way. What a Cast makes is of the Cast's type: half weights under a float32 product are float32 arithmetic."""
    import onnx

    dequantized, cast = False, 0
    while name in makers:
        node = makers[name]
        if node.op_type == "DequantizeLinear":
            dequantized = True
        elif node.op_type == "Cast":
            cast = cast or next(each.i for each in node.attribute if each.name == "to")
        elif node.op_type not in _THROUGH:
            return None, False
        name = node.input[0]
    weight = weights.get(name)
    if weight is not None and cast and not dequantized:
        weight = onnx.TensorProto(data_type=cast, dims=weight.dims)
    return weight, dequantized

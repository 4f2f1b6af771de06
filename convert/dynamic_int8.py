"""Floor 2: dynamic int8 into an ONNX graph, as a recipe says.

Weights are symmetric 8-bit integers with a scale for every output; what goes in is rounded to uint8 when it is run,
with one scale and zero point for the whole tensor (DynamicQuantizeLinear): so a row's answer depends on the rows beside
it. Embedding tables, biases, norms and products of two activations stay as they are.
"""

from __future__ import annotations

import numpy as np
import onnx_ir

from nlpconvert import integers
from nlpconvert.convert import linear, onnx_graph, rewriting
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.recipe import Layer, Recipe

FLOAT = onnx_ir.DataType.FLOAT


def apply(graph: onnx_ir.Graph, recipe: Recipe) -> None:
    """Quantizes, in place, the layers that the recipe calls "int8"; their weights go no further than `recipe.largest`.

    UsageError when the recipe is another graph's, ConversionError when it quantizes nothing.
    """
    hand = rewriting.Rewriting(graph)
    inputs: dict[str, tuple[onnx_ir.Value, ...]] = {}
    count = 0
    for weight in linear.find(graph).weights:
        layer = recipe.layer(weight.name)
        if layer.precision == "int8":
            count += _replace(hand, weight, layer, recipe.largest, inputs)
    if not count:
        raise ConversionError("no layer was quantized: the artifact would be its float32 source under another name")
    onnx_graph.drop_unused(graph)


def _replace(
    hand: rewriting.Rewriting,
    weight: linear.Weight,
    layer: Layer,
    largest: int,
    inputs: dict[str, tuple[onnx_ir.Value, ...]],
) -> int:
    """Puts a MatMulInteger and its scaling in the place of every node of a layer; how many."""
    if layer.bias is not None and layer.bias.shape != (weight.columns,):
        raise UsageError(f"the recipe's bias of {layer.name} does not fit it")
    base = weight.value.name or weight.name
    array = weight.array()
    if not np.isfinite(array).all():
        raise ConversionError(f"{layer.name}: a weight is not finite")
    whole, scales = integers.round_weight(array, largest)
    stored = hand.constant(f"{base}.int8", whole)
    scale = hand.constant(f"{base}.scale", scales)
    zero = hand.constant(f"{base}.zero_point", np.zeros(len(scales), np.int8))
    for node in weight.nodes:
        value = node.inputs[0]
        assert value is not None
        name = value.name or ""
        if name not in inputs:
            before = hand.first_product_of(value)
            inputs[name] = hand.add(
                before, "DynamicQuantizeLinear", [value], value, dtype=onnx_ir.DataType.UINT8, outputs=3
            )
        rounded, input_scale, input_zero = inputs[name]
        out = node.outputs[0]
        (total,) = hand.add(
            node, "MatMulInteger", [rounded, stored, input_zero, zero], out, dtype=onnx_ir.DataType.INT32
        )
        (floating,) = hand.add(node, "Cast", [total], out, dtype=FLOAT, attributes={"to": FLOAT.value})
        (both,) = hand.add(node, "Mul", [input_scale, scale], scale)
        (product,) = hand.add(node, "Mul", [floating, both], out)
        hand.replace(node, product, layer.name, None if layer.bias is None else -layer.bias)
    return len(weight.nodes)

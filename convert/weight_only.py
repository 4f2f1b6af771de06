"""Floor 2: weights in integers of 4 or 8 bits into an ONNX graph, as a recipe says.

ONNX Runtime's MatMulNBits takes the place of a MatMul or Gemm: packed integers, a scale for every block of inputs, and
where the recipe says so a zero point; what goes in is rounded by the kernel itself, block by block and token by token
(accuracy level 4), so that no row depends on its companions. What the numbers are is `blocks`; nothing is measured
here.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import numpy as np
import onnx_ir

from nlpconvert import blocks
from nlpconvert.blocks import Blocks
from nlpconvert.convert import linear, onnx_graph, rewriting
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.recipe import Layer, Recipe

BITS = {"int8-weight": 8, "int4-weight": 4}
ACCURACY_LEVEL = 4
SMALLEST_BLOCK = 16

Rounded = MutableMapping[tuple[object, ...], Blocks]
"""Weights that were rounded before, by layer and settings: a search asks for the same ones again and again."""


def apply(graph: onnx_ir.Graph, recipe: Recipe, known: Rounded | None = None) -> None:
    """Quantizes, in place, the layers that the recipe calls "int4-weight" or "int8-weight".

    UsageError when the recipe is another graph's, ConversionError when it quantizes nothing.
    """
    found = linear.find(graph)
    hand = rewriting.Rewriting(graph)
    divided: dict[tuple[str, str, float], onnx_ir.Value] = {}
    count = 0
    for site in found.sites:
        for weight in site.weights:
            layer = recipe.layer(weight.name)
            if layer.precision not in BITS:
                continue
            _check(layer, weight)
            whole = rounded(layer, weight.array(), known)
            count += _replace(hand, weight, layer, site.name, whole, divided)
    if not count:
        raise ConversionError("no layer was quantized: the artifact would be its float32 source under another name")
    onnx_graph.drop_unused(graph)


def rounded(layer: Layer, array: np.ndarray, known: Rounded | None = None) -> Blocks:
    """The integers of a layer's weight (inputs, outputs), as its row in the recipe says. `known` is asked first, and
    filled.

    ConversionError where the weight is not finite.
    """
    key = (layer.name, layer.precision, layer.block, layer.strength, layer.zero_points)
    if known is not None and key in known:
        return known[key]
    importance = layer.importance
    if layer.strength and importance is not None:
        factor = blocks.factors(importance, layer.strength)
        array, importance = array * factor[:, None], importance / factor**2
    try:
        found = blocks.round_blocks(
            array, bits=BITS[layer.precision], block=layer.block, importance=importance, zero_points=layer.zero_points
        )
    except ValueError as error:
        raise ConversionError(f"{layer.name}: {error}") from error
    if known is not None:
        known[key] = found
    return found


def _check(layer: Layer, weight: linear.Weight) -> None:
    if layer.block < SMALLEST_BLOCK or layer.block & (layer.block - 1):
        raise UsageError(
            f"the recipe's block of {layer.name} is {layer.block}: a power of two from {SMALLEST_BLOCK} up is needed"
        )
    for array, size, what in ((layer.importance, weight.rows, "importance"), (layer.bias, weight.columns, "bias")):
        if array is not None and array.shape != (size,):
            raise UsageError(f"the recipe's {what} of {layer.name} does not fit it")
    if layer.strength and layer.importance is None:
        raise UsageError(f"the recipe has a strength for {layer.name} and no importance of its inputs")


def _replace(
    hand: rewriting.Rewriting,
    weight: linear.Weight,
    layer: Layer,
    site: str,
    whole: Blocks,
    divided: dict[tuple[str, str, float], onnx_ir.Value],
) -> int:
    """Puts a MatMulNBits in the place of every node of a layer; how many."""
    base = weight.value.name or weight.name
    constants = [
        hand.constant(f"{base}.int{whole.bits}", blocks.pack(whole.whole, whole.bits)),
        hand.constant(f"{base}.scales", whole.scale),
    ]
    if layer.zero_points:
        constants.append(hand.constant(f"{base}.zero_points", blocks.pack(whole.zero, whole.bits)))
    attributes = {
        "K": weight.rows,
        "N": weight.columns,
        "bits": whole.bits,
        "block_size": whole.block,
        "accuracy_level": ACCURACY_LEVEL,
    }
    for node in weight.nodes:
        value = node.inputs[0]
        assert value is not None
        if layer.strength and layer.importance is not None:
            key = (value.name or "", site, layer.strength)
            if key not in divided:
                factor = hand.constant(f"{site}.divisor", 1 / blocks.factors(layer.importance, layer.strength))
                (divided[key],) = hand.add(hand.first_product_of(value), "Mul", [value, factor], value)
            value = divided[key]
        (product,) = hand.add(
            node,
            "MatMulNBits",
            [value, *constants],
            node.outputs[0],
            domain=rewriting.CONTRIB,
            attributes=attributes,
        )
        hand.replace(node, product, layer.name, None if layer.bias is None else -layer.bias)
    return len(weight.nodes)

"""Floor 2: explicit Q/DQ into an ONNX graph, as a recipe says.

Symmetric int8, zero point 0, a scalar scale for every activation and one a column for every weight, weights stored as
integers behind a DequantizeLinear alone, nothing on biases, masks, softmax or normalisation. What the numbers are is
`integers`, which layers are meant is `linear`; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir

from nlpconvert import integers
from nlpconvert.convert import linear, onnx_graph
from nlpconvert.convert.rewriting import Rewriting
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.integers import Preparation
from nlpconvert.recipe import Recipe


def apply(graph: onnx_ir.Graph, recipe: Recipe) -> None:
    """Quantizes, in place, the layers that the recipe calls "int8". UsageError when the recipe is another graph's."""
    Rewriter(graph, recipe).run()


def rewrite_exactly(graph: onnx_ir.Graph, recipe: Recipe) -> None:
    """The same rewrite with nothing rounded: shift, multiplier, outliers and folded weights in float32.

    What it computes must be what the graph computed, to rounding noise: the proof that the rewrite itself moves
    nothing.
    """
    Rewriter(graph, recipe, exact=True).run()


class Rewriter(Rewriting):
    """One rewrite of one graph."""

    def __init__(self, graph: onnx_ir.Graph, recipe: Recipe, exact: bool = False) -> None:
        super().__init__(graph)
        self.recipe, self.exact = recipe, exact
        unsigned = recipe.activation == "uint8"
        self.zero = np.array(128, np.uint8) if unsigned else np.array(0, np.int8)
        self.scope = ""

    def run(self) -> None:
        for site in linear.find(self.graph).sites:
            chosen = [w for w in site.weights if self.recipe.layer(w.name).precision == "int8"]
            if not chosen:
                continue
            name = self.recipe.layer(chosen[0].name).site
            if name not in self.recipe.sites:
                raise UsageError(f"the recipe has no scales for {name}")
            prepared = self.recipe.sites[name]
            if len(prepared.shift) != site.channels:
                raise UsageError(
                    f"the recipe's scales of {name} are for {len(prepared.shift)} channels, it has {site.channels}"
                )
            inputs = self._prepare_inputs(site, prepared, chosen)
            for weight in chosen:
                self._weight(weight, prepared, inputs)
        onnx_graph.drop_unused(self.graph)

    # -- the input ----------------------------------------------------------------------------------------------------

    def _prepare_inputs(
        self, site: linear.Site, prepared: Preparation, chosen: list[linear.Weight]
    ) -> dict[str, tuple[onnx_ir.Value, onnx_ir.Value | None]]:
        """For each input that a chosen layer reads: its prepared, rounded form, and its outlier channels."""
        read = {id(node.inputs[0]) for weight in chosen for node in weight.nodes}
        done: dict[str, tuple[onnx_ir.Value, onnx_ir.Value | None]] = {}
        base = site.name
        shift = self.constant(f"{base}.shift", prepared.shift)
        multiplier = self.constant(f"{base}.multiplier", prepared.multiplier)
        scale = self.constant(f"{base}.input_scale", np.array(prepared.scale, np.float32))
        zero = self.constant(f"{base}.input_zero_point", self.zero)
        for value in site.inputs:
            if id(value) not in read:
                continue
            before = next(
                n for n in self.graph if any(v is value for v in n.inputs) and n.op_type in ("MatMul", "Gemm")
            )
            self.scope = before.metadata_props.get(onnx_graph.SCOPES, "")
            moved = self._add(before, "Sub", [value, shift], value)
            scaled = self._add(before, "Mul", [moved, multiplier], value)
            rounded = scaled
            if not self.exact:
                whole = self._add(
                    before,
                    "QuantizeLinear",
                    [scaled, scale, zero],
                    value,
                    onnx_ir.DataType.from_numpy(self.zero.dtype),
                )
                rounded = self._add(before, "DequantizeLinear", [whole, scale, zero], value)
            apart = None
            if prepared.outliers:
                index = self.constant(f"{base}.outliers", np.array(prepared.outliers, np.int64))
                apart = self._add(before, "Gather", [value, index], None, axis=-1)
            assert value.name is not None
            done[value.name] = (rounded, apart)
        return done

    # -- the weight ---------------------------------------------------------------------------------------------------

    def _weight(
        self,
        weight: linear.Weight,
        prepared: Preparation,
        inputs: dict[str, tuple[onnx_ir.Value, onnx_ir.Value | None]],
    ) -> None:
        array = weight.array()
        if not np.isfinite(array).all():
            raise ConversionError(f"the weight of {weight.name} is not finite")
        inner = integers.folded(prepared, array)
        base = weight.value.name or weight.name
        float_or_whole: Callable[[onnx_ir.Node], onnx_ir.Value]
        if self.exact:
            constant = self.constant(f"{base}.folded", inner)
            float_or_whole = lambda node: constant  # noqa: E731
        else:
            whole, scales = integers.round_weight(inner, self.recipe.largest)
            stored = self.constant(f"{base}.int8", whole)
            scale = self.constant(f"{base}.scale", scales)
            zero = self.constant(f"{base}.zero_point", np.zeros(len(scales), np.int8))
            float_or_whole = lambda node: self._add(  # noqa: E731
                node, "DequantizeLinear", [stored, scale, zero], None, axis=1
            )
        apart = None
        if prepared.outliers:
            apart = self.constant(f"{base}.outliers", np.ascontiguousarray(array[list(prepared.outliers)]))
        offset = (prepared.shift @ array).astype(np.float32)
        correction = self.recipe.layer(weight.name).bias
        if correction is not None and not self.exact:
            if len(correction) != weight.columns:
                raise UsageError(f"the recipe's bias of {weight.name} does not fit it")
            offset = offset - correction
        for node in weight.nodes:
            value = node.inputs[0]
            assert value is not None and value.name is not None
            rounded, outliers = inputs[value.name]
            self.scope = node.metadata_props.get(onnx_graph.SCOPES, "")
            place = linear.bias_of(node)
            product = self._add(node, "MatMul", [rounded, float_or_whole(node)], node.outputs[0])
            if outliers is not None and apart is not None:
                beside = self._add(node, "MatMul", [outliers, apart], node.outputs[0])
                product = self._add(node, "Add", [product, beside], node.outputs[0])
            self._finish(node, place, product, offset, weight.name)

    def _finish(
        self,
        node: onnx_ir.Node,
        place: tuple[onnx_ir.Node, int] | None,
        product: onnx_ir.Value,
        offset: np.ndarray,
        name: str,
    ) -> None:
        """Puts the offset into the bias where there is one, and the new product in the old one's place."""
        user, index = place or (node, 2)
        old = None if place is None else user.inputs[index]
        bias = offset if old is None else offset + _array(old)
        if user is node:
            product = self._biased(node, product, f"{name}.bias.shifted", bias)
        elif user.op_type == "Add" and self._by_subtraction(node):
            user.replace_input_with(1 - index, product)
            product = self._biased(user, product, f"{name}.bias.shifted", bias)
            self._replace(user, product)
            self.graph.remove(node, safe=True)
            return
        else:
            assert old is not None
            user.replace_input_with(index, self.constant(f"{old.name}.shifted", bias))
        self._replace(node, product)

    def _by_subtraction(self, node: onnx_ir.Node) -> bool:
        """Whether a product's bias has to be subtracted, negated: ONNX Runtime makes a Gemm of a matrix product and an
        Add before it looks for Q/DQ, and computes that in floating point. It does so where there are two axes, or
        more whose sizes are all numbers.
        """
        if self.recipe.activation != "uint8":
            return False
        shape = node.outputs[0].shape
        return shape is None or len(shape) == 2 or all(isinstance(size, int) for size in shape)

    def _biased(self, node: onnx_ir.Node, product: onnx_ir.Value, name: str, bias: np.ndarray) -> onnx_ir.Value:
        """The product with a bias, before `node`, whose output has the same shape."""
        kind, bias = ("Sub", -bias) if self._by_subtraction(node) else ("Add", bias)
        return self._add(node, kind, [product, self.constant(name, bias)], node.outputs[0])

    def _replace(self, node: onnx_ir.Node, value: onnx_ir.Value) -> None:
        """`value` in the place and under the name of what `node` gave; the node goes."""
        target = node.outputs[0]
        named = target.name
        onnx_ir.convenience.replace_all_uses_with(target, value, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)
        value.name = named

    # -- small things -------------------------------------------------------------------------------------------------

    def _add(
        self,
        before: onnx_ir.Node,
        kind: str,
        inputs: list[onnx_ir.Value],
        like: onnx_ir.Value | None,
        dtype: onnx_ir.DataType | None = None,
        **attributes: int,
    ) -> onnx_ir.Value:
        node = onnx_ir.node(kind, inputs, attributes=attributes or None)
        if self.scope:
            node.metadata_props[onnx_graph.SCOPES] = self.scope
        out = node.outputs[0]
        if like is not None and like.shape is not None:
            out.shape = onnx_ir.Shape(list(like.shape))
            out.type = like.type if dtype is None else onnx_ir.TensorType(dtype)
        self.graph.insert_before(before, node)
        return out


def _array(value: onnx_ir.Value | None) -> np.ndarray:
    assert value is not None and value.const_value is not None
    return value.const_value.numpy()

"""Floor 2: a linear layer's product replaced by other nodes, in place: what every such rewrite has in common.

Constants under names of their own, nodes that belong to the module of the one they replace, and an offset that goes
into the layer's bias. Which numbers, and which nodes, is the converters'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir

from nlpconvert.convert import linear, onnx_graph
from nlpconvert.errors import ConversionError

CONTRIB = "com.microsoft"


class Rewriting:
    """One graph, and the constants that were put into it."""

    def __init__(self, graph: onnx_ir.Graph) -> None:
        self.graph = graph
        self._shifted: dict[tuple[str, str], onnx_ir.Value] = {}

    def constant(self, name: str, array: np.ndarray) -> onnx_ir.Value:
        """A new initializer. ConversionError where a number in it is not finite."""
        array = np.ascontiguousarray(array) if array.ndim else array
        if array.dtype == np.float32 and not np.isfinite(array).all():
            raise ConversionError(f"{name} is not finite: the weights or activations it comes from are not")
        unique, number = name, 1
        while unique in self.graph.initializers:
            number += 1
            unique = f"{name}.{number}"
        value = onnx_ir.Value(name=unique, const_value=onnx_ir.tensor(array, name=unique))
        value.shape = onnx_ir.Shape(array.shape)
        value.type = onnx_ir.TensorType(onnx_ir.DataType.from_numpy(array.dtype))
        self.graph.register_initializer(value)
        return value

    def add(
        self,
        before: onnx_ir.Node,
        op: str,
        inputs: Sequence[onnx_ir.Value],
        like: onnx_ir.Value | None,
        *,
        dtype: onnx_ir.DataType | None = None,
        domain: str = "",
        outputs: int = 1,
        attributes: Mapping[str, Any] | None = None,
    ) -> tuple[onnx_ir.Value, ...]:
        """The outputs of a new node before another one, whose module it belongs to; the first has the shape of `like`
        (None: not told), and its type where no `dtype` is given."""
        node = onnx_ir.node(op, inputs, attributes=attributes or None, domain=domain, num_outputs=outputs)
        scopes = before.metadata_props.get(onnx_graph.SCOPES)
        if scopes is not None:
            node.metadata_props[onnx_graph.SCOPES] = scopes
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        out = node.outputs[0]
        if like is not None and like.shape is not None:
            out.shape = onnx_ir.Shape(list(like.shape))
            out.type = like.type if dtype is None else onnx_ir.TensorType(dtype)
        self.graph.insert_before(before, node)
        return tuple(node.outputs)

    def first_product_of(self, value: onnx_ir.Value) -> onnx_ir.Node:
        """The first MatMul or Gemm that reads a value: what several of them share stands before it."""
        return next(
            node for node in self.graph if node.op_type in ("MatMul", "Gemm") and any(v is value for v in node.inputs)
        )

    def replace(self, node: onnx_ir.Node, product: onnx_ir.Value, name: str, offset: np.ndarray | None) -> None:
        """Puts `product` in the place of a MatMul or Gemm of the layer `name`.

        A Gemm's bias is added behind it. `offset` (outputs,) goes into the bias, a new one where there is none.
        """
        place = linear.bias_of(node)
        target = node.outputs[0]
        if place is None or place[0] is node:
            bias = None if place is None else node.inputs[place[1]]
            if bias is not None or offset is not None:
                added = self._bias(bias, offset, name)
                (product,) = self.add(node, "Add", [product, added], target)
        elif offset is not None:
            user, index = place
            user.replace_input_with(index, self._bias(user.inputs[index], offset, name))
        named = target.name
        onnx_ir.convenience.replace_all_uses_with(target, product, replace_graph_outputs=True)
        self.graph.remove(node, safe=True)
        product.name = named

    def _bias(self, old: onnx_ir.Value | None, offset: np.ndarray | None, name: str) -> onnx_ir.Value:
        """The bias with the offset in it; the same one for all nodes of a layer that share the old one."""
        if offset is None:
            assert old is not None
            return old
        key = (name, "" if old is None else old.name or "")
        if key not in self._shifted:
            array = offset
            if old is not None:
                assert old.const_value is not None
                array = offset + old.const_value.numpy()
            self._shifted[key] = self.constant(f"{key[1] or f'{name}.bias'}.shifted", array)
        return self._shifted[key]

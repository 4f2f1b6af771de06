"""Floor 2: reading what an ONNX graph proves about itself, and putting new nodes into it.

What is fused is `attention` and `optimize`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from nlpconvert.convert import onnx_graph

Size = int | str
"""A number, or the symbol of a dynamic axis."""


class Unproven(Exception):
    """Why a graph does not prove what a change needs, in words; never shown as an error."""


@dataclass
class Editor:
    """A graph, and what was added to it once for several users."""

    program: onnx_ir.Model
    made: dict[tuple[object, ...], onnx_ir.Value] = field(default_factory=dict)

    @property
    def graph(self) -> onnx_ir.Graph:
        """The main graph."""
        return self.program.graph

    def add(
        self,
        op: str,
        inputs: Sequence[onnx_ir.Value | None],
        before: onnx_ir.Node,
        name: str,
        shape: Sequence[Size],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        dtype: onnx_ir.DataType = onnx_ir.DataType.FLOAT,
        outputs: int = 1,
    ) -> onnx_ir.Value:
        """The first output, called `name`, of a new node before another one, whose module it belongs to. More outputs
        are there and not asked for until they are named."""
        node = onnx_ir.node(op, inputs, attributes=attributes or {}, domain=domain, num_outputs=outputs)
        scopes = before.metadata_props.get(onnx_graph.SCOPES)
        if scopes is not None:
            node.metadata_props[onnx_graph.SCOPES] = scopes
        for more in node.outputs[1:]:
            more.name = ""
        value = node.outputs[0]
        value.name, value.type, value.shape = name, onnx_ir.TensorType(dtype), onnx_ir.Shape(shape)
        self.graph.insert_before(before, node)
        return value

    def once(self, key: tuple[object, ...], make: Callable[[], onnx_ir.Value]) -> onnx_ir.Value:
        """What `make` gave the first time for this key."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def constant(self, *numbers: int | float) -> onnx_ir.Value:
        """An initializer: a scalar of float32 for a float, a vector of int64 for integers."""
        array = np.array(numbers, np.int64) if isinstance(numbers[0], int) else np.array(numbers[0], np.float32)
        name = "constant_" + "_".join(map(str, numbers))

        def make() -> onnx_ir.Value:
            value = onnx_ir.Value(name=name, const_value=onnx_ir.tensor(array, name=name))
            self.graph.register_initializer(value)
            return value

        return self.once(("constant", name), make)

    def replace(self, old: onnx_ir.Value, new: onnx_ir.Value) -> None:
        """Puts `new` where `old` was read, under its name. Where `old` is an output of the graph, so is `new`."""
        onnx_ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name, new.name = f"{old.name}.unfused", old.name

    def clean(self) -> None:
        """Drops what nothing reads any more."""
        RemoveUnusedNodesPass()(self.program)


def shape_of(value: onnx_ir.Value | None) -> tuple[Size, ...]:
    """Numbers and symbols; two equal symbols are one size. Unproven where the exporter left one open."""
    sizes = [] if value is None or value.shape is None else list(value.shape)
    known = tuple(size if isinstance(size, int) else str(size.value) for size in sizes)
    if value is None or value.shape is None or "None" in known:
        raise Unproven("a shape is not known")
    return known


def vector(value: onnx_ir.Value | None) -> list[Size]:
    """The numbers and symbols that a shape computed in the graph holds. Unproven where that cannot be told."""
    constant = None if value is None else onnx_ir.convenience.get_const_tensor(value)
    if constant is not None and constant.size < 16:
        return [int(each) for each in constant.numpy().reshape(-1)]
    if node := source(value, "Concat"):
        return [each for part in node.inputs for each in vector(part)]
    if node := source(value, "Shape"):
        sizes = list(shape_of(node.inputs[0]))
        return sizes[node.attributes.get_int("start", 0) : node.attributes.get_int("end", len(sizes))]
    if (node := source(value, "Slice")) and len(node.inputs) == 3:
        (start,), (end,) = (vector(each) for each in node.inputs[1:])
        if isinstance(start, int) and isinstance(end, int):
            return vector(node.inputs[0])[start:end]
    raise Unproven("a shape is computed in a way that is not known")


def scalar(value: onnx_ir.Value | None) -> float | None:
    """The number that a constant of one element holds."""
    constant = None if value is None else onnx_ir.convenience.get_const_tensor(value)
    return float(constant.numpy().reshape(-1)[0]) if constant is not None and constant.size == 1 else None


def source(value: onnx_ir.Value | None, op: str, perm: tuple[int, ...] = ()) -> onnx_ir.Node | None:
    """The node that made a value, if it is such a one (a Transpose by `perm`)."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != op or node.domain not in ("", "ai.onnx"):
        return None
    return node if not perm or tuple(node.attributes.get_ints("perm", ())) == perm else None


def only_user(value: onnx_ir.Value) -> onnx_ir.Node | None:
    """The one node that reads a value, once; None where it is an output of the graph."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def drop_idle_reshapes(editor: Editor) -> None:
    """Takes out each Reshape to the shape that its input has already: it stands between what belongs together."""
    for node in list(editor.graph):
        if node.op_type != "Reshape" or node.inputs[0] is None or node.outputs[0].is_graph_output():
            continue
        try:
            if shape_of(node.inputs[0]) != shape_of(node.outputs[0]):
                continue
        except Unproven:
            continue
        onnx_ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
        editor.graph.remove(node, safe=True)

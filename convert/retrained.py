"""Floor 2: other weights in the place of a float32 graph's own: what was trained after the model was exported.

Which weight of the graph is which of the checkpoint is told by the module path and proven by the numbers: what is to be
replaced has to be there to the bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir

from nlpconvert.convert import linear, onnx_graph
from nlpconvert.convert.rewriting import Rewriting
from nlpconvert.errors import ConversionError


@dataclass(frozen=True)
class Place:
    """Where a linear layer stands in the graph: the names of what goes in and of what comes out; `biased`: with its
    bias, which fusing may have put elsewhere."""

    layer: str
    input: str
    output: str
    biased: bool


def places(graph: onnx_ir.Graph, names: Collection[str]) -> list[Place]:
    """Every product of the layers `names`, as far as its output is a value of its own."""
    found = []
    for weight in linear.find(graph).weights:
        if weight.name not in names:
            continue
        for node in weight.nodes:
            place = linear.bias_of(node)
            user = node if place is None else place[0]
            if user.op_type in ("MatMul", "Gemm", "Add"):
                inside, outside = node.inputs[0], user.outputs[0]
                found.append(Place(weight.name, str(_name(inside)), str(outside.name), place is not None))
    return found


def values(graph: onnx_ir.Graph) -> frozenset[str]:
    """The names of all that nodes give."""
    return frozenset(str(value.name) for node in graph for value in node.outputs)


def present(graph: onnx_ir.Graph, weights: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Those of `weights` that stand in the graph as they are: matrices (inputs, outputs) by their layer's module path,
    vectors by their parameter's."""
    matrices = {weight.name: weight for weight in linear.find(graph).weights}
    found = set()
    for name, array in weights.items():
        if array.ndim == 2:
            weight = matrices.get(name)
            if weight is not None and np.array_equal(weight.array(), array):
                found.add(name)
        elif _readers(graph, name, array):
            found.add(name)
    return frozenset(found)


def put(graph: onnx_ir.Graph, before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]) -> None:
    """Puts `after` in the place of `before`, in place. ConversionError where something of `before` is not there."""
    lacking = sorted(set(after) - present(graph, before))
    if lacking:
        raise ConversionError(f"the graph has no weight {lacking[0]} as the checkpoint has it")
    matrices = {weight.name: weight for weight in linear.find(graph).weights}
    new = Rewriting(graph)
    for name, array in after.items():
        if array.ndim == 2:
            weight = matrices[name]
            stored = np.ascontiguousarray(array.T if weight.transposed else array, np.float32)
            weight.value.const_value = onnx_ir.tensor(stored, name=weight.value.name)
            continue
        # A vector may be shared with one that happened to be equal: its readers get one of their own.
        value = new.constant(f"{name}.trained", array.astype(np.float32))
        for node, index in _readers(graph, name, before[name]):
            node.replace_input_with(index, value)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)


def _readers(graph: onnx_ir.Graph, name: str, array: np.ndarray) -> list[tuple[onnx_ir.Node, int]]:
    """The nodes of a parameter's module that read it, and at which input."""
    module = name.rpartition(".")[0]
    found = []
    for node in graph:
        if onnx_graph.module_scope(node) != module:
            continue
        for index, value in enumerate(node.inputs):
            tensor = None if value is None or not value.is_initializer() else value.const_value
            if tensor is not None and tuple(tensor.shape.numpy()) != array.shape:
                continue  # nothing is read that need not be
            if tensor is not None and np.array_equal(tensor.numpy(), array):
                found.append((node, index))
    return found


def _name(value: onnx_ir.Value | None) -> str | None:
    return None if value is None else value.name

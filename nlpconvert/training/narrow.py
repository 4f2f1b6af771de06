"""Floor 2: computes only the rows that are read, as a change of the forward graph before its gradient is made.

A classifier of texts reads one token of the last layer. What stands between the attention of that layer and the reading
works on each token for itself, so that the reading can come first; forward and backward then compute one token instead
of all. The answers stay the same, and the gradients are verified as always.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx

from nlpconvert.training import operators

ROWWISE = frozenset(
    "Add Sub Mul Div Pow Sqrt Neg Erf Tanh Relu Sigmoid Identity Dropout LayerNormalization MatMul".split()
)
"""Operators that compute each token by itself, as far as `_fits` agrees."""

Shapes = Mapping[str, list[str]]


def read_first(model: onnx.ModelProto) -> int:
    """Moves readings of one token up to where tokens meet, in place; how many nodes now compute one token only.

    `model` carries its shapes; where the answer is not 0 those of inner values are gone and have to be found anew.
    """
    values = (*model.graph.input, *model.graph.output, *model.graph.value_info)
    shapes = {v.name: [d.dim_param or str(d.dim_value) for d in v.type.tensor_type.shape.dim] for v in values}
    constants = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            constants[node.output[0]] = onnx.numpy_helper.to_array(node.attribute[0].t)
    moved = 0
    for node in [node for node in model.graph.node if _reads_one(node, shapes, constants)]:
        moved += _move(model.graph, node, shapes, int(constants[node.input[1]]))
    if moved:
        del model.graph.value_info[:]
    return moved


def _reads_one(node: onnx.NodeProto, shapes: Shapes, constants: Mapping[str, np.ndarray]) -> bool:
    """Whether a node takes one token, the same for all rows, of a state (batch, tokens, width)."""
    axis = next((each.i for each in node.attribute if each.name == "axis"), 0)
    index = constants.get(node.input[1]) if node.op_type == "Gather" else None
    return axis == 1 and index is not None and index.ndim == 0 and len(shapes.get(node.input[0], ())) == 3


def _move(graph: onnx.GraphProto, reading: onnx.NodeProto, shapes: Shapes, index: int) -> int:
    tokens = shapes[reading.input[0]][1]
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    kept = {output.name for output in graph.output}
    chosen = {id(reading)}
    above: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        of_it = [reader for name in node.output for reader in readers.get(name, [])]
        if (
            of_it
            and all(id(reader) in chosen for reader in of_it)
            and not kept.intersection(node.output)
            and node.op_type in ROWWISE
            and _fits(node, shapes, tokens)
        ):
            chosen.add(id(node))
            above.append(node)
    if not above:
        return 0
    of_one = {name for node in above for name in node.output}
    one, first = f"{reading.name}/one", f"{reading.name}/first"
    graph.initializer.append(onnx.numpy_helper.from_array(np.array([index]), one))
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(0), first))
    added: dict[str, onnx.NodeProto] = {}
    for node in above:
        for place, name in enumerate(node.input):
            if name not in of_one and _has_tokens(shapes.get(name, []), tokens):
                new = f"{name}/one"
                made = onnx.helper.make_node("Gather", [name, one], [new], name=f"{reading.name}{name}", axis=1)
                added.setdefault(name, made)
                node.input[place] = new
    reading.input[1] = first
    _insert(graph, added)
    return len(above)


def _has_tokens(shape: Collection[str], tokens: str) -> bool:
    return len(shape) == 3 and list(shape)[1] == tokens


def _fits(node: onnx.NodeProto, shapes: Shapes, tokens: str) -> bool:
    """Whether each of its tokens comes from that token alone: inputs have the tokens' axis or none beside the width."""
    if any(name and name not in shapes for name in (*node.input[:1], *node.output[:1])):
        return False
    if not _has_tokens(shapes[node.output[0]], tokens):
        return False
    if node.op_type == "LayerNormalization":
        axis = next((each.i for each in node.attribute if each.name == "axis"), -1)
        return axis in (-1, 2) and _has_tokens(shapes[node.input[0]], tokens)
    if node.op_type == "MatMul":
        return _has_tokens(shapes[node.input[0]], tokens) and len(shapes.get(node.input[1], "---")) == 2
    return all(
        _has_tokens(shapes[name], tokens)
        or len(shapes[name]) < 2
        or (len(shapes[name]) == 3 and shapes[name][1] == "1")
        for name in node.input
        if name in shapes
    )


def _insert(graph: onnx.GraphProto, added: Mapping[str, onnx.NodeProto]) -> None:
    """Puts each new node behind the one that makes what it reads."""
    nodes: list[onnx.NodeProto] = [node for name, node in added.items() if name in {each.name for each in graph.input}]
    for node in graph.node:
        nodes.append(node)
        nodes += [added[name] for name in node.output if name in added]
    operators.put_nodes(graph, nodes)

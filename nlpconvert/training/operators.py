"""Floor 2: what of a forward graph ONNX Runtime cannot make a gradient of, found before anything is built.

The runtime is asked, operator by operator, with graphs of one node: a list of ours would be wrong one version later.
What it gets wrong without a word (a `Where` that broadcasts, axes whose sizes it does not know) is told from shapes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import onnx
import onnxruntime
from onnxruntime.capi._pybind_state import GradientGraphBuilder

from nlpconvert.errors import ConversionError

UNREGISTERED = "gradient builder has not been registered"
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
BROADCASTS = frozenset(("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "PRelu", "Where", "Expand"))
"""Operators whose inputs may be smaller than their output: a gradient is then summed over what was repeated."""
UNKNOWN = "unk__"
"""What symbolic shape inference calls an axis it knows nothing of; two such are taken to be equal."""


def quiet() -> Any:
    """Options of a session that says nothing on the terminal: what goes wrong is raised."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def put_nodes(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    """Makes `nodes`, in their order, all nodes of the graph; they may be its own."""
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def check(model: onnx.ModelProto, trained: Collection[str], loss: str) -> None:
    """Raises ConversionError naming every operator between a trained parameter and the loss without a right gradient.

    `model` carries its shapes, as symbolic shape inference leaves them.
    """
    values = {v.name: v for v in (*model.graph.input, *model.graph.output, *model.graph.value_info)}
    path = _path(model, trained, loss, values)
    missing = _unregistered(model, path, values)
    if missing:
        raise ConversionError(
            f"ONNX Runtime {onnxruntime.__version__} has no gradient for {_named(missing)}: train with --engine torch"
        )
    if wheres := _broadcasting_wheres(path, values):
        raise ConversionError(
            f"ONNX Runtime's gradient of Where is wrong where it broadcasts, as {_named({'Where': wheres})} does: "
            "train with --engine torch"
        )
    if unknown := _unknown_axes(path, values):
        raise ConversionError(
            f"the shapes at {_named(unknown)} could not be told, and ONNX Runtime's gradient is wrong where an axis of "
            "unknown size broadcasts: train with --engine torch"
        )


Values = Mapping[str, onnx.ValueInfoProto]
Path = list[tuple[onnx.NodeProto, tuple[str, ...]]]
"""Nodes between parameters and loss, each with those of its inputs that a gradient flows to."""


def _path(model: onnx.ModelProto, trained: Collection[str], loss: str, values: Values) -> Path:
    reached = set(trained)
    forward: Path = []
    for node in model.graph.node:
        along = tuple(name for name in node.input if name in reached)
        if along:
            forward.append((node, along))
            # Integers and truth values carry no gradient.
            reached.update(name for name in node.output if name and _is_float(values.get(name)))
    wanted = {loss}
    path: Path = []
    for node, along in reversed(forward):
        if any(name in wanted and name in reached for name in node.output):
            path.append((node, along))
            wanted.update(along)
    return path[::-1]


def _is_float(value: onnx.ValueInfoProto | None) -> bool:
    return value is None or value.type.tensor_type.elem_type in (*FLOATS, onnx.TensorProto.UNDEFINED)


def _unregistered(model: onnx.ModelProto, path: Path, values: Values) -> dict[str, list[str]]:
    """Operators without a gradient: type to names of nodes."""
    nodes: dict[tuple[str, str], list[tuple[onnx.NodeProto, tuple[str, ...]]]] = {}
    for node, along in path:
        nodes.setdefault((node.domain, node.op_type), []).append((node, along))
    made = {name: node for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    kept = {each.name: each for each in model.graph.initializer}
    missing = {}
    for (_, kind), found in nodes.items():
        node, along = found[0]
        if not _has_gradient(model, node, along, values, made, kept):
            missing[kind] = [each.name for each, _ in found]
    return missing


def _has_gradient(
    model: onnx.ModelProto,
    node: onnx.NodeProto,
    along: tuple[str, ...],
    values: Values,
    made: Mapping[str, onnx.NodeProto],
    kept: Mapping[str, onnx.TensorProto],
) -> bool:
    """Whether the runtime has a gradient for one node, asked with a graph of this node alone."""
    names = list(dict.fromkeys(name for name in node.input if name))
    graph = onnx.GraphProto(name="one")
    graph.node.extend([*(made[name] for name in names if name in made), node])
    graph.initializer.extend(kept[name] for name in names if name in kept)
    graph.input.extend(values.get(n) or _any(n) for n in names if n not in made and n not in kept)
    out = next(name for name in node.output if name)
    graph.output.append(values.get(out) or _any(out))
    one = onnx.ModelProto(ir_version=model.ir_version, graph=graph, opset_import=model.opset_import)
    try:
        GradientGraphBuilder(one.SerializeToString(), {out}, set(along), out, quiet()).build()
    except RuntimeError as error:
        # Any other complaint is about the small graph, or comes again, in full, when the gradient is built.
        return UNREGISTERED not in str(error)
    return True


def _any(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)


def _dims(value: onnx.ValueInfoProto | None) -> list[str] | None:
    """Axes as words ("3", "batch"); None where the number of axes is not known."""
    if value is None or not value.type.tensor_type.HasField("shape"):
        return None
    return [dim.dim_param or str(dim.dim_value) for dim in value.type.tensor_type.shape.dim]


def _broadcasting_wheres(path: Path, values: Values) -> list[str]:
    """`Where` nodes one of whose branches is smaller than the answer and carries a gradient."""
    found = []
    for node, along in path:
        if node.op_type == "Where":
            whole = _dims(values.get(node.output[0]))
            if any(name in along and _dims(values.get(name)) != whole for name in node.input[1:]):
                found.append(node.name)
    return found


def _unknown_axes(path: Path, values: Values) -> dict[str, list[str]]:
    """Nodes that may broadcast, with an axis of unknown size beside another than that very one: type to names."""
    found: dict[str, list[str]] = {}
    for node, _ in path:
        if node.op_type not in BROADCASTS:
            continue
        shapes = [_dims(values.get(name)) for name in (*node.input, *node.output) if name]
        if node.op_type == "Expand":
            shapes = [shapes[0], shapes[-1]]  # between them stands the shape, as numbers
        if any(shape is None for shape in shapes) or _may_differ([shape for shape in shapes if shape is not None]):
            found.setdefault(node.op_type, []).append(node.name)
    return found


def _may_differ(shapes: Iterable[list[str]]) -> bool:
    """Whether an axis of unknown size meets another one: which of them is repeated cannot be told."""
    shapes = list(shapes)
    for back in range(1, max(map(len, shapes), default=0) + 1):
        meets = {shape[-back] for shape in shapes if len(shape) >= back} - {"1"}
        if len(meets) > 1 and any(word.startswith(UNKNOWN) for word in meets):
            return True
    return False


def _named(found: Mapping[str, Collection[str]]) -> str:
    """ "CumSum (at /model/a) and Softplus (at /model/b and 2 more)"."""
    words = []
    for kind, names in found.items():
        first, *rest = names
        words.append(f"{kind} (at {first}{f' and {len(rest)} more' if rest else ''})")
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

"""Floor 2: an ONNX graph as a row of inner tensors that belong to modules, and pieces of it to be run alone.

The exporters record on each node which module of the checkpoint it came from. A tap is a float tensor that leaves the
module it was made in (or feeds one inside it). Cut at its taps a graph falls into pieces that take some tensors as
given and compute others; a piece holds only the weights that it needs, so a large graph can be run a part at a time.
What does not belong here: running a piece, and what its numbers mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import onnx

from nlpconvert import disk
from nlpconvert.errors import DriftError, first_line

SCOPES = "pkg.torch.onnx.name_scopes"
GIVEN, TAP = "/given", "/tap"
FLOATS: Mapping[int, int] = {
    onnx.TensorProto.FLOAT: 4,
    onnx.TensorProto.FLOAT16: 2,
    onnx.TensorProto.BFLOAT16: 2,
    onnx.TensorProto.DOUBLE: 8,
}
# What moves numbers about without computing: where no module is recorded, their results are no taps.
SHUFFLES = frozenset(
    "Reshape Transpose Cast Unsqueeze Squeeze Identity Expand Slice Concat Split Flatten Tile Constant Shape "
    "ConstantOfShape Range QuantizeLinear DequantizeLinear DynamicQuantizeLinear".split()
)

WEIGHT = re.compile(r"(\w+(?:\.\w+)*)\.(?:weight|bias)(?:\.T)?")


@dataclass(frozen=True)
class Tap:
    """An inner tensor: its value's name, the module that made it ("" where none is recorded), and what is known of its
    shape (numbers, names of axes, None).
    """

    name: str
    module: str
    shape: tuple[int | str | None, ...] | None


class Graph:
    """An opened ONNX file without its weights, which stay on disk."""

    def __init__(self, path: Path, model: onnx.ModelProto) -> None:
        self.path = path
        self._model = model
        graph = model.graph
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._makers = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
        self._readers: dict[str, list[int]] = {}
        for at, node in enumerate(graph.node):
            for name in _reads(node):
                self._readers.setdefault(name, []).append(at)
        self._scopes = [_scope(node) for node in graph.node]
        self._inputs = {value.name: value for value in graph.input if value.name not in self._initializers}
        self._outputs = [value.name for value in graph.output]
        self._types, self._shapes = _inferred(model)
        self._varies = self._depend_on_inputs()
        self.scoped = any(scope for scope in self._scopes)
        """Whether the nodes say which module they came from."""
        self.taps: tuple[Tap, ...] = tuple(self._find_taps())
        """In order of execution."""

    def has(self, name: str) -> bool:
        """Whether a node makes a float tensor of this name."""
        return name in self._makers and self._types.get(name) in FLOATS

    def module_of(self, name: str) -> str:
        """The module whose node makes a value; "" where none is recorded."""
        return self._scopes[self._makers[name]] if name in self._makers else ""

    def place(self, name: str) -> int:
        """Where in the order of execution a value is made."""
        return self._makers[name]

    def rank(self, name: str) -> int | None:
        """How many axes a value has, where that is known."""
        shape = self._shapes.get(name)
        return None if shape is None else len(shape)

    def inner(self, module: str) -> list[Tap]:
        """Every float tensor that is made by a module's own nodes, the last first."""
        found = [name for name, at in self._makers.items() if self._scopes[at] == module and self._is_float(name)]
        return [Tap(name, module, self._shapes.get(name)) for name in reversed(found)]

    def weight_bytes(self, wanted: Iterable[str], given: Collection[str]) -> int:
        """Bytes of the weights in a piece."""
        _, weights, _, _ = self._closure(wanted, frozenset(given))
        return sum(_size(self._initializers[name]) for name in weights)

    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs."""
        return tuple(self._outputs)

    def parts(self, name: str, given: Collection[str]) -> tuple[list[onnx.NodeProto], dict[str, onnx.TensorProto]]:
        """The nodes and the weights that one tensor is computed with when the others are given."""
        nodes, weights, _, _ = self._closure([name], frozenset(given))
        return [self._model.graph.node[at] for at in sorted(nodes)], {n: self._initializers[n] for n in sorted(weights)}

    def piece(self, wanted: Sequence[str], given: Collection[str], scratch: Path) -> tuple[Path, dict[str, str]]:
        """A file that computes `wanted` and takes the tensors `given` from outside wherever they are read.

        Returns it and the names of its inputs among `given` (tensor -> input). Inputs and outputs are float32 whatever
        the graph's own type is; an output is called `<tensor>/tap`. Written into `scratch`, its weights stay in the
        original's data file: to be opened with that one's directory as `data`.
        """
        nodes, weights, inputs, taken = self._closure(wanted, frozenset(given))
        made = onnx.ModelProto()
        made.CopyFrom(_shell(self._model))
        graph = made.graph
        graph.name = "piece"
        renamed = {name: name + GIVEN for name in taken}
        for name in sorted(taken):
            _float_input(graph, name, self._types[name], self._shapes.get(name), renamed)
        graph.input.extend(self._inputs[name] for name in self._inputs if name in inputs)
        graph.initializer.extend(self._initializers[name] for name in sorted(weights))
        graph.input.extend(self._kept_apart(nodes, taken))
        for at in sorted(nodes):
            node = graph.node.add()
            node.CopyFrom(self._model.graph.node[at])
            _rename(node, renamed)
        for name in wanted:
            graph.node.append(onnx.helper.make_node("Cast", [name], [name + TAP], to=onnx.TensorProto.FLOAT))
            graph.output.append(onnx.helper.make_tensor_value_info(name + TAP, onnx.TensorProto.FLOAT, None))
        scratch.mkdir(parents=True, exist_ok=True)
        path = scratch / "piece.onnx"
        path.write_bytes(made.SerializeToString())
        return path, {name: name + GIVEN for name in taken}

    def floats(self, tap: str, axes: Mapping[str, int]) -> int:
        """About how many numbers a tensor holds when axes have these sizes; an unknown axis counts 1."""
        shape = self._shapes.get(tap) or ()
        return prod(size if isinstance(size, int) else axes.get(str(size), 1) for size in shape) or 1

    # -- inside --------------------------------------------------------------------------------------------------------

    def _depend_on_inputs(self) -> set[str]:
        varies = set(self._inputs)
        for node in self._model.graph.node:
            if any(name in varies for name in _reads(node)):
                varies.update(name for name in node.output if name)
        return varies

    def _is_float(self, name: str) -> bool:
        rank = self.rank(name)
        return name in self._varies and self._types.get(name) in FLOATS and (rank is None or rank >= 1)

    def _find_taps(self) -> Iterator[Tap]:
        for at, node in enumerate(self._model.graph.node):
            scope = self._scopes[at]
            for name in node.output:
                if not name or not self._is_float(name):
                    continue
                readers = self._readers.get(name, [])
                if name not in self._outputs and not readers:
                    continue
                if self.scoped:
                    leaves = name in self._outputs or any(self._scopes[reader] != scope for reader in readers)
                else:
                    leaves = node.op_type not in SHUFFLES
                if leaves:
                    yield Tap(name, scope if self.scoped else self._owner(node), self._shapes.get(name))

    def _owner(self, node: onnx.NodeProto) -> str:
        """The module that a node's weight is named after, where no module is recorded."""
        names = (name for name in node.input if name in self._initializers)
        return next((found.group(1) for found in map(WEIGHT.fullmatch, names) if found), "")

    def _kept_apart(self, nodes: Iterable[int], taken: Collection[str]) -> Iterator[onnx.ValueInfoProto]:
        """The scales of integer weights whose product's other operand was quantized before the cut, as inputs that have
        a value already.

        Cut there, the product looks like one of integer weights with floats, for which ONNX Runtime rounds the floats
        to 8 bits anew; what might be given from outside it leaves alone.
        """
        for at in sorted(nodes):
            node = self._model.graph.node[at]
            if node.op_type != "DequantizeLinear" or node.input[0] not in self._initializers:
                continue
            users = [self._model.graph.node[user] for user in self._readers.get(node.output[0], ())]
            others = {name for user in users for name in user.input} & set(taken)
            if any(self._made_by(name) == "DequantizeLinear" for name in others):
                scale = self._initializers[node.input[1]]
                yield onnx.helper.make_tensor_value_info(scale.name, scale.data_type, list(scale.dims))

    def _made_by(self, name: str) -> str:
        return str(self._model.graph.node[self._makers[name]].op_type)

    def _closure(self, wanted: Iterable[str], given: frozenset[str]) -> tuple[set[int], set[str], set[str], set[str]]:
        """Nodes, weights, graph inputs and given tensors that are needed for `wanted`."""
        nodes: set[int] = set()
        weights: set[str] = set()
        inputs: set[str] = set()
        taken: set[str] = set()
        todo = [self._makers[name] for name in wanted]
        while todo:
            at = todo.pop()
            if at in nodes:
                continue
            nodes.add(at)
            for name in _reads(self._model.graph.node[at]):
                if name in given:
                    taken.add(name)
                elif name in self._makers:
                    todo.append(self._makers[name])
                elif name in self._initializers:
                    weights.add(name)
                elif name in self._inputs:
                    inputs.add(name)
        return nodes, weights, inputs, taken


def read(path: Path) -> Graph:
    """Opens a file. DriftError where it is no ONNX file."""
    try:
        return Graph(path, onnx.load(str(path), load_external_data=False))
    except Exception as error:  # protobuf and the file system raise different kinds
        raise DriftError(f"{path.name} cannot be read as ONNX: {first_line(error)}") from error


# -- protobuf ----------------------------------------------------------------------------------------------------------


def _scope(node: onnx.NodeProto) -> str:
    """The module path that a node came from: as recorded, else from a name such as "/encoder/layer.0/dense/MatMul"."""
    for entry in node.metadata_props:
        if entry.key == SCOPES:
            scopes = re.findall(r"'([^']*)'", entry.value)
            return scopes[-2] if len(scopes) >= 2 else ""
    parts = node.name.split("/")
    return ".".join(parts[1:-1]) if len(parts) > 2 and not parts[0] else ""


def _reads(node: onnx.NodeProto) -> list[str]:
    """What a node reads, its bodies' outer values included."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            own = {v.name for v in body.input} | {t.name for t in body.initializer}
            own |= {name for inner in body.node for name in inner.output}
            names += [name for inner in body.node for name in _reads(inner) if name not in own]
            names += [v.name for v in body.output if v.name not in own]
    return names


def _rename(node: onnx.NodeProto, renamed: Mapping[str, str]) -> None:
    for at, name in enumerate(node.input):
        if name in renamed:
            node.input[at] = renamed[name]
    for attribute in node.attribute:
        for body in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            for inner in body.node:
                _rename(inner, renamed)


def _inferred(model: onnx.ModelProto) -> tuple[dict[str, int], dict[str, tuple[int | str | None, ...]]]:
    """Element types and shapes by value, as far as they are recorded or can be inferred."""
    try:
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception:  # of another domain, or past what inference can take: what is recorded has to do
        graph = model.graph
    types: dict[str, int] = {}
    shapes: dict[str, tuple[int | str | None, ...]] = {}
    for value in (*model.graph.value_info, *graph.value_info, *graph.input, *graph.output):
        kind = value.type.tensor_type
        if kind.elem_type:
            types[value.name] = kind.elem_type
        if kind.HasField("shape"):
            dims = (d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in kind.shape.dim)
            shapes[value.name] = tuple(dims)
    return types, shapes


def _shell(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model without a graph: versions, domains and functions."""
    shell = onnx.ModelProto()
    shell.ir_version = model.ir_version
    shell.opset_import.extend(model.opset_import)
    shell.functions.extend(model.functions)
    return shell


def _float_input(
    graph: onnx.GraphProto, name: str, kind: int, shape: Sequence[object] | None, renamed: dict[str, str]
) -> None:
    """A float32 input `<name>/given`; where the graph computes in another type, cast to it."""
    axes = None if shape is None else [None] * len(shape)
    graph.input.append(onnx.helper.make_tensor_value_info(name + GIVEN, onnx.TensorProto.FLOAT, axes))
    if kind != onnx.TensorProto.FLOAT:
        renamed[name] = f"{name}{GIVEN}/cast"
        graph.node.append(onnx.helper.make_node("Cast", [name + GIVEN], [renamed[name]], to=kind))


def _size(tensor: onnx.TensorProto) -> int:
    return int(tensor.ByteSize()) + sum(int(e.value) for e in tensor.external_data if e.key == "length")


def array_of(tensor: onnx.TensorProto, directory: Path) -> np.ndarray:
    """A weight's numbers; those of a data file are mapped."""
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        return onnx.numpy_helper.to_array(tensor)
    where = {entry.key: entry.value for entry in tensor.external_data}
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.memmap(
        disk.inside(directory, where["location"]),
        dtype=dtype,
        mode="r",
        offset=int(where.get("offset", 0)),
        shape=tuple(tensor.dims),
    )

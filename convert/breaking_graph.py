"""Floor 2: an ONNX graph as `breaking` reads and changes it: tensors one at a time, products with a constant weight,
heads, tables that are looked up. Nothing is broken here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from nlpconvert import disk
from nlpconvert.errors import DriftError, UsageError, first_line

SCOPES = "pkg.torch.onnx.name_scopes"

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)

# Of each product with a weight, which input is the weight, its scale, its zero point and its bias.
OPERANDS: dict[str, tuple[int, int | None, int | None, int | None]] = {
    "MatMul": (1, None, None, None),
    "FusedMatMul": (1, None, None, None),
    "Gemm": (1, None, None, 2),
    "FusedGemm": (1, None, None, 2),
    "MatMulInteger": (1, None, 3, None),
    "MatMulIntegerToFloat": (1, 3, 5, 6),
    "DynamicQuantizeMatMul": (1, 2, 3, 4),
    "QLinearMatMul": (3, 4, 5, None),
    "MatMulNBits": (1, 2, 3, 5),
}

# Operators that add a bias along with what else they do, and which input it is.
BIASES: dict[str, int] = {
    "BiasGelu": 1,
    "FastGelu": 1,
    "SkipLayerNormalization": 4,
    "SkipSimplifiedLayerNormalization": 3,
}

# Attentions that are one operator, and the attributes with the heads of their first, second and third input.
HEADS: dict[str, tuple[str, str, str]] = {
    "Attention": ("q_num_heads", "kv_num_heads", "kv_num_heads"),
    "MultiHeadAttention": ("num_heads", "num_heads", "num_heads"),
    "GroupQueryAttention": ("num_heads", "kv_num_heads", "kv_num_heads"),
}

# And which input is what is added to the scores.
MASKS: dict[str, int] = {"Attention": 3, "MultiHeadAttention": 5}

_SAME = ("Transpose", "Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze")
_ONWARD = ("Cast", "Identity", "Split", "Slice", "QuantizeLinear", "DequantizeLinear", "Mul", "Clip")


@dataclass(frozen=True)
class Linear:
    """A product with a constant weight. `weight`, `scale`, `zero` and `bias` are names of initialisers ("" for none).

    `axis` is the axis of the stored weight that runs over the outputs.
    """

    module: str
    weight: str
    scale: str
    zero: str
    bias: str
    inputs: int
    outputs: int
    axis: int
    result: str


class Graph:
    """The graph of an ONNX file without its weights. Raises DriftError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._directory = path.parent
        try:
            self.model = onnx.load(str(path), load_external_data=False)
        except Exception as error:  # protobuf and the file system raise different kinds
            raise DriftError(f"{path} cannot be read as ONNX: {first_line(error)}") from error
        graph = self.model.graph
        self.nodes = list(graph.node)
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.users: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for name in node.input:
                self.users.setdefault(name, []).append(node)
        self._inputs = {value.name for value in graph.input} - set(self.tensors)

    @property
    def inside(self) -> int:
        """Bytes of the weights that stand inside the graph."""
        return sum(tensor.ByteSize() for tensor in self.model.graph.initializer)

    def module(self, node: onnx.NodeProto) -> str:
        """The module path in the checkpoint that a node came from; "" where none is recorded."""
        recorded = next((each.value for each in node.metadata_props if each.key == SCOPES), "")
        scopes = re.findall(r"'([^']*)'", recorded)
        return scopes[-2] if len(scopes) >= 2 else ""

    # -- tensors

    def tensor(self, name: str) -> np.ndarray:
        """An initialiser's values, as an array of its own. DriftError where its data cannot be read."""
        proto = self.tensors[name]
        if proto.data_location != onnx.TensorProto.EXTERNAL:
            return np.array(numpy_helper.to_array(proto))
        where = {entry.key: entry.value for entry in proto.external_data}
        whole = onnx.TensorProto()
        whole.CopyFrom(proto)
        whole.ClearField("external_data")
        whole.data_location = onnx.TensorProto.DEFAULT
        try:
            path = disk.inside(self._directory, where["location"])
            with path.open("rb") as file:
                file.seek(int(where.get("offset", "0")))
                whole.raw_data = file.read(int(where["length"]) if "length" in where else -1)
            return np.array(numpy_helper.to_array(whole))
        except (OSError, KeyError, ValueError, UsageError) as error:
            raise DriftError(f"{name} cannot be read from its data file: {first_line(error)}") from error

    def put(self, name: str, array: np.ndarray) -> None:
        """Other values for an initialiser, for all that read it. They stand inside the graph from here on."""
        self.tensors[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name))

    def put_for(self, node: onnx.NodeProto, slot: int, array: np.ndarray) -> None:
        """Other values for one input of one node; whoever else reads the initialiser keeps the old ones."""
        name = f"{node.input[slot]}.broken"
        if name not in self.tensors:
            made = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
            self.model.graph.initializer.append(made)
            self.tensors[name] = self.model.graph.initializer[-1]
        node.input[slot] = name

    # -- products with a weight

    @cached_property
    def linears(self) -> list[Linear]:
        """The products of activations with a constant matrix, in the graph's order, each weight once."""
        found: dict[str, Linear] = {}
        for node in self.nodes:
            if node.op_type in OPERANDS:
                linear = self._linear(node)
                if linear is not None and linear.weight not in found and min(linear.inputs, linear.outputs) > 1:
                    found[linear.weight] = linear
        return list(found.values())

    def _linear(self, node: onnx.NodeProto) -> Linear | None:
        at, *others = OPERANDS[node.op_type]
        if len(node.input) <= at:
            return None
        weight, scale, zero, turned = self._constant(node.input[at])
        if not weight:
            return None
        dims = list(self.tensors[weight].dims)
        attributes = {each.name: each.i for each in node.attribute}
        given = [node.input[i] if i is not None and i < len(node.input) else "" for i in others]
        scale, zero = scale or self._constant(given[0])[0], zero or self._constant(given[1])[0]
        if node.op_type == "MatMulNBits":
            axis, outputs, inputs = 0, attributes["N"], attributes["K"]
        elif len(dims) != 2:
            return None
        else:
            transposed = turned != bool(attributes.get("transB"))
            axis = 0 if transposed else 1
            outputs, inputs = dims[axis], dims[1 - axis]
        if node.op_type == "MatMulInteger":
            scale = self._scale_after(node, outputs)
        bias = self._constant(given[2])[0] if given[2] else self._bias_after(node.output[0], outputs, self.module(node))
        return Linear(self.module(node), weight, scale, zero, bias, inputs, outputs, axis, node.output[0])

    def _constant(self, name: str) -> tuple[str, str, str, bool]:
        """The initialiser behind a value, the scale and zero point it is dequantized with, and whether it is turned."""
        scale = zero = ""
        turned = False
        while name and name not in self.tensors:
            node = self.makers.get(name)
            if node is None or node.op_type not in (*_SAME, "DequantizeLinear"):
                return "", "", "", False
            if node.op_type == "DequantizeLinear":
                scale = self._constant(node.input[1])[0]
                zero = self._constant(node.input[2])[0] if len(node.input) > 2 else ""
            elif node.op_type == "Reshape":
                return "", "", "", False
            turned ^= node.op_type == "Transpose"
            name = node.input[0]
        return name, scale, zero, turned

    def _scale_after(self, node: onnx.NodeProto, outputs: int) -> str:
        """The scale that the whole numbers of a MatMulInteger are multiplied with at last."""
        for value in self._after(node.output[0], ("Cast",), 2):
            for user in self.users.get(value, ()):
                names = [name for name in user.input if name != value] if user.op_type == "Mul" else []
                maker = self.makers.get(names[0]) if names else None
                for name in (*names, *(maker.input if maker is not None and maker.op_type == "Mul" else ())):
                    if name in self.tensors and prod(self.tensors[name].dims) in (1, outputs):
                        return str(name)
        return ""

    def _bias_after(self, value: str, outputs: int, module: str) -> str:
        """What is added to a product at last: a quantized layer has a correction of its own before its bias."""
        found = ""
        for each in self._after(value, ("Cast", "Identity", "Reshape", "Mul"), 4, module):
            for user in self.users.get(each, ()):
                names = [user.input[BIASES[user.op_type]]] if self._adds_bias(user) else []
                names += [name for name in user.input if name != each] if user.op_type in ("Add", "Sum") else []
                for name in names:
                    constant = self._constant(name)[0]
                    if constant and list(self.tensors[constant].dims) == [outputs]:
                        found = constant
        return found

    @staticmethod
    def _adds_bias(node: onnx.NodeProto) -> bool:
        at = BIASES.get(node.op_type)
        return at is not None and len(node.input) > at and bool(node.input[at])

    def _after(self, value: str, through: tuple[str, ...], depth: int, module: str = "") -> Iterator[str]:
        """A value and what it becomes through operators that leave what it is, and through sums within a layer."""
        yield value
        if depth:
            for user in self.users.get(value, ()):
                if (user.op_type in through and user.input[0] == value) or self._same_layer(user, module):
                    for name in user.output:
                        yield from self._after(name, through, depth - 1, module)

    def _same_layer(self, node: onnx.NodeProto, module: str) -> bool:
        """Whether a sum is of the layer itself: with a constant, or of two products of the one module."""
        return node.op_type == "Add" and (
            any(self._constant(name)[0] for name in node.input) or (module != "" and self.module(node) == module)
        )

    def parts(self, linear: Linear) -> list[Linear]:
        """The products that make up a layer: more than one where some of its inputs are computed apart."""
        same = [each for each in self.linears if each.module == linear.module and each.outputs == linear.outputs]
        return same if linear.module else [linear]

    # -- heads

    def block(self, linear: Linear) -> int:
        """How many outputs of a projection belong to one head; 0 where its outputs are not divided into heads."""
        seen: set[str] = set()
        values = [linear.result]
        for _ in range(8):
            onward: list[str] = []
            for value in values:
                for user in self.users.get(value, ()):
                    found = self._head_of(user, value, linear)
                    if found and linear.outputs % found == 0:
                        return found
                    goes_on = user.op_type in (*_ONWARD, "Reshape") and user.input[0] == value
                    if goes_on or self._same_layer(user, linear.module):
                        onward += [name for name in user.output if name not in seen]
            seen.update(onward)
            values = onward
        return 0

    def _head_of(self, node: onnx.NodeProto, value: str, linear: Linear) -> int:
        if node.op_type in HEADS:
            attributes = {each.name: each.i for each in node.attribute}
            slot = list(node.input).index(value)
            count = attributes.get(HEADS[node.op_type][slot], 0) if slot < 3 else 0
            return linear.outputs // count if count else 0
        if node.op_type != "Reshape":
            return 0
        sizes = self._sizes(node.input[1])
        if len(sizes) < 4:
            return 0
        rest = sizes[3:]
        return prod(size for size in rest if size) if all(size and size > 0 for size in rest) else 0

    def _sizes(self, name: str) -> list[int | None]:
        """The entries of a shape, as far as constants tell; empty where nothing is known."""
        if name in self.tensors:
            return [int(each) for each in self.tensor(name).reshape(-1)]
        node = self.makers.get(name)
        if node is None or node.op_type != "Concat":
            return []
        parts: list[int | None] = []
        for each in node.input:
            known = self.tensor(each).reshape(-1) if each in self.tensors else [None]
            parts += [None if size is None else int(size) for size in known]
        return parts

    # -- masks

    def mask_of(self, node: onnx.NodeProto) -> tuple[onnx.NodeProto, int] | None:
        """Where the mask enters an attention: the node that adds it to the scores, and which of its inputs it is. None
        for what is no attention, or has no mask among the graph's inputs behind it.

        The attention is its Softmax, or the one operator that it was fused into.
        """
        slot = MASKS.get(node.op_type)
        if slot is not None:
            given = len(node.input) > slot and node.input[slot]
            return (node, slot) if given and self._reads_mask(node.input[slot]) else None
        if node.op_type != "Softmax":
            return None
        add = self.makers.get(node.input[0])
        while add is not None and add.op_type == "Cast":
            add = self.makers.get(add.input[0])
        if add is None or add.op_type != "Add":
            return None
        products = [self._is_product(name) for name in add.input]
        slot = products.index(False) if sorted(products) == [False, True] else -1
        return (add, slot) if slot >= 0 and self._reads_mask(add.input[slot]) else None

    def _is_product(self, name: str, depth: int = 6) -> bool:
        """Whether a value is a product of two activations that were scaled, cast or added to at most."""
        node = self.makers.get(name)
        if node is None or not depth:
            return False
        if node.op_type in ("MatMul", "FusedMatMul", "Einsum"):
            return not any(self._constant(each)[0] for each in node.input)
        through = node.op_type in (*_SAME, "Mul", "Div", "Add")
        return through and any(self._is_product(each, depth - 1) for each in node.input)

    def _reads_mask(self, name: str) -> bool:
        """Whether an input of masks stands behind a value."""
        seen, todo = set(), [name]
        while todo:
            each = todo.pop()
            if each in self._inputs and each.endswith("mask"):
                return True
            if each not in seen and each in self.makers:
                seen.add(each)
                todo += self.makers[each].input
        return False

    # -- tables

    @cached_property
    def lookups(self) -> list[onnx.NodeProto]:
        """The nodes that look up rows of a constant table of floating-point numbers."""
        return [
            node
            for node in self.nodes
            if node.op_type == "Gather"
            and node.input[0] in self.tensors
            and len(self.tensors[node.input[0]].dims) == 2
            and self.tensors[node.input[0]].data_type in FLOATS
            and not next((each.i for each in node.attribute if each.name == "axis"), 0)
        ]

    def looked_up(self, node: onnx.NodeProto) -> str:
        """The input whose numbers are the rows that a node looks up; "" where they are computed or constant."""
        name = node.input[1]
        while name in self.makers and self.makers[name].op_type in _SAME:
            name = self.makers[name].input[0]
        return name if name in self._inputs else ""

"""Floor 2: the linear layers of an exported graph: what can be quantized, and what hangs together.

A weight may be used by several nodes (ALBERT's layers), and an input by several weights (query, key and value). All
that is so connected is one site: it has one preparation of its input, so that a shared weight stays shared and an input
is prepared once. Nothing is changed here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir

from nlpconvert.convert import onnx_graph

FEWEST_OUTPUTS = 16
"""A layer of fewer outputs (a classifier's head) decides everything and costs nothing: it stays as it is."""


@dataclass
class Weight:
    """One weight matrix and the nodes that multiply by it. `name` is the module path in the checkpoint."""

    name: str
    value: onnx_ir.Value
    transposed: bool
    """Stored (outputs, inputs), as a Gemm's transB or behind a Transpose."""
    rows: int
    columns: int
    nodes: list[onnx_ir.Node] = field(default_factory=list)

    @property
    def flops(self) -> int:
        """Multiplications for one token, over all uses."""
        return self.rows * self.columns * len(self.nodes)

    def array(self) -> np.ndarray:
        """The weight as (inputs, outputs), float32."""
        assert self.value.const_value is not None
        array = self.value.const_value.numpy()
        return array.T if self.transposed else array


@dataclass
class Site:
    """What shares inputs or weights. `inputs` are the values that the layers read."""

    inputs: list[onnx_ir.Value]
    weights: list[Weight]

    @property
    def name(self) -> str:
        """The first layer's."""
        return self.weights[0].name

    @property
    def channels(self) -> int:
        """Width of the inputs."""
        return self.weights[0].rows


@dataclass(frozen=True)
class Found:
    """All linear layers of a graph: the sites, and why other weight products are left alone, by name."""

    sites: list[Site]
    left: dict[str, str]
    left_flops: int

    @property
    def weights(self) -> list[Weight]:
        """Every layer that can be quantized."""
        return [weight for site in self.sites for weight in site.weights]

    @property
    def flops(self) -> int:
        """Multiplications of all products with a weight, for one token."""
        return sum(weight.flops for weight in self.weights) + self.left_flops


def find(graph: onnx_ir.Graph) -> Found:
    """The linear layers of `graph` in order. A weight that one of its products cannot give up is left for all."""
    uses: dict[int, list[tuple[onnx_ir.Node, onnx_ir.Value, bool]]] = {}
    for node in graph:
        if node.op_type in ("MatMul", "Gemm") and (found := _constant(node)) is not None:
            uses.setdefault(id(found[0]), []).append((node, *found))
    weights: list[Weight] = []
    left: dict[str, str] = {}
    left_flops = 0
    names: set[str] = set()
    for users in uses.values():
        nodes = [node for node, _, _ in users]
        _, value, transposed = users[0]
        assert value.const_value is not None
        shape = tuple(value.const_value.shape.numpy())
        reason = next((why for node, _, turned in users if (why := _why_not(node, value, shape, turned))), "")
        if any(turned != transposed for _, _, turned in users):
            reason = reason or "its weight is used transposed too"
        if reason:
            left |= {_name(node, value, names): reason for node in nodes}
            left_flops += int(np.prod(shape)) * len(nodes)
            continue
        rows, columns = shape[::-1] if transposed else shape
        weights.append(Weight(_name(nodes[0], value, names), value, transposed, rows, columns, nodes))
    return Found(_sites(weights), left, left_flops)


def _name(node: onnx_ir.Node, value: onnx_ir.Value, taken: set[str]) -> str:
    """The module path of a product in the checkpoint; where it is taken, with a number. It is taken then."""
    name = onnx_graph.module_scope(node) or node.name or value.name or "unnamed"
    while name in taken:
        number = re.search(r"#(\d+)$", name)
        name = f"{name}#2" if number is None else f"{name[: number.start()]}#{int(number.group(1)) + 1}"
    taken.add(name)
    return name


def bias_of(node: onnx_ir.Node) -> tuple[onnx_ir.Node, int] | None:
    """The node and input at which a product's constant bias is added: (node, index); None where there is none."""
    if node.op_type == "Gemm":
        return (node, 2) if len(node.inputs) > 2 and _is_vector(node.inputs[2]) else None
    users = node.outputs[0].consumers()
    if len(users) != 1:
        return None
    (user,) = users
    if user.op_type in ("Add", "BiasGelu", "FastGelu"):
        places = [i for i, value in enumerate(user.inputs) if _is_vector(value)]
        return (user, places[0]) if places else None
    if user.op_type == "SkipLayerNormalization" and len(user.inputs) > 4 and _is_vector(user.inputs[4]):
        return (user, 4)
    return None


def _is_vector(value: onnx_ir.Value | None) -> bool:
    tensor = None if value is None else value.const_value
    return tensor is not None and len(tensor.shape) == 1 and value is not None and value.is_initializer()


def _constant(node: onnx_ir.Node) -> tuple[onnx_ir.Value, bool] | None:
    """The initialiser that a product multiplies by, and whether it is stored transposed."""
    value = node.inputs[1] if len(node.inputs) > 1 else None
    if value is None:
        return None
    transposed = node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))
    producer = value.producer()
    if producer is not None and producer.op_type == "Transpose":
        inner = producer.inputs[0]
        perm = producer.attributes.get_ints("perm", None)
        if inner is not None and inner.is_initializer() and (perm is None or list(perm) == [1, 0]):
            value, transposed = inner, not transposed
    if not value.is_initializer() or value.const_value is None:
        return None
    if value.const_value.dtype != onnx_ir.DataType.FLOAT:
        return None
    return value, transposed


def _why_not(node: onnx_ir.Node, value: onnx_ir.Value, shape: Sequence[int], transposed: bool) -> str:
    """Why a product is left as it is, in a few words; "" when it can be quantized."""
    if len(shape) != 2:
        return f"its weight has {len(shape)} axes"
    if node.op_type == "Gemm":
        alpha, beta = node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)
        if alpha != 1.0 or beta != 1.0 or node.attributes.get_int("transA", 0) != 0:
            return "it scales or transposes its input"
        if len(node.inputs) > 2 and node.inputs[2] is not None and not _is_vector(node.inputs[2]):
            return "what it adds is no constant bias"
    if (shape[0] if transposed else shape[1]) < FEWEST_OUTPUTS:
        return f"it has {shape[0] if transposed else shape[1]} outputs: nothing to gain"
    for user in value.consumers():
        users = user.outputs[0].consumers() if user.op_type == "Transpose" else [user]
        if any(each.op_type not in ("MatMul", "Gemm") for each in users):
            return "its weight is an embedding table too, and would have to be stored twice"
    return ""


def _sites(weights: list[Weight]) -> list[Site]:
    """What is connected through an input or a weight, in the graph's order."""
    sites: list[Site] = []
    by_input: dict[str, Site] = {}
    for weight in weights:
        inputs = list({id(v): v for node in weight.nodes if (v := node.inputs[0]) is not None}.values())
        touching = list({id(s): s for value in inputs if (s := by_input.get(value.name or ""))}.values())
        site = touching[0] if touching else Site([], [])
        if not touching:
            sites.append(site)
        for other in touching[1:]:
            site.inputs += other.inputs
            site.weights += other.weights
            sites.remove(other)
        site.weights.append(weight)
        known = {id(value) for value in site.inputs}
        site.inputs += [value for value in inputs if id(value) not in known]
        for value in site.inputs:
            by_input[value.name or ""] = site
    return sites

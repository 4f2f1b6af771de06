"""Floor 2: a TorchScript module broken on purpose, in memory, so that a gate can show that it trips.

The graph that runs is edited before its first pass: one node gets another constant, whoever else reads the old one
keeps A frozen trace records no module paths, so what was broken is told as an operation: linear 12 of 20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from nlpconvert.breaks import EPSILON, NUDGE, Asked, Broken, NotApplicable, middle
from nlpconvert.errors import DriftError, first_line

_SAME = ("aten::to", "aten::view", "aten::reshape", "aten::contiguous", "aten::unsqueeze", "aten::expand")
_ONWARD = (*_SAME, "aten::add", "aten::split", "aten::chunk", "aten::slice", "aten::mul", "prim::ListUnpack")


@dataclass(frozen=True)
class Linear:
    """A product with a constant matrix: its node, which inputs are the weight and the bias (-1: none), and the axis of
    the weight that runs over the outputs."""

    node: Any
    at: int
    bias: int
    axis: int
    inputs: int
    outputs: int

    @property
    def weight(self) -> torch.Tensor:
        """The weight."""
        return _tensor(self.node, self.at)


def break_module(path: Path, name: str, asked: Asked) -> tuple[torch.jit.ScriptModule, Broken]:
    """The module in `path`, broken in the way `name`, and what was done.

    Raises NotApplicable, with the reason, where the graph has nothing to break in this way, and DriftError where the
    file cannot be read.
    """
    try:
        module: torch.jit.ScriptModule = torch.jit.load(str(path), map_location="cpu").eval()  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        raise DriftError(f"torch cannot open {path.name}: {first_line(error)}") from error
    with torch.no_grad():
        return module, GRAPH[name](module.graph, asked)


# ---- reading --------------------------------------------------------------------------------------------------------


def constant(node: Any, at: int) -> torch.Tensor | None:
    """The tensor that stands at an input of a node; None for anything but a constant tensor."""
    inputs = list(node.inputs())
    if not 0 <= at < len(inputs) or inputs[at].node().kind() != "prim::Constant":
        return None
    value = inputs[at].toIValue()
    return value if isinstance(value, torch.Tensor) else None


def _all(graph: Any, *kinds: str) -> list[Any]:
    """Every node of these kinds, in the graph's order."""
    return [node for node in _nodes(graph) if node.kind() in kinds]


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)


def linears(graph: Any) -> list[Linear]:
    """The products of activations with a constant matrix."""
    found: list[Linear] = []
    rows = {"aten::linear": (1, 2, 0), "aten::addmm": (2, 0, 1), "aten::matmul": (1, -1, 1), "aten::mm": (1, -1, 1)}
    for node in _all(graph, *rows):
        at, bias, axis = rows[node.kind()]
        weight = constant(node, at)
        if weight is None or weight.ndim != 2 or min(weight.shape) < 2:
            continue
        if constant(node, bias) is None:
            bias = -1
        outputs = weight.shape[axis]
        found.append(Linear(node, at, bias, axis, weight.shape[1 - axis], outputs))
    return found


def _block(linear: Linear) -> int:
    """How many outputs of a projection belong to one head; 0 where they are not divided into heads."""
    values = [linear.node.output()]
    for _ in range(8):
        onward: list[Any] = []
        for value in values:
            for use in value.uses():
                node = use.user
                if node.kind() in ("aten::view", "aten::reshape"):
                    sizes = list(list(node.inputs())[1].node().inputs())
                    rest = [size.toIValue() for size in sizes[3:] if size.node().kind() == "prim::Constant"]
                    if len(sizes) >= 4 and len(rest) == len(sizes) - 3 and min(rest) > 0:
                        size = prod(int(each) for each in rest)
                        return size if linear.outputs % size == 0 else 0
                if node.kind() in _ONWARD and (node.kind() != "aten::add" or _adds_constant(node)):
                    onward += list(node.outputs())
        values = onward
    return 0


def _adds_constant(node: Any) -> bool:
    return any(constant(node, at) is not None for at in (0, 1))


def _put(graph: Any, node: Any, at: int, value: torch.Tensor | float) -> None:
    """Another constant at one input of one node."""
    made = graph.insertConstant(value)
    made.node().moveBefore(node)
    node.replaceInput(at, made)


def _named(node: Any, graph: Any) -> str:
    """An operation by its number among those of its kind, in order of execution: "linear 12 of 20"."""
    same = _all(graph, node.kind())
    number = next(i for i, each in enumerate(same, start=1) if each.output().debugName() == node.output().debugName())
    return f"{node.kind().removeprefix('aten::')} {number} of {len(same)}"


# ---- the breaks -----------------------------------------------------------------------------------------------------


def _nudged(graph: Any, asked: Asked) -> Broken:
    linear = middle(linears(graph))
    after = (linear.weight.double() * asked.factor).to(linear.weight.dtype)
    if torch.equal(after, linear.weight):
        raise NotApplicable(f"{after.dtype} cannot hold a step of {asked.factor - 1:.1e}")
    _put(graph, linear.node, linear.at, after)
    return Broken(f"the weight of {_named(linear.node, graph)} times {asked.factor:.7g}")


def _bias_dropped(graph: Any, asked: Asked) -> Broken:
    # A key's bias adds the same to every score of a query, and softmax takes that away: never one of the projections.
    having = [linear for linear in linears(graph) if linear.bias >= 0 and not _block(linear)]
    having = [linear for linear in having if bool(_tensor(linear.node, linear.bias).any())]
    if not having:
        raise NotApplicable("no layer has a bias that is not zero")
    linear = middle(having)
    _put(graph, linear.node, linear.bias, torch.zeros_like(_tensor(linear.node, linear.bias)))
    return Broken(f"the bias of {_named(linear.node, graph)} all zeros")


def _heads_swapped(graph: Any, asked: Asked) -> Broken:
    found = [(each, block) for each in linears(graph) if 0 < (block := _block(each)) <= each.outputs // 2]
    if not found:
        raise NotApplicable("no projection into two heads or more was found")
    linear, block = found[len(found) // 2]
    order = torch.arange(linear.outputs)
    order[:block], order[block : 2 * block] = torch.arange(block, 2 * block), torch.arange(block)
    after = linear.weight.index_select(linear.axis, order)
    if torch.equal(after, linear.weight):
        raise NotApplicable("its first two heads are the same")
    _put(graph, linear.node, linear.at, after)
    return Broken(f"heads 0 and 1 of {_named(linear.node, graph)} in each other's place")


def _epsilon_changed(graph: Any, asked: Asked) -> Broken:
    places = {"aten::layer_norm": 4, "aten::rms_norm": 3, "aten::rsqrt": 0, "aten::sqrt": 0}
    places_of = [(root, _epsilon_of(root, places[root.kind()])) for root in _all(graph, *places)]
    found = [(root, place) for root, place in places_of if place is not None]
    if not found:
        raise NotApplicable("no normalization with an epsilon was found")
    root, (node, at) = found[len(found) // 2]
    old = list(node.inputs())[at].toIValue()
    _put(graph, node, at, torch.full_like(old, EPSILON) if isinstance(old, torch.Tensor) else EPSILON)
    return Broken(f"epsilon {EPSILON:g} instead of {float(old):.3g} in {_named(root, graph)}")


def _epsilon_of(node: Any, at: int) -> tuple[Any, int] | None:
    """Node and input of a normalization's epsilon: an argument, or what is added to a mean of squares under a root."""
    if node.kind() in ("aten::rsqrt", "aten::sqrt"):
        node = next(node.inputs()).node()
        if node.kind() != "aten::add" or next(node.inputs()).node().kind() != "aten::mean":
            return None
        at = 1
    value = list(node.inputs())[at]
    if value.node().kind() != "prim::Constant" or value.toIValue() is None:
        return None
    return node, at


def _row_zeroed(graph: Any, asked: Asked) -> Broken:
    found = [node for node in _lookups(graph) if _looked_up(node, graph).endswith("input_ids")]
    if not found:
        raise NotApplicable("no table of token embeddings is looked up by the ids")
    first = next((node for node in found if _looked_up(node, graph) == "input_ids"), found[0])
    table = _tensor(first, 0)
    if not 0 <= asked.token < len(table):
        raise NotApplicable(f"the table has no row {asked.token}")
    after = table.clone()
    after[asked.token] = 0
    for node in found:  # a tied head keeps its weight
        if _tensor(node, 0).data_ptr() == table.data_ptr():
            _put(graph, node, 0, after)
    return Broken(f"row {asked.token} of the table of {_named(first, graph)} all zeros")


def _positions_shifted(graph: Any, asked: Asked) -> Broken:
    # By what stands in no input of ids or types: positions, counted or given. The largest: a table of types is small.
    found = [node for node in _lookups(graph) if _looked_up(node, graph) in ("", "position_ids")]
    found = [node for node in found if len(_tensor(node, 0)) > 2]
    if not found:
        raise NotApplicable("no table of positions is looked up")
    node = max(found, key=lambda node: len(_tensor(node, 0)))
    table = _tensor(node, 0)
    _put(graph, node, 0, torch.cat([table[1:], table[-1:]]))
    return Broken(f"row i + 1 of the table of {_named(node, graph)} in the place of row i")


def _lookups(graph: Any) -> list[Any]:
    found = [(node, constant(node, 0)) for node in _all(graph, "aten::embedding", "aten::index_select")]
    return [node for node, table in found if table is not None and table.ndim == 2 and table.is_floating_point()]


def _looked_up(node: Any, graph: Any) -> str:
    """The input whose numbers are the rows that a node looks up; "" where they are computed or constant."""
    value = list(node.inputs())[2 if node.kind() == "aten::index_select" else 1]
    while value.node().kind() in _SAME:
        value = next(value.node().inputs())
    names = {each.debugName(): each.debugName().partition(".")[0] for each in graph.inputs()}
    return str(names.get(value.debugName(), ""))


def _tensor(node: Any, at: int) -> torch.Tensor:
    found = constant(node, at)
    assert found is not None
    return found


GRAPH: Mapping[str, Callable[[Any, Asked], Broken]] = {
    NUDGE: _nudged,
    "heads-swapped": _heads_swapped,
    "bias-dropped": _bias_dropped,
    "positions-shifted": _positions_shifted,
    "epsilon-changed": _epsilon_changed,
    "row-zeroed": _row_zeroed,
}

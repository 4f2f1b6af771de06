"""Floor 2: an ONNX graph broken on purpose, so that a gate can show that it trips.

Plain protobuf: the graph is read without its weights, the one tensor that is changed is read from the data file and put
inside the broken graph, everything else stays where it is. So a broken file is small, and is opened with the original's
directory as the place of its data. Which tensor it is, and which module of the checkpoint it belongs to, is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import numpy as np
import onnx

from nlpconvert.breaks import EPSILON, NUDGE, Asked, Broken, NotApplicable, middle
from nlpconvert.convert.breaking_graph import Graph, Linear

INSIDE_LIMIT = 1_900_000_000
"""Bytes that one protobuf file can hold, with room for the graph."""


def break_file(path: Path, name: str, directory: Path, asked: Asked) -> Broken:
    """Writes the ONNX file `path`, broken in the way `name`, into `directory` (without a data file).

    Raises NotApplicable, with the reason, where the graph has nothing to break in this way, and DriftError where it
    cannot be read.
    """
    graph = Graph(path)
    done = GRAPH[name](graph, asked)
    broken = directory / "broken.onnx"
    written = graph.model.SerializeToString() if graph.inside < INSIDE_LIMIT else b""
    if not written:
        raise NotApplicable("what would be changed does not fit into one file")
    broken.write_bytes(written)
    return Broken(done.what, done.module, broken)


def holds_tables(path: Path) -> bool:
    """Whether every table that ids are looked up in stands in the ONNX file itself, none in a data file."""
    graph = Graph(path)
    tables = [graph.tensors[node.input[0]] for node in graph.lookups]
    return all(table.data_location != onnx.TensorProto.EXTERNAL for table in tables)


# ---- the breaks -----------------------------------------------------------------------------------------------------


def _nudged(graph: Graph, asked: Asked) -> Broken:
    linear = middle(graph.linears)
    changed = [_scaled(graph, part, asked.factor) for part in graph.parts(linear)]
    name = linear.scale or linear.weight
    if not any(changed):
        raise NotApplicable(f"{graph.tensor(name).dtype} cannot hold a step of {asked.factor - 1:.1e}")
    return Broken(f"{name} times {asked.factor:.7g}", linear.module)


def _scaled(graph: Graph, linear: Linear, factor: float) -> bool:
    """Multiplies a weight, or what it is scaled by; whether that changed anything."""
    name = linear.scale or linear.weight
    before = graph.tensor(name)
    after = _times(before, factor)
    graph.put(name, after)
    return not np.array_equal(before, after)


def _times(array: np.ndarray, factor: float) -> np.ndarray:
    if array.dtype.kind in "iu":
        raise NotApplicable("its weights are integers without a scale")
    return (array.astype(np.float64) * factor).astype(array.dtype)


def _scale_doubled(graph: Graph, asked: Asked) -> Broken:
    scaled = [linear for linear in graph.linears if linear.scale]
    if not scaled:
        raise NotApplicable("no weight has a scale")
    linear = middle(scaled)
    _scaled(graph, linear, 2.0)
    return Broken(f"{linear.scale} times 2", linear.module)


def _bias_dropped(graph: Graph, asked: Asked) -> Broken:
    # A key's bias adds the same to every score of a query, and softmax takes that away: never one of the projections.
    having = [linear for linear in graph.linears if linear.bias and not graph.block(linear)]
    having = [linear for linear in having if graph.tensor(linear.bias).any()]
    if not having:
        raise NotApplicable("no layer has a bias that is not zero")
    linear = middle(having)
    graph.put(linear.bias, np.zeros_like(graph.tensor(linear.bias)))
    return Broken(f"{linear.bias} all zeros", linear.module)


def _heads_swapped(graph: Graph, asked: Asked) -> Broken:
    found = [(linear, block) for linear in graph.linears if 0 < (block := graph.block(linear)) <= linear.outputs // 2]
    if not found:
        raise NotApplicable("no projection into two heads or more was found")
    linear, block = found[len(found) // 2]
    changed = [_part_swapped(graph, part, block) for part in graph.parts(linear)]
    if not any(changed):
        raise NotApplicable("its first two heads are the same")
    return Broken(f"heads 0 and 1 of {linear.weight} in each other's place", linear.module)


def _part_swapped(graph: Graph, linear: Linear, block: int) -> bool:
    """Swaps the first two blocks of outputs in a weight, and in what it is scaled by; whether that changed anything."""
    changed = False
    for name in (linear.weight, linear.scale, linear.zero):
        if not name:
            continue
        array = graph.tensor(name)
        if array.ndim > 1 and array.shape[linear.axis] == linear.outputs:
            after = _blocks_swapped(array, linear.axis, block)
        elif array.size % linear.outputs == 0:
            after = _blocks_swapped(array.reshape(linear.outputs, -1), 0, block).reshape(array.shape)
        else:
            continue  # one for the whole tensor
        changed = changed or not np.array_equal(array, after)
        graph.put(name, after)
    return changed


def _blocks_swapped(array: np.ndarray, axis: int, block: int) -> np.ndarray:
    order = np.arange(array.shape[axis])
    order[:block], order[block : 2 * block] = np.arange(block, 2 * block), np.arange(block)
    return np.take(array, order, axis=axis)


NORMS = ("LayerNormalization", "RMSNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
         "SimplifiedLayerNormalization", "EmbedLayerNormalization")  # fmt: skip


def _epsilon_changed(graph: Graph, asked: Asked) -> Broken:
    found = [node for node in graph.nodes if node.op_type in NORMS or _adds_epsilon(graph, node)]
    if not found:
        raise NotApplicable("no normalization with an epsilon was found")
    node = found[len(found) // 2]
    module = graph.module(node)
    if node.op_type in NORMS:
        before = next((each.f for each in node.attribute if each.name == "epsilon"), 1e-5)
        for each in [each for each in node.attribute if each.name == "epsilon"]:
            node.attribute.remove(each)
        node.attribute.append(onnx.helper.make_attribute("epsilon", EPSILON))
    else:
        slot = next(i for i, name in enumerate(node.input) if name in graph.tensors)
        old = graph.tensor(node.input[slot])
        before = float(old.reshape(-1)[0])
        graph.put_for(node, slot, np.full_like(old, EPSILON))
    return Broken(f"epsilon {EPSILON:g} instead of {before:.3g}", module)


def _adds_epsilon(graph: Graph, node: onnx.NodeProto) -> bool:
    """A mean of squares plus a small number, on its way to a root: a normalization that was written out."""
    if node.op_type != "Add":
        return False
    constants = [name for name in node.input if name in graph.tensors and prod(graph.tensors[name].dims) == 1]
    others = [graph.makers.get(name) for name in node.input if name not in graph.tensors]
    return (
        len(constants) == 1
        and others[0] is not None
        and others[0].op_type == "ReduceMean"
        and any(user.op_type in ("Sqrt", "Pow", "Rsqrt") for user in graph.users.get(node.output[0], ()))
    )


def _row_zeroed(graph: Graph, asked: Asked) -> Broken:
    found = [node for node in graph.lookups if graph.looked_up(node).endswith("input_ids")]
    if not found:
        raise NotApplicable("no table of token embeddings is looked up by the ids")
    first = next((node for node in found if graph.looked_up(node) == "input_ids"), found[0])
    name = first.input[0]
    table = graph.tensor(name)
    if not 0 <= asked.token < len(table):
        raise NotApplicable(f"the table has no row {asked.token}")
    table[asked.token] = 0
    for node in found:  # a tied head keeps its weight
        if node.input[0] == name:
            graph.put_for(node, 0, table)
    return Broken(f"row {asked.token} of {name} all zeros", graph.module(first))


def _positions_shifted(graph: Graph, asked: Asked) -> Broken:
    # By what stands in no input of ids or types: positions, counted or given. The largest: a table of types is small.
    found = [node for node in graph.lookups if graph.looked_up(node) in ("", "position_ids")]
    found = [node for node in found if graph.tensors[node.input[0]].dims[0] > 2]
    if not found:
        raise NotApplicable("no table of positions is looked up")
    node = max(found, key=lambda node: graph.tensors[node.input[0]].dims[0])
    name = node.input[0]
    table = graph.tensor(name)
    shifted = np.concatenate([table[1:], table[-1:]])
    graph.put(name, shifted)
    return Broken(f"row i + 1 of {name} in the place of row i", graph.module(node))


def _unmasked(graph: Graph, asked: Asked) -> Broken:
    found = [(node, mask) for node in graph.nodes if (mask := graph.mask_of(node)) is not None]
    if not found:
        raise NotApplicable("no attention was found that a mask is added to")
    node, (holder, slot) = found[len(found) // 2]
    mask, module = holder.input[slot], graph.module(node)
    if holder is node:
        holder.input[slot] = ""
    else:  # the sum of scores and mask: whoever reads it reads the scores
        scores = holder.input[1 - slot]
        for user in graph.users[holder.output[0]]:
            user.input[:] = [scores if name == holder.output[0] else name for name in user.input]
    return Broken(f"{mask} no longer added to the scores", module)


def _batch_frozen(graph: Graph, asked: Asked) -> Broken:
    for value in graph.model.graph.input:
        if value.name not in graph.tensors and value.type.tensor_type.shape.dim:
            value.type.tensor_type.shape.dim[0].dim_value = asked.batch
    return Broken(f"the batch of every input frozen at {asked.batch}")


GRAPH: Mapping[str, Callable[[Graph, Asked], Broken]] = {
    NUDGE: _nudged,
    "heads-swapped": _heads_swapped,
    "bias-dropped": _bias_dropped,
    "mask-unread": _unmasked,
    "positions-shifted": _positions_shifted,
    "epsilon-changed": _epsilon_changed,
    "batch-frozen": _batch_frozen,
    "scale-doubled": _scale_doubled,
    "row-zeroed": _row_zeroed,
}

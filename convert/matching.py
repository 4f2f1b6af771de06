"""Floor 2: which inner tensors of two ONNX graphs should hold the same, and what differs in how they are computed.

Told by the files alone: names, recorded modules, shapes, weights and attributes. Nothing is run here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from nlpconvert.convert.tapping import FLOATS, WEIGHT, Graph, Tap, array_of

BLOCK = 1 << 20
"""Numbers of a weight that are looked at in float64 at once."""


@dataclass(frozen=True)
class Pair:
    """A tensor of the reference's graph and the one of the candidate's that should hold the same."""

    module: str
    reference: str
    candidate: str


def match(reference: Graph, candidate: Graph) -> tuple[list[Pair], list[str]]:
    """Tensors of two graphs that should hold the same, in the reference's order of execution, and the modules (or,
    where there are no modules, tensors) of the reference for which none was found.

    By name where the recorded modules do not contradict; else, between two files that both record modules, the n-th
    tensor of a module that leaves it. Where a module's own output is gone (fused away), its last inner tensor that both
    have stands for it.
    """
    pairs: dict[str, Pair] = {}
    ours, theirs = _leaving(reference.taps), _leaving(candidate.taps)
    for tap in reference.taps:
        if _same(reference, candidate, tap.name, tap.name):
            pairs[tap.name] = Pair(tap.module, tap.name, tap.name)
            continue
        of_module, others = ours[tap.module], theirs.get(tap.module, [])
        other = others[of_module.index(tap)] if tap.module and len(others) == len(of_module) else None
        # A name that the reference itself has in this module means what it means there, not what leaves the module.
        if other is not None and reference.module_of(other.name) != tap.module and _alike(tap, other):
            pairs[tap.name] = Pair(tap.module, tap.name, other.name)
    found = {pair.module for pair in pairs.values()}
    lacking = list(dict.fromkeys(tap.module or tap.name for tap in reference.taps if tap.name not in pairs))
    for module in [each for each in lacking if each not in found]:
        inner = reference.inner(module) if reference.scoped else []
        stands = next((tap for tap in inner if _same(reference, candidate, tap.name, tap.name)), None)
        if stands is not None:
            pairs[stands.name] = Pair(module, stands.name, stands.name)
            found.add(module)
    ordered = sorted(pairs.values(), key=lambda pair: reference.place(pair.reference))
    return ordered, [each for each in lacking if each not in found]


def _leaving(taps: Sequence[Tap]) -> dict[str, list[Tap]]:
    found: dict[str, list[Tap]] = {}
    for tap in taps:
        found.setdefault(tap.module, []).append(tap)
    return found


def _same(reference: Graph, candidate: Graph, ours: str, theirs: str) -> bool:
    """Whether two tensors of one name may be the same: both float, made in the same module, of as many axes."""
    if not candidate.has(theirs):
        return False
    scopes = reference.module_of(ours), candidate.module_of(theirs)
    if all(scopes) and scopes[0] != scopes[1]:
        return False
    ranks = reference.rank(ours), candidate.rank(theirs)
    return None in ranks or ranks[0] == ranks[1]


def _alike(ours: Tap, theirs: Tap) -> bool:
    """Whether a tensor of another name fits: as many axes, of the same fixed sizes."""
    if ours.shape is None or theirs.shape is None or len(ours.shape) != len(theirs.shape):
        return False
    both = zip(ours.shape, theirs.shape, strict=True)
    return all(a == b for a, b in both if isinstance(a, int) and isinstance(b, int))


def differences(reference: Graph, candidate: Graph, pair: Pair, pairs: Sequence[Pair]) -> tuple[list[str], set[str]]:
    """What differs in how two graphs compute one tensor, where the files can tell: sentences, and the modules that
    weights which differ are named after.

    Weights of one name and other numbers, and attributes of the same operation.
    """
    ours_nodes, ours = reference.parts(pair.reference, [each.reference for each in pairs])
    theirs_nodes, theirs = candidate.parts(pair.candidate, [each.candidate for each in pairs])
    found = []
    owners = set()
    for name in (name for name in ours if name in theirs):
        a, b = ours[name], theirs[name]
        if a.data_type != b.data_type or list(a.dims) != list(b.dims) or a.data_type not in FLOATS:
            continue
        moved, size = _distance(array_of(a, reference.path.parent), array_of(b, candidate.path.parent))
        if moved:
            found.append(f"the weight {name} differs{f' by {moved / size:.1e} of its norm' if size else ''}")
            named = WEIGHT.fullmatch(name)
            owners |= {named.group(1)} if named else set()
    if [node.op_type for node in ours_nodes] == [node.op_type for node in theirs_nodes]:
        for one, other in zip(ours_nodes, theirs_nodes, strict=True):
            found += _attributes(one, other)
    return found, owners


def _distance(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """|theirs - ours| and |ours| in float64, a part at a time; infinite where one side alone is not finite."""
    moved = size = 0.0
    for a, b in zip(
        *(np.array_split(each.reshape(-1), 1 + each.size // BLOCK) for each in (ours, theirs)), strict=True
    ):
        before, after = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore"):  # minus infinity stands in masks
            apart = after - before
        apart[(before == after) | (np.isnan(before) & np.isnan(after))] = 0.0
        before[~np.isfinite(before)] = 0.0
        moved += float(apart @ apart) if np.isfinite(apart).all() else math.inf
        size += float(before @ before)
    return moved**0.5, size**0.5


def _attributes(ours: onnx.NodeProto, theirs: onnx.NodeProto) -> Iterator[str]:
    values = {attribute.name: attribute for attribute in theirs.attribute}
    for attribute in ours.attribute:
        other = values.get(attribute.name)
        if other is not None and other != attribute and attribute.type in (other.FLOAT, other.INT, other.INTS):
            before, after = onnx.helper.get_attribute_value(attribute), onnx.helper.get_attribute_value(other)
            if isinstance(before, float):
                before, after = f"{before:g}", f"{after:g}"
            yield f"{ours.op_type}'s {attribute.name} is {after}, not {before}"

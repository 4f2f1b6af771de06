"""Floor 1: how texts are put into batches, what padding that costs, and where larger batches stop paying.

Lengths in, batches of indices out. What a batch costs is measured elsewhere (`benching`); `Flops` counts what a graph
has to compute for one token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

POLICIES = ("as they come", "sorted", "buckets")
"""How texts are put together: in their own order; by length; by length class, in their own order within each."""
PADDINGS = ("longest", "limit")
"""To the longest row of the batch, or all to one length."""
FEWEST = 8
"""Tokens of the smallest length class; each next one takes texts up to twice as long."""
PAYS = 1.05
"""A larger batch pays where it answers at least so many times as many texts a second."""


@dataclass(frozen=True)
class Batches:
    """Texts in batches: indices of each, and the length that its rows are padded to."""

    rows: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def real(self) -> int:
        """Tokens of the texts themselves."""
        return sum(self.lengths)

    @property
    def computed(self) -> int:
        """Tokens with padding."""
        return sum(len(rows) * width for rows, width in zip(self.rows, self.widths, strict=True))

    @property
    def waste(self) -> float:
        """Share of the computed tokens that are padding."""
        return 1 - self.real / self.computed if self.computed else 0.0


def plan(
    lengths: Sequence[int], batch: int, policy: str, padding: str = "longest", limit: int | None = None
) -> Batches:
    """Texts of these lengths in batches of at most `batch`. `limit`: what "limit" pads to; else the longest text's.

    Every text is in exactly one batch. KeyError for a policy that is none of POLICIES.
    """
    order = range(len(lengths))
    groups: list[list[int]] = {
        "as they come": lambda: [list(order)],
        "sorted": lambda: [sorted(order, key=lambda place: (lengths[place], place))],
        "buckets": lambda: _buckets(lengths),
    }[policy]()
    rows = tuple(tuple(group[start : start + batch]) for group in groups for start in range(0, len(group), batch))
    most = max(lengths, default=0) if limit is None else limit
    widths = tuple(most if padding == "limit" else max(lengths[place] for place in each) for each in rows)
    return Batches(rows, widths, tuple(lengths))


def _buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Texts by length class (up to 8 tokens, 16, 32, ...), in their own order within each."""
    found: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        found.setdefault(max(math.ceil(math.log2(max(length, 1) / FEWEST)), 0), []).append(place)
    return [found[key] for key in sorted(found)]


def stops_paying(throughput: Mapping[int, float]) -> int:
    """The batch size above which none answers PAYS times as many texts a second. `throughput` by batch size."""
    sizes = sorted(throughput)
    for size in sizes:
        if all(throughput[larger] < PAYS * throughput[size] for larger in sizes if larger > size):
            return size
    return sizes[-1]


# ---- what a token costs ---------------------------------------------------------------------------------------------

_SECOND = {"QLinearMatMul": 3}
_PRODUCTS = ("MatMul", "Gemm", "MatMulInteger", "FusedMatMul", "MatMulIntegerToFloat", "QLinearMatMul")
_THROUGH = ("Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Cast", "DequantizeLinear")


def flops_of_token(graphs: Sequence[Any]) -> int:
    """Floating-point operations of one token in the products with a weight of these GraphProtos: two for each weight.

    Products of activations with each other (attention's own) come on top; a pooler's, which reads one token of a row,
    is counted for each. So the rate that is computed from it is an upper bound for short texts.
    """
    total = 0
    for graph in graphs:
        weights = {value.name: tuple(value.dims) for value in graph.initializer}
        makers = {name: node for node in graph.node for name in node.output}
        for node in graph.node:
            if node.op_type == "MatMulNBits":
                sizes = {each.name: each.i for each in node.attribute}
                total += 2 * sizes["K"] * sizes["N"]
            elif node.op_type in _PRODUCTS and len(node.input) > _SECOND.get(node.op_type, 1):
                name = node.input[_SECOND.get(node.op_type, 1)]
                while name in makers and makers[name].op_type in _THROUGH:
                    name = makers[name].input[0]
                total += 2 * math.prod(weights.get(name, (0,)))
    return total

"""Floor 1, validators: which entries of an output count, and how they come as vectors. Scores nothing by itself.

An output with a sequence axis is scored where that axis's mask is 1. An output without one ((batch, hidden),
(batch, labels)) is scored in the rows that hold a real token at all: a fully masked row is only asked to be finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nlpconvert.golden import Reference
from nlpconvert.inputs import Case, scored_mask
from nlpconvert.models import AXIS_MASK, OutputRow

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

CHUNK = 1 << 20
"""Elements that are widened to float64 at a time: some ten arrays of 8 MB, whatever the output's size."""


def token_axis(output: OutputRow) -> str | None:
    """The output's sequence axis, always its second, or None."""
    return output.axes[1] if len(output.axes) > 1 and output.axes[1] in AXIS_MASK else None


def scored(case: Case, output: OutputRow, shape: tuple[int, ...]) -> Bools:
    """What counts in an output of this shape: (batch, sequence) for an output of tokens, else (batch,).

    All ones where the model takes no such mask. Raises ValueError, with the two shapes, where the mask does not fit.
    """
    axis = token_axis(output)
    want = shape[:2] if axis else shape[:1]
    mask = scored_mask(case, axis or "sequence")
    if mask is None:
        return np.ones(want, dtype=np.bool_)
    fitting = mask if axis else np.array([row.any() for row in mask], dtype=np.bool_)
    if fitting.shape != want:
        raise ValueError(f"{AXIS_MASK[axis or 'sequence']} {mask.shape} does not fit {output.name} {shape}")
    return fitting


def scored_by(case: Case, output: OutputRow, reference: Reference) -> Bools:
    """`scored`, for a reference; also raises ValueError where a sampled one cannot be held against the output."""
    if reference.index is not None and (token_axis(output) is None or output.measure == "position"):
        raise ValueError("a reference of sampled positions cannot judge it")
    return scored(case, output, reference.shape)


@dataclass(frozen=True)
class Block:
    """Some vectors of a case: reference and candidate, float64 (vectors, width), and where each stands.

    `at(i, j)` is the index, in the full output, of element j of vector i.
    """

    reference: Floats
    candidate: Floats
    at: Callable[[int, int], tuple[int, ...]]


def blocks(output: OutputRow, reference: Reference, candidate: np.ndarray, mask: Bools) -> Iterator[Block]:
    """The vectors of one output of one case where `mask` (as `scored` gives it, or its reverse) is true.

    A vector runs over the axes after the masked ones: a token's hidden state, a row's logits. For the measure
    "position" it runs over the row's positions instead. A sampled reference gives its kept positions only.
    `candidate` has the reference's full shape.
    """
    if output.measure == "position":
        yield from _along_positions(reference, candidate, mask)
        return
    lead = mask.ndim
    width = math.prod(reference.shape[lead:])
    kept = reference.select(mask).reshape(-1)
    wanted = np.flatnonzero(kept)
    if width == 0:
        return
    values = reference.values.reshape(len(kept), width)
    answers = reference.select(candidate).reshape(len(kept), width)
    step = max(1, CHUNK // width)
    for start in range(0, len(wanted), step):
        rows = wanted[start : start + step]

        def at(i: int, j: int, rows: npt.NDArray[np.intp] = rows) -> tuple[int, ...]:
            if reference.index is not None:
                first = tuple(int(n) for n in reference.index[rows[i]])
            else:
                first = tuple(int(n) for n in np.unravel_index(rows[i], reference.shape[:lead]))
            return (*first, *(int(n) for n in np.unravel_index(j, reference.shape[lead:])))

        yield Block(values[rows].astype(np.float64), answers[rows].astype(np.float64), at)


def _along_positions(reference: Reference, candidate: np.ndarray, mask: Bools) -> Iterator[Block]:
    for row in range(len(mask)):
        columns = np.flatnonzero(mask[row])
        if not len(columns):
            continue

        def at(i: int, j: int, row: int = row, columns: npt.NDArray[np.intp] = columns) -> tuple[int, ...]:
            return (row, int(columns[j]))

        yield Block(
            reference.values[row, columns][None].astype(np.float64),
            candidate[row, columns][None].astype(np.float64),
            at,
        )

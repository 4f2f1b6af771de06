"""Floor 1: how a weight becomes integers of 4 or 8 bits with a scale for every few of its inputs. Arrays in, arrays
out; no graph, no runtime.

A weight (inputs, outputs) is cut, output by output, into blocks of inputs. A block is stored as integers, one scale and
where needed one zero point: `(integer - zero) * scale`. The scale is not the one that holds the largest value but the
one with the least squared error, every input weighted by the mean square it was seen with; it is the best of a few
starts, each fitted to the integers that it leads to.

Inputs that carry much can be made finer than their neighbours in a block (AWQ, arXiv:2306.00978): the weight is
multiplied by a factor for every input, and the input divided by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BITS = (4, 8)

STARTS = tuple(np.linspace(-1.2, 1.6, 15))
"""Levels, beyond half of all, at which a start of the search puts a block's largest value: what is below zero leaves
the outermost level unused, what is above is clipped."""

SHRINKS = tuple(np.linspace(0.72, 1.0, 15))
"""Shares of a block's range, from smallest to largest value, that a start of the search covers (with a zero point)."""

LEAST_IMPORTANCE = 1e-2
"""An input counts at least this share of the mean one: another text may wake a channel that slept in these."""

CHUNK = 2**17
"""Values that are searched at a time, so that they stay in the processor's cache."""


@dataclass(frozen=True)
class Blocks:
    """A weight (inputs, outputs) in integers.

    `whole`: (outputs, blocks, block) uint8, below 2**bits; what is past the last input is the zero point. `scale`:
    (outputs, blocks) float32, none of them 0. `zero`: (outputs, blocks) uint8, the integer that stands for 0.
    """

    whole: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    bits: int
    inputs: int

    @property
    def block(self) -> int:
        """Inputs that share a scale."""
        return int(self.whole.shape[2])


def round_blocks(
    weight: np.ndarray,
    *,
    bits: int,
    block: int,
    importance: np.ndarray | None = None,
    zero_points: bool = False,
) -> Blocks:
    """The integers with the least error for `weight` (inputs, outputs).

    `importance` (inputs,): the mean square of every input; None: all alike. Without `zero_points` the integer in the
    middle, 2**(bits - 1), stands for 0. Raises ValueError where the weight is not finite.
    """
    if not np.isfinite(weight).all():
        raise ValueError("a weight is not finite")
    inputs, outputs = weight.shape
    count = -(-inputs // block)
    spread = np.zeros((outputs, count * block), np.float32)
    spread[:, :inputs] = weight.T
    spread = spread.reshape(outputs, count, block)
    counts = np.zeros(count * block, np.float32)
    counts[:inputs] = 1 if importance is None else importance / (float(importance.mean()) or 1.0) + LEAST_IMPORTANCE
    counts = counts.reshape(count, block)
    whole = np.empty(spread.shape, np.uint8)
    scale = np.empty((outputs, count), np.float32)
    zero = np.empty((outputs, count), np.uint8)
    search = _with_zero_points if zero_points else _symmetric
    step = max(CHUNK // (count * block), 1)
    for start in range(0, outputs, step):
        part = slice(start, start + step)
        whole[part], scale[part], zero[part] = search(spread[part], counts, bits)
    return Blocks(whole, scale, zero, bits, inputs)


def restored(blocks: Blocks) -> np.ndarray:
    """The weight that the integers stand for: (inputs, outputs), float32."""
    values = (blocks.whole.astype(np.float32) - blocks.zero[..., None]) * blocks.scale[..., None]
    return np.ascontiguousarray(values.reshape(len(values), -1)[:, : blocks.inputs].T)


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """uint8 below 2**bits as bytes along the last axis, the first value in the lowest bits; a byte that is not full is
    filled up with zeros."""
    if bits == 8:
        return np.ascontiguousarray(values)
    assert bits == 4, f"{bits} bits"
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], axis=-1)
    return np.ascontiguousarray(values[..., 0::2] | (values[..., 1::2] << 4))


def factors(importance: np.ndarray, strength: float) -> np.ndarray:
    """What the weight of every input is multiplied by: (inputs,) float32, geometric mean 1.

    The root mean square of an input to the power `strength`: 0 leaves all as they are.
    """
    size = np.sqrt(importance.astype(np.float64) + LEAST_IMPORTANCE * float(importance.mean()) + 1e-30)
    logs = strength * np.log(size)
    return np.asarray(np.exp(logs - logs.mean()), np.float32)


def _symmetric(values: np.ndarray, counts: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers, scales and zero points of `values` (outputs, blocks, block)."""
    half = 2 ** (bits - 1)
    place = np.abs(values).argmax(-1)
    extreme = np.take_along_axis(values, place[..., None], -1)[..., 0]
    best: list[np.ndarray] | None = None
    for start in STARTS if bits < 8 else (0.0,):
        scale = extreme / np.float32(-half - start)
        scale = np.where(scale == 0, np.float32(1), scale)
        levels = np.clip(np.rint(values / scale[..., None]), -half, half - 1)
        best = _better(best, values, counts, levels, scale, np.zeros_like(scale))
    assert best is not None
    levels, scale, _, _ = best
    return (levels + half).astype(np.uint8), scale, np.full(scale.shape, half, np.uint8)


def _with_zero_points(values: np.ndarray, counts: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same, each block with a zero point of its own."""
    top = 2**bits - 1
    low, high = np.minimum(values.min(-1), 0), np.maximum(values.max(-1), 0)
    best: list[np.ndarray] | None = None
    for share in SHRINKS if bits < 8 else (1.0,):
        scale = (high - low) * np.float32(share / top)
        scale = np.where(scale == 0, np.float32(1), scale)
        zero = np.clip(np.rint(-low * np.float32(share) / scale), 0, top)
        levels = np.clip(np.rint(values / scale[..., None]) + zero[..., None], 0, top) - zero[..., None]
        best = _better(best, values, counts, levels, scale, zero)
    assert best is not None
    levels, scale, zero, _ = best
    return (levels + zero[..., None]).astype(np.uint8), scale, zero.astype(np.uint8)


def _better(
    best: list[np.ndarray] | None,
    values: np.ndarray,
    counts: np.ndarray,
    levels: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
) -> list[np.ndarray]:
    """Block by block what has the smaller error, `best` or `levels` with the scale that fits them best; [levels, scale,
    zero, what it leaves]."""
    weighted = levels * counts
    product = (weighted * values).sum(-1)
    square = (weighted * levels).sum(-1)
    scale = np.divide(product, square, out=scale.copy(), where=(square > 0) & (product != 0))
    # sum of counts * (values - scale * levels)**2, without its constant part
    left = scale * (scale * square - 2 * product)
    if best is None:
        return [levels, scale, zero, left]
    found = left < best[3]
    for old, new in zip(best, (levels, scale, zero, left), strict=True):
        old[found] = new[found]
    return best


def rounded_input(rows: np.ndarray, block: int) -> np.ndarray:
    """Rows (tokens, inputs) as the kernel rounds them: 8-bit integers with a scale for every block of every token."""
    tokens, inputs = rows.shape
    count = -(-inputs // block)
    spread = np.zeros((tokens, count * block), np.float32)
    spread[:, :inputs] = rows
    spread = spread.reshape(tokens, count, block)
    scale = np.abs(spread).max(-1, keepdims=True) / np.float32(127)
    scale = np.where(scale == 0, np.float32(1), scale)
    return np.asarray((np.rint(spread / scale) * scale).reshape(tokens, -1)[:, :inputs])


def output_error(blocks: Blocks, weight: np.ndarray, rows: np.ndarray, factor: np.ndarray | None = None) -> float:
    """What the integers, and the rounding of their input, move the output over `rows` (tokens, inputs), relative
    (energy over energy), means taken out. `factor`: what the rounded weight was multiplied by."""
    given = rows if factor is None else rows / factor
    exact = rows @ weight
    return relative_energy(rounded_input(given, blocks.block) @ restored(blocks) - exact, exact)


def relative_energy(moved: np.ndarray, exact: np.ndarray) -> float:
    """Energy of `moved` over that of `exact`, both (tokens, outputs), their means over the tokens taken out."""
    moved = moved - moved.mean(0)
    exact = exact - exact.mean(0)
    energy = float(np.square(exact, dtype=np.float64).sum())
    return float(np.square(moved, dtype=np.float64).sum()) / energy if energy else 0.0

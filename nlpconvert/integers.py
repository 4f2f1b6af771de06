"""Floor 1: how floating-point arrays become integers with the least harm. Arrays in, arrays out; no graph, no runtime.

A layer y = x W + b whose input is to be int8 with one scale is rewritten, exactly, as

    y = ((x - shift) * multiplier) (W / multiplier) + x[outliers] W[outliers] + (b + shift W)

`shift` puts every channel's range around zero (half of a GELU's range is never used otherwise), `multiplier` evens out
channels of unlike range at the cost of the weight's (SmoothQuant, arXiv:2211.10438, with Outlier Suppression+'s shift,
arXiv:2304.09145), and the few channels of the widest range stay in floating point (LLM.int8(), arXiv:2208.07339).
Only then is the first factor rounded, and what the rounding moves on average goes into the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

INT8 = 127
SATURATING = 63
"""Largest weight where pairs of 8-bit products are added up in 16 bits (x86 without VNNI)."""

STRENGTHS = (0.5, 0.65, 0.8)
"""Shares of a channel's range that are taken over by the weight; the one with the least output error is kept."""

WIDER = 1.1
"""Ranges are taken this much wider than what was seen: another text goes a little further, and is clipped there."""

_TINY = 1e-9


@dataclass(frozen=True)
class Sample:
    """What was seen of a site's input: per channel the smallest and largest value over all tokens, and some tokens.

    `low`, `high`: (channels,); `rows`: (tokens, channels), float32, those with a channel's extremes among them.
    """

    low: np.ndarray
    high: np.ndarray
    rows: np.ndarray
    seen: int


class Sampler:
    """Sees a site's input batch by batch; keeps the channels' ranges, at most `most` tokens, and a quarter as many that
    hold the largest values.

    Every text has the same chance to be among the tokens, however long it is: answers are judged text by text.
    """

    def __init__(self, channels: int, most: int, seed: int = 0) -> None:
        self._low = np.full(channels, np.inf, np.float32)
        self._high = np.full(channels, -np.inf, np.float32)
        self._even = _Kept(channels, most)
        self._wide = _Kept(channels, max(most // 4, 1))
        self._seen = 0
        self._random = np.random.default_rng(seed)

    def add(self, rows: np.ndarray, lengths: np.ndarray | None = None) -> None:
        """Tokens of one batch: (tokens, channels). `lengths`: for each, how many tokens its text has; None: one.

        Raises ValueError where a value is not finite.
        """
        if not len(rows):
            return
        if not np.isfinite(rows).all():
            raise ValueError("an activation is not finite")
        self._seen += len(rows)
        np.minimum(self._low, rows.min(0), out=self._low)
        np.maximum(self._high, rows.max(0), out=self._high)
        # Weighted sampling without replacement: the largest keys u ** (1 / weight), with a weight of 1 / length.
        chance = self._random.random(len(rows))
        self._even.add(rows, np.log(chance) * (1 if lengths is None else lengths))
        self._wide.add(rows, np.abs(rows).max(1))

    def sample(self) -> Sample:
        """What was seen so far. Raises ValueError when that is nothing."""
        if not self._seen:
            raise ValueError("no token was seen")
        return Sample(self._low, self._high, np.concatenate([self._even.rows, self._wide.rows]), self._seen)


class _Kept:
    """The rows of the largest keys."""

    def __init__(self, channels: int, most: int) -> None:
        self.rows: np.ndarray = np.zeros((0, channels), np.float32)
        self._keys: np.ndarray = np.zeros(0)
        self._most = most

    def add(self, rows: np.ndarray, keys: np.ndarray) -> None:
        if len(self._keys) == self._most:
            better = keys > self._keys.min()
            rows, keys = rows[better], keys[better]
            if not len(rows):
                return
        self.rows, self._keys = np.concatenate([self.rows, rows]), np.concatenate([self._keys, keys])
        if len(self._keys) > self._most:
            keep = np.argpartition(-self._keys, self._most)[: self._most]
            self.rows, self._keys = self.rows[keep], self._keys[keep]


@dataclass(frozen=True)
class Preparation:
    """How a site's input is prepared for rounding. `shift`, `multiplier`: (channels,), the multiplier 0 for outliers.

    `scale` is one number: prepared values are rounded to scale * (-127 ... 127). `outliers`: channel numbers.
    `error`: what rounding the input and the weights moves the output, relative (energy over energy).
    """

    shift: np.ndarray
    multiplier: np.ndarray
    scale: float
    outliers: tuple[int, ...]
    strength: float
    error: float = 0.0


def prepare(
    sample: Sample,
    weight: np.ndarray,
    *,
    outliers: int = 0,
    strengths: Sequence[float] = STRENGTHS,
    largest: int = INT8,
    wider: float = WIDER,
) -> Preparation:
    """The preparation with the least output error for `weight` (channels, outputs of all layers that share the input).

    `outliers` channels of the widest range stay apart; `largest` is the largest integer of a weight, `wider` what the
    ranges that were seen are multiplied by.
    """
    shift = ((sample.low + sample.high) / 2).astype(np.float32)
    span = np.maximum((sample.high - sample.low) / 2 * wider, _TINY)
    apart = np.sort(np.argsort(-span, kind="stable")[:outliers])
    inside = np.ones(len(span), bool)
    inside[apart] = False
    if not inside.any():
        raise ValueError("every channel would be an outlier")
    shift[apart] = 0
    reach = np.maximum(np.abs(weight).max(1), _TINY)
    best: Preparation | None = None
    for strength in strengths:
        factor = span**strength / reach ** (1 - strength)
        factor = factor / np.median(factor[inside])
        multiplier = np.where(inside, 1 / factor, 0).astype(np.float32)
        scale = float((span * multiplier).max()) / INT8
        found = Preparation(shift, multiplier, scale, tuple(int(i) for i in apart), float(strength))
        found = replace(found, error=_error(found, sample.rows, weight, largest))
        if best is None or found.error < best.error:
            best = found
    assert best is not None
    return best


def rounded_input(prepared: Preparation, rows: np.ndarray) -> np.ndarray:
    """The prepared rows, rounded and back in floating point."""
    values = (rows - prepared.shift) * prepared.multiplier
    whole = np.clip(np.rint(values / prepared.scale), -INT8, INT8)
    return np.asarray(whole * np.float32(prepared.scale), np.float32)


def folded(prepared: Preparation, weight: np.ndarray) -> np.ndarray:
    """The weight with the multiplier taken out again: (channels, outputs); zero for outliers."""
    back = np.divide(1, prepared.multiplier, out=np.zeros_like(prepared.multiplier), where=prepared.multiplier != 0)
    return np.asarray(weight * back[:, None], np.float32)


def round_weight(weight: np.ndarray, largest: int = INT8) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric integers per output channel: int8 (channels, outputs) and float32 scales (outputs,), all above 0."""
    scale = np.abs(weight).max(0) / largest
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    return np.clip(np.rint(weight / scale), -largest, largest).astype(np.int8), scale


def moved_mean(prepared: Preparation, rows: np.ndarray, weight: np.ndarray, largest: int = INT8) -> np.ndarray:
    """What rounding moves a layer's output on average over the sample (outputs,), to be taken off its bias."""
    inner = folded(prepared, weight)
    whole, scale = round_weight(inner, largest)
    exact = ((rows - prepared.shift) * prepared.multiplier) @ inner
    return np.asarray((rounded_input(prepared, rows) @ (whole * scale) - exact).mean(0, dtype=np.float64), np.float32)


def _error(prepared: Preparation, rows: np.ndarray, weight: np.ndarray, largest: int) -> float:
    inner = folded(prepared, weight)
    whole, scale = round_weight(inner, largest)
    exact = ((rows - prepared.shift) * prepared.multiplier) @ inner
    moved = rounded_input(prepared, rows) @ (whole * scale) - exact
    moved -= moved.mean(0)
    output = rows @ weight
    output -= output.mean(0)
    energy = float(np.square(output, dtype=np.float64).sum())
    return float(np.square(moved, dtype=np.float64).sum()) / energy if energy else 0.0

"""Floor 3: mixes without fitted scales for activations: weight-only in 4 and 8 bits, and dynamic int8.

What a layer's inputs look like is measured once: the mean square of every channel weights the rounding and evens out
channels, the mean goes into the bias. Sites (layers that share an input) then start at the fewest bits; what moves the
outputs most for the bits it costs is raised first, as far as the tolerance asks for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np

from nlpconvert import blocks, giveback, integers, sampling, search
from nlpconvert.errors import ConversionError
from nlpconvert.recipe import Candidate, Layer, Recipe

if TYPE_CHECKING:
    from nlpconvert.blocks import Blocks
    from nlpconvert.integers import Sample
    from nlpconvert.search import Bench, Score

STRENGTH = 0.25
"""Power of an input's size that its weights are multiplied by. One chosen for each layer fits the sample and gains
nothing."""

ERROR_ROWS = 256
"""Tokens that a layer's output error is estimated on."""

CACHE_BYTES = 2**30
"""Rounded weights are kept for the next mix where all of them at all levels are no larger than this."""


@dataclass(frozen=True)
class Level:
    """One way to store a weight."""

    precision: str
    block: int
    zero_points: bool
    bits: float
    """What one weight costs, scale and zero point included."""


def _level(bits: int, block: int, zero_points: bool) -> Level:
    return Level(f"int{bits}-weight", block, zero_points, bits + (32 + bits * zero_points) / block)


LEVELS: Mapping[int, tuple[Level, ...]] = {
    4: (_level(4, 32, True), _level(4, 16, True), _level(8, 128, False)),
    8: (_level(8, 128, False), _level(8, 64, False), _level(8, 32, False)),
}
"""From the fewest bits up; after the last comes float32."""

FLOAT_BITS = 32.0

NEAR = 1.1
"""A level that costs no more than this many times the bits of the one before is tried for all sites at once, before
anything is measured site by site."""


class Mixes(ABC):
    """A search over levels of sites. What a level is, and what it moves, is the subclass's."""

    kind: str
    costs: Sequence[float]
    """Bits of one weight at every level, the cheapest first; after the last comes float32."""

    def __init__(self, bench: Bench) -> None:
        from nlpconvert.convert import derived, linear

        self.bench = bench
        self.found = linear.find(derived.load(bench.base).graph)
        if not self.found.weights:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(self.found.left.items())[:3])
            raise ConversionError(f"no layer can be quantized{': ' if reasons else ''}{reasons}")
        self.sites = {site.name: site for site in self.found.sites}
        samples = sampling.sample_inputs(bench, self.found.sites)
        self.mean = {name: _mean(each.rows) for name, each in samples.items()}
        self.rows = {name: each.rows[:: max(len(each.rows) // ERROR_ROWS, 1)] for name, each in samples.items()}
        self.alone: dict[str, float] = {}
        self.tried: list[tuple[dict[str, int], Candidate]] = []
        self._layers: dict[tuple[str, int], list[Layer]] = {}
        self._fit(samples)

    @abstractmethod
    def _fit(self, samples: Mapping[str, Sample]) -> None:
        """Takes from the samples what the levels need."""

    @abstractmethod
    def layer(self, row: Layer, array: np.ndarray, level: int) -> Layer:
        """A layer's row with what its level needs; `array`: its weight (inputs, outputs)."""

    @abstractmethod
    def error(self, row: Layer, array: np.ndarray) -> float:
        """What a layer's rounding moves its output, relative (energy over energy)."""

    @abstractmethod
    def change(self, graph: Any, made: Recipe) -> None:
        """Applies a recipe to a graph in place."""

    @abstractmethod
    def label(self, made: Recipe) -> str:
        """A candidate's name in the table."""

    @property
    def largest(self) -> int:
        """The largest integer of a weight of 8 bits."""
        return integers.INT8

    @property
    def top(self) -> int:
        """The last level: float32."""
        return len(self.costs)

    def layers(self, name: str, level: int) -> list[Layer]:
        """The rows of a site's layers at a level, without their drift."""
        if (name, level) not in self._layers:
            self._layers[name, level] = [
                self.layer(Layer(weight.name, name, "float32", weight.flops / self.found.flops), weight.array(), level)
                for weight in self.sites[name].weights
            ]
        return self._layers[name, level]

    def recipe(self, levels: Mapping[str, int]) -> Recipe:
        """The mix as a recipe."""
        rows: list[Layer] = []
        for name, site in self.sites.items():
            drift = self.alone.get(name, 0.0)
            if levels[name] < self.top:
                rows += [replace(layer, drift=drift) for layer in self.layers(name, levels[name])]
                continue
            for weight in site.weights:
                share = weight.flops / self.found.flops
                rows.append(Layer(weight.name, name, "float32", share, drift, "given back: it moved the most"))
        rows += [Layer(name, name, "float32", 0.0, why=why) for name, why in self.found.left.items()]
        base = self.bench.base
        return Recipe(
            step=self.bench.work.row.name,
            kind=self.kind,
            base=base.step,
            parent_sha256=base.sha256,
            layers=tuple(rows),
            largest=self.largest,
        )

    def score(self, levels: Mapping[str, int]) -> Score:
        """How far a mix is from float32."""
        made = self.recipe(levels)
        return self.bench.score(self.bench.trial(lambda graph: self.change(graph, made)))

    def search(self) -> tuple[Recipe, Score]:
        """The mix of the fewest bits that stays in the tolerance, and its score; where none does, the one with the
        least drift."""
        work = self.bench.work
        mixes = [dict.fromkeys(self.sites, 0)]
        first = self._tried(mixes[0])
        scores = {0: first}
        while scores[len(mixes) - 1].used > search.ROOM and self._near(len(mixes)):
            mixes.append(dict.fromkeys(self.sites, len(mixes)))
            scores[len(mixes) - 1] = self._tried(mixes[-1])
        if scores[len(mixes) - 1].used > search.ROOM:
            work.progress.start(f"{work.row.name}: which layers move the answers", len(self.sites))
            self._measure_alone(first)
            mixes = self._path()
            work.progress.start(f"{work.row.name}: the fewest bits in the tolerance")
            scores = giveback.bisect(mixes, first, self._tried, search.ROOM)
        else:
            self._estimate_alone(first)
        fitting = [n for n in sorted(scores) if scores[n].used <= search.ROOM]
        chosen = fitting[0] if fitting else min(scores, key=lambda n: scores[n].used)
        table = tuple(replace(each, chosen=levels == mixes[chosen]) for levels, each in self.tried)
        return replace(self.recipe(mixes[chosen]), candidates=table), scores[chosen]

    def _near(self, level: int) -> bool:
        """Whether a level costs hardly more than the one before."""
        return level < self.top and self.costs[level] <= NEAR * self.costs[level - 1]

    def _tried(self, levels: Mapping[str, int]) -> Score:
        score, made = self.score(levels), self.recipe(levels)
        self.tried.append((dict(levels), Candidate(self.label(made), score.text, score.used, 0.0, made.share)))
        return score

    def _measure_alone(self, whole: Score) -> None:
        """What each site's rounding does alone; from its own output error where there is no time left."""
        for name in self.sites:
            self.bench.work.progress.advance()
            if self.bench.late:
                break
            self.alone[name] = self.score({**dict.fromkeys(self.sites, self.top), name: 0}).energy
        self._estimate_alone(whole)

    def _estimate_alone(self, whole: Score) -> None:
        errors = {name: self._error(name, 0) for name in self.sites if name not in self.alone}
        rest, total = max(whole.energy - sum(self.alone.values()), 0.0), sum(errors.values())
        for name, error in errors.items():
            self.alone[name] = rest * error / total if total else 0.0

    def _error(self, name: str, level: int) -> float:
        """What a site's rounding at a level moves its layers' outputs, relative."""
        pairs = zip(self.layers(name, level), self.sites[name].weights, strict=True)
        return float(np.mean([self.error(layer, weight.array()) for layer, weight in pairs]))

    def _path(self) -> list[dict[str, int]]:
        """Mixes from the fewest bits to all but none in integers, each with one site raised."""
        energy: dict[str, list[float]] = {}
        cost: dict[str, list[float]] = {}
        for name, site in self.sites.items():
            size = sum(weight.rows * weight.columns for weight in site.weights)
            errors = [self._error(name, level) for level in range(self.top)]
            energy[name] = [self.alone[name] * each / (errors[0] or 1e-30) for each in errors] + [0.0]
            cost[name] = [size * bits for bits in (*self.costs, FLOAT_BITS)]
        return giveback.path(energy, cost)


@final
class WeightOnly(Mixes):
    """Weight-only mixes on one graph, from 4 bits or from 8 bits up."""

    kind = "weight-only"

    def __init__(self, bench: Bench, *, bits: int = 4) -> None:
        self.levels = LEVELS[bits]
        self.costs = [level.bits for level in self.levels]
        self.rounded: dict[tuple[object, ...], Blocks] | None = None
        super().__init__(bench)

    def _fit(self, samples: Mapping[str, Sample]) -> None:
        self.importance = {name: _mean(np.square(each.rows, dtype=np.float64)) for name, each in samples.items()}
        size = sum(weight.rows * weight.columns for weight in self.found.weights) * len(self.levels)
        if size <= CACHE_BYTES:
            self.rounded = {}

    def layer(self, row: Layer, array: np.ndarray, level: int) -> Layer:
        kind = self.levels[level]
        importance = self.importance[row.site]
        row = replace(
            row,
            precision=kind.precision,
            block=kind.block,
            zero_points=kind.zero_points,
            strength=STRENGTH,
            importance=importance,
        )
        restored = blocks.restored(self._whole(row, array)) / blocks.factors(importance, STRENGTH)[:, None]
        return replace(row, bias=np.asarray(self.mean[row.site] @ (restored - array), np.float32))

    def error(self, row: Layer, array: np.ndarray) -> float:
        factor = blocks.factors(self.importance[row.site], STRENGTH)
        return blocks.output_error(self._whole(row, array), array, self.rows[row.site], factor)

    def change(self, graph: Any, made: Recipe) -> None:
        from nlpconvert.convert import weight_only

        weight_only.apply(graph, made, self.rounded)

    def label(self, made: Recipe) -> str:
        shares = {
            bits: sum(layer.share for layer in made.layers if layer.precision == f"int{bits}-weight")
            for bits in blocks.BITS
        }
        words = [f"{share:.0%} in {bits} bits" for bits, share in shares.items() if share]
        sizes = sorted({layer.block for layer in made.layers if layer.block})
        return f"weight-only, {', '.join(words)}, blocks of {' and '.join(map(str, sizes))}"

    def _whole(self, row: Layer, array: np.ndarray) -> Blocks:
        from nlpconvert.convert import weight_only

        return weight_only.rounded(row, array, self.rounded)


@final
class Dynamic(Mixes):
    """Dynamic int8 on one graph. The texts are run in batches of their own length: what longer companions do to a
    row's answer is not in its score."""

    kind = "dynamic"
    costs = (8.0,)

    def __init__(self, bench: Bench, *, largest: int) -> None:
        self._largest = largest
        super().__init__(bench)

    @property
    def largest(self) -> int:
        return self._largest

    def _fit(self, samples: Mapping[str, Sample]) -> None:
        self.ranges = {
            name: (min(float(each.low.min()), 0.0), max(float(each.high.max()), 0.0)) for name, each in samples.items()
        }

    def layer(self, row: Layer, array: np.ndarray, level: int) -> Layer:
        whole, scale = integers.round_weight(array, self.largest)
        bias = self.mean[row.site] @ (whole * scale - array)
        return replace(row, precision="int8", bias=np.asarray(bias, np.float32))

    def error(self, row: Layer, array: np.ndarray) -> float:
        rows = self.rows[row.site]
        low, high = self.ranges[row.site]
        step = np.float32((high - low) / 255 or 1.0)
        whole, scale = integers.round_weight(array, self.largest)
        exact = rows @ array
        moved = (np.rint(rows / step) * step) @ (whole * scale) - exact
        return blocks.relative_energy(moved, exact)

    def change(self, graph: Any, made: Recipe) -> None:
        from nlpconvert.convert import dynamic_int8

        dynamic_int8.apply(graph, made)

    def label(self, made: Recipe) -> str:
        return f"dynamic, {made.share:.0%}"


def _mean(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows.mean(0, dtype=np.float64), np.float32)

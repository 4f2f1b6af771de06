"""Floor 3: convert, run, score, repeat: which layers go to integers, so that the answers stay in the tolerance.

Every site (layers that share an input) has levels: all of its input rounded with one scale; a few or more of its widest
channels kept in floating point; all of it given back. What a site's rounding does to the outputs is measured alone, the
levels are then raised where that brings most for the floating-point work it costs, and the cheapest mix that stays in
the tolerance, with room to spare on texts that fitted nothing, is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import cache_names, calibration, giveback, integers, own_words, reference, sampling
from nlpconvert.artifact import Artifact
from nlpconvert.errors import ConversionError
from nlpconvert.integers import Preparation
from nlpconvert.recipe import Candidate, Layer, Recipe
from nlpconvert.validators import parity, tolerance
from nlpconvert.validators.margins import Margins
from nlpconvert.validators.tolerance import Tolerance

if TYPE_CHECKING:
    from nlpconvert.inputs import Case
    from nlpconvert.making import Work
    from nlpconvert.models import OutputRow
    from nlpconvert.validators.findings import OutputDiff

ROOM = 0.7
"""Share of the tolerance that the chosen mix may use on the texts it is selected by; the rest is for other texts."""

AVERAGE: Mapping[str, float] = {"int8": 0.1, "int4": 0.2}
"""How much closer the average has to be than the worst may be, for an embedding."""

REFERENCE_BYTES = 64 * 2**20

WIDTHS = (1.5, 2.0)
"""How much wider than what was seen a range may be where a model that writes is fitted on texts that are not its own:
on those that it is made for its activations reach further."""

LEVELS = (0, 24, 8)
"""Parts of a site's channels kept in floating point, by level: none, a 24th, an 8th, and then all of it."""

FLOAT = len(LEVELS)
APART_COSTS = 0.03
"""What the extra product of a few channels costs besides its FLOPs, as a share of the layer's."""


@dataclass(frozen=True)
class Score:
    """How far a file is from its float32 parent on the select part: share of the tolerance used, relative energy of the
    difference (which adds up over independent causes), and the measure as text."""

    used: float
    energy: float
    text: str


@dataclass
class Bench:
    """What every search needs: the texts, the parent's answers on `select`, a place to write trials."""

    work: Work
    base: Artifact
    scratch: Path
    deadline: float
    cases: Sequence[Case] = ()
    answers: Mapping[str, Any] = field(default_factory=dict)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    tried: int = 0

    def __post_init__(self) -> None:
        work = self.work
        self.cases = calibration.asked(work, "select")
        self.writes = own_words.Writes(
            self.cases, work.facts, work.row.precision, keeps=cache_names.keeps(self.base.inputs)
        )
        session = self.open(self.base.path)
        try:
            asked = reference.ask(session.run, self.cases, work.facts.outputs, REFERENCE_BYTES, work.progress)
            for case in self.cases if self.writes.asks else ():
                self.writes.ask(case, session.run(case.inputs))
        finally:
            session.close()
        self.answers = asked.answers
        self.cases = [case for case in self.cases if case.name in asked.answers]
        outputs = work.facts.outputs
        self.tolerances = tolerance.choose(work.tolerances, outputs, work.row.precision, "cpu", work.probes.noise)
        self.scales = parity.scales(outputs, self.cases, self.answers)

    def score(self, path: Path, base: Artifact | None = None) -> Score:
        """Runs a file over `select` and holds it against the parent's answers. `base`: whose data file it reads."""
        self.tried += 1
        judge = parity.Judge(self.work.facts.outputs, self.scales, self.tolerances, self.work.probes.noise)
        decided = {
            row.name: Margins(row) for row in self.work.facts.outputs if self.tolerances[row.name].measure == "changed"
        }
        writes = self.writes.fresh()
        session = self.open(path, base)
        try:
            for case in self.cases:
                given = session.run(case.inputs)
                writes.add(case, given)
                judge.add(case, self.answers[case.name], given)
                for name, margins in decided.items():
                    margins.add(case, self.answers[case.name][name], given[name])
        finally:
            session.close()
        found = judge.comparison()
        average = AVERAGE[self.work.row.precision]
        used = max(
            _used(row, each, average, decided[row.name].expected() if row.name in decided else 0.0)
            for row, each in zip(self.work.facts.outputs, found.outputs, strict=True)
        )
        energy = float(np.mean([each.relative_l2**2 for each in found.outputs]))
        worst = max(found.outputs, key=lambda each: each.tolerance.used(each.measured))
        if writes.used > (used, ""):
            return Score(writes.used[0], energy, writes.used[1])
        return Score(float(used), energy, f"{worst.tolerance.measure} {worst.measured:.5g}")

    def trial(self, change: Callable[[Any], None], base: Artifact | None = None) -> Path:
        """The base with its graph changed in place by `change`, as a file in the scratch directory."""
        from nlpconvert.convert import derived

        program = derived.load(base or self.base)
        change(program.graph)
        return derived.trial(program, self.scratch)

    def open(self, path: Path, base: Artifact | None = None) -> Any:
        """A session on a file whose weights lie in the base's data file."""
        from nlpconvert.backends import onnxruntime
        from nlpconvert.convert import derived

        data = derived.data_of(path, (base or self.base).directory)
        return onnxruntime.open_file(path, device="cpu", threads=self.work.options.threads, data=data)

    @property
    def foreign(self) -> bool:
        """Whether a model that writes is fitted on texts that are not the user's."""
        return self.work.options.data is None and any(map(own_words.is_own, self.cases))

    @property
    def late(self) -> bool:
        """Whether the time for searching is used up."""
        return time.perf_counter() > self.deadline


def _used(row: OutputRow, found: OutputDiff, average: float, changing: float) -> float:
    """Share of an output's tolerance that is used, with what a handful of texts cannot show.

    The worst of a hundred texts may be good by luck: an embedding's average has to be closer, by `average`, than its
    worst may be. That no decision changed says little, and that one did says nothing: the share that is `changing` by
    the margins counts beside it.
    """
    if found.problems:
        return math.inf
    used = found.tolerance.used(found.measured)
    if found.tolerance.measure == "cosine" and found.cosine is not None and not row.secondary:
        used = max(used, (1 - found.cosine.mean) / (average * (1 - found.tolerance.value)))
    if found.tolerance.measure == "changed" and found.decisions is not None:
        beyond_chance = max(found.decisions.changed - 1, 0) / max(found.decisions.count, 1)
        used = found.tolerance.used(max(beyond_chance, changing))
    return used


# ---- static int8 ----------------------------------------------------------------------------------------------------


class Static:
    """The search for a static int8 mix on one graph."""

    def __init__(self, bench: Bench, *, activation: str, largest: int) -> None:
        from nlpconvert.convert import derived, linear

        self.bench, self.activation, self.largest = bench, activation, largest
        self.found = linear.find(derived.load(bench.base).graph)
        if not self.found.weights:
            reasons = "; ".join(f"{name}: {why}" for name, why in list(self.found.left.items())[:3])
            raise ConversionError(f"no layer can go to int8{': ' if reasons else ''}{reasons}")
        self.sites = {site.name: site for site in self.found.sites}
        self.samples = sampling.sample_inputs(bench, self.found.sites)
        self.wider = integers.WIDER
        self._prepared: dict[tuple[str, int], tuple[Preparation, dict[str, np.ndarray]]] = {}
        self.alone: dict[str, float] = {}
        self.candidates: list[Candidate] = []
        self.exact = 0.0

    def prepared(self, name: str, level: int) -> tuple[Preparation, dict[str, np.ndarray]]:
        """A site's preparation at a level, and what it takes off the biases of its layers."""
        if (name, level) not in self._prepared:
            site, sample = self.sites[name], self.samples[name]
            arrays = {weight.name: weight.array() for weight in site.weights}
            part = LEVELS[level]
            preparation = integers.prepare(
                sample,
                np.concatenate(list(arrays.values()), axis=1),
                outliers=max(site.channels // part, 1) if part and site.channels > 1 else 0,
                largest=self.largest,
                wider=self.wider,
            )
            biases = {
                each: integers.moved_mean(preparation, sample.rows, array, self.largest)
                for each, array in arrays.items()
            }
            self._prepared[name, level] = preparation, biases
        return self._prepared[name, level]

    def recipe(self, levels: Mapping[str, int]) -> Recipe:
        """The mix as a recipe."""
        sites: dict[str, Preparation] = {}
        layers: list[Layer] = []
        total = self.found.flops
        for name, site in self.sites.items():
            level = levels[name]
            for weight in site.weights:
                share = weight.flops / total
                drift = self.alone.get(name, 0.0)
                if level == FLOAT:
                    layers.append(Layer(weight.name, name, "float32", share, drift, "given back: it moved the most"))
                    continue
                sites[name], biases = self.prepared(name, level)
                layers.append(Layer(weight.name, name, "int8", share, drift, bias=biases[weight.name]))
        layers += [Layer(name, name, "float32", 0.0, why=why) for name, why in self.found.left.items()]
        base = self.bench.base
        return Recipe(
            step=self.bench.work.row.name,
            kind="static",
            base=base.step,
            parent_sha256=base.sha256,
            layers=tuple(layers),
            sites=sites,
            activation=self.activation,
            largest=self.largest,
        )

    def score(self, levels: Mapping[str, int]) -> Score:
        """How far a mix is from float32."""
        from nlpconvert.convert import static_int8

        made = self.recipe(levels)
        return self.bench.score(self.bench.trial(lambda graph: static_int8.apply(graph, made)))

    # -- the search ---------------------------------------------------------------------------------------------------

    def search(self) -> tuple[Recipe, Score]:
        """The mix with the least floating-point work that stays in the tolerance, and its score; where none does, the
        one with the least drift."""
        work = self.bench.work
        self.prove_exact()
        mixes = [dict.fromkeys(self.sites, 0)]
        first = self._fitted(mixes[0])
        scores = {0: first}
        if first.used > ROOM:
            work.progress.start(f"{work.row.name}: which layers move the answers", len(self.sites))
            self._measure_alone(first)
            mixes = self._path()
            work.progress.start(f"{work.row.name}: the cheapest mix in the tolerance")
            scores = giveback.bisect(mixes, first, self._tried, ROOM)
        else:
            self._estimate_alone(first)
        fitting = [n for n in sorted(scores) if scores[n].used <= ROOM]
        chosen = fitting[0] if fitting else min(scores, key=lambda n: scores[n].used)
        score = scores[chosen]
        made = self.recipe(mixes[chosen])
        tried = tuple(
            replace(each, chosen=each.share == made.share and each.used == score.used) for each in self.candidates
        )
        return replace(made, candidates=tried), score

    def prove_exact(self) -> None:
        """The rewrite without any rounding must answer as the parent does. ConversionError when it does not."""
        from nlpconvert.convert import static_int8

        made = self.recipe(dict.fromkeys(self.sites, 1))
        path = self.bench.trial(lambda graph: static_int8.rewrite_exactly(graph, made))
        moved = self.bench.score(path).energy ** 0.5
        self.exact = moved
        if not moved <= EXACT:
            raise ConversionError(
                f"the rewrite of the layers' inputs is not exact here: it moves the answers by {moved:.1e}"
            )

    def _fitted(self, levels: Mapping[str, int]) -> Score:
        """A mix's score with the width of ranges that moves least, which is kept; one is tried where texts are the
        model's own."""
        found = {self.wider: self._tried(levels)}
        for wider in WIDTHS if self.bench.foreign else ():
            self._widen(wider)
            found[wider] = self._tried(levels, f", ranges {wider:g} times as wide")
        self._widen(min(found, key=lambda each: found[each].used))
        return found[self.wider]

    def _widen(self, wider: float) -> None:
        if wider != self.wider:
            self.wider = wider
            self._prepared.clear()

    def _tried(self, levels: Mapping[str, int], more: str = "") -> Score:
        score = self.score(levels)
        share = self.recipe(levels).share
        self.candidates.append(Candidate(f"static, {share:.0%}{more}", score.text, score.used, 0.0, share))
        return score

    def _measure_alone(self, whole: Score) -> None:
        """What each site's rounding does alone; from its own output error where there is no time left."""
        for name in self.sites:
            self.bench.work.progress.advance()
            if self.bench.late:
                break
            self.alone[name] = self.score({**dict.fromkeys(self.sites, FLOAT), name: 0}).energy
        self._estimate_alone(whole)

    def _estimate_alone(self, whole: Score) -> None:
        errors = {name: self.prepared(name, 0)[0].error for name in self.sites}
        known = sum(self.alone.values())
        unknown = sum(errors[name] for name in self.sites if name not in self.alone)
        rest = max(whole.energy - known, 0.0)
        for name in self.sites:
            if name not in self.alone:
                self.alone[name] = rest * errors[name] / unknown if unknown else 0.0

    def _path(self) -> list[dict[str, int]]:
        """Mixes from all integer to all but none, each with one level raised: the one that brings most for its cost."""
        total = self.found.flops
        energy: dict[str, list[float]] = {}
        cost: dict[str, list[float]] = {}
        for name, site in self.sites.items():
            base = self.prepared(name, 0)[0].error or 1e-30
            share = sum(weight.flops for weight in site.weights) / total
            energy[name], cost[name] = [], []
            for level in range(FLOAT):
                energy[name].append(self.alone[name] * self.prepared(name, level)[0].error / base)
                apart = len(self.prepared(name, level)[0].outliers) / site.channels
                cost[name].append(share * (apart + (APART_COSTS if apart else 0)))
            energy[name].append(0.0)
            cost[name].append(share)
        return giveback.path(energy, cost)


EXACT = 1e-3
"""Relative difference that a rewrite without rounding may show: float32 noise, and its growth through the layers."""

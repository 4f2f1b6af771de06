"""Floor 3: int8 for the CPU: every way that is worth a try, each measured for drift and latency in one run.

Static and 8-bit weight-only, from the plain and from the fused graph; the fastest that stays in the tolerance wins, and
what is within a tenth of its latency and moves less is taken instead. Dynamic quantization has one scale for the whole
batch, so a row's answer depends on its companions: it is made when asked for by name, and its report says so.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert import disk, quantizing, recipe, search
from nlpconvert.artifact import Artifact, Made
from nlpconvert.errors import ConversionError, NlpconvertError, UsageError, first_line
from nlpconvert.recipe import Candidate, Recipe
from nlpconvert.search import Bench, Score

if TYPE_CHECKING:
    from nlpconvert.making import Work

TIE = 1.1
"""Candidates within this factor of the fastest one's latency are as fast as it: the least drift decides."""

ROUNDS = 7
ROUND_SECONDS = 20.0
"""Timing ends after so many rounds over the texts, or, once there are three, after so long."""

PLAIN, FUSED = "onnx", "onnx-optimized"

DYNAMIC_WARNING = (
    "dynamic quantization takes one scale for the whole padded batch: a text's answer depends on its companions"
)


@dataclass(frozen=True)
class Entry:
    """A candidate that was made: its file (the weights that were not changed lie with `base`) and how far it is."""

    name: str
    made: Recipe
    base: Artifact
    path: Path
    score: Score


def int8(work: Work) -> Made:
    """The fastest int8 file for the CPU that stays in the tolerance; the one with the least drift where none does."""
    scratch = work.new / ".scratch"
    options = work.options
    try:
        if options.recipe is not None:
            made = recipe.read(options.recipe)
            if made.step != work.row.name:
                raise UsageError(f"{options.recipe} is a recipe for {made.step}, not for {work.row.name}")
            base = _graphs(work, scratch)[made.base] if made.base != PLAIN else work.above
            return quantizing.write_made(work, made, base, [])
        started = time.perf_counter()
        bench = Bench(work, work.above, scratch, started + options.search_budget)
        graphs = _graphs(work, scratch)
        entries, failed = _entries(bench, graphs, _recipes(bench, options.int8_method))
        if not entries:
            raise ConversionError(f"no int8 candidate could be made: {'; '.join(failed)}")
        latencies = _latencies(bench, entries)
        chosen = _choose(entries, latencies)
        table = _table(entries, latencies, chosen)
        made = replace(
            chosen.made,
            step=work.row.name,
            candidates=table,
            search={
                **chosen.made.search,
                **quantizing.search_facts(bench, started),
                "not_made": failed,
            },
        )
        notes = [*recipe.told(table), *failed]
        if made.kind == "dynamic":
            notes.append(DYNAMIC_WARNING)
        if chosen.score.used > 1:
            notes.append(f"no candidate stays in the tolerance; the best found has {chosen.score.text}")
        if latencies[chosen.name] >= 1:
            notes.append(f"it is not faster than float32 on this processor ({latencies[chosen.name]:.2f} times)")
        return quantizing.write_made(work, made, chosen.base, notes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# ---- candidates -----------------------------------------------------------------------------------------------------


def _graphs(work: Work, scratch: Path) -> dict[str, Artifact]:
    """The plain graph and, where anything fuses, the fused one."""
    from nlpconvert.convert import optimize

    graphs = {PLAIN: work.above}
    directory = scratch / "fused"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        fused = optimize.convert(work.above, directory, target="cpu")
    except NlpconvertError as error:
        work.progress.line(f"{work.row.name}: not from the fused graph: {error}")
        return graphs
    graphs[FUSED] = replace(
        work.above, step=FUSED, path=directory / fused.file, files=disk.hash_tree(directory), made_by=fused.made_by
    )
    return graphs


def _recipes(bench: Bench, method: str | None) -> dict[str, Recipe]:
    """What was found for each method on the plain graph; layers have the same names in the fused one."""
    found: dict[str, Recipe] = {}
    if method in (None, "static"):
        looked = search.Static(bench, activation="uint8", largest=quantizing.largest_weight())
        found["static"] = looked.search()[0]
    if method in (None, "weight-only"):
        found["weight-only, 8 bit"] = quantizing.weight_only_candidate(bench)[0]
    if method == "dynamic":
        found["dynamic"] = quantizing.dynamic_candidate(bench)[0]
    return found


def _entries(
    bench: Bench, graphs: Mapping[str, Artifact], recipes: Mapping[str, Recipe]
) -> tuple[list[Entry], list[str]]:
    """Every recipe on every graph, made and scored; and why others could not be made."""
    entries: list[Entry] = []
    failed: list[str] = []
    for kind, made in recipes.items():
        for step, base in graphs.items():
            name = f"{kind}, {'plain' if step == PLAIN else 'fused'}"
            whole = replace(made, base=step, parent_sha256=bench.base.sha256)
            try:
                trial = bench.trial(lambda graph, whole=whole: quantizing.apply(graph, whole), base)  # type: ignore[misc]
                own = trial.parent / f"candidate-{len(entries)}"
                own.mkdir()
                for file in trial.parent.glob(f"{trial.name}*"):
                    file.rename(own / file.name)
                path = own / trial.name
                entries.append(Entry(name, whole, base, path, bench.score(path, base)))
            except (NlpconvertError, RuntimeError, ValueError) as error:
                failed.append(f"{name}: {first_line(error)}")
    return entries, failed


def _latencies(bench: Bench, entries: Sequence[Entry]) -> dict[str, float]:
    """Time over the select texts, over the plain float32 file's: medians of rounds in turns, opened as for serving."""
    from nlpconvert.backends import onnxruntime
    from nlpconvert.convert import derived

    threads = bench.work.options.threads
    files = {"float32": (bench.base.path, bench.base)} | {each.name: (each.path, each.base) for each in entries}
    sessions: dict[str, Any] = {
        name: onnxruntime.open_file(path, threads=threads, data=derived.data_of(path, base.directory), serving=True)
        for name, (path, base) in files.items()
    }
    times: dict[str, list[float]] = {name: [] for name in sessions}
    bench.work.progress.start(f"{bench.work.row.name}: latency of {len(entries)} candidates", ROUNDS)
    started = time.perf_counter()
    for turn in range(ROUNDS + 1):
        for name, session in sessions.items():
            begun = time.perf_counter()
            for case in bench.cases:
                session.run(case.inputs)
            if turn:  # the first round allocates
                times[name].append(time.perf_counter() - begun)
        bench.work.progress.advance()
        if turn >= 3 and time.perf_counter() - started > ROUND_SECONDS:
            break
    for session in sessions.values():
        session.close()
    base = statistics.median(times["float32"])
    return {name: statistics.median(taken) / base for name, taken in times.items()}


def _choose(entries: Sequence[Entry], latencies: Mapping[str, float]) -> Entry:
    """The fastest in the tolerance; of those as fast, the one with the least drift."""
    fitting = [each for each in entries if each.score.used <= 1]
    if not fitting:
        return min(entries, key=lambda each: each.score.used)
    fastest = min(latencies[each.name] for each in fitting)
    return min((each for each in fitting if latencies[each.name] <= TIE * fastest), key=lambda each: each.score.energy)


def _table(entries: Sequence[Entry], latencies: Mapping[str, float], chosen: Entry) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(
            name=each.name,
            drift=each.score.text,
            used=each.score.used,
            latency=round(latencies[each.name], 3),
            share=each.made.share,
            chosen=each is chosen,
            note="" if each.score.used <= 1 else "out of tolerance",
        )
        for each in entries
    )

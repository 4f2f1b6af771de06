"""Floor 3: batching on real texts: what padding wastes, which policy is fastest, where larger batches stop paying.

Everything is predicted from the cost surface that was measured; what is told as a speed is then timed on the texts
themselves, in turns. How texts are put together is `policies`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import dataset, tokens
from nlpconvert.bench import policies, timing
from nlpconvert.bench.asking import Texts
from nlpconvert.bench.policies import Batches
from nlpconvert.bench.queueing import Surface
from nlpconvert.bench.subjects import PYTORCH
from nlpconvert.bench.timing import Rule, Timed
from nlpconvert.inputs import Case, data_cases
from nlpconvert.manifest import Manifest
from nlpconvert.models import Facts
from nlpconvert.plan import Options
from nlpconvert.validators import structure

if TYPE_CHECKING:
    from nlpconvert.bench.benching import Measured
    from nlpconvert.bench.subjects import Subject

MOST = 2000
"""Texts that are tokenized at most, evenly taken from the file."""
PART = 0.02
"""The share of the budget that one pass of the slowest way over the timed texts may take."""
FEWEST = 64
"""Texts that are timed at least, where there are so many."""
PASSES = Rule(narrow=0.02, least=2, enough=6, most=30)
ALONE = ("as they come", "longest", 1)


@dataclass(frozen=True)
class Read:
    """Texts as the model reads them, how many there were, where they came from, and how many were cut."""

    texts: Texts
    count: int
    source: str
    cut: int = 0


def read(record: Manifest, out: Path, facts: Facts, cases: Sequence[Case], options: Options) -> Read:
    """The user's texts, or the probes' where none are given."""
    if options.data is None:
        texts = Texts(facts, (case for case in cases if not case.from_data), distinct=True)
        return Read(texts, len(texts.items), "probes")
    columns = dataset.parse_columns(options.columns) if options.columns else None
    rows = dataset.read(options.data, record.task, columns=columns)
    places = [out / step for step in record.steps]
    path = record.source.get("path")
    encode = tokens.load([*places, *([Path(str(path))] if path else [])], facts).encode
    kept = [rows[place] for place in np.unique(np.linspace(0, len(rows) - 1, min(MOST, len(rows))).round().astype(int))]
    asked = data_cases(facts, encode, kept, batch=1)
    texts = Texts(facts, asked)
    return Read(texts, len(rows), str(options.data), sum(case.truncated for case in asked))


def surface(work: Measured, name: str) -> Surface | None:
    """The subject's measured times, where whole rows of the grid are there."""
    batches = sorted({cell[0] for cell in work.cells})
    lengths = [
        length
        for length in sorted({cell[1] for cell in work.cells})
        if all(work.of(name, (batch, length)) for batch in batches)
    ]
    if not lengths:
        return None
    seconds = tuple(tuple(work.median(name, (batch, length)) or 0.0 for length in lengths) for batch in batches)
    return Surface(tuple(batches), tuple(lengths), seconds, _spread(work, name))


def _spread(work: Measured, name: str) -> tuple[float, ...]:
    """All passes over their cell's median, a thousand of them at most."""
    ratios: list[float] = []
    for cell in work.cells:
        timed = work.of(name, cell)
        if timed is not None and len(timed.seconds) >= 5:
            ratios += (np.asarray(timed.seconds) / np.median(timed.seconds)).tolist()
    ratios.sort()
    if len(ratios) > 1000:
        ratios = [ratios[place] for place in np.linspace(0, len(ratios) - 1, 1000).round().astype(int).tolist()]
    return tuple(ratios)


# ---- policies --------------------------------------------------------------------------------------------------------


def measure(work: Measured, given: Read, gemm: Mapping[str, float] | None) -> dict[str, Any]:
    """The part of the document about texts: plain JSON."""
    surfaces = {name: found for name in work.workers if (found := surface(work, name)) is not None}
    batches = sorted({cell[0] for cell in work.cells})
    limit = work.facts.max_length or max(given.texts.lengths)
    texts = _timed_texts(work, given.texts, surfaces)
    times = _time(work, texts, surfaces, batches, limit)
    subjects = []
    for subject in work.subjects:
        if subject.name not in surfaces:
            continue
        rows = []
        for policy in policies.POLICIES:
            for padding in policies.PADDINGS:
                for batch in batches:
                    way = (policy, padding, batch)
                    if batch == 1 and policy != ALONE[0]:
                        continue  # alone there is nothing to put together
                    planned = policies.plan(texts.lengths, batch, policy, padding, limit)
                    timed = times.get((subject.name, _name(way)))
                    waste = policies.plan(given.texts.lengths, batch, policy, padding, limit).waste
                    rows.append({**_row(way, planned, surfaces[subject.name], timed), "waste": waste})
        measured = {row["batch"]: row for row in rows if row["policy"] == "sorted" and row["texts_per_second"]}
        measured |= {row["batch"]: row for row in rows if (row["policy"], row["padding"], row["batch"]) == ALONE}
        speeds = {batch: row["texts_per_second"] for batch, row in measured.items() if row["texts_per_second"]}
        subjects.append(
            {
                "step": subject.name,
                "ways": rows,
                "stops_paying": policies.stops_paying(speeds) if speeds else None,
            }
        )
    return {
        "source": given.source,
        "count": given.count,
        "read": len(given.texts.items),
        "cut": given.cut,
        "timed": len(texts.items),
        "lengths": _quantiles(given.texts.lengths),
        "limit": limit,
        "subjects": subjects,
        "best": _best(work, subjects, texts, gemm),
    }


def _timed_texts(work: Measured, texts: Texts, surfaces: Mapping[str, Surface]) -> Texts:
    """As many texts as the slowest subject answers one at a time in its part of the budget."""
    slowest = max((sum(each.at(1, length) for length in texts.lengths) for each in surfaces.values()), default=0.0)
    share = PART * work.wishes.budget / max(slowest, 1e-9)
    return texts.some(max(min(int(share * len(texts.lengths)), len(texts.lengths)), FEWEST))


def _time(
    work: Measured, texts: Texts, surfaces: Mapping[str, Surface], batches: Sequence[int], limit: int
) -> dict[tuple[str, str], Timed]:
    """One at a time, sorted in every batch size, and the other ways at the size that is predicted to be the best.

    Padding everything to the limit is timed where a pass of it stays in the part of the budget that a pass has.
    """
    turns = {}
    for name, found in surfaces.items():
        sizes = [batch for batch in batches if batch > 1]
        ways = [ALONE, *(("sorted", "longest", batch) for batch in sizes)]
        if sizes:
            best = min(sizes, key=lambda size: _predicted(policies.plan(texts.lengths, size, "sorted"), found))
            ways += [(policy, "longest", best) for policy in policies.POLICIES if policy != "sorted"]
            ways.append((ALONE[0], "limit", best))
        for way in ways:
            policy, padding, batch = way
            planned = policies.plan(texts.lengths, batch, policy, padding, limit)
            if padding == "limit" and _predicted(planned, found) > PART * work.wishes.budget:
                continue
            worker = work.workers[name]
            worker.give(_name(way), texts.batches(planned))
            turns[name, _name(way)] = lambda seconds, most, worker=worker, way=way: worker.turn(
                _name(way), seconds, most
            )
    rule = replace(PASSES, budget=work.wishes.budget)
    work.progress.start("batches of texts", None)
    return timing.interleaved(turns, rule, on_turn=lambda: work.progress.advance())


def _name(way: tuple[str, str, int]) -> str:
    return f"{way[0]}, {way[1]}, {way[2]}"


def _predicted(planned: Batches, found: Surface) -> float:
    """Seconds of all batches by the surface."""
    return sum(found.at(len(rows), width) for rows, width in zip(planned.rows, planned.widths, strict=True))


def _row(way: tuple[str, str, int], planned: Batches, found: Surface, timed: Timed | None) -> dict[str, Any]:
    policy, padding, batch = way
    count = len(planned.lengths)
    row = {
        "policy": policy,
        "padding": padding,
        "batch": batch,
        "waste": planned.waste,
        "predicted_per_second": count / max(_predicted(planned, found), 1e-12),
        "texts_per_second": None,
        "tokens_per_second": None,
        "passes": 0,
    }
    if timed is not None and timed.seconds and not timed.failed:
        median = float(np.median(timed.seconds))
        row |= {
            "texts_per_second": count / median,
            "tokens_per_second": planned.real / median,
            "passes": len(timed.seconds),
        }
    return row


def _quantiles(lengths: Sequence[int]) -> dict[str, float]:
    values = np.asarray(lengths)
    return {
        "mean": float(values.mean()),
        "p50": float(np.quantile(values, 0.5)),
        "p90": float(np.quantile(values, 0.9)),
        "max": int(values.max()),
    }


# ---- the line of its own ---------------------------------------------------------------------------------------------


def _best(
    work: Measured, subjects: Sequence[Mapping[str, Any]], texts: Texts, gemm: Mapping[str, float] | None
) -> list[dict[str, Any]]:
    """The fastest measured way of each artifact in integers, and of the fastest one of all, against PyTorch one text at
    a time; with what the products alone would take at the machine's own rates."""
    ways = {each["step"]: [way for way in each["ways"] if way["texts_per_second"]] for each in subjects}
    alone = next((way for way in ways.get(PYTORCH, ()) if (way["policy"], way["padding"], way["batch"]) == ALONE), None)
    known = {each.name: each for each in work.subjects}
    fastest = {
        name: max(found, key=lambda way: float(way["texts_per_second"])) for name, found in ways.items() if found
    }
    if not fastest:
        return []
    first = max(fastest, key=lambda name: float(fastest[name]["texts_per_second"]))
    chosen = [name for name in fastest if known[name].precision == "int8"]
    flops = _flops(work)
    found = []
    for name in dict.fromkeys([*chosen, first]):
        speed = float(fastest[name]["texts_per_second"])
        limit = _limit(known[name], flops, sum(texts.lengths) / len(texts.lengths), gemm)
        found.append(
            {
                "step": name,
                **{key: fastest[name][key] for key in ("policy", "padding", "batch", "texts_per_second")},
                "pytorch_alone_per_second": None if alone is None else alone["texts_per_second"],
                "times_pytorch_alone": None if alone is None else speed / float(alone["texts_per_second"]),
                "flops_of_token": flops,
                "limit_per_second": limit,
                "share_of_limit": None if limit is None else speed / limit,
            }
        )
    return found


def _flops(work: Measured) -> int | None:
    """Operations of one token in the products with a weight, from a graph of this model; None without one."""
    for name in ("onnx", *(each.name for each in work.subjects)):
        artifact = next((each.artifact for each in work.subjects if each.name == name), None)
        if artifact is not None and artifact.format == "onnx":
            return policies.flops_of_token([structure.onnx_graph(path) for path in artifact.graphs]) or None
    return None


def _limit(
    subject: Subject, flops: int | None, tokens_of_text: float, gemm: Mapping[str, float] | None
) -> float | None:
    """Texts a second if nothing but the products with a weight took time, each arithmetic at the machine's own rate.

    What is neither whole float32 nor whole int8 (8-bit weights, half precision) counts at float32's rate.
    """
    if flops is None or not gemm:
        return None
    seconds = sum(
        part * flops * tokens_of_text / gemm["int8" if arithmetic == "int8" else "float32"]
        for arithmetic, part in subject.share.items()
    )
    return 1 / seconds if seconds > 0 and math.isfinite(seconds) else None

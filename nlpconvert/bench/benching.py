"""Floor 3: `bench`: every artifact of an OUT that runs here and PyTorch, timed in turns, by batch and length.

What is timed is `subjects`, how `timing`, what is asked `asking`; texts in batches are `texts`, the
queue `arrivals`, what a person has to know of the numbers `findings`. The result is one plain document
(data/bench.schema.json); nothing is worded or drawn here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import nlpconvert
from nlpconvert import golden, host, judging, manifest, models, plan, runtimes
from nlpconvert.bench import findings, timing
from nlpconvert.bench import subjects as bench_subjects
from nlpconvert.bench.asking import LARGEST, TARGET, bytes_of_answers, lengths_for
from nlpconvert.bench.subjects import PYTORCH, Pinned, Subject
from nlpconvert.bench.timing import Key, Rule, Timed
from nlpconvert.bench.worker import Failed, Worker
from nlpconvert.errors import UsageError
from nlpconvert.manifest import Manifest
from nlpconvert.models import Facts
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, Silent

SCHEMA = 1
BATCHES = (1, 2, 4, 8, 16, 32)
LENGTHS = (16, 64, 128, 512)
BUDGET = 120.0
WAYS: tuple[dict[str, str], ...] = ({}, {"OMP_WAIT_POLICY": "PASSIVE"})
"""PyTorch's threads wait for work as they do by default, which is quicker where nothing else runs, or asleep, which is
many times quicker where something does. It is given the better one."""
TRIALS = 3


@dataclass(frozen=True)
class Wishes:
    """What is asked of a benchmark. None means the defaults, which give way to the model's limits where named ones are
    refused. `arrivals` a second and `p99` seconds: derive a batching. `equal`: the server pads nothing, only texts of
    one length form a batch. `instances`: how many at a time are tried; None: 1 and 2. `texts`: policies are compared.
    """

    steps: Sequence[str] | None = None
    batches: Sequence[int] | None = None
    lengths: Sequence[int] | None = None
    model: str | None = None
    budget: float = BUDGET
    arrivals: float | None = None
    p99: float | None = None
    equal: bool = False
    instances: Sequence[int] | None = None
    texts: bool = True

    def check(self) -> None:
        """UsageError for a number that makes no sense."""
        for name, given in (("--batch", self.batches), ("--length", self.lengths), ("--instances", self.instances)):
            if given is not None and (not given or min(given) < 1):
                raise UsageError(f"{name}: whole numbers from 1 on, with commas")
        if not self.budget > 0:
            raise UsageError(f"--budget {self.budget:g}: more than 0 seconds")
        for name, value in (("--arrivals", self.arrivals), ("--p99", self.p99)):
            if value is not None and not (0 < value < math.inf):
                raise UsageError(f"{name}: more than 0")
        if self.arrivals is None and (self.p99 is not None or self.instances is not None or self.equal):
            raise UsageError("--p99, --instances and --equal-lengths are about a queue: give --arrivals, such as 200/s")


@dataclass
class Measured:
    """What one run holds while it goes on: the subjects, those that are open, their times by cell."""

    out: Path

    record: Manifest
    facts: Facts
    options: Options
    wishes: Wishes
    subjects: list[Subject]
    workers: dict[str, Worker]
    cells: list[tuple[int, int]]
    times: dict[Key, Timed]
    progress: Progress

    def name(self, cell: tuple[int, int]) -> str:
        """A cell's name among the times."""
        return f"{cell[0]}x{cell[1]}"

    def of(self, subject: str, cell: tuple[int, int]) -> Timed | None:
        """Times of a subject in a cell, None where it has none."""
        found = self.times.get((subject, self.name(cell)))
        return None if found is None or found.failed or not found.seconds else found

    def median(self, subject: str, cell: tuple[int, int]) -> float | None:
        """Median seconds."""
        found = self.of(subject, cell)
        return None if found is None else float(np.median(found.seconds))

    def slower(self, subject: str, other: str) -> float | None:
        """How many times the other's latency, as the geometric mean over the cells that both have."""
        ratios = [
            one / two
            for cell in self.cells
            if (one := self.median(subject, cell)) is not None and (two := self.median(other, cell)) is not None
        ]
        return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def bench(
    out: Path | str,
    wishes: Wishes | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Times everything in `out` that runs here; see data/bench.schema.json for what comes back.

    Raises UsageError for what is wrong with the wishes or the directory, before any work. An artifact that cannot run
    here, or is not the file that was verified, is a row with a reason.
    """
    out, wishes, options, progress = Path(out), wishes or Wishes(), options or Options(), progress or Silent()
    wishes.check()
    plan.check_words(options)
    record = manifest.read(out)
    facts = models.facts_from_data(record.facts)
    lengths, note = lengths_for(facts, wishes.lengths or LENGTHS, named=wishes.lengths is not None)
    batches = tuple(sorted(set(wishes.batches or BATCHES)))
    probes = judging.stored_probes(record, out)
    found = bench_subjects.subjects(record, out, wishes.steps, wishes.model)
    texts = None
    if options.data is not None or wishes.arrivals is not None or wishes.texts:
        from nlpconvert.bench import texts as bench_texts

        texts = bench_texts.read(record, out, facts, probes.cases, options)
        if not texts.texts.items:
            raise UsageError(f"{texts.source}: there is no text with a token in it, so there is nothing to batch")
    cells, left_out = _cells(facts, probes.answers, batches, lengths)
    with Pinned(options.threads) as pinned, contextlib.ExitStack() as opened:
        options = replace(options, threads=pinned.threads)
        machine = {**host.host_facts(), **pinned.facts()}
        work = Measured(out, record, facts, options, wishes, found, {}, cells, {}, progress)
        _open(work, opened)
        gemm = _gemm(options) if not runtimes.lacks("onnxruntime") else None
        _time(work)
        document = _document(out, work, machine, batches, lengths, left_out)
        document["gemm"] = gemm
        document["notes"] = [note] if note else []
        document["texts"] = document["batching"] = None
        if texts is not None and work.workers and (wishes.texts or options.data is not None):
            from nlpconvert.bench import texts as bench_texts

            document["texts"] = bench_texts.measure(work, texts, gemm)
        if wishes.arrivals is not None and work.workers:
            from nlpconvert.bench import arrivals as bench_queue

            assert texts is not None
            document["batching"] = bench_queue.derive(work, texts)
        document["recommended"] = recommended(document["batching"])
        document["findings"] = findings.findings(document)
    return document


def exit_code(document: Mapping[str, Any], asked: Sequence[str] | None = None) -> int:
    """1 for a changed artifact or a goal not met; 4 where nothing ran, or what was asked for by name did not."""
    subjects = document["subjects"]
    goal = document["batching"]
    if any(each["changed"] for each in subjects) or (goal is not None and goal["met"] is False):
        return 1
    missing = any(each["reason"] for each in subjects if each["step"] in (asked or ()))
    artifacts = [each for each in subjects if each["step"] != PYTORCH]
    return 4 if missing or (artifacts and all(each["reason"] for each in artifacts)) else 0


# ---- measuring -------------------------------------------------------------------------------------------------------


def _cells(
    facts: Facts, answers: Mapping[str, Mapping[str, golden.Reference]], batches: Sequence[int], lengths: Sequence[int]
) -> tuple[list[tuple[int, int]], list[dict[str, Any]]]:
    """Every batch by every length, the smallest first; and those whose answers are too large to hold."""
    widths: dict[str, int] = {}
    dynamic = ("batch", "sequence", "decoder_sequence", "choices")
    for given in answers.values():
        for output in facts.outputs:
            if output.name in given:
                sizes = zip(output.axes, given[output.name].shape, strict=True)
                widths[output.name] = math.prod(size for axis, size in sizes if axis not in dynamic)
    cells, left_out = [], []
    for cell in sorted(((b, n) for b in batches for n in lengths), key=lambda each: (each[0] * each[1], each)):
        size = bytes_of_answers(facts, widths, *cell)
        if size > LARGEST:
            left_out.append(
                {"batch": cell[0], "length": cell[1], "reason": f"its answers would take {size / 1e9:.1f} GB"}
            )
        else:
            cells.append(cell)
    if not cells:
        raise UsageError(f"even the smallest batch has answers above {LARGEST / 1e9:.1f} GB; give smaller ones")
    return cells, left_out


def _open(work: Measured, opened: contextlib.ExitStack) -> None:
    """Opens each in its process, one after the other: the smallest and the largest batch are asked once."""
    work.progress.start("opening", len(work.subjects))
    for place, subject in enumerate(work.subjects):
        work.progress.advance()
        if subject.reason:
            continue
        ways = WAYS if subject.format in ("pytorch", "torchscript") else WAYS[:1]
        said, workers = [], []
        for environment in ways:
            workers.append(Worker(subject.name, environment))
            opened.callback(workers[-1].close)
            said.append(workers[-1].open(work.out, work.options, work.wishes.model, [work.cells[0], work.cells[-1]]))
            if said[-1].get("reason"):
                break
        reason = next((each for each in said if each.get("reason")), None)
        if reason is not None:
            work.subjects[place] = replace(subject, reason=reason["reason"], changed=bool(reason.get("changed")))
        else:
            best = _quicker(work, workers)
            work.subjects[place] = replace(subject, facts={**subject.facts, **said[best]})
            work.workers[subject.name] = workers.pop(best)
        for worker in workers:
            worker.close()


def _quicker(work: Measured, workers: Sequence[Worker]) -> int:
    """Which of several processes of one subject is the quickest, over the smallest and a middle batch."""
    if len(workers) == 1:
        return 0
    taken: list[list[float]] = [[] for _ in workers]
    for cell in (work.cells[0], work.cells[len(work.cells) // 2]) * TRIALS:
        for place, worker in enumerate(workers):
            try:
                taken[place].append(float(np.median(worker.turn(work.name(cell), 0.1, 50, cell))))
            except Failed:
                continue  # whatever it is comes again when it is timed
    return min(range(len(workers)), key=lambda place: sum(taken[place]))


def _time(work: Measured) -> None:
    """The one interleaved run."""
    turns = {
        (name, work.name(cell)): lambda seconds, most, worker=worker, cell=cell: worker.turn(
            work.name(cell), seconds, most, cell
        )
        for cell in work.cells
        for name, worker in work.workers.items()
    }
    work.progress.start("latency and throughput", None)
    work.times = timing.interleaved(turns, Rule(budget=work.wishes.budget), on_turn=lambda: work.progress.advance())


def _gemm(options: Options) -> dict[str, float]:
    """The machine's own rates, operations a second by arithmetic."""
    from nlpconvert.backends import gemm

    return dict(gemm.rates(options.threads))


# ---- the document ----------------------------------------------------------------------------------------------------


def _document(
    out: Path,
    work: Measured,
    machine: Mapping[str, Any],
    batches: Sequence[int],
    lengths: Sequence[int],
    left_out: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    source = work.record.source
    return {
        "nlpconvert": nlpconvert.__version__,
        "schema": SCHEMA,
        "kind": "bench",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "out": str(out),
        "source": {key: source.get(key) for key in ("model", "revision", "sha256", "task", "parameters")},
        "host": dict(machine),
        "versions": host.versions(),
        "rule": Rule(budget=work.wishes.budget).to_dict(),
        "batches": list(batches),
        "lengths": list(lengths),
        "decoder_length": TARGET if "decoder_input_ids" in work.facts.inputs else None,
        "left_out": list(left_out),
        "subjects": [_row(work, subject) for subject in work.subjects],
    }


def _row(work: Measured, subject: Subject) -> dict[str, Any]:
    measured = subject.name in work.workers
    facts = subject.facts
    cells = []
    for batch, length in work.cells if measured else ():
        timed = work.times[subject.name, work.name((batch, length))]
        cells.append({"batch": batch, "length": length, **timing.summary(timed, batch, batch * length)})
    against = work.slower(PYTORCH, subject.name) if measured and PYTORCH in work.workers else None
    return {
        "step": subject.name,
        "verdict": subject.status,
        "worst": None if subject.worst is None else {"measure": subject.worst[0], "value": subject.worst[1]},
        "drift": subject.drift,
        "format": subject.format,
        "precision": subject.precision,
        "bytes": subject.bytes,
        "sha256": None if subject.artifact is None else subject.artifact.sha256,
        "reason": subject.reason,
        "changed": subject.changed,
        "provider": facts.get("provider"),
        "arithmetic": facts.get("arithmetic"),
        "import_seconds": facts.get("import_seconds"),
        "load_seconds": facts.get("load_seconds"),
        "first_seconds": facts.get("first_seconds"),
        "runtime_bytes": facts.get("runtime_bytes"),
        "peak_bytes": facts.get("peak_bytes"),
        "times_pytorch": against,
        "environment": facts.get("environment"),
        "dominated_by": [
            other.name
            for other in work.subjects
            if measured and other.name in work.workers and _dominates(work, other, subject)
        ],
        "cells": cells,
    }


def _dominates(work: Measured, other: Subject, subject: Subject) -> bool:
    """Whether `other` is faster, smaller and nearer to PyTorch than `subject`."""
    if other.name == subject.name or other.drift is None or subject.drift is None:
        return False
    slower = work.slower(subject.name, other.name)
    return (
        slower is not None
        and slower > findings.FASTER
        and other.bytes < subject.bytes
        and other.drift < subject.drift
        and other.status in ("agrees", "reference")
    )


def recommended(batching: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The batcher's settings of the artifact to serve; None where no queue was asked about."""
    if batching is None or batching["step"] is None:
        return None
    found = batching["steps"][batching["step"]]
    names = ("max_batch_size", "preferred_batch_size", "max_queue_delay_microseconds", "instance_count")
    return {"step": batching["step"], **{name: found[name] for name in names}}

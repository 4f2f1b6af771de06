"""Floor 3: the batching that a server should have, derived from measured times: for each artifact, and the best of all.

The queue is `queueing`. What several instances on the same processors cost is measured here: one session each, with its
share of the threads, at work at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert.bench import queueing, texts
from nlpconvert.bench.queueing import Surface
from nlpconvert.bench.subjects import PYTORCH, Subject
from nlpconvert.bench.worker import Failed, Worker

if TYPE_CHECKING:
    from nlpconvert.bench.benching import Measured
    from nlpconvert.bench.texts import Read

INSTANCES = (1, 2)
TURNS, TURN, MOST = 3, 0.2, 50
"""Turns of all instances together and of one alone, the seconds of each, and the passes in it at most."""


def derive(work: Measured, given: Read) -> dict[str, Any]:
    """The part of the document about the queue: plain JSON, which `nlpconvert triton --batching` reads.

    `steps` has the batcher's settings and what they are predicted to give for each artifact, `step` names the one to
    serve: of those that meet the goal the one whose batcher is left the most room.
    """
    wishes = work.wishes
    assert wishes.arrivals is not None
    steps: dict[str, Any] = {}
    for subject in work.subjects:
        found = texts.surface(work, subject.name) if subject.name in work.workers else None
        if found is None or subject.name == PYTORCH:
            continue
        work.progress.start(f"{subject.name}: the queue", None)
        surfaces = _surfaces(work, subject, found, given.texts.lengths)
        derived = queueing.derive(surfaces, wishes.arrivals, given.texts.lengths, wishes.p99, equal=wishes.equal)
        longest = max(given.texts.lengths)
        steps[subject.name] = {
            **derived.to_dict(),
            "slower_by_instances": {
                str(count): float(np.mean(np.asarray(each.seconds) / np.asarray(found.seconds)))
                for count, each in surfaces.items()
            },
            "extrapolated_above": found.lengths[-1] if longest > found.lengths[-1] else None,
        }
    best = _best(steps, work)
    return {
        "arrivals_per_second": wishes.arrivals,
        "goal_p99": wishes.p99,
        "equal_lengths": wishes.equal,
        "texts": given.source,
        "step": best,
        "met": None if wishes.p99 is None else bool(best and steps[best]["met"]),
        "steps": steps,
    }


def _best(steps: dict[str, Any], work: Measured) -> str | None:
    """The artifact to serve: one that agrees and meets the goal, with the largest rate it stands; else the quickest."""
    verdicts = {each.name: each.status for each in work.subjects}
    fit = [name for name in steps if verdicts[name] == "agrees"] or list(steps)
    met = [name for name in fit if steps[name]["met"]]
    if met:
        return max(met, key=lambda name: (steps[name]["largest_rate_in_goal"], -steps[name]["predicted"]["p99"]))
    return min(
        fit, key=lambda name: (steps[name]["predicted"]["saturated"], steps[name]["predicted"]["p99"]), default=None
    )


# ---- several instances -----------------------------------------------------------------------------------------------


def _surfaces(work: Measured, subject: Subject, alone: Surface, lengths: Sequence[int]) -> dict[int, Surface]:
    """The cost surface by number of instances; only those that this machine has threads for."""
    threads = work.options.threads or 1
    wanted = work.wishes.instances or INSTANCES
    found = {1: alone} if 1 in wanted else {}
    for count in wanted:
        if 1 < count <= threads:
            factor = _factor(work, subject, alone, count, lengths)
            if factor is not None:
                found[count] = alone.slower(factor)
    return found or {1: alone}


def _factor(
    work: Measured, subject: Subject, alone: Surface, count: int, lengths: Sequence[int]
) -> dict[int, float] | None:
    """By batch size, how many times longer a pass takes where `count` instances share the processors, each with its
    part of the threads; measured at the length nearest to the median text. None where they cannot be opened."""
    options = replace(work.options, threads=max((work.options.threads or 1) // count, 1))
    length = min(alone.lengths, key=lambda each: abs(each - float(np.median(lengths))))
    whole = work.workers[subject.name]
    with contextlib.ExitStack() as opened:
        workers = [Worker(subject.name) for _ in range(count)]
        for worker in workers:
            opened.callback(worker.close)
        for worker in workers:
            if worker.open(work.out, options, work.wishes.model, [(alone.batches[0], length)]).get("reason"):
                return None
        factor = {}
        for batch in alone.batches:
            cell = (batch, length)
            name = work.name(cell)
            one: list[float] = []
            together: list[float] = []
            try:
                for _ in range(TURNS):
                    one += whole.turn(name, TURN, MOST, cell)
                    for worker in workers:
                        worker.begin(name, TURN, MOST, cell)
                    for worker in workers:
                        together += worker.end()
            except Failed:
                return None
            factor[batch] = float(np.median(together) / np.median(one))
    return factor

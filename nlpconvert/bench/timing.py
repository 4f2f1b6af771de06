"""Floor 1: how passes are timed: in turns, until the median is known well enough or the time for it is spent.

What is timed comes in as callables; what the numbers mean is `benching`. Every round asks each subject of a cell in
turns, in another order each time, so that whatever else the machine does meets all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Turn = Callable[[float, int], Sequence[float]]
"""One turn of a subject in a cell: passes back to back for so many seconds (one at least), so many at most; the seconds
of those that count."""
Key = tuple[str, str]
"""A subject's name and a cell's."""


@dataclass(frozen=True)
class Rule:
    """When a cell has been asked often enough: the 95 % interval of each subject's median is within `narrow` of it on
    either side, after `least` passes; or `most` passes; or `budget` seconds for all cells together are spent, of which
    each cell gets `least` passes whatever they take.

    A turn is at least `turn` seconds of passes, one pass where that is longer; the first of several is not counted.
    """

    narrow: float = 0.02
    least: int = 3
    enough: int = 20
    """Passes before an interval is believed to be narrow."""
    most: int = 400
    budget: float = 120.0
    turn: float = 0.05

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "narrow": self.narrow, "least": self.least, "enough": self.enough, "most": self.most,
            "budget": self.budget, "turn": self.turn,
        }  # fmt: skip


@dataclass
class Timed:
    """Seconds of the counted passes of one subject in one cell, in order; why there are no more, or why it failed."""

    seconds: list[float] = field(default_factory=list)
    ended: str = ""
    """ "stable", "most" or "budget"; empty while it goes on or where it failed."""
    failed: str = ""


def interleaved(
    turns: Mapping[Key, Turn],
    rule: Rule,
    *,
    explain: Callable[[Exception], str] = str,
    on_turn: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, Timed]:
    """Times everything, in rounds over all cells and subjects, after one pass of each that is not counted.

    A turn that raises is out, with `explain`'s words; the others of its cell go on.
    """
    found = {key: Timed() for key in turns}
    cells: dict[str, list[Key]] = {}
    for key in turns:
        cells.setdefault(key[1], []).append(key)
    began = clock()

    def take(key: Key, seconds: float, most: int) -> Sequence[float]:
        try:
            return turns[key](seconds, most)
        except Exception as error:  # a runtime raises whatever it likes
            found[key].failed = explain(error)
            return ()
        finally:
            on_turn()

    for key in turns:  # what is allocated, compiled or read for the first time
        take(key, 0.0, 1)
    number = 0
    open_cells = list(cells)
    while open_cells:
        for cell in list(open_cells):
            keys = [key for key in cells[cell] if not found[key].failed]
            shift = number % len(keys) if keys else 0
            for key in [*keys[shift:], *keys[:shift]]:
                found[key].seconds += take(key, rule.turn, rule.most)
            keys = [key for key in keys if not found[key].failed]
            ended = _ended([found[key] for key in keys], rule, clock() - began)
            if ended:
                open_cells.remove(cell)
                for key in keys:
                    found[key].ended = ended
        number += 1
    return found


def passes(
    run: Callable[[], object], seconds: float, most: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """One turn: passes back to back, and the seconds of each; the first is left out where there are several."""
    taken: list[float] = []
    while not taken or (sum(taken) < seconds and len(taken) < most):
        start = clock()
        run()
        taken.append(clock() - start)
    return taken[1:] if len(taken) > 1 else taken


def _ended(found: Sequence[Timed], rule: Rule, spent: float) -> str:
    """Why a cell is done, "" while it is not."""
    least = min((len(each.seconds) for each in found), default=rule.most)
    if not found or least >= rule.most:
        return "most"
    if least >= rule.enough and all(relative(each.seconds) <= rule.narrow for each in found):
        return "stable"
    return "budget" if least >= rule.least and spent >= rule.budget else ""


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median: order statistics by the binomial distribution (normal approximation past 25).

    Of fewer than six passes no interval reaches 95 %: the smallest and the largest are given.
    """
    ordered = sorted(seconds)
    count = len(ordered)
    if count < 6:
        return ordered[0], ordered[-1]
    if count <= 25:
        low, chance = 0, 0.0
        while chance + math.comb(count, low) / 2**count <= 0.025:
            chance += math.comb(count, low) / 2**count
            low += 1
        return ordered[low - 1], ordered[count - low]
    half = 1.96 * math.sqrt(count) / 2
    low = max(math.floor(count / 2 - half), 0)
    return ordered[low], ordered[min(count - 1 - low, count - 1)]


def relative(seconds: Sequence[float]) -> float:
    """How far the interval reaches from the median, as a share of it."""
    low, high = interval(seconds)
    median = float(np.median(seconds))
    return max(high - median, median - low) / max(median, 1e-12)


def quantile(seconds: Sequence[float], share: float) -> float | None:
    """An upper quantile; None where so few passes cannot show it: 1 / (1 - share) are needed."""
    if len(seconds) * (1 - share) < 1 - 1e-9:
        return None
    return float(np.quantile(np.asarray(seconds), share))


def summary(timed: Timed, rows: int, tokens: int) -> dict[str, Any]:
    """Plain JSON of one cell: latency in seconds, throughput by its median. `tokens`: computed in one pass."""
    if timed.failed or not timed.seconds:
        return {"failed": timed.failed or "it was not asked"}
    low, high = interval(timed.seconds)
    median = float(np.median(timed.seconds))
    return {
        "passes": len(timed.seconds),
        "ended": timed.ended,
        "p50": median,
        "p50_low": low,
        "p50_high": high,
        "p90": quantile(timed.seconds, 0.9),
        "p99": quantile(timed.seconds, 0.99),
        "max": max(timed.seconds),
        "rows_per_second": rows / median,
        "tokens_per_second": tokens / median,
    }

"""Floor 1: what waiting for a batch costs: a server with a dynamic batcher, simulated from measured times.

Requests come at random, stand in one queue and leave it in batches, as Triton's dynamic batcher forms them. The time of
a batch is read from a surface that was measured (batch by length). Which batching meets a goal is `derive`. Nothing is
timed here; times are seconds, rates are requests a second.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nlpconvert.errors import UsageError

RUNS = 5
"""Independent streams of arrivals that a policy which is told is simulated with."""
REQUESTS = 6000
"""Requests in a stream."""
SKETCH = 4000
"""Requests of the one stream that all policies are compared by first."""
KEPT = 12
"""Policies that are then looked at closely."""
WARM = 0.05
"""Share of a stream that comes while the queue fills, and is not counted."""
FULL = 0.999
"""A server that is busier than this is one whose queue grows."""
SAME = 0.03
"""p99s that differ by less are the same: what a simulation of this size cannot tell apart."""
DELAYS = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
"""Waiting times that are tried, in seconds."""


@dataclass(frozen=True)
class Surface:
    """Seconds of one pass, by rows of the batch and tokens of its longest row; both ascending, `seconds` by batch.

    Between measured points it is linear. A text that is shorter than the shortest measured costs as much as that one;
    past the longest the last slope goes on. No batch is larger than the largest measured.
    """

    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    spread: tuple[float, ...] = ()
    """Single passes over their cell's median: how much a time scatters. Empty: not at all."""

    def __post_init__(self) -> None:
        if not self.batches or not self.lengths:
            raise UsageError("a cost surface needs at least one batch size and one length")
        if list(self.batches) != sorted(set(self.batches)) or list(self.lengths) != sorted(set(self.lengths)):
            raise UsageError("batch sizes and lengths of a cost surface have to ascend")

    def table(self, longest: int) -> list[list[float]]:
        """Seconds of every batch size up to the largest and every length up to `longest`: table[rows][length]."""
        lengths = np.arange(longest + 1)
        rows = np.stack([_line(lengths, self.lengths, row) for row in np.asarray(self.seconds, np.float64)])
        sizes = np.arange(self.batches[-1] + 1)
        whole = np.stack([np.interp(sizes, self.batches, column) for column in rows.T], axis=1)
        found: list[list[float]] = whole.tolist()
        return found

    def at(self, rows: int, length: int) -> float:
        """Seconds of one batch."""
        column = [float(_line(np.array([length]), self.lengths, np.asarray(row))[0]) for row in self.seconds]
        return float(np.interp(rows, self.batches, column))

    def slower(self, factor: Mapping[int, float]) -> Surface:
        """The surface with each batch size's times multiplied: what a share of the processor makes of it."""
        seconds = tuple(
            tuple(each * factor[batch] for each in row) for batch, row in zip(self.batches, self.seconds, strict=True)
        )
        return replace(self, seconds=seconds)


def _line(at: np.ndarray, known: Sequence[int], values: np.ndarray) -> np.ndarray:
    """Linear between known points, flat below them, the last slope above them."""
    found = np.interp(at, known, values)
    if len(known) > 1:
        slope = max((values[-1] - values[-2]) / (known[-1] - known[-2]), 0.0)
        found = np.where(at > known[-1], values[-1] + slope * (at - known[-1]), found)
    elif known[0] > 0:
        found = np.where(at > known[0], values[0] * at / known[0], found)  # one point: as long, as dear
    return np.asarray(found)


@dataclass(frozen=True)
class Policy:
    """A batcher's settings, by Triton's names. `delay`: seconds that the oldest request may wait for companions.

    `preferred`: sizes that are sent at once when they are reached. `equal`: only requests of one length form a batch
    (what a server does that pads nothing).
    """

    max_batch: int
    delay: float = 0.0
    preferred: tuple[int, ...] = ()
    instances: int = 1
    equal: bool = False


@dataclass(frozen=True)
class Served:
    """What became of a stream: seconds from arrival to answer of each request, rows of each batch, and the share of
    the instances' time in which they worked."""

    latencies: np.ndarray
    batches: np.ndarray
    busy: float
    rate: float
    """Requests answered a second."""
    waste: float
    """Share of the computed tokens that were padding."""


def simulate(
    arrivals: np.ndarray, lengths: np.ndarray, surface: Surface, policy: Policy, rng: np.random.Generator | None = None
) -> Served:
    """One stream of requests through the batcher, first come, first served.

    `arrivals`: ascending seconds; `lengths`: tokens of each. When an instance is free it takes the largest preferred
    size that is there, or all that is there once the oldest has waited `policy.delay` (at once, where that is 0) or
    `max_batch` rows have come. `rng` draws from the surface's spread; None: every pass takes its median.
    """
    if policy.max_batch > surface.batches[-1]:
        raise UsageError(f"no batch above {surface.batches[-1]} was measured, and max_batch is {policy.max_batch}")
    times, tokens = arrivals.tolist(), lengths.tolist()
    table = surface.table(max(tokens, default=1))
    scatter = _scatter(surface, rng, len(times))
    free = [0.0] * policy.instances
    done = [0.0] * len(times)
    sizes: list[int] = []
    work, computed = 0.0, 0
    first, count = 0, len(times)
    while first < count:
        start = heapq.heappop(free)
        now, rows = _next(times, tokens, first, max(start, times[first]), policy)
        longest = max(tokens[first : first + rows])
        seconds = table[rows][longest] * scatter[len(sizes)]
        computed += rows * longest
        work += seconds
        for place in range(first, first + rows):
            done[place] = now + seconds
        heapq.heappush(free, now + seconds)
        sizes.append(rows)
        first += rows
    ended = max(done, default=0.0)
    span = max(ended - (times[0] if times else 0.0), 1e-12)
    return Served(
        np.asarray(done) - arrivals,
        np.asarray(sizes, np.int64),
        work / span / policy.instances,
        count / span,
        1 - sum(tokens) / computed if computed else 0.0,
    )


def _next(times: Sequence[float], tokens: Sequence[int], first: int, now: float, policy: Policy) -> tuple[float, int]:
    """When the next batch leaves, and how many rows it takes; at `now` an instance and a request are there."""
    most = policy.max_batch
    closed = False  # by a request of another length behind it
    if policy.equal:
        own = first + 1
        while own < len(times) and own < first + most and tokens[own] == tokens[first]:
            own += 1
        closed = own < min(first + most, len(times))
        most = own - first
    else:
        most = min(most, len(times) - first)
    there = _there(times, first, most, now)
    deadline = times[first] + policy.delay
    fitting = [size for size in policy.preferred if size <= there]
    if fitting and (policy.delay == 0 or now < deadline):
        return now, max(fitting)
    if policy.delay == 0 or now >= deadline or there == policy.max_batch:
        return now, there
    ends = [deadline]
    if most == policy.max_batch:
        ends.append(times[first + most - 1])
    if closed:
        ends.append(times[first + most])
    ends += [times[first + size - 1] for size in policy.preferred if there < size <= most][:1]
    leaves = max(min(ends), now)
    return leaves, _there(times, first, most, leaves)


def _there(times: Sequence[float], first: int, most: int, now: float) -> int:
    """How many of the next `most` requests have come."""
    return bisect.bisect_right(times, now, first, first + most) - first


def _scatter(surface: Surface, rng: np.random.Generator | None, count: int) -> list[float]:
    if rng is None or not surface.spread:
        return [1.0] * count
    drawn: list[float] = rng.choice(np.asarray(surface.spread), count).tolist()
    return drawn


def poisson(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arrival times of `count` requests that do not know of each other, in seconds, ascending."""
    return np.cumsum(rng.exponential(1 / rate, count))


# ---- which batching meets a goal ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Predicted:
    """What a policy comes to under a rate. Seconds; `p99_error`: half of the 95 % interval over the streams."""

    policy: Policy
    p50: float
    p90: float
    p99: float
    p99_error: float
    busy: float
    rows: float
    """Rows of a batch, on average."""
    rate: float
    capacity: float
    """Requests a second with full batches and no pause: above it every queue grows."""
    waste: float

    @property
    def saturated(self) -> bool:
        """Whether the queue grows for as long as requests come."""
        return self.busy > FULL

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, by Triton's names; seconds."""
        return {
            "max_batch_size": self.policy.max_batch,
            "preferred_batch_size": list(self.policy.preferred),
            "max_queue_delay_microseconds": round(self.policy.delay * 1e6),
            "instance_count": self.policy.instances,
            "predicted": {
                "p50": self.p50,
                "p90": self.p90,
                "p99": self.p99,
                "p99_error": self.p99_error,
                "throughput": self.rate,
                "busy": self.busy,
                "mean_batch": self.rows,
                "capacity": self.capacity,
                "padding": self.waste,
                "saturated": self.saturated,
            },
        }


@dataclass(frozen=True)
class Derived:
    """What was found for a goal: the policy to take, whether it meets it, all that were looked at, and the largest
    rate at which the one that is taken still meets it (0 where none does)."""

    best: Predicted
    met: bool
    goal: float | None
    rate: float
    frontier: tuple[Predicted, ...] = field(default=())
    """What no other policy beats in both p99 and the share of time that it works."""
    most: float = 0.0
    tried: tuple[Predicted, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: the policy's own settings at the top."""
        return {
            **self.best.to_dict(),
            "met": self.met,
            "largest_rate_in_goal": self.most,
            "frontier": [each.to_dict() for each in self.frontier],
            "tried": [[each.p99, each.busy] for each in self.tried if not each.saturated],
        }


def predict(
    surface: Surface, policy: Policy, rate: float, lengths: Sequence[int], *, runs: int = RUNS, requests: int = REQUESTS
) -> Predicted:
    """A policy under Poisson arrivals at `rate`, lengths drawn from those given; the same streams for each policy."""
    given = np.asarray(lengths, np.int64)
    found, quantiles = [], []
    for number in range(runs):
        rng = np.random.default_rng(number)
        arrivals = poisson(rate, requests, rng)
        served = simulate(arrivals, rng.choice(given, requests), surface, policy, rng)
        settled = served.latencies[int(WARM * requests) :]
        quantiles.append(np.quantile(settled, (0.5, 0.9, 0.99)))
        found.append(served)
    p50, p90, p99 = np.mean(quantiles, axis=0).tolist()
    error = _interval([float(each[2]) for each in quantiles])
    rows = float(np.concatenate([each.batches for each in found]).mean())
    mean = float(np.mean([each.busy for each in found]))
    capacity = full_rate(surface, policy, given)
    # A finite stream ends: its busy share stays below 1 where an endless one would not.
    busy = max(mean, rate / capacity) if rate >= capacity else mean
    return Predicted(
        policy, p50, p90, p99, error, busy, rows, float(np.mean([each.rate for each in found])), capacity,
        float(np.mean([each.waste for each in found])),
    )  # fmt: skip


def full_rate(surface: Surface, policy: Policy, lengths: np.ndarray) -> float:
    """Requests a second when the queue is never empty: full batches of requests as they come."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(lengths, max(policy.max_batch * 200, 1000))
    served = simulate(np.zeros(len(drawn)), drawn, surface, replace(policy, delay=0.0))
    return len(drawn) / float(served.latencies.max())


def _interval(values: Sequence[float]) -> float:
    """Half of the 95 % interval of a mean of few values (Student's t)."""
    if len(values) < 2:
        return 0.0
    student = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
    factor = student.get(len(values), 2.2)
    return factor * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def policies(surface: Surface, instances: int, goal: float | None, *, equal: bool = False) -> Iterator[Policy]:
    """What is worth a try: every measured size, waiting times below the goal, with and without preferred sizes."""
    for size in surface.batches:
        for delay in DELAYS:
            if (goal is not None and delay >= goal) or (size == 1 and delay):
                continue
            yield Policy(size, delay, (), instances, equal)
            smaller = [each for each in surface.batches if 1 < each < size]
            if delay and smaller:
                yield Policy(size, delay, (smaller[-1], size), instances, equal)


def derive(
    surfaces: Mapping[int, Surface],
    rate: float,
    lengths: Sequence[int],
    goal: float | None = None,
    *,
    equal: bool = False,
) -> Derived:
    """The batching with the least p99 at `rate` (requests a second); of those alike, the one that works least for it.

    `surfaces`: by number of instances, each measured with so many at work. `goal`: seconds that p99 may take, at the
    upper end of its interval. Raises UsageError for a rate or a goal that is not positive.
    """
    if not rate > 0 or not math.isfinite(rate):
        raise UsageError(f"a rate of {rate:g} requests a second: more than 0")
    if goal is not None and not goal > 0:
        raise UsageError(f"a p99 of {goal:g} s: more than 0")
    sketched = [
        predict(surface, policy, rate, lengths, runs=1, requests=SKETCH)
        for count, surface in surfaces.items()
        for policy in policies(surface, count, goal, equal=equal)
    ]
    flowing = [each for each in sketched if not each.saturated]
    near = sorted(flowing, key=lambda each: each.p99)[:KEPT] or [max(sketched, key=lambda each: each.capacity)]
    looked = [predict(surfaces[each.policy.instances], each.policy, rate, lengths) for each in near]
    flowing = [each for each in looked if not each.saturated]
    best = _choose(flowing) if flowing else max(looked, key=lambda each: each.capacity)
    met = bool(flowing) and (goal is None or best.p99 + best.p99_error <= goal)
    most = 0.0 if goal is None else largest_rate(surfaces[best.policy.instances], best.policy, lengths, goal)
    closely = {each.policy for each in looked}
    tried = (*looked, *(each for each in sketched if each.policy not in closely))
    return Derived(best, met, goal, rate, frontier(tried), most, tried)


def _choose(found: Sequence[Predicted]) -> Predicted:
    """The least p99; of those that a simulation cannot tell from it, the least busy, then the plainest."""
    least = min(each.p99 for each in found)
    alike = [each for each in found if each.p99 <= (1 + SAME) * least]
    return min(
        alike, key=lambda each: (round(each.busy, 2), len(each.policy.preferred), each.policy.delay, -each.capacity)
    )


def frontier(found: Sequence[Predicted]) -> tuple[Predicted, ...]:
    """Those that no other beats in both p99 and the share of time that they work, ascending in p99."""
    kept: list[Predicted] = []
    for each in sorted((each for each in found if not each.saturated), key=lambda each: (each.p99, each.busy)):
        if not kept or each.busy < kept[-1].busy - 1e-9:
            kept.append(each)
    return tuple(kept)


def largest_rate(surface: Surface, policy: Policy, lengths: Sequence[int], goal: float) -> float:
    """Requests a second up to which p99 stays below `goal`, to 2 %; 0 where even a single request takes longer."""
    low, high = 0.0, full_rate(surface, policy, np.asarray(lengths, np.int64))
    for _ in range(12):
        middle = (low + high) / 2
        found = predict(surface, policy, middle, lengths, runs=1, requests=SKETCH)
        if found.p99 <= goal and not found.saturated:
            low = middle
        else:
            high = middle
        if low and (high - low) / high < 0.02:
            break
    return low

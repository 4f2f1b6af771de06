"""Floor 1: in which order precision is given back, and how far: the path of mixes and the search along it.

A mix is a level for every name: 0 is the cheapest, the last is floating point. What a level costs and what it moves is
for the caller to say; nothing is run here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nlpconvert.search import Score


def path(energy: Mapping[str, Sequence[float]], cost: Mapping[str, Sequence[float]]) -> list[dict[str, int]]:
    """Mixes from all at level 0 to all but one at the last, each with one name raised: what brings most for its cost.

    `energy`, `cost`: by name, what is moved and what is paid at every level.
    """
    last = {name: len(costs) - 1 for name, costs in cost.items()}
    levels = dict.fromkeys(cost, 0)
    mixes = [dict(levels)]
    while True:
        raises = [
            ((energy[name][now] - energy[name][up]) / (cost[name][up] - cost[name][now]), name, up)
            for name, now in levels.items()
            for up in range(now + 1, last[name] + 1)
            if cost[name][up] > cost[name][now]
        ]
        if not raises:
            return mixes
        _, name, up = max(raises)
        levels[name] = up
        if levels == last:
            return mixes
        mixes.append(dict(levels))


def bisect(
    mixes: Sequence[Mapping[str, int]], first: Score, score: Callable[[Mapping[str, int]], Score], room: float
) -> dict[int, Score]:
    """Scores by place along a path, those that are needed to find the first mix that uses at most `room` of the
    tolerance; `first` is that of its start."""
    low, high = 0, len(mixes) - 1
    scores = {0: first}
    if high not in scores:
        scores[high] = score(mixes[high])
    if scores[high].used > room:
        # Not even the last mix fits: look for the least drift among a few.
        for n in sorted({high // 4, high // 2, 3 * high // 4} - {0, high}):
            scores[n] = score(mixes[n])
        return scores
    while high - low > 1:
        middle = (low + high) // 2
        scores[middle] = score(mixes[middle])
        low, high = (low, middle) if scores[middle].used <= room else (middle, high)
    return scores

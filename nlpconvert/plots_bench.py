"""Floor 4: the plots of a benchmark, in the style of `plots`: lines over the batch size, drift against latency, the
frontier of a queue. Data in, SVG text out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nlpconvert.plots import ACCENT, BAD, INK, MUTED, SECOND, _figure, _free_place, _svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES: tuple[tuple[str, str, str], ...] = (
    (MUTED, "s", "--"), (ACCENT, "o", "-"), (SECOND, "D", "-"), (INK, "^", "-"), (ACCENT, "v", ":"), (SECOND, "P", ":"),
    (INK, "X", ":"), (MUTED, "*", ":"),
)  # fmt: skip
"""A line has a colour, a mark and a stroke: no two are told apart by colour alone."""
SIGNS = "■●◆▲▼✚✖★"


@dataclass(frozen=True)
class Spot:
    """An artifact in the plot of drift against latency against size: seconds, relative L2, bytes."""

    name: str
    seconds: float
    drift: float
    bytes: int
    dominated: bool


def lines(
    batches: Sequence[int], values: Mapping[str, Sequence[float | None]], upwards: str, name: str, label: str
) -> str:
    """One line a subject over the batch size, both axes by factors of two and ten. None leaves a gap."""
    with _figure() as (figure, axes):
        for place, each in enumerate(values.values()):
            colour, marker, stroke = STYLES[place % len(STYLES)]
            known = [(batch, value) for batch, value in zip(batches, each, strict=True) if value]
            axes.plot(
                [x for x, _ in known], [y for _, y in known], color=colour, marker=marker, linestyle=stroke,
                markersize=5, linewidth=1.4,
            )  # fmt: skip
        _logs(axes, [value for each in values.values() for value in each if value])
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(batches), [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.set_xlabel("rows of a batch")
        axes.set_ylabel(upwards)
        return _svg(figure, name, label)


def legend(names: Sequence[str]) -> str:
    """The marks of `lines` in words: "■ pytorch   ● onnx"."""
    return "   ".join(f"{SIGNS[place % len(SIGNS)]} {each}" for place, each in enumerate(names))


def spots(points: Sequence[Spot], name: str, label: str) -> str:
    """Drift (log) against latency (log); a mark's area grows with the size of the file. A drift of 0 stands at the
    lower edge; what another beats in all three is crossed out."""
    known = [point.drift for point in points if point.drift > 0]
    floor = 10 ** math.floor(math.log10(min(known)) - 0.5) if known else 1e-9
    largest = max((point.bytes for point in points), default=1) or 1
    with _figure() as (figure, axes):
        _logs(axes, [*(max(point.drift, floor) for point in points), floor])
        axes.set_ylim(floor, 10 ** math.ceil(math.log10(max([*known, floor * 10])) + 0.3))
        axes.set_xscale("log")
        times = [point.seconds * 1000 for point in points]
        axes.set_xlim(min(times) / 2, max(times) * 2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.set_xlabel("ms of one text")
        axes.set_ylabel("relative L2 from PyTorch")
        figure.draw_without_rendering()  # fixes the places that the labels look for
        placed = [
            axes.transData.transform((x, max(point.drift, floor))) for x, point in zip(times, points, strict=True)
        ]
        taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in placed]
        box = axes.bbox
        for x, point, (left, low) in zip(times, points, placed, strict=True):
            size = 4 + 10 * math.sqrt(point.bytes / largest)
            at = (x, max(point.drift, floor))
            axes.plot(*at, "X" if point.dominated else "o", color=BAD if point.dominated else ACCENT, markersize=size,
                      alpha=0.75, clip_on=False)  # fmt: skip
            offset, where = _free_place(point.name, (float(left), float(low)), taken, (box.x0, box.y0, box.x1, box.y1))
            axes.annotate(point.name, at, offset, textcoords="offset points", ha=where, va="center", color=INK)
        return _svg(figure, name, label)


def frontier(
    points: Sequence[tuple[float, float]],
    tried: Sequence[tuple[float, float]],
    best: tuple[float, float],
    goal: float | None,
    name: str,
    label: str,
) -> str:
    """p99 in ms (across) against the share of time that the instances work: all that was tried, what no other beats
    joined by a line, the chosen one filled, the goal a line across."""
    with _figure() as (figure, axes):
        axes.plot([x for x, _ in tried], [100 * y for _, y in tried], ".", color=SECOND, markersize=4, alpha=0.6)
        axes.plot([x for x, _ in points], [100 * y for _, y in points], color=MUTED, marker="o", markersize=4,
                  markerfacecolor="none", linewidth=1.2)  # fmt: skip
        axes.plot(best[0], 100 * best[1], "o", color=ACCENT, markersize=8, clip_on=False)
        if goal is not None:
            axes.axvline(goal, color=BAD, linewidth=1.4, linestyle=(0, (4, 2)))
        axes.set_xlim(0, 1.15 * max([best[0], goal or 0.0, *(x for x, _ in points), *_nearest(tried)]))
        axes.set_ylim(0, 100)
        axes.set_xlabel("p99 in ms")
        axes.set_ylabel("busy, %")
        return _svg(figure, name, label)


def _nearest(tried: Sequence[tuple[float, float]]) -> list[float]:
    """p99 of the better half: the rest may lie outside the plot."""
    return sorted(x for x, _ in tried)[: len(tried) // 2]


def _logs(axes: Axes, values: Sequence[float]) -> None:
    """A log scale upwards with ticks that read as numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    wide = bool(values) and max(values) > 100 * min(values)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_tick)


def _tick(value: float, _: Any = None) -> str:
    return f"{value:.0e}" if value < 1e-2 else f"{value:,.0f}" if value >= 1 else f"{value:g}"

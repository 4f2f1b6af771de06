"""Floor 4: the report's plots, as SVG text that stands inside an HTML page. Data in, text out; no display, no file.

Colours are the page's own variables, so that a plot follows its light and dark scheme, and letters stay letters. A
figure is drawn at the width of a phone, so that its letters can be read there. Each of them says in `label` what it
shows: that is what a screen reader tells.
"""

from __future__ import annotations

import html
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 360, 216
"""Of a figure, in CSS pixels."""

# matplotlib wants colours as numbers; these are exchanged for the page's variables once the figure is drawn.
INK, MUTED, LINE, ACCENT, SECOND, BAD, PANEL = (f"#0000{n:02x}" for n in range(1, 8))
_VARIABLES = {
    INK: "--ink", MUTED: "--muted", LINE: "--line", ACCENT: "--accent", SECOND: "--second", BAD: "--bad",
    PANEL: "--panel",
}  # fmt: skip

MARKERS = {"agrees": "o", "drift": "X"}
"""A verdict has a shape, not a colour alone."""


@dataclass(frozen=True)
class Point:
    """One artifact in a plot of drift against something: its name, place and status."""

    name: str
    x: float
    y: float
    status: str


def histogram(
    edges: Sequence[float], counts: Sequence[int], name: str, label: str, bound: tuple[float, str] | None = None
) -> str:
    """How many elements differ by how much. `edges` are log10 of the differences, one more than `counts`.

    `bound`: log10 of what is allowed, and the word beside its line. `name` tells this plot's ids from another's.
    """
    with _figure() as (figure, axes):
        axes.stairs(counts, edges, fill=True, color=ACCENT, alpha=0.75)
        filled = [count for count in counts if count]
        if filled and max(filled) > 50 * min(filled):
            _log_scale(axes)
            axes.set_ylim(0.8)
        shown = [edge for left, right, n in zip(edges, edges[1:], counts, strict=False) if n for edge in (left, right)]
        low, high = (min(shown), max(shown)) if shown else (edges[0], edges[-1])
        if bound is not None:
            axes.axvline(bound[0], color=BAD, linewidth=1.4, linestyle=(0, (4, 2)))
            left = bound[0] > (low + high) / 2
            axes.annotate(
                bound[1], (bound[0], 1), (-4 if left else 4, -10), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=BAD, ha="right" if left else "left",
            )  # fmt: skip
            low, high = min(low, bound[0]), max(high, bound[0])
        margin = 0.04 * max(high - low, 1.0)
        axes.set_xlim(low - margin, high + margin)
        axes.xaxis.set_major_locator(_whole_numbers())
        axes.xaxis.set_major_formatter(lambda power, _: f"1e{power:.0f}")
        axes.set_xlabel("|candidate - reference|")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_ylabel("elements")
        return _svg(figure, name, label)


def layers(modules: Sequence[Mapping[str, Any]], name: str, label: str, threshold: float | None = None) -> str:
    """Drift that arrives at each module and that it introduces, in the order of the modules; log scale.

    A module has "arrives" and "introduced"; what is None or not finite is left out. Zero stands at the lower edge.
    Past `threshold` a module stands out.
    """
    drawn = {key: [_positive(module.get(key)) for module in modules] for key in ("arrives", "introduced")}
    known = [value for values in drawn.values() for value in values if value is not None and value > 0]
    floor = 10 ** math.floor(math.log10(min(known)) - 0.3) if known else 1e-9
    with _figure() as (figure, axes):
        styles = {"arrives": (MUTED, "-", None), "introduced": (ACCENT, "", "o")}
        for key, values in drawn.items():
            points = [(place, max(value, floor)) for place, value in enumerate(values) if value is not None]
            colour, line, marker = styles[key]
            xs, ys = [x for x, _ in points], [y for _, y in points]
            axes.plot(xs, ys, color=colour, linestyle=line or "none", linewidth=1.4, marker=marker, markersize=3.5)
            if not line:
                axes.vlines(xs, floor, ys, color=colour, linewidth=0.9, alpha=0.7)
        _log_scale(axes)
        axes.set_ylim(bottom=floor)
        axes.set_xlim(-0.6, max(len(modules) - 0.4, 0.6))
        axes.xaxis.set_major_locator(_whole_numbers())
        axes.xaxis.set_major_formatter(lambda place, _: f"{place + 1:.0f}")
        if threshold and any(floor < value for value in known):
            axes.axhline(max(threshold, floor), color=BAD, linewidth=1, linestyle=(0, (4, 2)))
        axes.set_xlabel("module, in the order in which they run")
        axes.set_ylabel("relative drift")
        for place, (key, text) in enumerate((("arrives", "\N{EM DASH} arrives"), ("introduced", "● introduced"))):
            axes.annotate(
                text, (0.02 + 0.24 * place, 1.03), xycoords="axes fraction", color=styles[key][0], annotation_clip=False
            )
        return _svg(figure, name, label)


def curve(points: Sequence[tuple[float, float]], name: str, label: str) -> str:
    """The error over the position in a text, both on a log scale. Zero stands at the lower edge."""
    known = [value for _, value in points if value > 0]
    floor = 10 ** math.floor(math.log10(min(known)) - 0.3) if known else 1e-9
    with _figure() as (figure, axes):
        xs, ys = [max(place, 1.0) for place, _ in points], [max(value, floor) for _, value in points]
        axes.plot(xs, ys, color=ACCENT, linewidth=1.4, marker="o", markersize=3.5)
        _log_scale(axes)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda place, _: f"{place:.0f}")
        axes.set_ylim(bottom=floor)
        axes.set_xlabel("position in the text")
        axes.set_ylabel("relative error")
        return _svg(figure, name, label)


def scatter(points: Sequence[Point], across: str, name: str, label: str) -> str:
    """Drift (relative L2, log scale) against what `across` says, a named mark for each artifact.

    A drift of 0 stands at the lower edge.
    """
    known = [point.y for point in points if point.y > 0]
    floor = 10 ** math.floor(math.log10(min(known)) - 0.3) if known else 1e-9
    ceiling = 10 ** math.ceil(math.log10(max(known)) + 0.3) if known else 1.0
    with _figure() as (figure, axes):
        _log_scale(axes)
        axes.set_ylim(floor, ceiling)
        right = max((point.x for point in points), default=1.0)
        axes.set_xlim(0, right * 1.12 or 1.0)
        axes.set_xlabel(across)
        axes.set_ylabel("relative L2 from the reference")
        figure.draw_without_rendering()  # fixes the places that the labels look for
        placed = [(point, axes.transData.transform((point.x, max(point.y, floor)))) for point in points]
        taken = [(x - 5, y - 5, x + 5, y + 5) for _, (x, y) in placed]
        box = axes.bbox
        for point, (x, y) in placed:
            colour = BAD if point.status == "drift" else ACCENT
            marker, big = MARKERS.get(point.status, "s"), 8 if point.status == "drift" else 6.5
            axes.plot(point.x, max(point.y, floor), marker, color=colour, markersize=big, clip_on=False)
            offset, where = _free_place(point.name, (float(x), float(y)), taken, (box.x0, box.y0, box.x1, box.y1))
            axes.annotate(point.name, (point.x, max(point.y, floor)), offset, textcoords="offset points",
                          ha=where, va="center", color=INK)  # fmt: skip
        return _svg(figure, name, label)


Box = tuple[float, float, float, float]


def _free_place(text: str, at: tuple[float, float], taken: list[Box], inside: Box) -> tuple[tuple[float, float], str]:
    """Offset and alignment of a label that covers nothing yet, as far as there is such a place; notes what it takes."""
    width, height = 5.6 * len(text), 11.0
    x, y = at
    places: list[tuple[tuple[float, float], str]] = []
    for shift in (0.0, 11.0, -11.0, 22.0, -22.0, 33.0, -33.0):
        places += [((8.0, shift), "left"), ((-8.0, shift), "right")]
    best: tuple[float, tuple[float, float], str, Box] | None = None
    for offset, where in places:
        left = x + offset[0] - (width if where == "right" else 0.0)
        box = (left, y + offset[1] - height / 2, left + width, y + offset[1] + height / 2)
        outside = max(0.0, inside[0] - box[0], box[2] - inside[2] - 6) + max(
            0.0, inside[1] - box[1], box[3] - inside[3]
        )
        cost = sum(_common(box, other) for other in taken) + 20 * outside + 0.1 * abs(offset[1])
        if best is None or cost < best[0]:
            best = (cost, offset, where, box)
    assert best is not None
    taken.append(best[3])
    return best[1], best[2]


def _common(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return max(wide, 0.0) * max(high, 0.0)


def _positive(value: Any) -> float | None:
    """A number that a log scale can hold (0 included: it stands at the edge); None for any other."""
    try:
        number = abs(float(value))
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _log_scale(axes: Axes) -> None:
    """A log scale upwards whose ticks read as code has them: 1e-6."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"1e{round(math.log10(value))}" if value != 1 else "1")


def _whole_numbers() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=7, integer=True)


@contextmanager
def _figure() -> Iterator[tuple[Figure, Axes]]:
    """One empty figure with its axes in the page's style; nothing global is left changed."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: Any = {
        "svg.fonttype": "none", "text.parse_math": False, "font.size": 10, "axes.labelsize": 10,
        "xtick.labelsize": 9.5, "ytick.labelsize": 9.5, "text.color": INK, "axes.labelcolor": MUTED,
        "axes.edgecolor": LINE, "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED, "axes.linewidth": 1, "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "axes.axisbelow": True, "grid.color": LINE, "grid.linewidth": 0.6,
        "axes.unicode_minus": False, "path.simplify": True,
    }  # fmt: skip
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # Letters are drawn by the browser: that matplotlib's own font lacks one does not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        layout = ConstrainedLayoutEngine(w_pad=3 / 72, h_pad=4 / 72)
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout=layout)
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.set_facecolor("none")
        figure.set_facecolor("none")
        yield figure, axes


def _svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an <svg> element: no header, no size of its own, ids that are nobody else's on the page."""
    import io

    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name}):
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    used = set(re.findall(r'#([\w.-]+)["\')]', text))
    text = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in used else "", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    # The page's own letters: the size stays, the family is inherited.
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    text = re.sub(r"\n\s*", "\n", text)
    _, _, body = text.partition(">")
    spoken = html.escape(label)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{spoken}" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink">\n<title>{spoken}</title>{body.strip()}'
    )

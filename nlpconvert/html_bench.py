"""Floor 4: a benchmark as one HTML file that opens offline: no script, nothing from elsewhere. Data in, text out.

The template is data/bench.html.j2; numbers are worded by `report_bench`, plots drawn by `plots_bench`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nlpconvert
from nlpconvert import plots_bench, report_bench, wording
from nlpconvert.errors import MissingPackage
from nlpconvert.plots_bench import Spot

TEMPLATE = Path(__file__).parent / "data" / "bench.html.j2"
STYLE = Path(__file__).parent / "data" / "report.html.j2"
"""The page that has the style of all pages."""


def check() -> None:
    """MissingPackage, with the extra that brings it, when no report can be made here. For before any work."""
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(
                f"the HTML report needs {package}, which is not installed: pip install 'nlpconvert[verify]'"
            )


def render(document: Mapping[str, Any]) -> str:
    """The report as one HTML document. Raises MissingPackage without jinja2 or matplotlib."""
    check()
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # The plots are ours, and their letters are escaped where they are made.
    environment.filters["svg"] = lambda text: markupsafe.Markup(text)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(page=_page(document)) + "\n"


def _page(document: Mapping[str, Any]) -> dict[str, Any]:
    measured = [each for each in document["subjects"] if each["cells"]]
    names = [each["step"] for each in measured]
    source = document["source"]
    return {
        "style": STYLE.read_text(encoding="utf-8").partition("<style>\n")[2].partition("</style>")[0],
        "title": f"nlpconvert bench: {source.get('model') or document['out']}",
        "model": str(source.get("model") or ""),
        "out": document["out"],
        "when": document["created"].replace("T", " "),
        "version": nlpconvert.__version__,
        "machine": report_bench.machine(document),
        "findings": document["findings"],
        "notes": [*document["notes"], *(f"left out: {report_bench.left_out(each)}" for each in document["left_out"])],
        "subjects": _grid(list(report_bench.HEADER), report_bench.table_rows(document)),
        "legend": plots_bench.legend(names),
        "plots": [*_lines(document, measured), *_spots(document, measured)],
        "cells": [
            (title, _grid(*report_bench.cell_table(document, what)))
            for title, what in (
                ("Latency: median / 90th / 99th percentile", "latency"), ("Texts a second", "throughput")
            )
        ]
        if measured
        else [],
        "texts": _texts(document["texts"]),
        "batching": _batching(document["batching"]),
        "rule": document["rule"],
    }  # fmt: skip


def _grid(header: Sequence[str], rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    return {"header": list(header), "rows": [[row[name] for name in header] for row in rows]}


def _lines(document: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Throughput and latency against batch, at each length that was measured: (caption, plot)."""
    found = []
    for length in document["lengths"] if measured else ():
        by = {
            each["step"]: {
                cell["batch"]: cell for cell in each["cells"] if cell["length"] == length and "failed" not in cell
            }
            for each in measured
        }
        batches = [batch for batch in document["batches"] if any(batch in cells for cells in by.values())]
        for what, key, scale, words in (
            ("throughput", "rows_per_second", 1.0, "texts a second"),
            ("latency", "p50", 1000.0, "ms, median"),
        ):
            values = {
                name: [scale * cells[batch][key] if batch in cells else None for batch in batches]
                for name, cells in by.items()
            }
            if not batches or not any(value for each in values.values() for value in each):
                continue
            caption = f"{what.capitalize()} against batch, {wording.count(length, 'token')}"
            best = ", ".join(
                f"{name} up to {report_bench.rate(max(filter(None, each), default=None))}"
                for name, each in values.items()
            )
            label = f"{caption}: {best} {words}"
            found.append((caption, plots_bench.lines(batches, values, words, f"{what}-{length}", label)))
    return found


def _spots(document: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    points = []
    for each in measured:
        first = next((cell for cell in each["cells"] if "failed" not in cell), None)
        if first is not None and each["drift"] is not None:
            points.append(Spot(each["step"], first["p50"], each["drift"], each["bytes"], bool(each["dominated_by"])))
    if not points:
        return []
    caption = "Drift against latency; the larger the file, the larger the mark"
    words = "; ".join(
        f"{point.name}: {report_bench.seconds(point.seconds)}, drift {wording.drift(point.drift)}, "
        f"{wording.size(point.bytes)}"
        for point in points
    )
    return [(caption, plots_bench.spots(points, "drift", f"{caption}: {words}"))]


def _texts(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    header = ["step", "way", "padding wasted", "texts/s, timed", "texts/s, predicted"]
    rows = [
        {
            "step": each["step"],
            "way": report_bench.way_words(way),
            "padding wasted": f"{way['waste']:.0%}",
            "texts/s, timed": report_bench.rate(way["texts_per_second"]),
            "texts/s, predicted": report_bench.rate(way["predicted_per_second"]),
        }
        for each in found["subjects"]
        for way in each["ways"]
    ]
    return {
        "lines": [line.strip() for line in report_bench.texts(found)],
        "best": [report_bench.best(each) for each in found["best"]],
        "ways": _grid(header, rows),
    }


def _batching(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if found is None:
        return None
    goal = found["goal_p99"]
    plots = []
    for name, step in found["steps"].items():
        best = step["predicted"]
        points = [(1000 * each["predicted"]["p99"], each["predicted"]["busy"]) for each in step["frontier"]]
        if not points:
            continue
        caption = f"{name}: p99 against the time at work, of every policy that was tried"
        label = f"{caption}; chosen: {report_bench.settings(step)}; {report_bench.predicted(step)}"
        tried = [(1000 * p99, busy) for p99, busy in step["tried"]]
        drawn = plots_bench.frontier(
            points,
            tried,
            (1000 * best["p99"], min(best["busy"], 1.0)),
            1000 * goal if goal else None,
            f"queue-{name}",
            label,
        )
        plots.append((caption, drawn))
    return {"lines": list(report_bench.batching(found)), "plots": plots}

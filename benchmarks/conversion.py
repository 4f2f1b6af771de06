"""Benchmarks: `nlpconvert onnx` as a whole process, against a script that only loads, exports and saves."""

from __future__ import annotations

import shutil
from pathlib import Path

from measure import HERE, Result, Sample, Settings, child, in_turns, row

TITLE = "Conversion to ONNX"
ALONE_TARGET = 1.0
WITH_VERDICT_TARGET = 1.5


def measure(settings: Settings) -> Result:
    """Three sides in turns, and one clocked run, which also fills the caches before anything counts."""
    threads = settings.threads
    own = [] if threads is None else ["--threads", str(threads)]

    def fresh(script: list[str | Path], options: list[str | Path]) -> Sample:
        out = settings.scratch / "converted"
        shutil.rmtree(out, ignore_errors=True)
        return child([*script, settings.model, *options, out], threads=threads)

    command: list[str | Path] = ["onnx"]
    phases = fresh([HERE / "phases.py", *command], [*own, "-o"]).data()
    found = in_turns(
        {
            "bare": lambda: fresh([HERE / "bare_export.py"], []),
            "alone": lambda: fresh([HERE / "our_export.py"], []),
            "whole": lambda: fresh(["-m", "nlpconvert", *command], [*own, "-q", "-o"]),
        },
        settings.times(5),
    )
    bare = found["bare"]
    return Result(
        (
            row("load, convert, save / bare script", found["alone"], bare, ALONE_TARGET),
            row("`nlpconvert onnx` with its verdict / bare script", found["whole"], bare, WITH_VERDICT_TARGET),
        ),
        ("Where the time of one `nlpconvert onnx` goes:", "", *phase_table(phases)),
    )


def phase_table(phases: list[tuple[int, str, float, float, int]]) -> list[str]:
    """The phases as lines of a table; those inside another are set in."""
    lines = ["| phase | seconds | cpu | calls |", "|---|---:|---:|---:|"]
    for depth, words, wall, cpu, calls in phases:
        lines.append(f"| {'&nbsp;&nbsp;' * depth}{words} | {wall:.2f} | {cpu:.2f} | {calls} |")
    return lines

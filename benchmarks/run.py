#!/usr/bin/env python
"""Benchmarks: runs them, prints their ratios and writes the tables of benchmarks/README.md.

benchmarks/run.py                        all of them, on a machine that does nothing else
benchmarks/run.py startup memory         these
benchmarks/run.py --no-write ...         the README stays as it is
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import conversion
import gate
import locate
import measure
import memory
import quantization
import serving
import startup
import training
import verification
import writing
from measure import Result, Settings

BENCHMARKS: dict[str, ModuleType] = {
    "startup": startup,
    "convert": conversion,
    "verify": verification,
    "quantize": quantization,
    "memory": memory,
    "locate": locate,
    "write": writing,
    "serve": serving,
    "gate": gate,
    "train": training,
}
README = measure.HERE / "README.md"


def main(arguments: list[str] | None = None) -> int:
    """0, or 1 where a ratio is above its target."""
    parser = argparse.ArgumentParser(description="Speeds and memory of nlpconvert, as ratios.")
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)}; all when none is named")
    parser.add_argument("--model", type=Path, help="checkpoint directory of convert and verify (all-MiniLM-L6-v2)")
    parser.add_argument("--repeats", type=int, help="how often each side is run, instead of each benchmark's own")
    parser.add_argument("--threads", type=int, help="threads of both sides; without it their own choice")
    parser.add_argument("--parameters", type=float, default=1.4e9, help="of the model of memory and locate (1.4e9)")
    parser.add_argument(
        "--scratch", type=Path, help="where models are written and removed (12 GB free for memory, 18 for locate)"
    )
    parser.add_argument("--no-write", action="store_true", help="leave benchmarks/README.md as it is")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.name if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}")

    print(machine())
    missed = False
    for name in given.name or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="nlpconvert-bench-", dir=given.scratch) as scratch:
            result: Result = benchmark.measure(
                Settings(
                    model=given.model or measure.minilm(),
                    scratch=Path(scratch),
                    repeats=given.repeats,
                    threads=given.threads,
                    parameters=int(given.parameters),
                )
            )
        lines = table(result)
        print(f"\n{benchmark.TITLE} ({time.perf_counter() - started:.0f} s)\n\n" + "\n".join(lines))
        if not given.no_write:
            text = README.read_text(encoding="utf-8")
            README.write_text(between(text, name, [f"{machine()}.", "", *lines]), encoding="utf-8")
        missed = missed or any(row.target is not None and row.ratio > row.target for row in result.rows)
    return int(missed)


def machine() -> str:
    """What it was measured on, in one line."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, load {load:.1f} before"


def table(result: Result) -> list[str]:
    """The rows and notes as Markdown."""
    lines = ["| ours / against | ours | against | ratio | by cpu | target |", "|---|---|---|---:|---:|---:|"]
    for row in result.rows:
        by_cpu = "" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}"
        target = "" if row.target is None else f"{row.target:g}{'' if row.ratio <= row.target else ' (missed)'}"
        lines.append(f"| {row.what} | {row.ours} | {row.theirs} | **{row.ratio:.2f}** | {by_cpu} | {target} |")
    return [*lines, "", *result.notes] if result.notes else lines


def between(text: str, name: str, lines: list[str]) -> str:
    """The text with the lines between a benchmark's markers. ValueError where the markers are not there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the README has no {begin} ... {end}")
    return "\n".join([before + begin, *lines, end + after])


if __name__ == "__main__":
    sys.exit(main())

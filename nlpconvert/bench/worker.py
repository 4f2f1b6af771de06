"""Floor 3: a subject in a process of its own, which stands still while others have their turn.

Runtimes' threads spin for a while after a pass: two runtimes in one process, or one beside another that waits, take
each other's processors and are up to ten times slower. So each has its process, which is stopped between its turns;
its memory can be told apart too, and one that dies takes nothing with it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert.errors import CannotRunHere
from nlpconvert.plan import Options

PATIENT = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
"""What the command line sets for itself, and a server does not."""


REST = 0.1
"""Seconds in which the threads of the one before fall asleep, where it cannot be stopped."""


class Failed(CannotRunHere):
    """The process has died, or what it was asked has raised; the message says what."""


class Worker:
    """The parent's end of one process. Ends it when it is closed, whatever it does."""

    def __init__(self, step: str, environment: Mapping[str, str] | None = None) -> None:
        self.step = step
        env = {name: value for name, value in os.environ.items() if PATIENT.get(name) != value}
        env |= environment or {}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nlpconvert.bench.child"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=env,
        )  # fmt: skip
        self.pid = self._process.pid
        self._stopped = False

    def open(self, out: Path, options: Options, model: str | None, cells: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Opens the subject and asks it each of `cells` once; what it took, or "reason" where it cannot be asked."""
        asked = {
            "out": str(out.resolve()), "step": self.step, "model": model, "cells": cells, "threads": options.threads,
            "provider": options.provider, "device": options.device, "trust_remote_code": options.trust_remote_code,
        }  # fmt: skip
        try:
            return self._ask({"open": asked})
        except Failed as error:
            return {"reason": str(error)}

    def give(self, name: str, batches: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Batches that a pass named `name` runs one after the other."""
        arrays = {f"{number}/{own}": array for number, batch in enumerate(batches) for own, array in batch.items()}
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "batches.npz"
            np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy takes any names
            self._ask({"texts": {"name": name, "path": str(path)}})

    def turn(self, name: str, seconds: float, most: int, cell: tuple[int, int] | None = None) -> list[float]:
        """One turn: see `timing.passes`. `cell`: batch and length of a pass that was not given. Raises Failed."""
        self.begin(name, seconds, most, cell)
        return self.end()

    def begin(self, name: str, seconds: float, most: int, cell: tuple[int, int] | None = None) -> None:
        """A turn begins; `end` waits for it. So that several can work at a time."""
        self._send({"turn": {"name": name, "seconds": seconds, "most": most, "cell": cell}})

    def end(self) -> list[float]:
        """The seconds of the turn that was begun."""
        found: list[float] = self._receive()["seconds"]
        return found

    def _ask(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        self._send(asked)
        return self._receive()

    def _send(self, asked: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        if self._stopped:
            os.kill(self.pid, signal.SIGCONT)
            self._stopped = False
        elif sys.platform != "linux":
            time.sleep(REST)
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Failed(self._died()) from error

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Failed(self._died())
        if sys.platform == "linux":  # elsewhere nothing would end a stopped one with its parent
            os.kill(self.pid, signal.SIGSTOP)
            self._stopped = True
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise Failed(answer["failed"])
        return answer

    def _died(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        last = next((line.strip() for line in reversed(self._errors.read().splitlines()) if line.strip()), "")
        how = f"was killed by signal {-code} (out of memory?)" if code < 0 else f"ended with {code}"
        return f"its process {how}{last and ': ' + last[:200]}"

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue  # what was still to be written has nobody to read it

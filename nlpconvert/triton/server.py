"""Floor 3: a Triton of our own: started on the loopback, waited for, and stopped with all that it has started.

What it serves is `triton`'s, what it answers `serving`'s business.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nlpconvert.errors import CannotRunHere, MissingPackage, first_line
from nlpconvert.progress import Progress
from nlpconvert.triton import endpoints

START = 120.0
"""Seconds that a server may take to load its models."""
STOP = 15.0
_BACKEND_MISSING = re.compile(r"unable to find (?:backend library|'?libtriton_)[^|]*", re.IGNORECASE)


class BackendMissing(CannotRunHere):
    """The server has no backend of the kind that the repository asks for."""


class DidNotStart(CannotRunHere):
    """The server ended or was not ready in time. `refused`: it is the repository that it would not take."""

    def __init__(self, message: str, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


def find(given: Path | None) -> Path:
    """The tritonserver to start: the one given, else on PATH. MissingPackage where there is none."""
    if given is not None:
        if not (given.is_file() and os.access(given, os.X_OK)):
            raise MissingPackage(f"--tritonserver {given} is no program that can be started")
        return given.absolute()
    found = shutil.which("tritonserver")
    if found is None:
        raise MissingPackage("there is no tritonserver on PATH: give --tritonserver PATH, or ask one that runs by "
                             "`nlpconvert verify OUT --endpoint http://HOST:8000/MODEL`")  # fmt: skip
    return Path(found).absolute()


@contextlib.contextmanager
def running(binary: Path, repo: Path, progress: Progress, start: float = START) -> Iterator[tuple[int, int]]:
    """A Triton on the loopback that serves `repo`, ready: its HTTP and its gRPC port. Stopped on leaving, whatever
    happened, with all of its processes and their shared memory.
    """
    from nlpconvert.backends import served

    http, grpc = endpoints.free_port(), endpoints.free_port()
    region = f"nlpconvert-{os.getpid()}-{http}"
    command = [
        str(binary),
        f"--model-repository={repo.absolute()}",
        "--http-address=127.0.0.1",
        f"--http-port={http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc}",
        "--allow-metrics=false",
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={region}",
    ]
    progress.start("start tritonserver")
    patience = 0.0
    with tempfile.TemporaryFile() as log:
        # A session of its own: Ctrl-C reaches us, and we stop it with every process that it has started.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            _wait(process, served.HttpClient(endpoints.Place("http", "127.0.0.1", http, "-"), 5.0), log, start)
            yield http, grpc
            patience = STOP
        finally:
            # Interrupted, or lost on the way: nobody waits for answers that are still out.
            stop(process, patience)
            for left in Path("/dev/shm").glob(f"{region}*"):
                left.unlink(missing_ok=True)


def stop(process: subprocess.Popen[bytes], seconds: float = STOP) -> None:
    """Ends a process that leads a group, and its group: asked first, killed after `seconds`, and gone on return."""
    try:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    finally:  # a second Ctrl-C does not leave it running
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        end = time.monotonic() + 2.0
        while _alive(process.pid) and time.monotonic() < end:
            time.sleep(0.01)


def _alive(group: int) -> bool:
    """Whether a process of the group still runs; one that nobody has asked after (a zombie) does not."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def _wait(process: subprocess.Popen[bytes], client: Any, log: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    try:
        while process.poll() is None:
            with contextlib.suppress(endpoints.Unreachable):
                if client.ready():
                    return
            if time.monotonic() > end:
                raise DidNotStart(f"tritonserver was not ready within {seconds:g} s: {_said(log)}", refused=False)
            time.sleep(0.05)
    finally:
        client.close()
    said = _log(log)
    missing = _BACKEND_MISSING.search(said)
    if missing:
        raise BackendMissing(first_line(RuntimeError(missing[0])))
    # A package that the server's Python lacks is no fault of the repository.
    refused = "failed to load" in said and "ModuleNotFoundError" not in said
    raise DidNotStart(f"tritonserver did not start: {_said(log)}", refused=refused)


def _log(log: Any) -> str:
    log.seek(0)
    text: str = log.read().decode("utf-8", "replace")
    return text


def _said(log: Any) -> str:
    """What the server complained of, in one line."""
    lines = [line for line in _log(log).splitlines() if line.strip()]
    failed = [line.strip("| ") for line in lines if "UNAVAILABLE" in line]
    errors = [re.sub(r"^E\d+ \S+ \d+ ", "", line) for line in lines if re.match(r"E\d{4} ", line)]
    last = (failed or errors or lines or ["it said nothing"])[0 if failed or errors else -1]
    return first_line(RuntimeError(re.sub(r"\s+", " ", last)), 400)

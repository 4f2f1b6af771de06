"""Floor 0: how long work says where it is, and where the noise of libraries goes.

The terminal's half (bars, plain lines) is `cli`; a library call without a Progress is silent.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class Progress(Protocol):
    """What long work calls."""

    def start(self, what: str, total: int | None = None) -> None:
        """A new piece of work begins; `total` counts its parts where they are known."""
        ...

    def advance(self, by: int = 1) -> None:
        """`by` parts of it are done."""
        ...

    def line(self, text: str) -> None:
        """A line for the person that stays."""
        ...


class Silent:
    """The Progress of a library call."""

    def start(self, what: str, total: int | None = None) -> None:
        """Says nothing."""

    def advance(self, by: int = 1) -> None:
        """Says nothing."""

    def line(self, text: str) -> None:
        """Says nothing."""


@contextlib.contextmanager
def captured(log: Path) -> Iterator[None]:
    """Sends everything that this process writes to its standard output and error into `log` (appended), native code
    too.

    Exporters and builders write whole graphs there. What was written on a descriptor duplicated before goes on as it
    was.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    streams = (sys.stdout, sys.stderr)
    with log.open("ab") as file:
        _flush(streams)
        saved = [os.dup(1), os.dup(2)]
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            # A stream that is not the descriptor itself (a notebook's, a test's) is sent along.
            with contextlib.redirect_stdout(_Descriptor(1)), contextlib.redirect_stderr(_Descriptor(2)):
                yield
        finally:
            _flush(streams)
            for number, before in zip((1, 2), saved, strict=True):
                os.dup2(before, number)
                os.close(before)


class _Descriptor(io.TextIOBase):
    """Text to whatever a file descriptor leads to at the time.

    Never closed: a logger that is made while noise is captured keeps the stream it found, and writes to it later.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        os.write(self._number, text.encode("utf-8", "replace"))
        return len(text)


def _flush(streams: tuple[object, ...]) -> None:
    for stream in streams:
        flush = getattr(stream, "flush", None)
        if flush is not None:
            flush()

"""Floor 5: what a person sees while work goes on and when it is done: a bar, plain lines, a table.

What the lines say is `report`. Rich is imported by what uses it, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any


class Stop:
    """Ctrl-C and SIGTERM (`docker stop`, a cancelled CI job) as KeyboardInterrupt, and remembered.

    An exception that a signal raises inside a finalizer or a callback is printed and dropped by Python; long work asks
    again at its next word to the person.
    """

    def __init__(self) -> None:
        self.asked = False
        with contextlib.suppress(ValueError):  # not in the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._signal)

    def _signal(self, *_: object) -> None:
        self.asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raises KeyboardInterrupt when it was asked for at any time."""
        if self.asked:
            raise KeyboardInterrupt


def open_streams() -> None:
    """Makes standard output and error safe to write to, whatever the shell did with them.

    One that was closed (`2>&-`) leads nowhere: else the next file to be opened would take its number. A letter that the
    terminal's encoding lacks is written as its number.
    """
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


COLOURS = {"agrees": "green", "DRIFT": "bold red", "FAILED": "bold red", "not run": "yellow"}
"""What a verdict begins with, and how it is shown."""
ALARMS = {word: COLOURS[word] for word in ("DRIFT", "FAILED")}


def table(
    stream: Any,
    header: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    *,
    numbers: Collection[str] = ("size", "seconds"),
    colours: Mapping[str, str] = COLOURS,
) -> None:
    """Prints a table, `numbers` at the right of their columns; a verdict has a colour where `stream` is a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        grid.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        verdict = row.get("verdict", "")
        style = next((style for word, style in colours.items() if verdict.startswith(word)), "")
        grid.add_row(*(Text(row[name], style=style if name == "verdict" else "") for name in header))
    # Not on a terminal (a CI log, a file) a line is as long as it needs to be.
    console = Console(file=stream, width=None if stream.isatty() else 160, highlight=False)
    console.print(grid)


class Terminal:
    """The Progress of a person: a bar on a terminal, plain lines elsewhere, nothing when quiet. Writes to standard
    error.

    It writes to a duplicate of the descriptor, because the descriptor itself is sent to a log while exporters talk.
    """

    stop_asked: Stop | None = None

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self._file = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
        self._bar: Any = None
        self._task: Any = None
        if not quiet and self._file.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(file=self._file), transient=True)
            self._bar.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._file.close()

    def start(self, what: str, total: int | None = None) -> None:
        """A new piece of work."""
        self._check()
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total)
        elif not self.quiet:
            print(f"{what} ..." if total is None else f"{what}, {total} cases ...", file=self._file)

    def advance(self, by: int = 1) -> None:
        """Parts of it are done."""
        self._check()
        if self._bar is not None:
            self._bar.advance(self._task, by)

    def line(self, text: str) -> None:
        """A line that stays."""
        self._check()
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        elif not self.quiet:
            print(text, file=self._file)

    def _check(self) -> None:
        if Terminal.stop_asked is not None:
            Terminal.stop_asked.check()

    def stop(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

"""Floor 0: the errors of the house and the exit codes they end in.

    NlpconvertError                 anything a person is told in one line
    ├── UsageError           2      the command line or the input is wrong
    ├── ConversionError      3      an exporter or a builder failed
    ├── DriftError           1      an artifact drifted, is not what its hash says, or compares nothing
    ├── CannotRunHere        4      an artifact could not be run on this machine
    │   └── OutOfProfile     4      a batch lies outside the shapes that an engine was built for
    └── MissingPackage       5      a named package or device is missing

An error's first argument is one line: what was wrong, where, and what to do next. `detail` may hold more lines.
Nothing here knows the terminal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExitCode:
    """One row of the table that `--help` and the README show."""

    code: int
    name: str
    meaning: str


EXIT_CODES: tuple[ExitCode, ...] = (
    ExitCode(0, "agrees", "every step that was asked for agrees with PyTorch, or was forgiven by name"),
    ExitCode(1, "drift", "an artifact drifted, is not what its hash says, or compares nothing"),
    ExitCode(2, "usage", "the command line or the input is wrong; nothing was done"),
    ExitCode(3, "failed", "a conversion failed"),
    ExitCode(4, "unverified", "an artifact could not be run here and is unverified"),
    ExitCode(5, "missing", "a named package or device is missing; nothing was done"),
    ExitCode(130, "interrupted", "stopped by Ctrl-C; no half artifact is left"),
)

# Worst first: what a run of several steps ends in.
SEVERITY: tuple[int, ...] = (3, 1, 4, 0)


def worst(codes: list[int]) -> int:
    """The exit code of several steps together: the worst of 3, 1, 4, 0 (0 when there are none)."""
    return min(codes, key=SEVERITY.index, default=0)


def first_line(error: BaseException, limit: int = 200) -> str:
    """The first line of an error's words, for a person, cut at `limit` characters."""
    return next((line.strip()[:limit] for line in str(error).splitlines() if line.strip()), "no message")


class NlpconvertError(Exception):
    """Base of all: one line for a person, an exit code, and more detail where it helps."""

    exit_code = 1

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class UsageError(NlpconvertError):
    """The command line, a file or a model given by the user is wrong."""

    exit_code = 2


class ConversionError(NlpconvertError):
    """An exporter, a compiler or a builder failed on a valid input."""

    exit_code = 3


class DriftError(NlpconvertError):
    """An artifact's answers moved too far, or it is not the file that was verified."""

    exit_code = 1


class CannotRunHere(NlpconvertError):
    """An artifact is sound as far as can be told, but this machine cannot run it."""

    exit_code = 4


class OutOfProfile(CannotRunHere):
    """One batch lies outside the engine's profile; batches inside it can still be run."""


class MissingPackage(NlpconvertError):
    """A package or device that the user named is missing; the message names the extra that brings it."""

    exit_code = 5

"""Benchmarks: how long a person waits for `nlpconvert --help`, against importing typer, which it stands on."""

from __future__ import annotations

from measure import Result, Settings, child, in_turns, row

TITLE = "Start-up"
TARGET = 3.0


def measure(settings: Settings) -> Result:
    """Fresh processes in turns; a first round, which fills the caches, does not count."""
    sides = {
        "ours": lambda: child(["-m", "nlpconvert", "--help"]),
        "typer": lambda: child(["-c", "import typer"]),
        "python": lambda: child(["-c", "pass"]),
    }
    in_turns(sides, 1)
    found = in_turns(sides, settings.times(15))
    return Result(
        (
            row("`nlpconvert --help` / `import typer`", found["ours"], found["typer"], TARGET),
            row("`nlpconvert --help` / an empty program", found["ours"], found["python"]),
        )
    )

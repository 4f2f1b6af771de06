"""Floor 3: `run`, `convert_step` and `verify`, the house's public functions; the command line is a thin coat over them.

What is asked and refused beforehand is `plan`, the run itself `line`, how an artifact is judged `judging`. They are
imported inside the functions, and with them numpy and all that is heavy.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert import memory, plan
from nlpconvert.artifact import FOREIGN, STEPS, Outcome
from nlpconvert.errors import NlpconvertError, worst
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, Silent

if TYPE_CHECKING:
    from nlpconvert.comparing import diff
    from nlpconvert.foreign import verify as verify_foreign
    from nlpconvert.generating import generate
    from nlpconvert.locating import locate
    from nlpconvert.settings import Settings
    from nlpconvert.settings import read as read_settings
    from nlpconvert.verifying import Wishes

__all__ = [
    "NlpconvertError",
    "Options",
    "Outcome",
    "Wishes",
    "convert_step",
    "diff",
    "exit_code",
    "generate",
    "locate",
    "read_settings",
    "run",
    "verify",
    "verify_foreign",
]


# ---- the public functions -------------------------------------------------------------------------------------------


def run(
    model: str,
    out: Path | str,
    *,
    to: Sequence[str] | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    settings: Settings | None = None,
) -> list[Outcome]:
    """Converts `model` (a directory or hub id) into `out` step by step, each judged before the next, and records all
    of it.

    `to`: names of steps; parents that are missing are made too. None: every step for which a builder is installed.
    `settings`: tolerances of steps, outputs and cases (`nlpconvert.settings`); what the options give goes before them.
    Stops at the first step that fails or drifts unless `keep_going`. Raises UsageError and MissingPackage before any
    work; what happens to a step is told by its Outcome.
    """
    with memory.uncollected():
        from nlpconvert.line import Line

        line = Line(str(model), Path(out), options or Options(), progress or Silent(), settings)
        return list(line.run(to))


def convert_step(
    step: str,
    model: str,
    out: Path | str,
    *,
    options: Options | None = None,
    progress: Progress | None = None,
    settings: Settings | None = None,
) -> list[Outcome]:
    """Makes one step and, where they are not there yet, the steps it is made from."""
    return run(model, out, to=[step], options=options, progress=progress, settings=settings)


def verify(
    out: Path | str,
    *,
    steps: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    settings: Settings | None = None,
    wishes: Wishes | None = None,
) -> list[Outcome]:
    """Re-runs what lies in `out` against its goldens; needs neither torch (but for TorchScript) nor the model.

    `steps`, `cases`: names; None for all. Tolerances that were given when a step was made hold again unless others are
    given now or in `settings` (`nlpconvert.settings`). `wishes`: what is to be done besides. Nothing is written. A file
    whose hash has changed is a drift, before it is opened. A runtime that is missing is "not run". Raises UsageError
    for a name that is not there, DriftError for changed goldens.
    """
    from nlpconvert import verifying
    from nlpconvert.settings import Settings

    return verifying.verify(
        Path(out),
        steps,
        cases,
        options or Options(),
        progress or Silent(),
        settings or Settings(),
        wishes or verifying.Wishes(),
    )


def forgivable(names: Sequence[str]) -> tuple[str, ...]:
    """The steps that --allow-unverified names. UsageError for a name that is no step."""
    plan.check_step_names(names, (*STEPS, FOREIGN))
    return tuple(names)


def exit_code(outcomes: Iterable[Outcome], allow_unverified: Sequence[str] = ()) -> int:
    """The exit code of all outcomes together.

    `allow_unverified` names steps that may be "not run"; when nothing at all was verified it stays 4.
    """
    outcomes = list(outcomes)
    codes = [o.exit_code for o in outcomes if not (o.status == "not run" and o.step in allow_unverified)]
    if any(o.status == "not run" for o in outcomes) and not any(o.status in ("agrees", "drift") for o in outcomes):
        codes.append(4)
    return worst(codes)


def __getattr__(name: str) -> Any:
    """What is public here and lives elsewhere: imported when it is asked for, for it brings numpy."""
    rooms = {
        "Wishes": ("verifying", "Wishes"),
        "verify_foreign": ("foreign", "verify"),
        "locate": ("locating", "locate"),
        "diff": ("comparing", "diff"),
        "read_settings": ("settings", "read"),
        "generate": ("generating", "generate"),
    }
    if name not in rooms:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room, own = rooms[name]
    return getattr(importlib.import_module(f"nlpconvert.{room}"), own)

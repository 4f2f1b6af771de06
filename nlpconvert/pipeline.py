"""Floor 3: `run`, `convert_step` and `verify`, the house's public functions; the command line is a thin coat over them.

What is asked and refused beforehand is `plan`, the run itself `line`, how an artifact is judged `judging`. They are
imported inside the functions, and with them numpy and all that is heavy.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nlpconvert import manifest, memory, plan
from nlpconvert.artifact import Outcome
from nlpconvert.errors import DriftError, NlpconvertError, UsageError, worst
from nlpconvert.manifest import Manifest
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, Silent

if TYPE_CHECKING:
    from nlpconvert.judging import Probes
    from nlpconvert.validators.tolerance import Tolerance

__all__ = ["NlpconvertError", "Options", "Outcome", "convert_step", "exit_code", "run", "verify"]


# ---- the public functions -------------------------------------------------------------------------------------------


def run(
    model: str,
    out: Path | str,
    *,
    to: Sequence[str] | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Converts `model` (a directory or hub id) into `out` step by step, each judged before the next, and records all
    of it.

    `to`: names of steps; parents that are missing are made too. None: every step for which a builder is installed.
    Stops at the first step that fails or drifts unless `keep_going`. Raises UsageError and MissingPackage before any
    work; what happens to a step is told by its Outcome.
    """
    with memory.uncollected():
        from nlpconvert.line import Line

        return list(Line(str(model), Path(out), options or Options(), progress or Silent()).run(to))


def convert_step(
    step: str,
    model: str,
    out: Path | str,
    *,
    options: Options | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Makes one step and, where they are not there yet, the steps it is made from."""
    return run(model, out, to=[step], options=options, progress=progress)


def verify(
    out: Path | str,
    *,
    steps: Sequence[str] | None = None,
    cases: Sequence[str] | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Re-runs what lies in `out` against its goldens; needs neither torch (but for TorchScript) nor the model.

    `steps`, `cases`: names; None for all. Tolerances that were given when a step was made hold again unless others are
    given now. Nothing is written. A file whose hash has changed is a drift, before it is opened. A runtime that is
    missing is "not run". Raises UsageError for a name that is not there, DriftError for changed goldens.
    """
    options, progress, out = options or Options(), progress or Silent(), Path(out)
    from nlpconvert import judging

    tolerances = plan.check_words(options)
    record = manifest.read(out)
    chosen = list(record.steps) if steps is None else list(dict.fromkeys(steps))
    plan.check_step_names(chosen, tuple(record.steps), f"in {out} there is")
    if not chosen:
        raise DriftError(f"{out} holds no step yet, so nothing was compared; make one with `nlpconvert run`")
    changed = manifest.tampered(record, manifest.GOLDEN, out)
    if changed:
        raise DriftError(f"{out}: {changed[0]} since it was recorded, so nothing can be judged by it; restore it")
    probes = judging.stored_probes(record, out, cases)
    return [_reverify(record, step, out, probes, tolerances, options, progress) for step in chosen]


def forgivable(names: Sequence[str]) -> tuple[str, ...]:
    """The steps that --allow-unverified names. UsageError for a name that is no step."""
    plan.check_step_names(names)
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


def _reverify(
    record: Manifest,
    step: str,
    out: Path,
    probes: Probes,
    tolerances: Sequence[Tolerance],
    options: Options,
    progress: Progress,
) -> Outcome:
    from nlpconvert import judging

    started = time.perf_counter()
    kept = record.record(step).outcome
    if kept.artifact is None:
        return Outcome(step, kept.status, kept.reason)
    outcome = replace(record.outcome(step, out), verdict=None, reason="", seconds=0.0)
    changed = manifest.tampered(record, step, out)
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        reason = f"{'; '.join(changed[:3])}{more} since it was verified; it was not opened"
        return replace(outcome, status="drift", reason=reason)
    above = kept.artifact.parent
    broken = "" if record.record(step).stale else manifest.broken_chain(record, step)
    if broken:
        return replace(outcome, status="drift", reason=f"{broken}; it was not opened")
    if record.record(step).stale:
        reason = f"it is stale: {above}, from which it was made, was replaced since"
        return replace(outcome, status="drift", reason=reason)
    parent = None
    if above != "source":
        altered = manifest.tampered(record, above, out)
        if altered:
            note = f"not compared with {above}, from which it was made: {altered[0]}"
            outcome = replace(outcome, notes=(*outcome.notes, note))
        else:
            parent = record.artifact(above, out)
    given = tolerances or _given(record, step)
    outcome, _ = judging.judged(outcome, record, probes, given, options, progress, parent)
    return replace(outcome, seconds=time.perf_counter() - started)


def _given(record: Manifest, step: str) -> Sequence[Tolerance]:
    """The tolerances that a person gave when the step was made, so that its verdict can be had again."""
    from nlpconvert.validators.tolerance import Tolerance

    try:
        kept = [Tolerance.from_dict(each) for each in record.record(step).tolerances]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the manifest's tolerances of {step} cannot be read ({error}); give --tolerance") from error
    return list(dict.fromkeys(each.asked() for each in kept if each.given))

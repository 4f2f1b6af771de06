"""Floor 3: recorded measurements, judged by another tolerance than the one they were judged by; nothing is run.

What was kept of an output answers for its cosine (of the worst vector), its changed decisions and its divergence,
whatever the bound; a tolerance that judges every element is refused. Whether an artifact that always gave the first
answer would pass the new bound is asked of the goldens, as it is when an artifact is judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nlpconvert import judging, manifest, models
from nlpconvert.artifact import Outcome
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.judging import Bounds, Probes
from nlpconvert.manifest import Manifest
from nlpconvert.models import OutputRow
from nlpconvert.validators.baseline import Baseline
from nlpconvert.validators.findings import CaseDrift, Comparison, OutputDiff, plain
from nlpconvert.validators.scored import blocks, scored_by
from nlpconvert.validators.tally import WIDE_CHANGE, gross
from nlpconvert.validators.tolerance import Tolerance

RUN = "run verify without --recheck"


def recheck(record: Manifest, step: str, out: Path, given: Sequence[Tolerance] | Bounds) -> Outcome:
    """The outcome of a recorded step, had it been judged by `given`.

    An output that none of them is meant for keeps the bound it was judged by, and its verdict. A step whose files are
    not those that were measured, or that is stale, is a drift.

    Raises UsageError where the record cannot answer: the step was never measured or was measured with other probes, a
    tolerance judges every element, its measure was not kept, or it is one case's and that was not judged by it;
    DriftError when the goldens have changed.
    """
    asked = given if isinstance(given, Bounds) else Bounds(given)
    kept = record.record(step).outcome
    if kept.artifact is None or kept.verdict is None:
        why = f"{kept.status}{kept.reason and ': ' + kept.reason}"
        raise UsageError(f"{step} holds no measurements to judge anew ({why}): {RUN}")
    if not asked.given and not asked.outputs:
        raise UsageError("--recheck judges recorded measurements by another tolerance: give it with --tolerance")
    outcome = replace(record.outcome(step, out), seconds=0.0)
    changed = manifest.tampered(record, step, out)
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        reason = f"{'; '.join(changed[:3])}{more} since it was measured: these measurements are not its own"
        return replace(outcome, status="drift", reason=reason, verdict=None)
    stale = f"it is stale: {kept.artifact.parent}, from which it was made, was replaced since"
    broken = stale if record.record(step).stale else manifest.broken_chain(record, step)
    if broken:
        return replace(outcome, status="drift", reason=broken, verdict=None)
    if kept.verdict.get("probe_sha256") != record.golden.probe_sha256:
        raise UsageError(f"{step} was measured with other probes than those that lie in {out}: {RUN}")
    try:
        before = Comparison.from_dict(kept.verdict["comparison"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the verdict of {step} cannot be read ({type(error).__name__}: {error}): {RUN}") from error
    rows = models.facts_from_data(record.facts).outputs
    bounds = _bounds(step, before, rows, asked, kept.artifact.precision, str(kept.verdict.get("provider")))
    probes = _probes(record, out) if bounds else None
    diffs = tuple(
        _rejudged(step, diff, bounds[diff.name], _row(rows, diff.name), probes)
        if probes is not None and diff.name in bounds and not diff.only
        else diff
        for diff in before.outputs
    )
    after = replace(before, outputs=diffs)
    structure = kept.verdict.get("structure") or ()
    # What failed for another reason than its numbers still does.
    otherwise = kept.status != "agrees" and before.agrees and not structure
    agrees = after.agrees and not structure and not otherwise
    return replace(
        outcome,
        status="agrees" if agrees else "drift",
        reason=kept.reason if otherwise else "",
        verdict={
            **kept.verdict,
            "comparison": after.to_dict(),
            "recheck": {**_told(record, outcome, bounds), "unnumbered": _unnumbered(before, after)},
        },
        notes=(*outcome.notes, _sentence(record, outcome, bounds)),
    )


def _bounds(
    step: str, before: Comparison, rows: Sequence[OutputRow], asked: Bounds, precision: str, provider: str
) -> dict[str, Tolerance]:
    """The outputs that are judged by another bound than they were, and by which. UsageError for what was not kept."""
    noise = {diff.name: diff.noise for diff in before.outputs if diff.noise is not None}
    wanted = {name: bound for name, bound in asked.choose(rows, precision, provider, noise).items() if bound.given}
    found: dict[str, Tolerance] = {}
    for diff in before.outputs:
        bound = diff.tolerance if diff.only else wanted.get(diff.name, diff.tolerance)
        if _same(bound, diff.tolerance):
            continue
        if bound.measure not in ("cosine", "changed", "kl"):
            raise UsageError(
                f"{step}: {bound.text} judges every element of {diff.name}, and only the worst of each output is kept: "
                f"{RUN}"
            )
        found[diff.name] = bound
    for case, own in asked.of_cases(tuple(asked.cases), rows, precision, provider, noise).items():
        for diff in (diff for diff in before.outputs if diff.only in ("", case) and diff.name in own):
            if own[diff.name].given and case in diff.cases and not _same(own[diff.name], diff.tolerance):
                text = own[diff.name].text
                raise UsageError(f"{step}: {text} of the case {case} alone cannot be told from what is kept: {RUN}")
    return found


def _same(first: Tolerance, second: Tolerance) -> bool:
    return (first.measure, first.value) == (second.measure, second.value)


def _row(rows: Sequence[OutputRow], name: str) -> OutputRow:
    return next(row for row in rows if row.name == name)


def _probes(record: Manifest, out: Path) -> Probes:
    changed = manifest.tampered(record, manifest.GOLDEN, out)
    if changed:
        raise DriftError(f"{out}: {changed[0]} since it was recorded, so nothing can be judged by it; restore it")
    return judging.stored_probes(record, out)


def _rejudged(step: str, diff: OutputDiff, bound: Tolerance, row: OutputRow, probes: Probes) -> OutputDiff:
    """One output, by another bound."""
    was, now = (_constant(row, diff, each, probes) for each in (diff.tolerance, bound))
    before = {was, gross(diff.relative_l2, diff.tolerance.measure)}
    problems, notes = ([each for each in told if each not in before] for told in (diff.problems, diff.notes))
    measured = _kept(diff, bound.measure)
    sound = bool(diff.elements) and not problems and not diff.nonfinite
    if measured is None and sound:
        raise UsageError(f"{step}: {bound.measure} of {diff.name} was not kept: {RUN}")
    if now:
        wide = bound.measure == "changed" and bound.value >= WIDE_CHANGE
        (problems if bound.measure in ("cosine", "kl") or wide else notes).append(now)
    factor = gross(diff.relative_l2, bound.measure)
    if factor:
        problems.append(factor)
    sound = sound and not problems
    measured = math.nan if measured is None else measured
    single = diff.worst_case_score if bound.measure == diff.tolerance.measure else None
    return replace(
        diff,
        tolerance=bound,
        agrees=sound and bound.holds(measured),
        measured=measured,
        used=bound.used(measured) if sound else math.inf,
        would_pass_at=diff.would_pass_at if sound else {},
        out_of_tolerance=_out(diff, bound, measured),
        worst_case_score=single,
        cases=_cases(diff, bound),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _kept(diff: OutputDiff, measure: str) -> float | None:
    """An output's number in a measure, None where it was not kept."""
    if measure == diff.tolerance.measure:
        return diff.measured if math.isfinite(diff.measured) else None
    return diff.would_pass_at.get(measure)


def _out(diff: OutputDiff, bound: Tolerance, measured: float) -> int:
    """How many are out of tolerance. Of vectors past another bound only the least is known: the worst one, or none."""
    if bound.measure == "changed":
        return diff.decisions.changed if diff.decisions else 0
    return 0 if bound.holds(measured) else 1


def _cases(diff: OutputDiff, bound: Tolerance) -> dict[str, CaseDrift]:
    """The cases by the new bound. What a case used up of a bound of another measure was not kept: it is left out."""
    old = diff.tolerance
    allowed, before = (1 - each.value if each.direction == ">=" else each.value for each in (bound, old))
    found: dict[str, CaseDrift] = {}
    for name, case in diff.cases.items():
        if math.isinf(case.used) and not case.scored:
            found[name] = case  # it could not be compared at all
        elif bound.measure == old.measure and before > 0:
            spent = case.used * before
            used = spent / allowed if allowed > 0 else math.inf if spent > 0 else 0.0
            found[name] = replace(case, used=used)
    return found


def _unnumbered(before: Comparison, after: Comparison) -> dict[str, dict[str, object]]:
    """By output, the cases that were compared and have no number by the new bound, so that none counts as lost."""
    found = {
        old.name: {name: replace(case, used=math.nan) for name, case in old.cases.items() if name not in new.cases}
        for old, new in zip(before.outputs, after.outputs, strict=True)
        if not old.only
    }
    return {name: dict(plain(cases)) for name, cases in found.items() if cases}


def _constant(row: OutputRow, diff: OutputDiff, bound: Tolerance, probes: Probes) -> str:
    """What is wrong with a bound that an artifact passes which always gives the first answer; "" where nothing is."""
    constant = Baseline(diff.scale, bound)
    for case in probes.cases:
        reference = probes.answers.get(case.name, {}).get(row.name)
        if reference is None or case.name not in diff.cases:
            continue
        shape = np.broadcast_to(np.zeros((), reference.values.dtype), reference.shape)
        try:
            mask = scored_by(case, row, reference)
        except ValueError:
            continue  # it could not be judged then either
        for block in blocks(row, reference, shape, mask):
            constant.add(np.where(np.isfinite(block.reference), block.reference, 0.0))
    return constant.verdict()


def _told(record: Manifest, outcome: Outcome, bounds: Mapping[str, Tolerance]) -> dict[str, object]:
    """What was judged anew and what the measurements are, as plain data."""
    verdict = outcome.verdict or {}
    return {
        "bounds": {name: bound.text for name, bound in bounds.items()},
        "recorded": record.created,
        "host": verdict.get("host"),
        "provider": verdict.get("provider"),
    }


def _sentence(record: Manifest, outcome: Outcome, bounds: Mapping[str, Tolerance]) -> str:
    verdict = outcome.verdict or {}
    host = verdict.get("host") or {}
    where = ", ".join(str(each) for each in (host.get("cpu"), verdict.get("provider")) if each)
    by = ", ".join(f"{name} by {bound.text}" for name, bound in bounds.items()) or "every output by the bound it had"
    return f"nothing was run: {by}, from the measurements recorded on {where or 'a machine that is not told'}" + (
        f", in the manifest of {record.created}"
    )

"""Floor 3: what is recorded, held against what was recorded before; nothing is run.

`diff` takes two manifests, `against_baseline` fresh outcomes and a manifest. What counts as worse is
`validators/regression`'s to say, the wording of a difference `report_diff`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nlpconvert import manifest
from nlpconvert.artifact import Outcome
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.manifest import Manifest
from nlpconvert.validators import overlap, regression
from nlpconvert.validators.findings import Comparison, plain
from nlpconvert.validators.regression_rules import Regression

SAID = 3
"""So many regressions are told in an outcome's reason; the verdict holds all."""


def read(path: Path | str) -> Manifest:
    """The manifest of an OUT, or one that stands as a file by itself. UsageError when it cannot be read."""
    path = Path(path)
    if path.is_dir():
        return manifest.read(path)
    return manifest.read_file(
        path,
        missing=f"{path} is not there; give a directory that nlpconvert has made, or its manifest",
        advice="give a directory that nlpconvert has made",
    )


# ---- two manifests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """One fact that is not the same: None where a side does not have it."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class OutputChange:
    """One output of a step on both sides; None on a side where it was not compared.

    `measured` and `used` are in the measure of each side's own `bound` ("cosine>=0.99").
    """

    name: str
    measured_before: float | None
    measured_after: float | None
    used_before: float | None
    used_after: float | None
    bound_before: str | None
    bound_after: str | None
    loosened: bool


@dataclass(frozen=True)
class StepChange:
    """One step on both sides. `status_*`: None on a side that does not have it, "stale" where its parent was replaced.

    `files`: what differs among the artifact's files, None where one side made none; empty: the same bytes. `worse` is
    what the gate would say; `unreadable` why nothing could be said of the numbers. `probes`: hash and number of cases
    that each side was measured with, None where there is no verdict; `shared`: where they are not the same and can be
    compared all the same, how many cases both have and were held against each other.
    """

    step: str
    status_before: str | None
    status_after: str | None
    reason: str
    files: tuple[str, ...] | None
    bytes_before: int | None
    bytes_after: int | None
    outputs: tuple[OutputChange, ...] = ()
    worse: tuple[Regression, ...] = ()
    unreadable: str = ""
    probes: Change = Change("probes", None, None)
    shared: int | None = None

    @property
    def other_probes(self) -> bool:
        """Whether both sides were measured, and not with the same probes."""
        change = self.probes
        return bool(change.before and change.after and change.before != change.after)

    @property
    def lost(self) -> bool:
        """Whether it agreed, and does not any more."""
        return self.status_before == "agrees" and self.status_after != "agrees"

    @property
    def same(self) -> bool:
        """Whether nothing is to be told of it."""
        return (
            self.status_before == self.status_after
            and not self.files
            and not self.worse
            and not self.unreadable
            and not self.other_probes
            and all(
                (o.measured_before, o.bound_before) == (o.measured_after, o.bound_after) and not o.loosened
                for o in self.outputs
            )
        )


@dataclass(frozen=True)
class Difference:
    """Two manifests, held against each other; steps worst first.

    `versions` are of packages, `host` of the machine on which the manifests were made ("cpu flags lost" and "gained"
    among them); both hold what changed only. `probes`: hash and number of cases of each side's goldens; a step may
    have been measured with others, before more joined.
    """

    old: str
    new: str
    created: tuple[str, str]
    task: Change
    checkpoint: Change
    probes: Change
    versions: tuple[Change, ...]
    host: tuple[Change, ...]
    steps: tuple[StepChange, ...]

    @property
    def differs(self) -> bool:
        """Whether what is told of model and artifacts is not the same: task, checkpoint, probes or any step.

        Versions, machine and times are circumstances: by themselves they are no difference.
        """
        facts = (self.task, self.checkpoint, self.probes)
        return any(each.before != each.after for each in facts) or not all(step.same for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        found: dict[str, Any] = plain(self)
        return found


def diff(old: Path | str, new: Path | str) -> Difference:
    """Two OUTs or manifests held against each other. UsageError when one cannot be read."""
    before, after = read(old), read(new)
    names = list(dict.fromkeys((*before.steps, *after.steps)))
    steps = [_step(name, before, after) for name in names]
    return Difference(
        old=str(old),
        new=str(new),
        created=(before.created, after.created),
        task=Change("task", before.task, after.task),
        checkpoint=Change("checkpoint", before.source_sha256, after.source_sha256),
        probes=Change("probes", _probes(before), _probes(after)),
        versions=_changes(_versions(before), _versions(after)),
        host=_host_changes(before.host, after.host),
        steps=tuple(sorted(steps, key=_badness)),
    )


def _probes(record: Manifest) -> str:
    return _asked(record.golden.probe_sha256, len(record.golden.cases))


def _asked(sha256: str, count: int) -> str:
    return f"{sha256} ({count} case{'' if count == 1 else 's'})"


def _versions(record: Manifest) -> dict[str, str]:
    return {"nlpconvert": record.nlpconvert, **record.versions}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """What is not the same, by name."""
    names = dict.fromkeys((*before, *after))
    return tuple(
        Change(name, *(None if name not in side else str(side[name]) for side in (before, after)))
        for name in names
        if before.get(name) != after.get(name)
    )


def _host_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """What is not the same of two machines; the processor's flags as those that were lost and gained."""
    plain_before, plain_after = ({k: v for k, v in side.items() if k != "cpu_flags"} for side in (before, after))
    flags, later = ([str(f) for f in side.get("cpu_flags") or ()] for side in (before, after))
    lost, gained = [f for f in flags if f not in later], [f for f in later if f not in flags]
    found = list(_changes(plain_before, plain_after))
    if lost and later:
        found.append(Change("cpu flags lost", " ".join(lost), None))
    if gained and flags:
        found.append(Change("cpu flags gained", None, " ".join(gained)))
    return tuple(found)


def _step(name: str, before: Manifest, after: Manifest) -> StepChange:
    old, new = before.steps.get(name), after.steps.get(name)
    was, now = (None if record is None else record.outcome for record in (old, new))
    outputs: tuple[OutputChange, ...] = ()
    worse: tuple[Regression, ...] = ()
    unreadable = ""
    shared: int | None = None
    if was and now and was.verdict is not None and now.verdict is not None:
        try:
            same = before.source_sha256 == after.source_sha256
            worse = regression.regressions(was.verdict, now.verdict, "the old one", same_source=same)
            asked = overlap.probes(was.verdict, now.verdict)
            shared = None if asked.shared is None else len(asked.shared)
            outputs = tuple(_outputs(was.verdict, now.verdict, same and asked.shared is None and not asked.why_not))
        except UsageError as error:
            unreadable = str(error)
    files = None
    if was and now and was.artifact is not None and now.artifact is not None:
        files = tuple(_files(was.artifact.files, now.artifact.files))
    return StepChange(
        step=name,
        status_before=None if was is None else "stale" if old and old.stale else was.status,
        status_after=None if now is None else "stale" if new and new.stale else now.status,
        reason="" if now is None else now.reason,
        files=files,
        bytes_before=None if was is None or was.artifact is None else was.bytes,
        bytes_after=None if now is None or now.artifact is None else now.bytes,
        outputs=outputs,
        worse=worse,
        unreadable=unreadable,
        probes=Change("probes", _measured_with(was), _measured_with(now)),
        shared=shared,
    )


def _measured_with(outcome: Outcome | None) -> str | None:
    """What a step was measured with, by its own verdict."""
    if outcome is None or outcome.verdict is None or not outcome.verdict.get("probe_sha256"):
        return None
    return _asked(str(outcome.verdict["probe_sha256"]), overlap.count(outcome.verdict))


def _files(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            yield f"{name} {'was added' if name not in before else 'is gone' if name not in after else 'has changed'}"


def _outputs(old: Mapping[str, Any], new: Mapping[str, Any], same_noise: bool) -> Iterator[OutputChange]:
    """Outputs of both sides, those that use up most of their tolerance first."""
    sides = [{(o.name, o.only): o for o in Comparison.from_dict(each["comparison"]).outputs} for each in (old, new)]
    found = []
    for key in dict.fromkeys((*sides[1], *sides[0])):
        was, now = (side.get(key) for side in sides)
        change = OutputChange(
            name=f"{key[0]}[{key[1]}]" if key[1] else key[0],
            measured_before=was.measured if was else None,
            measured_after=now.measured if now else None,
            used_before=was.used if was else None,
            used_after=now.used if now else None,
            bound_before=was.tolerance.text if was else None,
            bound_after=now.tolerance.text if now else None,
            loosened=bool(was and now and regression.loosened(was.tolerance, now.tolerance, same_noise=same_noise)),
        )
        found.append(change)
    yield from sorted(found, key=lambda o: -max(o.used_after or 0.0, o.used_before or 0.0))


def _badness(step: StepChange) -> tuple[int, float]:
    """Worst first: no longer agrees, then worse inside the tolerance by how much, then changed, then the same."""
    if step.lost:
        return 0, 0.0
    if step.worse:
        return 1, -max(each.times for each in step.worse)
    return (3 if step.same else 2), 0.0


# ---- fresh outcomes against a baseline ------------------------------------------------------------------------------


def against_baseline(
    outcomes: Sequence[Outcome],
    baseline: Manifest,
    path: Path | str,
    *,
    record: Manifest | None = None,
    asked: Sequence[str] | None = None,
) -> list[Outcome]:
    """The outcomes, where one that is worse than in `baseline` (read from `path`) is a drift, inside its tolerance too.

    `asked`: the steps that were asked for, None for all: a step that agreed in the baseline and is not among the
    outcomes is then added as a drift. What was not run here stays "not run" (it is never a pass), with a note that it
    agreed there. `record`: the manifest of the outcomes, to tell when the checkpoint is another one. Each verdict gets
    "baseline" ({path, compared, reason}, and "cases" where the probes are others: over how many the numbers were held)
    and "regressions".

    Raises UsageError for a baseline of another task or one that cannot be read, DriftError when there were measurements
    and none of them could be held against any of the baseline's: nothing was compared.
    """
    name = f"the baseline {path}"
    tasks = {o.artifact.task for o in outcomes if o.artifact is not None} | ({record.task} if record else set())
    if tasks - {baseline.task}:
        raise UsageError(f"{name} is of the task {baseline.task}, not {', '.join(sorted(tasks - {baseline.task}))}")
    judged = [_held(outcome, baseline, name, record) for outcome in outcomes]
    fresh = [o for o in judged if o.verdict is not None]
    if fresh and not any(o.verdict and o.verdict["baseline"]["compared"] for o in fresh):
        raise DriftError(f"{name} holds no measurements of {', '.join(o.step for o in fresh)}: nothing was compared")
    if asked is None:
        there = {outcome.step for outcome in outcomes}
        for step, kept in baseline.steps.items():
            if step not in there and kept.outcome.status == "agrees" and not kept.stale:
                judged.append(Outcome(step, "drift", f"it agreed in {name}, and is not there any more"))
    return judged


def _held(outcome: Outcome, baseline: Manifest, name: str, record: Manifest | None) -> Outcome:
    """One outcome with what the baseline says to it."""
    kept = baseline.steps.get(outcome.step)
    agreed = kept is not None and kept.outcome.status == "agrees" and not kept.stale
    before = None if kept is None else kept.outcome.verdict
    if outcome.verdict is None:
        if agreed and outcome.status == "skipped":
            return replace(
                outcome, status="drift", reason=f"it agreed in {name}, and is skipped here: {outcome.reason}"
            )
        return _note(outcome, f"it agreed in {name}") if agreed else outcome
    held: dict[str, Any] = {"path": name.removeprefix("the baseline "), "compared": before is not None, "reason": ""}
    if before is None:
        why = "it holds no such step" if kept is None else f"it holds no measurement ({kept.outcome.status})"
        verdict = {**outcome.verdict, "baseline": {**held, "reason": why}, "regressions": []}
        return _note(replace(outcome, verdict=verdict), f"not compared with {name}: {why}")
    new = outcome.verdict
    same = record is None or record.source_sha256 == baseline.source_sha256
    found = regression.regressions(before, new, name, same_source=same)
    asked = overlap.probes(before, new)
    if asked.shared is not None:
        held["cases"] = len(asked.shared)
        outcome = _note(outcome, _over(asked, overlap.uncounted(before, new), name))
    outcome = replace(outcome, verdict={**new, "baseline": held, "regressions": [each.to_dict() for each in found]})
    for line in _circumstances(before, new, baseline, record) if found else ():
        outcome = _note(outcome, line)
    if outcome.status != "agrees":
        # It failed by itself; what is worse stands beside it, in the verdict.
        return _note(outcome, f"it agreed in {name}") if agreed else outcome
    if not found:
        return outcome
    more = f"; and {len(found) - SAID} more" if len(found) > SAID else ""
    return replace(outcome, status="drift", reason="; ".join(each.text for each in found[:SAID]) + more)


def _over(asked: overlap.Probes, uncounted: Sequence[str], name: str) -> str:
    told = f"held against {name} {asked.words} ({asked.before} there, {asked.after} here)"
    if not uncounted:
        return told
    return (
        f"{told}; the changed decisions of {', '.join(uncounted)} cannot be counted over them, and the largest "
        "difference of each case was compared instead"
    )


def _note(outcome: Outcome, line: str) -> Outcome:
    return replace(outcome, notes=(*outcome.notes, line))


def _circumstances(
    old: Mapping[str, Any], new: Mapping[str, Any], baseline: Manifest, record: Manifest | None
) -> Iterator[str]:
    """What else is not as it was for the baseline, and may be why the answers are not."""
    if record is not None and record.source_sha256 != baseline.source_sha256:
        pair = f"{baseline.source_sha256[:12]} there, {record.source_sha256[:12]} here"
        yield f"the baseline is of another checkpoint: {pair}"
    host = _host_changes(old.get("host") or {}, new.get("host") or {})
    changed = [each for each in host if each.name in ("cpu", "machine") or each.name.startswith("cpu flags")]
    runtimes = ("onnxruntime", "onnxruntime-gpu", "torch", "tensorrt", "tensorrt-rtx")
    versions = _changes(old.get("versions") or {}, new.get("versions") or {})
    changed += [each for each in versions if each.name in runtimes]
    if changed:
        told = ", ".join(f"{each.name} {each.before or 'none'} -> {each.after or 'none'}" for each in changed)
        yield f"the baseline was measured elsewhere: {told}"

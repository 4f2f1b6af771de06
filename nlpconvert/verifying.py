"""Floor 3: `verify`: what lies in OUT is run again against its goldens, or its records are judged anew.

Which tolerance holds for what (given now, in a settings file, at conversion) is put together here; what fails is
located, held against a baseline, broken on purpose or scored on labelled data by the rooms that do so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nlpconvert import judging, manifest, models, plan, runtimes
from nlpconvert.artifact import STEPS, Artifact, Outcome
from nlpconvert.errors import CannotRunHere, DriftError, NlpconvertError, UsageError
from nlpconvert.judging import Bounds, Probes
from nlpconvert.manifest import Manifest
from nlpconvert.plan import Options
from nlpconvert.progress import Progress
from nlpconvert.settings import Settings
from nlpconvert.validators import fail_if, metrics
from nlpconvert.validators.tolerance import Tolerance

if TYPE_CHECKING:
    from nlpconvert.validators.scores import Scores


@dataclass(frozen=True)
class Wishes:
    """What a verification is asked to do beside measuring.

    `recheck`: judge what was recorded, run nothing. `baseline`: an older manifest, what is worse than in it fails.
    `prove`: break each artifact on purpose. `data`, `metric`, `fail_if`: score it on labelled rows as well, against
    `model` where one is given. `locate`: say which module moved where a step drifts and its parent is there.
    """

    recheck: bool = False
    baseline: Path | None = None
    prove: bool = False
    data: Path | None = None
    columns: str = ""
    metric: str | None = None
    fail_if: str | None = None
    model: str | None = None
    locate: bool = True

    def check(self) -> None:
        """UsageError for wishes that do not go together."""
        if (self.fail_if or self.metric) and self.data is None:
            raise UsageError("--metric and --fail-if need labelled rows: give --data")
        if self.data is not None and self.metric is None:
            raise UsageError("--data is scored by a metric here: give --metric; goldens are asked without it")
        if self.columns and self.data is None:
            raise UsageError("--columns renames columns of --data, and no --data is given")
        if self.recheck and (self.prove or self.data is not None):
            raise UsageError("--recheck runs nothing, and --prove and --data have to; give one of them")
        if self.data is not None and not self.data.exists():
            raise UsageError(f"--data {self.data}: no such file")


def verify(
    out: Path,
    steps: Sequence[str] | None,
    cases: Sequence[str] | None,
    options: Options,
    progress: Progress,
    settings: Settings,
    wishes: Wishes,
) -> list[Outcome]:
    """See `pipeline.verify`."""
    wishes.check()
    if wishes.baseline is not None and cases is not None:
        raise UsageError("--baseline needs all cases: those that --case leaves out would count as lost")
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
    if wishes.metric is not None:
        metrics.metric_for(wishes.metric, record.task)
        if wishes.fail_if is not None:
            fail_if.parse(wishes.fail_if, wishes.metric)
    if wishes.model is not None:
        _same_model(wishes.model, record, options)
    for name in sorted(set(STEPS) - set(record.steps)):
        if (out / name).is_dir():
            progress.line(f"{out / name} is no step of {out / manifest.FILE}: it was not looked at")
    outputs = models.facts_from_data(record.facts).outputs
    settings.check_names((row.name for row in outputs), (str(case["name"]) for case in record.golden.cases))
    bounds = {step: bounds_of(record, step, tolerances, settings) for step in chosen}
    if wishes.recheck:
        from nlpconvert import rechecking

        if cases is not None:
            raise UsageError("--recheck judges all that was recorded; --case has to run the artifact")
        outcomes = [rechecking.recheck(record, step, out, bounds[step]) for step in chosen]
    else:
        outcomes = [again(record, step, out, probes, bounds[step], options, progress) for step in chosen]
        if wishes.locate:
            outcomes = [located(outcome, record, out, options, progress, wishes.model) for outcome in outcomes]
    if wishes.baseline is not None:
        from nlpconvert import comparing

        older = comparing.read(wishes.baseline)
        outcomes = comparing.against_baseline(outcomes, older, wishes.baseline, record=record, asked=steps)
    if wishes.prove:
        outcomes = [_proved(outcome, record, out, bounds, options, progress) for outcome in outcomes]
    if wishes.data is not None:
        outcomes = _scored(outcomes, record, out, options, progress, wishes)
    return outcomes


def _same_model(model: str, record: Manifest, options: Options) -> None:
    """UsageError for a model that is not the one that the directory was made from."""
    from nlpconvert import checkpoint

    info = checkpoint.describe(model, revision=options.revision, task=record.task)
    if info.sha256 != record.source_sha256:
        raise UsageError(
            f"{model} is checkpoint {info.sha256[:12]}, and this was made from {record.source_sha256[:12]}: give that"
        )


# ---- tolerances -----------------------------------------------------------------------------------------------------


def bounds_of(record: Manifest, step: str, given: Sequence[Tolerance], settings: Settings) -> Bounds:
    """Given now, else in the settings, else when the step was made; single outputs and cases from the settings."""
    found = Bounds.of(step, given, settings)
    return found if found.given else replace(found, given=_recorded(record, step))


def _recorded(record: Manifest, step: str) -> Sequence[Tolerance]:
    """The tolerances that a person gave when the step was made, so that its verdict can be had again."""
    try:
        kept = [Tolerance.from_dict(each) for each in record.record(step).tolerances]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"the manifest's tolerances of {step} cannot be read ({error}); give --tolerance") from error
    return list(dict.fromkeys(each.asked() for each in kept if each.given))


# ---- one step -------------------------------------------------------------------------------------------------------


def again(
    record: Manifest,
    step: str,
    out: Path,
    probes: Probes,
    bounds: Bounds,
    options: Options,
    progress: Progress,
) -> Outcome:
    """A recorded step, run again against the probes; a drift, unopened, where it is not what its record says."""
    started = time.perf_counter()
    kept = record.record(step).outcome
    if kept.artifact is None:
        return Outcome(step, kept.status, kept.reason)
    outcome = replace(record.outcome(step, out), verdict=None, reason="", seconds=0.0)
    with ThreadPoolExecutor(1) as beside:  # hashing leaves a core to the imports
        hashing = beside.submit(manifest.tampered, record, step, out)
        runtimes.load_runtime(kept.artifact)
        changed = hashing.result()
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        reason = f"{'; '.join(changed[:3])}{more} since it was verified; it was not opened"
        return replace(outcome, status="drift", reason=reason)
    above = kept.artifact.parent
    if record.record(step).stale:
        reason = f"it is stale: {above}, from which it was made, was replaced since"
        return replace(outcome, status="drift", reason=reason)
    broken = manifest.broken_chain(record, step)
    if broken:
        return replace(outcome, status="drift", reason=f"{broken}; it was not opened")
    foreign = _not_the_sources(record, kept.artifact)
    if foreign:
        return replace(outcome, status="drift", reason=f"{foreign}; it was not opened")
    parent = None
    if above != "source":
        altered = manifest.tampered(record, above, out)
        if altered:
            note = f"not compared with {above}, from which it was made: {altered[0]}"
            outcome = replace(outcome, notes=(*outcome.notes, note))
        else:
            parent = record.artifact(above, out)
    outcome, _ = judging.judged(outcome, record, probes, bounds, options, progress, parent)
    return replace(outcome, seconds=time.perf_counter() - started)


def _not_the_sources(record: Manifest, artifact: Artifact) -> str:
    """Which of the files copied from the checkpoint (config, tokenizer) is another one, in one sentence; "" if none."""
    source = record.source.get("files")
    if artifact.made_by.get("foreign") or not isinstance(source, Mapping):
        return ""
    for name, digest in artifact.files.items():
        original = source.get(name)
        if original is not None and original != digest:
            return f"{artifact.step}/{name} is not the checkpoint's {name}"
    return ""


def located(
    outcome: Outcome, record: Manifest, out: Path, options: Options, progress: Progress, model: str | None = None
) -> Outcome:
    """A drifted step with the module that moved first, held against the step it was made from, or against `model`.

    Where that cannot be found out, as it is, with the reason among its notes where there is one to give.
    """
    artifact = outcome.artifact
    if outcome.status != "drift" or outcome.verdict is None or artifact is None:
        return outcome
    above = "model" if artifact.parent == "source" else artifact.parent
    if above == "model" and model is None:
        return outcome
    if above != "model" and (artifact.format != "onnx" or not _whole(record, above, out)):
        return outcome
    from nlpconvert import locating

    try:
        found = locating.locate(
            out,
            outcome.step,
            model=model if above == "model" else None,
            verdict=outcome.verdict,
            options=options,
            progress=progress,
        )
    except NlpconvertError as error:
        return replace(outcome, notes=(*outcome.notes, f"which module moved is not known: {error}"))
    return replace(outcome, verdict={**outcome.verdict, "localisation": found.to_dict()})


def _whole(record: Manifest, step: str, out: Path) -> bool:
    kept = record.steps.get(step)
    return kept is not None and kept.outcome.artifact is not None and not manifest.tampered(record, step, out)


def _proved(
    outcome: Outcome,
    record: Manifest,
    out: Path,
    bounds: Mapping[str, Bounds],
    options: Options,
    progress: Progress,
) -> Outcome:
    """With the proof in its verdict; a gate that lets a gross break pass is a drift. What drifts cannot be proved."""
    if outcome.status != "agrees" or outcome.verdict is None:
        return outcome
    from nlpconvert import proving

    try:
        proof = proving.prove(out, record, outcome.step, options, progress, given=bounds[outcome.step])
    except CannotRunHere as error:
        return replace(outcome, notes=(*outcome.notes, f"nothing was proved: {error}"))
    proved = replace(outcome, verdict={**outcome.verdict, "proof": proof.to_dict()})
    if proof.holds:
        return proved
    missed = ", ".join(trial.name for trial in proof.unseen if trial.gross)
    return replace(proved, status="drift", reason=f"the gate does not see what it must see: {missed or 'nothing'}")


def _scored(
    outcomes: Sequence[Outcome],
    record: Manifest,
    out: Path,
    options: Options,
    progress: Progress,
    wishes: Wishes,
) -> list[Outcome]:
    """With the scores on labelled rows in their verdicts; one that --fail-if does not allow is a drift."""
    from nlpconvert import scoring

    assert wishes.data is not None and wishes.metric is not None
    todo = [outcome.step for outcome in outcomes if outcome.verdict is not None]
    if not todo:
        return list(outcomes)
    found = scoring.score_steps(
        out,
        record,
        todo,
        data=wishes.data,
        columns=wishes.columns,
        metric=wishes.metric,
        options=options,
        progress=progress,
        fail_if=wishes.fail_if,
        model=wishes.model,
    )
    by_step = dict(zip(todo, found, strict=True))
    return [_with_scores(outcome, by_step.get(outcome.step)) for outcome in outcomes]


def _with_scores(outcome: Outcome, scores: Scores | None) -> Outcome:
    if scores is None or outcome.verdict is None:
        return outcome
    told = tuple(getattr(scores, "warnings", ()))
    scored = replace(outcome, verdict={**outcome.verdict, "scores": scores.to_dict()}, notes=(*outcome.notes, *told))
    if scores.status == "not run" and outcome.status == "agrees":
        return replace(scored, status="not run", reason=f"it could not be scored here: {scores.reason}")
    if not scores.failed:
        return scored
    tripped = [each.text for each in scores.fail_if if each.failed]
    reason = f"--fail-if: {'; '.join(tripped)}" if tripped else scores.reason
    return replace(scored, status="drift", reason=outcome.reason or reason)

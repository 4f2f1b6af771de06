"""Floor 3: the line: load, ask the reference, convert step by step, judge each step, record it.

`run`, `convert_step` and `verify` are the house's public functions; the command line is a thin coat over them.
Everything heavy is imported inside the functions.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nlpconvert
from nlpconvert import disk, manifest
from nlpconvert.artifact import STEPS, Artifact, Made, Outcome, Step
from nlpconvert.errors import (
    CannotRunHere,
    ConversionError,
    DriftError,
    MissingPackage,
    NlpconvertError,
    UsageError,
    worst,
)
from nlpconvert.manifest import Manifest
from nlpconvert.progress import Progress, Silent, captured

if TYPE_CHECKING:
    from nlpconvert.judging import Probes
    from nlpconvert.source import Loaded
    from nlpconvert.validators.tolerance import Tolerance

DEFAULT_STEPS = ("torchscript", "onnx", "trt")
DEFAULT_BUDGET = 32 * 2**20

# What must be importable to make a step; the extra that brings it stands in the table of steps.
NEEDS: dict[str, tuple[str, ...]] = {
    "torchscript": ("torch", "transformers"),
    "onnx": ("torch", "transformers", "onnxscript", "onnx_ir", "onnxruntime"),
    "tensorrt": ("torch", "transformers", "onnxscript", "onnx_ir", "onnxruntime", "polygraphy"),
}


@dataclass(frozen=True)
class Options:
    """Everything that can be chosen. Every field has the default of the command line.

    `columns` ("text=body") and `tolerance` ("cosine>=0.995,changed<=0.5%") are as the flags take them; no tolerance
    means the table's defaults. `golden_budget` is in bytes, `workspace` in MiB. `minimum`, `optimum`, `maximum` are
    the profile ("1x1", "8x128", "32x512").
    """

    task: str | None = None
    revision: str | None = None
    device: str = "cpu"
    provider: str = "cpu"
    threads: int | None = None
    force: bool = False
    keep_going: bool = False
    data: Path | None = None
    columns: str = ""
    tolerance: str = ""
    golden_budget: int = DEFAULT_BUDGET
    allow_missing_weights: bool = False
    trust_remote_code: bool = False
    method: str = "trace"
    opset: int | None = None
    runtime: str | None = None
    minimum: str | None = None
    optimum: str | None = None
    maximum: str | None = None
    tf32: bool = False
    workspace: int | None = None
    hardware_compatibility: bool = False
    timing_cache: Path | None = None
    compute_capabilities: tuple[str, ...] | None = None


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
    return list(_Line(str(model), Path(out), options or Options(), progress or Silent()).run(to))


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

    `steps`, `cases`: names; None for all. Nothing is written. A file whose hash has changed is a drift, before it is
    opened. A runtime that is missing is "not run". Raises UsageError for a name that is not there, DriftError for
    changed goldens.
    """
    options, progress, out = options or Options(), progress or Silent(), Path(out)
    from nlpconvert.validators import tolerance

    tolerances = tolerance.parse(options.tolerance) if options.tolerance else ()
    record = manifest.read(out)
    chosen = list(record.steps) if steps is None else [step for step in steps if record.record(step)]
    changed = manifest.tampered(record, manifest.GOLDEN, out)
    if changed:
        raise DriftError(f"{out}: {changed[0]} since it was recorded, so nothing can be judged by it; restore it")
    probes = _probes(record, out, cases)
    return [_reverify(record, step, out, probes, tolerances, options, progress) for step in chosen]


def exit_code(outcomes: Iterable[Outcome], allow_unverified: Sequence[str] = ()) -> int:
    """The exit code of all outcomes together.

    `allow_unverified` names steps that may be "not run"; when nothing at all was verified it stays 4.
    """
    outcomes = list(outcomes)
    codes = [o.exit_code for o in outcomes if not (o.status == "not run" and o.step in allow_unverified)]
    if any(o.status == "not run" for o in outcomes) and not any(o.status in ("agrees", "drift") for o in outcomes):
        codes.append(4)
    return worst(codes)


# ---- the line -------------------------------------------------------------------------------------------------------


class _Line:
    """One run: what it was asked, and what is held open on the way (the model, as long as a step needs it)."""

    def __init__(self, model: str, out: Path, options: Options, progress: Progress) -> None:
        self.model, self.out, self.options, self.progress = model, out, options, progress
        self.loaded: Loaded | None = None
        self.tolerances: Sequence[Tolerance] = ()

    def run(self, to: Sequence[str] | None) -> Iterator[Outcome]:
        options = self.options
        plan = self._plan(to)
        from nlpconvert.validators import tolerance

        if options.tolerance:
            self.tolerances = tolerance.parse(options.tolerance)
        if options.data is not None and not options.data.exists():
            raise UsageError(f"--data {options.data}: no such file")

        from nlpconvert import checkpoint

        info = checkpoint.describe(self.model, revision=options.revision, task=options.task)
        if self.out.exists():
            # Looked at before the lock as well, which makes a file: a refused OUT stays as it was.
            manifest.check_out(self.out, info.sha256, info.task)
        with disk.lock(self.out, "nlpconvert run"):
            for line in disk.repair(self.out):
                self.progress.line(line)
            record = manifest.check_out(self.out, info.sha256, info.task)
            reused = self._reusable(record, plan, to)
            todo = [row for row in plan if row.name not in reused]
            self.progress.start("load")
            with captured(Path(os.devnull)):
                from nlpconvert import source

                self.loaded = source.load(
                    self.model,
                    revision=options.revision,
                    task=options.task,
                    allow_missing_weights=options.allow_missing_weights,
                    trust_remote_code=options.trust_remote_code,
                    device=options.device,
                )
            for note in self.loaded.notes:
                self.progress.line(note)
            self._check_profile(todo)
            record, probes = self._reference(record)
            record = replace(record, versions=_versions(), host=_host())
            record.write(self.out)
            for row in plan:
                if row.name in reused and record is not None:
                    yield replace(record.outcome(row.name, self.out), reused=True)
            yield from self._steps(record, todo, probes, to is None)

    def _plan(self, to: Sequence[str] | None) -> list[Step]:
        """The rows to make, parents first. MissingPackage when a named one cannot be made here."""
        names = list(DEFAULT_STEPS if to is None else to)
        unknown = [name for name in names if name not in STEPS]
        if unknown:
            raise UsageError(f"there is no step {unknown[0]!r}; the steps are {', '.join(STEPS)}")
        if not names:
            raise UsageError(f"no step was asked for; the steps are {', '.join(STEPS)}")
        ordered: list[Step] = []
        for name in names:
            chain = [STEPS[name]]
            while chain[0].parent != "source":
                chain.insert(0, STEPS[chain[0].parent])
            ordered += [row for row in chain if row not in ordered]
        for row in ordered:
            lacking = missing_for(row, self.options.runtime)
            if lacking and (to is not None or row.name != "trt"):
                raise MissingPackage(f"{row.name} needs {lacking}: pip install 'nlpconvert[{row.extra}]'")
            if row.format == "tensorrt" and not lacking:
                self._check_builder()
        return ordered

    def _check_builder(self) -> None:
        """Refuses a flavour that is not here and options that the chosen one ignores."""
        from nlpconvert import engines

        options = self.options
        flavour, _ = engines.choose(options.runtime, engines.runtime_here())
        given = {
            "--hardware-compatibility": options.hardware_compatibility,
            "--timing-cache": options.timing_cache is not None,
            "--compute-capability": options.compute_capabilities is not None,
        }
        engines.refuse_ignored(flavour, [name for name, is_set in given.items() if is_set])

    def _reusable(self, record: Manifest | None, plan: Sequence[Step], to: Sequence[str] | None) -> set[str]:
        """Parents that lie there whole. UsageError for a step that exists and was asked for without --force."""
        asked = set(DEFAULT_STEPS if to is None else to)
        reused: set[str] = set()
        for row in plan:
            there = (self.out / row.name).exists()
            if row.name in asked:
                if there and not self.options.force:
                    raise UsageError(f"{self.out / row.name} exists; --force replaces it when the new one is whole")
            elif record is not None and there:
                reasons = manifest.reasons_to_rebuild(record, row.name, self.out)
                if not reasons:
                    reused.add(row.name)
                elif not self.options.force:
                    raise UsageError(f"{row.name} cannot be built on: {reasons[0]}; --force rebuilds it")
        return reused

    def _check_profile(self, todo: Sequence[Step]) -> None:
        options = self.options
        given = (options.minimum, options.optimum, options.maximum)
        if any(row.format == "tensorrt" for row in todo) or any(given):
            assert self.loaded is not None
            from nlpconvert import models, profiles

            facts = self.loaded.facts
            axes = profiles.dynamic_axes(models.input_axes(name, facts.task) for name in facts.inputs)
            profiles.choose(*given, axes, facts.max_length)

    # -- the reference ----------------------------------------------------------------------------------------------

    def _reference(self, record: Manifest | None) -> tuple[Manifest, Probes]:
        """The goldens: those that lie there where they fit, else asked of PyTorch now, before any exporter."""
        assert self.loaded is not None
        from nlpconvert import forward, golden, inputs, judging, probes, reference

        loaded, facts = self.loaded, self.loaded.facts
        cases = probes.probe_cases(facts, loaded.encode)
        if self.options.data is not None:
            from nlpconvert import dataset

            renamed = dataset.parse_columns(self.options.columns) if self.options.columns else None
            rows = dataset.read(self.options.data, facts.task, columns=renamed)
            cases += inputs.data_cases(facts, loaded.encode, rows)
        digest = inputs.cases_sha256(cases)
        if (
            record is not None
            and record.golden.probe_sha256 == digest
            and not manifest.tampered(record, manifest.GOLDEN, self.out)
        ):
            return record, _probes(record, self.out, None)

        with captured(Path(os.devnull)):
            asked = reference.ask(
                lambda batch: forward.call(loaded.module, batch),
                cases,
                facts.outputs,
                self.options.golden_budget,
                self.progress,
            )
        for note in asked.notes:
            self.progress.line(note)
        with disk.building(self.out, manifest.GOLDEN) as new:
            golden.write(new, cases, asked.answers)
            files = disk.hash_tree(new)
            disk.replace_directory(new, self.out / manifest.GOLDEN)
        kept = manifest.Golden(files, tuple(golden.describe(cases, asked.answers)), digest, asked.not_applicable)
        fresh = Manifest(loaded.description, _facts_data(facts), kept)
        if record is not None:
            fresh = replace(fresh, steps=record.steps, created=record.created)
        return fresh, judging.Probes(cases, asked.answers, asked.not_applicable, digest)

    # -- the steps --------------------------------------------------------------------------------------------------

    def _steps(self, record: Manifest, todo: Sequence[Step], probes: Probes, by_default: bool) -> Iterator[Outcome]:
        stopped = ""
        for number, row in enumerate(todo):
            lacking = missing_for(row, self.options.runtime)
            if lacking and by_default:
                yield Outcome(row.name, "skipped", f"{lacking} is not installed: nlpconvert[{row.extra}]")
                continue
            if stopped and not self.options.keep_going:
                yield Outcome(row.name, "skipped", f"the line stopped at {stopped}")
                continue
            parent = record.steps.get(row.parent)
            if parent is not None and parent.outcome.status == "failed":
                yield Outcome(row.name, "skipped", f"{row.parent}, which it is made from, failed")
                continue
            needs_model = any(later.parent == "source" for later in todo[number + 1 :])
            outcome, tolerances = self._step(row, record, probes, needs_model)
            record = record.with_step(outcome, tolerances=[t.to_dict() for t in tolerances], options=self._recorded())
            record.write(self.out)
            if outcome.status in ("failed", "drift"):
                stopped = row.name
            yield outcome

    def _step(
        self, row: Step, record: Manifest, probes: Probes, needs_model: bool
    ) -> tuple[Outcome, Sequence[Tolerance]]:
        started = time.perf_counter()
        self.progress.start(f"{row.name}: convert")
        log = self.out / "logs" / f"{row.name}.log"
        log.unlink(missing_ok=True)
        try:
            with disk.building(self.out, row.name) as new:
                with self._noise(row.name):
                    made = self._convert(row, record, new, log)
                files = disk.hash_tree(new)
                disk.replace_directory(new, self.out / row.name)
        except (MissingPackage, UsageError):
            raise
        except (ConversionError, CannotRunHere) as error:
            return Outcome(row.name, "failed", str(error), seconds=time.perf_counter() - started, notes=_tail(log)), ()
        except MemoryError:
            return Outcome(row.name, "failed", "out of memory", seconds=time.perf_counter() - started), ()
        finally:
            if not needs_model:
                # The reference's answers are kept; the model makes room before the candidate is opened.
                self._free_model()
        artifact = Artifact(
            step=row.name,
            path=self.out / row.name / made.file,
            format=row.format,
            precision=row.precision,
            task=record.task,
            inputs=made.inputs,
            outputs=made.outputs,
            files=files,
            parent=row.parent,
            parent_sha256=record.source_sha256
            if row.parent == "source"
            else record.artifact(row.parent, self.out).sha256,
            made_by=made.made_by,
        )
        outcome = Outcome(row.name, "not run", artifact=artifact, bytes=_size(self.out / row.name), notes=made.notes)
        parent = record.artifact(row.parent, self.out) if row.parent != "source" else None
        with self._noise(row.name):
            outcome, used = _judged(outcome, record, probes, self.tolerances, self.options, self.progress, parent)
        return replace(outcome, seconds=time.perf_counter() - started), used

    def _convert(self, row: Step, record: Manifest, new: Path, log: Path) -> Made:
        options = self.options
        if row.format == "tensorrt":
            from nlpconvert import profiles
            from nlpconvert.convert import tensorrt

            parent = record.artifact(row.parent, self.out)
            limit = record.facts["max_length"]
            axes = profiles.dynamic_axes(spec.shape for spec in parent.inputs)
            return tensorrt.convert(
                parent,
                new,
                profile=profiles.choose(options.minimum, options.optimum, options.maximum, axes, limit),
                max_length=limit,
                log=log,
                runtime=options.runtime,
                tf32=options.tf32,
                workspace=options.workspace,
                hardware_compatibility=options.hardware_compatibility,
                timing_cache=options.timing_cache,
                compute_capabilities=options.compute_capabilities,
            )
        assert self.loaded is not None
        loaded = self.loaded
        from nlpconvert import probes

        example = probes.export_example(loaded.facts, loaded.encode)
        if row.format == "torchscript":
            from nlpconvert.convert import torchscript

            return torchscript.convert(loaded.module, example, loaded.facts, new, method=options.method)
        from nlpconvert.convert import onnx

        return onnx.convert(
            loaded.module,
            example,
            loaded.facts,
            new,
            companions=loaded.directory,
            parameter_bytes=loaded.parameter_bytes,
            opset=options.opset,
        )

    def _free_model(self) -> None:
        if self.loaded is not None:
            self.loaded = None
            gc.collect()

    def _recorded(self) -> dict[str, Any]:
        """The options that were set, for the manifest."""
        default = Options()
        chosen = {name: value for name, value in asdict(self.options).items() if value != getattr(default, name)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in chosen.items()}

    def _noise(self, name: str) -> contextlib.AbstractContextManager[None]:
        return captured(self.out / "logs" / f"{name}.log")


# ---- judging --------------------------------------------------------------------------------------------------------


def _judged(
    outcome: Outcome,
    record: Manifest,
    probes: Probes,
    tolerances: Sequence[Tolerance],
    options: Options,
    progress: Progress,
    parent: Artifact | None = None,
) -> tuple[Outcome, Sequence[Tolerance]]:
    """Opens the outcome's artifact from disk and judges it; "not run" with the reason where it cannot run here."""
    from nlpconvert import judging

    artifact = outcome.artifact
    assert artifact is not None
    where = {"device": options.device, "provider": options.provider, "threads": options.threads}
    with contextlib.ExitStack() as open_sessions:
        try:
            session = judging.open_artifact(artifact, **where)  # type: ignore[arg-type]
            open_sessions.callback(session.close)
            above = None
            if parent is not None:
                above = judging.open_artifact(parent, **where)  # type: ignore[arg-type]
                open_sessions.callback(above.close)
        except CannotRunHere as error:
            return replace(outcome, status="not run", reason=str(error)), ()
        except DriftError as error:
            return replace(outcome, status="drift", reason=str(error)), ()
        rows = _facts(record.facts).outputs
        agrees, verdict, used = judging.judge(session, artifact, rows, probes, tolerances, progress, above)
    return replace(outcome, status="agrees" if agrees else "drift", reason="", verdict=verdict), used


def _reverify(
    record: Manifest,
    step: str,
    out: Path,
    probes: Probes,
    tolerances: Sequence[Tolerance],
    options: Options,
    progress: Progress,
) -> Outcome:
    started = time.perf_counter()
    kept = record.record(step).outcome
    if kept.artifact is None:
        return Outcome(step, kept.status, kept.reason)
    outcome = replace(record.outcome(step, out), verdict=None, reason="", seconds=0.0)
    changed = manifest.tampered(record, step, out)
    if changed:
        reason = f"{'; '.join(changed)} since it was verified; it was not opened"
        return replace(outcome, status="drift", reason=reason)
    if record.record(step).stale:
        parent = kept.artifact.parent
        return replace(
            outcome, status="drift", reason=f"it is stale: {parent}, from which it was made, was replaced since"
        )
    parent_artifact = None if kept.artifact.parent == "source" else record.artifact(kept.artifact.parent, out)
    outcome, _ = _judged(outcome, record, probes, tolerances, options, progress, parent_artifact)
    return replace(outcome, seconds=time.perf_counter() - started)


def _probes(record: Manifest, out: Path, names: Sequence[str] | None) -> Probes:
    """The goldens of `out`, all or those named. UsageError for a name that is not there."""
    from nlpconvert import golden, judging

    cases, answers = golden.read(out / manifest.GOLDEN)
    if names is not None:
        known = {case.name for case in cases}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UsageError(f"there is no case {unknown[0]!r} in {out}; there are {', '.join(sorted(known))}")
        cases = [case for case in cases if case.name in names]
    return judging.Probes(cases, answers, record.golden.not_applicable, record.golden.probe_sha256)


# ---- small things ---------------------------------------------------------------------------------------------------


def missing_for(row: Step, runtime: str | None) -> str:
    """The first package that making a step needs and that is not installed, or ""."""
    for package in NEEDS[row.format]:
        if importlib.util.find_spec(package) is None:
            return package
    if row.format == "tensorrt" and runtime is None:
        from nlpconvert import engines

        if not engines.installed_flavours():
            return "tensorrt or tensorrt-rtx"
    return ""


def _facts_data(facts: Any) -> dict[str, Any]:
    return asdict(facts)


def _facts(data: Mapping[str, Any]) -> Any:
    from nlpconvert import models

    return models.facts_from_data(data)


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _tail(log: Path, lines: int = 15) -> tuple[str, ...]:
    """The end of a step's log, for a step that failed."""
    if not log.is_file():
        return ()
    kept = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (f"the log is {log}", *kept[-lines:]) if kept else ()


def _versions() -> dict[str, str]:
    from nlpconvert import host

    return {"nlpconvert": nlpconvert.__version__, **host.versions()}


def _host() -> dict[str, Any]:
    from nlpconvert import host

    return host.host_facts()


__all__ = ["NlpconvertError", "Options", "Outcome", "convert_step", "exit_code", "run", "verify"]

"""Floor 3: the line: load, ask the reference, then convert, judge and record step by step.

What is asked of it and what can be refused beforehand is `plan`, how an artifact is judged is `judging`. The model is
held as long as a step needs it. Everything heavy is imported inside the functions.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import nlpconvert
from nlpconvert import disk, goldens, host, judging, making, manifest, memory, models, plan
from nlpconvert.artifact import Artifact, Made, Outcome, Step
from nlpconvert.errors import MissingPackage, NlpconvertError, UsageError, first_line
from nlpconvert.judging import Bounds, Probes
from nlpconvert.manifest import Manifest
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, captured
from nlpconvert.settings import Settings

if TYPE_CHECKING:
    from nlpconvert.inputs import Encode
    from nlpconvert.models import Facts
    from nlpconvert.source import Loaded
    from nlpconvert.validators.tolerance import Tolerance


class Line:
    """One run: what it was asked, and what is held open on the way."""

    def __init__(
        self, model: str, out: Path, options: Options, progress: Progress, settings: Settings | None = None
    ) -> None:
        self.model, self.out, self.options, self.progress = model, out, options, progress
        self.settings = settings or Settings()
        self.loaded: Loaded | None = None
        self.encode: Encode | None = None  # outlives the model: calibration reads texts
        self.tolerances: Sequence[Tolerance] = ()

    def run(self, to: Sequence[str] | None) -> Iterator[Outcome]:
        """The outcomes, one by one. Raises UsageError and MissingPackage before anything is converted."""
        options = self.options
        rows = plan.steps(to)
        self.tolerances = plan.check_words(options)
        lacking = plan.not_here(rows, options, named=to is not None)

        with self._home() as before:
            reused = self._reusable(before, rows, to)
            todo = [row for row in rows if row.name not in reused]
            loaded = self._load()
            plan.check_rows(todo, options, loaded.facts, {row.name: self.bounds(row.name) for row in todo})
            record, probes = self._begun(before, loaded, any(row.precision != "float32" for row in rows))
            self.check_settings(loaded.facts, probes)
            record = self.asked_anew(record, [row.name for row in todo], probes)
            del loaded
            stopped = ""
            for name in reused:
                outcome = replace(record.outcome(name, self.out), reused=True)
                stopped = stopped or (name if outcome.status == "drift" else "")
                yield outcome
            yield from self._steps(record, todo, probes, lacking, stopped)

    @contextlib.contextmanager
    def opened(self, precision: str) -> Iterator[tuple[Manifest, Probes]]:
        """OUT with its reference asked and nothing converted, for what comes from elsewhere, of a precision."""
        self.tolerances = plan.check_words(self.options)
        with self._home() as before:
            yield self._begun(before, self._load(), precision != "float32")

    @contextlib.contextmanager
    def _home(self) -> Iterator[Manifest | None]:
        """OUT, locked and repaired, and its manifest if it has one; UsageError where this source may not live there."""
        from nlpconvert import checkpoint

        info = checkpoint.describe(self.model, revision=self.options.revision, task=self.options.task)
        for above in self.out.absolute().parents:
            if (above / manifest.FILE).is_file():
                raise UsageError(f"{self.out} lies inside {above}, which is itself an OUT; give a directory beside it")
        if self.out.exists():
            # Looked at before the lock as well, which makes a file: a refused OUT stays as it was.
            manifest.check_out(self.out, info.sha256, info.task)
        with disk.lock(self.out, "nlpconvert run"):
            for line in disk.repair(self.out):
                self.progress.line(line)
            yield manifest.check_out(self.out, info.sha256, info.task)

    def _begun(self, record: Manifest | None, loaded: Loaded, lower: bool) -> tuple[Manifest, Probes]:
        """The manifest with goldens, machine and versions, written; `lower` where something below float32 is judged."""
        record, probes = goldens.ask(record, loaded, lower, self.out, self.options, self.progress)
        record = replace(
            record, versions={"nlpconvert": nlpconvert.__version__, **host.versions()}, host=host.host_facts()
        )
        record.write(self.out)
        return record, probes

    def _reusable(self, record: Manifest | None, rows: Sequence[Step], to: Sequence[str] | None) -> list[str]:
        """Parents that lie there whole. UsageError for a step that exists and was asked for without --force."""
        asked = [row.name for row in rows] if to is None else list(to)
        reused: list[str] = []
        for row in rows:
            there = os.path.lexists(self.out / row.name)
            if row.name in asked:
                if there and not self.options.force:
                    others = [name for name in asked if not os.path.lexists(self.out / name)]
                    only = f", or --to {','.join(others)} makes only what is not there" if to is None and others else ""
                    raise UsageError(
                        f"{self.out / row.name} exists; --force replaces it when the new one is whole{only}"
                    )
            elif record is not None and there:
                reasons = manifest.reasons_to_rebuild(record, row.name, self.out)
                if not reasons:
                    reused.append(row.name)
                elif not self.options.force:
                    raise UsageError(f"{row.name} cannot be built on: {reasons[0]}; --force rebuilds it")
        return reused

    def _load(self) -> Loaded:
        self.progress.start("load")
        with captured(Path(os.devnull)):
            from nlpconvert import source

            self.loaded = source.load(self.model, **self.options.loading())
        for note in self.loaded.notes:
            self.progress.line(note)
        self.encode = self.loaded.encode
        return self.loaded

    def asked_anew(self, record: Manifest, replaced: Sequence[str], probes: Probes) -> Manifest:
        """What lies here and was judged by other probes is judged by these: one manifest, one set of questions.

        What cannot be run here keeps its verdict, and with it the hash of what it was asked.
        """
        from nlpconvert import verifying

        for name, kept in list(record.steps.items()):
            verdict = kept.outcome.verdict
            if name in replaced or verdict is None or verdict.get("probe_sha256") == probes.sha256:
                continue
            bounds = verifying.bounds_of(record, name, (), self.settings)
            again = verifying.again(record, name, self.out, probes, bounds, self.options, self.progress)
            if again.verdict is not None and not kept.stale:
                again = replace(again, seconds=kept.outcome.seconds, notes=kept.outcome.notes)
                record = record.with_step(again, tolerances=kept.tolerances, options=kept.options, stale=kept.stale)
                record.write(self.out)
        return record

    def bounds(self, step: str) -> Bounds:
        """The tolerances of a step: given, else the settings'."""
        return judging.Bounds.of(step, self.tolerances, self.settings)

    def check_settings(self, facts: Facts, probes: Probes) -> None:
        """UsageError for a tolerance of an output or a case that there is not."""
        self.settings.check_names((row.name for row in facts.outputs), (case.name for case in probes.cases))

    # -- the steps ----------------------------------------------------------------------------------------------------

    def _steps(
        self, record: Manifest, todo: Sequence[Step], probes: Probes, lacking: Mapping[str, str], stopped: str
    ) -> Iterator[Outcome]:
        failed: set[str] = set()
        for number, row in enumerate(todo):
            if row.name in lacking:
                yield Outcome(row.name, "skipped", lacking[row.name])
                continue
            if stopped and not self.options.keep_going:
                yield Outcome(row.name, "skipped", f"the line stopped at {stopped}")
                continue
            if row.parent in failed:
                failed.add(row.name)
                yield Outcome(row.name, "skipped", f"{row.parent}, which it is made from, failed")
                continue
            needs_model = any(later.parent == "source" for later in todo[number + 1 :])
            outcome, record = self._step(row, record, probes, needs_model)
            if outcome.status == "failed":
                failed.add(row.name)
            if outcome.status in ("failed", "drift"):
                stopped = stopped or row.name
            yield outcome

    def _step(self, row: Step, record: Manifest, probes: Probes, needs_model: bool) -> tuple[Outcome, Manifest]:
        """Makes a step and judges it where it was built; it takes its place in OUT with its verdict, or not at all."""
        started = time.perf_counter()
        log = self.out / "logs" / f"{row.name}.log"
        log.unlink(missing_ok=True)
        try:
            with disk.building(self.out, row.name) as new:
                try:
                    self.progress.start(f"{row.name}: convert")
                    with captured(log):
                        made = self._convert(row, record, new, log, probes)
                finally:
                    # The reference's answers are kept; the model makes room before the candidate is opened.
                    self._make_room(needs_model)
                artifact = self._artifact(row, record, new, made)
                size = sum((new / name).stat().st_size for name in artifact.files)
                outcome = Outcome(row.name, "not run", artifact=artifact, bytes=size, notes=made.notes)
                parent = None if row.parent == "source" else record.artifact(row.parent, self.out)
                with captured(log):
                    outcome, used = judging.judged(
                        outcome, record, probes, self.bounds(row.name), self.options, self.progress, parent
                    )
                disk.replace_directory(new, self.out / row.name)
        except (MissingPackage, UsageError):
            raise
        except Exception as error:
            return self._failed(row, record, error, started, log)
        outcome = replace(
            outcome,
            artifact=replace(artifact, path=self.out / row.name / made.file),
            seconds=time.perf_counter() - started,
        )
        record = record.with_step(
            outcome, tolerances=[each.to_dict() for each in used], options=self.options.recorded()
        )
        record.write(self.out)
        if outcome.status == "drift":
            outcome, record = self._located(outcome, record)
        return outcome, record

    def _located(self, outcome: Outcome, record: Manifest) -> tuple[Outcome, Manifest]:
        """With the module that moved first, where that can be found out here; recorded with the verdict."""
        from nlpconvert import verifying

        self._make_room(needs_model=self.options.keep_going)
        found = verifying.located(outcome, record, self.out, self.options, self.progress, model=self.model)
        if found is not outcome:
            steps = {**record.steps}
            kept = steps[outcome.step]
            steps[outcome.step] = replace(kept, outcome=replace(kept.outcome, verdict=found.verdict, notes=found.notes))
            record = replace(record, steps=steps)
            record.write(self.out)
        return found, record

    def _failed(
        self, row: Step, record: Manifest, error: Exception, started: float, log: Path
    ) -> tuple[Outcome, Manifest]:
        """A step that could not be made. What lay there before is whole, so its record stays."""
        if isinstance(error, NlpconvertError):
            reason, detail = str(error), error.detail
        else:
            # A library raises whatever it likes: the line goes to the person, where it came from to the log.
            reason = (
                "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {first_line(error)}"
            )
            detail = "".join(traceback.format_exception(error))
        _append(log, detail)
        notes = (f"the log is {log}",) if log.is_file() and log.stat().st_size else ()
        seconds = time.perf_counter() - started
        outcome = Outcome(row.name, "failed", reason, seconds=seconds, notes=notes)
        before = record.steps.get(row.name)
        if before is None or before.outcome.artifact is None:
            record = record.with_step(outcome, options=self.options.recorded())
            record.write(self.out)
        return outcome, record

    def _artifact(self, row: Step, record: Manifest, new: Path, made: Made) -> Artifact:
        above = record.source_sha256 if row.parent == "source" else record.artifact(row.parent, self.out).sha256
        return Artifact(
            step=row.name,
            path=new / made.file,
            format=row.format,
            precision=row.precision,
            task=record.task,
            inputs=made.inputs,
            outputs=made.outputs,
            files=disk.hash_tree(new),
            parent=row.parent,
            parent_sha256=above,
            made_by=made.made_by,
        )

    def _convert(self, row: Step, record: Manifest, new: Path, log: Path, probes: Probes) -> Made:
        parent = None if row.parent == "source" else record.artifact(row.parent, self.out)
        return making.make(
            making.Work(
                row=row,
                options=self.options,
                record=record,
                loaded=self.loaded,
                parent=parent,
                new=new,
                log=log,
                probes=probes,
                tolerances=self.bounds(row.name).given,
                progress=self.progress,
                facts=models.facts_from_data(record.facts),
                encode=self.encode,
            )
        )

    def _make_room(self, needs_model: bool) -> None:
        """What a conversion left behind goes, and the model too once no step needs it."""
        if self.loaded is not None:
            self.loaded = self.loaded if needs_model else None
            memory.give_back()


def _append(log: Path, detail: str) -> None:
    """Adds an error's detail to a step's log, unless that is where it was taken from."""
    with contextlib.suppress(OSError):  # the disk may be full: the reason is told all the same
        if detail.strip() not in (log.read_text(errors="replace") if log.is_file() else ""):
            with log.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{detail.rstrip()}\n")

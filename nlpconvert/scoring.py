"""Floor 3: a step is scored on labelled data, beside a reference that answers the same rows.

The reference is PyTorch where the model is given, else the float32 ONNX of the same OUT, which was itself held against
PyTorch: so a gate in CI needs neither torch nor the model. What a row is worth is `marking` and `validators.metrics`,
what the rows can say `validators.paired`; floor 2 is imported inside the functions.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import nlpconvert
from nlpconvert import golden, labelled, manifest, marking, models, probes, runtimes, tokens
from nlpconvert.artifact import Artifact
from nlpconvert.errors import CannotRunHere, DriftError, NlpconvertError, UsageError, first_line
from nlpconvert.labelled import Batch
from nlpconvert.manifest import Manifest
from nlpconvert.marking import Marker
from nlpconvert.models import Facts
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, Silent, captured
from nlpconvert.validators import fail_if as conditions
from nlpconvert.validators import metrics, metrics_text, paired
from nlpconvert.validators.fail_if import Condition
from nlpconvert.validators.metrics import Answers, Metric
from nlpconvert.validators.scores import Scores

Run = Callable[[Mapping[str, np.ndarray]], Mapping[str, np.ndarray]]

MOST_GENERATED = 64
"""Tokens of a generated text at most: the graph holds no cache, so each one costs a whole pass."""


def score(
    out: Path,
    record: Manifest,
    step: str,
    *,
    data: Path,
    columns: str = "",
    metric: str,
    options: Options | None = None,
    progress: Progress | None = None,
    fail_if: str | None = None,
    model: str | None = None,
) -> Scores:
    """One step of `out` on a file of labelled rows; see `score_steps`."""
    return score_steps(
        out, record, [step], data=data, columns=columns, metric=metric, options=options, progress=progress,
        fail_if=fail_if, model=model,
    )[0]  # fmt: skip


def score_steps(
    out: Path,
    record: Manifest,
    steps: Sequence[str],
    *,
    data: Path,
    columns: str = "",
    metric: str,
    options: Options | None = None,
    progress: Progress | None = None,
    fail_if: str | None = None,
    model: str | None = None,
) -> list[Scores]:
    """Steps of `out` on a file of labelled rows, in batches of 8; the reference answers once for all of them.

    `columns` and `fail_if` are as the flags take them; `model` is the checkpoint's directory or hub id. Raises
    UsageError for a metric that does not fit, a row without a label, a condition that cannot be judged; a step that is
    changed or cannot run here is told by its Scores.
    """
    options, progress = options or Options(), progress or Silent()
    row = metrics.metric_for(metric, record.task)
    wanted = conditions.parse(fail_if, metric) if fail_if is not None else ()
    facts = models.facts_from_data(record.facts)
    if metric == "bleu":
        metrics_text.check_bleu()
    kept = _Kept(out, record)
    for step in steps:
        record.record(step)
    reference = _Reference(kept, options, model)
    moves = conditions.needs_reference(wanted)
    if moves is not None and not any(reference.stands_beside(step) for step in steps):
        raise UsageError(
            f'--fail-if "{moves.text}" needs a reference, and {", ".join(steps)} has none but itself: give '
            f'--reference DIR (PyTorch itself), a step that was made from it, or a condition like "{moves.bound}"'
        )
    places = kept.places(steps, model)
    if not any(kept.reason(step) == "" for step in steps):
        return [Scores(step, metric, "drift", kept.reason(step), str(data)) for step in steps]
    read = labelled.read(data, columns, row, record.task)
    conditions.check(wanted, len(read))
    reader, labels = tokens.load(places, facts), labelled.read_labels(places)
    batches = labelled.prepare(read, row, facts, reader, labels, data)
    marker = Marker(row, facts, labels, reader, row.name == "squad" and marking.abstains(batches))
    work = _Work(kept, row, wanted, batches, marker, options, progress, tuple(labelled.doubts(read)))
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    notes = tuple(_notes(work))
    done = [_score(work, step, reference, notes) for step in steps]
    flags = {"data": str(data), "columns": columns, "metric": metric, "fail-if": fail_if, "reference": model}
    arguments = " ".join(f"--{name} {shlex.quote(said)}" for name, said in flags.items() if said)
    return [replace(each, data=str(data), data_sha256=digest, arguments=arguments) for each in done]


@dataclass(frozen=True)
class _Work:
    """What all steps share."""

    kept: _Kept
    metric: Metric
    conditions: tuple[Condition, ...]
    batches: Sequence[Batch]
    marker: Marker
    options: Options
    progress: Progress
    doubts: tuple[str, ...]
    """Why these rows may be worth less than their number."""

    @property
    def rows(self) -> int:
        return sum(len(batch.entries) for batch in self.batches)

    def answers(self, run: Run, what: str) -> Answers:
        """All rows through one model. Raises DriftError where it fails at a batch."""
        found = Answers()
        self.progress.start(what, len(self.batches))
        for batch in self.batches:
            self.progress.advance()
            try:
                if self.metric.name == "bleu":
                    said = generate(run, batch.inputs, self.marker.facts)
                else:
                    given = run(batch.inputs)
            except NlpconvertError:
                raise
            except Exception as error:  # a runtime raises whatever it likes
                raise DriftError(f"it fails at {batch.about}: {type(error).__name__}: {first_line(error)}") from error
            if self.metric.name == "bleu":
                self.marker.mark_texts(batch, said, found)
            else:
                self.marker.mark(batch, {name: np.asarray(array, np.float32) for name, array in given.items()}, found)
        return found


def _score(work: _Work, step: str, reference: _Reference, notes: tuple[str, ...]) -> Scores:
    began = time.perf_counter()
    empty = Scores(step, work.metric.name, "not run", rows=work.rows)
    try:
        artifact = work.kept.artifact(step)
        base = reference.answers(work) if reference.stands_beside(step) else None
        with contextlib.closing(runtimes.open_artifact(artifact, work.options)) as session:
            ours = work.answers(session.run, f"{step}: {work.metric.name}")
            empty = replace(empty, provider=session.provider, precision=session.precision)
    except CannotRunHere as error:
        return replace(empty, reason=str(error))
    except DriftError as error:
        return replace(empty, status="drift", reason=str(error))
    found = _found(work, empty, ours, base)
    doubts = work.doubts
    if found.status == "scored":
        who = "the reference itself" if base is not None else f"{step} itself"
        doubt = marking.doubt(work.marker, work.batches, base or ours, who)
        doubts = (doubt, *doubts) if doubt else doubts
    shown = [f"--fail-if {each.text}: not shown: {each.warning}" for each in found.fail_if if each.warning]
    return replace(
        found,
        reference=reference.words if base is not None else "",
        notes=(*reference.notes, *notes) if base is not None else notes,
        warnings=(*shown, *doubts),
        seconds=time.perf_counter() - began,
    )


def _found(work: _Work, empty: Scores, ours: Answers, base: Answers | None) -> Scores:
    """The numbers of a step that has answered everything."""
    if ours.broken or (base is not None and base.broken):
        who = "the reference's answers" if not ours.broken else "its answers"
        count = ours.broken or (base.broken if base is not None else 0)
        return replace(
            empty, status="drift", broken=ours.broken, reason=f"{who} are not finite in {count:,} of {_rows(work.rows)}"
        )
    found = paired.pairs(work.metric.scores, ours, base)
    average, labels = work.marker.average
    for name, each in found.items():
        if not math.isfinite(each.candidate):
            return replace(empty, status="drift", reason=f"its {name} is too large to be a number")
    return replace(
        empty,
        status="scored",
        scores=tuple(replace(each.scored(), average=average, labels=labels) for each in found.values()),
        changed=None if base is None else paired.changed(ours.decisions, base.decisions),
        fail_if=tuple(conditions.judge(each, found[each.score]) for each in work.conditions),
    )


def _notes(work: _Work) -> Iterator[str]:
    entries = [entry for batch in work.batches for entry in batch.entries]
    cut = sum(entry.cut for entry in entries)
    if cut:
        longer = "is longer than {} tokens and was" if cut == 1 else "are longer than {} tokens and were"
        yield f"{cut:,} of {_rows(len(entries))} {longer.format(work.marker.reader.limit)} cut"
    lost = sum(place is None for entry in entries for place in entry.tokens)
    if lost:
        have, are = ("word has", "is") if lost == 1 else ("words have", "are")
        yield f"{lost:,} {have} no token (cut off, or not of this vocabulary) and {are} not scored"
    if work.metric.name == "bleu":
        yield f"texts are generated greedily, {MOST_GENERATED} tokens at most; settings for generation are not applied"
    yield from _other_ids(work)
    if work.marker.abstains:
        yield "some questions have no answer: the empty span counts where it scores highest (SQuAD 2.0)"


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _other_ids(work: _Work) -> Iterator[str]:
    """Whether the tokenizer read here gives the ids that the checkpoint's own gave for the standard probes."""
    if work.kept.record.nlpconvert != nlpconvert.__version__:
        return  # another version may have asked other texts
    try:
        asked = {case.name: case.inputs["input_ids"] for case in golden.read(work.kept.out / manifest.GOLDEN)[0]}
        made = probes.probe_cases(work.marker.facts, work.marker.reader.encode)
    except NlpconvertError:
        return
    same = {
        case.name: np.array_equal(case.inputs["input_ids"], asked[case.name]) for case in made if case.name in asked
    }
    others = [name for name, equal in same.items() if not equal]
    if others:
        yield (
            f"the tokenizer beside the artifact gives other ids than the checkpoint's own did in {len(others)} of "
            f"{len(same)} probe cases, first {others[0]}: the scores are of what this one reads"
        )


# -- what is run -------------------------------------------------------------------------------------------------------


class _Kept:
    """An OUT and its record; what a step's files are is looked at once, for hashing takes its time."""

    def __init__(self, out: Path, record: Manifest) -> None:
        self.out, self.record = out, record
        self._reasons: dict[str, str] = {}

    def reason(self, step: str) -> str:
        """Why a step's artifact cannot be scored as it lies there; "" when it can."""
        if step not in self._reasons:
            kept = self.record.record(step)
            made = kept.outcome.artifact
            changed = [] if made is None else manifest.tampered(self.record, step, self.out)
            if made is None:
                reason = f"it holds no artifact: {kept.outcome.status}"
            elif changed:
                reason = f"{'; '.join(changed[:3])} since it was verified; it was not opened"
            else:
                reason = f"it is stale: {made.parent}, from which it was made, was replaced since" if kept.stale else ""
            self._reasons[step] = reason
        return self._reasons[step]

    def artifact(self, step: str) -> Artifact:
        """The step's artifact, as it was recorded. DriftError where it is not that."""
        if self.reason(step):
            raise DriftError(self.reason(step))
        return self.record.artifact(step, self.out)

    def places(self, steps: Sequence[str], model: str | None) -> list[Path]:
        """Where tokenizer and config may lie: beside the steps, or beside any other that is as it was recorded."""
        sound = [step for step in dict.fromkeys((*steps, *self.record.steps)) if not self.reason(step)]
        places = [self.record.artifact(step, self.out).directory for step in sound]
        return places + ([Path(model)] if model is not None and Path(model).is_dir() else [])


class _Reference:
    """What the steps are held against: it answers when it is first needed, and once."""

    def __init__(self, kept: _Kept, options: Options, model: str | None) -> None:
        self._kept, self._options, self._model = kept, options, model
        record = kept.record
        self._answers: Answers | None = None
        self._step = next((name for name in record.steps if model is None and _is_plain(record, name)), None)
        self.words = "pytorch, float32" if model is not None else f"{self._step}, float32"
        self.notes: tuple[str, ...] = ()
        if self._step is not None and record.steps[self._step].outcome.status != "agrees":
            status = record.steps[self._step].outcome.status
            self.notes = (f"the reference, {self._step}, was itself recorded as {status} against PyTorch",)

    def stands_beside(self, step: str) -> bool:
        """Whether the step has a reference other than itself."""
        return self._model is not None or self._step not in (None, step)

    def answers(self, work: _Work) -> Answers:
        """The reference's answers. CannotRunHere or DriftError, which say that it is the reference."""
        if self._answers is None:
            try:
                with self._opened() as run:
                    self._answers = work.answers(run, f"{self.words}: {work.metric.name}")
            except (CannotRunHere, DriftError) as error:
                raise type(error)(f"the reference ({self.words}) cannot answer: {error}") from error
        return self._answers

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Run]:
        if self._model is None:
            assert self._step is not None
            # On the CPU wherever the step runs: that is where it was held against PyTorch.
            options = replace(self._options, provider="cpu", device="cpu")
            with contextlib.closing(runtimes.open_artifact(self._kept.artifact(self._step), options)) as session:
                yield session.run
            return
        from nlpconvert import checkpoint, forward, source

        record = self._kept.record
        info = checkpoint.describe(self._model, revision=self._options.revision, task=record.task)
        if info.sha256 != record.source_sha256:
            raise UsageError(
                f"{self._model} is another checkpoint ({info.sha256[:12]}) than the one that {self._kept.out} was made "
                f"from ({record.source_sha256[:12]})"
            )
        with captured(Path(os.devnull)):
            loaded = source.load(self._model, **replace(self._options, task=record.task).loading())
        yield lambda batch: forward.call(loaded.module, batch)


def _is_plain(record: Manifest, step: str) -> bool:
    """Whether a step is the float32 ONNX made from the model itself."""
    artifact = record.steps[step].outcome.artifact
    return artifact is not None and (artifact.format, artifact.precision, artifact.parent) == (
        "onnx",
        "float32",
        "source",
    )


# -- generation --------------------------------------------------------------------------------------------------------


def generate(
    run: Run, batch: Mapping[str, np.ndarray], facts: Facts, most: int = MOST_GENERATED
) -> list[tuple[int, ...]]:
    """Greedy texts of an encoder-decoder without a cache: the whole graph again for each token.

    `batch`: the inputs, `decoder_input_ids` being the start (rows, 1). Ids of each row, start and end left out. Raises
    DriftError where a logit that decides is not finite.
    """
    ids = batch["decoder_input_ids"]
    done = np.zeros(len(ids), dtype=np.bool_)
    for _ in range(min(most, (facts.max_length or most + 1) - 1)):
        inputs = {**batch, "decoder_input_ids": ids, "decoder_attention_mask": np.ones_like(ids)}
        logits = run({name: inputs[name] for name in batch})["logits"][:, -1].astype(np.float32)
        if not np.isfinite(logits[~done]).all():
            raise DriftError("the logits of a next token are not finite")
        following = np.where(done, facts.pad_id, logits.argmax(axis=-1)).astype(np.int64)
        ids = np.ascontiguousarray(np.concatenate([ids, following[:, None]], axis=1))
        done |= following == facts.eos_id
        if done.all():
            break
    ends = [next((n for n, i in enumerate(row) if i == facts.eos_id), len(row)) for row in ids[:, 1:].tolist()]
    return [tuple(row[:end]) for row, end in zip(ids[:, 1:].tolist(), ends, strict=True)]

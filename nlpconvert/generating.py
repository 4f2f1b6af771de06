"""Floor 3: `generate`: an artifact writes on from prompts, and PyTorch beside it where that is asked for.

    nlpconvert generate out/onnx "Once upon a time" [--compare]

What it is pointed at is `subjects`, prompts and settings are `prompting`'s, the loop is `generation`, how two texts are
held against each other `first_difference`. Greedy needs neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import disk, generation, manifest, passages_files, plan, prompting, runtimes, subjects
from nlpconvert.errors import CannotRunHere, DriftError, MissingPackage, NlpconvertError, UsageError, first_line
from nlpconvert.first_difference import Difference, Judge, Show, Watch, greedy, otherwise
from nlpconvert.generated import Compared, Generated, Row, Speed
from nlpconvert.generation import Settings, Written
from nlpconvert.prompting import Words
from nlpconvert.subjects import Subject
from nlpconvert.writer import Writer

PROVIDERS = ("cpu", "cuda")


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """All that is asked of a writer: batches of prompts as ids, in order."""

    subject: Subject
    prompts: Sequence[str]
    rows: Sequence[Sequence[int]]
    words: Words | None
    how: Settings
    size: int

    def parts(self) -> Iterator[tuple[range, dict[str, np.ndarray], Settings]]:
        """Row numbers, the padded batch, and the settings, which draw other numbers for each batch."""
        for number, at in enumerate(range(0, len(self.rows), self.size)):
            part = range(at, min(at + self.size, len(self.rows)))
            batch = generation.pad_for(self.subject.facts, [self.rows[row] for row in part])
            yield part, batch, replace(self.how, seed=(self.how.seed + number) % prompting.LARGEST_SEED)

    def show(self, row: int) -> Show:
        return prompting.shown(self.words, self.rows[row], self.subject.pair)

    def told(self, row: int, written: Written, at: int) -> Row:
        ids = written.tokens[at, : written.lengths[at]].tolist()
        return Row(self.prompts[row], tuple(self.rows[row]), self.show(row)((), ids), tuple(ids), written.ended[at])


@dataclass(frozen=True)
class _Done:
    """What a writer wrote, by batch."""

    written: Sequence[Written]
    watched: Sequence[Watch]

    @property
    def speed(self) -> Speed:
        return Speed(
            sum(sum(each.lengths) for each in self.written),
            sum(each.prefill_seconds for each in self.written),
            sum(each.step_seconds for each in self.written),
        )


def _write(
    job: _Job,
    writer: Writer,
    what: str,
    *,
    watch: bool,
    scaled: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> _Done:
    """All batches; `watch` keeps the margins, `scaled` the scale of the scores too.

    DriftError where the scores are no numbers, or the runtime fails; CannotRunHere where memory does not suffice.
    """
    done, watches = [], []
    for part, batch, how in job.parts():
        kept = Watch(scaled)
        stream = _Stream(job.show(part[0]), on_text) if on_text is not None and len(job.rows) == 1 else None

        def see(logits: np.ndarray, chosen: np.ndarray, kept: Watch = kept, stream: _Stream | None = stream) -> None:
            if np.isnan(logits).any():
                raise DriftError(f"{what} gives scores that are no numbers (NaN): what it writes means nothing")
            if watch:
                kept.see(logits, chosen)
            if stream is not None:
                stream.add(int(chosen[0]))

        decode = None if job.words is None else job.words.decode
        try:
            written = generation.generate(writer, batch, how, decode=decode, on_step=see)
        except NlpconvertError:
            raise
        except Exception as error:  # a runtime raises whatever it likes
            if isinstance(error, MemoryError) or "allocate" in str(error):
                raise CannotRunHere(
                    f"{what} needs more memory than there is: give fewer prompts at a time, with --batch ({len(part)} "
                    f"now, {how.beams} beams), or a machine with more"
                ) from error
            raise DriftError(f"{what} fails while it writes: {first_line(error)}", detail=repr(error)) from error
        if stream is not None:
            stream.end(written.tokens[0, : written.lengths[0]].tolist())
        done.append(written)
        watches.append(kept)
    return _Done(done, watches)


class _Stream:
    """Tells a text as it grows; half a letter waits for its other half."""

    def __init__(self, show: Show, tell: Callable[[str], None]) -> None:
        self._show, self._tell = show, tell
        self._ids: list[int] = []
        self._told = ""

    def add(self, token: int) -> None:
        self._ids.append(token)
        text = self._show((), self._ids)
        if not text.endswith("\ufffd"):
            self._more(text)

    def end(self, ids: Sequence[int]) -> None:
        self._more(self._show((), ids))

    def _more(self, text: str) -> None:
        if text.startswith(self._told) and text != self._told:
            self._tell(text[len(self._told) :])
            self._told = text


def generate(
    artifact: Path | str | Subject,
    prompts: Sequence[str] | str,
    *,
    step: str | None = None,
    ids: bool = False,
    batch: int | None = None,
    provider: str = "cpu",
    threads: int | None = None,
    compare: bool = False,
    model: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    on_text: Callable[[str], None] | None = None,
    **settings: Any,
) -> Generated:
    """What an artifact writes on from prompts, greedily unless `sample=True` or `beams`.

    `artifact`: a step's directory, an OUT (`step` chooses, else `onnx`), a directory with graphs and config.json, or
    what `subjects.find` made of one.
    `ids`: prompts of numbers alone are token ids. `batch`: so many prompts at once, None for all. `compare`: PyTorch
    writes too, from `model` or the source that the manifest names. `on_text` is told a single prompt's text as it
    grows. `settings`: max_new_tokens, sample, seed, temperature, top_k, top_p, repetition_penalty, beams, stop, chunk,
    eos, and what else a generation config knows; what is not given is as generation_config.json has it.

    Raises, before anything runs: UsageError, DriftError for changed files, MissingPackage, CannotRunHere.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if provider not in PROVIDERS:
        raise UsageError(f'--provider "{provider}" is unknown: it is one of {", ".join(PROVIDERS)}')
    plan.check_words(plan.Options(threads=threads))
    if not prompts:
        raise UsageError("there is no prompt: give one, or a file of them with --data")
    if batch is not None and batch < 1:
        raise UsageError(f"--batch {batch}: 1 or more")
    if model is not None and not compare:
        raise UsageError("--model is what --compare runs beside the artifact, and that is not asked for")
    subject = artifact if isinstance(artifact, Subject) else subjects.find(Path(artifact), step)
    words = prompting.load_words(subject)
    rows = prompting.read_ids(prompts, words, subject, ids)
    how = prompting.choose(subject, settings, max(map(len, rows)))
    if not how.plain or how.beams > 1:
        for package in plan.NEEDS["torchscript"]:
            if runtimes.lacks(package):
                raise generation._missing()
    if how.stop and words is None:
        raise UsageError(f"--stop needs a tokenizer, and there is none in {subject.directory}")
    prompting.check_lengths(subject, rows, how)
    job = _Job(subject, prompts, rows, words, how, batch or len(rows))
    with ExitStack() as stack:
        judge = _judge(subject) if compare else Judge(subject.precision)
        name, load, other = _reference(subject, model, revision, trust_remote_code) if compare else ("", None, ())
        reference = None if load is None else stack.enter_context(closing(load()))
        writer = stack.enter_context(closing(_open(subject, provider, threads)))
        done = _write(job, writer, str(subject.path), watch=compare, on_text=on_text)
        compared = None if reference is None else _compare(job, judge, (reference, name), (writer, done))
    return Generated(
        artifact=str(subject.place),
        step=subject.step,
        precision=subject.precision,
        provider=writer.provider,
        settings=prompting.plain(how),
        rows=tuple(_rows(job, done)),
        speed=done.speed,
        compared=compared,
        notes=(*subject.notes, *prompting.passed_over(subject, how), *other),
    )


def _rows(job: _Job, done: _Done) -> Iterator[Row]:
    for (part, _, _), written in zip(job.parts(), done.written, strict=True):
        for at, row in enumerate(part):
            yield job.told(row, written, at)


def _open(subject: Subject, provider: str, threads: int | None) -> Writer:
    artifact = subject.artifact
    if artifact is not None and artifact.format != "onnx":
        session = runtimes.open_artifact(artifact, plan.Options(provider=provider, threads=threads))
        writer = runtimes.writer(session, artifact, subject.facts)
        if writer is None:
            raise UsageError(f"{subject.path} keeps no cache, so it is not written with: make it again")
        return writer
    if runtimes.lacks("onnxruntime"):
        raise MissingPackage("onnxruntime is not installed: pip install 'nlpconvert[verify]'")
    from nlpconvert.backends import writing

    return writing.open_paths(
        subject.path,
        subject.encoder,
        subject.facts,
        precision=subject.precision,
        device=provider,
        threads=threads,
        serving=True,
    )


# -- beside PyTorch ----------------------------------------------------------------------------------------------------


def _reference(
    subject: Subject, model: str | None, revision: str | None, trust: bool
) -> tuple[str, Callable[[], Writer], tuple[str, ...]]:
    """The model's name, what loads it, and what is other about it. UsageError where it is not there, or not the one
    that was converted."""
    for package in plan.NEEDS["torchscript"]:
        if runtimes.lacks(package):
            raise MissingPackage(f"--compare runs the model in PyTorch: pip install 'nlpconvert[cpu]' ({package})")
    from nlpconvert import checkpoint

    source: Mapping[str, Any] = {} if subject.record is None else subject.record.source
    name = model
    if name is None:
        place, hub = source.get("path"), source.get("id")
        if isinstance(place, str) and Path(place).is_dir():
            name = place
        elif isinstance(hub, str):
            name = hub
        else:
            was = f" ({place}, from which it was made, is not here)" if isinstance(place, str) else ""
            raise UsageError(f"--compare needs the model{was}: give --model DIR")
        revision = revision or (source.get("revision") if name == hub else None)
    info = checkpoint.describe(name, revision=revision, task=subject.facts.task)
    if subject.record is not None and info.sha256 != subject.record.source_sha256:
        raise UsageError(
            f"{name} is checkpoint {info.sha256[:12]}, and {subject.step} was made from "
            f"{subject.record.source_sha256[:12]}: give that, with --model"
        )

    def load() -> Writer:
        from nlpconvert import source as loading
        from nlpconvert.backends.pytorch_writing import PytorchWriter

        loaded = loading.load(
            name,
            revision=revision,
            task=subject.facts.task,
            allow_missing_weights=True,
            trust_remote_code=trust,
        )
        if loaded.facts.vocab_size != subject.facts.vocab_size:
            raise UsageError(
                f"{name} knows {loaded.facts.vocab_size:,} tokens and the artifact {subject.facts.vocab_size:,}: it is "
                "another model"
            )
        return PytorchWriter(loaded.module, loaded.facts)

    return name, load, _other_settings(info.transformer, subject.directory)


def _other_settings(model: Path, artifact: Path) -> tuple[str, ...]:
    """A note where the artifact's generation settings, by which both write, are not the model's own."""
    said = [(place / subjects.GENERATION) for place in (model, artifact)]
    theirs, ours = (file.read_bytes() if file.is_file() else b"" for file in said)
    if theirs == ours:
        return ()
    return (f"both write by {said[1]}, which is not the model's own {subjects.GENERATION}",)


def _compare(job: _Job, judge: Judge, reference: tuple[Writer, str], candidate: tuple[Writer, _Done]) -> Compared:
    (model, name), (writer, done) = reference, candidate
    theirs = _write(job, model, name, watch=True, scaled=judge.scale is None)
    found: list[Difference | None] = []
    for number, (part, batch, how) in enumerate(job.parts()):
        show = [job.show(row) for row in part]
        pair = theirs.written[number], done.written[number]
        if how.plain and how.beams == 1:
            watched = theirs.watched[number], done.watched[number]
            found += greedy(judge, (pair[0], watched[0]), (pair[1], watched[1]), show)
        else:
            found += otherwise(judge, how, batch, (model, pair[0]), (writer, pair[1]), show)
    return Compared(name, judge.noise, tuple(_rows(job, theirs)), tuple(found), theirs.speed)


def _judge(subject: Subject) -> Judge:
    """With noise and scale as the goldens of what is written have them, where there are some.

    DriftError where they are not what was recorded.
    """
    if subject.record is None or subject.out is None:
        return Judge(subject.precision)
    name = passages_files.WORDS
    directory = disk.inside(subject.out, manifest.GOLDEN)
    recorded = subject.record.golden.files.get(name)
    if recorded is None or not (directory / name).is_file():
        return Judge(subject.precision)
    path = disk.inside(directory, name)
    if disk.sha256_file(path) != recorded:
        raise DriftError(f"{path} has changed since it was recorded, so no near tie can be told by it; restore it")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        noise, scale = float(said["noise"].get("floor") or 0.0), float(said["scale"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DriftError(f"{path} is damaged ({first_line(error)}); restore it or convert again") from error
    return Judge(subject.precision, noise or None, scale)

"""Floor 3: a file that another tool made, judged against a reference model as if it had been made here.

    nlpconvert verify their/model.onnx --reference ./my-model [--map theirs=ours] [-o OUT]

Its inputs and outputs are matched by name, then by `--map`; what cannot be matched is named. With `-o` the file goes
into OUT as the step "foreign", with goldens and manifest, so that CI can verify it without torch and without the model.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert import cache_names, disk, judging, manifest, models, plan, renaming, runtimes
from nlpconvert.artifact import FOREIGN, STEPS, Artifact, Outcome, TensorSpec
from nlpconvert.errors import CannotRunHere, DriftError, MissingPackage, UsageError, first_line
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, Silent
from nlpconvert.settings import Settings
from nlpconvert.validators import compute, structure

if TYPE_CHECKING:
    from nlpconvert.line import Line
    from nlpconvert.models import Facts

STEP = FOREIGN

SUFFIXES: dict[str, str] = {
    ".onnx": "onnx",
    ".pt": "torchscript",
    ".pth": "torchscript",
    ".ts": "torchscript",
    ".torchscript": "torchscript",
    ".engine": "tensorrt",
    ".plan": "tensorrt",
    ".trt": "tensorrt",
}


PAIR = (
    "a decoder that reads an encoder's cache cannot be judged by itself, and pairs of files are judged only in a "
    "directory that nlpconvert has made: `nlpconvert verify OUT`"
)


@dataclass(frozen=True)
class Foreign:
    """What a file turned out to be: its format and precision, what it reads and gives, all files that belong to it."""

    path: Path
    format: str
    precision: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: tuple[str, ...]
    """Relative to the file's directory, itself first."""


def verify(
    file: Path | str,
    reference: str,
    *,
    out: Path | str | None = None,
    mapping: Sequence[str] = (),
    precision: str | None = None,
    cases: Sequence[str] | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    settings: Settings | None = None,
) -> list[Outcome]:
    """Judges a foreign file against `reference` (a directory or hub id); one outcome, of the step "foreign".

    `mapping`: "theirs=ours" each. `precision`: what to judge it as, where its own arithmetic does not say. `out`: where
    it is kept with goldens and manifest; None keeps nothing. Raises UsageError for a file, name or mapping that is
    wrong, MissingPackage where the reference cannot be run here.
    """
    options, progress, file = options or Options(), progress or Silent(), Path(file)
    chosen = settings or Settings()
    for package in plan.NEEDS["torchscript"]:
        if runtimes.lacks(package):
            raise MissingPackage(f"--reference runs the model in PyTorch: pip install 'nlpconvert[cpu]' ({package})")
    theirs = look(file, precision)
    if any(cache_names.is_past(spec.name) and ".encoder." in spec.name for spec in theirs.inputs):
        raise UsageError(f"{theirs.path}: {PAIR}")
    names = renaming.parse(mapping)
    if out is not None:
        return [_verify(theirs, reference, Path(out), names, cases, options, progress, chosen)]
    with tempfile.TemporaryDirectory(prefix="nlpconvert-") as scratch:
        return [_verify(theirs, reference, Path(scratch) / "out", names, cases, options, progress, chosen)]


def look(file: Path, precision: str | None = None) -> Foreign:
    """What a file is, from its suffix and its own words. UsageError where that cannot be told.

    A directory stands for the one model.onnx in it.
    """
    if file.is_dir():
        if (file / "decoder_model.onnx").is_file() and not (file / "model.onnx").is_file():
            raise UsageError(f"{file}: {PAIR}")
        file = file / "model.onnx"
    if not file.is_file():
        raise UsageError(f"{file}: no such file; give an ONNX, TorchScript or engine file")
    kind = SUFFIXES.get(file.suffix.lower())
    if kind is None:
        raise UsageError(f"{file}: cannot tell what this is; it has to end in {', '.join(SUFFIXES)}")
    files: tuple[str, ...] = (file.name,)
    found = "float32"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    if kind == "onnx":
        try:
            graph = structure.onnx_graph(file)
            inputs, outputs = structure.onnx_specs(graph)
            files += structure.onnx_data_files(graph)
            found = _precision(compute.count([graph]))
        except Exception as error:
            raise UsageError(f"{file} is no ONNX model: {str(error).splitlines()[0][:200]}") from error
        for name in files:
            disk.inside(file.parent, name)
    known = dict.fromkeys(row.precision for row in STEPS.values())
    if precision is not None and precision not in known:
        raise UsageError(f"--precision {precision}: it is one of {', '.join(known)}")
    return Foreign(file, kind, precision or found, inputs, outputs, files)


def _precision(products: compute.Products) -> str:
    """The lowest arithmetic that a product with a weight is computed in."""
    for words, named in (("int4", "int4"), ("int8", "int8"), ("bfloat16", "bfloat16"), ("float16", "float16")):
        if any(name.startswith(words) for name in products.count):
            return named
    return "float32"


def _verify(
    theirs: Foreign,
    reference: str,
    out: Path,
    names: Mapping[str, str],
    cases: Sequence[str] | None,
    options: Options,
    progress: Progress,
    settings: Settings,
) -> Outcome:
    from nlpconvert import verifying
    from nlpconvert.line import Line

    started = time.perf_counter()
    line = Line(reference, out, options, progress, settings)
    with line.opened(theirs.precision) as (record, probes):
        if not options.force and (out / STEP).exists():
            raise UsageError(f"{out / STEP} exists; --force replaces it when the new one is whole")
        line.check_settings(models.facts_from_data(record.facts), probes)
        beside = _config_beside(theirs, reference, options)
        tokenizer = _tokenizers(theirs, reference, line)
        line.loaded = None  # its answers are kept; the candidate gets the room
        if cases is not None:
            record.write(out)
            probes = judging.stored_probes(record, out, cases)
        with disk.building(out, STEP) as new:
            for name in theirs.files:
                target = new / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with disk.disk_errors(target):
                    shutil.copyfile(theirs.path.parent / name, target)
            artifact = _artifact(theirs, new, record, names, probes)
            size = sum((new / name).stat().st_size for name in artifact.files)
            notes = tuple(artifact.made_by.get("notes", ()))
            outcome = Outcome(STEP, "not run", artifact=artifact, bytes=size, notes=notes)
            outcome, used = judging.judged(outcome, record, probes, line.bounds(STEP), options, progress)
            outcome = _with_problems(outcome, beside)
            if tokenizer is not None:
                outcome = _with_tokenizer(outcome, tokenizer)
            disk.replace_directory(new, out / STEP)
        outcome = replace(
            outcome,
            artifact=replace(artifact, path=out / STEP / theirs.path.name),
            seconds=time.perf_counter() - started,
        )
        bounds, chosen = [each.to_dict() for each in used], options.recorded()
        record = record.with_step(outcome, tolerances=bounds, options=chosen)
        record.write(out)
        found = verifying.located(outcome, record, out, options, progress, model=reference)
        if found is not outcome:
            record.with_step(found, tolerances=bounds, options=chosen).write(out)
    return found


def _artifact(
    theirs: Foreign, new: Path, record: manifest.Manifest, names: Mapping[str, str], probes: judging.Probes
) -> Artifact:
    """The file as an artifact: matched by name, what could not be matched named in its notes."""
    facts = models.facts_from_data(record.facts)
    artifact = Artifact(
        step=STEP,
        path=new / theirs.path.name,
        format=theirs.format,
        precision=theirs.precision,
        task=record.task,
        inputs=theirs.inputs,
        outputs=theirs.outputs,
        files=disk.hash_tree(new),
        parent="source",
        parent_sha256=record.source_sha256,
        made_by={"foreign": True, "device": "cpu"},
    )
    if theirs.format != "onnx":
        try:
            artifact = _named(artifact, names, facts, probes)
        except CannotRunHere:
            return artifact  # it ends as "not run", with the reason
    # A cache is no input of the model's own: nothing is in it before the first token.
    artifact = replace(
        artifact,
        inputs=tuple(spec for spec in artifact.inputs if not cache_names.is_past(spec.name)),
        outputs=tuple(spec for spec in artifact.outputs if not cache_names.is_present(spec.name)),
    )
    read, given = [spec.name for spec in artifact.inputs], [spec.name for spec in artifact.outputs]
    renaming.check(names, (*read, *given), facts)
    inputs, notes = renaming.match_inputs(names, read, facts)
    outputs, more = renaming.match_outputs(names, given, facts)
    types = {spec.name: spec.dtype for spec in artifact.inputs}
    return replace(
        artifact,
        # In our names, as a person and the goldens have them; whose they were stands in made_by.
        inputs=tuple(replace(spec, name=inputs[spec.name]) for spec in artifact.inputs),
        outputs=tuple(replace(s, name=outputs[s.name]) for s in artifact.outputs if s.name in outputs),
        made_by={
            **artifact.made_by,
            "inputs": inputs,
            "outputs": outputs,
            "types": types,
            "notes": [*notes, *more],
        },
    )


def _named(artifact: Artifact, names: Mapping[str, str], facts: Facts, probes: judging.Probes) -> Artifact:
    """With the names that a TorchScript file or an engine does not declare: its outputs are what one case brings."""
    from nlpconvert.backends import renamed

    session: Any
    if artifact.format == "torchscript":
        from nlpconvert.backends import torchscript

        read = torchscript.input_names(artifact.path)
        artifact = replace(artifact, inputs=tuple(TensorSpec(name, "int64", ()) for name in read))
        session = torchscript.open(artifact)
    else:
        from nlpconvert.backends import tensorrt

        session = tensorrt.open_foreign(artifact)
        read = session.inputs
        artifact = replace(artifact, inputs=tuple(TensorSpec(name, "int64", ()) for name in read))
    case = next(case for case in probes.cases if case.name in probes.answers)
    try:
        inputs, _ = renaming.match_inputs(names, read, facts)
        given = session.run(renamed.feed(case.inputs, inputs, {}))
    except UsageError:
        raise
    except Exception as error:  # a runtime raises whatever it likes
        raise DriftError(f"{artifact.path.name} fails at case {case.name}: {first_line(error)}") from error
    finally:
        session.close()
    return replace(artifact, outputs=tuple(TensorSpec(n, a.dtype.name, ()) for n, a in given.items()))


# -- the tokenizer that ships with it ----------------------------------------------------------------------------------


def _tokenizers(theirs: Foreign, reference: str, line: Line) -> list[str] | None:
    """How the tokenizer beside the file differs from the model's, as sentences; None where there is none beside it."""
    directory = theirs.path.parent
    if not any((directory / name).is_file() for name in models.TOKENIZER_FILES):
        return None
    if line.encode is None or line.loaded is None:
        return [f"a tokenizer lies beside {theirs.path.name}, and the reference has none to hold it against"]
    from nlpconvert import probes, tokenizer

    try:
        encode = tokenizer.beside(directory, line.loaded.facts)
    except (UsageError, MissingPackage, CannotRunHere) as error:
        return [f"the tokenizer beside {theirs.path.name} cannot be loaded: {error}"]
    texts = [(row["text"], None) for row in probes.texts()] + [(row.text, row.pair) for row in probes.probe_rows()]
    differ = []
    for text, pair in texts:
        pair = pair if line.loaded.facts.pairs else None
        ours, other = line.encode(text, pair)["input_ids"], encode(text, pair)["input_ids"]
        if list(ours) != list(other):
            differ.append((text, list(ours), list(other)))
    if not differ:
        return _read_directly(directory, reference, line.options, [text for text, _ in texts])
    text, ours, other = differ[0]
    place = next((i for i, (a, b) in enumerate(zip(ours, other, strict=False)) if a != b), min(len(ours), len(other)))
    return [
        f"the tokenizer beside it gives other ids for {len(differ)} of {len(texts)} texts, first for {text[:40]!r}: "
        f"at token {place} {_around(other, place)} where the model's own gives {_around(ours, place)}"
    ]


def _read_directly(directory: Path, reference: str, options: Options, texts: Sequence[str]) -> list[str]:
    """What a server gets that reads tokenizer.json itself: its own normalizer and its own truncation."""
    from nlpconvert import checkpoint, tokens

    theirs = directory / "tokenizer.json"
    own = checkpoint.describe(reference, revision=options.revision, task=options.task).transformer / "tokenizer.json"
    if not theirs.is_file() or not own.is_file():
        return []
    read, read_own = tokens.raw(theirs), tokens.raw(own)
    differ = [(text, read_own(text), read(text)) for text in texts if read_own(text) != read(text)]
    if not differ:
        return []
    text, ours, other = differ[0]
    return [
        f"tokenizer.json beside it, read as it stands, gives other ids for {len(differ)} of {len(texts)} texts "
        f"({len(other)} for {text[:40]!r}, the model's own {len(ours)}): another normalizer or truncation?"
    ]


def _around(ids: Sequence[int], place: int) -> str:
    shown = ", ".join(map(str, ids[place : place + 3]))
    return f"[{shown}, ...]" if len(ids) > place + 3 else f"[{shown}] and ends"


CONFIG = (
    "model_type",
    "architectures",
    "id2label",
    "num_labels",
    "pad_token_id",
    "max_position_embeddings",
    "vocab_size",
)
"""What of a config.json decides how answers are read, or what may be asked."""


def _config_beside(theirs: Foreign, reference: str, options: Options) -> list[str]:
    """How the config.json beside the file differs from the model's, as sentences."""
    from nlpconvert import checkpoint

    path = theirs.path.parent / "config.json"
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return [f"config.json beside it cannot be read: {first_line(error)}"]
    if not isinstance(found, dict):
        return ["config.json beside it is no object"]
    ours = checkpoint.describe(reference, revision=options.revision, task=options.task).config
    return [
        f"config.json beside it has {key} {_short(found[key])}, the model's has {_short(ours[key])}"
        for key in CONFIG
        if key in found and key in ours and found[key] != ours[key]
    ]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _with_tokenizer(outcome: Outcome, problems: Sequence[str]) -> Outcome:
    """A tokenizer with other ids is a drift: the artifact is right, and whoever serves it gets wrong answers."""
    if not problems:
        return replace(outcome, notes=(*outcome.notes, "the tokenizer beside it gives the same ids as the model's"))
    return _with_problems(outcome, problems)


def _with_problems(outcome: Outcome, problems: Sequence[str]) -> Outcome:
    if not problems:
        return outcome
    if outcome.verdict is None:
        return replace(outcome, status="drift", reason="; ".join(problems))
    verdict = {**outcome.verdict, "structure": [*outcome.verdict.get("structure", ()), *problems]}
    return replace(outcome, status="drift", verdict=verdict)

"""Floor 3: what `generate` is pointed at: a step of an OUT, an OUT, or a directory that another tool made.

It is looked at and refused here, before anything is opened: files that are not what their record says, artifacts that
answer and do not write, graphs without a cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlpconvert import cache_names, config_facts, foreign, manifest, models, runtimes
from nlpconvert.artifact import Artifact, TensorSpec
from nlpconvert.errors import CannotRunHere, DriftError, UsageError, first_line
from nlpconvert.manifest import Manifest
from nlpconvert.models import Facts
from nlpconvert.writer import encodes

DEFAULT_STEP = "onnx"
DECODER, PAIR_DECODER, PAIR_ENCODER = "model.onnx", "decoder_model.onnx", "encoder_model.onnx"
GENERATION = "generation_config.json"

# What a writer feeds besides the cache.
_FED = ("input_ids", "attention_mask", "position_ids", "encoder_attention_mask", "encoder_hidden_states")


@dataclass(frozen=True)
class Subject:
    """An artifact that keeps a cache. `place`: as it was given; `path`: its graph, the decoder's of a pair; `encoder`:
    the other one's.

    `step`: "" for a directory without a manifest, of which `artifact`, `record` and `out` are None. `notes`: lines for
    the person.
    """

    place: Path
    path: Path
    encoder: Path | None
    step: str
    precision: str
    facts: Facts
    generation: Mapping[str, Any]
    artifact: Artifact | None = None
    record: Manifest | None = None
    out: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def pair(self) -> bool:
        """Whether an encoder reads the prompt, and what is written stands by itself."""
        return encodes(self.facts)

    @property
    def directory(self) -> Path:
        """Where tokenizer and configs lie."""
        return self.path.parent


def find(place: Path, step: str | None = None) -> Subject:
    """What `place` stands for: a step's directory, an OUT (its step `onnx`, or `step`), a directory with graphs and
    config.json, or a file in one of these.

    Raises UsageError where there is nothing, or nothing that writes with a cache; DriftError where files are not those
    that were verified; CannotRunHere for an engine.
    """
    path = Path(os.path.abspath(place))
    if path.is_file():
        path = path.parent
    if not path.is_dir():
        raise UsageError(f"{place}: no such directory; give a step's, such as out/onnx, or an OUT")
    if (path / manifest.FILE).is_file():
        return _recorded(place, path, manifest.read(path), step or DEFAULT_STEP)
    if (path.parent / manifest.FILE).is_file():
        record = manifest.read(path.parent)
        if path.name in record.steps:
            if step not in (None, path.name):
                raise UsageError(f"{place} is the step {path.name}, and --step says {step}: give one of them")
            return _recorded(place, path.parent, record, path.name)
    if step is not None:
        raise UsageError(f"--step chooses a step of an OUT, and {place} holds no {manifest.FILE}")
    return _bare(path, place)


# -- a step of an OUT --------------------------------------------------------------------------------------------------


def _recorded(place: Path, out: Path, record: Manifest, step: str) -> Subject:
    if step not in record.steps:
        there = ", ".join(record.steps) or "none yet"
        raise UsageError(f"{out} holds no step {step!r}; there is {there}: choose one by --step")
    artifact = record.artifact(step, out)
    facts = models.facts_from_data(record.facts)
    _check_writes(artifact, out)
    changed = manifest.tampered(record, step, out)
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise DriftError(f"{'; '.join(changed[:3])}{more} since it was verified; it was not opened")
    kept = record.record(step)
    if kept.stale:
        raise DriftError(
            f"{step} is stale: {artifact.parent}, from which it was made, was replaced since; make it anew"
        )
    broken = manifest.broken_chain(record, step)
    if broken:
        raise DriftError(f"{broken}; it was not opened")
    if artifact.made_by.get("foreign"):
        theirs = foreign.look(artifact.path)  # its cache is not among what was recorded
        _check_graph(theirs.inputs, theirs.outputs, artifact.path)
    notes: tuple[str, ...] = ()
    if kept.outcome.status != "agrees":
        reason = f" ({kept.outcome.reason})" if kept.outcome.reason else ""
        notes = (f"the verdict on {step} is {kept.outcome.status}{reason}: nlpconvert verify {out} --step {step}",)
    encoder = artifact.encoder
    if encoder is None and (artifact.directory / PAIR_ENCODER).is_file():
        encoder = artifact.directory / PAIR_ENCODER
    return Subject(
        place,
        artifact.path,
        encoder if encodes(facts) else None,
        step,
        artifact.precision,
        facts,
        read_config(artifact.directory / GENERATION),
        artifact,
        record,
        out,
        notes,
    )


def _check_writes(artifact: Artifact, out: Path) -> None:
    """Refuses what does not write with a cache, in one line that says what it is and what to do."""
    place = out / artifact.step
    if artifact.task not in models.WRITING:
        raise UsageError(f"{place} is of the task {artifact.task}: it answers and does not write")
    keeps = any(cache_names.is_past(spec.name) for spec in artifact.inputs)
    if artifact.made_by.get("foreign") and artifact.format == "onnx":
        return
    if artifact.format == "torchscript":
        raise UsageError(
            f"{place} is TorchScript and keeps no cache, so it is not written with: give the ONNX step, {out / 'onnx'}"
        )
    if artifact.format not in runtimes.WRITERS and keeps:
        raise CannotRunHere(
            f"{place} is a TensorRT engine, which is not written with here: give {out / artifact.parent}, from which "
            "it was built"
        )
    if not keeps:
        kind = "a TensorRT engine" if artifact.format == "tensorrt" else "an ONNX graph"
        raise UsageError(
            f"{place} is {kind} without a cache (no past_key_values among its inputs): make the step onnx again with "
            "this nlpconvert, in a new directory"
        )


# -- a directory that another tool made --------------------------------------------------------------------------------


def _bare(directory: Path, place: Path) -> Subject:
    encodes = (directory / PAIR_ENCODER).is_file() and (directory / PAIR_DECODER).is_file()
    path = directory / (PAIR_DECODER if encodes else DECODER)
    if not path.is_file():
        raise UsageError(f"{place} holds no artifact that writes: {_instead(directory, place)}")
    theirs = foreign.look(path)
    _check_graph(theirs.inputs, theirs.outputs, path)
    config = directory / "config.json"
    if not config.is_file():
        raise UsageError(
            f"{place} holds no {manifest.FILE} and no config.json: what the model starts with and how long its texts "
            "may be is not known; put the model's config.json there"
        )
    generation = read_config(directory / GENERATION)
    try:
        facts = config_facts.of_writer(read_config(config), generation, theirs.inputs, theirs.outputs, encodes=encodes)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from error
    note = f"{place} holds no {manifest.FILE}: nothing says whether these files were ever verified"
    encoder = directory / PAIR_ENCODER if encodes else None
    return Subject(place, path, encoder, "", theirs.precision, facts, generation, notes=(note,))


def _instead(directory: Path, place: Path) -> str:
    """What lies there instead, and what to do."""
    if (directory / "decoder_model_merged.onnx").is_file():
        return "decoder_model_merged.onnx holds two graphs in one, which is not taken; nlpconvert onnx MODEL -o OUT"
    if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
        return f"it is a checkpoint; convert it first: nlpconvert onnx {place} -o OUT"
    return f"no {DECODER}, and not both of {PAIR_ENCODER} and {PAIR_DECODER}"


def _check_graph(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], path: Path) -> None:
    names = [spec.name for spec in inputs]
    if not any(cache_names.is_past(name) and ".encoder." not in name for name in names):
        raise UsageError(
            f"{path} keeps no cache (no past_key_values among its inputs), so it is not written with: convert the "
            "model with nlpconvert onnx MODEL -o OUT"
        )
    if not any(spec.name == "logits" for spec in outputs):
        raise UsageError(f"{path} gives no logits, so there is nothing to choose tokens by")
    strange = [name for name in names if name not in _FED and not cache_names.is_past(name)]
    if strange:
        raise UsageError(f"{path} takes {strange[0]}, which a graph for any past does not: it cannot be written with")


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file. UsageError where it is none."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no JSON object")
    return data

"""Floor 1: what a Triton model repository says about an artifact, as plain data: shapes, batching, padding.

How it is written as protobuf text is `config`, into which files `repository`. Nothing here knows a server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nlpconvert import cache_names
from nlpconvert.artifact import Artifact, TensorSpec
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.models import AXIS_MASK, Facts
from nlpconvert.profiles import Profile, from_data

DEFAULT_MAX_BATCH = 32

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

OWN_BACKEND: Mapping[str, str] = {"onnx": "onnxruntime", "torchscript": "pytorch", "tensorrt": "tensorrt"}
"""By format, the backend of Triton that runs the file itself."""
PYTHON = "python"
"""The backend that runs one of our own models around ONNX Runtime or torch."""


@dataclass(frozen=True)
class Batching:
    """How requests become batches: the fields of a configuration that a measurement may choose.

    `max_batch`: rows of one execution at most. `preferred`: sizes to stop waiting at. `max_delay`: microseconds that a
    request may wait for companions. `instances`: executions at a time. `source`: who says so, in words.
    """

    max_batch: int = DEFAULT_MAX_BATCH
    preferred: tuple[int, ...] = ()
    max_delay: int = 0
    instances: int = 1
    source: str = "default"


@dataclass(frozen=True)
class Tensor:
    """One input or output of a served model. `dims` without the batch axis, -1 where any size fits.

    `ragged`: requests of different sizes may form one batch. `labels`: name of a file with one label a line.
    """

    name: str
    dtype: str
    dims: tuple[int, ...]
    ragged: bool = False
    optional: bool = False
    labels: str = ""


@dataclass(frozen=True)
class Warmup:
    """A request that is answered before the model counts as ready: `files` below the model's warmup folder, by input.

    `dims` without the batch axis.
    """

    name: str
    rows: int
    tensors: tuple[Tensor, ...]
    files: Mapping[str, str]


# -- which backend ----------------------------------------------------------------------------------------------------


def choose_backend(artifact: Artifact, wanted: str | None) -> str:
    """Which backend serves the artifact. UsageError for one that cannot."""
    own = OWN_BACKEND[artifact.format]
    keeps = cache_names.keeps(artifact.inputs)
    if wanted not in (None, own, PYTHON):
        raise UsageError(f"--backend {wanted} does not run {artifact.format}: give {own} or {PYTHON}")
    if artifact.format == "tensorrt":
        flavour = str(artifact.made_by.get("builder", ""))
        if flavour != "tensorrt":
            raise UsageError(
                f"{artifact.step} is an engine of {flavour or 'an unknown builder'}, and Triton's tensorrt backend "
                "loads those of tensorrt only: build it with --runtime tensorrt"
            )
        if wanted == PYTHON:
            raise UsageError("an engine is served by Triton's own tensorrt backend, not by the Python one")
        if keeps:
            raise UsageError(f"{artifact.step} keeps a cache, and Triton's tensorrt backend hands none on; serve onnx")
        return own
    if artifact.made_by.get("foreign"):
        raise UsageError(f"{artifact.step} is a file that another tool made, under names of its own: not served yet")
    if not keeps:
        return wanted or own
    if wanted == own:
        raise UsageError(
            f"{artifact.step} keeps a cache, which its clients would have to send along: --backend {PYTHON} keeps it "
            "inside"
        )
    return PYTHON


def profile(artifact: Artifact) -> Profile | None:
    """The shapes that an engine was built for; None of what takes any."""
    kept = artifact.made_by.get("profiles")
    if artifact.format != "tensorrt" or not kept:
        return None
    try:
        return from_data(kept[0])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DriftError(
            f"the manifest's profile of {artifact.step} cannot be read ({error}); build it again"
        ) from error


def check_name(text: str) -> str:
    if not NAME.fullmatch(text):
        raise UsageError(f"--name {text!r}: a model's name is letters, digits, dots, dashes and underscores")
    return text


# -- batching ---------------------------------------------------------------------------------------------------------


def delay(text: str) -> int:
    """Microseconds of "5ms", "500us" or "0.01s". UsageError for anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*", text)
    if found is None:
        raise UsageError(f'--max-delay "{text}" is no time: write for example 5ms or 500us')
    microseconds = float(found[1]) * {"us": 1, "ms": 1_000, "s": 1_000_000}[found[2]]
    if microseconds > 60_000_000:
        raise UsageError(f"--max-delay {text} is over a minute; nobody waits so long for companions")
    return round(microseconds)


def read_batching(path: Path, step: str | None = None) -> Batching:
    """What `nlpconvert bench` recommends in its JSON, for `step` where it knows it: an object, at whatever depth, that
    holds max_batch_size.

    UsageError: no such file, not JSON, no recommendation in it, or a value that cannot be.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--batching {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--batching {path} is not JSON ({error})") from error
    queue = data.get("batching") if isinstance(data, Mapping) else None
    steps = queue.get("steps") if isinstance(queue, Mapping) else None
    if step and isinstance(steps, Mapping) and step in steps:
        return _batching(steps[step], str(path))
    found = list(_recommended(data))
    if not found:
        raise UsageError(
            f"--batching {path} recommends no max_batch_size: make it by `nlpconvert bench OUT --arrivals ... "
            "--p99 ... --json FILE`"
        )
    if len({json.dumps(each, sort_keys=True, default=str) for each in found}) > 1:
        raise UsageError(f"--batching {path} holds {len(found)} recommendations; keep the one that is meant")
    return _batching(found[0], str(path))


def _recommended(data: Any) -> Iterable[Mapping[str, Any]]:
    """The objects that hold a recommendation; what stands under "recommended" before any other."""
    if isinstance(data, Mapping):
        for key in ("recommended", "recommendation"):
            if isinstance(data.get(key), Mapping) and "max_batch_size" in data[key]:
                yield data[key]
                return
        if "max_batch_size" in data:
            yield data
            return
        for value in data.values():
            yield from _recommended(value)
    elif isinstance(data, list):
        for value in data:
            yield from _recommended(value)


def _batching(data: Mapping[str, Any], source: str) -> Batching:
    def whole(names: Sequence[str], least: int, default: int) -> int:
        value = next((data[name] for name in names if data.get(name) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < least:
            raise UsageError(f"{source}: {names[0]} is {json.dumps(value)[:40]}; it has to be a number from {least} up")
        return int(value)

    preferred = data.get("preferred_batch_size") or ()
    if isinstance(preferred, int):
        preferred = (preferred,)
    if not isinstance(preferred, list | tuple) or not all(isinstance(each, int) and each > 0 for each in preferred):
        raise UsageError(f"{source}: preferred_batch_size is {json.dumps(preferred)[:40]}; it has to be sizes")
    return Batching(
        whole(["max_batch_size"], 1, 1),
        tuple(sorted(set(preferred))),
        whole(["max_queue_delay_microseconds"], 0, 0),
        whole(["instances", "instance_count", "count"], 1, 1),
        source,
    )


def choose_batching(
    *,
    file: Path | None,
    max_batch: int | None,
    max_delay: str | None,
    instances: int | None,
    profile: Profile | None,
    step: str | None = None,
) -> Batching:
    """What was measured, or what was given, or the default; always inside the engine's profile.

    UsageError for two sources at once, and where profile and batching contradict each other.
    """
    if file is not None and (max_batch is not None or max_delay is not None):
        raise UsageError("--batching says what --max-batch and --max-delay say; give one or the other")
    if file is not None:
        found = read_batching(file, step)
    else:
        most = DEFAULT_MAX_BATCH if profile is None else profile.max.get("batch", 1)
        given = max_batch is not None or max_delay is not None
        found = Batching(
            most if max_batch is None else max_batch,
            max_delay=0 if max_delay is None else delay(max_delay),
            source="given" if given else "the engine's profile" if profile is not None else "default",
        )
    found = found if instances is None else replace(found, instances=instances)
    _check(found, profile)
    return found


def _check(found: Batching, profile: Profile | None) -> None:
    if found.max_batch < 1:
        raise UsageError(f"max_batch_size {found.max_batch}: batches hold one row at least")
    over = [size for size in found.preferred if size > found.max_batch]
    if over:
        raise UsageError(f"preferred_batch_size {over[0]} is over max_batch_size {found.max_batch}")
    if profile is None:
        return
    low, high = profile.min.get("batch", 1), profile.max.get("batch", 1)
    if found.max_batch > high:
        raise UsageError(
            f"max_batch_size {found.max_batch} is over the engine's profile, which ends at batch {high}: "
            f"give --max-batch {high} or build with a larger --max"
        )
    if low > 1:
        raise UsageError(
            f"the engine's profile begins at batch {low}, and a request of one row would be refused: build with --min "
            "at batch 1"
        )


# -- tensors ----------------------------------------------------------------------------------------------------------


def dims(spec: TensorSpec) -> tuple[int, ...]:
    """The shape of a tensor in one request, the batch axis left out. UsageError where there is none to leave out."""
    if not spec.shape or spec.shape[0] != "batch":
        raise UsageError(f"{spec.name} has no batch axis ({spec.shape}), so that its requests cannot be batched")
    return tuple(-1 if isinstance(size, str) else size for size in spec.shape[1:])


def padded_axes(inputs: Iterable[TensorSpec], pair: bool = False) -> tuple[str, ...]:
    """The axes along which rows of different sizes may stand in one batch: those that a mask covers.

    The decoder of a `pair` looks at nothing to its right, so that padding there needs no mask.
    """
    names = {spec.name for spec in inputs}
    covered = [axis for axis, mask in AXIS_MASK.items() if mask in names]
    return tuple(dict.fromkeys([*covered, *(["decoder_sequence"] if pair else [])]))


def fills(facts: Facts) -> dict[str, int]:
    """What stands in padding, by input: the pad id, and a mask of 0."""
    return {
        "input_ids": facts.pad_id,
        "attention_mask": 0,
        "token_type_ids": 0,
        "position_ids": 1,
        "decoder_input_ids": facts.pad_id,
        "decoder_attention_mask": 0,
    }


def asked(artifact: Artifact, facts: Facts) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of the artifact as a client sees them: a cache stays inside.

    What a model that writes takes is what its goldens hold: whole texts in, the answers to all of their tokens out.
    """
    if not cache_names.keeps(artifact.inputs):
        return artifact.inputs, artifact.outputs
    from nlpconvert.models import input_axes

    inputs = tuple(TensorSpec(name, "int64", input_axes(name, facts.task)) for name in facts.inputs)
    given = {spec.name: spec for spec in artifact.outputs}
    own = artifact.made_by.get("encoder")
    if isinstance(own, Mapping):
        for each in own["outputs"]:
            renamed = "encoder_last_hidden_state" if each["name"] == "last_hidden_state" else each["name"]
            given.setdefault(renamed, TensorSpec(renamed, each["dtype"], tuple(each["shape"])))
    return inputs, tuple(given[row.name] for row in facts.outputs if row.name in given)


def warnings(artifact: Artifact, facts: Facts, rows: Mapping[str, Any] | None, batching: Batching) -> list[str]:
    """What batching will do to the answers, from the verdict's report on rows; one line each, none where nothing is.

    `rows`: the verdict's "rows" (validators.rows), None where the step was never run.
    """
    said: list[str] = []
    if batching.max_batch == 1:
        return said
    if rows is None:
        return [f"{artifact.step} was never run here, so it is not known whether a row's answer depends on its batch"]
    for kind, what in (
        ("company", "on the rows that share its batch"),
        ("padding", "on padding at its right, which a batch of mixed lengths adds"),
    ):
        worst = max(
            (each for each in rows.get("outputs", ()) if each.get("kind", "company") == kind and each.get("flagged")),
            key=lambda each: float(each["worst_abs"]),
            default=None,
        )
        if worst is not None:
            said.append(
                f"{artifact.step}: a row's answer depends {what}: {worst['name']} by {float(worst['worst_abs']):.1e} "
                f"(cosine {float(worst['cosine']):.4f}); --max-batch 1 serves each request alone"
            )
    if any(each.get("kind") == "padding-left" and each.get("own") for each in rows.get("outputs", ())):
        said.append(f"{artifact.step}: padding at the left moves the answers in the model itself: pad at the right")
    return said


def fits(profile: Profile, axes: Mapping[str, int]) -> bool:
    """Whether one row of these sizes lies inside an engine's profile."""
    return all(
        profile.min.get(axis, 0) <= size <= profile.max.get(axis, size)
        for axis, size in axes.items()
        if axis != "batch"
    )


def plain(spec: TensorSpec) -> dict[str, Any]:
    """A tensor as serving.json has it: its axes by name, the dynamic ones as words."""
    return {"name": spec.name, "dtype": spec.dtype, "axes": list(spec.shape)}

"""Floor 2: config.pbtxt, through the protobuf that tritonclient carries: plain data in, text out, and back.

What the numbers are is `plan`'s, which files stand beside it `repository`'s. Field by field as in Triton's own
"Model Configuration" (docs/user_guide/model_configuration.md) and model_config.proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from nlpconvert.errors import DriftError, UsageError, first_line
from nlpconvert.triton.plan import Batching, Tensor, Warmup

FILE = "config.pbtxt"

TYPES: Mapping[str, str] = {
    "bool": "TYPE_BOOL",
    "int8": "TYPE_INT8",
    "uint8": "TYPE_UINT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "text": "TYPE_STRING",
}
"""numpy's words for element types, and "text" for bytes, to Triton's."""


@dataclass(frozen=True)
class Model:
    """A configuration read back: what a client has to know, and what the repository has to hold."""

    name: str
    backend: str
    platform: str
    max_batch: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    file: str
    batches: bool
    decoupled: bool
    models: tuple[str, ...]
    """Of an ensemble, the models that it calls."""


def model(
    name: str,
    backend: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    batching: Batching | None,
    *,
    file: str = "",
    gpu: bool = False,
    warmup: Sequence[Warmup] = (),
    parameters: Mapping[str, str] | None = None,
    decoupled: bool = False,
    instances: int | None = None,
) -> str:
    """config.pbtxt of a model. `batching` None: requests are taken as they are, their first axis is no batch.

    `instances` replaces the batching's own. Raises UsageError for an element type that Triton does not know.
    """
    config = model_config_pb2.ModelConfig(name=name, backend=backend)
    if backend == "tensorrt":
        config.platform = "tensorrt_plan"
    if file:
        config.default_model_filename = file
    config.max_batch_size = 0 if batching is None else batching.max_batch
    _tensors(config, inputs, outputs)
    # The newest version is served; the repository holds one.
    config.version_policy.latest.num_versions = 1
    count = instances if instances is not None else batching.instances if batching is not None else 1
    group = config.instance_group.add(count=count)
    group.kind = model_config_pb2.ModelInstanceGroup.Kind.Value("KIND_GPU" if gpu else "KIND_CPU")
    if batching is not None and batching.max_batch > 1:
        dynamic = config.dynamic_batching
        dynamic.SetInParent()
        dynamic.preferred_batch_size.extend(batching.preferred)
        dynamic.max_queue_delay_microseconds = batching.max_delay
    for each in warmup:
        _warmup(config, each)
    for key, value in (parameters or {}).items():
        config.parameters[key].string_value = value
    if decoupled:
        config.model_transaction_policy.decoupled = True
    return _text(config)


def ensemble(
    name: str,
    max_batch: int,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    steps: Sequence[tuple[str, Mapping[str, str], Mapping[str, str]]],
) -> str:
    """config.pbtxt of a chain. A step: a model, and by its inputs and outputs the tensors of the chain."""
    config = model_config_pb2.ModelConfig(name=name, platform="ensemble", max_batch_size=max_batch)
    _tensors(config, inputs, outputs)
    config.version_policy.latest.num_versions = 1
    for called, taken, given in steps:
        step = config.ensemble_scheduling.step.add(model_name=called, model_version=-1)
        for key, value in taken.items():
            step.input_map[key] = value
        for key, value in given.items():
            step.output_map[key] = value
    return _text(config)


def _tensors(config: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for tensor in inputs:
        entry = config.input.add(name=tensor.name, data_type=_type(tensor), dims=tensor.dims)
        # Set only where it says something: what stands in the file is what a person reads.
        if tensor.ragged:
            entry.allow_ragged_batch = True
        if tensor.optional:
            entry.optional = True
    for tensor in outputs:
        entry = config.output.add(name=tensor.name, data_type=_type(tensor), dims=tensor.dims)
        if tensor.labels:
            entry.label_filename = tensor.labels


def _type(tensor: Tensor) -> int:
    if tensor.dtype not in TYPES:
        raise UsageError(f"Triton knows no element type for {tensor.name}, which is {tensor.dtype}")
    value: int = model_config_pb2.DataType.Value(TYPES[tensor.dtype])
    return value


def _warmup(config: Any, warmup: Warmup) -> None:
    entry = config.model_warmup.add(name=warmup.name, batch_size=warmup.rows)
    for tensor in warmup.tensors:
        given = entry.inputs[tensor.name]
        given.data_type = _type(tensor)
        given.dims.extend(tensor.dims)
        given.input_data_file = warmup.files[tensor.name]


def _text(config: Any) -> str:
    text: str = text_format.MessageToString(config)
    # What cannot be read back must not be written.
    if text_format.Parse(text, model_config_pb2.ModelConfig()) != config:
        raise UsageError(f"the configuration of {config.name} cannot be written as text")
    return text


def read(path: Path) -> Model:
    """A config.pbtxt as plain data. DriftError where there is none or it does not parse."""
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(path.read_text(encoding="utf-8"), config)
    except OSError as error:
        raise DriftError(f"{path} cannot be read: {error.strerror}") from error
    except (text_format.ParseError, ValueError) as error:
        raise DriftError(f"{path} does not parse: {first_line(error)}") from error
    ours = {number: word for word, number in ((w, model_config_pb2.DataType.Value(t)) for w, t in TYPES.items())}

    def plain(entry: Any) -> Tensor:
        return Tensor(
            entry.name,
            ours.get(entry.data_type, model_config_pb2.DataType.Name(entry.data_type)),
            tuple(entry.dims),
            getattr(entry, "allow_ragged_batch", False),
            getattr(entry, "optional", False),
            getattr(entry, "label_filename", ""),
        )

    return Model(
        config.name,
        config.backend,
        config.platform,
        config.max_batch_size,
        tuple(plain(entry) for entry in config.input),
        tuple(plain(entry) for entry in config.output),
        config.default_model_filename,
        config.HasField("dynamic_batching"),
        config.model_transaction_policy.decoupled,
        tuple(step.model_name for step in config.ensemble_scheduling.step),
    )

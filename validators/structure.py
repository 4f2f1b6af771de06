"""Floor 1, validators: has the artifact the inputs and outputs it should? Specs in, sentences out.

What a structure looks like says nothing about answers: `parity` does. It catches early, and by name, what would
otherwise show as an error of the runtime at another shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nlpconvert.artifact import TensorSpec


def check_specs(
    expected_inputs: Sequence[TensorSpec],
    expected_outputs: Sequence[TensorSpec],
    actual_inputs: Sequence[TensorSpec],
    actual_outputs: Sequence[TensorSpec],
) -> list[str]:
    """Every way in which the actual specs are not the expected ones, one sentence each; empty when they fit.

    Names (in any order), element types, ranks and axes. An axis expected as a word must be dynamic, under whatever
    name (a string, or a number below zero); one expected as a number may be dynamic too, since runtimes leave
    fixed sizes unnamed, but must not be another number.
    """
    return [
        *_check("input", expected_inputs, actual_inputs),
        *_check("output", expected_outputs, actual_outputs),
    ]


def load_onnx() -> None:
    """Imports onnx, so that another thread can do its work meanwhile."""
    import onnx

    assert onnx.__version__


def onnx_graph(path: Path) -> Any:
    """The GraphProto of an ONNX file, without the weights beside it. Raises what `onnx.load` raises."""
    import onnx

    return onnx.load(str(path), load_external_data=False).graph


def cut_off(path: Path) -> str:
    """Which data file of an ONNX file is missing or shorter than the graph reads it, in one sentence; "" if none is, or
    the file itself cannot be read."""
    try:
        graph = onnx_graph(path)
    except Exception:  # protobuf raises several kinds
        return ""
    for tensor in graph.initializer:
        said = {entry.key: entry.value for entry in tensor.external_data}
        if not said.get("location"):
            continue
        file, end = path.parent / said["location"], int(said.get("offset", 0)) + int(said.get("length", 0))
        if not file.is_file():
            return f"{file.name}, which {path.name} reads its weights from, is not there"
        if (size := file.stat().st_size) < end:
            return f"{file.name} is cut off: it is {size:,} bytes long, and {path.name} reads {end:,}"
    return ""


def onnx_specs(graph: Any) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs as a GraphProto declares them.

    An axis without a name is "?", as is one whose shape the graph leaves open.
    """
    weights = {tensor.name for tensor in graph.initializer}
    inputs = tuple(_declared(value) for value in graph.input if value.name not in weights)
    return inputs, tuple(_declared(value) for value in graph.output)


def onnx_data_files(graph: Any) -> tuple[str, ...]:
    """Files that hold a GraphProto's weights, relative to the ONNX file's directory, each once."""
    from onnx.external_data_helper import uses_external_data

    places = (
        entry.value
        for tensor in graph.initializer
        if uses_external_data(tensor)
        for entry in tensor.external_data
        if entry.key == "location"
    )
    return tuple(dict.fromkeys(places))


def _declared(value: Any) -> TensorSpec:
    import onnx

    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in tensor.shape.dim)
    return TensorSpec(value.name, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape)


def _check(kind: str, expected: Sequence[TensorSpec], actual: Sequence[TensorSpec]) -> list[str]:
    problems: list[str] = []
    given = {spec.name: spec for spec in actual}
    if len(given) != len(actual):
        problems.append(f"two {kind}s have the same name: {', '.join(spec.name for spec in actual)}")
    extra = [spec for spec in actual if spec.name not in {e.name for e in expected}]
    for spec in expected:
        if spec.name in given:
            problems += _check_one(kind, spec, given[spec.name])
            continue
        like = [e for e in extra if e.dtype == spec.dtype and len(e.shape) == len(spec.shape)]
        if like:
            extra.remove(like[0])
            problems.append(f"{kind} {spec.name} is missing; {like[0].name} stands there instead: renamed?")
        else:
            problems.append(f"{kind} {spec.name} is missing")
    problems += [f"{kind} {spec.name} is not expected" for spec in extra]
    return problems


def _check_one(kind: str, expected: TensorSpec, actual: TensorSpec) -> list[str]:
    name = f"{kind} {expected.name}"
    problems = []
    if actual.dtype != expected.dtype:
        problems.append(f"{name} is {actual.dtype}, expected {expected.dtype}")
    if len(actual.shape) != len(expected.shape):
        ranks = f"{len(actual.shape)} axes {actual.shape}, expected {len(expected.shape)} {expected.shape}"
        return [*problems, f"{name} has {ranks}"]
    for axis, (want, have) in enumerate(zip(expected.shape, actual.shape, strict=True)):
        if isinstance(have, str) or have < 0:
            continue
        if isinstance(want, str):
            problems.append(f"{name}: axis {axis} ({want}) is frozen at {have}")
        elif have != want:
            problems.append(f"{name}: axis {axis} is {have}, expected {want}")
    return problems

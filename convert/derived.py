"""Floor 2: what every step that is made from an ONNX artifact has in common.

Opening the parent, looking at its inner tensors without loading its weights, and writing the new directory. Weights
stay in the parent's data file until they are read.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir

from nlpconvert.artifact import Artifact, TensorSpec
from nlpconvert.convert import onnx_graph
from nlpconvert.errors import ConversionError, first_line

ONNX_FILE = "model.onnx"

INSIDE_LIMIT = 1_900_000_000
"""Bytes of weights that one protobuf file can hold, with room for the graph."""
LARGEST, NOTHING = "tap/largest", "tap/nothing"  # constants of a tapped graph


def load(parent: Artifact) -> onnx_ir.Model:
    """The parent's graph; large weights are read when they are looked at. ConversionError where it is no ONNX file."""
    try:
        return onnx_ir.load(parent.path)
    except Exception as error:  # protobuf, onnx_ir and the file system raise different kinds
        raise ConversionError(f"{parent.path} cannot be read: {first_line(error)}") from error


def write(program: onnx_ir.Model, parent: Artifact, directory: Path) -> tuple[tuple[TensorSpec, ...], ...]:
    """Writes `model.onnx` (+ data) and the parent's companions (tokenizer, config) into `directory`; returns its inputs
    and outputs.

    ConversionError when the graph is not valid ONNX.
    """
    path = directory / ONNX_FILE
    onnx_graph.save(program, path)
    copy_companions(parent, directory)
    check(path)
    return onnx_graph.specs(program.graph)


def check(path: Path) -> None:
    """ConversionError when the file is not valid ONNX."""
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        raise ConversionError(f"an invalid graph was written: {first_line(error, 300)}", detail=str(error)) from error


def copy_companions(parent: Artifact, directory: Path) -> None:
    """What lies beside the parent's graph (config.json, the tokenizer's files) lies beside the new one too."""
    for name in parent.files:
        if not name.startswith(ONNX_FILE) and "/" not in name and name != "recipe.json":
            shutil.copyfile(parent.directory / name, directory / name)


def size(directory: Path) -> int:
    """Bytes of the graph and its data."""
    return sum(file.stat().st_size for file in directory.iterdir() if file.name.startswith(ONNX_FILE))


def tap(path: Path, scratch: Path, names: Sequence[str], largest: Sequence[str] = ()) -> Path:
    """A copy of an ONNX file that also gives the inner tensors `names`, and for each of `largest` the scalar
    `<name>/largest`: its largest finite absolute value (a mask's infinities have none).

    Written into `scratch` without a data file: to be opened with the original's directory as `data`.
    """
    model = onnx.load(str(path), load_external_data=False)
    have = {value.name for value in model.graph.output}
    known = {value.name: value for value in model.graph.value_info}
    for name in names:
        if name not in have:
            model.graph.output.append(known.get(name) or onnx.ValueInfoProto(name=name))
    for name in largest:
        for op, inputs, made in (
            ("Abs", [name], "abs"),
            ("LessOrEqual", [f"{name}/abs", LARGEST], "finite"),
            ("Where", [f"{name}/finite", f"{name}/abs", NOTHING], "magnitudes"),
        ):
            model.graph.node.append(onnx.helper.make_node(op, inputs, [f"{name}/{made}"]))
        model.graph.node.append(
            onnx.helper.make_node("ReduceMax", [f"{name}/magnitudes"], [f"{name}/largest"], keepdims=0)
        )
        model.graph.output.append(onnx.helper.make_tensor_value_info(f"{name}/largest", onnx.TensorProto.FLOAT, ()))
    if largest:
        bounds = {LARGEST: np.finfo(np.float32).max, NOTHING: np.float32(0)}
        model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(x), name) for name, x in bounds.items())
    scratch.mkdir(parents=True, exist_ok=True)
    tapped = scratch / path.name
    tapped.write_bytes(model.SerializeToString())
    return tapped


def trial(program: onnx_ir.Model, scratch: Path) -> Path:
    """A changed graph as a file to be run and thrown away. What was changed is inside, the rest stays in the base's
    data file: to be opened with that one's directory as `data`.

    Where what was changed does not fit into a file (protobuf ends at 2 GB), all weights go into a data file of its own.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "trial.onnx"
    data = path.with_name(f"{path.name}.data")
    data.unlink(missing_ok=True)
    tensors = (value.const_value for value in program.graph.initializers.values())
    inside = sum(t.nbytes for t in tensors if t is not None and not isinstance(t, onnx_ir.ExternalTensor))
    if inside < INSIDE_LIMIT:
        path.write_bytes(onnx_ir.to_proto(program).SerializeToString())
    else:
        onnx_graph.save(program, path)
    return path


def data_of(path: Path, base: Path) -> Path:
    """The directory of a trial's data file: its own, or the base's."""
    return path.parent if path.with_name(f"{path.name}.data").exists() else base


def element_types(program: onnx_ir.Model) -> Mapping[str, int]:
    """How many weights (initialisers of a kilobyte and more) there are of each element type: {"FLOAT": 54}."""
    counts: dict[str, int] = {}
    for value in program.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= onnx_graph.INSIDE_BYTES:
            counts[tensor.dtype.name] = counts.get(tensor.dtype.name, 0) + 1
    return counts

"""Floor 2: putting an exported ONNX graph in order, in place.

Names for axes and weights, every shared weight once, no path of this machine; specs read back. Nothing here changes
what the graph computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir

from nlpconvert.artifact import TensorSpec
from nlpconvert.errors import ConversionError
from nlpconvert.models import OutputRow

DYNAMIC_AXES = frozenset({"batch", "sequence", "decoder_sequence", "choices"})
SCOPES = "pkg.torch.onnx.name_scopes"
"""The one metadata key that is kept: the module path of each node, which localisation reads."""

INSIDE_BYTES = 1024
"""Tensors smaller than this stay inside the graph: shape inference needs to see the small ones."""


# ---- weights --------------------------------------------------------------------------------------------------------


def share_weights(graph: onnx_ir.Graph) -> int:
    """Makes every initialiser that repeats another, or is another transposed, use that one. Returns how many were
    freed.

    A transposed twin becomes a Transpose node (a runtime folds it when it opens the file). Tied heads and ALBERT's
    shared layers come out of the exporters as copies. A key of a few elements on the diagonal, which transposing
    leaves in place, keeps the exact comparisons few; so nothing is hashed and at most two tensors are looked at in
    full at a time.
    """
    groups: dict[tuple[object, ...], list[onnx_ir.Value]] = {}
    freed = 0
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes < INSIDE_BYTES:
            continue
        array = tensor.numpy()
        shape = tuple(array.shape)
        sample = array if array.ndim != 2 else np.diagonal(array)
        flat = sample.reshape(-1)
        picks = flat[:: max(1, flat.size // 32)]
        key = (tensor.dtype, tuple(sorted(shape)) if array.ndim == 2 else shape, picks.tobytes())
        for keeper in groups.setdefault(key, []):
            assert keeper.const_value is not None
            kept = keeper.const_value.numpy()
            if kept.shape == shape and np.array_equal(kept, array):
                _replace(graph, value, keeper)
                freed += 1
                break
            if array.ndim == 2 and kept.shape == shape[::-1] and np.array_equal(kept.T, array):
                _replace(graph, value, _transposed(graph, keeper, value))
                freed += 1
                break
        else:
            groups[key].append(value)
    return freed


def _transposed(graph: onnx_ir.Graph, keeper: onnx_ir.Value, like: onnx_ir.Value) -> onnx_ir.Value:
    node = onnx_ir.node("Transpose", [keeper], attributes={"perm": [1, 0]})
    out = node.outputs[0]
    out.name = f"{like.name}.transposed"
    out.shape, out.type = like.shape, like.type
    graph.insert_before(graph[0], node)
    return out


def _replace(graph: onnx_ir.Graph, old: onnx_ir.Value, new: onnx_ir.Value) -> None:
    if any(old is output for output in graph.outputs):
        return
    onnx_ir.convenience.replace_all_uses_with(old, new)
    assert old.name is not None
    graph.initializers.pop(old.name)


def drop_unused(graph: onnx_ir.Graph) -> None:
    """Takes out what nothing reads: nodes (a Transpose of a weight that was replaced) and weights."""
    for node in reversed(list(graph)):
        if node.op_type in ("Transpose", "DequantizeLinear") and not any(
            value.uses() or value.is_graph_output() for value in node.outputs
        ):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            graph.initializers.pop(name)


def name_weights(graph: onnx_ir.Graph) -> None:
    """Names the exporters' folded weights ("val_69") after the checkpoint: `encoder.layer.0.output.dense.weight.T`."""
    for node in graph:
        if node.op_type not in {"MatMul", "Gemm"}:
            continue
        scope = module_scope(node)
        for value in node.inputs:
            if value is None or not scope or value.name is None or value.name not in graph.initializers:
                continue
            name = f"{scope}.weight.T"
            if re.fullmatch(r"val_\d+|onnx::\w+", value.name) and name not in graph.initializers:
                graph.initializers.pop(value.name)
                value.name = name
                graph.initializers[name] = value


def module_scope(node: onnx_ir.Node) -> str:
    """The module path in the checkpoint that a node came from ("" where the exporter recorded none)."""
    recorded = node.metadata_props.get(SCOPES, "")
    # "['', 'encoder', 'encoder.layer.0', 'linear']": the last entry is the operation itself.
    scopes = re.findall(r"'([^']*)'", recorded)
    return scopes[-2] if len(scopes) >= 2 else ""


# ---- masks ----------------------------------------------------------------------------------------------------------


def attend_as_torch(graph: onnx_ir.Graph) -> int:
    """Makes attention over a row without a single real token answer as PyTorch does. Returns how many were changed.

    transformers.exporters gives zeros wherever every key is masked by float32's smallest number. PyTorch does so for
    minus infinity alone; under the smallest number its softmax weighs all keys alike, and T5's decoder, which looks at
    an encoder row of padding, then answers something else. Each `mask > smallest` that is counted over the keys
    becomes `mask > minus infinity`.
    """
    changed = 0
    lowest: onnx_ir.Value | None = None
    for node in list(graph):
        if node.op_type != "Greater" or not _counts_keys(node.outputs[0]):
            continue
        bound = node.inputs[1]
        array = None if bound is None or bound.const_value is None else bound.const_value.numpy()
        if array is None or array.size != 1 or array.dtype.kind != "f" or array.item() != np.finfo(array.dtype).min:
            continue
        if lowest is None:
            lowest = onnx_ir.Value(
                name="minus_infinity",
                const_value=onnx_ir.tensor(np.full(array.shape, -np.inf, array.dtype), name="minus_infinity"),
            )
            graph.register_initializer(lowest)
        node.replace_input_with(1, lowest)
        changed += 1
    return changed


def _counts_keys(value: onnx_ir.Value) -> bool:
    """Whether a comparison is used as the exporter's patch uses it: cast to a number, then summed."""
    casts = [user for user in value.consumers() if user.op_type == "Cast"]
    return any(user.op_type == "ReduceSum" for cast in casts for user in cast.outputs[0].consumers())


# ---- axes -----------------------------------------------------------------------------------------------------------


def name_axes(graph: onnx_ir.Graph, inputs: Mapping[str, Sequence[str]], outputs: Sequence[OutputRow]) -> None:
    """One symbol an axis: `s18` and `s43` both become `batch`, wherever they stand, also inside expressions.

    `inputs`: the axes of every input by name. Outputs get the names of their rows.
    """
    renamed: dict[str, str] = {}
    for value in graph.inputs:
        if value.shape is None or value.name is None or value.name not in inputs:
            continue
        for size, axis in zip(value.shape, inputs[value.name], strict=True):
            if isinstance(size, onnx_ir.SymbolicDim) and size.value is not None:
                renamed[str(size.value)] = axis
    values = [*graph.inputs, *(out for node in graph.all_nodes() for out in node.outputs)]
    for value in values:
        if value.shape is None:
            continue
        # A shape that came with a tensor may be frozen; a copy never is.
        value.shape = onnx_ir.Shape([_rename(size, renamed) for size in value.shape])
    rows = {row.name: row for row in outputs}
    for value in graph.outputs:
        row = rows.get(value.name or "")
        if row is None or value.shape is None or len(value.shape) != len(row.axes):
            continue
        value.shape = onnx_ir.Shape(
            [axis if axis in DYNAMIC_AXES else size for size, axis in zip(value.shape, row.axes, strict=True)]
        )


def _rename(size: int | onnx_ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    if isinstance(size, int):
        return size
    if size.value is None:
        return None
    return re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found.group(), found.group()), str(size.value))


# ---- metadata, files, specs -----------------------------------------------------------------------------------------


def clean_metadata(program: onnx_ir.Model) -> None:
    """Keeps module scopes; drops stack traces, source paths and the exporter's inner notes."""
    for graph in program.graphs():
        graph.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
        for node in graph.all_nodes():
            scopes = node.metadata_props.get(SCOPES)
            node.metadata_props.clear()
            node.doc_string = None
            if scopes is not None:
                node.metadata_props[SCOPES] = scopes
            for value in node.outputs:
                value.metadata_props.clear()
    program.graph.doc_string = None
    program.doc_string = None


def save(program: onnx_ir.Model, path: Path) -> None:
    """Writes `path` and, for tensors of a kilobyte and more, `<name>.data` beside it, under a bare file name."""
    onnx_ir.save(program, path, external_data=f"{path.name}.data", size_threshold_bytes=INSIDE_BYTES)


def save_together(
    programs: Mapping[str, onnx_ir.Model],
    holders: Iterable[tuple[Any, Sequence[onnx_ir.Value]]],
    directory: Path,
    data: str,
) -> None:
    """Writes several graphs by file name, and in one data file each tensor of `holders` once, for all values that hold
    it."""
    held = list(holders)
    written = onnx_ir.external_data.convert_tensors_to_external([tensor for tensor, _ in held], directory, data)
    for external, (_, values) in zip(written, held, strict=True):
        for value in values:
            value.const_value = onnx_ir.ExternalTensor(
                external.location,
                external.offset,
                external.length,
                external.dtype,
                shape=external.shape,
                name=str(value.name),
                base_dir=directory,
            )
    for name, program in programs.items():
        onnx_ir.save(program, directory / name)


def specs(graph: onnx_ir.Graph) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of the graph as it stands."""
    return tuple(map(_spec, graph.inputs)), tuple(map(_spec, graph.outputs))


def _spec(value: onnx_ir.Value) -> TensorSpec:
    if value.name is None or value.dtype is None or value.shape is None:
        raise ConversionError(f"the exporter left {value.name or 'an output'} without a type or a shape")
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return TensorSpec(value.name, np.dtype(value.dtype.numpy()).name, shape)

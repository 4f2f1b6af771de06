"""Floor 2: one ONNX graph of a model under a forward of its own, checked for what exporters lose on the way.

A model that writes is called in more ways than one (with a past, the encoder alone), and each becomes a graph: inputs
and outputs named as asked, weights once, and refused where an axis is frozen or an input no longer counts. Which ways
there are is `cached` and `cached_pair`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import onnx_ir
import torch
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

from nlpconvert.artifact import TensorSpec
from nlpconvert.convert import onnx_graph
from nlpconvert.errors import ConversionError, first_line

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """One way to call a model, to become a graph.

    `forward` takes the model and the inputs by name and gives the outputs by name. `example` has a tensor for each of
    `inputs`. Sizes that are numbers in `inputs` and `outputs` are fixed, those that are words are dynamic. Every input
    must count for the first output.
    """

    forward: Callable[[torch.nn.Module, Tensors], Tensors]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    example: Mapping[str, torch.Tensor]


def export(module: torch.nn.Module, call: Call, opset: int) -> onnx_ir.Model:
    """The graph of `call`, put in order: inputs, outputs, axes and weights by their names, every weight once.

    Raises ConversionError when the exporter raises, loses an input or an output, or freezes an axis.
    """
    # A name with dots is no name of a parameter; the graph gets the true ones afterwards.
    plain = {spec.name: spec.name.replace(".", "_") for spec in call.inputs}
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    example = {plain[spec.name]: call.example[spec.name].to(device) for spec in call.inputs}
    shapes = {
        plain[spec.name]: {i: torch.export.Dim.AUTO for i, size in enumerate(spec.shape) if isinstance(size, str)}
        for spec in call.inputs
    }

    def forward(self: torch.nn.Module, **tensors: torch.Tensor) -> Tensors:
        answers = call.forward(self, {spec.name: tensors[plain[spec.name]] for spec in call.inputs})
        return {spec.name: answers[spec.name] for spec in call.outputs}

    exporter: Any = OnnxExporter()  # type: ignore[no-untyped-call]
    config = OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=opset)
    with _standing_in(module, forward):
        try:
            program: onnx_ir.Model = exporter.export(module, example, config).program
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # exporters raise anything at all
            raise ConversionError(
                f"{type(module).__name__} could not be exported with its cache: "
                f"{type(error).__name__}: {first_line(error, 300)}",
                detail=str(error),
            ) from error
    if module.training:
        raise ConversionError("the exporter left the model in training mode")
    graph = program.graph
    for value in graph.inputs:
        value.name = next((name for name, short in plain.items() if short == value.name), value.name)
    _check_read(graph, call)
    onnx_graph.attend_as_torch(graph)
    onnx_graph.share_weights(graph)
    onnx_graph.name_axes(graph, {spec.name: [str(size) for size in spec.shape] for spec in call.inputs}, ())
    _name_shapes(graph.inputs, call.inputs, "input")
    named = _name_shapes(graph.outputs, call.outputs, "output")
    for value in (output for node in graph.all_nodes() for output in node.outputs):
        if value.shape is not None:  # past and new together have one name, wherever they stand
            value.shape = onnx_ir.Shape(
                [size if isinstance(size, int) else named.get(str(size.value), size.value) for size in value.shape]
            )
    onnx_graph.name_weights(graph)
    onnx_graph.clean_metadata(program)
    return program


@contextlib.contextmanager
def _standing_in(module: torch.nn.Module, forward: Callable[..., Tensors]) -> Iterator[None]:
    """`forward` in the place of the model's own; what was attached to it is there again afterwards."""
    own = vars(module).get("forward")
    module.forward = MethodType(forward, module)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _check_read(graph: onnx_ir.Graph, call: Call) -> None:
    """ConversionError unless every input is there and its values, not only its sizes, count for the first output."""
    first = call.outputs[0].name
    there = {value.name for value in graph.outputs}
    if missing := [spec.name for spec in call.outputs if spec.name not in there]:
        raise ConversionError(f"the exporter left out the output {missing[0]}")
    counts = _counting(next(value for value in graph.outputs if value.name == first))
    for spec in call.inputs:
        if spec.name not in counts:
            raise ConversionError(
                f"the exporter lost the input {spec.name}: nothing of it counts for {first}, so the artifact would "
                "answer the same whatever it holds"
            )


def _counting(output: onnx_ir.Value) -> set[str]:
    """Names of all values whose content counts for `output`."""
    found: set[str] = set()
    waiting = [output]
    while waiting:
        value = waiting.pop()
        if value.name is None or value.name in found:
            continue
        found.add(value.name)
        node = value.producer()
        if node is None or node.op_type in ("Shape", "Size"):
            continue
        waiting.extend(each for each in node.inputs if each is not None)
        for attribute in node.attributes.values():
            if attribute.type == onnx_ir.AttributeType.GRAPH:  # what a branch reads from outside
                waiting.extend(each for inner in attribute.value.all_nodes() for each in inner.inputs if each)
    return found


def _name_shapes(values: Sequence[onnx_ir.Value], specs: Sequence[TensorSpec], what: str) -> dict[str, str]:
    """Gives inputs or outputs the axes of their specs; returns what the axes were called, to what they are called.

    Raises ConversionError for a fixed size that should be dynamic, or another than the spec's.
    """
    named: dict[str, str] = {}
    rows = {spec.name: spec for spec in specs}
    for value in values:
        spec = rows[str(value.name)]
        if value.shape is None or len(value.shape) != len(spec.shape):
            raise ConversionError(f"the exporter gave the {what} {spec.name} the shape {value.shape}, not {spec.shape}")
        for axis, (size, said) in enumerate(zip(value.shape, spec.shape, strict=True)):
            if isinstance(size, int) and isinstance(said, str):
                raise ConversionError(
                    f"the exporter froze axis {axis} ({said}) of the {what} {spec.name} at {size}: the artifact would "
                    "answer at that size only"
                )
            if isinstance(size, int) and size != said:
                raise ConversionError(
                    f"axis {axis} of the {what} {spec.name} came out of the exporter as {size}, not {said}"
                )
            if isinstance(said, str) and isinstance(size, onnx_ir.SymbolicDim) and size.value is not None:
                named[str(size.value)] = said
        value.shape = onnx_ir.Shape(list(spec.shape))
    return named

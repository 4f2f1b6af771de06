"""Floor 2: a loaded model to ONNX.

`transformers.exporters` first; the older exporter where that fails, with the reason recorded. Then the graph is put
in order (`onnx_graph`): named axes, every shared weight once, module scopes kept, nothing of this machine left in it.
Judging the result is not done here.
"""

from __future__ import annotations

import gc
import inspect
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxscript
import torch
import transformers
from onnxscript.rewriter.pattern import MatchResult, SimplePatternMatcher
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

from nlpconvert.artifact import Made, TensorSpec
from nlpconvert.convert import onnx_graph
from nlpconvert.errors import ConversionError, UsageError, first_line
from nlpconvert.memory import uncollected
from nlpconvert.models import TOKENIZER_FILES, Facts, input_axes

DEFAULT_OPSET = 20
OPSETS = range(18, 24)
GROWTH_FLAGGED = 1.2
"""A file this many times larger than the unique parameters is flagged."""

# Files beside the weights that other tools need to open the directory.
COMPANIONS: tuple[str, ...] = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    "sentence_bert_config.json",
    *TOKENIZER_FILES,
)


def convert(
    module: torch.nn.Module,
    example: Mapping[str, np.ndarray],
    facts: Facts,
    directory: Path,
    *,
    companions: Path | None = None,
    parameter_bytes: int = 0,
    opset: int | None = None,
) -> Made:
    """Writes `model.onnx` (+ `model.onnx.data`) and the companions into `directory`.

    `module`: a model whose forward takes keyword tensors and returns a dict of named tensors. `example`: int64 arrays
    by input name. `companions`: the checkpoint's directory. `parameter_bytes`: of the unique parameters, in float32.
    Raises ConversionError when neither exporter can, UsageError for an opset out of range.
    """
    opset = DEFAULT_OPSET if opset is None else opset
    if opset not in OPSETS:
        raise UsageError(f"--opset {opset} is not between {OPSETS.start} and {OPSETS.stop - 1}")
    inputs = {name: torch.from_numpy(array) for name, array in example.items()}
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}

    notes: list[str] = []
    with torch.no_grad(), uncollected():
        exporter, program, fallback = _export(module, inputs, facts, opset)
        if fallback:
            notes.append(f"exported by {exporter}, because transformers.exporters failed: {fallback}")
        if module.training:
            raise ConversionError("the exporter left the model in training mode")
        onnx_graph.attend_as_torch(program.graph)
        shared = onnx_graph.share_weights(program.graph)
        onnx_graph.name_axes(program.graph, {name: input_axes(name, facts.task) for name in inputs}, facts.outputs)
        onnx_graph.name_weights(program.graph)
        onnx_graph.clean_metadata(program)
        describe(program, facts)
        path = directory / "model.onnx"
        onnx_graph.save(program, path)
    made_inputs, made_outputs = onnx_graph.specs(program.graph)
    del program
    forget_last_graph()
    check(path)

    given = [spec.name for spec in made_inputs]
    notes += [f"input {name} is not read by the graph and was dropped" for name in facts.inputs if name not in given]
    frozen = _frozen(made_inputs)
    if frozen:
        raise ConversionError(f"the exporter froze {frozen}: the artifact would answer at that size only")

    size = sum(f.stat().st_size for f in directory.iterdir() if f.name.startswith("model.onnx"))
    growth = size / parameter_bytes if parameter_bytes else 0.0
    # Below a megabyte the graph itself outweighs the parameters, and the ratio says nothing.
    if growth > GROWTH_FLAGGED and size > 2**20 + parameter_bytes:
        notes.append(f"the file is {growth:.2f} times the unique parameters ({parameter_bytes:,} bytes)")
    if companions is not None:
        for name in COMPANIONS:
            if (companions / name).is_file():
                shutil.copyfile(companions / name, directory / name)
    return Made(
        file="model.onnx",
        inputs=made_inputs,
        outputs=made_outputs,
        made_by={
            "exporter": exporter,
            "fallback_reason": fallback,
            "opset": opset,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "onnxscript": onnxscript.__version__,
            "onnx": onnx.__version__,
            "onnx_ir": onnx_ir.__version__,
            "size_over_parameters": round(growth, 4),
            "weights_shared": shared,
        },
        notes=tuple(notes),
    )


# ---- exporters ------------------------------------------------------------------------------------------------------


def _export(
    module: torch.nn.Module, inputs: dict[str, torch.Tensor], facts: Facts, opset: int
) -> tuple[str, onnx_ir.Model, str]:
    """(exporter, program, why the first one was not used)."""
    reasons: list[str] = []
    exporters: tuple[tuple[str, Callable[..., onnx_ir.Model]], ...] = (
        ("transformers.exporters", _export_transformers),
        ("torch.onnx (TorchScript)", _export_legacy),
    )
    for name, export in exporters:
        try:
            return name, export(module, inputs, facts, opset), reasons[0] if reasons else ""
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            # Exporters raise anything at all, and print whole graphs; the first line tells a person enough.
            reasons.append(f"{type(error).__name__}: {first_line(error, 300)}")
    raise ConversionError(
        f"no exporter could turn {type(module).__name__} into ONNX: {reasons[0]}",
        detail="\n".join(f"{name}: {why}" for (name, _), why in zip(exporters, reasons, strict=True)),
    )


def _export_transformers(
    module: torch.nn.Module, inputs: dict[str, torch.Tensor], facts: Facts, opset: int
) -> onnx_ir.Model:
    # AUTO and not a named Dim: torch's guard on a length limit (2 <= sequence <= 512) makes a named Dim an error.
    # What comes out frozen all the same is refused afterwards, by the specs and by the verdict.
    auto = torch.export.Dim.AUTO
    shapes = {name: dict.fromkeys(range(tensor.ndim), auto) for name, tensor in inputs.items()}
    config = OnnxConfig(dynamic=True, dynamic_shapes=shapes, opset_version=opset)
    exporter: Any = OnnxExporter()  # type: ignore[no-untyped-call]
    program: onnx_ir.Model = exporter.export(module, dict(inputs), config).program
    return program


def _export_legacy(module: torch.nn.Module, inputs: dict[str, torch.Tensor], facts: Facts, opset: int) -> onnx_ir.Model:
    names = list(inputs)
    outputs = [row.name for row in facts.outputs]
    axes: dict[str, dict[int, str]] = {
        name: {i: axis for i, axis in enumerate(input_axes(name, facts.task))} for name in names
    }
    for row in facts.outputs:
        axes[row.name] = {i: axis for i, axis in enumerate(row.axes) if axis in onnx_graph.DYNAMIC_AXES}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "model.onnx"
        # Positional binding is how inputs get swapped: bind by keyword.
        torch.onnx.export(
            _Keywords(module, names),
            args=(),
            kwargs=dict(inputs),
            f=str(file),
            input_names=names,
            output_names=outputs,
            dynamic_axes=axes,
            opset_version=min(opset, 20),
            dynamo=False,
        )
        program = onnx_ir.load(str(file))
        # The file goes away with the scratch directory, so the weights have to be in memory.
        for value in program.graph.initializers.values():
            if value.const_value is not None:
                value.const_value = onnx_ir.tensor(value.const_value.numpy().copy(), name=value.name)
    return program


class _Keywords(torch.nn.Module):
    """Gives the older exporter, which reads the signature of `forward`, one parameter per input by name.

    In eval mode from the start: that exporter puts the whole module into the wrapper's own mode afterwards.
    """

    def __init__(self, module: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.module = module
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
        names_of = tuple(names)

        def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            bound = {**dict(zip(names_of, args, strict=False)), **kwargs}
            return tuple(self.module(**bound).values())

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward
        self.eval()


# ---- checks and facts -----------------------------------------------------------------------------------------------


def _frozen(specs: tuple[TensorSpec, ...]) -> str:
    """The first axis of an input that should be dynamic and is a number, in words."""
    for spec in specs:
        for axis, size in enumerate(spec.shape):
            if isinstance(size, int):
                return f"axis {axis} of input {spec.name} at {size}"
    return ""


def check(path: Path) -> None:
    try:
        # With a path the checker also follows the external data, and takes files past 2 GB.
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        raise ConversionError(
            f"the exporter wrote an invalid graph: {first_line(error, 300)}", detail=str(error)
        ) from error


def forget_last_graph() -> None:
    """Makes onnxscript's rewrite rules let go of the model.

    They are module globals whose matchers remember the last graph and node they looked at, and with them all weights.
    """
    state = (onnx_ir.Graph, onnx_ir.Node, MatchResult)
    for matcher in (thing for thing in gc.get_objects() if type(thing) is SimplePatternMatcher):
        for name, value in vars(matcher).items():
            if isinstance(value, state):
                setattr(matcher, name, None)


def describe(program: onnx_ir.Model, facts: Facts) -> None:
    """What a later reader needs to know of the model goes into the file itself."""
    program.producer_name = "nlpconvert"
    program.metadata_props.update({"nlpconvert.task": facts.task, "nlpconvert.model_type": facts.model_type})
    if facts.max_length is not None:
        program.metadata_props["nlpconvert.max_length"] = str(facts.max_length)

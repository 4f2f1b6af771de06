"""Floor 2: an objective becomes a graph of its gradients.

    trace     PyTorch's older exporter in training form; weights are inputs, so that the graph does not carry them
    infer     ONNX Runtime's symbolic shape inference: onnx's own does not see which axes broadcast
    check     operators without a right gradient are named (`operators`)
    build     ONNX Runtime's gradient builder, its optimizer for training first
    hooks     change the finished graph; the first one is `gathers.take_out`

How the graph is run is `ort`'s business. It is verified before it trains, always (`gradients`): what the runtime gets
wrong here it does without a word.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnxruntime
import torch
from onnxruntime.capi._pybind_state import GradientGraphBuilder, get_optimized_model
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

from nlpconvert.errors import ConversionError, first_line
from nlpconvert.training import narrow, operators
from nlpconvert.training.losses import Objective

OPSET = 17
"""The first with LayerNormalization as one operator, the last that ONNX Runtime 1.19's optimizer for training fuses."""
IR_VERSION = 10
"""The newest file that ONNX Runtime for training opens."""
LOSS = "loss"
DROPOUT = "dropout"
"""An input of the graph, 1.0 or 0.0, that dropout's share is multiplied with. One graph both trains and is verified."""
PREFIX = "model."
"""What the objective's name for its model puts before the names of parameters."""
DYNAMIC = ("batch", "sequence", "decoder_sequence", "choices")


@dataclass(frozen=True)
class Scatter:
    """Part of a gradient that is added outside of the graph: rows of `values` into the parameter's rows `indices`.

    Both are names in the graph, outputs or (indices) inputs of it.
    """

    parameter: str
    indices: str
    values: str


@dataclass
class GradientGraph:
    """The finished graph, which hooks change in place.

    Inputs: the objective's names, trained and fixed weights under `PREFIX`, `dropout`. `gradients`: the output that
    holds a parameter's gradient, by the parameter's name in the model; one that is missing there is all in `scatters`.
    """

    model: onnx.ModelProto
    gradients: dict[str, str]
    scatters: list[Scatter] = field(default_factory=list)
    opset: int = OPSET


Hook = Callable[[GradientGraph], None]


def build(objective: Objective, hooks: Sequence[Hook] = ()) -> GradientGraph:
    """The gradient graph of an objective with its trained parameters, batch and lengths dynamic.

    Raises ConversionError where the exporter or the runtime cannot make one, with the operators that it lacks, or where
    a hook leaves a parameter without its gradient.
    """
    # The module's path is part of the names; tied weights stand once in both.
    trained = {PREFIX + name for name in objective.parameters_trained}
    model = trace(objective)
    _save_statistics(model)
    model = infer(model)
    if narrow.read_first(model):
        model = infer(model)
    with _named_failure("ONNX Runtime's optimizer for training"):
        optimized = get_optimized_model(model.SerializeToString(), trained, operators.quiet())
    _check(model, onnx.load_from_string(optimized), trained)
    del model
    with _named_failure("ONNX Runtime's gradient builder"):
        builder = GradientGraphBuilder(optimized, {LOSS}, trained, LOSS, operators.quiet())
        builder.build()
        made = onnx.load_from_string(builder.get_model())
    made.ir_version = min(made.ir_version, IR_VERSION)
    outputs = {output.name for output in made.graph.output}
    gradients = {name: f"{PREFIX}{name}_grad" for name in objective.parameters_trained}
    _keep_outputs(made, {LOSS, *gradients.values()})
    lost = [name for name, output in gradients.items() if output not in outputs]
    if lost:
        raise ConversionError(
            f"ONNX Runtime's gradient builder left out {', '.join(lost[:3])}: train with --engine torch"
        )
    graph = GradientGraph(made, gradients)
    for hook in hooks:
        hook(graph)
        _check_hook(graph, objective, hook)
    return graph


def trace(objective: Objective, opset: int = OPSET) -> onnx.ModelProto:
    """The forward graph in training form: inputs by the objective's names, outputs the loss and the model's answers.

    The model's mode and attention are as before afterwards.
    """
    _refuse_drawn_layers(objective.model)
    buffer = io.BytesIO()
    axes = {
        name: {place: axis for place, axis in enumerate(words) if axis in DYNAMIC}
        for name, words in objective.axes.items()
    }
    was = {part: part.training for part in objective.modules()}
    example = objective.tensors(objective.example())
    try:
        objective.train()
        with _eager_attention(objective.model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about frozen Python values: what that costs is measured
            torch.onnx.export(
                objective,
                example,
                buffer,  # type: ignore[arg-type]  # the older exporter takes any file
                dynamo=False,
                opset_version=opset,
                training=torch.onnx.TrainingMode.TRAINING,
                do_constant_folding=False,
                export_params=False,
                input_names=list(objective.names),
                output_names=[LOSS, *objective.answers],
                dynamic_axes=axes,
            )
    except Exception as error:  # whatever the exporter raises over a model that PyTorch runs
        raise ConversionError(
            f"PyTorch's exporter cannot trace {type(objective.model).__name__} for training: {first_line(error)}; "
            "train with --engine torch",
            detail=str(error),
        ) from error
    finally:
        for part, training in was.items():
            part.training = training
    model = onnx.load_model_from_string(buffer.getvalue())
    _ask_for_dropout(model)
    return model


def infer(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the shapes that ONNX Runtime's symbolic inference finds, axes by name."""
    logging.getLogger(SymbolicShapeInference.__module__).setLevel(logging.ERROR)  # what it cannot tell is checked
    with _named_failure("ONNX Runtime's shape inference"):
        shaped: onnx.ModelProto = SymbolicShapeInference.infer_shapes(
            model, int_max=2**31 - 1, auto_merge=True, guess_output_rank=False, verbose=0
        )
    return shaped


# -- the parts ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    """With attention as plain operators: the fused one masks by a `Where` that broadcasts, whose gradient is wrong."""
    before = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if before in (None, "eager"):
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _refuse_drawn_layers(model: Any) -> None:
    """A layer that is skipped at random is drawn in Python: in a trace it would be there always, or never."""
    config = getattr(model, "config", None)
    drawn = {name: v for name, v in vars(config).items() if "layerdrop" in name and v} if config is not None else {}
    if drawn:
        name, value = next(iter(drawn.items()))
        raise ConversionError(
            f"the model skips layers at random in training ({name} {value} in config.json), which a graph cannot: set "
            "it to 0, or train with --engine torch"
        )


def _ask_for_dropout(model: onnx.ModelProto) -> None:
    """Every Dropout's share becomes a product with one input of the graph; one that drops nothing is no Dropout.

    Its other switch, training or not, is no way to turn it off: the gradient does not read it.
    """
    made = {name: node for node in model.graph.node for name in node.output}
    products: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        if node.op_type != "Dropout":
            continue
        share = node.input[1]
        if not onnx.numpy_helper.to_array(made[share].attribute[0].t):
            node.op_type = "Identity"
            del node.input[1:], node.output[1:]
            continue
        product = onnx.helper.make_node(
            "Mul", [share, DROPOUT], [f"{DROPOUT}_{len(products)}"], name=f"/{DROPOUT}/{share}"
        )
        node.input[1] = products.setdefault(share, product).output[0]
    constants = [made[share] for share in products]
    rest = [node for node in model.graph.node if not any(node is each for each in constants)]
    operators.put_nodes(model.graph, (*constants, *products.values(), *rest))
    model.graph.input.append(onnx.helper.make_tensor_value_info(DROPOUT, onnx.TensorProto.FLOAT, []))


SAVED = {"LayerNormalization": ("mean", "deviation"), "Dropout": ("mask",)}
"""Outputs after the first that an operator's gradient reads, and that an exporter leaves out."""


def _save_statistics(model: onnx.ModelProto) -> None:
    """What gradients read of the forward pass becomes outputs of its nodes: without them the runtime builds nothing."""
    for node in model.graph.node:
        missing = SAVED.get(node.op_type, ())[len(node.output) - 1 :]
        node.output.extend(f"{node.output[0]}_{what}" for what in missing)


def _check(model: onnx.ModelProto, optimized: onnx.ModelProto, trained: set[str]) -> None:
    """`operators.check` of the graph as the gradient builder gets it, with the shapes from before it was optimized."""
    told = {each.name for each in optimized.graph.value_info}
    optimized.graph.value_info.extend(each for each in model.graph.value_info if each.name not in told)
    operators.check(optimized, trained, LOSS)


def _keep_outputs(model: onnx.ModelProto, names: set[str]) -> None:
    """The answers are no outputs: nobody reads them in training."""
    kept = [output for output in model.graph.output if output.name in names]
    del model.graph.output[:]
    model.graph.output.extend(kept)


def _check_hook(graph: GradientGraph, objective: Objective, hook: Hook) -> None:
    name = getattr(hook, "__name__", type(hook).__name__)
    made = {output for node in graph.model.graph.node for output in node.output}
    outputs = {output.name for output in graph.model.graph.output}
    given = {each.name for each in (*graph.model.graph.input, *graph.model.graph.initializer)}
    if LOSS not in outputs & made:
        raise ConversionError(f"after the hook {name} the graph has no {LOSS}")
    scattered = {scatter.parameter for scatter in graph.scatters}
    for parameter in objective.parameters_trained:
        output = graph.gradients.get(parameter)
        if output is None and parameter not in scattered:
            raise ConversionError(f"after the hook {name} nothing holds the gradient of {parameter}")
        if output is not None and output not in outputs & (made | given):
            raise ConversionError(
                f"after the hook {name} the graph does not give {output}, the gradient of {parameter}"
            )
    for scatter in graph.scatters:
        for each in (scatter.indices, scatter.values):
            if each not in outputs | given:
                raise ConversionError(
                    f"after the hook {name} the graph does not give {each}, part of {scatter.parameter}"
                )


@contextlib.contextmanager
def _named_failure(who: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever the runtime raises over a graph
        words = str(error).strip().splitlines() or ["no message"]
        raise ConversionError(
            f"{who} ({onnxruntime.__version__}) failed: {words[-1][-300:]}; train with --engine torch",
            detail=str(error),
        ) from error

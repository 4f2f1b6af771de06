"""Breaking an ONNX file on purpose, in one module: what `locate` and the gate are tried with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from nlpconvert.artifact import Artifact

Break = Callable[[onnx.ModelProto], None]


def broken(artifact: Artifact, directory: Path, how: Break) -> Artifact:
    """A copy of an artifact in `directory`, changed by `how`, its weights inside the file."""
    shutil.copytree(artifact.directory, directory)
    path = directory / artifact.path.name
    model = onnx.load(str(path))
    how(model)
    path.with_name(f"{path.name}.data").unlink(missing_ok=True)
    onnx.save(model, str(path))
    return replace(artifact, path=path)


def _change(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Break:
    def how(model: onnx.ModelProto) -> None:
        tensor = next(each for each in model.graph.initializer if each.name == name)
        before = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(change(before.copy()).astype(before.dtype), name))

    return how


def nudged(name: str, by: float) -> Break:
    """A weight made so much larger: 0.01 is 1 %."""
    return _change(name, lambda array: array * (1 + by))


def zeroed(name: str) -> Break:
    """A weight of zeros: a bias that was dropped."""
    return _change(name, np.zeros_like)


def swapped_heads(name: str, heads: int) -> Break:
    """The first two heads of a projection (in, out) exchanged."""

    def swap(array: np.ndarray) -> np.ndarray:
        size = array.shape[1] // heads
        array[:, : 2 * size] = np.concatenate([array[:, size : 2 * size], array[:, :size]], axis=1)
        return array

    return _change(name, swap)


def scope(node: onnx.NodeProto) -> str:
    """The modules that a node came from, as the exporter recorded them."""
    return next((entry.value for entry in node.metadata_props if entry.key.endswith("name_scopes")), "")


def epsilon(module: str, value: float) -> Break:
    """Another epsilon in one LayerNorm."""

    def how(model: onnx.ModelProto) -> None:
        nodes = [n for n in model.graph.node if n.op_type == "LayerNormalization" and f"'{module}'" in scope(n)]
        attribute = next(each for each in nodes[0].attribute if each.name == "epsilon")
        attribute.f = value

    return how


def mask_ignored(nth: int) -> Break:
    """The mask is no longer added to the scores of the nth attention."""

    def how(model: onnx.ModelProto) -> None:
        makers = {name: node for node in model.graph.node for name in node.output}
        softmaxes = [node for node in model.graph.node if node.op_type == "Softmax"]
        add = makers[softmaxes[nth].input[0]]
        assert add.op_type == "Add"
        scores = next(name for name in add.input if makers[name].op_type in ("MatMul", "Mul", "Div"))
        softmaxes[nth].input[0] = scores

    return how


def doubled_scale(module: str) -> Break:
    """The weight's scale of one quantized projection doubled."""

    def how(model: onnx.ModelProto) -> None:
        names = [t.name for t in model.graph.initializer if t.name.startswith(module) and t.name.endswith(".scale")]
        nudged(names[0], 1.0)(model)

    return how


def unnamed(model: onnx.ModelProto) -> None:
    """As a foreign exporter leaves it: no modules, other names for everything inside, another name for each weight."""
    _rename(model, {v.name for v in (*model.graph.input, *model.graph.output)})


def only_weights_named(model: onnx.ModelProto) -> None:
    """The same, but weights keep the checkpoint's names."""
    outside = (*model.graph.input, *model.graph.output, *model.graph.initializer)
    _rename(model, {value.name for value in outside})


def _rename(model: onnx.ModelProto, kept: set[str]) -> None:
    names: dict[str, str] = {"": ""}
    for node in model.graph.node:
        del node.metadata_props[:]
        node.name = ""
    for name in [t.name for t in model.graph.initializer] + [o for n in model.graph.node for o in n.output if o]:
        names.setdefault(name, name if name in kept else f"x{len(names)}")
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names[name] for name in node.output]
    for tensor in model.graph.initializer:
        tensor.name = names[tensor.name]
    del model.graph.value_info[:]

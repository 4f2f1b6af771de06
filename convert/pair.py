"""Floor 2: an encoder's and a decoder's graph as one, for converters that work on one graph, and two again afterwards.

Merged, a source and a target go in together: what the decoder takes of the source comes from the encoder by way of an
Identity, so that nothing is fused across the place where the two are cut apart again. Every weight that both use stands
once, merged or not. What a converter does in between is not known here.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from nlpconvert import cache_names
from nlpconvert.artifact import TensorSpec
from nlpconvert.convert import derived, onnx_graph
from nlpconvert.errors import ConversionError, first_line

ENCODER_FILE = "encoder_model.onnx"
DECODER_FILE = "decoder_model.onnx"
DATA_FILE = "model.onnx.data"

PREFIX = "encoder/"
"""What the encoder calls as the decoder does is kept apart by it; `split` takes it off again."""

SOURCE, SOURCE_MASK, TARGET = "input_ids", "attention_mask", "decoder_input_ids"
DECODER_MASK = "encoder_attention_mask"
STATES, MERGED_STATES = "last_hidden_state", "encoder_last_hidden_state"

FLOAT = onnx_ir.DataType.FLOAT


# -- two to one --------------------------------------------------------------------------------------------------------


def merge(directory: Path, into: Path) -> Path:
    """Writes `model.onnx` and a copy of the data file into `into`, of the two graphs in `directory`; returns its path.

    Inputs: input_ids, attention_mask (batch, sequence), decoder_input_ids (batch, decoder_sequence) and the decoder's
    own past_key_values.N.decoder.*. Outputs: logits, present.N.decoder.*, encoder_last_hidden_state and
    present.N.encoder.*. Raises ConversionError where the graphs cannot be read or do not fit together.
    """
    encoder, decoder = (_load(directory / name) for name in (ENCODER_FILE, DECODER_FILE))
    versions = {domain: encoder.opset_imports.get(domain, version) for domain, version in decoder.opset_imports.items()}
    if versions != decoder.opset_imports:
        raise ConversionError(
            f"{directory}: encoder and decoder are of other opsets: {versions}, {decoder.opset_imports}"
        )
    _keep_apart(encoder.graph, decoder.graph)
    _share(encoder.graph, decoder.graph)
    _join(encoder.graph, decoder.graph)
    decoder.ir_version = max(encoder.ir_version, decoder.ir_version)
    decoder.opset_imports.update(encoder.opset_imports)
    into.mkdir(parents=True, exist_ok=True)
    if (directory / DATA_FILE).is_file():
        shutil.copyfile(directory / DATA_FILE, into / DATA_FILE)
    path = into / derived.ONNX_FILE
    path.write_bytes(onnx_ir.to_proto(decoder).SerializeToString())
    derived.check(path)
    return path


def _load(path: Path) -> onnx_ir.Model:
    try:
        return onnx_ir.load(path)
    except Exception as error:  # protobuf, onnx_ir and the file system raise different kinds
        raise ConversionError(f"{path} cannot be read: {first_line(error)}") from error


def _values(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    """Every value of a graph and of the graphs in it."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs
        for attribute in node.attributes.values():
            if attribute.type == onnx_ir.AttributeType.GRAPH:
                yield from (*attribute.value.inputs, *attribute.value.initializers.values())


def _keep_apart(encoder: onnx_ir.Graph, decoder: onnx_ir.Graph) -> None:
    """Gives the encoder's nodes, values and open sizes other names than the decoder's."""
    nodes = {node.name for node in decoder.all_nodes()}
    for node in encoder.all_nodes():
        if node.name in nodes and node.name:
            node.name = f"{PREFIX}{node.name}"
    taken = {value.name for value in _values(decoder)}
    sizes = {size for value in decoder.inputs for size in _symbols(value)}
    for value in list(_values(encoder)):
        if value.name in taken and value.name and value not in encoder.inputs:
            if value.is_initializer() and value.name in encoder.initializers:
                encoder.initializers.pop(value.name)
                value.name = f"{PREFIX}{value.name}"
                encoder.register_initializer(value)
            else:
                value.name = f"{PREFIX}{value.name}"
        if any(symbol.isidentifier() and symbol not in sizes for symbol in _symbols(value)) and value.shape is not None:
            # A size that only one of the graphs knows means nothing in the other.
            value.shape = onnx_ir.Shape(
                [f"encoder_{s}" if (s := str(size)).isidentifier() and s not in sizes else size for size in value.shape]
            )


def _symbols(value: onnx_ir.Value) -> list[str]:
    return [str(size.value) for size in value.shape or () if isinstance(size, onnx_ir.SymbolicDim)]


def _place(tensor: onnx_ir.TensorProtocol | None) -> tuple[object, ...] | None:
    """Where a tensor lies in the data file, and what as; None of one inside its graph."""
    if not isinstance(tensor, onnx_ir.ExternalTensor):
        return None
    return (tensor.location, tensor.offset, tensor.length, tensor.dtype, tuple(tensor.shape.numpy()))


def _share(encoder: onnx_ir.Graph, decoder: onnx_ir.Graph) -> None:
    """Hands the encoder's weights over to the decoder's graph; one that it has already is that one."""
    known = {place: value for value in decoder.initializers.values() if (place := _place(value.const_value))}
    for name, value in list(encoder.initializers.items()):
        encoder.initializers.pop(name)
        twin = known.get(_place(value.const_value) or ())
        if twin is None:
            decoder.register_initializer(value)
        else:
            onnx_ir.convenience.replace_all_uses_with(value, twin)


def _join(encoder: onnx_ir.Graph, decoder: onnx_ir.Graph) -> None:
    """Puts the encoder's nodes before the decoder's, and what it gives where the decoder takes it."""
    given = {str(value.name): value for value in encoder.outputs}
    taken = {str(value.name): value for value in decoder.inputs}
    sources = {str(value.name): value for value in encoder.inputs}
    cross = [name for name in taken if cache_names.is_past(name) and ".encoder." in name]
    own = [name for name in taken if cache_names.is_past(name) and name not in cross]
    lacking = [name for name in cross if cache_names.present_of(name) not in given]
    expected = {SOURCE, DECODER_MASK, *own, *cross}
    if lacking or set(taken) != expected or set(sources) != {SOURCE, SOURCE_MASK} or STATES not in given or not cross:
        odd = [*lacking, *sorted(set(taken) ^ expected), *sorted(set(sources) ^ {SOURCE, SOURCE_MASK})] or [STATES]
        raise ConversionError(f"encoder and decoder do not fit together at {odd[0]}")
    nodes = list(encoder)
    encoder.inputs.clear()
    encoder.outputs.clear()
    encoder.remove(nodes)
    first = decoder[0]
    decoder.insert_before(first, nodes)
    onnx_ir.convenience.replace_all_uses_with(taken[DECODER_MASK], sources[SOURCE_MASK])
    taken[SOURCE].name = TARGET
    decoder.inputs.clear()
    decoder.inputs.extend([sources[SOURCE], sources[SOURCE_MASK], taken[SOURCE], *(taken[name] for name in own)])
    for name in cross:
        made = given[cache_names.present_of(name)]
        node = onnx_ir.node("Identity", [made], name=f"{name}.meeting")
        maker = made.producer()
        if maker is not None:
            node.metadata_props.update(maker.metadata_props)
        value = node.outputs[0]
        value.name, value.shape, value.type = f"{name}.made", taken[name].shape, taken[name].type
        decoder.insert_before(first, node)
        onnx_ir.convenience.replace_all_uses_with(taken[name], value)
        value.name = name
    given[STATES].name = MERGED_STATES
    decoder.outputs.extend([given[STATES], *(value for name, value in given.items() if name != STATES)])


# -- one to two --------------------------------------------------------------------------------------------------------


def split(path: Path, into: Path, boundary: Sequence[TensorSpec]) -> tuple[Path, Path]:
    """The reverse of `merge` after a converter has changed the graph: paths of the encoder's and of the decoder's.

    `boundary`: the decoder's inputs past_key_values.N.encoder.* as they shall be; where the graph now has another type
    inside, a Cast follows the input. What depends on the mask alone stands in both; their weights are in one
    `model.onnx.data`, each once. Raises ConversionError where the decoder reads the source past the boundary, the
    boundary is gone, or a graph that is not valid was written.
    """
    encoder, decoder = _load(path), _load(path)
    _only_encoder(encoder, path)
    _only_decoder(decoder, boundary, path)
    into.mkdir(parents=True, exist_ok=True)
    _save({ENCODER_FILE: encoder, DECODER_FILE: decoder}, into)
    for name in (ENCODER_FILE, DECODER_FILE):
        derived.check(into / name)
    return into / ENCODER_FILE, into / DECODER_FILE


def specs(path: Path) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Inputs and outputs of a file, its weights left where they are."""
    return onnx_graph.specs(_load(path).graph)


def _is_encoders(name: str) -> bool:
    return name == MERGED_STATES or (cache_names.is_present(name) and ".encoder." in name)


def _only_encoder(program: onnx_ir.Model, path: Path) -> None:
    graph = program.graph
    _outputs(graph, lambda name: _is_encoders(name))
    _drop_unread(program)
    for value in [value for value in graph.inputs if value.name not in (SOURCE, SOURCE_MASK)]:
        if value.uses():
            raise ConversionError(f"{path.name}: the encoder reads {value.name}, which is the decoder's")
        graph.inputs.remove(value)
    for output in graph.outputs:
        if output.name == MERGED_STATES:
            output.name = STATES
    for node in graph.all_nodes():
        node.name = (node.name or "").removeprefix(PREFIX)
    # A converter may have left the decoder's name on what both share, a mask for one: those stay as they are.
    names = {value.name for value in _values(graph)}
    for name, value in list(graph.initializers.items()):
        plain = name.removeprefix(PREFIX)
        if plain != name and plain not in names:
            graph.initializers.pop(name)
            value.name = plain
            graph.register_initializer(value)
            names.add(plain)
    for value in _values(graph):
        plain = (value.name or "").removeprefix(PREFIX)
        if plain != value.name and plain not in names and not value.is_initializer():
            value.name = plain
            names.add(plain)


def _only_decoder(program: onnx_ir.Model, boundary: Sequence[TensorSpec], path: Path) -> None:
    graph = program.graph
    _outputs(graph, lambda name: not _is_encoders(name))
    inner = {value.name: value for node in graph for value in node.outputs}
    first = graph[0]
    taken = []
    for spec in boundary:
        old = inner.get(spec.name)
        if old is None:
            raise ConversionError(
                f"{path.name}: {spec.name}, where encoder and decoder meet, is no longer in the graph"
            )
        old.name = f"{spec.name}.made"
        kind = onnx_ir.TensorType(onnx_ir.DataType.from_numpy(np.dtype(spec.dtype)))
        new = onnx_ir.Value(name=spec.name, shape=onnx_ir.Shape(spec.shape), type=kind)
        taken.append(new)
        read = new
        if old.dtype is not None and old.dtype != kind.dtype:
            node = onnx_ir.node("Cast", [new], attributes={"to": old.dtype.value}, name=f"{spec.name}.cast")
            read = node.outputs[0]
            read.name, read.shape, read.dtype = f"{spec.name}.{old.dtype.name.lower()}", new.shape, old.dtype
            graph.insert_before(first, node)
        onnx_ir.convenience.replace_all_uses_with(old, read)
    _drop_unread(program)
    for value in list(graph.inputs):
        if value.name == SOURCE:
            if value.uses():
                raise ConversionError(_past_the_boundary(graph, value, path))
            graph.inputs.remove(value)
        elif value.name == SOURCE_MASK:
            value.name = DECODER_MASK
    for value in graph.inputs:
        if value.name == TARGET:
            value.name = SOURCE
    order = [SOURCE, DECODER_MASK]
    rest = sorted(graph.inputs, key=lambda value: order.index(value.name) if value.name in order else len(order))
    graph.inputs.clear()
    graph.inputs.extend([*rest, *taken])


def _outputs(graph: onnx_ir.Graph, wanted: Callable[[str], bool]) -> None:
    kept = [value for value in graph.outputs if wanted(str(value.name))]
    graph.outputs.clear()
    graph.outputs.extend(kept)


def _drop_unread(program: onnx_ir.Model) -> None:
    """Takes out every node and weight that no output rests on."""
    RemoveUnusedNodesPass()(program)
    onnx_graph.drop_unused(program.graph)


def _past_the_boundary(graph: onnx_ir.Graph, source: onnx_ir.Value, path: Path) -> str:
    """What is wrong where the source's tokens count in the decoder by another way than its cache."""
    reached = {source}
    modules = []
    for node in graph:
        if any(value in reached for value in node.inputs):
            reached.update(node.outputs)
            modules.append(onnx_graph.module_scope(node) or node.name or node.op_type)
    of_decoder = next((module for module in modules if module.startswith("decoder.")), modules[-1])
    return (
        f"{path.name}: the decoder reads {SOURCE}, the source's tokens, past what the encoder hands it, first in "
        f"{of_decoder}: the two cannot be cut apart again"
    )


def _save(programs: Mapping[str, onnx_ir.Model], directory: Path) -> None:
    """Writes the graphs and, in one data file, their tensors of a kilobyte and more, what both use once."""
    holders: dict[tuple[object, ...], tuple[Any, list[onnx_ir.Value]]] = {}
    for program in programs.values():
        for value in program.graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.nbytes >= onnx_graph.INSIDE_BYTES:
                holders.setdefault(_place(tensor) or (id(tensor),), (tensor, []))[1].append(value)
    onnx_graph.save_together(programs, holders.values(), directory, DATA_FILE)

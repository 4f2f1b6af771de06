"""Floor 2: an encoder-decoder that writes to two ONNX graphs with one file of weights.

`encoder_model.onnx` reads the source once and gives, beside its states, the keys and values that the decoder's
cross-attention takes of them; `decoder_model.onnx` serves any past of its own, none included, and never sees the
encoder's states. Both keep their weights in `model.onnx.data`, where what both use (embeddings) stands once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir
import torch
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from nlpconvert import cache_names
from nlpconvert.artifact import Made, TensorSpec
from nlpconvert.cache_names import CacheLayer
from nlpconvert.convert import cached, onnx_graph
from nlpconvert.convert import onnx as uncached
from nlpconvert.convert.cached_graph import Call, Tensors, export
from nlpconvert.errors import ConversionError
from nlpconvert.memory import uncollected
from nlpconvert.models import Facts

ENCODER_FILE = "encoder_model.onnx"
DECODER_FILE = "decoder_model.onnx"
DATA_FILE = "model.onnx.data"

SOURCE_AXIS = "sequence"
TARGET_AXIS = "decoder_sequence"
SOURCE_LENGTH = 11
SHORT_SOURCE_LENGTH = 5


def convert(
    module: torch.nn.Module,
    facts: Facts,
    directory: Path,
    *,
    companions: Path | None = None,
    parameter_bytes: int = 0,
    opset: int | None = None,
) -> Made:
    """Writes `encoder_model.onnx`, `decoder_model.onnx`, their `model.onnx.data` and the companions into `directory`.

    `module`: an encoder-decoder with a language-modelling head, in eval mode; its forward is the same afterwards.
    Encoder: input_ids and attention_mask (batch, sequence) to last_hidden_state (batch, sequence, hidden) and
    present.N.encoder.key / .value (batch, heads, sequence, dim). Decoder: input_ids (batch, decoder_sequence),
    encoder_attention_mask (batch, sequence), past_key_values.N.decoder.key / .value (batch, heads,
    past_decoder_sequence, dim) and past_key_values.N.encoder.key / .value to logits (batch, decoder_sequence,
    vocabulary) and present.N.decoder.key / .value with the new tokens. A row's target has no padding.

    Made speaks of the decoder; `made_by["encoder"]` has the encoder's file, inputs and outputs. Raises as
    `cached.convert` does.
    """
    opset = cached.checked_opset(opset)
    if "decoder_input_ids" not in facts.inputs:
        raise ConversionError(f"{type(module).__name__} is no encoder-decoder: it takes no decoder_input_ids")
    with torch.no_grad(), uncollected():
        inputs = cached.short_call(facts)
        own = cached.measured(module, inputs, "self_attention_cache")
        cross = cached.measured(module, inputs, "cross_attention_cache")
        decoder = export(module, _decoder(module, facts, own, cross), opset)
        encoder = export(module, _encoder(module, facts, cross), opset)
        for program in (decoder, encoder):
            uncached.describe(program, facts)
        _save({DECODER_FILE: decoder, ENCODER_FILE: encoder}, directory)
    made_inputs, made_outputs = onnx_graph.specs(decoder.graph)
    encoder_inputs, encoder_outputs = onnx_graph.specs(encoder.graph)
    del program, decoder, encoder
    uncached.forget_last_graph()
    for name in (ENCODER_FILE, DECODER_FILE):
        uncached.check(directory / name)
    cached.copy_companions(companions, directory)
    growth, notes = cached.size_over_parameters(directory, parameter_bytes)
    return Made(
        file=DECODER_FILE,
        inputs=made_inputs,
        outputs=made_outputs,
        made_by={
            **cached.made_with(opset),
            "size_over_parameters": growth,
            "cache": cached.cache_data(own),
            "encoder_cache": cached.cache_data(cross),
            "encoder": {
                "file": ENCODER_FILE,
                "inputs": _plain(encoder_inputs),
                "outputs": _plain(encoder_outputs),
            },
        },
        notes=notes,
    )


def _plain(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]


# -- the two calls -----------------------------------------------------------------------------------------------------


def _encoder(module: torch.nn.Module, facts: Facts, cross: Sequence[CacheLayer]) -> Call:
    """The encoder, and the layers that make keys and values of its states."""
    tokens = ("batch", SOURCE_AXIS)
    inputs = (TensorSpec("input_ids", "int64", tokens), TensorSpec("attention_mask", "int64", tokens))
    states = TensorSpec("last_hidden_state", "float32", (*tokens, _width(module, facts)))
    outputs = (states, *cache_names.present(cross, SOURCE_AXIS, "encoder"))
    projections = _projections(module, facts)

    def forward(self: torch.nn.Module, tensors: Tensors) -> Tensors:
        if not projections:
            return _whole(self, tensors)
        state = self.get_encoder()(**tensors, return_dict=True)["last_hidden_state"]  # type: ignore[operator]
        return {"last_hidden_state": state} | {
            cache_names.name(cache_names.PRESENT, number, kind, "encoder"): _heads(
                self.get_submodule(path)(state), layer.dim(kind)
            )
            for number, (layer, paths) in enumerate(zip(cross, projections, strict=True))
            for kind, path in zip(cache_names.KINDS, paths, strict=True)
        }

    example = cached.drawn(facts, inputs, _sizes(facts))
    example["attention_mask"] = _padded(facts)
    return Call(forward, inputs, outputs, example)


def _heads(state: torch.Tensor, dim: int) -> torch.Tensor:
    """(batch, sequence, heads * dim) to (batch, heads, sequence, dim)."""
    return state.view(*state.shape[:2], -1, dim).transpose(1, 2)


def _whole(module: torch.nn.Module, tensors: Tensors) -> Tensors:
    """The whole model over one target token, of which nothing is kept but what rests on the source alone.

    Right for every architecture; a graph made of it took half as long again to export as one of the encoder alone.
    """
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    start = torch.zeros_like(tensors["input_ids"][:, :1])
    keyword = cached.cache_keyword(module)
    answers = type(module).forward(
        module, **tensors, decoder_input_ids=start, **{keyword: cache}, use_cache=True, return_dict=True
    )
    made = cached.kept(cache.cross_attention_cache, "encoder")
    return {"last_hidden_state": answers["encoder_last_hidden_state"], **made}


def _projections(module: torch.nn.Module, facts: Facts) -> list[tuple[str, str]]:
    """Paths of the two linear layers of each decoder layer that make the cross-attention's keys and values.

    Found in one pass of the whole model, no names assumed: the layer that reads the encoder's states and gives exactly
    what the cache then holds. Empty when that cannot be said of every layer, or when the encoder asked alone answers
    something else.
    """
    device = next(module.parameters()).device
    ids = cached.short_call(facts)["input_ids"].to(device)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def note(path: str) -> Callable[[Any, Any, Any], None]:
        return lambda _, inputs, output: given.append((path, inputs[0], output))

    linear = [(path, part) for path, part in module.named_modules() if isinstance(part, torch.nn.Linear)]
    hooks = [part.register_forward_hook(note(path)) for path, part in linear]
    try:
        made = _whole(module, tensors)
        encoder: Any = getattr(module, "get_encoder", None)
        alone = None if encoder is None else encoder()(**tensors, return_dict=True)["last_hidden_state"]
    finally:
        for hook in hooks:
            hook.remove()
    states = made.pop("last_hidden_state")
    if alone is None or not torch.equal(alone, states):
        return []
    readers = [(path, output) for path, read, output in given if read.shape == states.shape and read.equal(states)]
    found = []
    for wanted in made.values():
        paths = [path for path, output in readers if _is(output, wanted)]
        if len(paths) != 1:
            return []
        found.append(paths[0])
    return list(zip(found[::2], found[1::2], strict=True))


def _is(output: torch.Tensor, wanted: torch.Tensor) -> bool:
    return output.numel() == wanted.numel() and torch.equal(_heads(output, wanted.shape[-1]), wanted)


def _decoder(module: torch.nn.Module, facts: Facts, own: Sequence[CacheLayer], cross: Sequence[CacheLayer]) -> Call:
    tokens = ("batch", TARGET_AXIS)
    inputs = (
        TensorSpec("input_ids", "int64", tokens),
        TensorSpec("encoder_attention_mask", "int64", ("batch", SOURCE_AXIS)),
        *cache_names.past(own, cache_names.PAST_DECODER_AXIS, "decoder"),
        *cache_names.past(cross, SOURCE_AXIS, "encoder"),
    )
    logits = TensorSpec("logits", "float32", (*tokens, cached.vocabulary(module, facts)))
    outputs = (logits, *cache_names.present(own, cache_names.TOTAL_DECODER_AXIS, "decoder"))
    keyword, width = cached.cache_keyword(module), _width(module, facts)

    def forward(self: torch.nn.Module, tensors: Tensors) -> Tensors:
        ids, mask = tensors["input_ids"], tensors["encoder_attention_mask"]
        decoder = cached.filled(tensors, len(own), "decoder")
        encoder = cached.filled(tensors, len(cross), "encoder")
        # Full from the start, the cross-attention's layers count as updated: the encoder's states are not read then,
        # only asked for their length.
        cache = EncoderDecoderCache(decoder, encoder)
        cache.is_updated = dict.fromkeys(range(len(cross)), True)
        states = torch.zeros((*mask.shape, width), dtype=encoder.layers[0].keys.dtype, device=mask.device)
        answers = type(self).forward(
            self,
            attention_mask=mask,
            decoder_input_ids=ids,
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            **{keyword: cache},
            use_cache=True,
            return_dict=True,
        )
        return {"logits": answers["logits"], **cached.kept(decoder, "decoder")}

    example = cached.drawn(facts, inputs, _sizes(facts))
    example["encoder_attention_mask"] = _padded(facts)
    return Call(forward, inputs, outputs, example)


def _sizes(facts: Facts) -> dict[str, int]:
    sizes = cached.example_sizes(facts)
    source = SOURCE_LENGTH if facts.max_length is None or facts.max_length >= SOURCE_LENGTH else SHORT_SOURCE_LENGTH
    return {
        "batch": sizes["batch"],
        SOURCE_AXIS: source,
        TARGET_AXIS: sizes["sequence"],
        cache_names.PAST_DECODER_AXIS: sizes["past_sequence"],
    }


def _padded(facts: Facts) -> torch.Tensor:
    sizes = _sizes(facts)
    mask = torch.ones((sizes["batch"], sizes[SOURCE_AXIS]), dtype=torch.int64)
    mask[0, :3] = 0
    mask[2, :1] = 0
    return mask


def _width(module: torch.nn.Module, facts: Facts) -> int:
    """Size of the encoder's states."""
    inputs = {name: tensor.to(next(module.parameters()).device) for name, tensor in cached.short_call(facts).items()}
    answers = type(module).forward(module, **inputs, use_cache=False, return_dict=True)
    return int(answers["encoder_last_hidden_state"].shape[-1])


# -- one file of weights -----------------------------------------------------------------------------------------------

_LENT = "lent:"


def _save(programs: Mapping[str, onnx_ir.Model], directory: Path) -> None:
    """Writes the graphs and their tensors of a kilobyte and more into one data file, what several hold once."""
    sources: dict[int, Any] = {}  # id of a borrowed tensor -> the tensor that it stands for
    graphs = [program.graph for program in programs.values()]
    for borrower, lender in zip(graphs[1:], graphs[:1] * (len(graphs) - 1), strict=True):
        _borrow(borrower, lender, sources)
    holders: dict[int, tuple[Any, list[onnx_ir.Value]]] = {}
    for graph in graphs:
        for value in graph.initializers.values():
            tensor = sources.get(id(value.const_value), value.const_value)
            if tensor is not None and tensor.nbytes >= onnx_graph.INSIDE_BYTES:
                holders.setdefault(id(tensor), (tensor, []))[1].append(value)
    onnx_graph.save_together(programs, holders.values(), directory, DATA_FILE)


def _itself(tensor: Any) -> Any:
    return tensor


def _borrow(graph: onnx_ir.Graph, lender: onnx_ir.Graph, sources: dict[int, Any]) -> None:
    """Makes every weight of `graph` that `lender` has too, or has transposed, stand for the lender's.

    The lender's weights join the graph first, so that `share_weights` keeps those; the unused leave again.
    """
    own = list(graph.initializers.values())
    for value in own:
        graph.initializers.pop(str(value.name))
    for value in lender.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes < onnx_graph.INSIDE_BYTES:
            continue
        shape = onnx_ir.Shape(tensor.shape.numpy())
        lent = onnx_ir.LazyTensor(
            partial(_itself, tensor), dtype=tensor.dtype, shape=shape, name=f"{_LENT}{value.name}"
        )
        sources[id(lent)] = tensor
        joined = onnx_ir.Value(name=lent.name, shape=shape, type=value.type, const_value=lent)
        graph.register_initializer(joined)
    for value in own:
        graph.register_initializer(value)
    onnx_graph.share_weights(graph)
    onnx_graph.drop_unused(graph)
    for value in [value for name, value in graph.initializers.items() if name.startswith(_LENT)]:
        graph.initializers.pop(str(value.name))
        name = str(value.name).removeprefix(_LENT)
        value.name = name if name not in graph.initializers else f"decoder.{name}"
        graph.initializers[value.name] = value

"""Floor 1: the past-key-value cache of a model that writes, as inputs and outputs of a graph: names, axes, shapes.

Names are those that optimum and onnxruntime-genai know: `past_key_values.0.key` goes in, `present.0.key` comes out, and
with `.decoder` or `.encoder` between number and kind where a decoder attends to both. What does not belong here: how a
graph with a cache is exported (`convert.cached`) and how tokens are written with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nlpconvert.artifact import TensorSpec
from nlpconvert.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

PAST = "past_key_values"
PRESENT = "present"
KINDS = ("key", "value")

_PART = re.compile(r"\.\d+(\.decoder|\.encoder)?\.(key|value)")

PAST_AXIS = "past_sequence"
TOTAL_AXIS = "total_sequence"
"""Past and new together: what the mask covers and what comes out."""

PAST_DECODER_AXIS = "past_decoder_sequence"
TOTAL_DECODER_AXIS = "total_decoder_sequence"


@dataclass(frozen=True)
class CacheLayer:
    """What one layer keeps of each token: `heads` keys of `key_dim` numbers, as many values of `value_dim`."""

    heads: int
    key_dim: int
    value_dim: int

    def dim(self, kind: str) -> int:
        """Numbers a head keeps of "key" or "value"."""
        return self.key_dim if kind == "key" else self.value_dim


def name(stem: str, layer: int, kind: str, part: str = "") -> str:
    """`past_key_values.0.key`, or `present.0.encoder.value` with a part."""
    return ".".join((stem, str(layer), *((part,) if part else ()), kind))


def is_past(tensor: str) -> bool:
    """Whether an input is a part of the cache."""
    return _PART.fullmatch(tensor.removeprefix(PAST)) is not None


def is_present(tensor: str) -> bool:
    """Whether an output is a part of the cache."""
    return _PART.fullmatch(tensor.removeprefix(PRESENT)) is not None


def keeps(inputs: Iterable[TensorSpec]) -> bool:
    """Whether what takes these inputs keeps a cache."""
    return any(is_past(spec.name) for spec in inputs)


def axes(past: str, shape: Sequence[int | str]) -> tuple[int | str, ...]:
    """The shape that an input of the cache has to have: batch and length dynamic, whatever was recorded."""
    length = "sequence" if ".encoder." in past else PAST_DECODER_AXIS if ".decoder." in past else PAST_AXIS
    return ("batch", shape[1], length, *shape[3:])


def present_of(past: str) -> str:
    """The output that is this input at the next call."""
    return PRESENT + past.removeprefix(PAST)


def past_of(present: str) -> str:
    """The input at the next call that this output is."""
    return PAST + present.removeprefix(PRESENT)


def past(layers: Sequence[CacheLayer], axis: str = PAST_AXIS, part: str = "") -> tuple[TensorSpec, ...]:
    """The inputs, float32 (batch, heads, `axis`, dim), layer by layer, key before value."""
    return _specs(PAST, layers, axis, part)


def present(layers: Sequence[CacheLayer], axis: str = TOTAL_AXIS, part: str = "") -> tuple[TensorSpec, ...]:
    """The outputs, float32 (batch, heads, `axis`, dim), in the order of `past`."""
    return _specs(PRESENT, layers, axis, part)


def _specs(stem: str, layers: Sequence[CacheLayer], axis: str, part: str) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name(stem, number, kind, part), "float32", ("batch", layer.heads, axis, layer.dim(kind)))
        for number, layer in enumerate(layers)
        for kind in KINDS
    )


def empty(inputs: Iterable[TensorSpec], batch: int) -> dict[str, np.ndarray]:
    """The cache before the first token: an array of length 0 for every input that is a past of the decoder's own.

    A graph's inputs go in as they are; those that are no cache, and the cache over the encoder's tokens, are left out.
    """
    import numpy as np  # engines' profiles know these names, and are looked at before anything is loaded

    arrays = {}
    for spec in inputs:
        if is_past(spec.name) and ".encoder." not in spec.name:
            shape = [
                size if isinstance(size, int) else batch if axis == 0 else 0 for axis, size in enumerate(spec.shape)
            ]
            arrays[spec.name] = np.zeros(shape, dtype=spec.dtype)
    return arrays


def decoder_inputs(batch: Mapping[str, np.ndarray], made: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a pair's decoder takes of a source and a target (`batch`) and of what the encoder has `made` of it."""
    return {
        "input_ids": batch["decoder_input_ids"],
        "encoder_attention_mask": batch["attention_mask"],
        **{past_of(name): array for name, array in made.items() if is_present(name)},
    }


def token_bytes(layers: Sequence[CacheLayer], element: int = 4) -> int:
    """Bytes that the cache grows by for each token of each row, in elements of `element` bytes."""
    return sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in layers) * element


# -- from a config -----------------------------------------------------------------------------------------------------

# What config.json calls it, the decoder's own word first.
_LAYERS = ("num_decoder_layers", "decoder_layers", "num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads", "n_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_HEAD_DIM = ("head_dim", "d_kv")
_WIDTH = ("hidden_size", "n_embd", "d_model", "n_embed")


def layers_of(config: Any) -> tuple[CacheLayer, ...]:
    """The cache that a config speaks of: config.json as a mapping, or a config with attributes.

    It holds for usual attention, every layer alike; an exporter asks the model itself. Raises UsageError when the
    config does not say how many layers, heads or dimensions there are.
    """
    heads = _number(config, _HEADS, "attention heads")
    kept = _maybe(config, _KEY_VALUE_HEADS) or heads
    dim = _maybe(config, _HEAD_DIM) or _number(config, _WIDTH, "hidden size") // heads
    return (CacheLayer(kept, dim, dim),) * _number(config, _LAYERS, "layers")


def _maybe(config: Any, names: Iterable[str]) -> int | None:
    for each in names:
        value = config.get(each) if isinstance(config, Mapping) else getattr(config, each, None)
        if type(value) is int and value > 0:
            return value
    return None


def _number(config: Any, names: Iterable[str], what: str) -> int:
    value = _maybe(config, names)
    if value is None:
        raise UsageError(f"the config does not say its number of {what}: none of {', '.join(names)} is a whole number")
    return value

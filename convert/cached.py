"""Floor 2: a decoder that writes to one ONNX graph with its past-key-value cache.

One `model.onnx` serves the prompt (a past of length 0), chunks of it and single steps: the cache goes in as
`past_key_values.N.key` and comes out as `present.N.key`. What `cached_pair` needs as well stands here too: examples,
transformers' caches filled and read, files and facts beside the graph.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxscript
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer

from nlpconvert import cache_names
from nlpconvert.artifact import Made, TensorSpec
from nlpconvert.cache_names import CacheLayer
from nlpconvert.convert import onnx as uncached
from nlpconvert.convert import onnx_graph
from nlpconvert.convert.cached_graph import Call, Tensors, export
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.inputs import positions_from_mask
from nlpconvert.memory import uncollected
from nlpconvert.models import Facts

# What the example is made of: no two alike, none of them 0 or 1 (which torch.export would make constants), and
# total lengths that no other axis has. A model with a limit below the total gets the short ones.
SIZES = {"batch": 3, "sequence": 5, "past_sequence": 7, "total_sequence": 12}
SHORT_SIZES = {"batch": 3, "sequence": 2, "past_sequence": 4, "total_sequence": 6}


def convert(
    module: torch.nn.Module,
    facts: Facts,
    directory: Path,
    *,
    companions: Path | None = None,
    parameter_bytes: int = 0,
    opset: int | None = None,
) -> Made:
    """Writes `model.onnx` (+ `model.onnx.data`) and the companions into `directory`.

    `module`: a decoder with a language-modelling head, in eval mode; its forward is the same afterwards. Inputs:
    input_ids (batch, sequence), attention_mask (batch, total_sequence: past and new), position_ids (batch, sequence)
    where facts.inputs has them, and the cache, float32 (batch, heads, past_sequence, dim). Outputs: logits (batch,
    sequence, vocabulary) and the cache with the new tokens. `parameter_bytes`: of the unique parameters, in float32.

    Raises ConversionError when the model keeps no keys and values, when the exporter cannot, or when its graph lost an
    input or froze an axis; UsageError for an opset out of range.
    """
    opset = checked_opset(opset)
    with torch.no_grad(), uncollected():
        layers = measured(module, short_call(facts))
        program = export(module, _call(module, facts, layers), opset)
        uncached.describe(program, facts)
        path = directory / "model.onnx"
        onnx_graph.save(program, path)
    inputs, outputs = onnx_graph.specs(program.graph)
    del program
    uncached.forget_last_graph()
    uncached.check(path)
    copy_companions(companions, directory)
    growth, notes = size_over_parameters(directory, parameter_bytes)
    taken = {spec.name for spec in inputs}
    notes += tuple(
        f"{name} is no input of a graph with a cache: the model's own default stands in for it"
        for name in facts.inputs
        if name not in taken
    )
    made_by = {**made_with(opset), "size_over_parameters": growth, "cache": cache_data(layers)}
    return Made(file=path.name, inputs=inputs, outputs=outputs, made_by=made_by, notes=notes)


# -- the decoder's call ------------------------------------------------------------------------------------------------


def _call(module: torch.nn.Module, facts: Facts, layers: Sequence[CacheLayer]) -> Call:
    tokens = ("batch", "sequence")
    inputs = [
        TensorSpec("input_ids", "int64", tokens),
        TensorSpec("attention_mask", "int64", ("batch", cache_names.TOTAL_AXIS)),
    ]
    if "position_ids" in facts.inputs:
        inputs.append(TensorSpec("position_ids", "int64", tokens))
    inputs += cache_names.past(layers)
    logits = TensorSpec("logits", "float32", (*tokens, vocabulary(module, facts)))
    keyword = cache_keyword(module)

    def forward(self: torch.nn.Module, tensors: Tensors) -> Tensors:
        cache = filled(tensors, len(layers))
        plain = {name: tensor for name, tensor in tensors.items() if not cache_names.is_past(name)}
        answers = type(self).forward(self, **plain, **{keyword: cache}, use_cache=True, return_dict=True)
        return {"logits": answers["logits"], **kept(cache)}

    return Call(forward, tuple(inputs), (logits, *cache_names.present(layers)), _example(facts, inputs))


def vocabulary(module: torch.nn.Module, facts: Facts) -> int:
    """Size of the logits: what the head gives, which may be more than the tokens that there are."""
    own: Any = module
    head = own.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    return int(head.weight.shape[0]) if isinstance(head, torch.nn.Linear) else facts.vocab_size


def _example(facts: Facts, inputs: Sequence[TensorSpec]) -> Tensors:
    """Padded at the left, the second row without padding: where nothing is padded, exporters drop the mask."""
    sizes = example_sizes(facts)
    mask = np.ones((sizes["batch"], sizes["total_sequence"]), dtype=np.int64)
    mask[0, :3] = 0
    mask[2, :1] = 0
    example = drawn(facts, inputs, sizes)
    example["attention_mask"] = torch.from_numpy(mask)
    if "position_ids" in example:
        positions = positions_from_mask(mask)[:, -sizes["sequence"] :]
        example["position_ids"] = torch.from_numpy(np.ascontiguousarray(positions))
    return example


def example_sizes(facts: Facts) -> dict[str, int]:
    """Sizes of the example's axes, within the model's limit."""
    fits = facts.max_length is None or facts.max_length >= SIZES["total_sequence"]
    return dict(SIZES if fits else SHORT_SIZES)


def drawn(facts: Facts, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> Tensors:
    """A tensor for every input: float32 ones normal, int64 ones plain ids, axes as `sizes` says."""
    rng = np.random.default_rng(0)
    plain = np.array([each for each in range(facts.vocab_size) if each not in facts.special_ids] or [0], dtype=np.int64)
    example = {}
    for spec in inputs:
        shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
        array = rng.choice(plain, shape) if spec.dtype == "int64" else rng.standard_normal(shape).astype(spec.dtype)
        example[spec.name] = torch.from_numpy(np.ascontiguousarray(array))
    return example


# -- caches ------------------------------------------------------------------------------------------------------------


def cache_keyword(module: torch.nn.Module) -> str:
    """What the class's forward calls the cache. Raises ConversionError when it takes none."""
    taken = inspect.signature(type(module).forward).parameters
    for word in ("cache", "past_key_values"):
        if word in taken:
            return word
    raise ConversionError(f"{type(module).__name__} takes no cache of keys and values, so it cannot write step by step")


def keeps_none(module: torch.nn.Module, facts: Facts) -> str:
    """Why the model writes without a cache of keys and values, in one sentence; "" where it keeps one."""
    try:
        with torch.no_grad():
            part = "self_attention_cache" if "decoder_input_ids" in facts.inputs else ""
            measured(module, short_call(facts), part)
    except ConversionError as error:
        return str(error)
    return ""


def short_call(facts: Facts) -> Tensors:
    """The shortest input that fills a cache: (1, 2) plain ids."""
    names = ["input_ids"] + ["decoder_input_ids"] * ("decoder_input_ids" in facts.inputs)
    sizes = {"batch": 1, "sequence": 2}
    return drawn(facts, [TensorSpec(name, "int64", ("batch", "sequence")) for name in names], sizes)


def measured(module: torch.nn.Module, inputs: Tensors, attribute: str = "") -> tuple[CacheLayer, ...]:
    """The layers of the cache that the model itself fills; `attribute` names one of two caches.

    Raises ConversionError when what it keeps are not keys and values of (batch, heads, tokens, dim).
    """
    keyword = cache_keyword(module)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    answers = type(module).forward(module, **inputs, use_cache=True, return_dict=True)
    cache = answers.get(keyword)
    cache = getattr(cache, attribute) if attribute and cache is not None else cache
    layers = []
    for number, layer in enumerate(getattr(cache, "layers", ())):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(layer, DynamicLayer) or any(each is None or each.ndim != 4 for each in (keys, values)):
            raise ConversionError(
                f"layer {number} of {type(module).__name__} keeps {type(layer).__name__}, not keys and values of every "
                "token: such a cache is not supported"
            )
        assert keys is not None and values is not None
        layers.append(CacheLayer(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3])))
    if not layers:
        raise ConversionError(f"{type(module).__name__} keeps no keys and values when it is asked to")
    return tuple(layers)


def filled(tensors: Tensors, layers: int, part: str = "") -> Any:
    """transformers' cache with the past of `tensors`, by name.

    Every layer keeps all tokens, also one that looks at a window only: its mask cuts the window.
    """
    cache: Any = DynamicCache()
    cache.layers = []
    for number in range(layers):
        layer: Any = DynamicLayer()  # type: ignore[no-untyped-call]
        layer.keys, layer.values = (
            tensors[cache_names.name(cache_names.PAST, number, kind, part)] for kind in cache_names.KINDS
        )
        layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
        cache.layers.append(layer)
    return cache


def kept(cache: Any, part: str = "") -> Tensors:
    """What a cache holds, as outputs by name."""
    return {
        cache_names.name(cache_names.PRESENT, number, kind, part): states
        for number, layer in enumerate(cache.layers)
        for kind, states in zip(cache_names.KINDS, (layer.keys, layer.values), strict=True)
    }


def cache_data(layers: Sequence[CacheLayer]) -> dict[str, Any]:
    """Plain JSON values: heads and dimensions by layer, and what a token costs."""
    return {
        "layers": [[layer.heads, layer.key_dim, layer.value_dim] for layer in layers],
        "bytes_per_token": cache_names.token_bytes(layers),
    }


# -- files and facts ---------------------------------------------------------------------------------------------------


def checked_opset(opset: int | None) -> int:
    """The opset to use. Raises UsageError for one out of range."""
    opset = uncached.DEFAULT_OPSET if opset is None else opset
    if opset not in uncached.OPSETS:
        raise UsageError(f"--opset {opset} is not between {uncached.OPSETS.start} and {uncached.OPSETS.stop - 1}")
    return opset


def copy_companions(companions: Path | None, directory: Path) -> None:
    """What other tools need beside the graph: config, generation config, tokenizer."""
    for name in uncached.COMPANIONS if companions is not None else ():
        assert companions is not None
        if (companions / name).is_file():
            shutil.copyfile(companions / name, directory / name)


def size_over_parameters(directory: Path, parameter_bytes: int) -> tuple[float, tuple[str, ...]]:
    """All graphs and weights over the unique parameters, and a note where they are too many."""
    size = sum(f.stat().st_size for f in directory.iterdir() if f.suffix in (".onnx", ".data"))
    growth = size / parameter_bytes if parameter_bytes else 0.0
    # Below a megabyte the graph itself outweighs the parameters, and the ratio says nothing.
    if growth > uncached.GROWTH_FLAGGED and size > 2**20 + parameter_bytes:
        return round(growth, 4), (
            f"the files are {growth:.2f} times the unique parameters ({parameter_bytes:,} bytes)",
        )
    return round(growth, 4), ()


def made_with(opset: int) -> dict[str, Any]:
    """Exporter and versions."""
    return {
        "exporter": "transformers.exporters",
        "fallback_reason": "",
        "opset": opset,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "onnxscript": onnxscript.__version__,
        "onnx": onnx.__version__,
        "onnx_ir": onnx_ir.__version__,
    }

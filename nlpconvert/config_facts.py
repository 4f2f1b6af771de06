"""Floor 1: the facts of a model that writes by what lies beside its graph: config.json and generation_config.json.

For directories that another tool made, where there is no manifest to say them. A loaded model's are `facts`'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nlpconvert.artifact import TensorSpec
from nlpconvert.errors import UsageError
from nlpconvert.models import TASKS, Facts, architecture

# What a config calls the limit where it has no word of the table's.
_LIMITS = ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length")


def of_writer(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    encodes: bool,
) -> Facts:
    """Facts from the two configs and what the (decoder's) graph takes and gives.

    Raises UsageError where the configs do not say the model type, how many ids there are, or the token that a decoder
    starts with.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UsageError("config.json names no model_type")
    own = config.get("text_config")
    text: Mapping[str, Any] = {**config, **own} if isinstance(own, Mapping) else config
    vocab = _vocabulary(text, outputs)

    def special(*names: str) -> int | None:
        for name in names:
            for holder in (text, generation):
                value = holder.get(name)
                first = value[0] if isinstance(value, list) and value else value
                if type(first) is int and 0 <= first < vocab:
                    return first
        return None

    eos = special("eos_token_id")
    pad = next((value for value in (special("pad_token_id"), eos) if value is not None), 0)
    start = special("decoder_start_token_id", "bos_token_id") if encodes else None
    if encodes and start is None:
        raise UsageError("config.json says no decoder_start_token_id, so the decoder has nothing to start with")
    task = "text2text-generation" if encodes else "text-generation"
    positions = any(spec.name == "position_ids" for spec in inputs)
    names = ("input_ids", "attention_mask", *(("decoder_input_ids",) if encodes else ()))
    return Facts(
        model_type=model_type,
        task=task,
        inputs=(*names, "position_ids") if positions else names,
        outputs=TASKS[task].outputs[:1],
        vocab_size=vocab,
        pad_id=pad,
        eos_id=eos,
        decoder_start_id=start,
        max_length=_limit(text, model_type, pad),
        positions="mask" if positions else "own",
        type_vocab_size=0,
        constants=(),
        pairs=False,
        special_ids=tuple(sorted({each for each in (pad, eos, start) if each is not None})),
    )


def _vocabulary(config: Mapping[str, Any], outputs: Sequence[TensorSpec]) -> int:
    """The logits' last axis, else what the config says."""
    for spec in outputs:
        if spec.name == "logits" and spec.shape and isinstance(spec.shape[-1], int) and spec.shape[-1] > 0:
            return spec.shape[-1]
    value = config.get("vocab_size")
    if type(value) is not int or value < 1:
        raise UsageError(f"config.json says no vocab_size (it is {value!r})")
    return value


def _limit(config: Mapping[str, Any], model_type: str, pad: int) -> int | None:
    row = architecture(model_type)
    if not row.limit:
        return None
    value = next((config[name] for name in (row.limit, *_LIMITS) if type(config.get(name)) is int), None)
    offset = row.offset if isinstance(row.offset, int) else pad + 1
    return value - offset if value is not None and value - offset > 0 else None

"""Floor 2: what the rest of the house has to know of a loaded model, told without torch (`models.Facts`).

Read off the module's config, the tokenizer and the table of architectures; no framework is imported here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nlpconvert.checkpoint import SourceInfo
from nlpconvert.errors import UsageError
from nlpconvert.models import LENGTH_CONSTANTS, TASKS, Facts, architecture
from nlpconvert.tokenizer import check_vocabulary


def gather(info: SourceInfo, module: Any, words: Any, accepted: frozenset[str], notes: list[str]) -> Facts:
    """The facts of a loaded model, outputs aside."""
    config = module.config
    text = config.get_text_config()
    row = architecture(info.model_type)
    if "input_ids" not in accepted:
        raise UsageError(f"{info.model}: {type(module).__name__} takes no input_ids: only models of text are converted")
    rows = int(module.get_input_embeddings().weight.shape[0])
    if words is not None:
        check_vocabulary(info, words, rows, notes)

    def special(name: str) -> int | None:
        """A special token's id, the model's before the tokenizer's; a list's first; None when it has no row."""
        for holder in (text, getattr(module, "generation_config", None), words):
            value = getattr(holder, name, None)
            first = value[0] if isinstance(value, list) and value else value
            if isinstance(first, int) and 0 <= first < rows:
                return first
        return None

    eos = special("eos_token_id")
    pad = next((value for value in (special("pad_token_id"), eos) if value is not None), 0)
    own_pad = getattr(words, "pad_token_id", None)
    if own_pad is not None and own_pad != pad:
        notes.append(f"the tokenizer pads with {own_pad}, the model's config with {pad}: the config's is used")
    if info.task == "text-classification" and getattr(text, "pad_token_id", None) is None:
        # A decoder's classifier looks for its last token by the pad id and raises for a batch without one.
        text.pad_token_id = pad
    offset = row.offset if isinstance(row.offset, int) else pad + 1
    limit = getattr(text, row.limit, None) if row.limit else None
    max_length = limit - offset if isinstance(limit, int) and limit - offset > 0 else None
    token_types = getattr(text, "type_vocab_size", row.token_types) or 0
    start = next(
        (special(name) for name in ("decoder_start_token_id", "bos_token_id") if special(name) is not None), pad
    )
    inputs = _inputs(info, accepted, row.positions, token_types)
    from_mask = "position_ids" in inputs
    needs_eos = info.task == "text-classification" and bool(getattr(config, "is_encoder_decoder", False))
    ids = (
        special(name)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    )
    return Facts(
        model_type=info.model_type,
        task=info.task,
        inputs=inputs,
        outputs=(),
        vocab_size=rows,
        pad_id=pad,
        eos_id=eos,
        decoder_start_id=start if "decoder_input_ids" in inputs else None,
        max_length=max_length,
        positions="mask" if from_mask else "own" if row.positions == "mask" else row.positions,
        type_vocab_size=token_types if "token_type_ids" in inputs else 0,
        constants=_constants(text, max_length),
        pairs=TASKS[info.task].pairs and not from_mask,
        special_ids=tuple(sorted({*(each for each in ids if each is not None), *_tokenizer_ids(words)})),
        required_token=eos if needs_eos else None,
        trace_length=_trace_length(getattr(text, row.trace_length, 0) if row.trace_length else 0, max_length),
    )


def _inputs(info: SourceInfo, accepted: frozenset[str], positions: str, token_types: int) -> tuple[str, ...]:
    """What forward uses and the model has, in the tokenizer's order (one kind of token carries nothing)."""
    decodes = info.task in ("feature-extraction", "text2text-generation")
    wanted = {
        "input_ids": True,
        "token_type_ids": token_types > 1,
        "attention_mask": True,
        "position_ids": positions == "mask",
        "decoder_input_ids": decodes,
        "decoder_attention_mask": decodes,
    }
    return tuple(name for name, wish in wanted.items() if wish and name in accepted)


def _tokenizer_ids(words: Any) -> list[int]:
    return [] if words is None else [int(each) for each in words.all_special_ids]


def _trace_length(value: int, max_length: int | None) -> int:
    """The attribute's value within the length limit; below 1 (DeBERTa's -1) it means the limit itself."""
    if value == 0 or max_length is None:
        return max(value, 0)
    return min(value, max_length) if value > 0 else max_length


def _constants(config: Any, max_length: int | None) -> tuple[int, ...]:
    """Lengths at which the architecture changes what it does, as far as a probe can reach them."""
    values = (getattr(config, name, None) for name in LENGTH_CONSTANTS)
    flat = (each for value in values for each in (value if isinstance(value, list | tuple) else [value]))
    reach = max_length or 512
    return tuple(sorted({each for each in flat if type(each) is int and 0 < each < reach}))


def short_example(facts: Facts) -> dict[str, np.ndarray]:
    """One short row of plain ids (1, 4), as every model of text can answer it; two choices of it, (1, 2, 4)."""
    length = min(4, facts.max_length or 4)
    plain = [each for each in range(facts.vocab_size) if each not in facts.special_ids][-length:] or [0]
    if facts.required_token is not None:
        plain[-1] = facts.required_token
    ids = np.array([plain], dtype=np.int64)
    values = {"token_type_ids": np.zeros_like(ids), "position_ids": np.arange(ids.shape[1], dtype=np.int64)[None]}
    made = {name: ids if name.endswith("input_ids") else values.get(name, np.ones_like(ids)) for name in facts.inputs}
    return {name: np.stack([each, each], axis=1) if TASKS[facts.task].choices else each for name, each in made.items()}

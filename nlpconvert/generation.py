"""Floor 3: the loop that writes: prompts are read, tokens chosen and read again until every row has ended.

It knows a `Writer` and no runtime. Greedy needs numpy alone; whatever else a generation config asks for is chosen by
transformers' own processors (`backends.processors`). What is written is judged elsewhere (`writing`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from nlpconvert.errors import MissingPackage, UsageError
from nlpconvert.models import Facts
from nlpconvert.writer import Writer, check_limit, encodes, start

Choose = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Tokens so far, int64 (batch, n), and the last logits (batch, vocabulary) to the next tokens, int64 (batch,)."""
Decode = Callable[[Sequence[int]], str]

MAX_NEW_TOKENS = 40
"""Where neither the user nor the checkpoint says."""

# What a generation config may ask that changes which token is chosen, and what asks for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
}
_BEAMS = ("length_penalty", "early_stopping")
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_NAMES = (*_SAMPLING, *_NEUTRAL, *_BEAMS)


@dataclass(frozen=True)
class Settings:
    """How to write. `eos`: ids that end a row; `pad` fills what follows. `wanted`: entries of a generation config.

    `stop`: texts that end a row too (they need a `decode`). `chunk`: prompts are read so many tokens at a time, None
    for all at once. `beams`: more than one for beam search, by transformers' own `generate`.
    """

    max_new_tokens: int = MAX_NEW_TOKENS
    eos: tuple[int, ...] = ()
    pad: int = 0
    sample: bool = False
    seed: int = 0
    stop: tuple[str, ...] = ()
    chunk: int | None = None
    beams: int = 1
    wanted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Greedy without anything that changes scores: no torch is needed."""
        return not self.sample and all(
            self.wanted.get(name) is None or self.wanted[name] in neutral for name, neutral in _NEUTRAL.items()
        )


def settings(facts: Facts, config: Mapping[str, Any] | None = None, **changes: Any) -> Settings:
    """Settings as a checkpoint's generation_config.json has them; greedy unless `changes` says `sample`.

    `changes`: fields of Settings, or entries of a generation config (`top_k`). Raises UsageError for a name that is
    neither, or without a token to write.
    """
    said = {name: value for name, value in (config or {}).items() if value is not None}
    own = {
        name: value for name, value in changes.items() if name in Settings.__dataclass_fields__ and value is not None
    }
    wanted = {name: said[name] for name in _NAMES if name in said}
    for name, value in changes.items():
        if name in _NAMES and value is not None:
            wanted[name] = value
        elif name not in Settings.__dataclass_fields__ and value is not None:
            raise UsageError(f"no such setting of generation: {name}; there are {', '.join(_NAMES)}")
    eos = said.get("eos_token_id", facts.eos_id)
    ends = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)
    made = Settings(
        max_new_tokens=int(said.get("max_new_tokens", MAX_NEW_TOKENS)),
        eos=ends,
        pad=int(said.get("pad_token_id", facts.pad_id)),
        wanted=wanted,
    )
    made = replace(made, **own)
    if made.beams > 1 and (made.sample or made.stop):
        raise UsageError("beam search neither samples nor stops at texts; leave one of them out")
    if made.max_new_tokens < 1:
        raise UsageError(f"--max-new-tokens {made.max_new_tokens}: nothing would be written; give 1 or more")
    return made


@dataclass(frozen=True)
class Written:
    """What was written: new tokens, int64 (batch, n), padded after a row's end; how many are a row's own, the one that
    ended it included; and why each ended: "eos", "stop" or "length". Seconds of reading the prompts and of all steps.
    """

    tokens: np.ndarray
    lengths: tuple[int, ...]
    ended: tuple[str, ...]
    prefill_seconds: float
    step_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together, prompts included in the time."""
        return sum(self.lengths) / max(self.prefill_seconds + self.step_seconds, 1e-9)


def generate(
    writer: Writer,
    prompts: Mapping[str, np.ndarray],
    how: Settings,
    *,
    decode: Decode | None = None,
    on_step: Callable[[np.ndarray, np.ndarray], None] | None = None,
) -> Written:
    """Writes until every row has ended, or `how.max_new_tokens` stand.

    `prompts`: as `Writer.begin` takes them. `on_step` sees the logits (batch, vocabulary) and the tokens (batch,) that
    were chosen of them, before finished rows are padded. Raises UsageError where prompts and new tokens together are
    more than the model takes, before anything runs; MissingPackage where `how` needs transformers and it is not there.
    """
    _check(writer.facts, prompts, how, decode)
    if how.beams > 1:
        return _searched(writer, prompts, how)
    began = time.perf_counter()
    state = writer.begin(prompts)
    encoded = time.perf_counter() - began
    choose = _greedy if how.plain else _processors(how, state.first, prompts if state.encodes else None)
    began = time.perf_counter()
    logits = read(writer, state, state.first, how.chunk)
    prefilled = time.perf_counter()
    said = state.first
    rows = state.rows
    lengths = np.zeros(rows, np.int64)
    ended = np.full(rows, "", dtype=object)
    for count in range(1, how.max_new_tokens + 1):
        chosen = np.asarray(choose(said, logits), np.int64)
        if on_step is not None:
            on_step(logits, chosen)
        running = ended == ""
        chosen = np.where(running, chosen, how.pad)
        said = np.concatenate([said, chosen[:, None]], axis=1)
        lengths[running] = count
        ended[running & np.isin(chosen, how.eos)] = "eos"
        if how.stop and decode is not None:
            for row in np.flatnonzero(ended == ""):
                text = decode([int(token) for token in said[row, state.first.shape[1] :]])
                if any(each in text for each in how.stop):
                    ended[row] = "stop"
        if (ended != "").all() or count == how.max_new_tokens:
            break
        logits = writer.step(state, chosen[:, None])[:, -1]
    ended[ended == ""] = "length"
    return Written(
        tokens=said[:, state.first.shape[1] :],
        lengths=tuple(int(each) for each in lengths),
        ended=tuple(str(each) for each in ended),
        prefill_seconds=encoded + prefilled - began,
        step_seconds=time.perf_counter() - prefilled,
    )


def read(writer: Writer, state: Any, tokens: np.ndarray, chunk: int | None = None) -> np.ndarray:
    """Reads tokens, `chunk` at a time, and gives the last logits, (batch, vocabulary)."""
    size = chunk or tokens.shape[1]
    for at in range(0, tokens.shape[1], size):
        logits = writer.step(state, tokens[:, at : at + size])
    return logits[:, -1]


def pad_left(rows: Sequence[Sequence[int]], pad: int) -> dict[str, np.ndarray]:
    """Prompts of a decoder as a batch, input_ids and attention_mask int64 (batch, longest), padded at the left."""
    return _padded(rows, pad, left=True)


def pad_right(rows: Sequence[Sequence[int]], pad: int) -> dict[str, np.ndarray]:
    """Sources of an encoder-decoder as a batch, padded at the right."""
    return _padded(rows, pad, left=False)


def pad_for(facts: Facts, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Rows of ids as the batch that the model's writers begin with."""
    return _padded(rows, facts.pad_id, left=not encodes(facts))


def _padded(rows: Sequence[Sequence[int]], pad: int, *, left: bool) -> dict[str, np.ndarray]:
    size = max(len(row) for row in rows)
    ids = np.full((len(rows), size), pad, np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(size - len(row), size) if left else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def _check(facts: Facts, prompts: Mapping[str, np.ndarray], how: Settings, decode: Decode | None) -> None:
    state = start(prompts, facts)
    if how.stop and decode is None:
        raise UsageError("stop texts need the model's tokenizer, and it has none; give token ids to stop at instead")
    longest = 1 if state.encodes else int(state.mask.sum(axis=1).max())
    words = "the start token" if state.encodes else f"the longest prompt, {longest:,} tokens,"
    # The last token is written and never read.
    check_limit(facts, longest + how.max_new_tokens - 1, f"{words} and {how.max_new_tokens:,} new ones")


def _greedy(_: np.ndarray, logits: np.ndarray) -> np.ndarray:
    return np.asarray(logits.argmax(axis=-1))


def _searched(writer: Writer, prompts: Mapping[str, np.ndarray], how: Settings) -> Written:
    try:
        from nlpconvert.backends import beams
    except ImportError as error:
        raise _missing() from error
    began = time.perf_counter()
    tokens = beams.search(writer, prompts, {**_asked(how), "num_beams": how.beams})
    took = time.perf_counter() - began
    ends = np.asarray(np.isin(tokens, how.eos))
    found = [bool(row.any()) for row in ends]
    lengths = [int(row.argmax()) + 1 if any_ else len(row) for row, any_ in zip(ends, found, strict=True)]
    ended = tuple("eos" if any_ else "length" for any_ in found)
    return Written(tokens, tuple(lengths), ended, 0.0, took)


def _processors(how: Settings, first: np.ndarray, prompts: Mapping[str, np.ndarray] | None) -> Choose:
    try:
        from nlpconvert.backends import processors
    except ImportError as error:
        raise _missing() from error
    source = None if prompts is None else np.asarray(prompts["input_ids"])
    return processors.chooser(_asked(how), sample=how.sample, seed=how.seed, first=first, source=source)


def _asked(how: Settings) -> dict[str, Any]:
    """Entries of a generation config; what it says of sampling only where there is some."""
    kept = {name: value for name, value in how.wanted.items() if how.sample or name not in _SAMPLING}
    kept = {name: value for name, value in kept.items() if how.beams > 1 or name not in _BEAMS}
    return {
        **kept,
        "eos_token_id": list(how.eos) or None,
        "pad_token_id": how.pad,
        "max_new_tokens": how.max_new_tokens,
    }


def _missing() -> MissingPackage:
    return MissingPackage(
        "sampling, penalties, forced tokens and beams are transformers' own, which is not installed: "
        "pip install 'nlpconvert[cpu]'"
    )

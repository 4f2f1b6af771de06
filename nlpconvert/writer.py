"""Floor 1: what writes token by token, whatever runs it: a Writer, and the State of one batch while it is written.

A writer reads any number of tokens at once: a whole prompt, a chunk of it, or one. What it has read stays in its cache,
whose form is the writer's own affair; the loop that chooses tokens is `generation`, what is measured is
`validators.written`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nlpconvert.errors import UsageError
from nlpconvert.inputs import positions_from_mask
from nlpconvert.models import Facts


@dataclass
class State:
    """One batch while it is written; a writer's `step` advances it, `reorder` exchanges its rows.

    `first`: what is read first, int64 (batch, n): a decoder's prompts, padded at the left; an encoder-decoder's start
    token. `mask`: int64 (batch, m): of a decoder's prompts (what comes after them counts); of the encoder's tokens.
    `length`: tokens of each row in the cache, padding included. `shift`: added to every position, for finding faults.
    """

    first: np.ndarray
    mask: np.ndarray
    cache: Any
    encodes: bool
    length: int = 0
    shift: int = 0

    @property
    def rows(self) -> int:
        """Size of the batch."""
        return int(self.mask.shape[0])

    def seen_mask(self, more: int) -> np.ndarray:
        """Mask over what the cache holds and `more` tokens after it, int64 (batch, length + more): a decoder's."""
        size = self.length + more
        known = self.mask[:, :size]
        return np.concatenate([known, np.ones((self.rows, size - known.shape[1]), np.int64)], axis=1)

    def positions(self, more: int) -> np.ndarray:
        """Position ids of the next `more` tokens, int64 (batch, more), as `inputs.positions_from_mask` counts them."""
        found = positions_from_mask(self.seen_mask(more))[:, self.length :]
        return np.maximum(found + self.shift, 0) if self.shift else found


class Writer(Protocol):
    """An opened artifact, or the reference, that keeps a cache."""

    facts: Facts
    provider: str
    """What really runs it: "CPUExecutionProvider", "cuda:0 NVIDIA ...", ..."""
    precision: str

    def begin(self, prompts: Mapping[str, np.ndarray]) -> State:
        """A state that has read nothing yet (an encoder-decoder: the source alone).

        `prompts`: input_ids and attention_mask, int64 (batch, sequence); a decoder's padded at the left. Raises
        UsageError for prompts past the model's limit, of no token, or padded elsewhere.
        """
        ...

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        """Reads `tokens`, int64 (batch, n), after what `state` holds: logits, float32 (batch, n, vocabulary).

        Raises UsageError where that goes past the model's limit.
        """
        ...

    def reorder(self, state: State, rows: np.ndarray) -> None:
        """Row i of the state becomes what row `rows[i]` was; a row may be taken several times or left out."""
        ...

    def close(self) -> None:
        """Free what the writer holds."""
        ...


class Amendable(Protocol):
    """A writer whose cache can be looked into and replaced: how a fault in it is found."""

    def cache(self, state: State) -> dict[str, np.ndarray]:
        """The cache by input name (`past_key_values.0.key`, ...): copies."""
        ...

    def replace(self, state: State, cache: Mapping[str, np.ndarray]) -> None:
        """Puts these arrays in the place of what the cache holds under their names."""
        ...


def encodes(facts: Facts) -> bool:
    """Whether the model reads a source with an encoder and writes with a decoder."""
    return "decoder_input_ids" in facts.inputs


def start(prompts: Mapping[str, np.ndarray], facts: Facts) -> State:
    """The state before anything is read, without a cache. Raises UsageError as `Writer.begin` does."""
    ids = np.ascontiguousarray(prompts["input_ids"], dtype=np.int64)
    mask = np.ascontiguousarray(prompts.get("attention_mask", np.ones_like(ids)), dtype=np.int64)
    if ids.ndim != 2 or mask.shape != ids.shape or not ids.size:
        raise UsageError(f"prompts are (batch, tokens) with a mask of that shape, not {ids.shape} and {mask.shape}")
    if not mask.any(axis=1).all():
        row = int(np.argmin(mask.any(axis=1)))
        raise UsageError(f"prompt {row} holds no token, so there is nothing to go on from; give it one, such as bos")
    check_limit(facts, int(mask.sum(axis=1).max()), "a prompt")
    if not encodes(facts):
        if (np.diff(mask, axis=1) < 0).any():
            raise UsageError("prompts of a decoder are padded at the left, so that what is written stands after them")
        return State(ids, mask, None, False)
    begin = facts.pad_id if facts.decoder_start_id is None else facts.decoder_start_id
    return State(np.full((len(ids), 1), begin, np.int64), mask, None, True)


def check_step(state: State, tokens: np.ndarray, facts: Facts) -> np.ndarray:
    """The tokens as the graph takes them, int64. Raises UsageError for another shape or past the model's limit."""
    tokens = np.ascontiguousarray(tokens, dtype=np.int64)
    if tokens.ndim != 2 or tokens.shape[0] != state.rows or not tokens.shape[1]:
        raise UsageError(f"tokens are (batch, n) for the batch of {state.rows} that was begun, not {tokens.shape}")
    size = state.length + tokens.shape[1]
    if not state.encodes and facts.positions != "own":
        size -= int((state.mask == 0).sum(axis=1).min())  # positions count real tokens
    check_limit(facts, size, "the text")
    return tokens


def check_limit(facts: Facts, tokens: int, what: str) -> None:
    """Raises UsageError when `tokens` are more than the model takes."""
    if facts.max_length is not None and tokens > facts.max_length:
        raise UsageError(f"{what} would be {tokens:,} tokens long, and the model takes {facts.max_length:,} at most")

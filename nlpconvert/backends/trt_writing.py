"""Floor 2: writes on TensorRT engines with a cache, which stays on the GPU between steps.

Which of an engine's profiles a call is run by is seen from its shapes; tokens that no profile takes at once are read in
parts. What is here was run on ONNX Runtime in an engine's place, and not yet on a GPU: `scripts/gpu_check.sh` does so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nlpconvert.backends.tensorrt import EnginePair, EngineSession
from nlpconvert.cache_names import is_past, past_of, present_of
from nlpconvert.errors import DriftError
from nlpconvert.models import Facts
from nlpconvert.writer import State, check_step, start

Shapes = dict[str, tuple[int, ...]]


class EngineWriter:
    """A `Writer` on one engine, or on an encoder's and a decoder's."""

    def __init__(self, decoder: EngineSession, encoder: EngineSession | None, facts: Facts) -> None:
        self._decoder = decoder
        self._encoder = encoder
        self._inputs = {spec.name for spec in decoder.inputs}
        self._kept = tuple(present_of(name) for name in self._inputs if is_past(name) and ".encoder." not in name)
        self.facts = facts
        self.provider = decoder.provider
        self.precision = decoder.precision

    def begin(self, prompts: Mapping[str, np.ndarray]) -> State:
        """As `Writer.begin`; the encoder runs here. Raises OutOfProfile for sources outside its profile too."""
        state = start(prompts, self.facts)
        state.cache = dict(self._decoder.no_past(state.rows))
        if self._encoder is not None:
            source = {"input_ids": np.asarray(prompts["input_ids"]), "attention_mask": state.mask}
            crossing = tuple(present_of(name) for name in self._inputs if is_past(name) and ".encoder." in name)
            made = self._encoder.infer(source, keep=crossing)
            state.cache |= {past_of(name): made[name] for name in crossing}
        return state

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        """As `Writer.step`. Raises OutOfProfile where not even one token can be read."""
        tokens = check_step(state, tokens, self.facts)
        logits, at = [], 0
        while at < tokens.shape[1]:
            part = tokens[:, at : at + self._most(state, tokens.shape[1] - at)]
            made = self._decoder.infer({**self._arrays(state, part), **state.cache}, keep=self._kept)
            state.cache |= {past_of(name): made[name] for name in self._kept}
            state.length += part.shape[1]
            logits.append(np.asarray(made["logits"], np.float32))
            at += part.shape[1]
        return logits[0] if len(logits) == 1 else np.concatenate(logits, axis=1)

    def reorder(self, state: State, rows: np.ndarray) -> None:
        """As `Writer.reorder`, by way of the host."""
        state.cache = {name: np.ascontiguousarray(array[rows]) for name, array in self.cache(state).items()}
        state.mask, state.first = state.mask[rows], state.first[rows]

    def cache(self, state: State) -> dict[str, np.ndarray]:
        """As `Amendable.cache`."""
        return {
            name: value.copy() if isinstance(value, np.ndarray) else value.numpy()
            for name, value in state.cache.items()
        }

    def replace(self, state: State, cache: Mapping[str, np.ndarray]) -> None:
        """As `Amendable.replace`."""
        state.cache |= {name: np.array(array) for name, array in cache.items()}

    def close(self) -> None:
        """Frees what the engines hold on the GPU."""
        for session in (self._decoder, self._encoder):
            if session is not None:
                session.close()

    def _arrays(self, state: State, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """What goes in beside the cache."""
        if state.encodes:
            return {"input_ids": tokens, "encoder_attention_mask": state.mask}
        count = tokens.shape[1]
        arrays = {"input_ids": tokens, "attention_mask": state.seen_mask(count)}
        if "position_ids" in self._inputs:
            arrays["position_ids"] = state.positions(count)
        return arrays

    def _most(self, state: State, count: int) -> int:
        """How many of `count` tokens can be read at once; 1 where none can, so that the engine's words are heard."""
        held = {name: tuple(value.shape) for name, value in state.cache.items()}
        return next((size for size in range(count, 1, -1) if self._decoder.takes(self._shapes(state, size) | held)), 1)

    def _shapes(self, state: State, count: int) -> Shapes:
        tokens = (state.rows, count)
        if state.encodes:
            return {"input_ids": tokens, "encoder_attention_mask": state.mask.shape}
        return {"input_ids": tokens, "attention_mask": (state.rows, state.length + count), "position_ids": tokens}


def writer(session: EngineSession | EnginePair, facts: Facts) -> EngineWriter:
    """A writer on what is open already. Raises DriftError where an engine takes no cache."""
    if not keeps(session):
        raise DriftError("the engine keeps no cache: it takes no past_key_values")
    if isinstance(session, EnginePair):
        return EngineWriter(session.decoder, session.encoder, facts)
    return EngineWriter(session, None, facts)


def keeps(session: Any) -> bool:
    """Whether what is open takes a cache."""
    decoder = session.decoder if isinstance(session, EnginePair) else session
    return isinstance(decoder, EngineSession) and any(is_past(spec.name) for spec in decoder.inputs)

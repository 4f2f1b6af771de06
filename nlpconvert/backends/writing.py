"""Floor 2: writes with ONNX artifacts that keep a cache, through ONNX Runtime.

Inputs and outputs are bound, so that the cache is handed from step to step as it lies, on the device that made it. A
decoder is one graph; an encoder-decoder is two, of which the encoder's runs once a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from nlpconvert.artifact import Artifact
from nlpconvert.backends.onnxruntime import TYPES, OnnxSession, PairSession, no_past, open_file
from nlpconvert.cache_names import is_past, is_present, past_of
from nlpconvert.errors import DriftError
from nlpconvert.models import Facts
from nlpconvert.writer import State, check_step, encodes, start

ENCODER_FILE = "encoder_model.onnx"


@dataclass(frozen=True)
class _Graph:
    """A session and what it takes and gives: names to element type and shape."""

    session: Any
    inputs: Mapping[str, Any]
    outputs: tuple[str, ...]
    device: str

    def run(self, arrays: Mapping[str, np.ndarray], held: Mapping[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        """The logits, float32 (batch, n, vocabulary), and the other outputs as OrtValues by name.

        `held` are OrtValues, bound as they lie. What is read here comes to the host, where it may as well be written
        at once; the cache stays where it is made.
        """
        binding = self.session.io_binding()
        for name, array in arrays.items():
            if name in self.inputs:
                binding.bind_cpu_input(name, np.ascontiguousarray(array, TYPES[self.inputs[name].type]))
        for name, value in held.items():
            if name in self.inputs:
                binding.bind_ortvalue_input(name, value)
        logits = self._room(arrays["input_ids"].shape)
        for name in self.outputs:
            if name == "logits" and logits is not None:
                binding.bind_output(name, "cpu", 0, logits.dtype, logits.shape, logits.ctypes.data)
            else:
                binding.bind_output(name, "cpu" if name == "logits" else self.device)
        self.session.run_with_iobinding(binding)
        made = dict(zip(self.outputs, binding.get_outputs(), strict=True))
        own = made.pop("logits", None)
        logits = own.numpy() if logits is None and own is not None else logits
        return np.zeros(0, np.float32) if logits is None else logits.astype(np.float32, copy=False), made

    def _room(self, shape: Sequence[int]) -> np.ndarray | None:
        """Where the logits go; None where the graph does not say how many there are."""
        own = next((value for value in self.session.get_outputs() if value.name == "logits"), None)
        if own is None or not isinstance(own.shape[-1], int):
            return None
        return np.empty((*shape, own.shape[-1]), TYPES[own.type])


class OnnxWriter:
    """A `Writer` on one graph, or on an encoder's and a decoder's."""

    def __init__(self, decoder: _Graph, encoder: _Graph | None, facts: Facts, provider: str, precision: str) -> None:
        self._decoder = decoder
        self._encoder = encoder
        self.facts = facts
        self.provider = provider
        self.precision = precision

    def begin(self, prompts: Mapping[str, np.ndarray]) -> State:
        """As `Writer.begin`; the encoder runs here."""
        state = start(prompts, self.facts)
        state.cache = self._empty(state.rows)
        if self._encoder is not None:
            source = {"input_ids": np.asarray(prompts["input_ids"]), "attention_mask": state.mask}
            _, made = self._encoder.run(source, {})
            state.cache |= {past_of(name): value for name, value in made.items() if is_present(name)}
            if "encoder_hidden_states" in self._decoder.inputs:
                state.cache["encoder_hidden_states"] = made["last_hidden_state"]
        return state

    def step(self, state: State, tokens: np.ndarray) -> np.ndarray:
        """As `Writer.step`."""
        tokens = check_step(state, tokens, self.facts)
        count = tokens.shape[1]
        arrays = {"input_ids": tokens}
        if state.encodes:
            arrays["encoder_attention_mask"] = state.mask
        else:
            arrays["attention_mask"] = state.seen_mask(count)
            if "position_ids" in self._decoder.inputs:
                arrays["position_ids"] = state.positions(count)
        logits, made = self._decoder.run(arrays, state.cache)
        state.cache |= {past_of(name): value for name, value in made.items()}
        state.length += count
        return logits

    def reorder(self, state: State, rows: np.ndarray) -> None:
        """As `Writer.reorder`."""
        state.cache = {name: self._value(array[rows]) for name, array in self.cache(state).items()}
        state.mask, state.first = state.mask[rows], state.first[rows]

    def cache(self, state: State) -> dict[str, np.ndarray]:
        """As `Amendable.cache`."""
        return {name: value.numpy() for name, value in state.cache.items()}

    def replace(self, state: State, cache: Mapping[str, np.ndarray]) -> None:
        """As `Amendable.replace`."""
        state.cache |= {name: self._value(array) for name, array in cache.items()}

    def close(self) -> None:
        """Frees the sessions' memory."""
        del self._decoder, self._encoder

    def _value(self, array: np.ndarray) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._decoder.device, 0)

    def _empty(self, rows: int) -> dict[str, Any]:
        """The cache before the first token, in the types that the graph takes."""
        values = {}
        for name, given in self._decoder.inputs.items():
            if is_past(name) and ".encoder." not in name:
                values[name] = self._value(no_past(given, rows))
        return values


def open(
    artifact: Artifact, facts: Facts, *, device: str = "cpu", threads: int | None = None, serving: bool = False
) -> OnnxWriter:
    """Opens an artifact with a cache, as `open_paths` does; the encoder's graph lies beside the decoder's."""
    encoder = artifact.encoder or artifact.directory / ENCODER_FILE if encodes(facts) else None
    return open_paths(
        artifact.path, encoder, facts, precision=artifact.precision, device=device, threads=threads, serving=serving
    )


def open_paths(
    decoder: Path,
    encoder: Path | None,
    facts: Facts,
    *,
    precision: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    serving: bool = False,
) -> OnnxWriter:
    """A writer on the graphs of these files; `encoder` is None for a decoder alone. `serving` as `open_file` has it.

    Raises as `backends.onnxruntime.open_file` does, and DriftError where a graph takes or gives no cache.
    """
    decoding, *encoding = [
        open_file(path, precision=precision, device=device, threads=threads, serving=serving)
        for path in (decoder, encoder)
        if path is not None
    ]
    return writer(PairSession(decoding, *encoding) if encoding else decoding, facts)


def writer(session: OnnxSession | PairSession, facts: Facts) -> OnnxWriter:
    """A writer on what is open already. Raises DriftError where a graph takes or gives no cache."""
    decoder = _graph(session.decoder if isinstance(session, PairSession) else session)
    lacking = [name for name in decoder.inputs if is_past(name) and ".encoder." not in name]
    if not lacking or "logits" not in decoder.outputs:
        raise DriftError("the graph keeps no cache: it takes no past_key_values, or gives no logits")
    gives = {past_of(name) for name in decoder.outputs if is_present(name)}
    if missing := [name for name in lacking if name not in gives]:
        raise DriftError(f"the graph takes {missing[0]} and gives nothing back for it")
    encoder = _graph(session.encoder) if isinstance(session, PairSession) else None
    return OnnxWriter(decoder, encoder, facts, session.provider, session.precision)


def keeps(session: object) -> bool:
    """Whether what is open takes a cache."""
    decoder = session.decoder if isinstance(session, PairSession) else session
    return isinstance(decoder, OnnxSession) and any(is_past(value.name) for value in decoder.inner.get_inputs())


def _graph(session: OnnxSession) -> _Graph:
    inner = session.inner
    return _Graph(
        inner,
        {value.name: value for value in inner.get_inputs()},
        tuple(value.name for value in inner.get_outputs()),
        "cpu" if session.provider == "CPUExecutionProvider" else "cuda",
    )

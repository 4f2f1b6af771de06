"""Floor 2: runs ONNX artifacts through ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from nlpconvert import cache_names
from nlpconvert.artifact import Artifact
from nlpconvert.backends import Batch
from nlpconvert.errors import CannotRunHere, DriftError

PROVIDERS: dict[str, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}

TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(double)": np.float64,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
"""ONNX Runtime's words for element types."""

_SMALL = 512 << 20
"""Bytes of a model directory up to which memory is kept between runs."""


class OnnxSession:
    """One open InferenceSession. Takes the inputs the graph names, and no others.

    Of a graph that keeps a cache it asks the answers to whole texts: a past of no tokens goes in, and what comes out to
    be kept is left out. Writing with the cache is `backends.writing`.
    """

    concurrent = True
    """May be asked by another thread meanwhile."""

    def __init__(self, session: onnxruntime.InferenceSession, precision: str) -> None:
        self.inner = session
        self._inputs = {value.name for value in session.get_inputs()}
        self._past = {value.name: value for value in session.get_inputs() if cache_names.is_past(value.name)}
        self._outputs = [value.name for value in session.get_outputs() if not cache_names.is_present(value.name)]
        self.provider = session.get_providers()[0]
        self.precision = precision

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """Arrays by input name to arrays by output name."""
        return dict(zip(self._outputs, self.inner.run(self._outputs, self._feed(batch)), strict=True))

    def tap(self, batch: Batch, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Outputs by name; inner tensors have to be outputs of the graph already."""
        return dict(zip(names, self.inner.run(list(names), self._feed(batch)), strict=True))

    def _feed(self, batch: Batch) -> dict[str, np.ndarray]:
        feed = {name: array for name, array in batch.items() if name in self._inputs}
        for name, value in self._past.items():
            if name not in feed:
                feed[name] = no_past(value, len(next(iter(batch.values()))))
        return feed

    def close(self) -> None:
        """Frees the session's memory."""
        del self.inner


class PairSession:
    """An encoder's graph and a decoder's: a source and a target in, logits and the encoder's states out."""

    concurrent = True

    def __init__(self, decoder: OnnxSession, encoder: OnnxSession) -> None:
        self.decoder, self.encoder = decoder, encoder
        self.provider, self.precision = decoder.provider, decoder.precision
        self._made = [value.name for value in encoder.inner.get_outputs()]

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """Arrays by input name to arrays by output name."""
        made = self.encoder.tap(batch, self._made)
        return self.decoder.run(cache_names.decoder_inputs(batch, made)) | {
            "encoder_last_hidden_state": made["last_hidden_state"]
        }

    def close(self) -> None:
        """Frees both sessions' memory."""
        self.decoder.close()
        self.encoder.close()


def no_past(given: Any, rows: int) -> np.ndarray:
    """What a graph's input of the cache is before the first token: (rows, heads, 0, dim)."""
    shape = [size if isinstance(size, int) else rows if axis == 0 else 0 for axis, size in enumerate(given.shape)]
    return np.zeros(shape, TYPES[given.type])


def open(artifact: Artifact, *, device: str = "cpu", threads: int | None = None) -> OnnxSession | PairSession:
    """Opens an artifact on "cpu", "cuda" or "tensorrt".

    Raises CannotRunHere where the provider asked for did not start (ONNX Runtime itself falls back to the CPU without a
    word) or has no kernel for the graph, DriftError where the file is no ONNX model.
    """
    decoder, *encoder = [
        open_file(path, precision=artifact.precision, device=device, threads=threads) for path in artifact.graphs
    ]
    return PairSession(decoder, *encoder) if encoder else decoder


def open_file(
    path: Path,
    *,
    precision: str = "float32",
    device: str = "cpu",
    threads: int | None = None,
    data: Path | None = None,
    serving: bool = False,
) -> OnnxSession:
    """Opens any ONNX file, as `open` does; `precision` is what its weights claim to be. `data` is the directory of its
    data file where that is not its own. `serving` leaves memory and threads as ONNX Runtime has them by default, for
    timing.
    """
    provider = PROVIDERS[device]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not serving:
        # An arena grows to the largest case and stays: on a large model that is memory, on a small one it is time.
        options.enable_cpu_mem_arena = _bytes(path if data is None else data / path.name) <= _SMALL
        # Threads that spin while they wait take the cores from whatever else runs: twice the time on a busy CI machine.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if threads is not None:
        options.intra_op_num_threads = threads
    if provider not in onnxruntime.get_available_providers():
        raise CannotRunHere(f"ONNX Runtime here has no {provider}: install onnxruntime-gpu (nlpconvert[gpu])")
    chosen: list[str | tuple[str, dict[str, str]]] = [provider]
    if device == "cuda":
        chosen = [(provider, {"use_tf32": "0"})]
    try:
        if data is None:
            session = onnxruntime.InferenceSession(str(path), options, providers=chosen)
        else:
            # ONNX Runtime follows no path and no link out of a model's directory; a model in memory is told where.
            options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(data))
            session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=chosen)
    except Exception as error:
        line = str(error).splitlines()[0][:300]
        if "NOT_IMPLEMENTED" in line:
            raise CannotRunHere(f"ONNX Runtime's {provider} has no kernel for this graph: {line}") from error
        raise DriftError(f"ONNX Runtime cannot open {path.name}: {line}") from error
    if session.get_providers()[0] != provider:
        raise CannotRunHere(f"asked for {provider}, ONNX Runtime fell back to {session.get_providers()[0]}")
    return OnnxSession(session, _arithmetic(precision, device))


def _bytes(path: Path) -> int:
    """Of an ONNX file and all that lies beside it."""
    own = path.stat().st_size if path.is_file() else 0
    return own + sum(beside.stat().st_size for beside in path.parent.iterdir() if beside.is_file() and beside != path)


def _arithmetic(precision: str, device: str) -> str:
    """What is really computed: on the CPU, ONNX Runtime puts casts around half-precision weights."""
    return f"float32 arithmetic on {precision} weights" if device == "cpu" and precision == "float16" else precision

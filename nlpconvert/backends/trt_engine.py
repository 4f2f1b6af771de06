"""Floor 2: loads a TensorRT engine into this process.

Imported late, by `backends.tensorrt`, which first sets the variable that fixes polygraphy's flavour. What does not
belong here: whether the engine may be loaded at all, and anything about batches.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy.backend.trt import TrtRunner, engine_from_bytes
from polygraphy.config import USE_TENSORRT_RTX

if USE_TENSORRT_RTX:
    import tensorrt_rtx as trt
else:
    import tensorrt as trt


class Loaded:
    """An engine ready to run: arrays in by name, arrays out by name."""

    def __init__(self, path: Path) -> None:
        """Raises RuntimeError, with TensorRT's own first error, when the engine cannot be loaded or given memory."""
        with _quoting():
            engine = engine_from_bytes(path.read_bytes())
            self._runner = TrtRunner(engine)
            self._runner.activate()
        self.version = str(trt.__version__)
        """Of the TensorRT that has loaded it."""
        self.dtypes: dict[str, np.dtype[Any]] = {
            name: np.dtype(trt.nptype(engine.get_tensor_dtype(name)))
            for name in (engine.get_tensor_name(index) for index in range(engine.num_io_tensors))
            if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        }
        """Element types of the inputs, as the engine itself has them."""

    def infer(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One forward pass; the arrays are copies, since the runner uses its own again. Raises RuntimeError."""
        with _quoting():
            return {name: np.array(value) for name, value in self._runner.infer(dict(feed)).items()}

    def close(self) -> None:
        """Frees the engine's memory on the GPU."""
        self._runner.deactivate()


@contextlib.contextmanager
def _quoting() -> Iterator[None]:
    """Polygraphy prints what TensorRT says and raises without it: keep the terminal clean and quote the first error."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            yield
    except Exception as error:
        errors = [line.removeprefix("[E] ") for line in said.getvalue().splitlines() if line.startswith("[E] ")]
        raise RuntimeError(errors[0] if errors else str(error).splitlines()[0] or type(error).__name__) from error

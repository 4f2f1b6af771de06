"""Floor 2: loads a TensorRT engine into this process.

Imported late, by `backends.tensorrt`, which first sets the variable that fixes polygraphy's flavour. What does not
belong here: whether the engine may be loaded at all, and anything about batches.

Changing profiles and keeping outputs on the GPU (`Held`) were tested with a runner and a driver played in host memory,
not yet on a GPU.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from polygraphy import cuda
from polygraphy.backend.trt import TrtRunner, engine_from_bytes
from polygraphy.config import USE_TENSORRT_RTX

if USE_TENSORRT_RTX:
    import tensorrt_rtx as trt
else:
    import tensorrt as trt


class Held:
    """An output that stays on the GPU, in memory of its own, until nobody speaks of it any more."""

    def __init__(self, memory: cuda.DeviceArray, view: cuda.DeviceView, spare: list[cuda.DeviceArray]) -> None:
        """Copies `view` into `memory`, which goes to `spare` afterwards."""
        self.shape: tuple[int, ...] = tuple(view.shape)
        self.view = cuda.DeviceView(memory.ptr, self.shape, view.dtype)
        self._memory, self._spare = memory, spare
        cuda.wrapper().memcpy(
            dst=memory.ptr, src=view.ptr, nbytes=int(view.nbytes), kind=cuda.MemcpyKind.DeviceToDevice
        )

    def numpy(self) -> np.ndarray:
        """A copy on the host."""
        array: np.ndarray = self.view.numpy()
        return array

    def __del__(self) -> None:
        self._spare.append(self._memory)


class Loaded:
    """An engine ready to run: arrays in by name, arrays out by name."""

    def __init__(self, path: Path) -> None:
        """Raises RuntimeError, with TensorRT's own first error, when the engine cannot be loaded or given memory."""
        with _quoting():
            engine = engine_from_bytes(path.read_bytes())
            self._runner = TrtRunner(engine)
            self._runner.activate()
        self.profiles = int(engine.num_optimization_profiles)
        """How many there are in the engine."""
        self._profile = 0
        self._spare: list[cuda.DeviceArray] = []
        self._all: list[cuda.DeviceArray] = []
        self.version = str(trt.__version__)
        """Of the TensorRT that has loaded it."""
        self.dtypes: dict[str, np.dtype[Any]] = {
            name: np.dtype(trt.nptype(engine.get_tensor_dtype(name)))
            for name in (engine.get_tensor_name(index) for index in range(engine.num_io_tensors))
            if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        }
        """Element types of the inputs, as the engine itself has them."""

    def infer(self, feed: Mapping[str, Any], profile: int = 0, keep: Collection[str] = ()) -> dict[str, Any]:
        """One forward pass by the profile of this number; `feed` holds arrays and what was kept.

        The answers are copies, since the runner uses its own memory again: arrays, and `Held` for the names in `keep`.
        Raises RuntimeError.
        """
        given = {name: value.view if isinstance(value, Held) else value for name, value in feed.items()}
        with _quoting():
            if profile != self._profile:
                self._change_profile(profile, given)
            if not keep:
                return {name: np.array(value) for name, value in self._runner.infer(given).items()}
            made = self._runner.infer(given, copy_outputs_to_host=False)
            return {name: self._hold(view) if name in keep else view.numpy() for name, view in made.items()}

    def _change_profile(self, profile: int, given: Mapping[str, Any]) -> None:
        """TensorRT wants all shapes anew then, and polygraphy sets those only that it sees changed."""
        self._runner.set_profile(profile)
        self._profile = profile
        for name, value in given.items():
            self._runner.context.set_input_shape(name, tuple(value.shape))

    def _hold(self, view: cuda.DeviceView) -> Held:
        """`view` in memory that is free again, or new: twice what is needed, since a cache grows token by token."""
        size = int(view.nbytes)
        fitting = [memory for memory in self._spare if memory.allocated_nbytes >= size]
        if fitting:
            memory = min(fitting, key=lambda each: int(each.allocated_nbytes))
            self._spare.remove(memory)
        else:
            memory = cuda.DeviceArray.raw((2 * size,))
            self._all.append(memory)
        return Held(memory, view, self._spare)

    def close(self) -> None:
        """Frees the engine's memory on the GPU, and all that was kept there."""
        for memory in self._all:
            memory.free()
        self._all.clear()
        self._spare.clear()
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

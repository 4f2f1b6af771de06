"""Floor 2: runs a TensorRT engine, once everything that can be compared beforehand has been.

An engine of another version, another GPU or another ONNX file may load and answer wrongly: so the sidecar is compared
with the file, the packages and the GPU found here before TensorRT is imported. What does not belong here: building.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nlpconvert import engines, profiles
from nlpconvert.artifact import Artifact, TensorSpec
from nlpconvert.backends import Batch, Session
from nlpconvert.engines import Here, Sidecar
from nlpconvert.errors import CannotRunHere, DriftError, OutOfProfile, UsageError
from nlpconvert.profiles import Profile


class Runner(Protocol):
    """What `trt_engine.Loaded` is: a loaded engine."""

    version: str
    dtypes: dict[str, np.dtype[Any]]

    def infer(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One forward pass."""
        ...

    def close(self) -> None:
        """Free the GPU's memory."""
        ...


class EngineSession:
    """An opened engine. Batches are held against its profile and cast to its element types."""

    def __init__(
        self, runner: Runner, inputs: Sequence[TensorSpec], profile: Profile, *, provider: str, precision: str
    ) -> None:
        self.provider = provider
        self.precision = precision
        self._runner = runner
        self._inputs = tuple(inputs)
        self._profile = profile

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """One forward pass; arrays that are no input of the engine are left out.

        Raises OutOfProfile for a batch outside the engine's profile, UsageError for ids that its element type cannot
        hold, CannotRunHere when the engine itself fails (memory, most often).
        """
        reason = profiles.outside(self._profile, self._inputs, {name: array.shape for name, array in batch.items()})
        if reason:
            raise OutOfProfile(reason)
        feed = {spec.name: cast(spec.name, batch[spec.name], self._runner.dtypes[spec.name]) for spec in self._inputs}
        try:
            return self._runner.infer(feed)
        except RuntimeError as error:
            raise CannotRunHere(f"the engine failed on {self.provider}: {error}") from error

    def close(self) -> None:
        """Frees what the engine holds on the GPU."""
        self._runner.close()


def open(artifact: Artifact, *, device: str = "cuda", threads: int | None = None) -> Session:
    """Opens an engine on the first visible GPU, the only place it runs: `device` and `threads` change nothing.

    Raises DriftError when engine or sidecar is not what was built, CannotRunHere when this machine cannot run it: the
    flavour is missing or of another version, there is no GPU, or one of another compute capability.
    """
    if artifact.made_by.get("foreign"):
        return open_foreign(artifact)
    sidecar, here = engines.read_sidecar(artifact.path), engines.runtime_here()
    compare(artifact, sidecar, here)
    runner = _load(artifact, sidecar)
    gpu = here.gpu.name if here.gpu is not None else "cuda"
    return EngineSession(
        runner,
        artifact.inputs,
        sidecar.profile,
        provider=f"{sidecar.flavour} {runner.version} on {gpu}",
        precision=f"{sidecar.precision} with TF32 products" if sidecar.tf32 else sidecar.precision,
    )


class ForeignEngine:
    """An engine that came without a sidecar: its profile is not known, so a batch it refuses is one outside of it."""

    def __init__(self, runner: Runner, *, provider: str, precision: str) -> None:
        self.provider = provider
        self.precision = precision
        self.inputs = tuple(runner.dtypes)
        self._runner = runner

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """One forward pass. Raises OutOfProfile, with what the engine says, for a batch it refuses."""
        feed = {name: cast(name, batch[name], dtype) for name, dtype in self._runner.dtypes.items()}
        try:
            return self._runner.infer(feed)
        except RuntimeError as error:
            raise OutOfProfile(f"the engine refuses the batch: {error}") from error

    def close(self) -> None:
        """Frees what the engine holds on the GPU."""
        self._runner.close()


def open_foreign(artifact: Artifact) -> ForeignEngine:
    """Opens an engine that says nothing of itself, with the flavour that is installed here.

    Raises CannotRunHere: no flavour, no GPU, or an engine of another version or GPU.
    """
    here = engines.runtime_here()
    if here.gpu is None:
        raise CannotRunHere(here.no_gpu)
    flavour, version = engines.choose(None, here)
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(flavour.name == "tensorrt-rtx"))
    try:
        from nlpconvert.backends import trt_engine

        runner = trt_engine.Loaded(artifact.path)
    except (ImportError, OSError, RuntimeError) as error:
        raise CannotRunHere(f"{flavour.name} {version} cannot load the engine here: {error}") from error
    where = f"{flavour.name} {runner.version} on {here.gpu.name}"
    return ForeignEngine(runner, provider=where, precision=artifact.precision)


def compare(artifact: Artifact, sidecar: Sidecar, here: Here) -> None:
    """Everything that is compared before an engine is loaded. Raises DriftError or CannotRunHere, as `open` says."""
    reason = engines.not_itself(sidecar, artifact.path, artifact.parent_sha256)
    if reason:
        raise DriftError(reason)
    reason = engines.cannot_run(sidecar, here)
    if reason:
        raise CannotRunHere(reason)


def cast(name: str, array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """`array` as the engine's element type, contiguous; a value that the type cannot hold is an error, not wrapped."""
    if array.dtype != dtype and array.size and dtype.kind in "iu":
        if array.dtype.kind not in "iub":
            raise UsageError(f"input {name} is {array.dtype}, the engine takes {dtype}: give whole numbers")
        limits, low, high = np.iinfo(dtype), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise UsageError(
                f"input {name} holds {low if low < limits.min else high}, which the engine's {dtype} cannot hold"
            )
    return np.ascontiguousarray(array, dtype=dtype)


def _load(artifact: Artifact, sidecar: Sidecar) -> Runner:
    """Imports polygraphy in the engine's flavour and loads the engine. Raises CannotRunHere."""
    wants_rtx = sidecar.flavour == "tensorrt-rtx"
    config = sys.modules.get("polygraphy.config")
    if config is not None and bool(config.USE_TENSORRT_RTX) != wants_rtx:
        other = "tensorrt-rtx" if config.USE_TENSORRT_RTX else "tensorrt"
        raise CannotRunHere(
            f"polygraphy is already loaded for {other} in this process and cannot run an engine of {sidecar.flavour}: "
            f"verify {artifact.step} in a process of its own"
        )
    # Polygraphy reads its flavour from the environment when it is imported.
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(wants_rtx))
    try:
        from nlpconvert.backends import trt_engine

        runner = trt_engine.Loaded(artifact.path)
    except (ImportError, OSError, RuntimeError) as error:
        raise CannotRunHere(f"{sidecar.flavour} {sidecar.builder} cannot load the engine here: {error}") from error
    names = {spec.name for spec in artifact.inputs}
    if runner.version != sidecar.builder or set(runner.dtypes) != names:
        runner.close()
        raise CannotRunHere(
            f"the engine loaded by {sidecar.flavour} {runner.version} reads {', '.join(runner.dtypes)}; it was built "
            f"by {sidecar.builder} to read {', '.join(sorted(names))}: build it again here"
        )
    return runner

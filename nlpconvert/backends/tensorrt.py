"""Floor 2: runs a TensorRT engine, once everything that can be compared beforehand has been.

An engine of another version, another GPU or another ONNX file may load and answer wrongly: so the sidecar is compared
with the file, the packages and the GPU found here before TensorRT is imported. What does not belong here: building, and
writing with a cache (`backends.trt_writing`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from nlpconvert import cache_names, engines, profiles
from nlpconvert.artifact import Artifact, TensorSpec
from nlpconvert.backends import Batch, Session
from nlpconvert.engines import Here, Sidecar
from nlpconvert.errors import CannotRunHere, DriftError, OutOfProfile, UsageError
from nlpconvert.profiles import Profile


class Runner(Protocol):
    """What `trt_engine.Loaded` is: a loaded engine."""

    version: str
    dtypes: dict[str, np.dtype[Any]]
    profiles: int
    """How many there are in the engine."""

    def infer(self, feed: Mapping[str, Any], profile: int = 0, keep: Collection[str] = ()) -> dict[str, Any]:
        """One forward pass by the profile of this number. Outputs in `keep` stay on the GPU, to be fed again: they have
        `shape` and `numpy()`."""
        ...

    def close(self) -> None:
        """Free the GPU's memory."""
        ...


class EngineSession:
    """An opened engine. Batches are held against its profiles and cast to its element types.

    Of an engine that keeps a cache it asks the answers to whole texts: a past of no tokens goes in, and what comes out
    to be kept is left out.
    """

    def __init__(
        self,
        runner: Runner,
        inputs: Sequence[TensorSpec],
        profiles: Sequence[Profile],
        *,
        provider: str,
        precision: str,
    ) -> None:
        self.provider = provider
        self.precision = precision
        self.inputs = tuple(inputs)
        self.profiles = tuple(profiles)
        self._runner = runner

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """One forward pass; arrays that are no input of the engine are left out.

        Raises OutOfProfile for a batch outside the engine's profiles, UsageError for ids that its element type cannot
        hold, CannotRunHere when the engine itself fails (memory, most often).
        """
        given = {**self.no_past(len(batch["input_ids"])), **batch} if cache_names.keeps(self.inputs) else batch
        return {name: array for name, array in self.infer(given).items() if not cache_names.is_present(name)}

    def infer(self, given: Mapping[str, Any], keep: Collection[str] = ()) -> dict[str, Any]:
        """All outputs of one forward pass. Those in `keep` stay on the GPU; what stayed there may be given again.

        Raises as `run` does.
        """
        profile = profiles.fitting(self.profiles, self.inputs, {name: tuple(x.shape) for name, x in given.items()})
        types = self._runner.dtypes
        feed = {
            spec.name: cast(spec.name, array, types[spec.name])
            if isinstance(array := given[spec.name], np.ndarray)
            else array
            for spec in self.inputs
        }
        try:
            return self._runner.infer(feed, profile, keep)
        except RuntimeError as error:
            raise CannotRunHere(f"the engine failed on {self.provider}: {error}") from error

    def no_past(self, rows: int) -> dict[str, np.ndarray]:
        """The decoder's own cache before the first token, in the types that the engine takes."""
        empty = cache_names.empty(self.inputs, rows)
        return {name: array.astype(self._runner.dtypes[name]) for name, array in empty.items()}

    def takes(self, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a batch of these shapes, by input name, is within a profile."""
        return any(not profiles.outside(each, self.inputs, shapes) for each in self.profiles)

    def close(self) -> None:
        """Frees what the engine holds on the GPU."""
        self._runner.close()


class EnginePair:
    """An encoder's engine and a decoder's: a source and a target in, logits and the encoder's states out."""

    def __init__(self, decoder: EngineSession, encoder: EngineSession) -> None:
        self.decoder, self.encoder = decoder, encoder
        self.provider, self.precision = decoder.provider, decoder.precision

    def run(self, batch: Batch) -> dict[str, np.ndarray]:
        """One forward pass of both. Raises as `EngineSession.run` does."""
        made = self.encoder.infer({name: batch[name] for name in ("input_ids", "attention_mask")})
        return self.decoder.run(cache_names.decoder_inputs(batch, made)) | {
            "encoder_last_hidden_state": made["last_hidden_state"]
        }

    def close(self) -> None:
        """Frees what both hold on the GPU."""
        self.decoder.close()
        self.encoder.close()


def open(artifact: Artifact, *, device: str = "cuda", threads: int | None = None) -> Session:
    """Opens an engine, or an encoder's and a decoder's, on the first visible GPU, the only place it runs: `device` and
    `threads` change nothing.

    Raises DriftError when engine or sidecar is not what was built, CannotRunHere when this machine cannot run it: the
    flavour is missing or of another version, there is no GPU, or one of another compute capability.
    """
    if artifact.made_by.get("foreign"):
        return open_foreign(artifact)
    here = engines.runtime_here()
    parts = [artifact, *encoder_of(artifact)]
    sidecars = [engines.read_sidecar(part.path) for part in parts]
    compare(parts, sidecars, here)
    decoder = _open_one(parts[0], sidecars[0], here)
    if len(parts) == 1:
        return decoder
    try:
        return EnginePair(decoder, _open_one(parts[1], sidecars[1], here))
    except BaseException:
        decoder.close()
        raise


def encoder_of(artifact: Artifact) -> list[Artifact]:
    """The encoder's engine as an artifact of its own; none of an artifact of one engine. DriftError where it is not
    said what the encoder takes."""
    own = artifact.made_by.get("encoder")
    if own is None:
        return []
    try:
        taken, given = (
            tuple(TensorSpec(each["name"], each["dtype"], tuple(each["shape"])) for each in own[kind])
            for kind in ("inputs", "outputs")
        )
        path, parent = artifact.directory / own["file"], str(own["onnx_sha256"])
    except (KeyError, TypeError) as error:
        raise DriftError(f"the manifest does not say what the encoder of {artifact.step} is ({error})") from error
    return [replace(artifact, path=path, inputs=taken, outputs=given, parent_sha256=parent, made_by={})]


def _open_one(artifact: Artifact, sidecar: Sidecar, here: Here) -> EngineSession:
    runner = _load(artifact, sidecar)
    gpu = here.gpu.name if here.gpu is not None else "cuda"
    return EngineSession(
        runner,
        artifact.inputs,
        sidecar.profiles,
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


def compare(parts: Sequence[Artifact], sidecars: Sequence[Sidecar], here: Here) -> None:
    """Everything that is compared before an engine is loaded. Raises DriftError or CannotRunHere, as `open` says."""
    for artifact, sidecar in zip(parts, sidecars, strict=True):
        if reason := engines.not_itself(sidecar, artifact.path, artifact.parent_sha256):
            raise DriftError(reason)
    for sidecar in sidecars:
        if reason := engines.cannot_run(sidecar, here):
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
    if runner.profiles != len(sidecar.profiles):
        runner.close()
        raise DriftError(
            f"{artifact.path} has {runner.profiles} optimisation profiles, its sidecar speaks of "
            f"{len(sidecar.profiles)}: build it again"
        )
    return runner

"""Floor 2: ONNX to strongly typed TensorRT engines, and the sidecars that say what they are for.

One graph becomes one engine; a model that writes behind an encoder has two graphs, and becomes two engines. A graph
with a cache is built for two profiles, one for prompts and one for single tokens (`profiles.choose_all`).

The building itself is done by `nlpconvert.backends.trt_child` in a process of its own, so that a crash of the builder
is a line to read and not the end of the run. What does not belong here: running the engine (`backends.tensorrt`) and
what can be known without TensorRT (`engines`, `profiles`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nlpconvert
from nlpconvert import disk, engines, profiles
from nlpconvert.artifact import Artifact, Made, TensorSpec
from nlpconvert.engines import DECODER_ENGINE, ENCODER_ENGINE, ENGINE_FILE, Flavour, Here, Sidecar, runtime_here
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.profiles import Profile

__all__ = ["builder_command", "convert", "runtime_here"]

# -P and sys.path.append: neither the current directory nor this checkout may shadow an installed package in the child.
_START = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module('nlpconvert.backends.trt_child', run_name='__main__')"
)
_NOTHING = {"error": "it left no result"}
_DETAIL_LINES = 15
_REASON_LENGTH = 300


def builder_command(request: Path, result: Path) -> list[str]:
    """The command line of the process that builds."""
    root = Path(nlpconvert.__file__).resolve().parent.parent
    return [sys.executable, "-P", "-c", _START, str(root), str(request), str(result)]


@dataclass(frozen=True)
class _Order:
    """What is the same for every engine of one call; `request` is what the builder is told of it."""

    flavour: Flavour
    here: Here
    request: Mapping[str, Any]
    command: Callable[[Path, Path], list[str]]


def convert(
    parent: Artifact,
    directory: Path,
    *,
    profile: Profile | Sequence[Profile],
    max_length: int | None,
    log: Path,
    runtime: str | None = None,
    tf32: bool = False,
    workspace: int | None = None,
    hardware_compatibility: bool = False,
    timing_cache: Path | None = None,
    compute_capabilities: Sequence[str] | None = None,
    here: Here | None = None,
    command: Callable[[Path, Path], list[str]] = builder_command,
) -> Made:
    """Builds an engine from the ONNX artifact `parent` into `directory`: model.engine and model.engine.json.

    Of an encoder and a decoder two are built, decoder_model.engine and encoder_model.engine, each with its sidecar;
    Made speaks of the decoder's, `made_by["encoder"]` has the encoder's file, inputs, outputs, profiles and the hash of
    its ONNX file.

    `profile`, one or several, is checked against the inputs' axes and `max_length`, the model's true limit in tokens
    (None: no limit), before anything starts. `log` receives all that the builder says. `runtime` names a flavour;
    unnamed, the one that fits the GPU found is taken (`engines.choose`). `tf32` lets float32 products round what goes
    in to 10 bits of mantissa; off, they are float32. `workspace` is in MiB. `hardware_compatibility` (tensorrt) makes
    the engine run on compute capability 8.0 and later. `compute_capabilities` (tensorrt-rtx), as "8.9", narrows what
    the engine is built for. `here` is what the machine has, looked up when None; `command` is the process that builds.

    Inputs and outputs are read from the network that was built, their axes named after the parent's.

    Raises UsageError for a bad profile or an option that the flavour ignores, MissingPackage when flavour or GPU is
    missing, ConversionError when the builder fails or crashes; nothing is left in `directory` then.
    """
    chosen = (profile,) if isinstance(profile, Profile) else tuple(profile)
    axes = profiles.dynamic_axes(spec.shape for spec in parent.inputs)
    if not chosen:
        raise UsageError(f"no profile was given: an engine is built for at least one, here {'x'.join(axes)}")
    for each in chosen:
        profiles.check(each, axes, max_length)
    encoder = _encoder(parent)
    here = here or runtime_here()
    flavour, note = engines.choose(runtime, here)
    given = {
        "--hardware-compatibility": hardware_compatibility,
        "--timing-cache": timing_cache is not None,
        "--compute-capability": compute_capabilities is not None,
    }
    engines.refuse_ignored(flavour, (option for option, is_set in given.items() if is_set))
    request = {
        "tf32": tf32,
        "workspace": workspace,
        "hardware_compatibility": hardware_compatibility,
        "timing_cache": None if timing_cache is None else str(timing_cache.resolve()),
        "compute_capabilities": None if compute_capabilities is None else list(compute_capabilities),
    }
    order = _Order(flavour, here, request, command)
    files = [ENGINE_FILE] if encoder is None else [DECODER_ENGINE, ENCODER_ENGINE]
    try:
        made = _engine(order, parent, chosen, directory / files[0], log)
        if encoder is not None:
            share = chosen[0].of(profiles.dynamic_axes(spec.shape for spec in encoder.inputs))
            beside = log.with_name(f"{log.stem}-encoder{log.suffix}")
            made = _with_encoder(made, _engine(order, encoder, (share,), directory / files[1], beside), encoder)
    except BaseException:
        for name in files:
            for left in (name, f"{name}.part", engines.sidecar_path(directory / name).name):
                (directory / left).unlink(missing_ok=True)
        raise
    return replace(made, notes=(note,) if note else ())


def _encoder(parent: Artifact) -> Artifact | None:
    """The encoder's graph as an artifact of its own; None of a parent that is one graph."""
    own = parent.made_by.get("encoder")
    if own is None:
        return None
    return replace(
        parent,
        path=parent.directory / own["file"],
        inputs=_specs(own["inputs"]),
        outputs=_specs(own["outputs"]),
        made_by={},
    )


def _specs(plain: Sequence[Mapping[str, Any]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(each["name"], each["dtype"], tuple(each["shape"])) for each in plain)


def _plain(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]


def _engine(order: _Order, parent: Artifact, chosen: Sequence[Profile], engine: Path, log: Path) -> Made:
    """Builds one engine of one graph and writes its sidecar. Raises ConversionError; what is half done is left."""
    here, flavour, asked = order.here, order.flavour, order.request
    request = {
        **asked,
        "onnx": str(parent.path.resolve()),
        "engine": str(engine.resolve()),
        "profiles": [profiles.shapes(each, parent.inputs) for each in chosen],
    }
    built = _build(flavour, here.installed[flavour.name], request, log, order.command)
    inputs = _named(built["inputs"], parent.inputs, "input")
    outputs = _named(built["outputs"], parent.outputs, "output")
    capabilities = _capabilities(built["compute_capabilities"], asked["hardware_compatibility"], here)
    sidecar = Sidecar(
        flavour=flavour.name,
        builder=built["builder"],
        compute_capabilities=capabilities,
        hardware_compatibility=asked["hardware_compatibility"],
        precision=parent.precision,
        tf32=asked["tf32"],
        profiles=tuple(chosen),
        onnx=_onnx_files(parent),
        engine_sha256=disk.sha256_file(engine),
    )
    engines.write_sidecar(engine, sidecar)
    made_by = {
        "builder": flavour.name,
        "versions": {flavour.name: built["builder"], "polygraphy": built["polygraphy"]},
        "strongly_typed": True,
        "compute_capabilities": list(capabilities),
        "profiles": [each.as_data() for each in chosen],
        "tf32": asked["tf32"],
        "workspace_mib": asked["workspace"],
        "hardware_compatibility": asked["hardware_compatibility"],
        "timing_cache": asked["timing_cache"] is not None,
        "gpu": None if here.gpu is None else here.gpu.name,
        "build_seconds": built["seconds"],
    }
    return Made(engine.name, inputs, outputs, made_by)


def _with_encoder(made: Made, encoder: Made, parent: Artifact) -> Made:
    """The decoder's engine, with what has to be known of the encoder's."""
    own = {
        "file": encoder.file,
        "inputs": _plain(encoder.inputs),
        "outputs": _plain(encoder.outputs),
        "profiles": encoder.made_by["profiles"],
        "onnx_sha256": parent.sha256,
        "build_seconds": encoder.made_by["build_seconds"],
    }
    return replace(made, made_by={**made.made_by, "encoder": own})


# -- the process that builds -------------------------------------------------------------------------------------------


def _build(
    flavour: Flavour,
    version: str,
    request: Mapping[str, Any],
    log: Path,
    command: Callable[[Path, Path], list[str]],
) -> dict[str, Any]:
    """Runs the builder and returns what it says it has built. Raises ConversionError with its own words."""
    with tempfile.TemporaryDirectory(prefix="nlpconvert-trt-") as scratch:
        asked, answered = Path(scratch) / "request.json", Path(scratch) / "result.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        # Polygraphy reads its flavour from the environment when it is imported.
        environment = {**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": str(int(flavour.name == "tensorrt-rtx"))}
        with log.open("wb") as noise:
            process = subprocess.run(
                command(asked, answered),
                stdin=subprocess.DEVNULL,
                stdout=noise,
                stderr=subprocess.STDOUT,
                env=environment,
                check=False,
            )
        answer = _answer(answered)
    if process.returncode == 0 and "error" not in answer:
        return answer
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    raise ConversionError(
        f"{flavour.name} {version} {_what_happened(process.returncode, answer, said)} (the builder's log: {log})",
        detail="\n".join(said[-_DETAIL_LINES:]),
    )


def _answer(path: Path) -> dict[str, Any]:
    """What the builder left: a result, or an error; a process that crashed leaves nothing."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        answer = None
    return answer if isinstance(answer, dict) else dict(_NOTHING)


def _what_happened(returncode: int, answer: Mapping[str, Any], said: Sequence[str]) -> str:
    """How a build ended, for a person: the signal that killed it, or TensorRT's first error."""
    if returncode < 0:
        name = _signal(-returncode)
        if name == "SIGKILL":
            return "was killed while building (SIGKILL), most likely for want of memory: free some, or lower --max"
        return f"crashed while building ({name}): a fault of the builder, try another version or precision"
    # The first error is the cause, what follows are its consequences; the exception only says that there were some.
    errors = [line.removeprefix("[E] ") for line in said if line.startswith("[E] ")]
    reason = errors[0] if errors else str(answer["error"]) if "error" in answer else f"exit status {returncode}"
    if not errors and answer == _NOTHING and said:
        reason = f"it left no result, its last words: {said[-1]}"
    reason = re.sub(r"\s+", " ", reason).strip()
    return f"could not build: {reason if len(reason) <= _REASON_LENGTH else reason[:_REASON_LENGTH] + ' ...'}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- what was built ----------------------------------------------------------------------------------------------------


def _named(built: Sequence[Mapping[str, Any]], parent: Sequence[TensorSpec], kind: str) -> tuple[TensorSpec, ...]:
    """The network's inputs or outputs, their dynamic axes (-1) named as the parent's are.

    Raises ConversionError when names, ranks or fixed sizes are not the parent's.
    """
    known = {spec.name: spec for spec in parent}
    names = [each["name"] for each in built]
    if set(names) != set(known):
        raise ConversionError(f"the engine's {kind}s are {', '.join(names)}, those of the ONNX file {', '.join(known)}")
    found = []
    for each in built:
        name, shape, expected = each["name"], each["shape"], known[each["name"]].shape
        if len(shape) != len(expected) or any(
            size not in (-1, axis) for size, axis in zip(shape, expected, strict=True) if isinstance(axis, int)
        ):
            raise ConversionError(
                f"the engine's {kind} {name} has shape {tuple(shape)}, that of the ONNX file {expected}"
            )
        axes = tuple(axis if size == -1 else size for size, axis in zip(shape, expected, strict=True))
        found.append(TensorSpec(name, each["dtype"], axes))
    return tuple(found)


def _capabilities(built: Sequence[str], hardware_compatibility: bool, here: Here) -> tuple[str, ...]:
    """What the engine can run on: what was asked of TensorRT-RTX, or the GPU that `tensorrt` has built on."""
    if built:
        return tuple(built)
    if hardware_compatibility:
        return ("8.0+",)
    return () if here.gpu is None else (here.gpu.compute_capability,)


def _onnx_files(parent: Artifact) -> dict[str, str]:
    """sha256 of the ONNX file and of external data (model.onnx.data, which two graphs may share), by name."""
    main = parent.path.name
    return {name: digest for name, digest in parent.files.items() if name == main or name.endswith(".onnx.data")}

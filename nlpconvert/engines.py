"""Floor 1: what is known about TensorRT engines without TensorRT: its two flavours, the GPU found, an engine's sidecar.

The flavours are rows. What is installed is read from package metadata and the GPU from the driver's own library, so
that asking imports neither TensorRT nor torch. What does not belong here: building engines (`convert.tensorrt`) and
running them (`backends.tensorrt`), which both stand on this.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nlpconvert import disk, profiles
from nlpconvert.errors import DriftError, MissingPackage, UsageError
from nlpconvert.profiles import Profile

ENGINE_FILE = "model.engine"
DECODER_ENGINE, ENCODER_ENGINE = "decoder_model.engine", "encoder_model.engine"
"""Of a model that writes behind an encoder, whose graphs are two."""


@dataclass(frozen=True)
class Flavour:
    """One row: a TensorRT that an engine can be built and run by.

    `capabilities` are the compute capabilities it can serve: a list, or one with a trailing "+" for "and later".
    `ignores` maps an option that it would pass over in silence, or only warn about, to why it is refused.
    """

    name: str
    module: str
    extra: str
    needs_gpu_to_build: bool
    capabilities: tuple[str, ...]
    ignores: Mapping[str, str]


FLAVOURS: dict[str, Flavour] = {
    row.name: row
    for row in (
        Flavour(
            "tensorrt",
            "tensorrt",
            "gpu",
            True,
            ("7.5+",),
            {"--compute-capability": "it builds for the GPU it finds"},
        ),
        # 7.5 can be asked for, but has no float32 matrix product there, so it is not among what is built unasked.
        Flavour(
            "tensorrt-rtx",
            "tensorrt_rtx",
            "trt-rtx",
            False,
            ("8.0", "8.6", "8.9", "12.0", "12.1"),
            {
                "--hardware-compatibility": "its engines serve every GPU generation they are built for as it is",
                "--timing-cache": "it compiles its kernels where they run and times none while building",
            },
        ),
    )
}


# -- what is here ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    """The GPU that an engine would run on: the first one visible."""

    name: str
    compute_capability: str  # "8.9"


@dataclass(frozen=True)
class Here:
    """What this machine has: the flavours installed, by version, and the GPU, or why there is none."""

    installed: Mapping[str, str] = field(default_factory=dict)
    gpu: Gpu | None = None
    no_gpu: str = ""


def runtime_here() -> Here:
    """What is installed and which GPU is there. Imports no framework and starts no process."""
    gpu, no_gpu = find_gpu()
    return Here(installed_flavours(), gpu, no_gpu)


def installed_flavours() -> dict[str, str]:
    """The versions of the flavours that can be imported here; none without polygraphy, which builds and runs both."""
    if importlib.util.find_spec("polygraphy") is None:
        return {}
    return {row.name: _version(row) for row in FLAVOURS.values() if importlib.util.find_spec(row.module) is not None}


def _version(row: Flavour) -> str:
    for distribution in (row.name, *importlib.metadata.packages_distributions().get(row.module, [])):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


# From cuda.h: cuDeviceGetAttribute's numbers.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def find_gpu(driver: Any = None) -> tuple[Gpu | None, str]:
    """The first GPU that the CUDA driver shows, or None and why, in a few words.

    `driver` is the driver's library (found by itself when None). CUDA_VISIBLE_DEVICES holds as it does for CUDA itself.
    """
    if driver is None:
        try:
            driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        except OSError:
            return None, "no NVIDIA GPU with a driver here"
    status = driver.cuInit(0)
    if status != 0:
        return None, f"no usable NVIDIA GPU here: the driver answers with CUDA error {status}"
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    calls = (
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDeviceGetName(name, len(name), device),
        driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device),
    )
    if any(calls):
        return None, f"no usable NVIDIA GPU here: the driver answers with CUDA error {next(filter(None, calls))}"
    return Gpu(name.value.decode(errors="replace"), f"{major.value}.{minor.value}"), ""


# -- which flavour builds ----------------------------------------------------------------------------------------------


def fits(capabilities: Iterable[str], compute_capability: str) -> bool:
    """Whether code for `capabilities` ("8.6", or "8.0+" for that and later) runs on a GPU of `compute_capability`."""
    return any(
        _number(each.rstrip("+")) <= _number(compute_capability) if each.endswith("+") else each == compute_capability
        for each in capabilities
    )


def _number(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))


def choose(runtime: str | None, here: Here) -> tuple[Flavour, str]:
    """The flavour to build with, and a note for the person ("" for none).

    Named or not, a flavour must be installed and able to build here. Unnamed: the first that fits the GPU found; where
    none does, one that can build without it, whose engine then is not run here.

    Raises UsageError for a name that is no flavour, MissingPackage when the flavour or the GPU that it builds with is
    missing.
    """
    if runtime is not None and runtime not in FLAVOURS:
        raise UsageError(f'--runtime "{runtime}" is unknown: it is one of {", ".join(FLAVOURS)}')
    wanted = [FLAVOURS[runtime]] if runtime is not None else list(FLAVOURS.values())
    present = [row for row in wanted if row.name in here.installed]
    if not present:
        names = " or ".join(row.name for row in wanted)
        extras = " or ".join(f"pip install 'nlpconvert[{row.extra}]'" for row in wanted)
        raise MissingPackage(f"{names} (with polygraphy) is not installed: {extras}")
    if here.gpu is not None:
        for row in present:
            if fits(row.capabilities, here.gpu.compute_capability):
                return row, ""
    for row in present:
        if not row.needs_gpu_to_build:
            return row, _built_for_elsewhere(row, here)
    seen = f"{here.gpu.name} has {here.gpu.compute_capability}" if here.gpu is not None else here.no_gpu
    raise MissingPackage(
        f"{present[0].name} builds only on a GPU of compute capability {', '.join(present[0].capabilities)}; {seen}: "
        "build there, or pip install 'nlpconvert[trt-rtx]', which builds without a GPU"
    )


def _built_for_elsewhere(row: Flavour, here: Here) -> str:
    if here.gpu is None:
        return f"built without a GPU: {here.no_gpu}"
    return (
        f"{row.name} serves compute capability {', '.join(row.capabilities)} and {here.gpu.name} has "
        f"{here.gpu.compute_capability}: built for other machines (tensorrt serves this one: --runtime tensorrt)"
    )


def refuse_ignored(flavour: Flavour, given: Iterable[str]) -> None:
    """Refuses options that `flavour` would ignore; `given` are the options that were set, as "--timing-cache".

    Raises UsageError.
    """
    for option in given:
        if option in flavour.ignores:
            raise UsageError(f"{flavour.name} ignores {option}, {flavour.ignores[option]}: leave it out")


# -- what lies beside an engine ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sidecar:
    """What has to be known of an engine before it is loaded: model.engine.json.

    `profiles` in the order in which the engine has them. `onnx` gives the sha256 of the ONNX file and of its external
    data, by file name.
    """

    flavour: str
    builder: str
    compute_capabilities: tuple[str, ...]
    hardware_compatibility: bool
    precision: str
    tf32: bool
    profiles: tuple[Profile, ...]
    onnx: Mapping[str, str]
    engine_sha256: str

    def as_data(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "flavour": self.flavour,
            "builder": self.builder,
            "compute_capabilities": list(self.compute_capabilities),
            "hardware_compatibility": self.hardware_compatibility,
            "precision": self.precision,
            "tf32": self.tf32,
            "profiles": [profile.as_data() for profile in self.profiles],
            "onnx": dict(self.onnx),
            "engine_sha256": self.engine_sha256,
        }


def sidecar_path(engine: Path) -> Path:
    """model.engine -> model.engine.json."""
    return engine.with_name(engine.name + ".json")


def write_sidecar(engine: Path, sidecar: Sidecar) -> None:
    """Writes the sidecar beside its engine."""
    sidecar_path(engine).write_text(json.dumps(sidecar.as_data(), indent=2) + "\n", encoding="utf-8")


def read_sidecar(engine: Path) -> Sidecar:
    """The sidecar of an engine. Raises DriftError when it is missing or is not what was written."""
    path = sidecar_path(engine)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Sidecar(
            flavour=str(data["flavour"]),
            builder=str(data["builder"]),
            compute_capabilities=tuple(str(each) for each in data["compute_capabilities"]),
            hardware_compatibility=bool(data["hardware_compatibility"]),
            precision=str(data["precision"]),
            tf32=bool(data["tf32"]),
            # One of its own key was all that an engine had once.
            profiles=tuple(profiles.from_data(each) for each in data.get("profiles") or [data["profile"]]),
            onnx={str(name): str(digest) for name, digest in data["onnx"].items()},
            engine_sha256=str(data["engine_sha256"]),
        )
    except FileNotFoundError:
        raise DriftError(f"{path.name} is missing beside {engine}: build the engine again") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DriftError(f"{path} is not a sidecar of an engine ({error}): build the engine again") from error


def not_itself(sidecar: Sidecar, engine: Path, onnx_sha256: str) -> str:
    """Why the engine's bytes are not what the sidecar and the manifest say, in one line; "" when they are.

    `onnx_sha256` is the hash of the ONNX file that the manifest names as the engine's parent.
    """
    if (found := disk.sha256_file(engine)) != sidecar.engine_sha256:
        said = sidecar.engine_sha256
        return f"{engine} is not the engine that was built: sha256 {found[:12]}, its sidecar says {said[:12]}"
    if onnx_sha256 not in sidecar.onnx.values():
        names = ", ".join(f"{name} {digest[:12]}" for name, digest in sidecar.onnx.items())
        return (
            f"{engine} was built from another ONNX file: {names}; the manifest's parent has sha256 {onnx_sha256[:12]}"
        )
    return ""


def cannot_run(sidecar: Sidecar, here: Here) -> str:
    """Why this machine cannot run the engine, in one line; "" when it can be tried."""
    if sidecar.flavour not in here.installed:
        extra = FLAVOURS[sidecar.flavour].extra if sidecar.flavour in FLAVOURS else "gpu"
        return f"the engine needs {sidecar.flavour}, which is not installed here: pip install 'nlpconvert[{extra}]'"
    version = here.installed[sidecar.flavour]
    if version != sidecar.builder:
        return (
            f"the engine was built by {sidecar.flavour} {sidecar.builder}, here is {version}: "
            "build it again here, or install that version"
        )
    if here.gpu is None:
        return here.no_gpu
    if not fits(sidecar.compute_capabilities, here.gpu.compute_capability):
        return (
            f"{here.gpu.name} has compute capability {here.gpu.compute_capability}, the engine is for "
            f"{', '.join(sidecar.compute_capabilities)}: build it again for this GPU"
        )
    return ""

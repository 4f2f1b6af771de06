"""Floor 2: builds one TensorRT engine, in a process of its own.

    python -m nlpconvert.backends.trt_child REQUEST.json RESULT.json

A builder can crash, and takes its process with it: so `convert.tensorrt` starts this file and reads what it leaves.
The flavour of TensorRT is fixed when polygraphy is imported, by POLYGRAPHY_USE_TENSORRT_RTX, which the starter sets.
Standard output and error are the log. What does not belong here: checks that need no TensorRT; they come before.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import polygraphy
from polygraphy.backend.trt import (
    CreateConfig,
    PostprocessConfig,
    Profile,
    engine_bytes_from_network,
    network_from_onnx_path,
)
from polygraphy.config import USE_TENSORRT_RTX

if USE_TENSORRT_RTX:
    import tensorrt_rtx as trt
else:
    import tensorrt as trt

# TensorRT's element types by numpy's names ("bfloat16" has none in numpy).
_DTYPES: dict[str, str] = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
}
_MIB = 1 << 20


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Builds the engine of a request and writes it to request["engine"], by rename.

    The request: `onnx` and `engine` (paths), `profiles` (of each, input name -> [min, opt, max]), `tf32`, `workspace`
    (MiB or None), `hardware_compatibility`, `timing_cache` (path or None), `compute_capabilities` (TensorRT-RTX: a
    list, or None for all that can do float32). Returns what was built: versions, capabilities, the network's inputs and
    outputs.

    Raises ValueError when the request does not fit the network; whatever polygraphy raises passes.
    """
    # External data is found beside the file: parse from the path, not from bytes.
    builder, network, parser = network_from_onnx_path(request["onnx"], strongly_typed=_has_strongly_typed_flag())
    inputs = [_spec(network.get_input(index)) for index in range(network.num_inputs)]
    outputs = [_spec(network.get_output(index)) for index in range(network.num_outputs)]
    capabilities = _capabilities(request["compute_capabilities"])
    config = PostprocessConfig(
        _config(request, [_profile(shapes, inputs) for shapes in request["profiles"]]),
        lambda _builder, _network, config: _set_capabilities(config, capabilities),
    )
    started = time.perf_counter()
    engine = engine_bytes_from_network(
        (builder, network, parser), config=config, save_timing_cache=request["timing_cache"]
    )
    seconds = time.perf_counter() - started
    path = Path(request["engine"])
    partial = path.with_name(path.name + ".part")
    with partial.open("wb") as file:
        file.write(engine)
    os.replace(partial, path)
    return {
        "builder": str(trt.__version__),
        "polygraphy": str(polygraphy.__version__),
        "compute_capabilities": [_dotted(name) for name in capabilities],
        "inputs": inputs,
        "outputs": outputs,
        "seconds": round(seconds, 3),
    }


def _has_strongly_typed_flag() -> bool:
    """Where the flag is gone, every network is strongly typed."""
    return hasattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED")


def _spec(tensor: Any) -> dict[str, Any]:
    """Name, element type and shape (-1 for a dynamic axis) of a network's input or output."""
    kind = tensor.dtype.name
    return {
        "name": tensor.name,
        "dtype": _DTYPES.get(kind, kind.lower()),
        "shape": [int(size) for size in tensor.shape],
    }


def _profile(shapes: dict[str, list[list[int]]], inputs: list[dict[str, Any]]) -> Profile:
    """Polygraphy fills an input that the profile leaves out with sizes of its own: here that is an error."""
    names = [spec["name"] for spec in inputs]
    if set(names) != set(shapes):
        raise ValueError(f"the network reads {', '.join(names)}, the profile is for {', '.join(shapes)}")
    profile = Profile()
    for name, (smallest, usual, largest) in shapes.items():
        profile.add(name, tuple(smallest), tuple(usual), tuple(largest))
    return profile


def _config(request: dict[str, Any], profiles: list[Profile]) -> CreateConfig:
    options: dict[str, Any] = {"profiles": profiles, "tf32": request["tf32"]}
    if request["workspace"] is not None:
        options["memory_pool_limits"] = {trt.MemoryPoolType.WORKSPACE: request["workspace"] * _MIB}
    if request["hardware_compatibility"]:
        options["hardware_compatibility_level"] = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if request["timing_cache"] is not None:
        options["load_timing_cache"] = request["timing_cache"]
    return CreateConfig(**options)


def _capabilities(asked: list[str] | None) -> list[str]:
    """The members of trt.ComputeCapability to build for; none for `tensorrt`, which builds for the GPU it finds.

    Unasked, all but Turing (7.5), for which the builder has no float32 matrix product.
    """
    if not USE_TENSORRT_RTX:
        return []
    known = [name for name in trt.ComputeCapability.__members__ if name.startswith("SM")]
    if asked is None:
        return [name for name in known if name != "SM75"]
    unknown = sorted(set(asked) - {_dotted(name) for name in known})
    if unknown:
        raise ValueError(
            f"tensorrt-rtx {trt.__version__} cannot build for compute capability {', '.join(unknown)}, "
            f"it knows {', '.join(_dotted(name) for name in known)}"
        )
    return [name for name in known if _dotted(name) in asked]


def _dotted(member: str) -> str:
    """SM86 -> 8.6, SM120 -> 12.0."""
    digits = member.removeprefix("SM")
    return f"{digits[:-1]}.{digits[-1]}"


def _set_capabilities(config: Any, members: list[str]) -> None:
    if not members:
        return
    config.num_compute_capabilities = len(members)
    for index, member in enumerate(members):
        if not config.set_compute_capability(trt.ComputeCapability.__members__[member], index):
            raise ValueError(f"tensorrt-rtx {trt.__version__} refuses compute capability {_dotted(member)}")


def main(request: str, result: str) -> int:
    """Reads the request, builds, leaves the result (or one line of error) as JSON; the exit status says which."""
    try:
        answer = build(json.loads(Path(request).read_text(encoding="utf-8")))
    except Exception as error:  # the traceback goes to the log, the line to the person
        Path(result).write_text(json.dumps({"error": f"{error}" or type(error).__name__}), encoding="utf-8")
        raise
    Path(result).write_text(json.dumps(answer), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Floor 0: the machine and the packages that something was made or measured with, as plain values for the manifest.

What this machine could build and run is `doctor`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# What decides the kernels that run, and with them the last digits of an answer.
CPU_FLAGS = (
    "sse4_2 avx avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 "
    "amx_bf16 asimd asimddp asimdhp i8mm bf16 sve sve2"
).split()

PACKAGES = (
    "numpy torch transformers tokenizers onnx onnxruntime onnxruntime-gpu onnxruntime-training-cpu onnxscript onnx-ir "
    "polygraphy tensorrt tensorrt-rtx safetensors"
).split()


def host_facts() -> dict[str, Any]:
    """The machine, as JSON values: platform, processor with the flags that choose kernels, number of CPUs, Python."""
    told: dict[str, str] = {}
    info = Path("/proc/cpuinfo")  # Linux only
    if info.is_file():
        pairs = (line.split(":", 1) for line in info.read_text(errors="replace").splitlines() if ":" in line)
        for key, value in pairs:
            told.setdefault(key.strip().lower(), value.strip())
    flags = set(told.get("flags", told.get("features", "")).split())  # "features" on Arm
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": told.get("model name") or platform.processor(),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
        "cpus": os.cpu_count() or 1,
        "python": platform.python_version(),
    }


def exact_int8(flags: Iterable[str] | None = None) -> bool:
    """Whether this processor's products of 8-bit numbers are exact: x86 without VNNI adds pairs up in 16 bits, which
    full-range weights overflow."""
    facts = host_facts()
    flags = set(facts["cpu_flags"] if flags is None else flags)
    x86 = "avx2" in flags or "sse4_2" in flags or facts["machine"] in ("x86_64", "AMD64")
    return not x86 or bool(flags & {"amx_int8", "avx512_vnni", "avx_vnni"})


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of the packages among `names` that are installed; nothing is imported."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

"""Floor 3: what this machine can make and run, and which extra is missing. Nothing heavy is imported to find out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nlpconvert import engines, host
from nlpconvert.artifact import STEPS
from nlpconvert.plan import cannot_make
from nlpconvert.runtimes import RUNTIMES


@dataclass(frozen=True)
class Finding:
    """One step on this machine: can it be made, can it be run; why not, and what to do."""

    step: str
    make: str
    run: str


def findings() -> list[Finding]:
    """One row a step. "yes", or what is missing and what brings it."""
    here = engines.runtime_here()
    rows = []
    for row in STEPS.values():
        make = cannot_make(row) or "yes"
        runtime = RUNTIMES[row.format]
        if not _installed(runtime.package):
            run = f"{runtime.package} is not installed: pip install 'nlpconvert[{runtime.extra}]'"
        elif row.format == "tensorrt":
            run = _runs_engines(here)
        else:
            run = "yes, on the CPU"
        rows.append(Finding(row.name, make, run))
    return rows


def _runs_engines(here: engines.Here) -> str:
    if here.gpu is None:
        return f"no: {here.no_gpu}"
    flavours = [row for name, row in engines.FLAVOURS.items() if name in here.installed]
    fitting = [row.name for row in flavours if engines.fits(row.capabilities, here.gpu.compute_capability)]
    if fitting:
        return f"yes, {' and '.join(fitting)} on {here.gpu.name}"
    return f"no: {here.gpu.name} (compute capability {here.gpu.compute_capability}) needs another flavour of TensorRT"


def _installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


def machine() -> dict[str, Any]:
    """The facts of the machine: host, GPU, packages."""
    here = engines.runtime_here()
    facts = host.host_facts()
    return {
        **facts,
        "gpu": None if here.gpu is None else {"name": here.gpu.name, "compute_capability": here.gpu.compute_capability},
        "no_gpu": here.no_gpu,
        "int8": _int8(facts["cpu_flags"]),
        "packages": host.versions(),
    }


def _int8(flags: Sequence[str]) -> str:
    """What 8-bit products of this processor do (they saturate on x86 without VNNI)."""
    if not host.exact_int8(flags):
        return "no VNNI: 8-bit products of full-range weights can saturate, so int8 weights are made of 7 bits"
    return "VNNI: 8-bit products are exact" if "avx2" in flags else "not an x86 processor with AVX2"

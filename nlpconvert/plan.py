"""Floor 3: what a run is asked to do, and all that can be said against it before any work.

The options, the steps they come to with their parents, and whether this machine can make them. Doing it is `line`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert import engines
from nlpconvert.artifact import STEPS, Step
from nlpconvert.errors import MissingPackage, UsageError

if TYPE_CHECKING:
    from nlpconvert.judging import Bounds
    from nlpconvert.models import Facts
    from nlpconvert.validators.tolerance import Tolerance

DEFAULT_STEPS = ("torchscript", "onnx", "trt")
DEFAULT_BUDGET = 32 * 2**20
DEFAULT_MEMORY = 4 * 10**9

# What must be importable to make a step, beside what its parents need; the extra that brings it is the step's own.
NEEDS: dict[str, tuple[str, ...]] = {
    "torchscript": ("torch", "transformers"),
    "onnx": ("torch", "transformers", "onnxscript", "onnx_ir", "onnxruntime"),
    "tensorrt": ("polygraphy",),
}

MOST_THREADS = 1024
"""Each thread of a runtime takes memory of its own; no machine has more processors that one model is run on."""

DEVICES = ("cpu", "cuda")
PROVIDERS = ("cpu", "cuda", "tensorrt")
OPTIMIZE_FOR = ("cpu", "cuda")
INT8_METHODS = ("static", "weight-only", "dynamic")


@dataclass(frozen=True)
class Options:
    """Everything that can be chosen. Every field has the default of the command line.

    `columns` ("text=body") and `tolerance` ("cosine>=0.995,changed<=0.5%") are as the flags take them; no tolerance
    means the table's defaults. `golden_budget` is in bytes, as is `max_memory` (what the reference may take to be asked
    in float64), `workspace` in MiB. `minimum`, `optimum`, `maximum` are
    the profile ("1x1", "8x128", "32x512"). `optimize` is what `onnx-optimized` is fused for, `int8_method` one of
    INT8_METHODS (None: the fastest that stays in the budget), `search_budget` in seconds, `recipe` a file to replay.
    """

    task: str | None = None
    revision: str | None = None
    device: str = "cpu"
    provider: str = "cpu"
    threads: int | None = None
    force: bool = False
    keep_going: bool = False
    data: Path | None = None
    columns: str = ""
    tolerance: str = ""
    golden_budget: int = DEFAULT_BUDGET
    max_memory: int = DEFAULT_MEMORY
    allow_missing_weights: bool = False
    trust_remote_code: bool = False
    method: str = "trace"
    opset: int | None = None
    optimize: str = "cpu"
    int8_method: str | None = None
    search_budget: float = 180.0
    recipe: Path | None = None
    accept_clamped: bool = False
    runtime: str | None = None
    minimum: str | None = None
    optimum: str | None = None
    maximum: str | None = None
    max_new_tokens: int | None = None
    tf32: bool = False
    workspace: int | None = None
    hardware_compatibility: bool = False
    timing_cache: Path | None = None
    compute_capabilities: tuple[str, ...] | None = None

    def loading(self) -> dict[str, Any]:
        """What `source.load` is told beside the model."""
        return {
            "revision": self.revision,
            "task": self.task,
            "allow_missing_weights": self.allow_missing_weights,
            "trust_remote_code": self.trust_remote_code,
            "device": self.device,
        }

    def recorded(self) -> dict[str, Any]:
        """The options that were set, as plain values for the manifest."""
        default = Options()
        chosen = {name: value for name, value in asdict(self).items() if value != getattr(default, name)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in chosen.items()}


# ---- what can be told without loading anything ----------------------------------------------------------------------


def check_words(options: Options) -> tuple[Tolerance, ...]:
    """The tolerances that were given, parsed. UsageError for an option whose value is none of its words."""
    for option, value, words in (
        ("--device", options.device, DEVICES),
        ("--provider", options.provider, PROVIDERS),
        ("--optimize", options.optimize, OPTIMIZE_FOR),
        ("--method", options.int8_method, (None, *INT8_METHODS)),
    ):
        if value not in words:
            raise UsageError(f'{option} "{value}" is unknown: it is one of {", ".join(w for w in words if w)}')
    if options.threads is not None and not 1 <= options.threads <= MOST_THREADS:
        raise UsageError(f"--threads {options.threads}: from 1 to {MOST_THREADS}")
    if options.search_budget <= 0:
        raise UsageError(f"--search-budget {options.search_budget:g}: more than 0 seconds")
    if options.recipe is not None and not options.recipe.is_file():
        raise UsageError(f"--recipe {options.recipe}: no such file")
    if options.golden_budget < 1:
        raise UsageError(f"a golden budget of {options.golden_budget} bytes: at least 1")
    if options.max_memory < 1:
        raise UsageError(f"--max-memory {options.max_memory} bytes: at least 1")
    if options.columns and options.data is None:
        raise UsageError("--columns renames columns of --data, and no --data is given")
    if options.data is not None and not options.data.exists():
        raise UsageError(f"--data {options.data}: no such file")
    from nlpconvert.validators import tolerance

    return tolerance.parse(options.tolerance) if options.tolerance else ()


def check_step_names(names: Sequence[str], known: Sequence[str] = tuple(STEPS), of: str = "the steps are") -> None:
    """UsageError for a name that is no step."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no step {unknown[0]!r}; {of} {', '.join(known)}")


def steps(to: Sequence[str] | None) -> list[Step]:
    """The rows to make, parents first; all of them for None. UsageError for a name that is no step."""
    names = list(DEFAULT_STEPS if to is None else to)
    check_step_names(names)
    if not names:
        raise UsageError(f"no step was asked for; the steps are {', '.join(STEPS)}")
    ordered: list[Step] = []
    for name in names:
        ordered += [row for row in chain(STEPS[name]) if row not in ordered]
    return ordered


def chain(row: Step) -> list[Step]:
    """A step with everything it is made from, the first first."""
    rows = [row]
    while rows[0].parent != "source":
        rows.insert(0, STEPS[rows[0].parent])
    return rows


def cannot_make(row: Step, runtime: str | None = None) -> str:
    """What is missing here to make a step and what brings it, in one line; "" when it can be made.

    UsageError for a `runtime` that is no flavour of TensorRT.
    """
    for above in chain(row):
        for package in NEEDS[above.format]:
            if importlib.util.find_spec(package) is None:
                return f"{package} is not installed: pip install 'nlpconvert[{above.extra}]'"
    if row.format == "tensorrt":
        try:
            engines.choose(runtime, engines.runtime_here())
        except MissingPackage as error:
            return str(error)
    return ""


def not_here(rows: Sequence[Step], options: Options, named: bool) -> dict[str, str]:
    """Why steps that were not asked for by name cannot be made here, by step; they are skipped.

    Raises MissingPackage for a step that was named (or that others are made from), UsageError for an option that the
    chosen builder would ignore.
    """
    lacking: dict[str, str] = {}
    for row in rows:
        reason = cannot_make(row, options.runtime)
        if reason and (named or row.name != "trt" or options.runtime is not None):
            raise MissingPackage(f"{row.name} cannot be made here: {reason}")
        if reason:
            lacking[row.name] = reason
        elif row.format == "tensorrt":
            flavour, _ = engines.choose(options.runtime, engines.runtime_here())
            given = {
                "--hardware-compatibility": options.hardware_compatibility,
                "--timing-cache": options.timing_cache is not None,
                "--compute-capability": options.compute_capabilities is not None,
            }
            engines.refuse_ignored(flavour, [name for name, is_set in given.items() if is_set])
    return lacking


# ---- what can be told once the model is known -----------------------------------------------------------------------


def check_rows(rows: Sequence[Step], options: Options, facts: Facts, bounds: Mapping[str, Bounds]) -> None:
    """UsageError for an option that the model or a converter cannot take: told before the first conversion.

    `bounds`: by step.
    """
    from nlpconvert import models, profiles, writer
    from nlpconvert.validators import tolerance

    formats = {row.format for row in rows}
    profile = (options.minimum, options.optimum, options.maximum)
    if "tensorrt" in formats or any(profile) or options.max_new_tokens is not None:
        axes = profiles.dynamic_axes(models.input_axes(name, facts.task) for name in facts.inputs)
        if facts.task in models.WRITING:
            axes = profiles.PAIR_AXES if writer.encodes(facts) else profiles.DECODER_AXES
        profiles.choose_all(*profile, axes, facts.max_length, max_new_tokens=options.max_new_tokens)
    if "onnx" in formats and options.opset is not None:
        from nlpconvert.convert import onnx

        if options.opset not in onnx.OPSETS:
            raise UsageError(f"--opset {options.opset} is not between {onnx.OPSETS[0]} and {onnx.OPSETS[-1]}")
    if "torchscript" in formats:
        from nlpconvert.convert import torchscript

        if options.method not in torchscript.METHODS:
            raise UsageError(f"--method {options.method} is not one of {', '.join(torchscript.METHODS)}")
    for row in rows:
        provider = {"torchscript": options.device, "onnx": options.provider}.get(row.format, "tensorrt")
        any_noise = dict.fromkeys((output.name for output in facts.outputs), tolerance.LEAST_NOISE)
        bounds[row.name].choose(facts.outputs, row.precision, provider, any_noise)

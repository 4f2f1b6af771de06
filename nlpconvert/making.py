"""Floor 3: which converter makes which step, and what it is handed.

One small function a kind of step; converters are imported by the one that needs them. Doing the steps in order, and
judging what came out, is `line`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert.artifact import Artifact, Made, Step
from nlpconvert.manifest import Manifest
from nlpconvert.plan import Options
from nlpconvert.progress import Progress

if TYPE_CHECKING:
    from nlpconvert.inputs import Encode
    from nlpconvert.judging import Probes
    from nlpconvert.models import Facts
    from nlpconvert.source import Loaded
    from nlpconvert.validators.tolerance import Tolerance


@dataclass(frozen=True)
class Work:
    """All that making one step may ask for. `new` is the empty directory to write into, `log` where noise goes."""

    row: Step
    options: Options
    record: Manifest
    loaded: Loaded | None
    parent: Artifact | None
    new: Path
    log: Path
    probes: Probes
    tolerances: Sequence[Tolerance]
    progress: Progress
    facts: Facts
    encode: Encode | None

    @property
    def above(self) -> Artifact:
        """The artifact that this step is made from."""
        assert self.parent is not None, f"{self.row.name} is made from the source"
        return self.parent


def make(work: Work) -> Made:
    """Makes the step with the converter that its row stands for; of an encoder-decoder's two graphs as one."""
    from nlpconvert import pairs

    maker = MAKERS.get(work.row.name, MAKERS[work.row.format])
    if work.row.format == "onnx" and work.parent is not None and pairs.is_pair(work.parent):
        return pairs.through(work, maker)
    return maker(work)


def _torchscript(work: Work) -> Made:
    from nlpconvert import probes
    from nlpconvert.convert import torchscript

    assert work.loaded is not None
    loaded = work.loaded
    example = probes.export_example(loaded.facts, loaded.encode, least=loaded.facts.trace_length)
    return torchscript.convert(loaded.module, example, loaded.facts, work.new, method=work.options.method)


def _onnx(work: Work) -> Made:
    from nlpconvert import probes, writer
    from nlpconvert.convert import cached, cached_pair, onnx

    assert work.loaded is not None
    loaded = work.loaded
    beside: dict[str, Any] = {
        "companions": loaded.directory,
        "parameter_bytes": loaded.parameter_bytes,
        "opset": work.options.opset,
    }
    if work.probes.written is not None:
        convert = cached_pair.convert if writer.encodes(loaded.facts) else cached.convert
        return convert(loaded.module, loaded.facts, work.new, **beside)
    example = probes.export_example(loaded.facts, loaded.encode)
    return onnx.convert(loaded.module, example, loaded.facts, work.new, **beside)


def _tensorrt(work: Work) -> Made:
    from nlpconvert import profiles
    from nlpconvert.convert import tensorrt

    options, parent = work.options, work.above
    covered = (
        f"{parent.step}'s verdict, on ONNX Runtime, covers the graph that this engine is built from; the engine's own "
        "kernels are covered where it was run"
    )
    limit = work.record.facts["max_length"]
    axes = profiles.dynamic_axes(spec.shape for spec in parent.inputs)
    made = tensorrt.convert(
        parent,
        work.new,
        profile=profiles.choose_all(
            options.minimum,
            options.optimum,
            options.maximum,
            axes,
            limit,
            max_new_tokens=options.max_new_tokens,
            configured=profiles.configured_tokens(parent.directory),
        ),
        max_length=limit,
        log=work.log,
        runtime=options.runtime,
        tf32=options.tf32,
        workspace=options.workspace,
        hardware_compatibility=options.hardware_compatibility,
        timing_cache=options.timing_cache,
        compute_capabilities=options.compute_capabilities,
    )
    return made if parent.precision == "float32" else replace(made, notes=(*made.notes, covered))


def _optimized(work: Work) -> Made:
    from nlpconvert.convert import optimize

    made = optimize.convert(work.above, work.new, target=work.options.optimize)
    gain = _gain(work, made)
    brought = f"it takes {gain:.2f} of the plain file's time on this processor, at the largest probe case"
    return replace(made, made_by={**made.made_by, "latency_ratio": round(gain, 3)}, notes=(*made.notes, brought))


def _gain(work: Work, made: Made) -> float:
    """Time of the fused file over the plain one's on the CPU, both opened as for serving."""
    from nlpconvert import inputs
    from nlpconvert.backends import onnxruntime
    from nlpconvert.convert import optimize

    case = max((case for case in work.probes.cases if case.name in work.probes.answers), key=inputs.case_tokens)
    before = onnxruntime.open_file(work.above.path, threads=work.options.threads, serving=True)
    after = onnxruntime.open_file(work.new / made.file, threads=work.options.threads, serving=True)
    try:
        return optimize.gain(lambda: before.run(case.inputs), lambda: after.run(case.inputs))
    finally:
        before.close()
        after.close()


def _half(work: Work) -> Made:
    from nlpconvert import calibration
    from nlpconvert.convert import half

    run = calibration.runner(work, "calibrate")
    return half.convert(
        work.above, work.new, precision=work.row.precision, run=run, accept_clamped=work.options.accept_clamped
    )


def _int8(work: Work) -> Made:
    from nlpconvert import cpu_int8

    return cpu_int8.int8(work)


def _int4(work: Work) -> Made:
    from nlpconvert import quantizing

    return quantizing.int4(work)


def _qdq(work: Work) -> Made:
    from nlpconvert import quantizing

    return quantizing.qdq(work)


MAKERS: dict[str, Callable[[Work], Made]] = {
    "torchscript": _torchscript,
    "onnx": _onnx,
    "onnx-optimized": _optimized,
    "onnx-fp16": _half,
    "onnx-bf16": _half,
    "onnx-int8": _int8,
    "onnx-int4": _int4,
    "onnx-qdq": _qdq,
    "tensorrt": _tensorrt,
}

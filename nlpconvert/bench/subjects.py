"""Floor 3: what is timed: the artifacts of an OUT that run here, and PyTorch; and the machine that they run on.

Opened as for serving: memory and threads as the runtime has them by default. Each runs in a process of its own
(`worker`). Floor 2 is imported inside the functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlpconvert import manifest, runtimes
from nlpconvert.artifact import Artifact
from nlpconvert.errors import UsageError
from nlpconvert.manifest import Manifest
from nlpconvert.plan import Options
from nlpconvert.validators.findings import Comparison

if TYPE_CHECKING:
    from nlpconvert.backends import Session

PYTORCH = "pytorch"
"""The baseline's name among the subjects."""


@dataclass(frozen=True)
class Subject:
    """One row of a benchmark. `status` is the verdict in the manifest ("agrees", "drift", ...; "reference" for
    PyTorch), `reason` why it is not measured ("" where it is), `changed` whether that is because its files are not the
    recorded ones. `drift`: relative L2 of the main output; `worst`: measure and value, as reports word them.
    """

    name: str
    status: str
    format: str
    precision: str
    bytes: int
    drift: float | None = None
    worst: tuple[str, float] | None = None
    reason: str = ""
    changed: bool = False
    artifact: Artifact | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of the process of its own: seconds of opening it and of the first pass, bytes of memory."""

    @property
    def share(self) -> dict[str, float]:
        """The part of the products' FLOPs by arithmetic, as the verdict counted them; all float32 where it did not."""
        return dict(self.facts.get("share") or {"float32": 1.0})


def subjects(record: Manifest, out: Path, steps: Sequence[str] | None, model: str | None) -> list[Subject]:
    """PyTorch, and every step that was asked for (all, where None), with the reason where it cannot be asked at all."""
    chosen = list(record.steps) if steps is None else list(dict.fromkeys(steps))
    unknown = [name for name in chosen if name not in record.steps and name != PYTORCH]
    if unknown:
        known = ", ".join([PYTORCH, *record.steps])
        raise UsageError(f"there is no step {unknown[0]!r} in {out}; there is {known}")
    found = [_pytorch(record, model)]
    return found + [_step(record, out, name) for name in chosen if name != PYTORCH]


def _pytorch(record: Manifest, model: str | None) -> Subject:
    size = int(record.source.get("parameter_bytes") or 0)
    reason = ""
    if runtimes.lacks("torch") or runtimes.lacks("transformers"):
        reason = "torch and transformers are not installed: pip install 'nlpconvert[cpu]'"
    else:
        try:
            where(record, model)
        except UsageError as error:
            if model is not None:
                raise
            reason = str(error)
    return Subject(PYTORCH, "reference", "pytorch", "float32", size, 0.0, None, reason)


def where(record: Manifest, model: str | None) -> tuple[str, str | None]:
    """Directory or hub id of the source, and its revision. UsageError when it is not there or is another one."""
    from nlpconvert import checkpoint

    name = model or str(record.source.get("path") or record.source.get("id") or record.source.get("model"))
    revision = record.source.get("revision") if model is None else None
    if model is None and record.source.get("path") and not Path(name).is_dir():
        raise UsageError("the model is no longer where it was: give --model")
    info = checkpoint.describe(name, revision=revision, task=record.task)
    if info.sha256 != record.source_sha256:
        raise UsageError(
            f"{name} is checkpoint {info.sha256[:12]}, and this was made from {record.source_sha256[:12]}: "
            "give that one as --model"
        )
    return name, revision


def _step(record: Manifest, out: Path, name: str) -> Subject:
    kept = record.record(name)
    outcome = record.outcome(name, out)
    artifact = outcome.artifact
    if artifact is None:
        return Subject(name, outcome.status, "", "", 0, reason=f"nothing was made: {outcome.reason or outcome.status}")
    found = Subject(name, outcome.status, artifact.format, artifact.precision, outcome.bytes, artifact=artifact)
    verdict = outcome.verdict
    if verdict is not None:
        comparison = Comparison.from_dict(verdict["comparison"])
        main = next((each for each in comparison.outputs if each.elements), None)
        products = verdict.get("products") or {}
        found = replace(
            found,
            drift=None if main is None else main.relative_l2,
            worst=comparison.worst_headline(),
            facts={"share": products.get("share") or {}},
        )
    changed = manifest.tampered(record, name, out)
    if changed:
        return replace(found, reason=f"{changed[0]} since it was verified; it was not opened", changed=True)
    if kept.stale:
        return replace(found, reason=f"it is stale: {artifact.parent}, from which it was made, was replaced since")
    return found


def open_subject(subject: Subject, record: Manifest, options: Options, model: str | None) -> Session:
    """A session on it, as for serving. CannotRunHere where this machine cannot, DriftError where the file is none."""
    artifact = subject.artifact
    if artifact is None:
        from nlpconvert import source
        from nlpconvert.backends import eager

        name, revision = where(record, model)
        whole = replace(options, revision=revision, task=record.task, allow_missing_weights=True)
        loaded = source.load(name, **whole.loading())
        return eager.open(loaded.module, options.threads)
    if artifact.format != "onnx" or artifact.made_by.get("foreign"):
        return runtimes.open_artifact(artifact, options)
    if runtimes.lacks("onnxruntime"):
        return runtimes.open_artifact(artifact, options)  # which says so
    from nlpconvert.backends import onnxruntime

    decoder, *encoder = [
        onnxruntime.open_file(
            path, precision=artifact.precision, device=options.provider, threads=options.threads, serving=True
        )
        for path in artifact.graphs
    ]
    return onnxruntime.PairSession(decoder, *encoder) if encoder else decoder


# ---- the machine -----------------------------------------------------------------------------------------------------


class Pinned:
    """The process on as many of the processors that it may use as there are threads, while this is entered."""

    def __init__(self, threads: int | None) -> None:
        self.allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self.threads = threads or len(self.allowed) or os.cpu_count() or 1
        self.cpus = self.allowed[: self.threads]

    def __enter__(self) -> Pinned:
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        return self

    def __exit__(self, *_: object) -> None:
        if self.allowed:
            os.sched_setaffinity(0, self.allowed)

    def facts(self) -> dict[str, Any]:
        """Plain JSON: threads, processors, and what decides their clock, as far as it is told."""
        governors = set()
        for cpu in self.cpus:
            path = Path(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor")
            governors |= {path.read_text().strip()} if path.is_file() else set()
        return {
            "threads": self.threads,
            "pinned": self.cpus or None,
            "governor": ", ".join(sorted(governors)) or None,
            "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }

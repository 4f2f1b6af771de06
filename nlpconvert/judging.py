"""Floor 3: an artifact is opened, asked the goldens, and its answers are held against PyTorch's.

Which runtime opens which format is the table here; what the numbers mean is `validators/`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlpconvert import host, reference
from nlpconvert.artifact import Artifact
from nlpconvert.backends import Session
from nlpconvert.errors import CannotRunHere, OutOfProfile
from nlpconvert.golden import Answers
from nlpconvert.inputs import Case, case_tokens
from nlpconvert.models import OutputRow
from nlpconvert.progress import Progress
from nlpconvert.validators import parity, rows, tolerance
from nlpconvert.validators.tolerance import Tolerance


@dataclass(frozen=True)
class Runtime:
    """One row: how a format is run. `package` must be importable, `extra` is what brings it."""

    format: str
    module: str
    package: str
    extra: str


RUNTIMES: dict[str, Runtime] = {
    row.format: row
    for row in (
        Runtime("torchscript", "nlpconvert.backends.torchscript", "torch", "cpu"),
        Runtime("onnx", "nlpconvert.backends.onnxruntime", "onnxruntime", "verify"),
        Runtime("tensorrt", "nlpconvert.backends.tensorrt", "polygraphy", "trt-rtx"),
    )
}


@dataclass(frozen=True)
class Probes:
    """What an artifact is asked and what PyTorch answered."""

    cases: Sequence[Case]
    answers: Mapping[str, Answers]
    not_applicable: Mapping[str, str]
    sha256: str


def open_artifact(artifact: Artifact, *, device: str, provider: str, threads: int | None) -> Session:
    """A session on the artifact. CannotRunHere when the runtime is not installed or the machine cannot run it."""
    runtime = RUNTIMES[artifact.format]
    if importlib.util.find_spec(runtime.package) is None:
        raise CannotRunHere(f"{runtime.package} is not installed: pip install 'nlpconvert[{runtime.extra}]'")
    backend = importlib.import_module(runtime.module)
    where = {"onnx": provider, "torchscript": device, "tensorrt": "cuda"}[artifact.format]
    session: Session = backend.open(artifact, device=where, threads=threads)
    return session


def judge(
    session: Session,
    artifact: Artifact,
    outputs: Sequence[OutputRow],
    probes: Probes,
    given: Sequence[Tolerance],
    progress: Progress,
    parent: Session | None = None,
) -> tuple[bool, dict[str, Any], tuple[Tolerance, ...]]:
    """(agrees, verdict as plain data, tolerances used). `parent` adds what this step moved by itself.

    A case that the artifact refuses or fails at, where PyTorch answered, counts against it; one outside an engine's
    profile is named and not compared.
    """
    scales = parity.scales(outputs, probes.cases, probes.answers)
    tolerances = tolerance.choose(given, outputs, artifact.precision, session.provider)
    compared = parity.Judge(outputs, scales, tolerances)
    step_alone = parity.Judge(outputs, scales, tolerances)
    companions = rows.Rows(probes.cases, outputs, scales)
    tokens = 0
    progress.start("verify", len(probes.cases))
    for case in probes.cases:
        progress.advance()
        if case.name in probes.not_applicable:
            compared.not_applicable(case.name, probes.not_applicable[case.name])
            continue
        try:
            answers = session.run(case.inputs)
        except OutOfProfile as error:
            compared.not_applicable(case.name, str(error))
            continue
        except Exception as error:
            # A runtime raises whatever it likes; where PyTorch answered, that is the artifact's failure.
            compared.raised(case.name, f"{type(error).__name__}: {_first_line(error)}")
            continue
        tokens += case_tokens(case)
        compared.add(case, probes.answers[case.name], answers)
        companions.add(case, answers, probes.answers[case.name])
        if parent is not None:
            step_alone.add(case, reference.whole(_like(answers, parent.run(case.inputs))), answers)
    comparison = compared.comparison()
    verdict: dict[str, Any] = {
        "comparison": comparison.to_dict(),
        "rows": companions.report().to_dict(),
        "provider": session.provider,
        "precision": session.precision,
        "cases": comparison.cases,
        "tokens": tokens,
        "probe_sha256": probes.sha256,
        "versions": host.versions(),
        "host": host.host_facts(),
    }
    if parent is not None:
        verdict["parent_comparison"] = step_alone.comparison().to_dict()
    return comparison.agrees, verdict, tuple(tolerances.values())


def _like(answers: Mapping[str, np.ndarray], parent: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: parent[name] for name in answers if name in parent}


def _first_line(error: BaseException) -> str:
    return next((line.strip()[:200] for line in str(error).splitlines() if line.strip()), "no message")

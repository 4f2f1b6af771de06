"""Floor 3: an artifact is opened, asked the goldens, and its answers are held against PyTorch's.

Which runtime opens which format is `runtimes`; what the numbers mean is `validators/`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import (
    cache_names,
    golden,
    host,
    inputs,
    manifest,
    models,
    passages_files,
    profiles,
    reference,
    runtimes,
)
from nlpconvert.artifact import Artifact, Outcome, TensorSpec
from nlpconvert.backends import Session
from nlpconvert.errors import CannotRunHere, DriftError, OutOfProfile, UsageError, first_line
from nlpconvert.golden import Answers
from nlpconvert.inputs import Case, case_axes, case_tokens
from nlpconvert.manifest import Manifest
from nlpconvert.models import Facts, OutputRow
from nlpconvert.noise import floors
from nlpconvert.passages import Asked
from nlpconvert.plan import Options
from nlpconvert.progress import Progress
from nlpconvert.settings import Settings
from nlpconvert.validators import compute, parity, rows, structure, tolerance, vocabulary
from nlpconvert.validators.tolerance import Tolerance


@dataclass(frozen=True)
class Probes:
    """What an artifact is asked and what PyTorch answered."""

    cases: Sequence[Case]
    answers: Mapping[str, Answers]
    not_applicable: Mapping[str, str]
    sha256: str
    noise: Mapping[str, float] = field(default_factory=dict)
    """The reference's noise floor by output, in the unit of `rel`; empty where it was not measured."""
    vocabulary: np.ndarray | None = None
    """Fingerprint of the reference's embedding table, (ids, 2); None where it was not kept."""
    written: Asked | None = None
    """Passages and the reference's answers, of a model that writes."""


@dataclass(frozen=True)
class Bounds:
    """What was asked for: tolerances for all, and those that one output or one case has for itself."""

    given: Sequence[Tolerance] = ()
    outputs: Mapping[str, Tolerance] = field(default_factory=dict)
    cases: Mapping[str, Sequence[Tolerance]] = field(default_factory=dict)

    @classmethod
    def of(cls, step: str, given: Sequence[Tolerance], settings: Settings) -> Bounds:
        """Given now, else what the settings have for the step; single outputs and cases from the settings."""
        own, overrides = settings.tolerance_for(step), settings.overrides(step)
        return cls(
            given or (tolerance.parse(",".join(own)) if own else ()),
            {name: tolerance.parse(text)[0] for name, text in overrides.outputs.items()},
            {name: tolerance.parse(text) for name, text in overrides.cases.items()},
        )

    def choose(
        self, outputs: Sequence[OutputRow], precision: str, provider: str, noise: Mapping[str, float]
    ) -> dict[str, Tolerance]:
        """One for each output. UsageError as `tolerance.choose` has it."""
        rest = [output for output in outputs if output.name not in self.outputs]
        chosen = tolerance.choose(self.given, rest, precision, provider, noise) if rest or self.given else {}
        for output in outputs:
            if output.name in self.outputs:
                own = [self.outputs[output.name]]
                chosen |= tolerance.choose(own, [replace(output, secondary=False)], precision, provider, noise)
        return chosen

    def of_cases(
        self,
        names: Sequence[str],
        outputs: Sequence[OutputRow],
        precision: str,
        provider: str,
        noise: Mapping[str, float],
    ) -> dict[str, dict[str, Tolerance]]:
        """By case and output, of the cases among `names` that have tolerances of their own."""
        return {
            name: replace(self, given=own, outputs={}).choose(outputs, precision, provider, noise)
            for name, own in self.cases.items()
            if name in names
        }


def stored_probes(record: Manifest, out: Path, names: Sequence[str] | None = None) -> Probes:
    """The goldens of `out`, all or those named.

    UsageError for a name that is not there, DriftError where they are not the cases that the manifest is about.
    """
    cases, answers = golden.read(out / manifest.GOLDEN)
    if inputs.cases_sha256(cases) != record.golden.probe_sha256:
        raise DriftError(
            f"{out / manifest.GOLDEN} does not hold the cases that {manifest.FILE} is about (their hash differs); "
            "restore both"
        )
    if names is not None:
        known = {case.name for case in cases}
        unknown = [name for name in names if name not in known]
        if unknown:
            raise UsageError(f"there is no case {unknown[0]!r} in {out}; there are {', '.join(sorted(known))}")
        cases = [case for case in cases if case.name in names]
    return Probes(
        cases,
        answers,
        record.golden.not_applicable,
        record.golden.probe_sha256,
        floors(record.golden.noise),
        golden.vocabulary(out / manifest.GOLDEN),
        passages_files.read(out / manifest.GOLDEN) if passages_files.there(out / manifest.GOLDEN) else None,
    )


def judged(
    outcome: Outcome,
    record: Manifest,
    probes: Probes,
    given: Sequence[Tolerance] | Bounds,
    options: Options,
    progress: Progress,
    parent: Artifact | None = None,
) -> tuple[Outcome, Sequence[Tolerance]]:
    """Opens the outcome's artifact from disk and judges it; "not run" with the reason where it cannot run here.

    A parent that cannot be opened here is a note: the artifact's own verdict does not rest on it.
    """
    artifact = outcome.artifact
    assert artifact is not None
    above: Session | None = None
    with contextlib.ExitStack() as sessions:
        try:
            session = runtimes.open_artifact(artifact, options)
        except CannotRunHere as error:
            return replace(outcome, status="not run", reason=str(error)), ()
        except DriftError as error:
            cut = [said for path in artifact.graphs if artifact.format == "onnx" and (said := structure.cut_off(path))]
            return replace(outcome, status="drift", reason="; ".join(cut) or str(error)), ()
        sessions.callback(session.close)
        if parent is not None:
            try:
                above = runtimes.open_artifact(parent, options)
                sessions.callback(above.close)
            except (CannotRunHere, DriftError) as error:
                note = f"not compared with {parent.step}, from which it was made: {error}"
                outcome = replace(outcome, notes=(*outcome.notes, note))
        facts = models.facts_from_data(record.facts)
        agrees, verdict, used = judge(session, artifact, facts.outputs, probes, given, progress, above)
        if probes.written is not None:
            problems: list[str] = []
            try:
                written = _written(session, artifact, facts, probes.written, given, progress)
            except DriftError as error:  # a cache that goes in and does not come out
                written, problems = None, [str(error)]
            if written is not None:
                verdict["written"] = written
                problems = written["problems"]
            agrees = agrees and not problems
            verdict["structure"] = [*verdict["structure"], *problems]
    return replace(outcome, status="agrees" if agrees else "drift", reason="", verdict=verdict), used


def judge(
    session: Session,
    artifact: Artifact,
    outputs: Sequence[OutputRow],
    probes: Probes,
    given: Sequence[Tolerance] | Bounds,
    progress: Progress,
    parent: Session | None = None,
) -> tuple[bool, dict[str, Any], tuple[Tolerance, ...]]:
    """(agrees, verdict as plain data, tolerances used). `parent` adds what this step moved by itself.

    A case that the artifact refuses or fails at, where PyTorch answered, counts against it; one outside an engine's
    profile is named and not compared. Inputs and outputs that are not what they should be count, whatever the numbers.
    """
    scales = parity.scales(outputs, probes.cases, probes.answers)
    bounds = given if isinstance(given, Bounds) else Bounds(given)
    kind = (artifact.precision, session.provider, probes.noise)
    tolerances = bounds.choose(outputs, *kind)
    apart = bounds.of_cases([case.name for case in probes.cases], outputs, *kind)
    compared = parity.Judge(outputs, scales, tolerances, probes.noise, apart)
    step_alone = parity.Judge(outputs, scales, tolerances, probes.noise)
    companions = rows.Rows(probes.cases, outputs, scales, probes.noise)
    tokens = 0
    several = [c for c in probes.cases if case_axes(c)["batch"] > 1 and c.name not in probes.not_applicable]
    twice = min(several, key=case_tokens).name if several else ""
    progress.start("verify", len(probes.cases))
    asked = [case.inputs for case in probes.cases if case.name not in probes.not_applicable]
    sizes = [sum(4 * math.prod(each.shape) for each in answers.values()) for answers in probes.answers.values()]
    running = runtimes.ahead(session, asked, max(sizes, default=0))
    for case in probes.cases:
        progress.advance()
        if case.name in probes.not_applicable:
            compared.not_applicable(case.name, probes.not_applicable[case.name])
            continue
        try:
            answers = next(running)()
        except OutOfProfile as error:
            compared.not_applicable(case.name, str(error))
            continue
        except Exception as error:
            # A runtime raises whatever it likes; where PyTorch answered, that is the artifact's failure.
            compared.raised(case.name, f"{type(error).__name__}: {first_line(error)}")
            continue
        tokens += case_tokens(case)
        compared.add(case, probes.answers[case.name], answers)
        companions.add(case, answers, probes.answers[case.name])
        if case.name == twice:
            with contextlib.suppress(Exception):  # a second run that fails tells nothing of the first
                companions.again(case, answers, session.run(case.inputs), probes.answers[case.name])
        if parent is not None:
            try:
                before = parent.run(case.inputs)
            except Exception as error:  # as above
                step_alone.not_applicable(case.name, f"the parent failed: {first_line(error)}")
                continue
            step_alone.add(case, reference.whole({name: before[name] for name in answers if name in before}), answers)
    comparison = compared.comparison()
    # A trace declares no shapes; an engine is held against its sidecar when it is opened.
    graphs = [structure.onnx_graph(path) for path in artifact.graphs] if artifact.format == "onnx" else []
    problems = _structure(artifact, outputs, graphs) if graphs else []
    products = compute.count(graphs) if graphs else None
    if products is not None:
        problems += compute.problems(products, artifact.precision)
    looked_up, of_table = _vocabulary(artifact, probes, graphs)
    problems += of_table
    invariances = companions.report()
    if artifact.precision == "float32":
        problems += invariances.broken()
    verdict: dict[str, Any] = {
        "comparison": comparison.to_dict(),
        "structure": problems,
        "rows": invariances.to_dict(),
        "provider": session.provider,
        "precision": session.precision,
        "products": None if products is None else products.to_dict(),
        "cases": comparison.cases,
        "tokens": tokens,
        "probe_sha256": probes.sha256,
        "noise": dict(probes.noise),
        "case_sha256": {case.name: inputs.cases_sha256([case])[:16] for case in probes.cases},
        "vocabulary": looked_up,
        "versions": host.versions(),
        "host": host.host_facts(),
    }
    if parent is not None:
        verdict["parent_comparison"] = step_alone.comparison().to_dict()
    # What one output was given for itself is no wish for the others.
    used = tuple(bound for name, bound in tolerances.items() if name not in bounds.outputs)
    return comparison.agrees and not problems, verdict, used


def _written(
    session: Session,
    artifact: Artifact,
    facts: Facts,
    asked: Asked,
    given: Sequence[Tolerance] | Bounds,
    progress: Progress,
) -> dict[str, Any] | None:
    """The verdict on what an artifact writes with its cache; None of one that keeps none."""
    writer = runtimes.writer(session, artifact, facts)
    if writer is None:
        return None
    from nlpconvert import writing

    bounds = given.given if isinstance(given, Bounds) else given
    return writing.judge(writer, asked, artifact.precision, bounds, progress)[1]


def _vocabulary(artifact: Artifact, probes: Probes, graphs: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """How many ids were asked, of how many, and in how many tables the others were looked at; what is wrong there."""
    asked: set[int] = set()
    for case in probes.cases:
        for name, array in case.inputs.items():
            if name.endswith("input_ids"):
                asked.update(np.unique(array).tolist())
    expected = probes.vocabulary
    if expected is None:
        return {"asked": len(asked), "of": None, "tables": 0}, []
    tables, problems = 0, []
    for graph in graphs:
        try:
            found = vocabulary.tables(graph, artifact.directory, len(expected))
        except (ValueError, OSError, KeyError) as error:
            problems.append(f"its embedding table cannot be read: {first_line(error)}")
            continue
        tables += len(found)
        problems += vocabulary.problems(found, expected, artifact.precision)
    return {"asked": len(asked), "of": len(expected), "tables": tables}, problems


def _structure(artifact: Artifact, outputs: Sequence[OutputRow], graphs: Sequence[Any]) -> list[str]:
    """What is wrong with the inputs and outputs that an ONNX graph says it has, one sentence each.

    Axes that a task calls dynamic have to be, whatever was recorded when the file was made.
    """
    found = structure.onnx_specs(graphs[0])
    if artifact.made_by.get("foreign"):
        found = _in_our_names(artifact, *found)
    if cache_names.keeps(artifact.inputs):
        return _structure_with_cache(artifact, graphs)
    inputs = [replace(spec, shape=models.input_axes(spec.name, artifact.task)) for spec in artifact.inputs]
    recorded = {spec.name: spec for spec in artifact.outputs}
    expected = [_expected(row, recorded.get(row.name)) for row in outputs]
    return structure.check_specs(inputs, expected, *found)


def _structure_with_cache(artifact: Artifact, graphs: Sequence[Any]) -> list[str]:
    """Every graph against what was recorded of it, every past against the axes that it has to have."""
    inputs = [
        replace(spec, shape=cache_names.axes(spec.name, spec.shape)) if cache_names.is_past(spec.name) else spec
        for spec in artifact.inputs
    ]
    problems = structure.check_specs(inputs, artifact.outputs, *structure.onnx_specs(graphs[0]))
    for graph in graphs[1:]:
        inputs, outputs = (
            [
                TensorSpec(each["name"], each["dtype"], tuple(each["shape"]))
                for each in artifact.made_by["encoder"][kind]
            ]
            for kind in ("inputs", "outputs")
        )
        problems += structure.check_specs(inputs, outputs, *structure.onnx_specs(graph))
    return problems


def _in_our_names(
    artifact: Artifact, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """A foreign file's specs under our names: those that are compared. Its element types are its own affair."""
    made = artifact.made_by
    recorded = {spec.name: spec.dtype for spec in (*artifact.inputs, *artifact.outputs)}
    return tuple(
        tuple(
            replace(spec, name=names[spec.name], dtype=recorded.get(names[spec.name], "float32"))
            for spec in specs
            if spec.name in names and names[spec.name] in recorded
        )
        for specs, names in ((inputs, made["inputs"]), (outputs, made["outputs"]))
    )  # type: ignore[return-value]


def _expected(row: OutputRow, recorded: TensorSpec | None) -> TensorSpec:
    if recorded is None or len(recorded.shape) != len(row.axes):
        return TensorSpec(row.name, "float32" if recorded is None else recorded.dtype, row.axes)
    axes = zip(row.axes, recorded.shape, strict=True)
    return replace(recorded, shape=tuple(axis if axis in profiles.AXIS_ORDER else size for axis, size in axes))

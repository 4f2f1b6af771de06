"""Floor 3: which module of an artifact moved first, held against what it was made from.

Two passes of the reference on the same batch: an undisturbed one, and one in which every tensor that could be matched
is replaced by the candidate's, so that each module shows what it alone adds. Between two ONNX files neither torch nor
the model is needed. Graphs run in pieces and tensors past a limit go to disk, so that no model is ever held whole
beside another. What the numbers mean is `validators/located`.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import against_model, cache_names, judging, manifest, memory, pairs, plan
from nlpconvert.artifact import Artifact
from nlpconvert.errors import CannotRunHere, DriftError, UsageError
from nlpconvert.inputs import Case, case_tokens
from nlpconvert.manifest import Manifest
from nlpconvert.pieces import Tally, Work
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, Silent
from nlpconvert.validators import located
from nlpconvert.validators.located import Located

if TYPE_CHECKING:
    import torch

    from nlpconvert.convert.matching import Pair
    from nlpconvert.convert.tapping import Graph

CASES = 3
SHORT = 1024
"""A case of more tokens is not taken unasked, unless it is the worst."""
PYTORCH = "pytorch"


# ---- the public functions -------------------------------------------------------------------------------------------


def locate(
    out: Path | str,
    step: str,
    *,
    against: str | None = None,
    model: str | None = None,
    cases: Sequence[str] | None = None,
    verdict: Mapping[str, Any] | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Located:
    """Which module of `step` moved first, against the step it was made from, another ONNX step, or the model.

    `cases`: names; None for the one that drifted most by `verdict` (the recorded one where none is given) and a few of
    middle size. UsageError for a name that is not
    there, a step without a model to hold it against, or another model than the one that `out` was made from;
    CannotRunHere where the inner tensors cannot be had; DriftError for a file that is not what its hash says.
    """
    options, progress, out = options or Options(), progress or Silent(), Path(out)
    plan.check_words(options)
    record = manifest.read(out)
    plan.check_step_names([step], tuple(record.steps), f"in {out} there is")
    changed = manifest.tampered(record, manifest.GOLDEN, out)
    if changed:
        raise DriftError(f"{out}: {changed[0]} since it was recorded, so nothing can be judged by it; restore it")
    notes: list[str] = []
    artifact = _artifact(record, step, out, notes)
    other = _other(record, artifact, against, model)
    probes = judging.stored_probes(record, out, cases)
    asked = [case for case in probes.cases if case.name not in probes.not_applicable]
    if cases is None:
        asked = choose(asked, verdict or record.record(step).outcome.verdict)
    if not asked:
        raise UsageError(f"none of the cases can be asked: PyTorch itself cannot answer {', '.join(cases or ())}")
    with contextlib.ExitStack() as pairs_open:
        one = pairs_open.enter_context(pairs.as_one(artifact))
        if other != PYTORCH:
            parent = pairs_open.enter_context(pairs.as_one(_artifact(record, other, out, notes)))
            result = between(one, parent, asked, options=options, progress=progress)
        else:
            assert model is not None
            load, above = _loader(record, model, options), _named_after(record, artifact, out)
            names = None if above is None else pairs_open.enter_context(pairs.as_one(above))
            result = with_model(one, load, asked, names=names, options=options, progress=progress)
    return replace(result, notes=(*notes, *result.notes))


def between(
    candidate: Artifact,
    reference: Artifact,
    cases: Sequence[Case],
    *,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Located:
    """Two ONNX files, held against each other module by module: onnxruntime is all that is needed.

    CannotRunHere where one of them is no ONNX file, or no tensor of the two can be matched; DriftError where the
    candidate answers no case.
    """
    from nlpconvert.convert import matching, tapping

    options, progress = options or Options(), progress or Silent()
    for each in (candidate, reference):
        _refuse_hidden(each)
    theirs, ours = tapping.read(candidate.path), tapping.read(reference.path)
    pairs, unmatched = matching.match(ours, theirs)
    if not pairs:
        raise CannotRunHere(
            f"{candidate.step} and {reference.step} have no inner tensor in common by name or by recorded module, so "
            f"no module can be told apart (unmatched: {', '.join(unmatched[:3])}, ...)"
        )
    with tempfile.TemporaryDirectory(prefix="nlpconvert-locate-") as scratch:
        work = Work(options, progress, Path(scratch), list(cases))
        progress.start("locate", 3 * len(pairs))
        work.own(theirs, [pair.candidate for pair in pairs], "candidate", candidate.precision)
        work.answered(candidate.step)
        tallies = {pair.reference: Tally(pair.module, pair.candidate) for pair in pairs}

        def arrived(name: str, case: Case, array: np.ndarray) -> None:
            tally = tallies[name]
            key = ("candidate", tally.tensor, case.name)
            tally.add(tally.arrives, case, array, work.store.get(key))
            if tally.fits and work.store.get(key).shape != array.shape:
                work.store.keep(key, work.store.get(key).reshape(array.shape))

        work.own(ours, list(tallies), "reference", reference.precision, arrived)
        work.answered(reference.step)
        work.store.drop("reference")
        fitting = {name: tally for name, tally in tallies.items() if tally.fits}
        work.introduced(ours, fitting, reference.precision)
        work.answered(reference.step)
    unmatched += [tally.label for tally in tallies.values() if not tally.fits]
    result = located.located(
        candidate.step,
        reference.step,
        [case.name for case in work.cases],
        [tally.moved() for tally in fitting.values()],
        {
            name: fitting[name].arrives.relative
            for name in ours.outputs()
            if name in fitting and not cache_names.is_present(name)
        },
        dict.fromkeys(unmatched),
        work.notes,
    )
    return _explained(result, theirs, ours, [pair for pair in pairs if pair.reference in fitting])


def _explained(result: Located, candidate: Graph, reference: Graph, pairs: Sequence[Pair]) -> Located:
    """With a note for each difference that the two files themselves show in the modules that stand out.

    A tensor that moved by the weight of one of its module's parts alone is that part's, wherever fusing has put it.
    """
    from nlpconvert.convert import matching

    notes, modules = list(result.notes), list(result.modules)
    names: dict[str, Any] = {"first": result.first, "most": result.most}
    for key, module in names.items():
        moved = result.of(module)
        pair = next((each for each in pairs if moved is not None and each.candidate == moved.tensor), None)
        if moved is None or pair is None:
            continue
        found, owners = matching.differences(reference, candidate, pair, pairs)
        notes += [f"{module}: {sentence}" for sentence in found]
        owner = owners.pop() if len(owners) == 1 else ""
        if owner.startswith(f"{module}."):
            names[key] = owner
            modules[result.modules.index(moved)] = replace(moved, module=names[key])
    return replace(result, modules=tuple(modules), notes=tuple(dict.fromkeys(notes)), **names)


def with_model(
    candidate: Artifact,
    load: Callable[[], torch.nn.Module],
    cases: Sequence[Case],
    *,
    names: Artifact | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Located:
    """An ONNX or TorchScript file against the model in PyTorch, which `load` gives once the file is closed again.

    `names`: the exported ONNX file that a derived one was made from, whose recorded modules name its tensors. Raises
    as `between` does.
    """
    options, progress = options or Options(), progress or Silent()
    if candidate.format == "tensorrt":
        _refuse_hidden(candidate)
    with tempfile.TemporaryDirectory(prefix="nlpconvert-locate-") as scratch:
        work = Work(options, progress, Path(scratch), list(cases))
        progress.start("locate", 4 * len(work.cases))
        tapped, trace = against_model.Tapped(), against_model.Trace()
        if candidate.format == "torchscript":
            trace = against_model.traced(work, candidate)
        else:
            tapped = against_model.tapped(work, candidate, names)
        work.answered(candidate.step)
        memory.give_back()
        held = against_model.Held(work, load(), tapped.tensors, trace)
        for case in list(work.cases):
            held.ask(case)
    work.answered(PYTORCH)
    tallies = held.tallies()
    if not tallies:
        raise CannotRunHere(f"no inner tensor of {candidate.step} can be matched to a module of the model")
    result = located.located(
        candidate.step,
        PYTORCH,
        [case.name for case in work.cases],
        [tally.moved() for tally in tallies],
        held.at_outputs(),
        dict.fromkeys([*tapped.unmatched, *held.unmatched()]),
        work.notes,
    )
    return result if tapped.files is None else _explained(result, *tapped.files)


def choose(cases: Sequence[Case], verdict: Mapping[str, Any] | None) -> list[Case]:
    """The case that used up most of its tolerance by a recorded verdict, and padded ones of middle size: CASES."""
    used: dict[str, float] = {}
    for output in ((verdict or {}).get("comparison") or {}).get("outputs", ()):
        for name, drift in (output.get("cases") or {}).items():
            used[name] = max(used.get(name, 0.0), float(drift.get("used", 0.0)))
    by_name = {case.name: case for case in cases}
    worst = [by_name[name] for name in sorted(used, key=lambda n: -used[n]) if name in by_name and used[name] > 0][:1]
    short = [case for case in cases if case_tokens(case) <= SHORT and case not in worst] or list(cases)
    ordered = sorted((case for case in short if case not in worst), key=lambda case: (_padded(case), case_tokens(case)))
    ordered = [case for case in ordered if _padded(case)] or ordered
    wanted = CASES - len(worst)
    start = max(0, (len(ordered) - wanted) // 2)
    return worst + ordered[start : start + wanted]


def _padded(case: Case) -> bool:
    """Whether a case has a mask with both real and padded places, and several rows."""
    masks = [array for name, array in case.inputs.items() if name.endswith("mask")]
    return any(len(mask) > 1 and (mask == 0).any() and (mask == 1).any() for mask in masks)


# ---- what is held against what --------------------------------------------------------------------------------------


def _artifact(record: Manifest, step: str, out: Path, notes: list[str]) -> Artifact:
    """A step's artifact as it lies there. What has changed since it was recorded may be what is looked for: a note."""
    plan.check_step_names([step], tuple(record.steps), f"in {out} there is")
    artifact = record.artifact(step, out)
    notes += [f"{line} since it was recorded" for line in manifest.tampered(record, step, out)[:3]]
    return artifact


def _other(record: Manifest, artifact: Artifact, against: str | None, model: str | None) -> str:
    """The step to hold an artifact against, or PYTORCH. UsageError where the model is needed and not given."""
    if against is not None and against not in ("source", PYTORCH):
        if model is not None:
            raise UsageError(f"--against {against} and --model were both given: hold {artifact.step} against one")
        if against == artifact.step:
            raise UsageError(f"--against {against}: that is the step itself")
        return against
    if model is None and (against is not None or artifact.parent == "source"):
        known = record.source.get("path") or record.source.get("model")
        raise UsageError(
            f"{artifact.step} was made from the model itself: give the model with --model{f' {known}' if known else ''}"
        )
    return PYTORCH if model is not None else artifact.parent


def _refuse_hidden(artifact: Artifact) -> None:
    """CannotRunHere for what does not show its inner tensors between two files."""
    if artifact.format == "tensorrt":
        raise CannotRunHere(
            f"a TensorRT engine hides its inner tensors: locate {artifact.parent}, from which {artifact.step} was made "
            f"(nlpconvert locate OUT --step {artifact.parent})"
        )
    if artifact.format != "onnx":
        raise CannotRunHere(f"{artifact.step} is no ONNX file: hold it against the model, with --model")


def _named_after(record: Manifest, artifact: Artifact, out: Path) -> Artifact | None:
    """The exported ONNX step that a derived one comes from, where it is there."""
    above = artifact
    while above.parent != "source":
        kept = record.steps.get(above.parent)
        if kept is None or kept.outcome.artifact is None:
            return None
        above = record.artifact(above.parent, out)
    return above if above.format == "onnx" and above.step != artifact.step and above.path.is_file() else None


def _loader(record: Manifest, model: str, options: Options) -> Callable[[], torch.nn.Module]:
    """Loads the model that `out` was made from. UsageError, before anything is loaded, where it is another one."""
    from nlpconvert import source

    revision = options.revision or record.source.get("revision")
    info = source.describe(model, revision=revision, task=record.task)
    if info.sha256 != record.source_sha256:
        raise UsageError(
            f"{model} is checkpoint {info.sha256[:12]}, not {record.source_sha256[:12]}, from which the steps were made"
        )

    def load() -> torch.nn.Module:
        whole = replace(options, revision=revision, task=record.task, allow_missing_weights=True)
        return source.load(model, **whole.loading()).module

    return load

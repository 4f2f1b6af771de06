"""Floor 3: what a Triton repository of ours holds: read back, held against the artifact, and what both must agree on.

Writing one is `repository`; asking the server that serves it is `serving`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nlpconvert import disk, manifest, models
from nlpconvert.artifact import Artifact
from nlpconvert.errors import DriftError, UsageError
from nlpconvert.manifest import Manifest
from nlpconvert.models import Facts
from nlpconvert.triton import plan
from nlpconvert.triton.plan import PYTHON, Tensor

SIDECAR = "nlpconvert-triton.json"
LABELS = "labels.txt"


def served_tensors(artifact: Artifact, facts: Facts, *, ragged: bool) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Inputs and outputs of the served model; `ragged` where it pads mixed lengths itself."""
    inputs, outputs = plan.asked(artifact, facts)
    padded = set(plan.padded_axes(inputs, artifact.encoder is not None))
    labelled = bool(labels(artifact, facts))
    return (
        tuple(
            Tensor(spec.name, spec.dtype, plan.dims(spec), ragged and bool(padded & set(spec.shape))) for spec in inputs
        ),
        tuple(Tensor(spec.name, spec.dtype, plan.dims(spec), labels=LABELS if labelled else "") for spec in outputs),
    )


def labels(artifact: Artifact, facts: Facts) -> list[str]:
    """One label for each of a text classifier's logits, from the config beside it; none where it names none."""
    if facts.task != "text-classification" or len(artifact.outputs) != 1:
        return []
    named = json_beside(artifact.directory / "config.json").get("id2label")
    size = artifact.outputs[0].shape[-1]
    if not isinstance(named, Mapping) or sorted(map(str, range(len(named)))) != sorted(named) or len(named) != size:
        return []
    return [str(named[str(number)]).replace("\n", " ") for number in range(len(named))]


def artifact_files(artifact: Artifact) -> list[str]:
    """What a runtime opens, main file first: graphs, and the weights beside them. DriftError: one is missing."""
    names = [path.name for path in artifact.graphs]
    if artifact.format == "onnx":
        from nlpconvert.validators import structure

        for path in artifact.graphs:
            names += [name for name in structure.onnx_data_files(structure.onnx_graph(path)) if name not in names]
    missing = [name for name in names if name not in artifact.files]
    if missing:
        raise DriftError(f"{artifact.path} needs {missing[0]}, which is no file of {artifact.step}; make it again")
    return names


def json_beside(path: Path) -> dict[str, Any]:
    """An object beside the artifact; empty where there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# ---- reading --------------------------------------------------------------------------------------------------------


def read(repo: Path) -> dict[str, Any]:
    """The sidecar of a repository. UsageError: there is none, or it is not one of ours."""
    path = repo / SIDECAR
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UsageError(
            f"{repo} holds no {SIDECAR}: make it with `nlpconvert triton OUT --step S -o {repo}`"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); make the repository again") from error
    kinds = {"step": str, "sha256": str, "name": str, "backend": str, "models": list, "files": dict, "batching": dict}
    for key, kind in kinds.items():
        if not isinstance(data, dict) or not isinstance(data.get(key), kind):
            raise UsageError(f"{path}: {key} is missing or of another kind; make the repository again")
    return dict(data)


def one_step(out: Path, step: str | None) -> str:
    """The step that is meant: the one named, or the only one. UsageError where it has to be named."""
    record = manifest.read(out)
    made = [name for name, kept in record.steps.items() if kept.outcome.artifact is not None]
    if step is None and len(made) != 1:
        raise UsageError(f"which artifact is to be served? give --step: {', '.join(made) or 'none was made yet'}")
    chosen = step or made[0]
    record.record(chosen)
    return chosen


def check_step(repo: Path, step: str | None) -> None:
    """UsageError for a repository of another step than the one named."""
    side = read(repo)
    if step not in (None, side["step"]):
        raise UsageError(f"{repo} serves {side['step']}, not {step}; write one of {step} with --force and no --check")


def examine(repo: Path, record: Manifest, out: Path) -> list[str]:
    """What is wrong with a repository before any server is asked, one sentence each; none when it is sound.

    Files against the sidecar's hashes, configurations against the artifact: names, types, dims, files beside it.
    """
    from nlpconvert.triton import config as triton_config

    side = read(repo)
    found: list[str] = []
    artifact = record.artifact(side["step"], out)
    if artifact.sha256 != side["sha256"]:
        found.append(f"it was written from another {side['step']} ({side['sha256'][:12]}) than {out} holds now")
    name = side["name"]
    try:
        config = triton_config.read(disk.inside(repo, f"{name}/{triton_config.FILE}"))
    except DriftError as error:
        return [*found, str(error), *_changed(repo, side)]
    if config.name not in ("", name):
        found.append(f"{name}/{triton_config.FILE} names the model {config.name}, and its folder is {name}")
    facts = models.facts_from_data(record.facts)
    expected = served_tensors(artifact, facts, ragged=False)
    for kind, want, have in zip(("input", "output"), expected, (config.inputs, config.outputs), strict=True):
        found += [f"{name}/{triton_config.FILE}: {line}" for line in differences(kind, want, have)]
    files = artifact_files(artifact)
    if side["backend"] in ("onnxruntime", PYTHON):
        found += [
            f"{name}/1/{file} is missing, and the model is opened with it"
            for file in files
            if not (repo / name / "1" / file).is_file()
        ]
    profile = plan.profile(artifact)
    if profile is not None and config.max_batch > profile.max.get("batch", 1):
        found.append(f"max_batch_size {config.max_batch} is over the engine's profile")
    return [*found, *_changed(repo, side)]


def _changed(repo: Path, side: Mapping[str, Any]) -> list[str]:
    """Which files are not those that were written."""
    found: list[str] = []
    there = disk.hash_tree(repo)
    # Triton's own Python leaves its caches beside what it loads.
    there = {name: digest for name, digest in there.items() if name != SIDECAR and "__pycache__/" not in name}
    recorded = side["files"]
    for name in sorted({*recorded, *there}):
        if recorded.get(name) != there.get(name):
            how = "is missing" if name not in there else "was added" if name not in recorded else "has changed"
            found.append(f"{name} {how} since it was written")
    return found


def differences(kind: str, expected: Iterable[Tensor], found: Iterable[Tensor]) -> list[str]:
    """How tensors differ from those that the artifact has: names, types, dims; one sentence each."""
    want, have = ({tensor.name: tensor for tensor in tensors} for tensors in (expected, found))
    lines = [f"{kind} {name} is missing" for name in want if name not in have]
    lines += [f"{kind} {name} is none of the artifact's ({', '.join(want)})" for name in have if name not in want]
    for name in want.keys() & have.keys():
        if have[name].dtype != want[name].dtype:
            lines.append(f"{kind} {name} is {have[name].dtype}, the artifact's {want[name].dtype}")
        a, b = have[name].dims, want[name].dims
        if len(a) != len(b) or any(x != y and -1 not in (x, y) for x, y in zip(a, b, strict=True)):
            lines.append(f"{kind} {name} has dims {list(a)}, the artifact's {list(b)}")
        elif any(x != -1 and y == -1 for x, y in zip(a, b, strict=True)):
            lines.append(f"{kind} {name} has dims {list(a)} where the artifact takes any size: {list(b)}")
    return sorted(lines)


def check_place(repo: Path, out: Path, force: bool) -> None:
    """UsageError for a place that holds something that nobody asked to be replaced."""
    place, home = repo.resolve(), out.resolve()
    if place == home or home in place.parents or place in home.parents:
        raise UsageError(f"-o {repo}: give the repository a directory of its own, beside {out}")
    if not repo.exists():
        return
    if not repo.is_dir():
        raise UsageError(f"{repo} is not a directory")
    if not any(repo.iterdir()):
        return
    if not (repo / SIDECAR).is_file():
        raise UsageError(f"{repo} holds files that are not of a repository made here; give a directory of its own")
    if not force:
        raise UsageError(f"{repo} is there already; --force replaces it, --check asks it")

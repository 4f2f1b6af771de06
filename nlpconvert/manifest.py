"""Floor 0: the manifest, OUT/nlpconvert.json: what lies in OUT, where it came from and what was measured.

Its types, its schema, reading and writing it, and whether what lies in OUT is still what it says. How files are
swapped, locked and hashed is `disk`; what the facts and verdicts mean is their makers' business: here they are plain.

A manifest may come from a stranger's pull request: every field is checked when it is read, every path when it is used.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import nlpconvert
from nlpconvert import disk
from nlpconvert.artifact import STEPS, Artifact, Outcome, TensorSpec
from nlpconvert.errors import UsageError

FILE = "nlpconvert.json"
GOLDEN = "golden"
SCHEMA = 2
"""2 added `golden.noise`."""
OLDEST = 1

T = TypeVar("T")
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


# --- types -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Golden:
    """What OUT/golden holds. `cases` are rows for people ({name, about, tokens, sampled}), in order."""

    files: Mapping[str, str]
    cases: tuple[Mapping[str, Any], ...] = ()
    probe_sha256: str = ""
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    """Case name to why PyTorch itself cannot answer it."""
    noise: Mapping[str, Any] = field(default_factory=dict)
    """The reference's noise floor, as `noise.Noise.to_dict` has it; empty where it was not measured."""


@dataclass(frozen=True)
class Record:
    """One step as the manifest keeps it. The paths in `outcome` are relative to OUT.

    `stale`: what it was made from has been replaced since. `tolerances` and `options`: plain JSON values.
    """

    outcome: Outcome
    stale: bool = False
    tolerances: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """Everything in OUT/nlpconvert.json. `source` holds at least `sha256` (of the checkpoint) and `task`."""

    source: Mapping[str, Any]
    facts: Mapping[str, Any]
    golden: Golden
    host: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    steps: Mapping[str, Record] = field(default_factory=dict)
    nlpconvert: str = nlpconvert.__version__
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def source_sha256(self) -> str:
        """Hash of the checkpoint."""
        return str(self.source["sha256"])

    @property
    def task(self) -> str:
        """The task that the model is converted for."""
        return str(self.source["task"])

    def record(self, step: str) -> Record:
        """The record of a step; UsageError, naming those there are, when there is none."""
        if step not in self.steps:
            raise UsageError(f"there is no step {step!r} here; there is {', '.join(self.steps) or 'none yet'}")
        return self.steps[step]

    def artifact(self, step: str, out: Path) -> Artifact:
        """The artifact of a step, its path below `out`. UsageError: none was made, or a path leads out of `out`."""
        made = self.record(step).outcome.artifact
        if made is None:
            outcome = self.steps[step].outcome
            raise UsageError(f"{step} holds no artifact: {outcome.status}{outcome.reason and ', ' + outcome.reason}")
        directory = disk.inside(out, step)
        for name in made.files:
            disk.inside(directory, name)
        return dataclasses.replace(made, path=directory / made.path.name)

    def outcome(self, step: str, out: Path) -> Outcome:
        """The recorded outcome of a step, its artifact's path below `out`."""
        kept = self.record(step).outcome
        return kept if kept.artifact is None else dataclasses.replace(kept, artifact=self.artifact(step, out))

    def with_step(
        self,
        outcome: Outcome,
        *,
        tolerances: Iterable[Any] = (),
        options: Mapping[str, Any] | None = None,
        stale: bool | None = None,
    ) -> Manifest:
        """A manifest in which `outcome` is the step's record.

        When its files differ from those recorded before, all that was made from them becomes stale. `stale` None: a
        reused artifact stays as stale as it was, a new one is not.
        """
        before = self.steps.get(outcome.step)
        if stale is None:
            stale = outcome.reused and before is not None and before.stale
        artifact = outcome.artifact
        if artifact is not None:
            # Wherever it lies now (it may still be aside), its place is OUT/<step>.
            artifact = dataclasses.replace(artifact, path=Path(outcome.step) / artifact.path.name)
        record = Record(dataclasses.replace(outcome, artifact=artifact), stale, tuple(tolerances), dict(options or {}))
        changed = before is not None and _files(before.outcome) != _files(outcome)
        earlier = self.mark_stale(outcome.step) if changed else self
        return dataclasses.replace(earlier, steps={**earlier.steps, outcome.step: record})

    def made_from(self, step: str) -> tuple[str, ...]:
        """Every step that was made from `step`, directly or through others."""
        reached = {step}
        while True:
            more = {
                name
                for name, record in self.steps.items()
                if record.outcome.artifact is not None and record.outcome.artifact.parent in reached
            } - reached
            if not more:
                return tuple(name for name in self.steps if name in reached and name != step)
            reached |= more

    def mark_stale(self, step: str) -> Manifest:
        """A manifest in which everything made from `step` is stale; `step` itself is left as it is."""
        stale = self.made_from(step)
        steps = {
            name: dataclasses.replace(record, stale=True) if name in stale else record
            for name, record in self.steps.items()
        }
        return dataclasses.replace(self, steps=steps)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, in the order in which a person reads them."""
        return {
            "nlpconvert": self.nlpconvert,
            "schema": SCHEMA,
            "created": self.created,
            "source": self.source,
            "facts": self.facts,
            "golden": {
                "files": self.golden.files,
                "cases": self.golden.cases,
                "probe_sha256": self.golden.probe_sha256,
                "not_applicable": self.golden.not_applicable,
                "noise": self.golden.noise,
            },
            "host": self.host,
            "versions": self.versions,
            "steps": {
                name: {
                    **outcome_to_json(record.outcome),
                    "stale": record.stale,
                    "tolerances": record.tolerances,
                    "options": record.options,
                }
                for name, record in self.steps.items()
            },
        }

    def write(self, out: Path) -> None:
        """Write OUT/nlpconvert.json, by rename. It is the last thing to be written."""
        disk.write_json_atomic(out / FILE, self.to_json())


def _files(outcome: Outcome) -> Mapping[str, str] | None:
    return None if outcome.artifact is None else outcome.artifact.files


# --- to JSON and back ------------------------------------------------------------------------------------------------


def spec_to_json(spec: TensorSpec) -> dict[str, Any]:
    """A tensor's description as JSON values."""
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)}


def artifact_to_json(artifact: Artifact) -> dict[str, Any]:
    """An artifact as JSON values; its path is `<step>/<file>`, relative to OUT."""
    return {
        "step": artifact.step,
        "path": f"{artifact.step}/{artifact.path.name}",
        "format": artifact.format,
        "precision": artifact.precision,
        "task": artifact.task,
        "inputs": [spec_to_json(spec) for spec in artifact.inputs],
        "outputs": [spec_to_json(spec) for spec in artifact.outputs],
        "files": artifact.files,
        "parent": artifact.parent,
        "parent_sha256": artifact.parent_sha256,
        "made_by": artifact.made_by,
    }


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as JSON values."""
    return {
        "step": outcome.step,
        "status": outcome.status,
        "reason": outcome.reason,
        "artifact": None if outcome.artifact is None else artifact_to_json(outcome.artifact),
        "verdict": outcome.verdict,
        "seconds": outcome.seconds,
        "bytes": outcome.bytes,
        "reused": outcome.reused,
        "notes": list(outcome.notes),
    }


_KINDS: dict[type, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "an object", list: "a list"
}  # fmt: skip


def _get(data: Mapping[str, Any], key: str, kind: type[T], at: str) -> T:
    """`data[key]` when it is there and of that JSON type; else a UsageError that names the field."""
    if key not in data:
        raise UsageError(f"{at}.{key} is missing")
    return _typed(data[key], kind, f"{at}.{key}")


def _typed(value: Any, kind: type[T], at: str) -> T:
    wanted: tuple[type, ...] = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{at} has to be {_KINDS[kind]}, and is {json.dumps(value)[:40]}")
    return value  # type: ignore[return-value]  # an int stands for a float


def _texts(data: Mapping[str, Any], key: str, at: str) -> dict[str, str]:
    """An object whose values are all texts."""
    return {name: _typed(value, str, f"{at}.{key}.{name}") for name, value in _get(data, key, dict, at).items()}


def _hashes(data: Mapping[str, Any], key: str, at: str) -> dict[str, str]:
    """Hashes by relative path. Only the words are looked at here; links are followed when a path is used."""
    files = _texts(data, key, at)
    for name in files:
        if not name or name.startswith("/") or "\0" in name or {"", ".", ".."} & set(name.split("/")):
            raise UsageError(f"{at}.{key}: {name!r} is not a path inside its directory")
    return files


def spec_from_json(data: Any, at: str = "spec") -> TensorSpec:
    """The reverse of `spec_to_json`; UsageError names the field that is wrong."""
    _typed(data, dict, at)
    shape = _get(data, "shape", list, at)
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int | str):
            raise UsageError(f"{at}.shape has to hold numbers and names, and holds {json.dumps(size)[:40]}")
    return TensorSpec(_get(data, "name", str, at), _get(data, "dtype", str, at), tuple(shape))


def artifact_from_json(data: Any, at: str = "artifact") -> Artifact:
    """The reverse of `artifact_to_json`, with the path relative to OUT; UsageError names the field that is wrong."""
    _typed(data, dict, at)
    step, path, format_ = (_get(data, key, str, at) for key in ("step", "path", "format"))
    if not _SLUG.fullmatch(step) or step == GOLDEN:
        raise UsageError(f"{at}.step: {step!r} cannot be the name of a step")
    files = _hashes(data, "files", at)
    name = path.removeprefix(f"{step}/")
    if name == path or "/" in name or name not in files:
        raise UsageError(f"{at}.path: {path!r} is not one of the files of the step's own directory")
    # It chooses the code that opens the file.
    if format_ not in {row.format for row in STEPS.values()}:
        raise UsageError(f"{at}.format: {format_!r} is not known to nlpconvert {nlpconvert.__version__}")
    specs = {
        key: tuple(spec_from_json(spec, f"{at}.{key}[{i}]") for i, spec in enumerate(_get(data, key, list, at)))
        for key in ("inputs", "outputs")
    }
    return Artifact(
        step=step,
        path=Path(path),
        format=format_,
        precision=_get(data, "precision", str, at),
        task=_get(data, "task", str, at),
        inputs=specs["inputs"],
        outputs=specs["outputs"],
        files=files,
        parent=_get(data, "parent", str, at),
        parent_sha256=_get(data, "parent_sha256", str, at),
        made_by=_get(data, "made_by", dict, at),
    )


def outcome_from_json(data: Any, at: str = "outcome") -> Outcome:
    """The reverse of `outcome_to_json`; UsageError names the field that is wrong."""
    _typed(data, dict, at)
    outcome = Outcome(
        step=_get(data, "step", str, at),
        status=_get(data, "status", str, at),
        reason=_get(data, "reason", str, at),
        artifact=None if data.get("artifact") is None else artifact_from_json(data["artifact"], f"{at}.artifact"),
        verdict=None if data.get("verdict") is None else _typed(data["verdict"], dict, f"{at}.verdict"),
        seconds=_get(data, "seconds", float, at),
        bytes=_get(data, "bytes", int, at),
        reused=_get(data, "reused", bool, at),
        notes=tuple(_typed(note, str, f"{at}.notes") for note in _get(data, "notes", list, at)),
    )
    try:
        _ = outcome.exit_code
    except KeyError:
        raise UsageError(f"{at}.status: {outcome.status!r} is not a status") from None
    if outcome.artifact is not None and outcome.artifact.step != outcome.step:
        raise UsageError(f"{at}.artifact.step: {outcome.artifact.step!r} stands under {outcome.step!r}")
    return outcome


def from_json(data: Any, at: str = "manifest") -> Manifest:
    """The reverse of `Manifest.to_json`. UsageError: another schema, or a field that is missing or of a wrong type."""
    _typed(data, dict, at)
    made_with = _get(data, "nlpconvert", str, at)
    schema = _get(data, "schema", int, at)
    if schema > SCHEMA:
        raise UsageError(
            f"{at} was made by a newer nlpconvert ({made_with}, schema {schema}; this is {nlpconvert.__version__}, "
            f"schema {SCHEMA}); upgrade nlpconvert"
        )
    if schema < OLDEST:
        raise UsageError(
            f"{at} was made by an older nlpconvert ({made_with}, schema {schema}; this is {nlpconvert.__version__}, "
            f"schema {SCHEMA}); run the conversion again into a new directory, or use that version"
        )
    source, golden = _get(data, "source", dict, at), _get(data, "golden", dict, at)
    for key in ("sha256", "task"):
        _get(source, key, str, f"{at}.source")
    steps: dict[str, Record] = {}
    for name, kept in _get(data, "steps", dict, at).items():
        here = f"{at}.steps.{name}"
        steps[name] = Record(
            outcome=outcome_from_json(kept, here),
            stale=_get(kept, "stale", bool, here),
            tolerances=tuple(_get(kept, "tolerances", list, here)),
            options=_get(kept, "options", dict, here),
        )
        if steps[name].outcome.step != name:
            raise UsageError(f"{here}.step: {steps[name].outcome.step!r} stands under {name!r}")
    return Manifest(
        source=source,
        facts=_get(data, "facts", dict, at),
        golden=Golden(
            files=_hashes(golden, "files", f"{at}.golden"),
            cases=tuple(
                _typed(case, dict, f"{at}.golden.cases") for case in _get(golden, "cases", list, f"{at}.golden")
            ),
            probe_sha256=_get(golden, "probe_sha256", str, f"{at}.golden"),
            not_applicable=_texts(golden, "not_applicable", f"{at}.golden"),
            noise=_noise(golden, f"{at}.golden") if schema > 1 else {},
        ),
        host=_get(data, "host", dict, at),
        versions=_texts(data, "versions", at),
        steps=steps,
        nlpconvert=made_with,
        created=_get(data, "created", str, at),
    )


def _noise(golden: Mapping[str, Any], at: str) -> dict[str, Any]:
    """`golden.noise`: empty, or by output numbers from 0 to below 1."""
    noise = _get(golden, "noise", dict, at)
    if not noise:
        return {}
    for name, found in _get(noise, "outputs", dict, f"{at}.noise").items():
        for part, value in _typed(found, dict, f"{at}.noise.outputs.{name}").items():
            if not 0 <= _typed(value, float, f"{at}.noise.outputs.{name}.{part}") < 1:
                raise UsageError(f"{at}.noise.outputs.{name}.{part} is {value}: noise is from 0 to below 1")
        _get(found, "floor", float, f"{at}.noise.outputs.{name}")
    _get(noise, "float64", str, f"{at}.noise")
    return noise


def broken_chain(manifest: Manifest, step: str) -> str:
    """Why a step's record does not follow from the one it was made from, in one sentence; "" when it does."""
    made = manifest.record(step).outcome.artifact
    if made is None:
        return ""
    if made.parent == "source":
        above = manifest.source_sha256
    else:
        parent = manifest.steps.get(made.parent)
        above = "" if parent is None or parent.outcome.artifact is None else parent.outcome.artifact.sha256
    return "" if above == made.parent_sha256 else f"{step} was made from another {made.parent} than the one recorded"


def read(out: Path) -> Manifest:
    """The manifest of `out`. UsageError: there is none, it is not JSON, of another schema, or a field is wrong."""
    return read_file(
        disk.inside(out, FILE),
        missing=f"{out} holds no {FILE}; give a directory that `nlpconvert run` has made",
        advice="restore it, or run again into a new directory",
    )


def read_file(path: Path, *, missing: str, advice: str) -> Manifest:
    """A manifest by its own path. UsageError as `read` has it: `missing` where there is no file, `advice` where it is
    not JSON."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(missing) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}); {advice}") from error
    return from_json(data, str(path))


# --- is what lies there what the manifest says? ----------------------------------------------------------------------


def check_out(out: Path, source_sha256: str, task: str) -> Manifest | None:
    """The manifest of an `out` that this source may be added to; None when there is nothing in it yet.

    UsageError: not a directory, not empty and without a manifest, or the home of another source or task. A golden alone
    is what a first run leaves that was stopped before its manifest: it counts as nothing. Call `disk.repair` first.
    """
    if not out.exists():
        return None
    if not out.is_dir():
        raise UsageError(f"{out} is not a directory; give another one")
    names = {entry.name for entry in out.iterdir() if not disk.is_bookkeeping(entry.name)}
    if FILE not in names:
        if names <= {GOLDEN}:
            return None
        raise UsageError(f"{out} is not empty and holds no {FILE}; give a new directory or an earlier run's")
    manifest = read(out)
    if (manifest.source_sha256, manifest.task) != (source_sha256, task):
        there = f"{manifest.task} of checkpoint {manifest.source_sha256[:12]}"
        raise UsageError(f"{out} holds {there}, not {task} of checkpoint {source_sha256[:12]}; give another directory")
    return manifest


def tampered(manifest: Manifest, step: str, out: Path) -> list[str]:
    """What differs, file by file, between a step's directory (or "golden") and its recorded hashes: lines, or none."""
    if step == GOLDEN:
        directory, recorded = disk.inside(out, GOLDEN), manifest.golden.files
    else:
        artifact = manifest.artifact(step, out)
        directory, recorded = artifact.directory, artifact.files
    try:
        found = disk.hash_tree(directory) if directory.is_dir() else {}
    except UsageError as error:  # a link that leads out, a device
        return [str(error)]
    return [
        f"{step}/{name} {'is missing' if name not in found else 'was added' if name not in recorded else 'has changed'}"
        for name in sorted({*recorded, *found})
        if recorded.get(name) != found.get(name)
    ]


def reasons_to_rebuild(manifest: Manifest, step: str, out: Path) -> list[str]:
    """Why a recorded artifact cannot be used as it lies there, as lines; empty when it can."""
    if step not in manifest.steps:
        return [f"{step} has not been made yet"]
    record = manifest.steps[step]
    made = record.outcome.artifact
    if made is None:
        return [f"{step} was not made: {record.outcome.status}"]
    reasons = [f"{made.parent}, from which {step} was made, has been replaced since"] if record.stale else []
    broken = broken_chain(manifest, step)
    if broken and not record.stale:
        reasons.append(broken)
    return reasons + tampered(manifest, step, out)

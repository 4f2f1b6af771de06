"""Floor 1: what is chosen in a file: `nlpconvert.toml`, or the table [tool.nlpconvert] of a pyproject.toml.

    tolerance = "cosine>=0.995"              for every step, as the flag takes it; or a list of such texts
    allow_unverified = ["trt"]
    provider = "cpu"
    threads = 2
    baseline = "main/nlpconvert.json"        relative to the file

    [outputs.sentence_embedding]             for one output of every step
    tolerance = "cosine>=0.999"
    [cases.masked-row]                       for one case, whatever the output
    tolerance = "cosine>=0.9"
    [steps.onnx-int8]                        for one step, instead of the above; outputs and cases inside it too
    tolerance = "cosine>=0.99"
    [steps.onnx-int8.outputs.sentence_embedding]
    tolerance = "cosine>=0.98"

What the command line gives goes before the file. A key that is not known is refused: a tolerance that is silently not
used is worse than none.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nlpconvert.artifact import FOREIGN, STEPS
from nlpconvert.errors import UsageError

FILE = "nlpconvert.toml"
PYPROJECT = "pyproject.toml"
TABLE = "tool.nlpconvert"

_KEYS = ("tolerance", "allow_unverified", "provider", "threads", "baseline", "outputs", "cases", "steps")
_OF_A_STEP = ("tolerance", "outputs", "cases")


@dataclass(frozen=True)
class Overrides:
    """Tolerances of single outputs and single cases, by name, as the flag takes them."""

    outputs: Mapping[str, str] = field(default_factory=dict)
    cases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OfStep:
    """What is chosen for one step. An empty `tolerance`: what holds for every step."""

    tolerance: tuple[str, ...] = ()
    overrides: Overrides = field(default_factory=Overrides)


@dataclass(frozen=True)
class Settings:
    """What a file chooses; without a file (`path` None) nothing. Tolerances are texts, each known to be one.

    `provider`, `threads` and `baseline` are None where the file does not say; `baseline` is below the file's directory.
    """

    path: Path | None = None
    tolerance: tuple[str, ...] = ()
    allow_unverified: tuple[str, ...] = ()
    provider: str | None = None
    threads: int | None = None
    baseline: Path | None = None
    common: Overrides = field(default_factory=Overrides)
    steps: Mapping[str, OfStep] = field(default_factory=dict)

    def tolerance_for(self, step: str) -> list[str]:
        """The tolerances of a step: its own instead of those for every step."""
        own = self.steps.get(step, OfStep()).tolerance
        return list(own or self.tolerance)

    def overrides(self, step: str) -> Overrides:
        """The tolerances of a step's single outputs and cases: its own before those for every step."""
        own = self.steps.get(step, OfStep()).overrides
        return Overrides({**self.common.outputs, **own.outputs}, {**self.common.cases, **own.cases})

    def check_names(self, outputs: Iterable[str], cases: Iterable[str]) -> None:
        """UsageError for a tolerance of an output or a case that there is not; every case has to be given."""
        known = {"outputs": tuple(outputs), "cases": tuple(cases)}
        tables = [("", self.common), *((f"steps.{name}.", each.overrides) for name, each in self.steps.items())]
        for inside, overrides in tables:
            for kind, names in (("outputs", overrides.outputs), ("cases", overrides.cases)):
                for name in names:
                    if name not in known[kind]:
                        what = "output" if kind == "outputs" else "case"
                        at = _place(self.path or Path(FILE), f"{inside}{kind}")
                        raise UsageError(f"{at}: there is no {what} {name!r}; {_advice(name, known[kind])}")


def read(start: Path | None = None) -> Settings:
    """The settings of a file, or those found in a directory; None: in the current one. Nothing found is no settings.

    UsageError, with the file and the table: two files that both have settings, one that cannot be read, an unknown key,
    a value of another type, a tolerance that is none.
    """
    start = Path() if start is None else start
    if not start.is_dir():
        data = _load(start)
        if start.name != PYPROJECT:
            return _settings(start, data)
        found = _table(start, data)
        if found is None:
            raise UsageError(f"{start} holds no [{TABLE}]")
        return _settings(start, found)
    own, project = start / FILE, start / PYPROJECT
    inside = _table(project, _load(project)) if project.is_file() else None
    if own.is_file():
        if inside is not None:
            raise UsageError(f"both {own} and [{TABLE}] in {project} hold settings; keep one of them")
        return _settings(own, _load(own))
    return Settings() if inside is None else _settings(project, inside)


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise UsageError(f"{path} is not TOML: {error}") from error


def _table(path: Path, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """[tool.nlpconvert] of a pyproject.toml; None when it holds none."""
    tool = data.get("tool")
    if not isinstance(tool, dict) or "nlpconvert" not in tool:
        return None
    found: Any = tool["nlpconvert"]
    if not isinstance(found, dict):
        raise UsageError(f"{path}: {TABLE} has to be a table, and is {_said(found)}")
    return found


# ---- the tables -----------------------------------------------------------------------------------------------------


def _settings(path: Path, data: Mapping[str, Any]) -> Settings:
    _known(path, "", data, _KEYS)
    threads = None if "threads" not in data else _typed(path, "", "threads", data["threads"], int)
    if threads is not None and threads < 1:
        raise UsageError(f"{_place(path, '')}: threads is {threads}: at least 1")
    unverified = _texts(path, "", "allow_unverified", data.get("allow_unverified", []))
    for name in unverified:
        if name not in (*STEPS, FOREIGN):
            raise UsageError(f"{_place(path, '')}: allow_unverified: there is no step {name!r}; {_advice(name, STEPS)}")
    baseline = None if "baseline" not in data else _text(path, "", "baseline", data["baseline"])
    return Settings(
        path=path,
        tolerance=_tolerances(path, "", data),
        allow_unverified=tuple(unverified),
        provider=None if "provider" not in data else _text(path, "", "provider", data["provider"]),
        threads=threads,
        baseline=None if baseline is None else path.parent / baseline,
        common=_overrides(path, "", data),
        steps=_steps(path, data),
    )


def _steps(path: Path, data: Mapping[str, Any]) -> dict[str, OfStep]:
    found: dict[str, OfStep] = {}
    for name, value in _typed(path, "", "steps", data.get("steps", {}), dict).items():
        if name not in (*STEPS, FOREIGN):
            raise UsageError(f"{_place(path, 'steps')}: there is no step {name!r}; {_advice(name, STEPS)}")
        table = f"steps.{name}"
        of_step = _typed(path, "steps", name, value, dict)
        _known(path, table, of_step, _OF_A_STEP)
        found[name] = OfStep(_tolerances(path, table, of_step), _overrides(path, table, of_step))
    return found


def _overrides(path: Path, table: str, data: Mapping[str, Any]) -> Overrides:
    found: dict[str, dict[str, str]] = {}
    for kind in ("outputs", "cases"):
        inside = f"{table}.{kind}".lstrip(".")
        found[kind] = {}
        for name, value in _typed(path, table, kind, data.get(kind, {}), dict).items():
            own = f"{inside}.{name}"
            entry = _typed(path, inside, name, value, dict)
            _known(path, own, entry, ("tolerance",))
            texts = _tolerances(path, own, entry)
            if not texts:
                raise UsageError(f'{_place(path, own)}: tolerance is missing; write for example "cosine>=0.99"')
            found[kind][name] = ",".join(texts)
            if kind == "outputs" and len(_parsed(path, own, found[kind][name])) > 1:
                raise UsageError(f"{_place(path, own)}: one tolerance judges an output; {found[kind][name]!r} are more")
    return Overrides(found["outputs"], found["cases"])


def _tolerances(path: Path, table: str, data: Mapping[str, Any]) -> tuple[str, ...]:
    """The texts of a table's tolerance, each parsed once to be sure; () where it has none."""
    if "tolerance" not in data:
        return ()
    value = data["tolerance"]
    texts = [value] if isinstance(value, str) else _texts(path, table, "tolerance", value)
    if not texts:
        raise UsageError(f"{_place(path, table)}: tolerance is empty; leave it out for the defaults")
    _parsed(path, table, ",".join(texts))
    return tuple(texts)


def _parsed(path: Path, table: str, text: str) -> Sequence[Any]:
    from nlpconvert.validators import tolerance

    try:
        return tolerance.parse(text)
    except UsageError as error:
        raise UsageError(f"{_place(path, table)}: {error}") from error


# ---- what a value has to be -----------------------------------------------------------------------------------------

_WORDS = {str: "a text", int: "a whole number", dict: "a table", list: "a list of texts"}


def _place(path: Path, table: str) -> str:
    """Where something stands: "nlpconvert.toml, [steps.onnx-int8]"."""
    whole = ".".join(part for part in (TABLE if path.name == PYPROJECT else "", table) if part)
    return f"{path}, [{whole}]" if whole else str(path)


def _typed(path: Path, table: str, key: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise UsageError(f"{_place(path, table)}: {key} has to be {_WORDS[kind]}, and is {_said(value)}")
    return value


def _text(path: Path, table: str, key: str, value: Any) -> str:
    text: str = _typed(path, table, key, value, str)
    if not text.strip():
        raise UsageError(f"{_place(path, table)}: {key} is empty; leave it out for the default")
    return text


def _texts(path: Path, table: str, key: str, value: Any) -> list[str]:
    texts = _typed(path, table, key, value, list)
    for each in texts:
        if not isinstance(each, str):
            raise UsageError(f"{_place(path, table)}: {key} has to be {_WORDS[list]}, and holds {_said(each)}")
    return list(texts)


def _said(value: Any) -> str:
    """A value in a message: cut short."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _known(path: Path, table: str, data: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in data:
        if key not in known:
            raise UsageError(f"{_place(path, table)}: {key!r} is not a setting; {_advice(key, known)}")


def _advice(name: str, known: Iterable[str]) -> str:
    """ "did you mean 'x'?", or all there are."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"there is {', '.join(known) or 'none'}"

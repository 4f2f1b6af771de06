"""Floor 4: plain JSON values as tables for a person: what the report has no words of its own for is shown, not dropped.

A list of like objects becomes a table with their keys on top; all else two columns, path and value. Data in, data out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MOST = 60
"""Rows shown of one table; how many more there are is said."""
MOST_COLUMNS = 12
LONGEST = 300
"""Characters shown of one value."""


@dataclass(frozen=True)
class Table:
    """Rows under a header; `more` counts those left out."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0


def table(value: Any) -> Table:
    """Any JSON value as a table."""
    like = _like(value)
    if like is not None:
        header, rows = like
        return Table(header, tuple(rows[:MOST]), max(len(rows) - MOST, 0))
    pairs = list(_flat(value, ""))
    return Table(("what", "value"), tuple(pairs[:MOST]), max(len(pairs) - MOST, 0))


def tables(name: str, value: Any) -> list[tuple[str, Table]]:
    """A value under its name: one table, and one more for each list of like objects right inside it."""
    if not isinstance(value, Mapping) or _like(value) is not None:
        return [(name, table(value))]
    apart = {key: item for key, item in value.items() if isinstance(item, list | tuple) and _like(item) is not None}
    rest = {key: item for key, item in value.items() if key not in apart and worth_showing(item)}
    found = [(name, table(rest))] if rest or not apart else []
    return found + [(f"{name}: {title(str(key))}", table(item)) for key, item in apart.items()]


def worth_showing(value: Any) -> bool:
    """Whether a value says anything: not None, not an empty text, list or object."""
    return value is not None and value != "" and value != [] and value != {} and value != ()


def word(value: Any) -> str:
    """One simple value in a few characters."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None:
        return "none"
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def title(key: str) -> str:
    """A key as words: "sqnr_db" -> "sqnr db"."""
    return key.replace("_", " ")


def _like(value: Any) -> tuple[tuple[str, ...], list[tuple[str, ...]]] | None:
    """Header and rows of a list of flat objects, or of an object that holds such by name; None for anything else."""
    if isinstance(value, Mapping) and len(value) > 1 and all(isinstance(row, Mapping) for row in value.values()):
        rows: list[Mapping[str, Any]] = [{"name": name, **row} for name, row in value.items() if "name" not in row]
        if len(rows) < len(value):
            return None
    elif isinstance(value, list | tuple) and value and all(isinstance(row, Mapping) for row in value):
        rows = list(value)
    else:
        return None
    keys = list(dict.fromkeys(key for row in rows for key in row))
    if len(keys) > MOST_COLUMNS or not keys or any(not _flat_enough(item) for row in rows for item in row.values()):
        return None
    return tuple(title(str(key)) for key in keys), [tuple(_cell(row.get(key, "")) for key in keys) for row in rows]


def _flat_enough(value: Any) -> bool:
    simple = not isinstance(value, Mapping | list | tuple)
    return simple or (isinstance(value, list | tuple) and all(not isinstance(v, Mapping | list | tuple) for v in value))


def _cell(value: Any) -> str:
    return ", ".join(word(item) for item in value) if isinstance(value, list | tuple) else word(value)


def _flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{path}.{title(str(key))}" if path else title(str(key)))
    elif isinstance(value, list | tuple) and not _flat_enough(value):
        for place, item in enumerate(value, 1):
            yield from _flat(item, f"{path} {place}".strip())
    else:
        yield path or "value", _cell(value)

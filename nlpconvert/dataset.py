"""Floor 1: the user's own data (`--data`): reading it, checking it, splitting it by hash.

A file is a text a line (.txt), an object a line (.jsonl) or a table with a header line (.csv). Which columns a task has
is `models.TASKS`; how rows become batches is `inputs`. Whatever is wrong with a file is a UsageError in one line that
names the file and the line.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from nlpconvert.errors import UsageError
from nlpconvert.models import TASKS

SUFFIXES = (".txt", ".jsonl", ".csv")

PARTS: Mapping[str, float] = {"calibrate": 0.4, "select": 0.2, "judge": 0.4}
"""Rule 7: scales are fitted on `calibrate`, settings chosen on `select`, a verdict computed on `judge` alone."""

_LISTS = ("tokens", "tags", "choices", "answers")  # a CSV cell holds these as JSON
_INTEGER = re.compile(r"-?\d{1,18}")


def parse_columns(text: str) -> dict[str, str]:
    """`--columns "text=body,label=y"` as {"text": "body", "label": "y"}: our column, the file's name for it."""
    columns: dict[str, str] = {}
    for part in text.split(","):
        ours, equals, theirs = (piece.strip() for piece in part.partition("="))
        if not (ours and equals and theirs):
            raise UsageError(f'--columns: {part.strip()!r} is not "ours=theirs", as in "text=body,label=y"')
        if ours in columns:
            raise UsageError(f"--columns names {ours!r} twice")
        columns[ours] = theirs
    return columns


def read(
    path: Path, task: str, *, columns: Mapping[str, str] | None = None, more: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The rows of a data file, with the task's own column names and nothing else; never empty.

    `columns` gives the file's name for a column where it is another. An optional column that a row lacks (or that is
    null, or an empty CSV cell) is left out of that row; one named in `columns` must be there. `more` names columns that
    a metric needs and the task has not, optional ones. Blank lines are skipped.
    Raises UsageError for everything that is wrong with the file.
    """
    known = dict.fromkeys(more, False)
    known |= {column.strip("[]"): not column.startswith("[") for column in TASKS[task].columns}
    renamed = dict(columns or {})
    for ours in renamed:
        if ours not in known:
            raise UsageError(f"--columns: {task} has no column {ours!r}; it has {', '.join(known)}")
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"{path}: cannot tell what kind of file this is; use one of {', '.join(SUFFIXES)}")
    text = _text(path)
    if suffix == ".txt":
        needed = [column for column, required in known.items() if required]
        if needed != ["text"] or renamed:
            raise UsageError(
                f"{path}: a .txt file holds one column, text; "
                + (f"{task} needs {', '.join(needed)}" if needed != ["text"] else "--columns has nothing to rename")
                + ": use .jsonl or .csv"
            )
        found: Iterator[tuple[int, Mapping[str, Any]]] = (
            (number, {"text": line}) for number, line in enumerate(_lines(text), start=1) if line.strip()
        )
    else:
        found = _jsonl(path, text) if suffix == ".jsonl" else _csv(path, text, known, renamed)
    cells = suffix == ".csv"
    rows = [_row(f"{path}, line {number}", raw, known, renamed, cells=cells) for number, raw in found]
    if not rows:
        raise UsageError(f"{path}: holds no rows")
    return rows


def _text(path: Path) -> str:
    """The file's text: UTF-8, with or without a byte order mark."""
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a directory; --data takes one file ({', '.join(SUFFIXES)})")
        if not path.exists():
            raise UsageError(f"{path}: no such file")
        if not path.is_file():
            raise UsageError(f"{path}: is not a regular file")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if not data.strip():
        raise UsageError(f"{path}: is empty")
    if (nul := data.find(b"\0")) >= 0:
        raise UsageError(
            f"{path}, line {_line(data, nul)}: holds a NUL byte, so it is binary or UTF-16; save it as UTF-8"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}, line {_line(data, error.start)}: is not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8"
        ) from error


def _line(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, offset) + 1


def _lines(text: str) -> list[str]:
    """Lines as editors count them; `str.splitlines` would also split at characters that may stand inside a text."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def _jsonl(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(_lines(text), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise UsageError(f"{path}, line {number}: is not JSON: {reason}; .jsonl holds an object a line") from error
        if not isinstance(value, dict):
            raise UsageError(f'{path}, line {number}: is {_kind(value)}, not an object like {{"text": "..."}}')
        yield number, value


def _csv(
    path: Path, text: str, known: Mapping[str, bool], renamed: Mapping[str, str]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    start = 1
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UsageError(f"{path}, line {start}: is not CSV: {error}") from error
        if cells is None:
            return
        number, start = start, reader.line_num + 1
        if not cells:
            continue
        if header is None:
            header = [cell.strip() for cell in cells]
            _check_header(f"{path}, line {number}", header, known, renamed)
        elif len(cells) != len(header):
            raise UsageError(
                f"{path}, line {number}: has {len(cells)} cells where the header has {len(header)}; "
                "a cell with a comma or a line break stands in double quotes"
            )
        else:
            yield number, dict(zip(header, cells, strict=True))


def _check_header(where: str, header: Sequence[str], known: Mapping[str, bool], renamed: Mapping[str, str]) -> None:
    for ours, required in known.items():
        theirs = renamed.get(ours, ours)
        if theirs not in header and (required or ours in renamed):
            raise UsageError(_missing(where, ours, theirs, header))
        if header.count(theirs) > 1:
            raise UsageError(f"{where}: has the column {theirs!r} {header.count(theirs)} times")


def _missing(where: str, ours: str, theirs: str, found: Sequence[str]) -> str:
    have = ", ".join(repr(name) for name in found) or "none"
    return f"{where}: has no column {theirs!r}; found {have}; if another one is meant: --columns {ours}=ITS_NAME"


def _row(
    where: str, raw: Mapping[str, Any], known: Mapping[str, bool], renamed: Mapping[str, str], *, cells: bool
) -> dict[str, Any]:
    """One row under the task's column names, every value checked; `cells` when the values are a CSV's."""
    row: dict[str, Any] = {}
    for ours, required in known.items():
        theirs = renamed.get(ours, ours)
        if theirs not in raw and (required or ours in renamed):
            raise UsageError(_missing(where, ours, theirs, list(raw)))
        value = raw.get(theirs)
        if not required and (value is None or (cells and value == "")):
            continue
        if cells:
            value = _from_cell(ours, value)
        wrong = _wrong(ours, value)
        if wrong:
            raise UsageError(f"{where}: column {theirs!r} {wrong}")
        row[ours] = value
    if "tags" in row and len(row["tags"]) != len(row["tokens"]):
        raise UsageError(f"{where}: {len(row['tags'])} tags for {len(row['tokens'])} tokens")
    return row


def _from_cell(column: str, cell: Any) -> Any:
    """A CSV cell is text: lists and scores stand in it as JSON, a label of digits is a number."""
    if column in (*_LISTS, "score"):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell  # `_wrong` says what it should have been
    return int(cell) if column == "label" and _INTEGER.fullmatch(cell) else cell


def _kind(value: Any) -> str:
    """A JSON value's type in a person's words."""
    names = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _wrong(column: str, value: Any) -> str:
    """What is wrong with a value, "" when nothing is."""
    if column == "label":
        return "" if _is_label(value) else f"is {_kind(value)}, not a text or a whole number"
    if column == "score":
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return "" if good else f"is {_kind(value)}, not a number that is finite"
    if column == "tags":
        good = isinstance(value, list) and all(_is_label(tag) for tag in value)
        return "" if good else f"is {_kind(value)}, not a list of texts or whole numbers"
    if column == "answers":
        return "" if _is_answers(value) else 'is not SQuAD\'s form: {"text": ["..."], "answer_start": [0]}'
    if column in ("tokens", "choices"):
        if not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
            return f"is {_kind(value)}, not a list of texts" if not isinstance(value, list) else "holds more than texts"
        least = 2 if column == "choices" else 1
        if len(value) < least:
            return f"is a list of {len(value)}; it needs {least} or more"
        return next((bad for entry in value if (bad := _broken(entry))), "")
    return _broken(value) if isinstance(value, str) else f"is {_kind(value)}, not a text"


def _broken(text: str) -> str:
    """JSON can hold half of a surrogate pair ("\\ud83d"), which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "holds half of a surrogate pair, which is no character"
    return ""


def _is_label(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)


def _is_answers(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    texts, starts = value.get("text"), value.get("answer_start")
    return (
        isinstance(texts, list)
        and isinstance(starts, list)
        and len(texts) == len(starts)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(start, int) and not isinstance(start, bool) and start >= 0 for start in starts)
    )


def row_key(row: Mapping[str, Any]) -> str:
    """sha256 of the longest of a row's input texts, normalised (NFKC, case folded, white space collapsed).

    The longest, so that questions about one passage, or hypotheses about one premise, share a key.
    """
    texts = [row[name] for name in ("text", "text_pair", "question", "context") if name in row]
    texts += [" ".join(row["tokens"])] if "tokens" in row else []
    normal = (" ".join(unicodedata.normalize("NFKC", text).casefold().split()) for text in texts)
    return hashlib.sha256(max(normal, key=len, default="").encode("utf-8")).hexdigest()


def split(rows: Sequence[Mapping[str, Any]], shares: Mapping[str, float] = PARTS) -> dict[str, list[Mapping[str, Any]]]:
    """Rows into parts by `row_key`: 40 % calibrate, 20 % select, 40 % judge.

    A text's part depends on nothing but the text, so duplicates fall together and more data moves nothing. Raises
    UsageError when a part would be empty.
    """
    parts: dict[str, list[Mapping[str, Any]]] = {name: [] for name in shares}
    edges = list(zip(shares, accumulate(shares.values()), strict=True))
    for row in rows:
        # 52 bits are exact in a float: uniform in [0, 1)
        place = int(row_key(row)[:13], 16) / 2**52 * edges[-1][1]
        parts[next(name for name, edge in edges if place < edge)].append(row)
    empty = [name for name, part in parts.items() if not part]
    if empty:
        different = len({row_key(row) for row in rows})
        raise UsageError(
            f"{len(rows)} rows with {different} different texts leave nothing to {' and '.join(empty)} on; "
            "give more and more varied data"
        )
    check_disjoint(parts)
    return parts


def check_disjoint(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raise UsageError when a text stands in two parts: what was fitted on must not be judged on."""
    seen: dict[str, str] = {}
    for name, rows in parts.items():
        for row in rows:
            before = seen.setdefault(row_key(row), name)
            if before != name:
                text = next(
                    (row[c] for c in ("context", "text", "question") if c in row), " ".join(row.get("tokens", []))
                )
                raise UsageError(f"{text[:40]!r} stands both in {before} and in {name}; take it out of one of them")

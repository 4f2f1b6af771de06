"""Floor 1: labelled rows as batches for a model, each with what would be right.

Which answer is right is read here (names of labels, tags at first pieces, the characters of an answer); what a model's
answers are worth is `validators.metrics`. Rows are read by `dataset`, tokens by `tokens`, padded by `inputs`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import dataset, inputs
from nlpconvert.errors import UsageError, first_line
from nlpconvert.inputs import Item, Row
from nlpconvert.models import TASKS, Facts
from nlpconvert.tokens import Reader, Reading
from nlpconvert.validators.metrics import IGNORED, Metric

BATCH = 8
READ = ("text", "text_pair", "tokens", "choices", "question", "context")
"""Columns that a model reads; the others hold what would be right."""
DISTINCT = 0.9
"""Share of distinct rows below which an interval for independent ones is said to be too narrow."""


@dataclass(frozen=True)
class Entry:
    """One row of the data: what the model reads (one item, or two for a pair to compare) and what would be right.

    `wanted`: a label's id; tag ids; a score; the texts of an answer; token ids; a target text. `places`: for tags the
    token at which each word is read (None where its piece was cut off), for an answer the reading itself.
    """

    items: tuple[Item, ...]
    wanted: Any
    cut: bool
    tokens: tuple[int | None, ...] = ()
    reading: Reading | None = None
    text: str = ""


@dataclass(frozen=True)
class Batch:
    """Entries and the model's inputs for them: every item is a row of `inputs`, in order."""

    entries: tuple[Entry, ...]
    inputs: Mapping[str, np.ndarray]
    first: int
    """Number of the first entry's row in the data, from 1."""

    @property
    def about(self) -> str:
        """Which rows of the data these are."""
        return f"rows {self.first} to {self.first + len(self.entries) - 1}"


class Labels:
    """The names of a model's labels by id, from config.json beside the artifact; numbers where it has none.

    `source`: the file they come from, "" for none.
    """

    def __init__(self, names: Sequence[str] = (), source: str = "") -> None:
        self.names = tuple(names)
        self.source = source if self.names else ""
        self._ids = {name: index for index, name in enumerate(self.names)}

    def __call__(self, label: Any, where: str) -> int:
        """The id of a label given by name or number. UsageError for one that the model does not know."""
        if isinstance(label, str) and label in self._ids:
            return self._ids[label]
        if isinstance(label, int) and 0 <= label < (len(self.names) or math.inf):
            return label
        if not self.names:
            raise UsageError(f"{where}: label {label!r} is a name, and no config.json beside the artifact has names")
        known = ", ".join(self.names[:12]) + (", ..." if len(self.names) > 12 else "")
        raise UsageError(
            f"{where}: the model has no label {label!r}; it has {known} (numbers 0 to {len(self.names) - 1})"
        )

    def name(self, index: int) -> str:
        """A label's name; its number where it has none."""
        return self.names[index] if 0 <= index < len(self.names) else str(index)


def read_labels(directories: Iterable[Path]) -> Labels:
    """`id2label` of the first config.json in these directories. UsageError: it is none, or several may be true."""
    path = next((place / "config.json" for place in directories if (place / "config.json").is_file()), None)
    if path is None:
        return Labels()
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("problem_type") == "multi_label_classification":
            raise UsageError(f"{path}: the model gives several labels to a text; accuracy and f1 are of one label each")
        names = {int(index): str(name) for index, name in (config.get("id2label") or {}).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read: {first_line(error)}") from error
    known = [names[index] for index in sorted(names)] if sorted(names) == list(range(len(names))) else []
    return Labels(known, f"{path.parent.name}/{path.name}")


def prepare(
    rows: Sequence[Mapping[str, Any]], metric: Metric, facts: Facts, reader: Reader, labels: Labels, path: Path
) -> list[Batch]:
    """All rows in batches of 8, in the file's order. UsageError, naming the line, for a row without what is right.

    Padded as `inputs.data_cases` pads: on the right, on the left where positions come from the mask.
    """
    wanted = metric.tasks[facts.task]
    make = _MAKERS[metric.name if metric.name in _MAKERS else facts.task]
    texts = inputs.tokenize_with(facts, reader.encode)
    left = facts.positions == "mask"
    lines = Lines(path)
    groups: list[list[Entry]] = []
    for number, row in enumerate(rows, start=1):
        if wanted not in row:
            raise UsageError(
                f"{lines.where(number)}: has no {wanted!r}, which {metric.name} needs; if another column is meant: "
                f"--columns {wanted}=ITS_NAME"
            )
        entry = make(row, lines.where(number), texts, reader, labels)
        if not groups or len(groups[-1]) == BATCH or len(groups[-1][0].items[0].rows) != len(entry.items[0].rows):
            groups.append([])
        groups[-1].append(entry)
    batches, first = [], 1
    for entries in groups:
        items = [item for entry in entries for item in entry.items]
        # A batch of empty texts is one token wide, and that one masked.
        batches.append(Batch(tuple(entries), inputs.collate(facts, items, left=left, length=1), first))
        first += len(entries)
    _check_worth(metric, [entry for batch in batches for entry in batch.entries], path)
    return batches


def _check_worth(metric: Metric, entries: Sequence[Entry], path: Path) -> None:
    """Raise UsageError where a score of these rows would say nothing, whatever the model answers."""
    if metric.name == "spearman" and len({entry.wanted for entry in entries}) < 2:
        raise UsageError(f"{path}: all scores are the same, so there is no rank to correlate with")
    if metric.name == "perplexity" and not any(entry.wanted for entry in entries):
        raise UsageError(f"{path}: no row has a second token, so there is no next one to predict")
    tagged = [entry for entry in entries if entry.tokens]
    if tagged and all(
        place is None or tag == IGNORED for e in tagged for place, tag in zip(e.tokens, e.wanted, strict=True)
    ):
        raise UsageError(f"{path}: no word has a tag that is scored")


def doubts(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What makes rows worth less than their number: those that hold nothing to read, and those that are the same."""
    read = [{column: row[column] for column in READ if column in row} for row in rows]
    empty = sum(not any(_holds(value) for value in each.values()) for each in read)
    if empty:
        yield f"{empty:,} {'row is' if empty == 1 else 'rows are'} empty"
    distinct = len({json.dumps(each, sort_keys=True, default=str) for each in read})
    if distinct < DISTINCT * len(rows):
        texts, count = "text" if distinct == 1 else "texts", f"{len(rows):,}"
        yield f"{distinct:,} distinct {texts} among {count} rows: the intervals hold for {count} independent ones"


def _holds(value: Any) -> bool:
    """Whether a text, or one of a list's, is more than blanks."""
    return any(map(_holds, value)) if isinstance(value, list | tuple) else bool(str(value).strip())


class Lines:
    """Where a row stands in its file. `dataset` skips blank lines; a record of a .csv may be several lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers: list[int] = []
        if path.suffix.lower() != ".csv":
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            self._numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]

    def where(self, row: int) -> str:
        """ "data.jsonl, line 7"; of a .csv "data.csv, row 6", its header not counted."""
        if row <= len(self._numbers):
            return f"{self._path}, line {self._numbers[row - 1]}"
        return f"{self._path}, row {row}"


# -- a row by metric or task -------------------------------------------------------------------------------------------


def _labelled(row: Mapping[str, Any], where: str, texts: inputs.Texts, reader: Reader, labels: Labels) -> Entry:
    pair = row.get("text_pair")
    return Entry(
        (Item((texts.row(row["text"], pair),)),),
        labels(row["label"], where),
        reader.read(row["text"], pair).cut,
    )


def _chosen(row: Mapping[str, Any], where: str, texts: inputs.Texts, reader: Reader, labels: Labels) -> Entry:
    choices, label = row["choices"], row["label"]
    if not isinstance(label, int) or not 0 <= label < len(choices):
        raise UsageError(f"{where}: label {label!r} is none of the {len(choices)} choices (numbers from 0)")
    item = Item(tuple(texts.row(row["text"], choice) for choice in choices))
    return Entry((item,), label, any(reader.read(row["text"], choice).cut for choice in choices))


def _tagged(row: Mapping[str, Any], where: str, texts: inputs.Texts, reader: Reader, labels: Labels) -> Entry:
    """A word's tag is read at its first piece; words that were cut off are not scored."""
    words: list[str] = row["tokens"]
    reading = reader.read(" ".join(words))
    tags = tuple(IGNORED if tag == IGNORED else labels(tag, where) for tag in row["tags"])
    pieces = [
        (index, span)
        for index, (span, side) in enumerate(zip(reading.offsets, reading.sides, strict=True))
        if side is not None and span[1] > span[0]
    ]
    found: list[int | None] = []
    start = at = 0
    for word in words:
        end = start + len(word)
        while at < len(pieces) and pieces[at][1][1] <= start:
            at += 1
        found.append(pieces[at][0] if at < len(pieces) and pieces[at][1][0] < end else None)
        start = end + 1
    return Entry((_item(texts, reading),), tags, reading.cut, tokens=tuple(found))


def _asked(row: Mapping[str, Any], where: str, texts: inputs.Texts, reader: Reader, labels: Labels) -> Entry:
    reading = reader.read(row["question"], row["context"], keep_first=True)
    answers = tuple(row["answers"]["text"])
    return Entry((_item(texts, reading),), answers, reading.cut, reading=reading, text=row["context"])


def _compared(row: Mapping[str, Any], where: str, texts: inputs.Texts, reader: Reader, labels: Labels) -> Entry:
    """Two texts and how like they are: two items for an embedding, one of both for a head that answers itself."""
    score = row["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise UsageError(f"{where}: score {score!r} is not a number")
    text, pair = row["text"], row.get("text_pair")
    if texts.facts.task != "sentence-embedding":
        return Entry((Item((texts.row(text, pair),)),), float(score), reader.read(text, pair).cut)
    if pair is None:
        raise UsageError(f"{where}: has no 'text_pair', which spearman compares with 'text'")
    return Entry(
        (Item((texts.row(text),)), Item((texts.row(pair),))),
        float(score),
        reader.read(text).cut or reader.read(pair).cut,
    )


def _continued(row: Mapping[str, Any], where: str, texts: inputs.Texts, reader: Reader, labels: Labels) -> Entry:
    """What comes next, token by token: of the text, or of the target given the text."""
    if TASKS[texts.facts.task].columns != ("text", "target"):
        ids = texts.row(row["text"])
        return Entry((Item((ids,)),), ids.ids[1:], reader.read(row["text"]).cut)
    target = texts.target(row["target"])
    wanted = texts.row(row["target"]).ids[: len(target)]
    cut = reader.read(row["text"]).cut or reader.read(row["target"]).cut
    return Entry((Item((texts.row(row["text"]),), target),), wanted, cut)


def _translated(row: Mapping[str, Any], where: str, texts: inputs.Texts, reader: Reader, labels: Labels) -> Entry:
    start = texts.facts.pad_id if texts.facts.decoder_start_id is None else texts.facts.decoder_start_id
    item = Item((texts.row(row["text"]),), (start,))
    return Entry((item,), row["target"], reader.read(row["text"]).cut)


def _item(texts: inputs.Texts, reading: Reading) -> Item:
    top = max(texts.facts.type_vocab_size - 1, 0)
    return Item((Row(reading.ids, tuple(min(kind, top) for kind in reading.types)),))


_MAKERS = {
    "text-classification": _labelled,
    "multiple-choice": _chosen,
    "token-classification": _tagged,
    "question-answering": _asked,
    "spearman": _compared,
    "perplexity": _continued,
    "bleu": _translated,
}


def read(path: Path, columns: str, metric: Metric, task: str) -> list[dict[str, Any]]:
    """The rows of a data file with the columns that the metric needs. UsageError for what is wrong with it."""
    renamed = dataset.parse_columns(columns) if columns else None
    return dataset.read(path, task, columns=renamed, more=metric.more)

"""Floor 1: labelled rows as batches to train on: what a loss reads, in which order, and which rank's they are.

Rows are read by `dataset` and understood by `labelled` (labels, tags at first pieces, targets of a decoder), padded by
`inputs`; here they become labels with -100 where there is no target, and are dealt out: an epoch is one order of all
rows, a step a slice of it, and each rank takes every `size`-th row of the slice, so that no row is taken twice and none
is lost, whatever does not divide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nlpconvert import dataset, disk, inputs, labelled
from nlpconvert.errors import UsageError
from nlpconvert.inputs import Item
from nlpconvert.labelled import Entry, Labels
from nlpconvert.models import Facts
from nlpconvert.tokens import Reader
from nlpconvert.training import Batch
from nlpconvert.validators.metrics import IGNORED, METRICS

READ_BY: dict[str, str] = {
    "text-classification": "accuracy",
    "multiple-choice": "accuracy",
    "token-classification": "accuracy",
    "question-answering": "squad",
    "text-generation": "perplexity",
    "text2text-generation": "perplexity",
}
"""Task to the metric that reads the same columns: what is right is told there."""


@dataclass(frozen=True)
class Example:
    """One row: what the model reads and the labels of each of its places (one for a text's class), by name."""

    item: Item
    labels: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Data:
    """All rows of a file. `sha256` is of the file, `notes` say what was cut or left out."""

    facts: Facts
    examples: tuple[Example, ...]
    sha256: str
    notes: tuple[str, ...]

    def batch(self, rows: Sequence[int]) -> Batch:
        """The rows of these numbers as one batch, padded at the right.

        Not at the left, as generation would be: the loss of a language model would then count a prediction made from
        padding.
        """
        chosen = [self.examples[row] for row in rows]
        arrays = inputs.collate(self.facts, [each.item for each in chosen], length=1)
        labels = {name: self._labels(name, chosen, arrays) for name in chosen[0].labels}
        return Batch(arrays, labels, targets(self.facts.task, labels))

    def _labels(self, name: str, chosen: Sequence[Example], arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        if not _by_place(self.facts):
            return np.array([each.labels[name][0] for each in chosen], np.int64)
        read = arrays["decoder_input_ids" if "decoder_input_ids" in arrays else "input_ids"]
        padded = np.full(read.shape, IGNORED, np.int64)
        for row, each in enumerate(chosen):
            padded[row, : len(each.labels[name])] = each.labels[name]
        return padded


def targets(task: str, labels: Mapping[str, np.ndarray]) -> int:
    """How many labels of a batch count in the loss; a language model's first token is not predicted."""
    first = next(iter(labels.values()))
    return int(((first[:, 1:] if task == "text-generation" else first) != IGNORED).sum())


def _by_place(facts: Facts) -> bool:
    """Whether every token has a label, and not every row."""
    return facts.task in ("token-classification", "text-generation", "text2text-generation")


# -- from a file -------------------------------------------------------------------------------------------------------


def read(path: Path, columns: str, facts: Facts, reader: Reader, labels: Labels, option: str = "--data") -> Data:
    """The rows of a file, ready for batches. `labels`: the model's own names, from its config.

    UsageError, with file and line: a row that lacks what is right, a label that the model does not have, an answer that
    does not stand where it is said to; and for a task that has no loss, or a file without a single target.
    """
    if facts.task not in READ_BY:
        raise UsageError(f"{option}: {facts.task} is not trained here; these are: {', '.join(READ_BY)}")
    metric = METRICS[READ_BY[facts.task]]
    renamed = dataset.parse_columns(columns) if columns else None
    rows = dataset.read(path, facts.task, columns=renamed, more=metric.more)
    entries = [
        entry for batch in labelled.prepare(rows, metric, facts, reader, labels, path) for entry in batch.entries
    ]
    made = [
        _example(facts, entry, row, functools.partial(_where, path, number))
        for number, (entry, row) in enumerate(zip(entries, rows, strict=True), start=1)
    ]
    examples = tuple(each for each in made if each is not None)
    if not examples:
        raise UsageError(f"{path}: every answer lies past the model's {reader.limit} tokens: nothing is left to learn")
    choices = {len(each.item.rows) for each in examples}
    if len(choices) > 1:
        raise UsageError(
            f"{path}: rows have {min(choices)} to {max(choices)} choices; to be trained in batches all need as many"
        )
    return Data(
        facts, examples, disk.sha256_file(path), tuple(_notes(entries, len(made) - len(examples), reader.limit, path))
    )


def _where(path: Path, number: int) -> str:
    return labelled.Lines(path).where(number)


def _notes(entries: Sequence[Entry], left_out: int, limit: int, path: Path) -> Iterator[str]:
    cut = sum(entry.cut for entry in entries)
    if cut:
        yield f"{path}: {cut:,} of {len(entries):,} rows are longer than {limit} tokens and were cut"
    if left_out:
        yield f"{path}: {left_out:,} of {len(entries):,} answers were cut off and are not learned from"


def _example(facts: Facts, entry: Entry, row: Mapping[str, Any], where: Callable[[], str]) -> Example | None:
    """A row's example; None for an answer that was cut off."""
    item = entry.items[0]
    if facts.task == "question-answering":
        found = _answer(entry, row, where)
        return None if found is None else Example(item, {"start_positions": (found[0],), "end_positions": (found[1],)})
    if facts.task == "token-classification":
        tags = [IGNORED] * len(item.rows[0].ids)
        for place, tag in zip(entry.tokens, entry.wanted, strict=True):
            if place is not None:
                tags[place] = tag
        return Example(item, {"labels": tuple(tags)})
    if facts.task == "text-generation":
        return Example(item, {"labels": item.rows[0].ids})
    if facts.task == "text2text-generation":
        return Example(item, {"labels": tuple(entry.wanted)})
    return Example(item, {"labels": (int(entry.wanted),)})


def _answer(entry: Entry, row: Mapping[str, Any], where: Callable[[], str]) -> tuple[int, int] | None:
    """First and last token of a row's first answer; (0, 0), the first token, for a question without one.

    None where the answer was cut off. UsageError where the context does not hold it at the place that is said.
    """
    answers = row["answers"]
    if not answers["text"]:
        return 0, 0
    text, start = answers["text"][0], answers["answer_start"][0]
    end = start + len(text)
    if entry.text[start:end] != text or not text:
        there = entry.text[start:end]
        raise UsageError(f"{where()}: the answer {text!r} does not stand at character {start}; there stands {there!r}")
    assert entry.reading is not None
    spans = list(zip(entry.reading.offsets, entry.reading.sides, strict=True))
    inside = [n for n, ((a, b), side) in enumerate(spans) if side == 1 and a < end and b > start]
    last = max((b for (_, b), side in spans if side == 1), default=0)
    cut_off = entry.cut and last < start + len(text.rstrip())
    return (inside[0], inside[-1]) if inside and not cut_off else None


@functools.lru_cache(maxsize=2)
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The same on every machine: a generator that is named."""
    order: np.ndarray = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)
    order.flags.writeable = False
    return order


# -- dealing out -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Deal:
    """How rows are dealt out: `rows` of them, in micro-batches of `batch`, `accumulate` of them a step and rank."""

    rows: int
    batch: int
    accumulate: int = 1
    size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UsageError where a rank would have nothing at all."""
        if self.rows < self.size:
            raise UsageError(
                f"{self.rows} rows for {self.size} ranks: the shard of rank {self.rows} is empty; give more rows or "
                "start fewer processes"
            )

    @property
    def rows_per_step(self) -> int:
        """Rows of a step, over all ranks; the last step of an epoch may have fewer."""
        return self.batch * self.accumulate * self.size

    @property
    def steps_per_epoch(self) -> int:
        """Steps until every row was taken once."""
        return -(-self.rows // self.rows_per_step)

    def order(self, epoch: int) -> np.ndarray:
        """All row numbers in the order of an epoch (from 0), drawn from the seed and the epoch."""
        return _order(self.rows, self.seed, epoch)

    def step(self, step: int, rank: int) -> list[list[int]]:
        """A rank's micro-batches of a step, counted from 0 over all epochs: at most `accumulate`, none is empty.

        Where the last rows of an epoch are fewer than the ranks, a rank may have none.
        """
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.rows_per_step
        mine = self.order(epoch)[first : first + self.rows_per_step][rank :: self.size].tolist()
        return [mine[start : start + self.batch] for start in range(0, len(mine), self.batch)]

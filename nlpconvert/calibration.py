"""Floor 3: the texts that precision is chosen by, and a file run over them.

Three parts by hash of the text (rule 7): scales are fitted on `calibrate`, settings chosen on `select`, and the verdict
is computed on `judge`, of the user's `--data` and of the texts that are shipped. The shipped ones are always there, for
what a narrow file of texts lacks is where quantization hides its loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import dataset, inputs, own_words, probes
from nlpconvert.errors import UsageError
from nlpconvert.inputs import Case, Encode
from nlpconvert.models import TASKS, Facts

if TYPE_CHECKING:
    from nlpconvert.making import Work
    from nlpconvert.plan import Options

SHIPPED = "shipped"
"""Cases made from the shipped texts are named so."""

PART_TOKENS: Mapping[str, int] = {"calibrate": 16000, "select": 8000, "judge": 8000}
"""Padded tokens of a part at most, of the user's texts and of the shipped ones each."""

ROW_TOKENS = 256
"""A text is cut there: one essay says no more than its first page, and costs its square."""

LONG_ROWS = 4
"""Rows of texts one after the other, as long as the model takes them (LONGEST tokens where it takes more): activations
at late positions are others than at early ones, and what was never seen is clipped."""
LONGEST = 512

WRITTEN_ROWS = 96
"""Texts that a model that writes goes on from, WRITTEN_NEW tokens each: a share of 1 % that changed is seen in them."""
WRITTEN_NEW = 16


def is_shipped(case: Case) -> bool:
    """Whether a case holds shipped texts (and is no standard probe)."""
    return case.name.startswith(f"{SHIPPED}-")


@lru_cache(maxsize=1)
def _shipped() -> dict[str, list[Mapping[str, Any]]]:
    """The shipped texts by part, and the first word of each as a text of its own: production sends such texts too, and
    their activations are the oddest. What stands in the probe set is left out."""
    judged = {dataset.row_key({"text": row.text}) for row in probes.probe_rows()}
    words = dict.fromkeys(row["text"].split()[0] for row in probes.texts() if row["text"].strip())
    rows = {dataset.row_key(row): row for row in ({"text": word} for word in words)}
    rows |= {dataset.row_key(row): dict(row) for row in probes.texts()}
    return dataset.split([row for key, row in rows.items() if key not in judged])


def plain(task: str) -> bool:
    """Whether a text alone is what a task is asked. What is made of one for other tasks is a makeshift."""
    needed = [column for column in TASKS[task].columns if not column.startswith("[")]
    return needed in (["text"], ["tokens"])


def shipped_cases(facts: Facts, encode: Encode | None, part: str) -> list[Case]:
    """The shipped texts of a part as the model's task takes them, in batches of like length, PART_TOKENS at most.

    Without a tokenizer the ids are drawn.
    """
    encode = encode or probes.drawn_encode(facts, 0)
    texts = _shipped()[part]
    rows = [_as_task(facts.task, n, texts) for n in range(len(texts))]
    return _cases(facts, encode, rows, SHIPPED, PART_TOKENS[part]) + _long_cases(facts, encode, texts)


def _long_cases(facts: Facts, encode: Encode, texts: Sequence[Mapping[str, Any]]) -> list[Case]:
    """LONG_ROWS rows of many texts each, two a case."""
    most = min(facts.max_length or LONGEST, LONGEST)
    joined: list[Mapping[str, Any]] = []
    rest = [row["text"] for row in texts]
    for n in range(LONG_ROWS):
        words: list[str] = []
        tokens = 0
        for text in rest[n::LONG_ROWS]:
            if tokens >= most:
                break
            words.append(text)
            tokens += len(encode(text, None)["input_ids"])
        joined.append({"text": " ".join(words)})
    rows = [_as_task(facts.task, n, joined) for n in range(LONG_ROWS)]
    return inputs.data_cases(facts, _limited(encode, most), rows, batch=2, name=f"{SHIPPED}-long")


def data_cases(options: Options, facts: Facts, encode: Encode | None, part: str | None) -> list[Case]:
    """The user's texts as cases: one part of them, or all for None. UsageError for what is wrong with the file."""
    rows = _rows(options, facts, part)
    if part in (None, "judge"):
        return inputs.data_cases(facts, encode, rows)
    return _cases(facts, encode, rows, "data", PART_TOKENS[str(part)])


def _rows(options: Options, facts: Facts, part: str | None) -> Sequence[Mapping[str, Any]]:
    assert options.data is not None
    renamed = dataset.parse_columns(options.columns) if options.columns else None
    rows = dataset.read(options.data, facts.task, columns=renamed)
    if part is None:
        return rows
    try:
        return dataset.split(rows)[part]
    except UsageError as error:
        raise UsageError(f"{options.data}: {error}") from error


def written_texts(options: Options, facts: Facts, lower: bool) -> list[tuple[str, str]]:
    """Texts that a model goes on from, each with its target ("" where the task has none): WRITTEN_ROWS at most, the
    user's where there are some, else, for what is below float32, those that are shipped."""
    if options.data is not None:
        rows = _rows(options, facts, "judge" if lower else None)
    elif lower:
        texts = _shipped()["judge"]
        rows = [_as_task(facts.task, n, texts) for n in range(len(texts))]
    else:
        return []
    step = max(len(rows) // WRITTEN_ROWS, 1)
    chosen = sorted(rows[::step][:WRITTEN_ROWS], key=lambda row: len(str(row["text"])))
    return [(str(row["text"]), str(row.get("target", ""))) for row in chosen]


def cases(options: Options, facts: Facts, encode: Encode | None, part: str) -> list[Case]:
    """Everything that belongs to "calibrate" or "select": the user's own first."""
    own = data_cases(options, facts, encode, part) if options.data is not None else []
    return own + shipped_cases(facts, encode, part)


def asked(work: Work, part: str) -> list[Case]:
    """What a step is fitted or chosen on: `cases`, and of a model that writes with an encoder and a decoder the same
    again with what it writes itself as the decoder's input."""
    found = cases(work.options, work.facts, work.encode, part)
    return found + own_words.of(work, part, found)


def _as_task(task: str, n: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A plain text in the columns of a task: asked about words of its own, answered by its beginning."""
    text, other = rows[n]["text"], rows[(n + 1) % len(rows)]["text"]
    words = text.split()
    values: dict[str, Any] = {
        "text": text,
        "tokens": text.split() or [text],
        "question": " ".join(words[len(words) // 3 :][:6]) + "?",
        "context": text,
        "choices": [other[:80], text[:80]],
        "target": text[:120],
    }
    needed = [column for column in TASKS[task].columns if not column.startswith("[")]
    return {column: values[column] for column in needed}


def _cases(facts: Facts, encode: Encode | None, rows: Sequence[Mapping[str, Any]], name: str, most: int) -> list[Case]:
    """Rows as cases of eight, sorted by length so that little of a batch is padding, as far as `most` tokens go.

    Where there are more tokens than that, every n-th batch is left out, so that all lengths stay.
    """
    short = None if encode is None else _limited(encode, ROW_TOKENS)
    ordered = sorted(rows, key=lambda row: sum(len(str(value)) for value in row.values()))
    made = inputs.data_cases(facts, short, ordered, name=name)
    total = sum(inputs.case_tokens(case) for case in made)
    if total <= most:
        return made
    kept: list[Case] = []
    spent = 0.0
    for case in made:
        spent += inputs.case_tokens(case) * most / total
        size = sum(inputs.case_tokens(each) for each in kept)
        if size + inputs.case_tokens(case) <= spent or not kept:
            kept.append(case)
    return kept


def _limited(encode: Encode, most: int) -> Encode:
    """The tokenizer with texts cut so short that a row has about `most` tokens."""

    def short(text: str, pair: str | None) -> Mapping[str, list[int]]:
        encoded = encode(text, pair)
        while len(encoded["input_ids"]) > most and len(text) + len(pair or "") > 2:
            keep = most / len(encoded["input_ids"])
            text, pair = text[: int(len(text) * keep)], pair if pair is None else pair[: int(len(pair) * keep)]
            encoded = encode(text, pair)
        return encoded

    return short


@dataclass(frozen=True)
class Runner:
    """Runs an ONNX file over one part of the texts; called, it yields each case with the named outputs.

    One session each time it is called; nothing of a case is kept after it was handed out.
    """

    cases: Sequence[Case]
    threads: int | None
    data: Path
    """Directory of the data file: what is run are small copies of a graph, whose weights stay where they are."""

    def __call__(self, path: Path, outputs: Sequence[str]) -> Iterator[tuple[Case, Mapping[str, np.ndarray]]]:
        from nlpconvert.backends import onnxruntime
        from nlpconvert.convert import derived

        data = derived.data_of(path, self.data)
        session = onnxruntime.open_file(path, device="cpu", threads=self.threads, data=data)
        try:
            for case in self.cases:
                yield case, session.tap(case.inputs, outputs)
        finally:
            session.close()

    @property
    def largest_tokens(self) -> int:
        """Padded tokens of the largest case."""
        return max(inputs.case_tokens(case) for case in self.cases)


def runner(work: Work, part: str) -> Runner:
    """A runner over "calibrate" or "select"."""
    return Runner(asked(work, part), work.options.threads, work.above.directory)

"""Floor 3: the texts that precision is chosen by, and a file run over them.

Three parts by hash of the text (rule 7): scales are fitted on `calibrate`, settings chosen on `select`, and the verdict
is computed on `judge`, of the user's `--data` and of the texts that are shipped. The shipped ones are always there: what
a narrow file of texts lacks is where quantization hides its loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import dataset, inputs, probes
from nlpconvert.errors import UsageError
from nlpconvert.inputs import Case, Encode
from nlpconvert.models import TASKS, Facts

if TYPE_CHECKING:
    from nlpconvert.making import Work
    from nlpconvert.plan import Options

SHIPPED = "shipped"
"""Cases made from the shipped texts are named so."""

PART_TOKENS = 8000
"""Padded tokens of one part, of the user's texts and of the shipped ones each."""

ROW_TOKENS = 256
"""A text is cut there: one essay says no more than its first page, and costs its square."""

Runner = Callable[[Path, Sequence[str]], Iterator[tuple[Case, Mapping[str, np.ndarray]]]]
"""Runs an ONNX file over a part's cases and yields the named outputs of each."""


def is_shipped(case: Case) -> bool:
    """Whether a case holds shipped texts (and is no standard probe)."""
    return case.name.startswith(f"{SHIPPED}-")


@lru_cache(maxsize=1)
def _shipped() -> dict[str, list[Mapping[str, Any]]]:
    return dataset.split(probes.texts())


def shipped_cases(facts: Facts, encode: Encode | None, part: str) -> list[Case]:
    """The shipped texts of a part as the model's task takes them, in batches of like length, PART_TOKENS at most.

    Without a tokenizer the ids are drawn.
    """
    rows = [_as_task(facts.task, n, _shipped()[part]) for n in range(len(_shipped()[part]))]
    return _cases(facts, encode or probes.drawn_encode(facts, 0), rows, SHIPPED)


def data_cases(options: Options, facts: Facts, encode: Encode | None, part: str | None) -> list[Case]:
    """The user's texts as cases: one part of them, or all for None. UsageError for what is wrong with the file."""
    assert options.data is not None
    renamed = dataset.parse_columns(options.columns) if options.columns else None
    rows: Sequence[Mapping[str, Any]] = dataset.read(options.data, facts.task, columns=renamed)
    if part is None:
        return inputs.data_cases(facts, encode, rows)
    try:
        rows = dataset.split(rows)[part]
    except UsageError as error:
        raise UsageError(f"{options.data}: {error}") from error
    return inputs.data_cases(facts, encode, rows) if part == "judge" else _cases(facts, encode, rows, "data")


def cases(options: Options, facts: Facts, encode: Encode | None, part: str) -> list[Case]:
    """Everything that belongs to "calibrate" or "select": the user's own first."""
    own = data_cases(options, facts, encode, part) if options.data is not None else []
    return own + shipped_cases(facts, encode, part)


def _as_task(task: str, n: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A plain text in the columns of a task; what a task pairs it with is its neighbour."""
    text, other = rows[n]["text"], rows[(n + 1) % len(rows)]["text"]
    values: dict[str, Any] = {
        "text": text,
        "tokens": text.split() or [text],
        "question": other[:60],
        "context": text,
        "choices": [other[:80], text[:80]],
        "target": other[:120],
    }
    needed = [column for column in TASKS[task].columns if not column.startswith("[")]
    return {column: values[column] for column in needed}


def _cases(facts: Facts, encode: Encode | None, rows: Sequence[Mapping[str, Any]], name: str) -> list[Case]:
    """Rows as cases of eight, sorted by length so that little of a batch is padding, as far as PART_TOKENS goes.

    Where there are more tokens than that, every n-th batch is left out, so that all lengths stay.
    """
    short = _limited(facts, encode)
    ordered = sorted(rows, key=lambda row: sum(len(str(value)) for value in row.values()))
    made = inputs.data_cases(facts, short, ordered, name=name)
    total = sum(inputs.case_tokens(case) for case in made)
    if total <= PART_TOKENS:
        return made
    kept, spent = [], 0.0
    for case in made:
        spent += inputs.case_tokens(case) * PART_TOKENS / total
        size = sum(inputs.case_tokens(each) for each in kept)
        if size + inputs.case_tokens(case) <= spent or not kept:
            kept.append(case)
    return kept


def _limited(facts: Facts, encode: Encode | None) -> Encode | None:
    """The tokenizer with texts cut so short that a row has about ROW_TOKENS at most."""
    if encode is None:
        return None

    def short(text: str, pair: str | None) -> Mapping[str, list[int]]:
        encoded = encode(text, pair)
        while len(encoded["input_ids"]) > ROW_TOKENS and len(text) > 1:
            keep = ROW_TOKENS / len(encoded["input_ids"])
            text, pair = text[: int(len(text) * keep)], pair if pair is None else pair[: int(len(pair) * keep)]
            encoded = encode(text, pair)
        return encoded

    return short


def runner(work: Work, part: str) -> Runner:
    """Runs a file over one part of the texts on the provider that was chosen, one session each time it is called.

    The part's cases are made once; nothing of a case is kept after it was handed out.
    """
    found = cases(work.options, work.facts, work.encode, part)

    def run(path: Path, outputs: Sequence[str]) -> Iterator[tuple[Case, Mapping[str, np.ndarray]]]:
        from nlpconvert.backends import onnxruntime

        session = onnxruntime.open_file(path, device="cpu", threads=work.options.threads)
        try:
            for case in found:
                yield case, session.tap(case.inputs, outputs)
        finally:
            session.close()

    return run

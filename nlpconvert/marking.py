"""Floor 1: one model's answers to labelled rows, marked: arrays in, a row's numbers out.

What would be right stands in the batch (`labelled`), what the numbers mean in `validators.metrics`. The same is done to
the reference and to the candidate, and nothing here knows which of the two it has before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nlpconvert.errors import UsageError
from nlpconvert.labelled import Batch, Entry, Labels
from nlpconvert.models import Facts
from nlpconvert.tokens import Reader
from nlpconvert.validators import metrics, metrics_text
from nlpconvert.validators.metrics import IGNORED, Answers, Metric

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Marker:
    """Marks batches by one metric. `abstains`: some question of the data has no answer, so a model may give none."""

    metric: Metric
    facts: Facts
    labels: Labels
    reader: Reader
    abstains: bool = False

    def mark(self, batch: Batch, given: Arrays, into: Answers) -> None:
        """Adds a batch's rows. `given`: the model's outputs by name, (rows, ...).

        UsageError where the model's head does not fit the metric or the data's labels.
        """
        by = _BY.get(self.metric.name) or _BY[self.facts.task]
        by(self, batch, given, into)

    def mark_texts(self, batch: Batch, said: Sequence[Sequence[int]], into: Answers) -> None:
        """Adds a batch's rows by the texts that were generated, given as ids."""
        for entry, ids in zip(batch.entries, said, strict=True):
            text, wanted = self.reader.decode(ids).strip(), entry.wanted.strip()
            into.add({"bleu": metrics_text.bleu_counts(text, wanted), "exact_match": (text == wanted, 1)}, text)

    @property
    def average(self) -> tuple[str, str]:
        """Over what F1 is a mean, and where its labels come from, in words; ("", "") for a score without labels."""
        if self.metric.name != "f1":
            return "", ""
        source = self.labels.source
        if self.facts.task == "token-classification":
            if not source:
                return (
                    "micro over entities",
                    "numbers, each a kind: no config.json beside the artifact has names",
                )
            return "micro over entities", f"{len(self.labels.names):,} tags of {source}"
        which = f"{len(self.labels.names):,} of {source}" if source else "numbers of the logits, which nothing names"
        return "macro over labels", f"{which}; one that no row has and the model never gives does not count"

    def shift(self, batch: Batch, row: int) -> int:
        """Where the first real token of a row stands: 0, or after the padding where that is on the left."""
        if self.facts.positions != "mask":
            return 0
        return int(batch.inputs["input_ids"].shape[-1]) - len(batch.entries[row].items[0].rows[0].ids)


def abstains(batches: Sequence[Batch]) -> bool:
    """Whether some question has no answer, as in SQuAD 2.0."""
    return any(not entry.wanted for batch in batches for entry in batch.entries)


def doubt(marker: Marker, batches: Sequence[Batch], answers: Answers, who: str) -> str:
    """A sentence where a model is right no more often than the most common label would be; "" where it is, or has none.

    `who` begins it: "the reference itself". Data with one label only has no such thing.
    """
    pairs: list[tuple[Hashable, Hashable]] = []
    entries = [entry for batch in batches for entry in batch.entries]
    if marker.metric.name not in ("accuracy", "f1"):
        return ""
    for entry, decision in zip(entries, answers.decisions, strict=True):
        if isinstance(decision, tuple):
            pairs += zip(decision, _scored_tags(entry), strict=True)
        else:
            pairs.append((decision, entry.wanted))
    common = Counter(wanted for _, wanted in pairs).most_common(1)[0][1]
    right = sum(decision == wanted for decision, wanted in pairs)
    if common == len(pairs) or right > common:
        return ""
    noun = "words" if any(entry.tokens for entry in entries) else "rows"
    return (
        f"{who} is right in {right / len(pairs):.0%} of the {noun}, no better than always saying the most common label "
        f"({common / len(pairs):.0%}): are these labels this model's?".replace("%", " %")
    )


def _scored_tags(entry: Entry) -> list[int]:
    """The tags of words that are scored: neither cut off nor ignored."""
    return [tag for place, tag in zip(entry.tokens, entry.wanted, strict=True) if place is not None and tag != IGNORED]


def _classified(marker: Marker, batch: Batch, given: Arrays, into: Answers) -> None:
    """Text classification and multiple choice: logits (rows, labels)."""
    logits = given["logits"]
    count = logits.shape[-1]
    if count == 1:
        raise UsageError(
            f"--metric {marker.metric.name}: the model gives one number a text and no labels; use spearman, which "
            "compares that number with the data's"
        )
    for entry, row in zip(batch.entries, logits, strict=True):
        if entry.wanted >= count:
            raise UsageError(f"{batch.about}: label {entry.wanted} is none of the model's {count} (numbers from 0)")
        decision = metrics.decided(row)
        into.broken += decision < 0
        numbers: dict[str, Sequence[float] | np.ndarray] = {"accuracy": (decision == entry.wanted, 1)}
        if marker.metric.name == "f1":
            numbers = {"f1": metrics.confusion(decision, entry.wanted, count)}
        into.add(numbers, decision)


def _tagged(marker: Marker, batch: Batch, given: Arrays, into: Answers) -> None:
    """Token classification: logits (rows, tokens, labels), a word read at its first piece."""
    logits = given["logits"]
    for row, entry in enumerate(batch.entries):
        shift = marker.shift(batch, row)
        read = [
            (metrics.decided(logits[row, shift + place]), tag)
            for place, tag in zip(entry.tokens, entry.wanted, strict=True)
            if place is not None and tag != IGNORED
        ]
        into.broken += any(decision < 0 for decision, _ in read)
        numbers: dict[str, Sequence[float] | np.ndarray] = {
            "accuracy": (sum(decision == tag for decision, tag in read), len(read))
        }
        if marker.metric.name == "f1":
            found, wanted = ([marker.labels.name(each[side]) for each in read] for side in (0, 1))
            numbers = {"f1": metrics.entities(found, wanted)}
        into.add(numbers, tuple(decision for decision, _ in read))


def _answered(marker: Marker, batch: Batch, given: Arrays, into: Answers) -> None:
    """Question answering: start and end logits (rows, tokens)."""
    for row, entry in enumerate(batch.entries):
        text = _answer(marker, batch, row, entry, given, into)
        into.add(
            {
                "f1": (metrics_text.word_f1(text, entry.wanted), 1),
                "exact_match": (metrics_text.exact_match(text, entry.wanted), 1),
            },
            text,
        )


def _answer(marker: Marker, batch: Batch, row: int, entry: Entry, given: Arrays, into: Answers) -> str:
    """The context's characters from the best span's first token to its last; "" for none."""
    assert entry.reading is not None
    shift, size = marker.shift(batch, row), len(entry.reading.ids)
    start, end = (given[name][row, shift : shift + size] for name in ("start_logits", "end_logits"))
    sides = np.array([side == 1 for side in entry.reading.sides])
    into.broken += not (np.isfinite(start[sides]).all() and np.isfinite(end[sides]).all())
    found = metrics.best_span(start, end, sides)
    if found is None or (marker.abstains and float(start[0]) + float(end[0]) > found[2]):
        return ""
    first, last, _ = found
    return entry.text[entry.reading.offsets[first][0] : entry.reading.offsets[last][1]]


def _correlated(marker: Marker, batch: Batch, given: Arrays, into: Answers) -> None:
    """A number a row beside the data's: the cosine of two embeddings, or a regression head's own."""
    if marker.facts.task == "sentence-embedding":
        states = given["sentence_embedding"]
        found = [metrics.cosine(states[2 * row], states[2 * row + 1]) for row in range(len(batch.entries))]
    else:
        if given["logits"].shape[-1] != 1:
            raise UsageError(
                f"--metric spearman: the model gives {given['logits'].shape[-1]} labels, not one number a text; use "
                "accuracy or f1"
            )
        found = [float(value) for value in given["logits"][:, 0]]
    for entry, value in zip(batch.entries, found, strict=True):
        into.broken += not np.isfinite(value)
        into.add({"spearman": (value, entry.wanted)})


def _continued(marker: Marker, batch: Batch, given: Arrays, into: Answers) -> None:
    """The next tokens: logits (rows, tokens, vocabulary). A target's are padded on the right, always."""
    decoder = "decoder_input_ids" in batch.inputs
    for row, entry in enumerate(batch.entries):
        shift = 0 if decoder else marker.shift(batch, row)
        wanted = np.array(entry.wanted, dtype=np.int64)
        nats = metrics.surprise(given["logits"][row, shift : shift + len(wanted)], wanted)
        into.broken += not np.isfinite(nats)
        into.add({"perplexity": (nats, len(wanted))})


_BY: dict[str, Callable[[Marker, Batch, Arrays, Answers], None]] = {
    "spearman": _correlated,
    "perplexity": _continued,
    "text-classification": _classified,
    "multiple-choice": _classified,
    "token-classification": _tagged,
    "question-answering": _answered,
}

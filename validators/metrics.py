"""Floor 1, validators: what a model is worth on labelled data, row by row: the metrics and their formulas.

A model's answers to a row become a few numbers (how many were right, of how many), and a metric is a formula over their
sums, so that resampling rows costs one matrix product. Spearman's correlation alone is computed from the rows anew.
Words are `metrics_text`, what a sample of rows can say is `statistics`, who runs the model is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nlpconvert.errors import UsageError
from nlpconvert.validators import statistics

LONGEST_ANSWER = 30
"""Tokens of an answer's span at most, as in transformers' own evaluation on SQuAD."""
IGNORED = -100
"""A tag that is not scored, as PyTorch's losses have it."""


@dataclass(frozen=True)
class Score:
    """One number of a metric: its name, its formula over rows, which way is better, the largest it can be (or None)."""

    name: str
    formula: str
    better: str = "higher"
    top: float | None = 1.0


@dataclass(frozen=True)
class Metric:
    """One row: a metric, the scores it gives, the tasks it fits, and the columns of the data it needs besides."""

    name: str
    scores: tuple[Score, ...]
    tasks: Mapping[str, str]
    """Task to the column that holds what is right."""
    more: tuple[str, ...] = ()
    """Columns that a task itself does not have."""


METRICS: dict[str, Metric] = {
    row.name: row
    for row in (
        Metric(
            "accuracy",
            (Score("accuracy", "ratio"),),
            {"text-classification": "label", "multiple-choice": "label", "token-classification": "tags"},
        ),
        Metric(
            "f1",
            (Score("f1", "f1"),),
            {"text-classification": "label", "token-classification": "tags"},
        ),
        Metric(
            "spearman",
            (Score("spearman", "spearman"),),
            {"sentence-embedding": "score", "text-classification": "score"},
            more=("text_pair", "score"),
        ),
        Metric("squad", (Score("f1", "ratio"), Score("exact_match", "ratio")), {"question-answering": "answers"}),
        Metric(
            "perplexity",
            (Score("perplexity", "exponential", "lower", None),),
            {"text-generation": "text", "text2text-generation": "target"},
        ),
        Metric(
            "bleu",
            (Score("bleu", "bleu", top=100.0), Score("exact_match", "ratio")),
            {"text2text-generation": "target"},
        ),
    )
}


def metric_for(name: str, task: str) -> Metric:
    """The row of a metric. UsageError for a word that is none, or that does not fit the task, naming those that do."""
    if name not in METRICS:
        raise UsageError(f"--metric: {name!r} is none of {', '.join(METRICS)}")
    if task not in METRICS[name].tasks:
        fitting = [row.name for row in METRICS.values() if task in row.tasks]
        raise UsageError(
            f"--metric {name} does not fit {task}: "
            + (f"{' and '.join(fitting)} {'does' if len(fitting) == 1 else 'do'}" if fitting else "no metric does")
        )
    return METRICS[name]


@dataclass
class Answers:
    """What one model's answers to all rows come to.

    `statistics`: by score, float64 (rows, numbers). `decisions`: one value a row that says what was decided, None for a
    metric without decisions. `broken`: rows whose answer is not finite.
    """

    statistics: dict[str, list[np.ndarray]] = field(default_factory=dict)
    decisions: list[Hashable] = field(default_factory=list)
    broken: int = 0

    def add(self, numbers: Mapping[str, Sequence[float] | np.ndarray], decision: Hashable = None) -> None:
        """One row: its numbers by score, and what was decided."""
        for name, values in numbers.items():
            self.statistics.setdefault(name, []).append(np.asarray(values, dtype=np.float64))
        self.decisions.append(decision)

    def rows(self, score: str) -> np.ndarray:
        """The numbers of one score, (rows, numbers)."""
        return np.stack(self.statistics[score])


# -- a row's numbers ---------------------------------------------------------------------------------------------------


def decided(logits: np.ndarray) -> int:
    """The label of the largest of (labels,) logits; -1, which is no label, where one is not finite."""
    return int(np.argmax(logits)) if np.isfinite(logits).all() else -1


def confusion(decision: int, wanted: int, labels: int) -> np.ndarray:
    """A row's part of macro F1: for each label (true positive, predicted, true), (labels * 3,)."""
    numbers = np.zeros((labels, 3))
    if decision >= 0:
        numbers[decision, 1] = 1
    numbers[wanted, 2] = 1
    numbers[wanted, 0] = float(decision == wanted)
    return numbers.reshape(-1)


def spans(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """The entities of a row of tags as (start, end, kind): as conlleval and seqeval's default read them.

    B and S open one, and so does an I or E where none of its kind is open; E and S close it, and L and U are read as E
    and S. Tags without such a letter ("PER") are a kind each, and equal neighbours one entity.
    """
    found: set[tuple[int, int, str]] = set()
    start, opened = 0, ""
    for index, tag in enumerate([*tags, "O"]):
        letter, dash, kind = tag.partition("-")
        letter = {"L": "E", "U": "S"}.get(letter, letter)
        if letter not in ("B", "I", "E", "S", "O") or (letter == "O" and tag != "O") or (letter != "O" and not dash):
            letter, kind = "I", tag
        if opened and (letter in "OBS" or kind != opened):
            found.add((start, index, opened))
            opened = ""
        if letter == "O":
            continue
        if not opened:
            start, opened = index, kind
        if letter in "ES":
            found.add((start, index + 1, opened))
            opened = ""
    return found


def entities(candidate: Sequence[str], wanted: Sequence[str]) -> tuple[int, int, int]:
    """A row's part of micro F1 over entities: found rightly (borders and kind), found, and wanted."""
    found, true = spans(candidate), spans(wanted)
    return len(found & true), len(found), len(true)


def best_span(
    start: np.ndarray, end: np.ndarray, inside: np.ndarray, longest: int = LONGEST_ANSWER
) -> tuple[int, int, float] | None:
    """The best answer: (first token, last token, sum of their logits), first <= last < first + `longest`.

    `start`, `end`: logits (tokens,); `inside`: where an answer may stand. None where nothing may, or no sum is finite.
    """
    places = np.flatnonzero(inside)
    if not places.size:
        return None
    total = start[places].astype(np.float64)[:, None] + end[places].astype(np.float64)[None, :]
    far = places[None, :] - places[:, None]
    total[(far < 0) | (far >= longest) | ~np.isfinite(total)] = -np.inf
    first, last = np.unravel_index(int(np.argmax(total)), total.shape)
    best = float(total[first, last])
    return (int(places[first]), int(places[last]), best) if np.isfinite(best) else None


def surprise(logits: np.ndarray, wanted: np.ndarray) -> float:
    """Negative log-likelihood of the wanted ids, summed, in nats: logits (tokens, vocabulary), ids (tokens,).

    Infinite where a logit is not finite: such a model has said nothing.
    """
    if not len(wanted):
        return 0.0
    values = logits.astype(np.float64)
    top = values.max(axis=-1, keepdims=True)
    if not np.isfinite(values).all():
        return float("inf")
    total = np.log(np.exp(values - top).sum(axis=-1)) + top[:, 0]
    return float((total - values[np.arange(len(wanted)), wanted]).sum())


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Cosine of two embeddings, (hidden,) each; NaN where one is not finite, 0.0 where one is nothing."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    size = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / size if size else 0.0


# -- formulas ----------------------------------------------------------------------------------------------------------


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """part / whole, 0 where whole is 0."""
    found: np.ndarray = np.divide(part, whole, out=np.zeros_like(part, dtype=np.float64), where=whole > 0)
    return found


def _f1(sums: np.ndarray) -> np.ndarray:
    """Mean over kinds of 2 * right / (found + wanted); a kind that is neither found nor wanted does not count.

    Sums of (right, found, wanted) for each kind. With one kind it is micro F1. As scikit-learn's macro F1.
    """
    kinds = sums.reshape(*sums.shape[:-1], -1, 3)
    both = kinds[..., 1] + kinds[..., 2]
    return _share(_share(2 * kinds[..., 0], both).sum(-1), (both > 0).sum(-1).astype(np.float64))


def _exponential(sums: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        found: np.ndarray = np.exp(_share(sums[..., 0], sums[..., 1]))
    return found


def _bleu(sums: np.ndarray) -> np.ndarray:
    """Corpus BLEU, 0 to 100, from sums of n-gram matches (4), n-grams (4), candidate's and reference's words.

    As sacrebleu computes it: the n-th order without a match counts as half of what the one before it would (Chen and
    Cherry 2014, method 3), and 0 where an order has no n-gram at all. (Papineni et al., ACL 2002.)
    """
    right, total, ours, theirs = sums[..., :4], sums[..., 4:8], sums[..., 8], sums[..., 9]
    halvings = np.cumsum(right == 0, axis=-1)
    matches = np.where(right == 0, 0.5**halvings, right)
    defined = (total > 0).all(-1) & (right.sum(-1) > 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        precision = np.exp(np.log(matches / total).mean(-1))
        brevity = np.where(ours < theirs, np.exp(1 - theirs / np.maximum(ours, 1e-12)), 1.0)
    found: np.ndarray = np.where(defined, 100 * precision * brevity, 0.0)
    return found


_ADDITIVE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "ratio": lambda sums: _share(sums[..., 0], sums[..., 1]),
    "f1": _f1,
    "exponential": _exponential,
    "bleu": _bleu,
}


def _spearman(rows: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation of (rows, 2), each row as often as `drawn` says, (resamples, rows): Pearson's of the
    ranks, ties at their mean; 0 without spread. Sorted once, for all resamples."""
    ranks = [_ranks(column, drawn) for column in rows.T]
    ranks = [rank - (drawn * rank).sum(axis=-1, keepdims=True) / drawn.sum(axis=-1, keepdims=True) for rank in ranks]
    size = np.sqrt(np.prod([(drawn * rank**2).sum(axis=-1) for rank in ranks], axis=0))
    return _share((drawn * ranks[0] * ranks[1]).sum(axis=-1), size)


def _ranks(values: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """The rank of each value among those drawn, ties at their mean: (rows,) and (resamples, rows) to the latter."""
    order = np.argsort(values, kind="stable")
    _, starts, group = np.unique(values[order], return_index=True, return_inverse=True)
    alike = np.add.reduceat(drawn[:, order], starts, axis=1)
    middle = np.cumsum(alike, axis=1) - (alike - 1) / 2
    ranks: np.ndarray = np.empty_like(drawn)
    ranks[:, order] = middle[:, group]
    return ranks


def value(formula: str, rows: np.ndarray) -> float:
    """A score of all rows, (rows, numbers)."""
    if formula == "spearman":
        return float(_spearman(rows, np.ones((1, len(rows))))[0])
    return float(_ADDITIVE[formula](rows.sum(axis=0)))


def resampled(formula: str, rows: np.ndarray) -> statistics.Resampled:
    """The same over drawn rows, for `statistics.resample`."""
    if formula == "spearman":
        return lambda index: _spearman(rows, statistics.counts(index))

    def additive(index: np.ndarray) -> np.ndarray:
        sums: np.ndarray = statistics.counts(index) @ rows
        return _ADDITIVE[formula](sums)

    return additive

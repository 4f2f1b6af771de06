"""Floor 1: what a benchmark asks: batches of given size and length, and texts in batches of a policy.

Ids are those of real texts (the probes'), since some kernels take as long as their values let them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from nlpconvert.bench.policies import Batches
from nlpconvert.errors import UsageError
from nlpconvert.inputs import Case, Item, Row, collate, items_of
from nlpconvert.models import TASKS, Facts

CHOICES = 2
"""Rows of one question of multiple choice."""
TARGET = 64
"""Tokens that a decoder reads beside an encoder's, at most."""
LARGEST = 1 << 30
"""Bytes of the answers of one batch; a larger one is left out."""


class Rows:
    """Batches of any size and length from the real tokens of cases."""

    def __init__(self, facts: Facts, cases: Iterable[Case]) -> None:
        self.facts = facts
        special = set(facts.special_ids) | {facts.pad_id}
        found = [np.unique(case.inputs["input_ids"]) for case in cases]
        ids = [int(each) for each in np.unique(np.concatenate(found)) if int(each) not in special] if found else []
        self._ids = np.array(ids or [0], np.int64)

    def batch(self, rows: int, length: int) -> dict[str, np.ndarray]:
        """A batch of full rows: nothing is padded."""
        rng = np.random.default_rng((rows, length))
        count = CHOICES if TASKS[self.facts.task].choices else 1

        def row() -> Row:
            drawn = rng.choice(self._ids, length).tolist()
            if self.facts.required_token is not None:
                drawn[-1] = self.facts.required_token
            return Row(tuple(drawn), (0,) * length)

        target = min(length, TARGET)
        items = [
            Item(tuple(row() for _ in range(count)), tuple(rng.choice(self._ids, target).tolist())) for _ in range(rows)
        ]
        return collate(self.facts, items, left=self.facts.positions == "mask")


def lengths_for(facts: Facts, wanted: Sequence[int], *, named: bool) -> tuple[tuple[int, ...], str]:
    """The lengths that the model takes, ascending; what is past its limit becomes the limit, with a line that says so.
    UsageError where the user named one that is."""
    limit = facts.max_length
    past = [length for length in wanted if limit is not None and length > limit]
    if past and named:
        raise UsageError(f"--length {past[0]}: the model takes {limit} tokens at most")
    least = max(facts.trace_length, 1)
    kept = tuple(sorted({max(min(length, limit or length), least) for length in wanted}))
    words = f"lengths above the model's {limit} tokens were measured at {limit}" if past else ""
    return kept, words


def bytes_of_answers(facts: Facts, widths: dict[str, int], rows: int, length: int) -> int:
    """Bytes of the float32 answers to a batch. `widths`: size of the fixed axes by output."""
    total = 0
    for output in facts.outputs:
        size = rows * widths.get(output.name, 1)
        size *= CHOICES if "choices" in output.axes else 1
        size *= length if "sequence" in output.axes else 1
        size *= min(length, TARGET) if "decoder_sequence" in output.axes else 1
        total += 4 * size
    return total


# ---- texts -----------------------------------------------------------------------------------------------------------


class Texts:
    """Texts as the model reads them, and batches of them. Of multiple choice those with the commonest number.
    `distinct`: each text once, as of probes, which ask the same in several companies."""

    def __init__(self, facts: Facts, cases: Iterable[Case], *, distinct: bool = False) -> None:
        self.facts = facts
        found = items_of(cases, facts)
        if found:
            common = Counter(len(item.rows) for item in found).most_common(1)[0][0]
            found = [item for item in found if len(item.rows) == common]
        self.items = tuple(dict.fromkeys(found) if distinct else found)
        self.lengths = tuple(max(len(row.ids) for row in item.rows) for item in self.items)

    def some(self, most: int) -> Texts:
        """At most so many, evenly taken, in their order."""
        kept = Texts(self.facts, ())
        places = np.unique(np.linspace(0, len(self.items) - 1, min(most, len(self.items))).round().astype(int))
        kept.items = tuple(self.items[place] for place in places.tolist())
        kept.lengths = tuple(self.lengths[place] for place in places.tolist())
        return kept

    def batches(self, planned: Batches) -> list[dict[str, np.ndarray]]:
        """The inputs of each batch of a plan."""
        left = self.facts.positions == "mask"
        return [
            collate(self.facts, [self.items[place] for place in rows], left=left, length=width)
            for rows, width in zip(planned.rows, planned.widths, strict=True)
        ]

"""Floor 3: what a student is trained on: the texts of the calibrate part, in batches that never end.

Rows are taken out of the cases they stand in, put into batches of like length, and shown otherwise every time: a span
of one, or some of its words replaced. The reference answers whatever it is asked, so nothing has to be labelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nlpconvert import inputs
from nlpconvert.errors import UsageError
from nlpconvert.inputs import Item, Row
from nlpconvert.models import Facts

BATCH_TOKENS = 64
"""Padded tokens of a batch, for each of its rows: a batch of long texts has fewer rows."""
WINDOW = 8
"""Batches whose rows are put in order of length together."""

SPAN, REPLACED = 0.3, 0.2
"""How often a row is a span of its text, and how often some of its tokens are others."""
TOKENS = 0.15
"""How many of them, then."""


@dataclass(frozen=True)
class Texts:
    """Rows and how they are asked."""

    facts: Facts
    items: Sequence[Item]
    batch: int
    seed: int
    varied: bool = True

    def __post_init__(self) -> None:
        if len(self.items) < self.batch:
            raise UsageError(
                f"{len(self.items)} texts to train on are fewer than one batch of {self.batch}: give more --data, or a "
                "smaller --batch"
            )

    def batches(self) -> Iterator[Mapping[str, np.ndarray]]:
        """Batches of at most `batch` rows and BATCH_TOKENS times as many tokens; every text once, then all again."""
        random = np.random.default_rng(self.seed)
        while True:
            order = random.permutation(len(self.items))
            for start in range(0, len(order), WINDOW * self.batch):
                shown = [self._shown(self.items[n], random) for n in order[start : start + WINDOW * self.batch]]
                parts = self._parts(sorted(shown, key=_width))
                for number in random.permutation(len(parts)):
                    yield inputs.collate(self.facts, parts[number], left=self.facts.positions == "mask")

    def _parts(self, items: Sequence[Item]) -> list[list[Item]]:
        parts: list[list[Item]] = []
        for item in items:
            last = parts[-1] if parts else []
            rows = (len(last) + 1) * len(item.rows)
            full = len(last) == self.batch or rows * _width(item) > self.batch * BATCH_TOKENS
            if not last or full or len(last[0].rows) != len(item.rows):
                parts.append([])
            parts[-1].append(item)
        return parts

    def _shown(self, item: Item, random: np.random.Generator) -> Item:
        return replace(item, rows=tuple(self._row(row, random) for row in item.rows)) if self.varied else item

    def _row(self, row: Row, random: np.random.Generator) -> Row:
        """A row as it is, a span of it, or with other tokens; special ones at its ends stay."""
        ids, types = np.array(row.ids), np.array(row.types)
        special = np.isin(ids, self.facts.special_ids)
        first = int(np.argmin(special)) if not special.all() else len(ids)
        last = len(ids) - int(np.argmin(special[::-1])) if not special.all() else len(ids)
        length = last - first
        keep = np.ones(len(ids), bool)
        if length > 2 and random.random() < SPAN:
            size = int(random.integers(1, length + 1))
            start = first + int(random.integers(0, length - size + 1))
            keep[first:last] = False
            keep[start : start + size] = True
        if length and random.random() < REPLACED:
            other = (random.random(len(ids)) < TOKENS) & ~special
            drawn = random.integers(0, self.facts.vocab_size, len(ids))
            other &= ~np.isin(drawn, self.facts.special_ids)
            ids = np.where(other, drawn, ids)
        return Row(tuple(map(int, ids[keep])), tuple(map(int, types[keep])))


def _width(item: Item) -> int:
    """Tokens of an item's longest row, its target among them."""
    return max(len(item.target), *(len(row.ids) for row in item.rows))

"""Floor 1: the standard probe set: which batches a model is asked, and the example it is exported at.

The texts are `data/probes.jsonl`: one row each of {"text", "pair", "target", "lang"}, written for this project; `lang`
is a language or the kind of text. How texts become arrays is `inputs`; the user's own texts are `dataset`.

What the set must cover is rules 2, 3 and 6 of the design: languages and lengths, empty and one-token texts, right, left
and holed padding, a fully masked row, both sides of the export example and of every architectural constant, the length
limit, and the same text alone, in company and under more padding.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from nlpconvert.inputs import Case, Encode, Item, Row, Texts, Twin, case_axes, case_tokens, collate, tokenize_with
from nlpconvert.models import TASKS, Facts

BUDGET = 6000
"""Padded tokens of the whole set, decoder included: what a small CI machine answers in seconds."""

LONGEST = 512
"""Length of the longest case where the model's limit is unknown or above `TRUE_LIMIT`."""

TRUE_LIMIT = 1024
"""Up to this limit the longest case is exactly as long as the model allows."""

FILL_LENGTHS = (1, 2, 3, 33, 40, 64)
"""Sequence lengths asked besides those of the named cases: far from the export example's, both ways."""

DECODER_LENGTHS = (5, 1, 17, 2, 9, 33)
"""Decoder lengths, one case after the other."""


@dataclass(frozen=True)
class Probe:
    """One shipped text. `lang` is its language, or its kind: "code", "emoji", "empty", "pair", ..."""

    text: str
    lang: str
    pair: str | None = None
    target: str = ""


def _shipped() -> bytes:
    return (files("nlpconvert") / "data" / "probes.jsonl").read_bytes()


@lru_cache(maxsize=1)
def probe_rows() -> tuple[Probe, ...]:
    """The shipped texts, in the file's order."""
    return tuple(Probe(**json.loads(line)) for line in _shipped().decode("utf-8").splitlines() if line)


@lru_cache(maxsize=1)
def texts() -> tuple[dict[str, str], ...]:
    """The shipped texts for fitting and judging precision, {"text", "lang"} each; none is a probe."""
    data = files("nlpconvert").joinpath("data", "texts.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in data.split("\n") if line)


def probe_set_sha256() -> str:
    """Hash of the shipped file: which probe set a verdict rests on."""
    return hashlib.sha256(_shipped()).hexdigest()


def drawn_encode(facts: Facts, seed: int) -> Encode:
    """What stands in for a tokenizer where a model has none: ids drawn over the vocabulary, seeded by the text.

    About a token for four characters; the same text gives the same ids; no pad, end or other special id inside.
    """
    special = {*facts.special_ids, facts.pad_id, facts.eos_id, facts.required_token}
    usable = np.array([i for i in range(facts.vocab_size) if i not in special] or range(facts.vocab_size), np.int64)

    def draw(text: str) -> list[int]:
        count = sum(math.ceil(len(word) / 4) for word in text.split())
        rng = np.random.default_rng([seed, zlib.crc32(text.encode("utf-8"))])
        return [int(i) for i in usable[rng.integers(0, len(usable), count)]]

    def encode(text: str, pair: str | None) -> dict[str, list[int]]:
        first, second = draw(text), draw(pair or "")
        while facts.max_length is not None and len(first) + len(second) > facts.max_length:
            max(first, second, key=len).pop()  # as tokenizers cut pairs: the longest first
        return {"input_ids": first + second, "token_type_ids": [0] * len(first) + [1] * len(second)}

    return encode


@dataclass(frozen=True)
class _Kit:
    """What cases are made from: the texts through one tokenizer, begun at a place that the seed chooses."""

    facts: Facts
    texts: Texts
    seed: int

    @property
    def choosing(self) -> bool:
        return TASKS[self.facts.task].choices

    @property
    def masked(self) -> bool:
        return "attention_mask" in self.facts.inputs

    @property
    def decoding(self) -> bool:
        return "decoder_input_ids" in self.facts.inputs

    @property
    def pool(self) -> tuple[Probe, ...]:
        """Whole texts in all languages and kinds, turned by the seed."""
        rows = [row for row in probe_rows() if row.lang not in ("word", "character", "space", "empty", "long", "pair")]
        turn = self.seed % len(rows)
        return (*rows[turn:], *rows[:turn])

    def of(self, lang: str, n: int = 0) -> Probe:
        """The n-th shipped text of a language or kind, round and round."""
        rows = [row for row in probe_rows() if row.lang == lang]
        return rows[n % len(rows)]

    def item(self, probe: Probe, length: int, *, choices: int = 2, target: int = 16) -> Item:
        """A text as its task sends it: alone, as the context of a question, or with several choices.

        Cut where it is longer than `length` tokens; its decoder ids where they are more than `target`.
        """
        parts: list[tuple[str, str | None]]
        if self.choosing:
            parts = [(probe.text, row.target) for row in self.pool[:choices]]
        elif self.facts.task == "question-answering" and probe.pair is None:
            parts = [(self.of("pair", len(probe.text)).text if probe.text else "", probe.text)]
        else:
            parts = [(probe.text, probe.pair if self.facts.pairs else None)]
        rows = tuple(self.texts.row(text, pair, length) for text, pair in parts)
        return Item(rows, self.texts.target(probe.target, target) if self.decoding else ())

    def exact(self, length: int, n: int = 0, *, choices: int = 2, target: int = 5) -> Item:
        """An item of exactly `length` tokens, from the pool's n-th text on (a further choice is a token shorter)."""
        sizes = [max(length - c, 1) for c in range(choices)] if self.choosing else [length]
        rows = tuple(self._exact_row(size, n + c) for c, size in enumerate(sizes))
        return Item(rows, self._exact_target(target, n + 3) if self.decoding else ())

    def batch(self, lengths: Sequence[int], n: int, *, choices: int = 2) -> list[Item]:
        """Items of exactly these lengths; decoder lengths go down by two from one that is not the encoder's."""
        longest = DECODER_LENGTHS[n % len(DECODER_LENGTHS)]
        if longest == max(lengths):
            longest += 2
        return [
            self.exact(length, n + 2 * r, choices=choices, target=max(longest - 2 * r, 1))
            for r, length in enumerate(lengths)
        ]

    def _words(self, n: int, length: int, *, targets: bool = False) -> str:
        """The pool's texts (or targets) from the n-th on, one after the other until they hold `length` tokens."""
        words, rows = "", self.pool
        for k in range(len(rows)):
            probe = rows[(n + k) % len(rows)]
            words = f"{words} {probe.target if targets else probe.text}".strip()
            if len(self.texts.row(words).ids) >= length:
                break
        return words

    def _exact_row(self, length: int, n: int) -> Row:
        length = min(length, self.texts.limit)
        words = self._words(n, length)
        row = self.texts.row(words, None, length)
        short = length - len(row.ids)
        if short == 0:
            return row
        # The texts end, or the tokenizer cuts, before the model does: tokens go round, the closing ones stay last.
        end = len(row.ids) - self.texts.tail
        body = row.ids[1:end] or row.ids[:1]
        more = (body * math.ceil(short / len(body)))[:short]
        return Row(row.ids[:end] + more + row.ids[end:], row.types[:end] + (0,) * short + row.types[end:])

    def _exact_target(self, length: int, n: int) -> tuple[int, ...]:
        length = min(length, self.texts.limit)
        ids = self.texts.target(self._words(n, length + 2, targets=True))
        body = ids[1:] or ids
        return (ids + body * math.ceil(length / len(body)))[:length]


def _case(
    kit: _Kit, name: str, about: str, items: Sequence[Item], *, twins: Sequence[Twin] = (), **padding: Any
) -> Case:
    """`padding` is `collate`'s: left, length, blank."""
    return Case(name, collate(kit.facts, items, **padding), about, tuple(twins))


def _company(kit: _Kit) -> Iterator[Case]:
    """Rule 6: one text alone, in company and under more padding, linked as twins."""
    limit = kit.texts.limit
    text = kit.item(kit.of("en", kit.seed), max(min(24, limit // 2), 1), target=5)
    twin = (Twin(0, "alone", 0),)
    yield _case(kit, "alone", "one short English text, batch 1", [text])
    rows = [Twin(r, "alone", 0) for r in range(3)] + [Twin(r, "identical", 0, "identical") for r in (1, 2)]
    yield _case(kit, "identical", "the same text in all of three rows", [text] * 3, twins=rows)
    if not kit.masked:
        return  # without a mask padding is text, and the answer may depend on it
    companion = kit.exact(min(129, limit), 4, target=17)
    yield _case(kit, "with-long", "the same text beside a much longer one", [text, companion], twins=twin)
    size = min(max(len(row.ids) for row in text.rows) + 40, limit)
    more = (Twin(0, "alone", 0, "padding"),)
    yield _case(kit, "extra-padding", "the same text with padding at the right", [text], length=size, twins=more)
    # Absolute positions move under padding at the left: then the reference moves too, and it is the model's own.
    more = (Twin(0, "alone", 0, "padding-left"),)
    about = "the same text with padding at the left"
    yield _case(kit, "extra-padding-left", about, [text], length=size, left=True, twins=more)


def _longest(kit: _Kit) -> Iterator[Case]:
    limit = kit.facts.max_length
    true = limit is not None and limit <= TRUE_LIMIT
    size = limit if limit is not None and true else LONGEST
    about = f"{size} tokens, all that the model can take" if true else f"{size} tokens"
    # The decoder goes to the limit too where there is one.
    yield _case(kit, "limit" if true else "long", about, [kit.exact(size, 1, target=size if true else 40)])


def _padding(kit: _Kit) -> Iterator[Case]:
    """Rules 2 and 3: padding at the right, at the left and with holes; a row without any token; empty texts."""
    limit = kit.texts.limit
    items = kit.batch(_upto(limit, 9, 5, 2), 0, choices=3)
    yield _case(kit, "right-padded", "three lengths, padded at the right", items)
    moved = [Twin(row, "right-padded", 2 - row, "permuted") for row in range(3)]
    yield _case(kit, "permuted", "the same rows in another order", items[::-1], twins=moved)
    yield _case(
        kit, "left-padded", "four lengths, padded at the left", kit.batch(_upto(limit, 23, 11, 3, 1), 1), left=True
    )
    beside = kit.of("de")
    yield _case(kit, "one-character", "a text of one character, batch 1", [kit.item(kit.of("character"), limit)])
    yield _case(
        kit,
        "empty",
        "an empty text, blanks and one word beside a sentence",
        [kit.item(probe, min(40, limit)) for probe in (kit.of("empty"), beside, kit.of("space"), kit.of("word"))],
    )
    yield _case(kit, "empty-alone", "an empty text, batch 1", [kit.item(kit.of("empty"), limit)])
    if not kit.masked:
        return
    items = kit.batch(_upto(limit, 21, 14), 2)
    mask = collate(kit.facts, items)["attention_mask"]
    holes = _holes(mask, kit.seed)
    if holes.any():
        yield _case(kit, "holed", "zeros inside the mask, pad ids under them", items, blank=holes)
    items = kit.batch(_upto(limit, 13, 8), 3)
    nothing = np.zeros_like(collate(kit.facts, items)["attention_mask"], bool)
    nothing[1] = True
    yield _case(kit, "masked-row", "a row whose mask is all zeros beside a normal one", items, blank=nothing)


def _upto(limit: int, *lengths: int) -> list[int]:
    return [min(length, limit) for length in lengths]


def _holes(mask: np.ndarray, seed: int) -> np.ndarray:
    """About a third of each row's real tokens, at least one, never its first or last: bool, the mask's shape."""
    rng = np.random.default_rng([seed, 1])
    holes = np.zeros(mask.shape, bool)
    for index in np.ndindex(mask.shape[:-1]):
        inner = np.flatnonzero(mask[index])[1:-1]
        if len(inner):
            holes[index][rng.choice(inner, max(len(inner) // 3, 1), replace=False)] = True
    return holes


def _pairs(kit: _Kit) -> Iterator[Case]:
    """Two texts in a row, so that token types differ from the mask."""
    size = min(48, kit.texts.limit)
    if kit.facts.pairs:
        probes = [kit.of("pair", kit.seed + n) for n in range(3)]
        yield _case(kit, "pairs", "pairs of texts, three lengths", [kit.item(row, size, choices=4) for row in probes])
        yield _case(kit, "pair-alone", "one pair of texts, batch 1", [kit.item(kit.of("pair", kit.seed + 3), size)])
    elif kit.facts.type_vocab_size > 1 and "token_type_ids" in kit.facts.inputs:
        items = []
        for item in kit.batch(_upto(kit.texts.limit, 19, 12), 4):
            rows = [Row(row.ids, (0,) * (len(row.ids) // 2) + (1,) * -(-len(row.ids) // 2)) for row in item.rows]
            items.append(Item(tuple(rows), item.target))
        yield _case(kit, "token-types", "token types 0 and 1 in halves", items)


def _languages(kit: _Kit) -> Iterator[Case]:
    """All whole texts, in batches that mix languages, kinds and lengths."""
    pool = kit.pool[::2] if kit.choosing else kit.pool
    left = kit.facts.positions == "mask"
    for n in range(5):
        items = [kit.item(row, min(44, kit.texts.limit), choices=2 + n % 3) for row in pool[n::5]]
        langs = ", ".join(dict.fromkeys(row.lang for row in pool[n::5]))
        twins = []
        if n == 1 and kit.masked:  # rule 6 once more, in mixed company: a text of middling length
            row = sorted(range(len(items)), key=lambda r: len(items[r].rows[0].ids))[(len(items) - 1) // 2]
            about = f"a whole text, batch 1: {pool[n + 5 * row].lang}"
            yield _case(kit, "text-alone", about, [items[row]])
            twins = [Twin(row, "text-alone", 0)]
        yield _case(kit, f"texts-{n + 1}", f"whole texts: {langs}", items, left=left, twins=twins)


def _length(kit: _Kit, size: int, about: str) -> Case:
    """A case of exactly `size` tokens a row; a shorter second row where that is cheap."""
    lengths = [size, max(size // 2, 1)] if size <= 64 and size % 2 == 0 else [size]
    return _case(kit, f"length-{size}", about, kit.batch(lengths, size))


def probe_cases(facts: Facts, encode: Encode | None, *, seed: int = 0) -> list[Case]:
    """The standard probe set: about 24 cases, at most BUDGET padded tokens, the same for the same seed.

    The named cases come first, then both sides of every constant (the smallest first) as far as the budget goes, then
    more lengths. Without a tokenizer ids are drawn. Every case keeps to the model's length limit. What the budget left
    out of the constants, `constants_left_out` tells. Raises UsageError when the tokenizer is not the model's.
    """
    kit = _Kit(facts, tokenize_with(facts, encode or drawn_encode(facts, seed)), seed)
    cases: list[Case] = []
    spent = 0

    def take(case: Case) -> None:
        nonlocal spent
        if spent + case_tokens(case) <= BUDGET:
            cases.append(case)
            spent += case_tokens(case)

    for group in (_company, _longest, _padding, _pairs, _languages):
        for case in group(kit):
            take(case)
    wanted = [
        (size, f"rows of {size}, at or beside the architecture's constant {constant}")
        for constant in sorted(set(facts.constants))
        for size in (constant + 1, constant - 1, constant)
    ]
    wanted += [(size, f"rows of {size}") for size in FILL_LENGTHS]
    for size, about in wanted:
        if 1 <= size <= kit.texts.limit and all(case_axes(case)["sequence"] != size for case in cases):
            take(_length(kit, size, about))
    return cases


def constants_left_out(facts: Facts, cases: Sequence[Case]) -> tuple[int, ...]:
    """The constants that the cases do not stand on both sides of: past the length limit, or past the budget."""
    asked = {case_axes(case)["sequence"] for case in cases}
    return tuple(c for c in sorted(set(facts.constants)) if c + 1 not in asked or (c > 1 and c - 1 not in asked))


def export_example(facts: Facts, encode: Encode | None, *, seed: int = 0, least: int = 0) -> dict[str, np.ndarray]:
    """The batch a model is exported at: every axis 2 or more, all of unequal sizes, one row padded at the right.

    (2, 7) with a decoder of 5 and 3 choices, where no architectural constant or limit forbids it. An exporter freezes
    axes of size 1, and those that happen to equal each other or a constant; the sizes avoid that where they can.
    `least`: a sequence length that the model wants its example to reach (`Facts.trace_length`).
    """
    kit = _Kit(facts, tokenize_with(facts, encode or drawn_encode(facts, seed)), seed)
    taken: set[int] = set()

    def pick(*sizes: int) -> int:
        free = [size for size in sizes if size not in taken]
        best = next((size for size in free if size not in facts.constants), free[0] if free else sizes[0])
        taken.add(best)
        return best

    limit = kit.texts.limit
    usual = range(least, least + 9) if least > 7 else (7, 9, 11, 13, 6, 15, 17, 5, 4, 3, 2)
    lengths = [size for size in usual if size <= limit] or [limit]
    sequence = pick(*lengths)
    decoder = pick(*[size for size in (5, 6, 9, 11, 4, 3, 2) if size <= limit] or [limit]) if kit.decoding else 0
    choices = pick(3, 4, 5, 2) if kit.choosing else 1
    batch = pick(2, 3, 4, 5, 6)
    items = [kit.exact(sequence, n, choices=choices, target=decoder) for n in range(batch - 1)]
    items.append(kit.exact(max(sequence - 2, 1), batch, choices=choices, target=max(decoder - 2, 1)))
    return collate(facts, items)

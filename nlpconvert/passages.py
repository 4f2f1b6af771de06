"""Floor 1: what a model that writes is asked: passages of known tokens, prompts to go on from; and what it answered.

A passage is one batch: prompts (a decoder's, padded at the left) or sources (an encoder's, padded at the right), and
the tokens that the decoder reads, known beforehand so that two models can be held against each other place by place.
How they lie on disk is `passages_files`; how models read them `writing`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nlpconvert.inputs import Encode, Texts, tokenize_with
from nlpconvert.models import Facts
from nlpconvert.probes import LONGEST, TRUE_LIMIT, drawn_encode, probe_rows
from nlpconvert.writer import encodes

DEFAULT_BUDGET = 32 << 20
"""Bytes that all kept logits together may take."""
LEAST = 8
"""Positions of each passage whose logits are kept, whatever the budget."""
NEW = 24
FORCED = 12
STEPS = 64
"""Single steps of the passage that shows whether an error grows."""
PLACES = 32
"""Places whose scores are looked at together."""
TEXT_TOKENS = 32
"""Tokens of a text that are read, twice as many of a source: the rest of it says no more about the model."""


@dataclass(frozen=True)
class Passage:
    """One batch. `inputs`: input_ids and attention_mask, int64 (batch, sequence), as `Writer.begin` takes them.

    `tokens`: what the decoder reads, int64 (batch, total): a decoder's prompts and what follows them, or an
    encoder-decoder's start token and target. `prompt`: how many of them are read at once before single steps begin.
    `new`: so many tokens are then written freely after the prompt, 0 for none. `encodes`: the inputs are a source.
    """

    name: str
    about: str
    inputs: Mapping[str, np.ndarray]
    tokens: np.ndarray
    prompt: int
    new: int = 0
    encodes: bool = False

    @property
    def real(self) -> np.ndarray:
        """Where `tokens` are no padding, bool (batch, total)."""
        real = np.ones(self.tokens.shape, bool)
        if not self.encodes:
            real[:, : self.inputs["attention_mask"].shape[1]] = self.inputs["attention_mask"] != 0
        return real

    @property
    def pads(self) -> np.ndarray:
        """Padding before each row's first token, (batch,): 0 throughout for an encoder-decoder."""
        return np.asarray((~self.real).sum(axis=1))

    @property
    def padded(self) -> np.ndarray:
        """Rows with padding in what is read, be it prompt or source, bool (batch,)."""
        return np.asarray((self.inputs["attention_mask"] == 0).any(axis=1))


@dataclass(frozen=True)
class Seen:
    """What one pass over a passage's tokens gave.

    `index`: int64 (n, 2), the (row, place) pairs whose logits are kept; `values`: float32 (n, vocabulary). Of every
    place, (batch, total): `top` and `second`, the two best tokens; `margin` between them; `peak`, the larger absolute
    value of the two; `loss`, minus the log-probability of the token that follows; `finite`; `there`, whether the
    pass came by.
    """

    index: np.ndarray
    values: np.ndarray
    top: np.ndarray
    second: np.ndarray
    margin: np.ndarray
    peak: np.ndarray
    loss: np.ndarray
    finite: np.ndarray
    there: np.ndarray


@dataclass(frozen=True)
class Free:
    """What was written freely: tokens int64 (batch, n), how many of each row are its own, and of every token the margin
    over `second`, the runner-up, and `peak` as in Seen."""

    tokens: np.ndarray
    lengths: np.ndarray
    second: np.ndarray
    margin: np.ndarray
    peak: np.ndarray


@dataclass(frozen=True)
class Known:
    """The reference's answers to a passage: all tokens at once, and what it writes (None where nothing is written)."""

    seen: Seen
    free: Free | None = None


@dataclass(frozen=True)
class Asked:
    """Passages and the reference's answers by name.

    `noise`: the parts of its noise floor, in the unit of `rel`, and "floor". `own`: what the reference itself does that
    a candidate is not blamed for: "steps" (with its cache it answers otherwise) or "company".
    """

    passages: Sequence[Passage]
    known: Mapping[str, Known]
    scale: float
    noise: Mapping[str, float]
    eos: tuple[int, ...] = ()
    not_applicable: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Seeing:
    """Collects a Seen from logits as they come, keeping little of them."""

    def __init__(self, passage: Passage, index: np.ndarray) -> None:
        shape = passage.tokens.shape
        self._tokens = passage.tokens
        self._index = index
        self._values: np.ndarray | None = None
        self._top, self._second = np.full(shape, -1, np.int64), np.full(shape, -1, np.int64)
        self._margin, self._peak = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self._loss = np.full(shape, np.nan, np.float32)
        self._finite, self._there = np.ones(shape, bool), np.zeros(shape, bool)

    def add(self, at: int, logits: np.ndarray, rows: Sequence[int] | np.ndarray | None = None) -> None:
        """Logits (rows, n, vocabulary) of the places from `at` on. `rows`: which rows of the passage they are."""
        chosen = np.arange(len(self._tokens)) if rows is None else np.asarray(rows)
        size, vocabulary = logits.shape[1:]
        if self._values is None:
            self._values = np.full((len(self._index), vocabulary), np.nan, np.float32)
        for i, row in enumerate(chosen):
            for start in range(0, size, PLACES):
                self._places(int(row), at + start, logits[i, start : start + PLACES])
            kept = np.flatnonzero(
                (self._index[:, 0] == row) & (self._index[:, 1] >= at) & (self._index[:, 1] < at + size)
            )
            self._values[kept] = logits[i, self._index[kept, 1] - at]

    def _places(self, row: int, at: int, scores: np.ndarray) -> None:
        """Scores (n, vocabulary) of a row's places from `at` on."""
        where, n = slice(at, at + len(scores)), np.arange(len(scores))
        self._there[row, where] = True
        self._finite[row, where] = np.isfinite(scores).all(axis=1)
        top = scores.argmax(axis=1)
        best = scores[n, top]
        others = scores.copy()
        others[n, top] = -np.inf
        second = others.argmax(axis=1)
        self._top[row, where], self._second[row, where] = top, second
        self._margin[row, where] = best - scores[n, second]
        self._peak[row, where] = np.maximum(np.abs(best), np.abs(scores[n, second]))
        following = self._tokens[row, at + 1 : at + 1 + len(scores)]
        known = n[: len(following)]
        shifted = np.subtract(scores[known], scores[known].max(axis=1, keepdims=True), out=others[known])
        said = shifted[known, following].astype(np.float64)
        total = np.exp(shifted, out=shifted).sum(axis=1, dtype=np.float64)
        self._loss[row, where][known] = np.log(total) - said

    def seen(self) -> Seen:
        """What has come. Raises ValueError when nothing has."""
        if self._values is None:
            raise ValueError("no logits came")
        return Seen(
            self._index,
            self._values,
            self._top,
            self._second,
            self._margin,
            self._peak,
            self._loss,
            self._finite,
            self._there,
        )


def best_two(scores: np.ndarray) -> tuple[int, int]:
    """The two best of some scores (vocabulary,), the first of equals first."""
    top = int(np.argmax(scores))
    others = scores.copy()
    others[top] = -np.inf
    return top, int(np.argmax(others))


# -- which places are kept ---------------------------------------------------------------------------------------------


def places(passage: Passage, count: int, seed: int = 0) -> np.ndarray:
    """int64 (n, 2): at most `count` (row, place) pairs of real tokens, in order.

    Each row's last before single steps begin, the first ones after, its very last and its first come before others,
    which are drawn by the passage's name.
    """
    real = passage.real
    total = real.shape[1]
    wanted: dict[tuple[int, int], None] = {}
    for offset in (passage.prompt - 1, passage.prompt, passage.prompt + 1, total - 1):
        wanted |= {(row, offset): None for row in range(len(real)) if 0 <= offset < total and real[row, offset]}
    wanted |= {(row, int(np.argmax(real[row]))): None for row in range(len(real))}
    digest = hashlib.sha256(f"{seed}/{passage.name}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    wanted |= {(int(row), int(place)): None for row, place in rng.permutation(np.argwhere(real))}
    return np.array(sorted(list(wanted)[:count]), np.int64).reshape(-1, 2)


def shares(passages: Sequence[Passage], vocabulary: int, budget: int = DEFAULT_BUDGET) -> dict[str, int]:
    """How many places of each passage are kept within `budget` bytes: the small ones whole first."""
    left = max(budget // (4 * vocabulary), LEAST * len(passages))
    given = {}
    for count, passage in enumerate(sorted(passages, key=lambda each: int(each.real.sum()))):
        given[passage.name] = min(int(passage.real.sum()), left // (len(passages) - count))
        left -= given[passage.name]
    return given


# -- the standard passages ---------------------------------------------------------------------------------------------


def standard(facts: Facts, encode: Encode | None, *, seed: int = 0, longest: int | None = None) -> list[Passage]:
    """The standard passages: one row, mixed lengths, single steps from the first token on, both sides of every
    architectural constant, and the model's limit, or `longest` tokens where that is less. Without a tokenizer ids are
    drawn."""
    kit = _Kit(facts, tokenize_with(facts, encode or drawn_encode(facts, seed)), seed, longest)
    return list(_pairs(kit)) if encodes(facts) else list(_prompts(kit))


DATA, SHIPPED = "data", "shipped"
"""How passages of the user's own texts, and of those that are shipped, are named."""


def from_data(passage: str) -> bool:
    """Whether a passage of this name holds the user's own texts."""
    return passage.startswith(f"{DATA}-")


def from_texts(
    facts: Facts, encode: Encode, texts: Sequence[tuple[str, str]], *, new: int, batch: int = 8, stem: str = DATA
) -> list[Passage]:
    """Texts, each with its target, as passages "data-0001", ... of `batch` rows, cut at TEXT_TOKENS.

    All rows of a passage have as many tokens: the shortest text's, of which a decoder's prompt is the first half; the
    shortest target's.
    """
    kit = _Kit(facts, tokenize_with(facts, encode), 0)
    made = []
    for number, at in enumerate(range(0, len(texts), batch), start=1):
        part = texts[at : at + batch]
        name, about = f"{stem}-{number:04d}", f"rows {at + 1} to {at + len(part)} of the {stem} texts"
        if encodes(facts):
            targets = [kit.texts.target(target) for _, target in part]
            size = min(TEXT_TOKENS, *(len(target) for target in targets))
            sources = [list(kit.texts.row(text, length=2 * TEXT_TOKENS).ids) for text, _ in part]
            made.append(kit.passage(name, about, sources, [target[:size] for target in targets], 1, new))
        else:
            rows = [kit.body(text) or (facts.pad_id,) for text, _ in part]
            size = min(TEXT_TOKENS, kit.cap, *(len(row) for row in rows))
            made.append(kit.passage(name, about, [row[:size] for row in rows], [], max(size // 2, 1), new))
    return made


@dataclass(frozen=True)
class _Kit:
    facts: Facts
    texts: Texts
    seed: int
    longest: int | None = None

    def end(self) -> tuple[str, int, str]:
        """Name, tokens and words of the longest passage: the model's limit where it is known and not past what may be
        asked."""
        true = self.facts.max_length is not None and self.facts.max_length <= TRUE_LIMIT
        size = min(self.cap, self.cap if true else LONGEST, self.longest or self.cap)
        whole = true and size == self.cap
        return "limit" if whole else "long", size, f"{size} tokens" + (", all that the model can take" if whole else "")

    @property
    def cap(self) -> int:
        return self.texts.limit

    def body(self, text: str) -> tuple[int, ...]:
        """A text's ids without the tokens that close it: something can follow."""
        ids = self.texts.row(text).ids
        return ids[: len(ids) - self.texts.tail] if self.texts.tail else ids

    def exact(self, length: int, n: int) -> list[int]:
        """Exactly `length` ids, the shipped texts from the n-th on."""
        rows = [row.text for row in probe_rows() if len(row.text) > 20]
        words = ""
        for k in range(len(rows)):
            words = f"{words} {rows[(n + self.seed + k) % len(rows)]}".strip()
            if len(self.body(words)) >= length:
                break
        ids = list(self.body(words)) or [self.facts.pad_id]
        return (ids * math.ceil(length / len(ids)))[:length]

    def closed(self, length: int, n: int) -> list[int]:
        """A source of exactly `length` ids, its closing tokens last."""
        closing = list(self.texts.row("plain words").ids)[-self.texts.tail :] if self.texts.tail else []
        closing = closing[-length:]
        return self.exact(length - len(closing), n) + closing

    def passage(
        self,
        name: str,
        about: str,
        rows: Sequence[Sequence[int]],
        targets: Sequence[Sequence[int]],
        prompt: int,
        new: int,
    ) -> Passage:
        """Rows (of a decoder: prompt and what follows, the same number after each prompt) as one batch."""
        size = max(len(row) for row in rows)
        ids = np.full((len(rows), size), self.facts.pad_id, np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            place = slice(0, len(row)) if targets else slice(size - len(row), size)
            ids[number, place], mask[number, place] = row, 1
        if targets:
            tokens = np.array([list(target) for target in targets], np.int64)
            new = min(new, self.cap - 1)
            return Passage(name, about, {"input_ids": ids, "attention_mask": mask}, tokens, prompt, new, True)
        new = min(new, self.cap - prompt)
        inputs = {"input_ids": ids[:, :prompt], "attention_mask": mask[:, :prompt]}
        return Passage(name, about, {k: np.ascontiguousarray(v) for k, v in inputs.items()}, ids, prompt, max(new, 0))


def _prompts(kit: _Kit) -> Iterable[Passage]:
    cap = kit.cap

    def take(name: str, about: str, lengths: Sequence[int], forced: int, new: int) -> Passage:
        longest = min(max(lengths), cap - 1)
        after = max(min(forced, cap - longest), 1)
        rows = [kit.exact(min(length, longest) + after, 3 * n) for n, length in enumerate(lengths)]
        return kit.passage(name, about, rows, [], longest, new)

    yield take("alone", "one short text, batch 1", [9], FORCED, NEW)
    yield take("mixed", "four lengths in one batch, padded at the left", [23, 11, 3, 1], FORCED, NEW)
    yield take("from-one", "single steps from the first token on", [1], min(STEPS, cap - 1), 0)
    for constant in sorted(set(kit.facts.constants)):
        if 3 < constant < min(cap, LONGEST) - 4:
            about = f"past lengths on both sides of the architecture's constant {constant}"
            yield take(f"past-{constant}", about, [constant + 3, constant - 2], 5, 0)
    name, size, about = kit.end()
    yield take(name, about, [size - min(8, size - 1)], 8, 0)


def _pairs(kit: _Kit) -> Iterable[Passage]:
    cap = kit.cap

    def target(length: int, n: int) -> list[int]:
        start = kit.facts.pad_id if kit.facts.decoder_start_id is None else kit.facts.decoder_start_id
        return [start, *kit.exact(max(min(length, cap) - 1, 0), n)][: min(length, cap)]

    def take(name: str, about: str, lengths: Sequence[int], size: int, new: int, prompt: int = 1) -> Passage:
        sources = [kit.closed(min(length, cap), 3 * n) for n, length in enumerate(lengths)]
        # One target for all rows: what differs between them comes from the source alone.
        return kit.passage(name, about, sources, [target(size, 5)] * len(sources), min(prompt, size), new)

    yield take("alone", "one short source, batch 1", [12], FORCED + 1, NEW)
    yield take("mixed", "four sources of other lengths, one target", [23, 11, 4, 2], FORCED + 1, NEW)
    yield take("from-one", "single steps from the start token on", [9], STEPS, 0)
    for constant in sorted(set(kit.facts.constants)):
        if 3 < constant < min(cap, LONGEST) - 4:
            about = f"source and past on both sides of the architecture's constant {constant}"
            yield take(f"past-{constant}", about, [constant + 3, constant - 2], constant + 3, 0, constant - 2)
    name, size, about = kit.end()
    yield take(name, f"source and target of {about}", [size], size, 0, max(size - 8, 1))


def describe(passages: Iterable[Passage]) -> list[dict[str, Any]]:
    """One plain row for each passage: name, about, rows, tokens read, new ones."""
    return [
        {
            "name": each.name,
            "about": each.about,
            "rows": len(each.tokens),
            "tokens": int(each.real.sum()),
            "new": each.new,
        }
        for each in passages
    ]


def sha256(passages: Iterable[Passage]) -> str:
    """Hash of what is asked."""
    digest = hashlib.sha256()
    for each in passages:
        digest.update(f"{each.name}\0{each.prompt}\0{each.new}\0".encode())
        for name, array in (*sorted(each.inputs.items()), ("tokens", each.tokens)):
            digest.update(f"{name}\0{array.dtype.str}\0{array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()

"""Floor 1: what a model is asked: cases, masks, padding, and how texts become rows of a batch.

A Case is one batch as production would send it. The standard texts are `probes`, the user's are read by `dataset`; what
the answers are is the reference's business.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlpconvert.errors import UsageError
from nlpconvert.models import AXIS_MASK, INPUT_AXES, TASKS, Facts

Encode = Callable[[str, str | None], Mapping[str, list[int]]]
"""A tokenizer: text and optional pair to ids with special tokens, no padding, truncated at the model's limit."""

ROW_CAP = 4096
"""Tokens of the user's own text that are used at most, so that one stray document cannot exhaust the memory."""


@dataclass(frozen=True)
class Twin:
    """The same text stands elsewhere: row `row` here is row `other_row` of case `case` (which may be this one).

    `kind` says what is different there, and so what must not matter: one of KINDS.
    """

    row: int
    case: str
    other_row: int
    kind: str = "company"


KINDS: dict[str, str] = {
    "company": "row alone or in company",
    "identical": "identical rows",
    "permuted": "rows in another order",
    "padding": "padding at the right",
    "padding-left": "padding at the left",
    "repeat": "a second run",
}


@dataclass(frozen=True)
class Case:
    """One probe batch. `name` is a slug, the same in manifest, `--case` and JUnit.

    `inputs`: int64 arrays by input name, shaped (batch, sequence) (multiple choice: (batch, choices, sequence)).
    `twins` name rows that must answer the same as a row of another case: the same text in other company or padding.
    `truncated` counts the rows of the user's data that were longer than the limit and were cut.
    """

    name: str
    inputs: Mapping[str, np.ndarray]
    about: str = ""
    twins: tuple[Twin, ...] = ()
    from_data: bool = False
    truncated: int = 0


@dataclass(frozen=True)
class Row:
    """One sequence before padding: token ids and their token types, of equal length."""

    ids: tuple[int, ...]
    types: tuple[int, ...]


@dataclass(frozen=True)
class Item:
    """One entry of the batch axis: its rows (one; for multiple choice one per choice) and its decoder ids."""

    rows: tuple[Row, ...]
    target: tuple[int, ...] = ()


@dataclass(frozen=True)
class Texts:
    """A tokenizer that keeps to the model's facts: text in, `Row` out. Made by `tokenize_with`."""

    facts: Facts
    encode: Encode
    tail: int
    """How many special tokens close a row (BERT 1, GPT-2 0, XLNet 2): a cut keeps them, as truncation does."""
    limit: int

    def row(self, text: str, pair: str | None = None, length: int | None = None) -> Row:
        """The text's row, at most `length` (and never more than the limit) tokens long.

        Raises UsageError when the tokenizer gives an id that the model has no embedding for.
        """
        most = self.limit if length is None else min(length, self.limit)
        encoded = self.encode(text, pair)
        ids = tuple(int(i) for i in encoded["input_ids"])
        for i in ids:
            if not 0 <= i < self.facts.vocab_size:
                raise UsageError(
                    f"the tokenizer gives id {i} for {text[:40]!r} but the model knows {self.facts.vocab_size} ids: "
                    "the tokenizer is not this model's; put the right tokenizer files beside the checkpoint"
                )
        types = encoded.get("token_type_ids")
        if types is None or len(types) != len(ids):
            first = len(ids) if pair is None else min(len(ids), len(self.encode(text, None)["input_ids"]))
            types = [0] * first + [1] * (len(ids) - first)
        top = max(self.facts.type_vocab_size - 1, 0)
        row = cut(Row(ids, tuple(min(int(t), top) for t in types)), most, self.tail)
        required = self.facts.required_token
        if required is None or (pair is not None and row.ids[-1:] == (required,)):
            return row  # a pair keeps the separators that the tokenizer puts between its texts
        kept = [(i, t) for i, t in zip(row.ids, row.types, strict=True) if i != required][: most - 1]
        kept.append((required, kept[-1][1] if kept else 0))
        return Row(tuple(i for i, _ in kept), tuple(t for _, t in kept))

    def target(self, text: str, length: int | None = None) -> tuple[int, ...]:
        """Decoder ids of a target: the start id, then the target without its last closing token (shifted right)."""
        start = self.facts.pad_id if self.facts.decoder_start_id is None else self.facts.decoder_start_id
        ids = self.row(text).ids
        most = self.limit if length is None else min(length, self.limit)
        return (start, *(ids[:-1] if self.tail else ids))[:most]

    def is_cut(self, text: str, pair: str | None = None) -> bool:
        """Whether the text is longer than the limit, though `encode` may have cut it already.

        It is when its end makes no difference: without the last visible character the ids are the same.
        """
        ids = list(self.encode(text, pair)["input_ids"])
        if len(ids) < self.limit:
            return False
        shorter = [(text.rstrip()[:-1], pair)] if text.strip() else []
        shorter += [(text, pair.rstrip()[:-1])] if pair and pair.strip() else []
        return len(ids) > self.limit or any(list(self.encode(a, b)["input_ids"]) == ids for a, b in shorter)


def cut(row: Row, length: int, tail: int) -> Row:
    """The row cut to `length` tokens with its last `tail` tokens kept, which close it."""
    if len(row.ids) <= length:
        return row
    keep = min(tail, length)
    body, end = length - keep, len(row.ids) - keep
    return Row(row.ids[:body] + row.ids[end:], row.types[:body] + row.types[end:])


def tokenize_with(facts: Facts, encode: Encode) -> Texts:
    """Look at the tokenizer once: which tokens close a row is what the empty text and a plain one end in alike."""
    empty, plain = list(encode("", None)["input_ids"]), list(encode("plain words", None)["input_ids"])
    tail = 0
    while tail < min(len(empty), len(plain) - 1) and empty[-1 - tail] == plain[-1 - tail]:
        tail += 1
    if facts.required_token is not None:
        tail = max(tail, 1)
    return Texts(facts, encode, tail, min(facts.max_length or ROW_CAP, ROW_CAP))


def positions_from_mask(mask: np.ndarray) -> np.ndarray:
    """Position ids (int64, the mask's shape): cumsum(mask) - 1 along the last axis, and 1 where the mask is 0.

    As transformers' `generate` computes them: `cumsum(-1) - 1`, then `masked_fill(mask == 0, 1)`.
    """
    positions = np.maximum(np.cumsum(mask, axis=-1, dtype=np.int64) - 1, 0)
    return np.where(mask == 0, np.int64(1), positions)


def collate(
    facts: Facts,
    items: Sequence[Item],
    *,
    left: bool = False,
    length: int | None = None,
    blank: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Pad items to one batch of the inputs that the model takes: int64, C-contiguous, in `facts.inputs` order.

    Rows are padded to the longest, or to `length` where that is longer, at the right or the left; decoder rows always
    at the right. `blank` (bool, broadcast over (batch, sequence), or (batch, choices, sequence)) masks further places.
    A masked place holds the pad id, whatever stood there; only where a model demands a token in every row does a fully
    masked row keep that one, at its end.
    """
    choices = len(items[0].rows)
    rows = [row for item in items for row in item.rows]
    size = max([len(row.ids) for row in rows] + [length or 0])
    ids: np.ndarray = np.full((len(rows), size), facts.pad_id, np.int64)
    mask, types = np.zeros_like(ids), np.zeros_like(ids)
    for r, row in enumerate(rows):
        place = slice(size - len(row.ids), size) if left else slice(0, len(row.ids))
        ids[r, place], types[r, place], mask[r, place] = row.ids, row.types, 1
    if TASKS[facts.task].choices:
        ids, mask, types = (array.reshape(len(items), choices, size) for array in (ids, mask, types))
    if blank is not None:
        ids, mask, types = (
            np.where(blank, np.int64(fill), array) for fill, array in ((facts.pad_id, ids), (0, mask), (0, types))
        )
    if facts.required_token is not None and size:
        ids[mask.sum(-1) == 0, -1] = facts.required_token
    arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    arrays["position_ids"] = positions_from_mask(mask)
    if "decoder_input_ids" in facts.inputs:
        arrays |= _collate_targets(facts, [item.target for item in items])
    return {name: np.ascontiguousarray(arrays[name]) for name in facts.inputs}


def _collate_targets(facts: Facts, targets: Sequence[tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Decoder ids and their mask, padded at the right."""
    ids = np.full((len(targets), max(len(target) for target in targets)), facts.pad_id, np.int64)
    mask = np.zeros_like(ids)
    for r, target in enumerate(targets):
        ids[r, : len(target)], mask[r, : len(target)] = target, 1
    return {"decoder_input_ids": ids, "decoder_attention_mask": mask}


def data_cases(
    facts: Facts, encode: Encode | None, rows: Sequence[Mapping[str, Any]], *, batch: int = 8, name: str = "data"
) -> list[Case]:
    """The user's rows (as `dataset.read` gives them) as cases "data-0001", ... of `batch` rows, in the file's order.

    `name` is another word than "data" for rows that are not the user's.

    Padded to the longest, at the right; at the left where positions come from the mask (decoders). Rows longer than the
    model's limit are cut, and each case's `truncated` counts them. A batch of multiple choice ends early where the
    number of choices changes. Raises UsageError without a tokenizer.
    """
    if encode is None:
        raise UsageError(
            "--data needs the model's tokenizer, and it has none; put the tokenizer files beside the checkpoint"
        )
    texts = tokenize_with(facts, encode)
    batches: list[list[tuple[Item, bool]]] = []
    for row in rows:
        item = _data_item(texts, row)
        if not batches or len(batches[-1]) == batch or len(batches[-1][0][0].rows) != len(item[0].rows):
            batches.append([])
        batches[-1].append(item)
    cases, first = [], 1
    for number, entries in enumerate(batches, start=1):
        truncated = sum(was_cut for _, was_cut in entries)
        about = f"rows {first} to {first + len(entries) - 1} of the {name}"
        cases.append(
            Case(
                f"{name}-{number:04d}",
                collate(facts, [item for item, _ in entries], left=facts.positions == "mask"),
                about + (f", {truncated} cut at {texts.limit} tokens" if truncated else ""),
                from_data=name == "data",
                truncated=truncated,
            )
        )
        first += len(entries)
    return cases


def _data_item(texts: Texts, row: Mapping[str, Any]) -> tuple[Item, bool]:
    """A row of the user's data as an Item, and whether any of it was cut."""
    columns = TASKS[texts.facts.task].columns
    parts: list[tuple[str, str | None]]
    if "choices" in columns:
        parts = [(row["text"], choice) for choice in row["choices"]]
    elif "tokens" in columns:
        parts = [(" ".join(row["tokens"]), None)]
    elif "question" in columns:
        parts = [(row["question"], row["context"])]
    else:
        parts = [(row["text"], row.get("text_pair"))]
    was_cut = any(texts.is_cut(*part) for part in parts)
    target: tuple[int, ...] = ()
    if "decoder_input_ids" in texts.facts.inputs:
        wanted = row.get("target") or parts[0][0]  # without a target the decoder reads the text itself
        target, was_cut = texts.target(wanted), was_cut or texts.is_cut(wanted)
    return Item(tuple(texts.row(*part) for part in parts), target), was_cut


def items_of(cases: Iterable[Case], facts: Facts) -> list[Item]:
    """The rows of cases without their padding; those without a token are left out."""
    return [item for case in cases for item in _items(case, facts)]


def _items(case: Case, facts: Facts) -> list[Item]:
    ids = case.inputs["input_ids"]
    if not ids.size:
        return []
    mask = case.inputs.get("attention_mask", (ids != facts.pad_id).astype(np.int64)) != 0
    types = case.inputs.get("token_type_ids", np.zeros_like(ids))
    shape = (len(ids), -1, ids.shape[-1])
    ids, mask, types = ids.reshape(shape), mask.reshape(shape), types.reshape(shape)
    found = []
    for number in range(len(ids)):
        rows = tuple(
            Row(tuple(map(int, ids[number, r][mask[number, r]])), tuple(map(int, types[number, r][mask[number, r]])))
            for r in range(ids.shape[1])
        )
        target: tuple[int, ...] = ()
        if "decoder_input_ids" in case.inputs:
            decoder = case.inputs["decoder_input_ids"][number]
            real = (
                case.inputs.get("decoder_attention_mask", np.ones_like(case.inputs["decoder_input_ids"]))[number] != 0
            )
            target = tuple(map(int, decoder[real]))
        if all(row.ids for row in rows) and (target or "decoder_input_ids" not in case.inputs):
            found.append(Item(rows, target))
    return found


def case_axes(case: Case) -> dict[str, int]:
    """Size of every dynamic axis of a case: {"batch": 2, "sequence": 7, ...}."""
    sizes: dict[str, int] = {}
    for name, array in case.inputs.items():
        axes = INPUT_AXES[name]
        sizes |= zip((axes[0], "choices", axes[1]) if array.ndim == 3 else axes, array.shape, strict=True)
    return sizes


def case_lengths(case: Case) -> tuple[int, ...]:
    """Real tokens of each row of `input_ids`, padding left out (multiple choice: the choices one after the other)."""
    ids = case.inputs["input_ids"]
    mask = case.inputs.get("attention_mask", np.ones_like(ids))
    return tuple(int(n) for n in (mask != 0).sum(-1).reshape(-1))


def case_tokens(case: Case) -> int:
    """Padded tokens that a model computes for a case: batch times sequence, the decoder's included."""
    return sum(case.inputs[name].size for name in ("input_ids", "decoder_input_ids") if name in case.inputs)


def scored_mask(case: Case, axis: str) -> np.ndarray | None:
    """Where an output's `axis` ("sequence", "decoder_sequence") stands on real tokens: bool (batch, axis).

    None when the axis has no mask or the model takes none: then every place counts.
    """
    name = AXIS_MASK.get(axis)
    return None if name is None or name not in case.inputs else case.inputs[name] != 0


def cases_sha256(cases: Iterable[Case]) -> str:
    """Hash of what is asked: names, input names, types, shapes and values of the cases, in order."""
    digest = hashlib.sha256()
    for case in cases:
        for name, array in case.inputs.items():
            digest.update(f"{case.name}\0{name}\0{array.dtype.str}\0{array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()

"""Masks, padding and the user's rows as batches. The standard probe set is test_probes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

from nlpconvert.errors import UsageError
from nlpconvert.inputs import (
    ROW_CAP,
    Case,
    Item,
    Row,
    case_axes,
    case_lengths,
    case_tokens,
    cases_sha256,
    collate,
    cut,
    data_cases,
    positions_from_mask,
    scored_mask,
    tokenize_with,
)
from nlpconvert.models import TASKS, Facts

PLAIN = ("input_ids", "attention_mask")


def facts(task: str = "text-classification", **changes: object) -> Facts:
    row = Facts(
        model_type="bert",
        task=task,
        inputs=(*PLAIN, "token_type_ids"),
        outputs=TASKS[task].outputs,
        vocab_size=1000,
        pad_id=9,
        eos_id=None,
        decoder_start_id=None,
        max_length=12,
        positions="own",
        type_vocab_size=2,
        constants=(),
        pairs=True,
    )
    return dataclasses.replace(row, **changes)  # type: ignore[arg-type]


def letters(text: str, pair: str | None) -> Mapping[str, list[int]]:
    """A tokenizer with an opening 1 and a closing 2, a token per letter, that does not truncate."""
    ids = [1, *(ord(letter) % 900 + 10 for letter in text), 2]
    return {"input_ids": ids if pair is None else [*ids, *(ord(letter) % 900 + 10 for letter in pair), 2]}


def short_letters(text: str, pair: str | None) -> Mapping[str, list[int]]:
    """The same, truncating at 12 as a real tokenizer does."""
    ids = letters(text, pair)["input_ids"]
    return {"input_ids": ids if len(ids) <= 12 else [*ids[:11], 2]}


def item(*ids: int) -> Item:
    return Item((Row(ids, (0,) * len(ids)),))


def test_positions_as_transformers_counts_them() -> None:
    mask = np.array([[0, 0, 1, 1, 1], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])
    ours = positions_from_mask(mask)
    theirs = torch.tensor(mask).cumsum(-1) - 1
    assert ours.tolist() == theirs.masked_fill(torch.tensor(mask) == 0, 1).tolist()
    assert ours.dtype == np.int64 and ours[0].tolist() == [1, 1, 0, 1, 2]
    assert positions_from_mask(np.zeros((1, 0), np.int64)).shape == (1, 0)


def test_left_padding_with_these_positions_changes_nothing() -> None:
    """What rule 3 rests on, in PyTorch itself; with positions that count from the left it does change."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=1000, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(5)
    row = facts("text-generation", inputs=(*PLAIN, "position_ids"), positions="mask", type_vocab_size=0)
    alone, padded = (collate(row, [item(4, 5, 6, 7)], left=True, length=size) for size in (4, 10))

    def last(batch: Mapping[str, np.ndarray]) -> np.ndarray:
        with torch.no_grad():
            answer = model(**{name: torch.tensor(array) for name, array in batch.items()}).logits[0, -1]
        return np.asarray(answer)

    assert np.abs(last(alone) - last(padded)).max() < 1e-4
    broken = {**padded, "position_ids": np.arange(10, dtype=np.int64)[None]}
    assert np.abs(last(alone) - last(broken)).max() > 1e-2


def test_collate_right_left_and_blank() -> None:
    right = collate(facts(), [item(4, 5, 6), item(7)])
    assert right["input_ids"].tolist() == [[4, 5, 6], [7, 9, 9]]
    assert right["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    left = collate(facts(), [item(4, 5, 6), item(7)], left=True, length=5)
    assert left["input_ids"].tolist() == [[9, 9, 4, 5, 6], [9, 9, 9, 9, 7]]
    blank = np.array([[False, True, False], [True, True, True]])
    holed = collate(facts(inputs=(*PLAIN, "position_ids")), [item(4, 5, 6), item(7)], blank=blank)
    assert holed["input_ids"].tolist() == [[4, 9, 6], [9, 9, 9]]
    assert holed["attention_mask"].tolist() == [[1, 0, 1], [0, 0, 0]]
    assert holed["position_ids"].tolist() == [[0, 1, 1], [1, 1, 1]]


def test_a_fully_masked_row_keeps_the_required_token() -> None:
    batch = collate(facts(required_token=2), [item(4, 5, 2), item(6, 2)], blank=np.array([[False], [True]]))
    assert batch["input_ids"].tolist() == [[4, 5, 2], [9, 9, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 0]]


def test_only_named_inputs_in_their_order() -> None:
    names = ("attention_mask", "input_ids")
    assert tuple(collate(facts(inputs=names), [item(4)])) == names


def test_decoder_is_padded_at_the_right_even_when_the_encoder_is_not() -> None:
    row = facts("text2text-generation", inputs=(*PLAIN, "decoder_input_ids", "decoder_attention_mask"))
    batch = collate(row, [Item(item(4, 5).rows, (1, 6, 7)), Item(item(8).rows, (1,))], left=True)
    assert batch["input_ids"].tolist() == [[4, 5], [9, 8]]
    assert batch["decoder_input_ids"].tolist() == [[1, 6, 7], [1, 9, 9]]
    assert batch["decoder_attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_cut_keeps_what_closes_a_row() -> None:
    row = Row((1, 10, 11, 12, 2), (0, 0, 0, 1, 1))
    assert cut(row, 3, 1) == Row((1, 10, 2), (0, 0, 1))
    assert cut(row, 5, 1) is row
    assert cut(row, 1, 1).ids == (2,)
    assert cut(row, 2, 0).ids == (1, 10)


def test_closing_tokens_are_found_by_looking() -> None:
    assert tokenize_with(facts(), letters).tail == 1
    assert tokenize_with(facts(), lambda text, pair: {"input_ids": [ord(c) for c in text]}).tail == 0
    assert tokenize_with(facts(), lambda text, pair: {"input_ids": [5] * len(text) + [3, 4]}).tail == 2
    assert tokenize_with(facts(max_length=None), letters).limit == ROW_CAP


def test_token_types_of_a_pair_without_any_from_the_tokenizer() -> None:
    row = tokenize_with(facts(), letters).row("ab", "cde")
    assert row.types == (0, 0, 0, 0, 1, 1, 1, 1)
    assert set(tokenize_with(facts(type_vocab_size=1), letters).row("ab", "cde").types) == {0}


def test_a_pair_keeps_the_separators_of_its_tokenizer() -> None:
    texts = tokenize_with(facts(required_token=2), letters)
    assert texts.row("ab", "c").ids.count(2) == 2
    assert texts.row("ab").ids.count(2) == 1


def test_target_is_shifted_right() -> None:
    texts = tokenize_with(facts("text2text-generation", decoder_start_id=7), letters)
    assert texts.target("ab") == (7, 1, *letters("ab", None)["input_ids"][1:-1])
    assert texts.target("") == (7, 1)
    assert len(texts.target("a" * 50)) == 12


# -- the user's data ---------------------------------------------------------------------------------------------------


def test_data_cases_are_named_batched_and_padded() -> None:
    cases = data_cases(facts(), letters, [{"text": "abc"}, {"text": "a"}, {"text": ""}], batch=2)
    assert [case.name for case in cases] == ["data-0001", "data-0002"]
    assert [case.about for case in cases] == ["rows 1 to 2 of the data", "rows 3 to 3 of the data"]
    assert all(case.from_data and case.truncated == 0 for case in cases)
    assert case_lengths(cases[0]) == (5, 3) and cases[0].inputs["input_ids"][1].tolist()[-2:] == [9, 9]
    left = data_cases(facts(positions="mask"), letters, [{"text": "abc"}, {"text": "a"}])
    assert left[0].inputs["attention_mask"][1].tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("encode", [letters, short_letters], ids=["tokenizer does not cut", "tokenizer cuts"])
def test_truncated_rows_are_counted(encode: object) -> None:
    rows = [{"text": "x" * 10}, {"text": "x" * 11}, {"text": "a"}, {"text": "y" * 40}]  # 10 letters are 12 tokens
    (case,) = data_cases(facts(), encode, rows)  # type: ignore[arg-type]
    assert case.truncated == 2 and case.about == "rows 1 to 4 of the data, 2 cut at 12 tokens"
    assert case_lengths(case) == (12, 12, 3, 12)
    assert (case.inputs["input_ids"][[0, 1, 3], -1] == 2).all()


def test_truncation_by_a_real_tokenizer_is_counted(minilm: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm)

    def encode(text: str, pair: str | None) -> Mapping[str, list[int]]:
        return dict(tokenizer(text, pair, truncation=True, max_length=12))

    row = facts(vocab_size=30522, pad_id=0)
    exactly = " ".join(["house"] * 10)
    rows = [{"text": exactly}, {"text": exactly + " x"}, {"text": "a", "text_pair": "b " * 30}, {"text": "a"}]
    assert [data_cases(row, encode, [one])[0].truncated for one in rows] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("task", "row", "shape"),
    [
        ("token-classification", {"tokens": ["ab", "c"], "tags": [0, 1]}, (1, 6)),
        ("question-answering", {"question": "ab", "context": "cd"}, (1, 7)),
        ("multiple-choice", {"text": "a", "choices": ["b", "cd", "e"]}, (1, 3, 6)),
        ("feature-extraction", {"text": "a", "text_pair": "b"}, (1, 5)),
    ],
)
def test_data_of_every_form(task: str, row: Mapping[str, object], shape: tuple[int, ...]) -> None:
    (case,) = data_cases(facts(task), letters, [row])
    assert case.inputs["input_ids"].shape == shape


def test_targets_of_data_and_without_any() -> None:
    row = facts("text2text-generation", inputs=(*PLAIN, "decoder_input_ids"), decoder_start_id=7)
    given, without = data_cases(row, letters, [{"text": "abcd", "target": "e"}, {"text": "abcd"}], batch=1)
    assert given.inputs["decoder_input_ids"].shape == (1, 3)
    assert without.inputs["decoder_input_ids"].shape == (1, 6)


def test_a_batch_ends_where_the_number_of_choices_changes() -> None:
    rows = [
        {"text": "a", "choices": list("bc")},
        {"text": "a", "choices": list("bc")},
        {"text": "a", "choices": list("bcd")},
    ]
    cases = data_cases(facts("multiple-choice"), letters, rows)
    assert [case.inputs["input_ids"].shape[:2] for case in cases] == [(2, 2), (1, 3)]


def test_data_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(UsageError, match="needs the model's tokenizer"):
        data_cases(facts(), None, [{"text": "a"}])


# -- what is read off a case -------------------------------------------------------------------------------------------


def test_axes_lengths_tokens_and_masks() -> None:
    mask = np.array([[1, 1, 0], [0, 0, 0]])
    case = Case("x", {"input_ids": mask + 4, "attention_mask": mask, "decoder_input_ids": np.ones((2, 5), np.int64)})
    assert case_axes(case) == {"batch": 2, "sequence": 3, "decoder_sequence": 5}
    assert case_lengths(case) == (2, 0)
    assert case_tokens(case) == 16
    scored = scored_mask(case, "sequence")
    assert scored is not None and scored.dtype == bool and scored.tolist() == (mask == 1).tolist()
    assert scored_mask(case, "decoder_sequence") is None and scored_mask(case, "hidden") is None
    assert case_lengths(Case("y", {"input_ids": mask})) == (3, 3)
    choices = Case("z", {"input_ids": np.ones((2, 4, 3), np.int64)})
    assert case_axes(choices) == {"batch": 2, "choices": 4, "sequence": 3} and case_tokens(choices) == 24


def test_hash_of_cases_sees_every_change() -> None:
    ids = np.array([[1, 2, 3, 4]])
    base = cases_sha256([Case("x", {"input_ids": ids})])
    assert base == cases_sha256([Case("x", {"input_ids": ids.copy()}, about="words do not count")])
    others = [
        Case("y", {"input_ids": ids}),
        Case("x", {"attention_mask": ids}),
        Case("x", {"input_ids": ids + 1}),
        Case("x", {"input_ids": ids.reshape(2, 2)}),
        Case("x", {"input_ids": ids.astype(np.int32)}),
    ]
    assert len({base, *(cases_sha256([case]) for case in others)}) == 6

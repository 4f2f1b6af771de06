"""The standard probe set over many kinds of model: what it must cover, and what it must never do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from nlpconvert import probes
from nlpconvert.errors import UsageError
from nlpconvert.inputs import Case, Encode, case_axes, case_lengths, case_tokens, cases_sha256, positions_from_mask
from nlpconvert.models import INPUT_AXES, TASKS, Facts
from nlpconvert.probes import constants_left_out, drawn_encode, export_example, probe_cases, probe_rows


def facts(task: str = "feature-extraction", **changes: object) -> Facts:
    """A BERT of this task, with changes."""
    row = TASKS[task]
    bert = Facts(
        model_type="bert",
        task=task,
        inputs=("input_ids", "attention_mask", "token_type_ids"),
        outputs=row.outputs,
        vocab_size=30522,
        pad_id=0,
        eos_id=None,
        decoder_start_id=None,
        max_length=512,
        positions="own",
        type_vocab_size=2,
        constants=(),
        pairs=row.pairs,
        special_ids=(0, 100, 101, 102, 103),
    )
    return dataclasses.replace(bert, **changes)  # type: ignore[arg-type]


PLAIN = ("input_ids", "attention_mask")
DECODER = (*PLAIN, "decoder_input_ids", "decoder_attention_mask")
GPT = {"inputs": (*PLAIN, "position_ids"), "positions": "mask", "type_vocab_size": 0, "pairs": False}
ROBERTA = {"inputs": PLAIN, "positions": "pad", "pad_id": 1, "max_length": 38, "type_vocab_size": 1, "vocab_size": 120}
T5 = {"inputs": DECODER, "max_length": None, "type_vocab_size": 0, "decoder_start_id": 0, "constants": (32, 128)}
ROWS: dict[str, Facts] = {
    "bert": facts(),
    "bert-tokens": facts("token-classification"),
    "bert-qa": facts("question-answering"),
    "bert-choice": facts("multiple-choice"),
    "bert-choice-16": facts("multiple-choice", max_length=16),
    "bert-limit-16": facts(max_length=16),
    "bert-limit-4": facts(max_length=4, constants=(2, 3)),
    "limit-700": facts(max_length=700),
    "roberta-38": facts("fill-mask", **ROBERTA, special_ids=(0, 1, 2, 3)),
    "gpt": facts("text-generation", **GPT, vocab_size=600, max_length=1024, pad_id=2, eos_id=2, special_ids=(2,)),
    "gpt-window-4": facts("text-generation", **GPT, vocab_size=600, max_length=64, constants=(4,)),
    "gpt-window-512": facts("text-generation", **GPT, vocab_size=600, max_length=32768, constants=(512, 4096)),
    "t5": facts("text2text-generation", **T5, vocab_size=600, eos_id=1, special_ids=(0, 1, 2)),
    "bart-limit": facts("text2text-generation", **{**T5, "max_length": 1024, "constants": ()}),
    "bart-classifier": facts(
        "text-classification", inputs=PLAIN, type_vocab_size=0, pairs=False, required_token=2, pad_id=1, vocab_size=120
    ),
    "many-constants": facts(max_length=512, constants=(4, 8, 9, 16, 64, 128, 256, 512)),
    "no-mask": facts(inputs=("input_ids", "token_type_ids")),
    "vocabulary-100": facts(vocab_size=100, special_ids=(0, 1, 2)),
}


def byte_level(vocab: int, closing: str = "") -> Tokenizer:
    """A byte-level BPE tokenizer trained on the probe texts; `closing` adds an end token after every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<pad>", "<end>", "<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([row.text for row in probe_rows()], trainer)
    if closing:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {closing}", pair=f"$A {closing} $B {closing}", special_tokens=[(closing, 1)]
        )
    return tokenizer


def encoder(tokenizer: Tokenizer, limit: int | None) -> Encode:
    if limit is not None:
        tokenizer.enable_truncation(limit)
    return lambda text, pair: {"input_ids": tokenizer.encode(text, pair).ids}


@pytest.fixture(scope="module")
def minilm_encode(minilm: Path) -> Callable[[int | None], Encode]:
    tokenizer = AutoTokenizer.from_pretrained(minilm)

    def at(limit: int | None) -> Encode:
        cut = {} if limit is None else {"truncation": True, "max_length": limit}
        return lambda text, pair: dict(tokenizer(text, pair, verbose=False, **cut))

    return at


@pytest.fixture(scope="module", params=[(name, way) for name in ROWS for way in ("tokenizer", "drawn")], ids="-".join)
def model(request: pytest.FixtureRequest, minilm_encode: Callable[[int | None], Encode]) -> tuple[Facts, Encode | None]:
    """Every row of ROWS, with a real tokenizer that fits its vocabulary, and without one."""
    name, way = request.param
    row = ROWS[name]
    if way == "drawn":
        return row, None
    if row.vocab_size == 30522:
        return row, minilm_encode(row.max_length)
    if row.vocab_size < 259:  # every byte is a token: fold the ids into the small vocabulary, past the special ones
        base = encoder(byte_level(300), None)

        def folded(text: str, pair: str | None) -> dict[str, list[int]]:
            room = row.vocab_size - 5
            ids = [5 + i % room for i in base(text, pair)["input_ids"]]
            return {"input_ids": [*ids[: (row.max_length or 999) - 1], 2]}

        return row, folded
    return row, encoder(byte_level(row.vocab_size, "<end>" if row.eos_id == 1 else ""), row.max_length)


@pytest.fixture(scope="module")
def cases(model: tuple[Facts, Encode | None]) -> list[Case]:
    return probe_cases(*model)


def by_name(cases: list[Case]) -> dict[str, Case]:
    return {case.name: case for case in cases}


def test_arrays_are_what_the_model_takes(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, _ = model
    for case in cases:
        assert tuple(case.inputs) == row.inputs
        for name, array in case.inputs.items():
            assert array.dtype == np.int64 and array.flags.c_contiguous
            assert array.ndim == len(INPUT_AXES[name]) + TASKS[row.task].choices
            top = {"input_ids": row.vocab_size, "decoder_input_ids": row.vocab_size, "token_type_ids": 2}.get(name)
            assert array.min(initial=0) >= 0 and (top is None or array.max(initial=0) < top)


def test_budget_limit_and_number_of_cases(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, _ = model
    assert sum(case_tokens(case) for case in cases) <= 6000
    assert 15 <= len(cases) <= 27 + 3 * len(row.constants)
    longest = max(case_axes(case)["sequence"] for case in cases)
    if row.max_length is not None and row.max_length <= 1024:
        assert longest == row.max_length == case_axes(by_name(cases)["limit"])["sequence"]
        assert max(case_axes(case).get("decoder_sequence", 0) for case in cases) <= row.max_length
    else:
        assert case_axes(by_name(cases)["long"])["sequence"] == 512 and "limit" not in by_name(cases)


def test_names_are_unique_slugs_with_a_line_about_each(cases: list[Case]) -> None:
    assert len(by_name(cases)) == len(cases)
    for case in cases:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", case.name)
        assert case.about and "\n" not in case.about and not case.from_data


def test_the_same_seed_asks_the_same_and_another_asks_something_else(model: tuple[Facts, Encode | None]) -> None:
    assert cases_sha256(probe_cases(*model, seed=3)) == cases_sha256(probe_cases(*model, seed=3))
    assert cases_sha256(probe_cases(*model, seed=3)) != cases_sha256(probe_cases(*model, seed=4))


def test_masked_places_hold_the_pad_id(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, _ = model
    if "attention_mask" not in row.inputs:
        return
    for case in cases:
        ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
        exempt = np.zeros(mask.shape, bool)
        if row.required_token is not None:
            exempt[..., -1:] = (mask.sum(-1) == 0)[..., None]
        assert (ids[(mask == 0) & ~exempt] == row.pad_id).all()
        if "token_type_ids" in case.inputs:
            assert (case.inputs["token_type_ids"][mask == 0] == 0).all()
        if "position_ids" in case.inputs:
            assert (case.inputs["position_ids"] == positions_from_mask(mask)).all()
        if "decoder_attention_mask" in case.inputs:
            decoder = case.inputs["decoder_attention_mask"]
            assert (case.inputs["decoder_input_ids"][decoder == 0] == row.pad_id).all()
            assert (np.diff(decoder, axis=-1) <= 0).all() and (decoder[:, 0] == 1).all()
            assert (case.inputs["decoder_input_ids"][:, 0] == row.decoder_start_id).all()


def test_every_kind_of_padding_is_there(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, _ = model
    if "attention_mask" not in row.inputs:
        assert not {"holed", "masked-row", "with-long", "extra-padding"} & set(by_name(cases))
        return
    named = {name: case.inputs["attention_mask"] for name, case in by_name(cases).items()}
    right, left, nothing = named["right-padded"], named["left-padded"], named["masked-row"]
    assert (np.diff(right, axis=-1) <= 0).all() and (right == 0).any()
    assert (np.diff(left, axis=-1) >= 0).all() and (left == 0).any()
    assert (nothing[1] == 0).all() and (nothing[0].sum(-1) > 0).all()
    if row.max_length != 4:
        items = named["holed"].reshape(-1, named["holed"].shape[-1])
        real = [np.flatnonzero(line) for line in items]
        assert any(len(places) < places[-1] - places[0] + 1 for places in real)
        assert all(places[0] == 0 for places in real)
        assert real[0][-1] == items.shape[-1] - 1  # the longest row's last token is still there


def test_twins_hold_the_same_tokens(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, _ = model

    def tokens(case: Case, index: int) -> list[object]:
        mask = case.inputs.get("attention_mask", np.ones_like(case.inputs["input_ids"]))
        seen: list[object] = []
        for name, array in case.inputs.items():
            real = case.inputs.get("decoder_attention_mask", array) if name.startswith("decoder") else mask
            lines = zip(
                array[index].reshape(-1, array.shape[-1]), real[index].reshape(-1, array.shape[-1]), strict=True
            )
            seen.append((name, [line[keep != 0].tolist() for line, keep in lines]))
        return seen

    linked = [(case, twin) for case in cases for twin in case.twins]
    for case, twin in linked:
        assert tokens(case, twin.row) == tokens(by_name(cases)[twin.case], twin.other_row), case.name
    expected = {"identical", "permuted"}
    if "attention_mask" in row.inputs:
        expected |= {"with-long", "extra-padding", "extra-padding-left", "texts-2"}
    assert {case.name for case, _ in linked} == expected


def test_company_and_padding_of_a_twin_really_differ(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, _ = model
    if "attention_mask" not in row.inputs:
        return
    named = by_name(cases)
    alone = case_axes(named["alone"])["sequence"]
    assert case_axes(named["with-long"])["sequence"] == min(129, row.max_length or 129) > alone
    assert case_axes(named["extra-padding"])["sequence"] > alone
    if row.positions == "mask":
        assert named["extra-padding-left"].inputs["attention_mask"][0, 0] == 0


def test_both_sides_of_constants_and_of_the_export_example(model: tuple[Facts, Encode | None]) -> None:
    row, encode = model
    cases = probe_cases(row, encode)
    asked = {case_axes(case)["sequence"] for case in cases}
    for constant in row.constants:
        wanted = {constant - 1, constant, constant + 1}
        if constant + 1 <= (row.max_length or 4096) and constant <= 512:
            assert wanted <= asked, constant
            assert constant not in constants_left_out(row, cases)
        else:
            assert constant in constants_left_out(row, cases)
    example = export_example(row, encode)["input_ids"].shape
    batches = {case_axes(case)["batch"] for case in cases}
    assert min(batches) < example[0] < max(batches)
    assert min(asked - {0}) < example[-1] <= max(asked)
    assert {length for length in (1, 2, 3, 9, 23, 33, 64) if length <= (row.max_length or 512)} <= asked


def test_empty_texts(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, encode = model
    empty = (encode or drawn_encode(row, 0))("", None)["input_ids"]
    lengths = case_lengths(by_name(cases)["empty"])
    assert max(lengths) > len(empty)
    if row.task == "feature-extraction" and "attention_mask" in row.inputs:
        assert lengths[0] == len(empty)
        assert case_axes(by_name(cases)["empty-alone"])["sequence"] == len(empty)


def test_choices_vary(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, _ = model
    found = {case_axes(case).get("choices") for case in cases}
    assert found == ({2, 3, 4} if row.task == "multiple-choice" else {None})


def test_token_types_differ_from_the_mask(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, _ = model
    if row.type_vocab_size < 2:
        assert all(case.inputs.get("token_type_ids", np.zeros(1)).max(initial=0) == 0 for case in cases)
        return
    types = by_name(cases)["pairs" if row.pairs else "token-types"].inputs["token_type_ids"]
    assert set(np.unique(types)) == {0, 1}


def test_decoder_lengths_vary_and_are_not_the_encoders(model: tuple[Facts, Encode | None], cases: list[Case]) -> None:
    row, _ = model
    if "decoder_input_ids" not in row.inputs:
        return
    lengths = [case_axes(case)["decoder_sequence"] for case in cases]
    assert {1, 2, 5, 17} <= set(lengths)
    same = [case.name for case in cases if case_axes(case)["decoder_sequence"] == case_axes(case)["sequence"] > 2]
    assert set(same) <= {"limit", "empty", "one-character"}


def test_required_token_closes_every_row_once() -> None:
    row = ROWS["bart-classifier"]
    for case in probe_cases(row, None):
        ids, mask = case.inputs["input_ids"], case.inputs["attention_mask"]
        assert (ids == 2).sum(-1).tolist() == [1] * len(ids), case.name
        for line, keep in zip(ids, mask, strict=True):
            places = np.flatnonzero(keep)
            assert line[places[-1] if len(places) else -1] == 2


def test_required_token_is_taken_out_of_the_middle(minilm_encode: Callable[[int | None], Encode]) -> None:
    row = facts(required_token=101, pairs=False)  # MiniLM's opening token, asked for at the end
    for case in probe_cases(row, minilm_encode(512)):
        assert ((case.inputs["input_ids"] == 101).sum(-1) == 1).all()


@pytest.mark.parametrize("name", ROWS)
def test_export_example(name: str) -> None:
    row = ROWS[name]
    example = export_example(row, None)
    assert tuple(example) == row.inputs
    ids = example["input_ids"]
    sizes = [*ids.shape, *([example["decoder_input_ids"].shape[1]] if "decoder_input_ids" in example else [])]
    assert min(sizes) >= 2 and ids.shape[-1] <= (row.max_length or 512)
    assert len(set(sizes)) == len(sizes)
    if row.max_length != 4:
        assert not set(sizes) & set(row.constants)
    if "attention_mask" in example:
        pads = (example["attention_mask"] == 0).sum(-1)
        assert pads[-1].max() >= 2 and pads[0].min() == 0
    again = export_example(row, None)
    assert all((again[key] == example[key]).all() for key in example)


def test_export_example_usual_shapes() -> None:
    assert export_example(ROWS["bert"], None)["input_ids"].shape == (2, 7)
    assert export_example(ROWS["t5"], None)["decoder_input_ids"].shape == (2, 5)
    assert export_example(ROWS["bert-choice"], None)["input_ids"].shape == (2, 3, 7)
    assert export_example(facts(constants=(2, 7)), None)["input_ids"].shape == (3, 9)


def test_exact_lengths_when_the_tokenizer_cuts_earlier_than_the_model(
    minilm_encode: Callable[[int | None], Encode],
) -> None:
    case = by_name(probe_cases(facts(max_length=512), minilm_encode(100)))["limit"]
    assert case.inputs["input_ids"].shape == (1, 512)
    assert case.inputs["input_ids"][0, 0] == 101 and case.inputs["input_ids"][0, -1] == 102
    assert (case.inputs["input_ids"][0, 1:-1] != 102).all()


def test_a_tokenizer_of_another_model_is_refused(minilm_encode: Callable[[int | None], Encode]) -> None:
    with pytest.raises(
        UsageError, match=r"gives id \d+ .* the model knows 1000 ids: the tokenizer is not this model's"
    ):
        probe_cases(facts(vocab_size=1000), minilm_encode(512))


def test_drawn_ids_span_the_vocabulary_and_leave_out_special_ones() -> None:
    row = facts(vocab_size=100, pad_id=7, eos_id=8, special_ids=(0, 1))
    encode = drawn_encode(row, 0)
    ids = np.array([i for probe in probe_rows() for i in encode(probe.text, None)["input_ids"]])
    assert not {0, 1, 7, 8} & set(ids.tolist()) and len(set(ids.tolist())) > 90
    assert encode("a b", None) == encode("a b", None) != drawn_encode(row, 1)("a b", None)


def test_a_budget_too_small_leaves_out_large_constants_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = sum(map(case_tokens, probe_cases(facts(), None))) + 300
    monkeypatch.setattr(probes, "BUDGET", budget)
    row = facts(constants=(256, 18))
    cases = probe_cases(row, None)
    assert sum(map(case_tokens, cases)) <= budget
    assert constants_left_out(row, cases) == (256,)


def test_shipped_texts() -> None:
    rows = probe_rows()
    assert 35 <= len(rows) <= 45 and len({(row.text, row.pair) for row in rows}) == len(rows)
    langs = {row.lang for row in rows}
    assert (
        set("en de fr es tr ru el ar he hi th zh ja ko code json emoji units url caps mixed accents".split()) <= langs
    )
    assert {"empty", "word", "character", "space", "long", "pair"} <= langs
    assert any("\u200d" in row.text for row in rows) and any("e\u0301" in row.text for row in rows)
    assert re.fullmatch(r"[0-9a-f]{64}", probes.probe_set_sha256())

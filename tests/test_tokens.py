"""The tokenizer beside an artifact, without transformers: the ids are those that transformers gives."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from nlpconvert import checkpoint, inputs, probes, tokens
from nlpconvert.errors import UsageError
from nlpconvert.models import Facts

FIXTURES = "bert-text-classifier bert-token-classifier bert-question-answering gpt2-lm llama-lm t5-seq2seq".split()


def facts_of(directory: Path, **values: object) -> Facts:
    """Facts of a checkpoint, as far as a tokenizer needs them."""
    info = checkpoint.describe(str(directory))
    found = Facts(
        info.model_type, info.task, ("input_ids", "token_type_ids", "attention_mask"), (), 40000, 0, None, None, 128,
        "own", 2, (), True,
    )  # fmt: skip
    return dataclasses.replace(found, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*FIXTURES, "minilm"])
@pytest.mark.parametrize("limit", [None, 128, 12])
def test_ids_are_those_of_transformers(name: str, limit: int | None, request: pytest.FixtureRequest) -> None:
    transformers = pytest.importorskip("transformers")
    directory: Path = (
        request.getfixturevalue("minilm") if name == "minilm" else request.getfixturevalue("fixtures_dir") / name
    )
    reader = tokens.load([directory], facts_of(directory, max_length=limit))
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    cut = 0
    for row in probes.probe_rows():
        for pair in (None, row.text[:30]):
            wanted = theirs(
                row.text,
                pair,
                truncation=limit is not None,
                max_length=limit,
                return_token_type_ids=True,
                verbose=False,
            )
            found = reader.encode(row.text, pair)
            assert found["input_ids"] == wanted["input_ids"], row.text[:40]
            if "bert" in name:
                assert found["token_type_ids"] == wanted["token_type_ids"]
            cut += reader.read(row.text, pair).cut
    assert bool(cut) == (limit == 12) or limit == 128


def test_a_question_is_not_cut_and_offsets_lead_back(fixtures_dir: Path) -> None:
    directory = fixtures_dir / "bert-question-answering"
    reader = tokens.load([directory], facts_of(directory, max_length=24))
    question, context = "When did Hugo leave?", "In July Hugo lost the telescope near the old harbour, nobody saw it."
    reading = reader.read(question, context, keep_first=True)
    assert len(reading.ids) == 24 and reading.cut
    for text, side in ((question, 0), (context, 1)):
        spans = [span for span, of in zip(reading.offsets, reading.sides, strict=True) if of == side]
        said = " ".join(text[start:end] for start, end in spans)
        assert text.replace(" ", "").startswith(said.replace(" ", ""))
        if side == 0:
            assert spans[-1][1] == len(question), "the question is whole"
    assert reading.sides[0] is None and reading.sides[-1] is None, "the closing token is kept"
    long = reader.read("why " * 40, context, keep_first=True)
    assert len(long.ids) == 24, "a question past the limit is cut after all"


def test_a_reader_is_what_inputs_take(fixtures_dir: Path) -> None:
    directory = fixtures_dir / "bert-text-classifier"
    facts = facts_of(directory, max_length=16)
    case = inputs.data_cases(facts, tokens.load([directory], facts).encode, [{"text": "The lobby " * 20}])[0]
    assert case.inputs["input_ids"].shape == (1, 16)
    assert case.truncated == 1


def test_text_comes_back(fixtures_dir: Path) -> None:
    directory = fixtures_dir / "t5-seq2seq"
    reader = tokens.load([directory], facts_of(directory))
    text = "send six candles to xenia"
    assert reader.decode(reader.encode(text)["input_ids"]).strip() == text


def test_without_one_it_says_what_to_do(tmp_path: Path, fixtures_dir: Path) -> None:
    facts = facts_of(fixtures_dir / "gpt2-lm")
    with pytest.raises(UsageError, match=r"--data needs tokenizer\.json, and there is none in .*convert again"):
        tokens.load([tmp_path], facts)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be read as a tokenizer"):
        tokens.load([tmp_path], facts)
    found = tokens.load([tmp_path / "nothing", fixtures_dir / "gpt2-lm"], facts)
    assert found.limit == 128


def test_another_models_tokenizer_is_refused(fixtures_dir: Path) -> None:
    directory = fixtures_dir / "gpt2-lm"
    with pytest.raises(UsageError, match=r"gives id 120 for .* but the model knows 120 ids"):
        tokens.load([directory], facts_of(directory, vocab_size=120))


def test_lowering_comes_with_its_file(minilm: Path, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(minilm, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    facts = facts_of(minilm, task="sentence-embedding")
    plain = tokens.load([minilm], facts).encode("İstanbul NAÏVE")
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 256, "do_lower_case": true}')
    lowered = tokens.load([directory], facts)
    assert lowered.encode("İstanbul NAÏVE") == tokens.load([minilm], facts).encode("İstanbul NAÏVE".lower())
    assert plain["input_ids"][0] == lowered.encode("")["input_ids"][0]
    (directory / "sentence_bert_config.json").write_text("{")
    with pytest.raises(UsageError, match="is not JSON"):
        tokens.load([directory], facts)

"""The committed fixtures: whole, small, loadable, and as good as their cards say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
yaml = pytest.importorskip("yaml")

HOME = Path(__file__).parents[1] / "fixtures"
COLUMNS = {
    "bert-text-classifier": ["text", "label"],
    "bert-token-classifier": ["tokens", "tags"],
    "bert-question-answering": ["question", "context", "answers"],
    "gpt2-lm": ["text"],
    "llama-lm": ["text"],
    "t5-seq2seq": ["text", "target"],
}
LIMITS = {"gpt2-lm": 256, "llama-lm": 256}  # 128 for the others
ROWS = 60  # of eval.jsonl: enough to tell a trained model from a broken one, in a second or two
LOWER_IS_BETTER = {"perplexity", "bits_per_byte"}
SHARE = 0.9  # of the card's score, on ROWS rows
ODD = [
    "",
    " ",
    "\n\t",
    "\x00\x07",
    "naïve Ærøskøbing",
    "数据 データ 데이터",
    "مرحبا بالعالم",
    "हिन्दी",
    "🙂‍↔️👩‍👩‍👧",
    "e\u0301\u0323",
    "\u202eabc\u200b\ufeff",
    "\ufffd\ue000\U0010ffff",
    "x" * 5000,
    "[MASK] <pad> </s> <|endoftext|>",
    "ﬁ Å ½ Ⅳ",
]

fixtures = pytest.mark.parametrize("name", COLUMNS)


def rows_of(name: str) -> list[dict[str, Any]]:
    """The labelled rows kept back from training."""
    return [json.loads(line) for line in (HOME / name / "eval.jsonl").read_text(encoding="utf-8").splitlines()]


def card_of(name: str) -> dict[str, Any]:
    """The head of the model card."""
    head: dict[str, Any] = yaml.safe_load((HOME / name / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    return head


def model_of(name: str) -> Any:
    """The model as its own configuration names it."""
    architecture = json.loads((HOME / name / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(HOME / name).eval()


def test_together_they_are_small() -> None:
    assert (
        sum(file.stat().st_size for file in HOME.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        <= 15_000_000
    )


def test_every_directory_is_under_test() -> None:
    assert {path.parent.name for path in HOME.glob("*/config.json")} == set(COLUMNS)


@fixtures
def test_directory_is_whole(name: str) -> None:
    files = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md", "eval.jsonl"}
    if name.endswith(("-lm", "-seq2seq")):
        files.add("generation_config.json")
    assert {file.name for file in (HOME / name).iterdir()} == files
    rows = rows_of(name)
    assert 100 <= len(rows) <= 200
    assert all(list(row) == COLUMNS[name] for row in rows)


@fixtures
def test_reloaded_model_is_as_good_as_its_card_says(name: str) -> None:
    (result,) = card_of(name)["model-index"][0]["results"]
    claimed = {metric["type"]: metric["value"] for metric in result["metrics"] if metric["type"] != "unsure"}
    scores = runpy.run_path(str(HOME / "scores.py"))["SCORES"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(HOME / name)
    with torch.no_grad():
        found = scores[result["task"]["type"]](model_of(name), tokenizer, rows_of(name)[:ROWS])
    assert claimed
    for score, value in claimed.items():
        if score in LOWER_IS_BETTER:
            assert found[score] <= value / SHARE, score
        else:
            assert found[score] >= value * SHARE, score


@fixtures
def test_nothing_is_left_as_it_was_initialized(name: str) -> None:
    """A bias of zero, or a position nobody trained, would hide a converter that loses it."""
    for parameter, value in model_of(name).named_parameters():
        assert torch.isfinite(value).all(), parameter
        if parameter.endswith("bias"):
            assert value.abs().mean() > 1e-3, parameter
        if "position_embeddings" in parameter or "wpe" in parameter:
            assert value.std(-1).min() > 1e-2, parameter
            assert len(value) == LIMITS.get(name, 128)


@fixtures
def test_tokenizer_takes_anything(name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(HOME / name)
    limit = LIMITS.get(name, 128)
    assert tokenizer.is_fast
    assert tokenizer.model_max_length == limit
    assert tokenizer.pad_token_id is not None
    for text in ODD:
        ids = tokenizer(text, truncation=True)["input_ids"]
        assert len(ids) <= limit
        assert all(0 <= i < len(tokenizer) for i in ids)
        if name.endswith("-lm") and len(text) < limit // 4:
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer(ODD, truncation=True, padding=True, return_tensors="pt")["input_ids"].shape[0] == len(ODD)


@fixtures
def test_padding_does_not_change_the_answer(name: str) -> None:
    """Padding on the right, which every one of them has seen."""
    if name == "t5-seq2seq":
        pytest.skip("asked of its generation, above")
    tokenizer, model, row = transformers.AutoTokenizer.from_pretrained(HOME / name), model_of(name), rows_of(name)[0]
    text = row.get("text") or row.get("context") or " ".join(row["tokens"])
    alone, padded = tokenizer(text, return_tensors="pt"), tokenizer(text, return_tensors="pt", padding="max_length")
    length = alone["input_ids"].shape[1]
    with torch.no_grad():
        reference, candidate = model(**alone)[0], model(**padded)[0]
    torch.testing.assert_close(candidate[:, :length], reference, atol=1e-4, rtol=1e-4)

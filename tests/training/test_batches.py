"""Rows become batches: labels where a loss reads them, -100 elsewhere; every row once, whatever does not divide."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from nlpconvert.errors import UsageError
from nlpconvert.training.batches import Deal
from tests.training import running

TEXTS = [{"text": "The lobby was not friendly!", "label": "negative"}, {"text": "The bed.", "label": 1}]


def test_a_text_has_one_label_by_name_or_number(tmp_path: Path) -> None:
    _, data = running.data_of("bert-text-classifier", running.write(tmp_path / "d.jsonl", TEXTS))
    batch = data.batch([0, 1])
    assert batch.labels["labels"].tolist() == [0, 1] and batch.targets == 2
    assert batch.inputs["input_ids"].dtype == np.int64
    assert batch.inputs["attention_mask"][1, -1] == 0, "padded at the right"


def test_csv_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text("body,y\nThe lobby,3\nA bed,mixed\n", encoding="utf-8")
    _, data = running.data_of("bert-text-classifier", path, columns="text=body,label=y")
    assert data.batch([0, 1]).labels["labels"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "a", "label": 4}, "line 2: the model has no label 4; it has negative, neutral, positive, mixed"),
        ({"text": "a", "label": -1}, "line 2: the model has no label -1"),
        ({"text": "a", "label": "angry"}, "line 2: the model has no label 'angry'"),
        ({"text": "a"}, "line 2: has no 'label'"),
        ({"label": 1}, "line 2: has no column 'text'"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, row: dict[str, object], words: str) -> None:
    path = running.write(tmp_path / "d.jsonl", [TEXTS[0], row])
    with pytest.raises(UsageError) as found:
        running.data_of("bert-text-classifier", path)
    assert words in str(found.value) and str(path) in str(found.value) and "\n" not in str(found.value)


def test_a_tag_stands_at_the_first_piece_of_its_word(tmp_path: Path) -> None:
    row = {"tokens": ["Bank", "of", "Pesrortanka", "opened"], "tags": ["B-ORG", "I-ORG", "I-ORG", -100]}
    loaded, data = running.data_of("bert-token-classifier", running.write(tmp_path / "d.jsonl", [row]))
    batch = data.batch([0])
    ids, labels = batch.inputs["input_ids"][0].tolist(), batch.labels["labels"][0].tolist()
    pieces = [loaded.tokenizer.convert_ids_to_tokens(i) for i in ids]
    assert batch.targets == 3
    assert [label for label in labels if label != -100] == [5, 6, 6]
    first = [piece for piece, label in zip(pieces, labels, strict=True) if label != -100]
    assert all(not piece.startswith("##") for piece in first) and len(pieces) > 6, pieces


def test_a_language_model_predicts_every_token_but_the_first(tmp_path: Path) -> None:
    path = running.write(tmp_path / "d.jsonl", [{"text": "one two three four"}, {"text": "one"}])
    loaded, data = running.data_of("gpt2-lm", path)
    batch = data.batch([0, 1])
    ids, labels, mask = batch.inputs["input_ids"], batch.labels["labels"], batch.inputs["attention_mask"]
    assert (labels == np.where(mask == 1, ids, -100)).all()
    assert batch.targets == int(mask.sum()) - 2
    # What transformers' own class makes of the same labels is a mean over as many targets.
    model = type(loaded.module).from_pretrained(running.FIXTURES / "gpt2-lm").eval()
    tensors = {name: torch.tensor(value) for name, value in batch.inputs.items()}
    with torch.no_grad():
        both = model(**tensors, labels=torch.tensor(labels)).loss
        logits = model(**tensors).logits[:, :-1]
    total = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), torch.tensor(labels[:, 1:]).flatten(), reduction="sum"
    )
    assert float(both) == pytest.approx(float(total) / batch.targets, rel=1e-6)


def test_a_text_of_one_token_has_no_target(tmp_path: Path) -> None:
    _, data = running.data_of("gpt2-lm", running.write(tmp_path / "d.jsonl", [{"text": "a"}, {"text": "one two"}]))
    assert data.batch([0]).targets == 0


def test_decoder_inputs_are_the_targets_shifted_as_the_model_does(tmp_path: Path) -> None:
    rows = [{"text": "thirty-three candles", "target": "33 candles"}, {"text": "one", "target": "1"}]
    loaded, data = running.data_of("t5-seq2seq", running.write(tmp_path / "d.jsonl", rows))
    batch = data.batch([0, 1])
    labels = batch.labels["labels"]
    model = type(loaded.module).from_pretrained(running.FIXTURES / "t5-seq2seq")
    shifted = model.prepare_decoder_input_ids_from_labels(torch.tensor(labels)).numpy()
    kept = batch.inputs["decoder_attention_mask"] == 1
    assert (batch.inputs["decoder_input_ids"][kept] == shifted[kept]).all()
    assert (labels != -100).sum() == batch.targets and labels[0][labels[0] != -100][-1] == loaded.facts.eos_id
    assert (labels[1] == -100).any(), "padding is no target"


def test_an_answer_is_its_first_and_last_token(tmp_path: Path) -> None:
    context = "On Monday Hugo lost the telescope near the old harbour."
    rows = [
        {
            "question": "What did Hugo lose?",
            "context": context,
            "answers": {"text": ["telescope"], "answer_start": [24]},
        },
        {"question": "Why?", "context": context, "answers": {"text": [], "answer_start": []}},
    ]
    loaded, data = running.data_of("bert-question-answering", running.write(tmp_path / "d.jsonl", rows))
    batch = data.batch([0, 1])
    first, last = (int(batch.labels[name][0]) for name in ("start_positions", "end_positions"))
    said = loaded.tokenizer.decode(batch.inputs["input_ids"][0, first : last + 1])
    assert said.lower().replace(" ", "") == "telescope"
    assert batch.labels["start_positions"][1] == batch.labels["end_positions"][1] == 0, "no answer: the first token"
    assert batch.targets == 2


def test_an_answer_that_was_cut_off_is_left_out_and_counted(tmp_path: Path) -> None:
    long = "It rained all week. " * 60 + "Hugo lost the telescope."
    answers = {"text": ["telescope"], "answer_start": [long.index("telescope")]}
    short = {"question": "Who?", "context": "Hugo came.", "answers": {"text": ["Hugo"], "answer_start": [0]}}
    rows = [{"question": "What?", "context": long, "answers": answers}, short]
    _, data = running.data_of("bert-question-answering", running.write(tmp_path / "d.jsonl", rows))
    assert len(data.examples) == 1
    assert any(re.search(r"1 of 2 answers were cut off", note) for note in data.notes), data.notes


def test_an_answer_that_stands_elsewhere_is_named(tmp_path: Path) -> None:
    row = {"question": "Who?", "context": "Hugo came.", "answers": {"text": ["Hugo"], "answer_start": [2]}}
    with pytest.raises(
        UsageError, match="line 1: the answer 'Hugo' does not stand at character 2; there stands 'go c'"
    ):
        running.data_of("bert-question-answering", running.write(tmp_path / "d.jsonl", [row]))


# -- dealing out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rows", [7, 12, 23])
@pytest.mark.parametrize(("batch", "accumulate"), [(1, 1), (2, 3), (5, 1)])
def test_every_row_once_an_epoch(rows: int, size: int, batch: int, accumulate: int) -> None:
    deal = Deal(rows, batch, accumulate, size, seed=5)
    for epoch in range(2):
        seen: list[int] = []
        for step in range(epoch * deal.steps_per_epoch, (epoch + 1) * deal.steps_per_epoch):
            for rank in range(size):
                parts = deal.step(step, rank)
                assert len(parts) <= accumulate and all(0 < len(part) <= batch for part in parts)
                seen += [row for part in parts for row in part]
        assert sorted(seen) == list(range(rows))


def test_steps_hold_the_same_rows_however_they_are_divided() -> None:
    """Two ranks of 4, two micro-batches of 4, and one batch of 8."""
    deals = [Deal(21, 4, 1, 2, 1), Deal(21, 4, 2, 1, 1), Deal(21, 8, 1, 1, 1)]
    for step in range(3 * 3):
        held = [{row for rank in range(deal.size) for part in deal.step(step, rank) for row in part} for deal in deals]
        assert held[0] == held[1] == held[2]


def test_a_rank_may_have_nothing_in_the_last_step() -> None:
    deal = Deal(5, 1, 1, 4, 0)
    assert [len(deal.step(1, rank)) for rank in range(4)] == [1, 0, 0, 0]


def test_orders_differ_by_epoch_and_seed_and_are_named() -> None:
    orders = [Deal(50, 1, seed=seed).order(epoch).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0][:6] == [18, 23, 36, 4, 2, 3], "the same on every machine and with every numpy"


def test_an_empty_shard_is_refused() -> None:
    with pytest.raises(UsageError, match="3 rows for 4 ranks: the shard of rank 3 is empty"):
        Deal(3, 8, 1, 4)

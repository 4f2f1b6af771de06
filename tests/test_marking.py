"""Labelled rows through a model: what `scores.py` says of the fixtures, by the tokenizer and the rows of CI."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlpconvert import forward, labelled, marking, scoring, source, tokens
from nlpconvert.errors import UsageError
from nlpconvert.labelled import Batch, Entry, Labels
from nlpconvert.marking import Marker
from nlpconvert.models import TASKS, Facts
from nlpconvert.tokens import Reader
from nlpconvert.validators import metrics
from nlpconvert.validators.metrics import Answers
from tests.test_tokens import facts_of

ROWS = 48


def rows_of(directory: Path, count: int = ROWS) -> list[dict[str, Any]]:
    lines = (directory / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [json.loads(line) for line in lines]


def found(directory: Path, metric: str, rows: list[dict[str, Any]], tmp_path: Path) -> dict[str, float]:
    """The scores of a checkpoint in PyTorch, by the tokenizer and batches of CI."""
    loaded = source.load(str(directory))
    row = metrics.metric_for(metric, loaded.facts.task)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    reader, labels = tokens.load([directory], loaded.facts), labelled.read_labels([directory])
    batches = labelled.prepare(rows, row, loaded.facts, reader, labels, data)
    marker, answers = Marker(row, loaded.facts, labels, reader), Answers()
    for batch in batches:
        run = lambda inputs: forward.call(loaded.module, inputs)  # noqa: E731
        if metric == "bleu":
            marker.mark_texts(batch, scoring.generate(run, batch.inputs, loaded.facts), answers)
        else:
            marker.mark(batch, run(batch.inputs), answers)
    assert answers.broken == 0
    return {score.name: metrics.value(score.formula, answers.rows(score.name)) for score in row.scores}


@pytest.mark.parametrize(
    ("name", "metric", "pairs"),
    [
        ("bert-text-classifier", "accuracy", {"accuracy": "accuracy"}),
        ("bert-token-classifier", "f1", {"f1": "f1"}),
        ("bert-question-answering", "squad", {"exact_match": "exact_match"}),
        ("gpt2-lm", "perplexity", {"perplexity": "perplexity"}),
        ("llama-lm", "perplexity", {"perplexity": "perplexity"}),
    ],
)
def test_scores_are_those_of_the_cards(
    name: str, metric: str, pairs: dict[str, str], fixtures_dir: Path, tmp_path: Path
) -> None:
    """The functions that wrote the cards use transformers' tokenizer and batches of 25; these rows are the same."""
    import torch
    import transformers

    rows = rows_of(fixtures_dir / name)
    ours = found(fixtures_dir / name, metric, rows, tmp_path)
    task = json.loads((fixtures_dir / name / "config.json").read_text())["architectures"][0]
    theirs = runpy.run_path(str(fixtures_dir / "scores.py"))["SCORES"]
    model = getattr(transformers, task).from_pretrained(fixtures_dir / name).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(fixtures_dir / name)
    with torch.no_grad():
        expected = theirs[source.load(str(fixtures_dir / name)).facts.task](model, tokenizer, rows)
    for score, other in pairs.items():
        assert ours[score] == pytest.approx(expected[other], rel=1e-5), score


def test_generation_is_transformers_own(fixtures_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("sacrebleu")
    import torch
    import transformers

    directory = fixtures_dir / "t5-seq2seq"
    rows = rows_of(directory, 10)
    ours = found(directory, "bleu", rows, tmp_path)
    model = transformers.T5ForConditionalGeneration.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        said = tokenizer.batch_decode(
            model.generate(**tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")),
            skip_special_tokens=True,
        )
    right = [text.strip() == row["target"] for text, row in zip(said, rows, strict=True)]
    assert ours["exact_match"] == np.mean(right)
    assert ours["bleu"] == pytest.approx(100) if all(right) else ours["bleu"] < 100
    assert found(directory, "perplexity", rows, tmp_path)["perplexity"] < 1.1


def test_likeness_of_sentences(minilm: Path, tmp_path: Path) -> None:
    pairs = [
        ("A man is playing a guitar.", "A man plays the guitar.", 5.0),
        ("A cat sleeps on the sofa.", "A cat is lying on a couch.", 4.0),
        ("He bought a new car.", "He sold his old bicycle.", 2.0),
        ("The stock market fell today.", "A child eats ice cream.", 0.0),
        ("It rains in London.", "The weather in London is wet.", 3.8),
        ("Two dogs run through a field.", "Two cats sit in a kitchen.", 1.2),
        ("The train leaves at noon.", "She painted the wall green.", 0.0),
        ("A woman slices an onion.", "A woman cuts an onion.", 4.8),
    ]
    rows = [{"text": one, "text_pair": other, "score": score} for one, other, score in pairs]
    assert found(minilm, "spearman", rows, tmp_path)["spearman"] > 0.8
    with pytest.raises(UsageError, match="line 1: has no 'text_pair', which spearman compares"):
        found(minilm, "spearman", [{"text": "a", "score": 1.0}], tmp_path)
    with pytest.raises(UsageError, match="line 1: score '5' is not a number"):
        found(minilm, "spearman", [{"text": "a", "text_pair": "b", "score": "5"}], tmp_path)


# -- rows that are wrong -----------------------------------------------------------------------------------------------


def prepare(directory: Path, rows: list[dict[str, Any]], metric: str, path: Path, text: str) -> list[Batch]:
    path.write_text(text)
    facts = facts_of(directory)
    row = metrics.metric_for(metric, facts.task)
    reader = tokens.load([directory], facts)
    return labelled.prepare(rows, row, facts, reader, labelled.read_labels([directory]), path)


def test_a_row_without_a_label_is_named_by_its_line(fixtures_dir: Path, tmp_path: Path) -> None:
    directory = fixtures_dir / "bert-text-classifier"
    rows = [{"text": "good", "label": "positive"}, {"text": "bad"}]
    with pytest.raises(
        UsageError, match=r"data\.jsonl, line 3: has no 'label', which accuracy needs; .*label=ITS_NAME"
    ):
        prepare(directory, rows, "accuracy", tmp_path / "data.jsonl", "{}\n\n{}\n")
    with pytest.raises(UsageError, match=r"data\.csv, row 2: has no 'label'"):
        prepare(directory, rows, "accuracy", tmp_path / "data.csv", "text,label\n")


def test_labels_are_names_or_numbers_of_the_model(fixtures_dir: Path, tmp_path: Path) -> None:
    directory = fixtures_dir / "bert-text-classifier"
    labels = labelled.read_labels([tmp_path, directory])
    names = labels.names
    assert labels(names[1], "here") == labels(1, "here") == 1
    assert labels.name(1) == names[1] and labels.name(99) == "99"
    with pytest.raises(UsageError, match=r"here: the model has no label 'furious'; it has .*numbers 0 to"):
        labels("furious", "here")
    with pytest.raises(UsageError, match=f"no label {len(names)}"):
        labels(len(names), "here")
    none = labelled.read_labels([tmp_path])
    assert none(7, "here") == 7
    with pytest.raises(UsageError, match=r"'positive' is a name, and no config\.json"):
        none("positive", "here")


def test_a_config_with_several_labels_a_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"problem_type": "multi_label_classification"}')
    with pytest.raises(UsageError, match="several labels"):
        labelled.read_labels([tmp_path])
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UsageError, match="cannot be read"):
        labelled.read_labels([tmp_path])


def test_rows_that_could_say_nothing(fixtures_dir: Path, minilm: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    with pytest.raises(UsageError, match="no row has a second token"):
        prepare(fixtures_dir / "gpt2-lm", [{"text": ""}, {"text": "a"}], "perplexity", path, "{}\n{}")
    with pytest.raises(UsageError, match="all scores are the same"):
        prepare(minilm, [{"text": "a", "text_pair": "b", "score": 1}], "spearman", path, "{}")
    with pytest.raises(UsageError, match="no word has a tag that is scored"):
        prepare(fixtures_dir / "bert-token-classifier", [{"tokens": ["a"], "tags": [-100]}], "f1", path, "{}")
    (batch,) = prepare(fixtures_dir / "gpt2-lm", [{"text": ""}, {"text": "a word"}], "perplexity", path, "{}\n{}")
    assert [len(entry.wanted) for entry in batch.entries] == [0, batch.inputs["input_ids"].shape[1] - 1]


def test_rows_that_are_worth_less_than_their_number() -> None:
    assert list(labelled.doubts([{"text": "a", "label": 0}, {"text": "b", "label": 1}])) == []
    assert list(labelled.doubts([{"text": "a", "text_pair": str(n)} for n in range(9)])) == []
    assert list(labelled.doubts([{"text": "a", "label": n} for n in range(9)])) == [
        "1 distinct text among 9 rows: the intervals hold for 9 independent ones"
    ]
    assert list(labelled.doubts([{"text": " \n"}, {"text": "b"}])) == ["1 row is empty"]
    assert list(labelled.doubts([{"tokens": ["", " "]}, {"tokens": []}])) == ["2 rows are empty"]
    assert list(labelled.doubts([{"text": "", "text_pair": "b"}, {"question": "", "context": "c"}])) == []


def doubt(labels: list[int], decisions: list[int], reader: Reader, fixtures_dir: Path) -> str:
    marked = marker("accuracy", "text-classification", reader, fixtures_dir)
    answers = Answers(decisions=list(decisions))
    return marking.doubt(marked, [batch_of(*(Entry((), label, False) for label in labels))], answers, "the reference")


def test_no_better_than_the_most_common_label(reader: Reader, fixtures_dir: Path) -> None:
    assert doubt([0, 0, 1, 2], [0, 1, 2, 0], reader, fixtures_dir) == (
        "the reference is right in 25 % of the rows, no better than always saying the most common label (50 %): "
        "are these labels this model's?"
    )
    assert doubt([0, 0, 1, 2], [0, 0, 1, 0], reader, fixtures_dir) == ""
    assert doubt([0, 0, 0, 0], [0, 0, 0, 1], reader, fixtures_dir) == "", "one label is always the most common"


def test_tags_are_held_against_the_most_common_tag(reader: Reader, fixtures_dir: Path) -> None:
    """Words that were cut off or are not scored are in neither."""
    entry = Entry((), (0, metrics.IGNORED, 1, 0, 2), False, tokens=(1, 2, 3, None, 5))
    marked = marker("f1", "token-classification", reader, fixtures_dir)
    said = marking.doubt(marked, [batch_of(entry)], Answers(decisions=[(1, 1, 1)]), "onnx itself")
    assert said.startswith("onnx itself is right in 33 % of the words, no better than") and "(33 %)" in said
    assert marking.doubt(marked, [batch_of(entry)], Answers(decisions=[(0, 1, 1)]), "onnx itself") == ""


def test_f1_says_over_what_it_is_a_mean(reader: Reader, fixtures_dir: Path) -> None:
    directory = fixtures_dir / "bert-token-classifier"
    facts, labels = facts_of(directory), labelled.read_labels([directory])
    tagger = Marker(metrics.metric_for("f1", facts.task), facts, labels, reader)
    assert tagger.average == (
        "micro over entities",
        f"{len(labels.names)} tags of bert-token-classifier/config.json",
    )
    average, source = marker("f1", "text-classification", reader, fixtures_dir).average
    assert average == "macro over labels" and source.startswith("numbers of the logits, which nothing names")
    assert marker("squad", "question-answering", reader, fixtures_dir).average == ("", "")


def test_words_that_are_cut_are_not_scored(fixtures_dir: Path, tmp_path: Path) -> None:
    directory = fixtures_dir / "bert-token-classifier"
    words = ["Ueda", "Ltd", "."] * 60
    (batch,) = prepare(directory, [{"tokens": words, "tags": ["O", -100, "O"] * 60}], "f1", tmp_path / "d.jsonl", "{}")
    (entry,) = batch.entries
    assert entry.cut and entry.tokens[0] == 1 and entry.tokens[-1] is None
    assert batch.inputs["input_ids"].shape == (1, 128)
    read = [place for place in entry.tokens if place is not None]
    assert read == sorted(set(read)), "each word has a first piece of its own"


# -- heads that are made up --------------------------------------------------------------------------------------------


@pytest.fixture
def reader(fixtures_dir: Path) -> Reader:
    directory = fixtures_dir / "bert-question-answering"
    return tokens.load([directory], facts_of(directory))


def marker(metric: str, task: str, reader: Reader, fixtures_dir: Path, **values: Any) -> Marker:
    facts: Facts = dataclasses.replace(facts_of(fixtures_dir / "bert-question-answering"), task=task)
    return Marker(metrics.metric_for(metric, task), facts, Labels(), reader, **values)


def batch_of(*entries: Entry) -> Batch:
    return Batch(entries, {"input_ids": np.zeros((len(entries), 4), np.int64)}, 1)


def test_a_regression_head_is_for_spearman(reader: Reader, fixtures_dir: Path) -> None:
    rows = batch_of(*(Entry((), wanted, False) for wanted in (1.0, 3.0, 2.0)))
    answers = Answers()
    marker("spearman", "text-classification", reader, fixtures_dir).mark(
        rows, {"logits": np.array([[0.1], [0.9], [0.5]])}, answers
    )
    assert metrics.value("spearman", answers.rows("spearman")) == pytest.approx(1.0)
    with pytest.raises(UsageError, match="one number a text and no labels; use spearman"):
        marker("accuracy", "text-classification", reader, fixtures_dir).mark(
            rows, {"logits": np.zeros((3, 1))}, Answers()
        )
    with pytest.raises(UsageError, match="3 labels, not one number"):
        marker("spearman", "text-classification", reader, fixtures_dir).mark(
            rows, {"logits": np.zeros((3, 3))}, Answers()
        )


def test_choices_and_what_is_not_finite(reader: Reader, fixtures_dir: Path) -> None:
    answers = Answers()
    rows = batch_of(*(Entry((), wanted, False) for wanted in (1, 0, 1)))
    given = {"logits": np.array([[0.0, 1.0], [0.0, 1.0], [np.nan, 1.0]])}
    marker("accuracy", "multiple-choice", reader, fixtures_dir).mark(rows, given, answers)
    assert answers.rows("accuracy")[:, 0].tolist() == [1, 0, 0]
    assert answers.broken == 1 and answers.decisions == [1, 1, -1]
    with pytest.raises(UsageError, match="label 5 is none of the model's 2"):
        marker("accuracy", "multiple-choice", reader, fixtures_dir).mark(
            batch_of(Entry((), 5, False)), {"logits": np.zeros((1, 2))}, Answers()
        )


def test_a_question_may_have_no_answer(reader: Reader, fixtures_dir: Path) -> None:
    reading = reader.read("who?", "Hugo left", keep_first=True)
    entry = Entry((), (), False, reading=reading, text="Hugo left")
    start = np.full((1, len(reading.ids)), -5.0)
    start[0, 0] = 9.0
    rows = Batch((entry,), {"input_ids": np.zeros(start.shape, np.int64)}, 1)
    assert marking.abstains([rows])
    answers = Answers()
    for abstains in (True, False):
        marker("squad", "question-answering", reader, fixtures_dir, abstains=abstains).mark(
            rows, {"start_logits": start, "end_logits": start}, answers
        )
    assert answers.rows("exact_match")[:, 0].tolist() == [1, 0]
    assert answers.decisions[0] == "" and answers.decisions[1] in "Hugo left"


def test_every_task_with_a_metric_has_a_marker() -> None:
    for row in metrics.METRICS.values():
        for task in row.tasks:
            assert task in TASKS
            assert row.name == "bleu" or row.name in marking._BY or task in marking._BY

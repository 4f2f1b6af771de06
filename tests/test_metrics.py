"""Metrics of labelled rows: worked examples, the libraries where they are there, and pairs of models on one sample."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from scipy import stats

from nlpconvert.errors import MissingPackage, UsageError
from nlpconvert.models import TASKS
from nlpconvert.validators import metrics, metrics_text, paired, statistics
from nlpconvert.validators.metrics import Answers, Score
from nlpconvert.validators.paired import Paired
from nlpconvert.validators.scores import Scores, Tripped

ACCURACY = metrics.METRICS["accuracy"].scores[0]
PERPLEXITY = metrics.METRICS["perplexity"].scores[0]


def test_a_metric_fits_its_tasks() -> None:
    assert metrics.metric_for("squad", "question-answering").scores[0].name == "f1"
    with pytest.raises(UsageError, match=r"--metric: 'rouge' is none of accuracy, f1, spearman"):
        metrics.metric_for("rouge", "text-classification")
    with pytest.raises(UsageError, match="squad does not fit text-generation: perplexity does"):
        metrics.metric_for("squad", "text-generation")
    with pytest.raises(UsageError, match="accuracy does not fit text2text-generation: perplexity and bleu do"):
        metrics.metric_for("accuracy", "text2text-generation")
    with pytest.raises(UsageError, match="bleu does not fit fill-mask: no metric does"):
        metrics.metric_for("bleu", "fill-mask")


def test_every_metric_asks_for_a_column_there_is() -> None:
    for row in metrics.METRICS.values():
        for task, column in row.tasks.items():
            there = {name.strip("[]") for name in TASKS[task].columns} | set(row.more)
            assert column in there, (row.name, task)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_decision_that_is_none() -> None:
    assert metrics.decided(np.array([0.1, 3.0, -1.0])) == 1
    assert metrics.decided(np.array([0.1, np.nan, -1.0])) == -1
    assert metrics.decided(np.array([0.1, np.inf])) == -1


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-PER I-PER O B-LOC", {(0, 2, "PER"), (3, 4, "LOC")}),
        ("B-PER B-PER", {(0, 1, "PER"), (1, 2, "PER")}),
        ("I-PER I-PER", {(0, 2, "PER")}),  # an I opens one, as in conlleval
        ("B-PER I-LOC", {(0, 1, "PER"), (1, 2, "LOC")}),
        ("O O", set()),
        ("", set()),
        ("B-A I-A E-A S-A", {(0, 3, "A"), (3, 4, "A")}),
        ("B-A L-A U-B", {(0, 2, "A"), (2, 3, "B")}),
        ("PER PER O LOC", {(0, 2, "PER"), (3, 4, "LOC")}),
        ("B-GPE-LOC I-GPE-LOC", {(0, 2, "GPE-LOC")}),
    ],
)
def test_spans(tags: str, found: set[tuple[int, int, str]]) -> None:
    assert metrics.spans(tags.split()) == found


def test_entity_f1_of_seqevals_own_example() -> None:
    """From its README: F1 0.50."""
    wanted = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    found = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    rows = np.array([metrics.entities(ours, theirs) for ours, theirs in zip(found, wanted, strict=True)], float)
    assert metrics.value("f1", rows) == 0.5
    assert metrics.value("f1", np.zeros((3, 3))) == 0.0, "nothing found, nothing wanted"


def test_macro_f1_of_scikit_learns_own_example() -> None:
    """y_true 0 1 2 0 1 2, y_pred 0 2 1 0 0 1: 0.26666..."""
    rows = np.stack([metrics.confusion(p, t, 3) for p, t in zip((0, 2, 1, 0, 0, 1), (0, 1, 2, 0, 1, 2), strict=True)])
    assert metrics.value("f1", rows) == pytest.approx(0.8 / 3)
    more = np.stack([metrics.confusion(p, t, 9) for p, t in zip((0, 2, 1, 0, 0, 1), (0, 1, 2, 0, 1, 2), strict=True)])
    assert metrics.value("f1", more) == pytest.approx(0.8 / 3), "labels that never occur do not count"
    assert metrics.confusion(-1, 0, 2).tolist() == [0, 0, 1, 0, 0, 0]


def test_the_best_span_is_the_best_of_all() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        start, end, inside = rng.normal(size=20), rng.normal(size=20), rng.random(20) < 0.8
        found = metrics.best_span(start, end, inside, longest=5)
        every = [
            (start[i] + end[j], i, j) for i in range(20) for j in range(i, min(i + 5, 20)) if inside[i] & inside[j]
        ]
        assert found is not None
        assert (found[2], *found[:2]) == max(every)
    assert metrics.best_span(start, end, np.zeros(20, bool)) is None
    assert metrics.best_span(np.full(3, np.nan), np.zeros(3), np.ones(3, bool)) is None


def test_surprise_is_cross_entropy() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])) + 700
    assert metrics.surprise(logits, np.array([0, 2])) == pytest.approx(-math.log(0.5) - math.log(0.8))
    assert metrics.surprise(np.zeros((0, 3)), np.array([], dtype=np.int64)) == 0.0
    assert metrics.surprise(np.array([[np.nan, 1.0]]), np.array([1])) == math.inf
    rows = np.array([[2 * math.log(8), 2], [math.log(2), 1]])
    assert metrics.value("exponential", rows) == pytest.approx((8 * 8 * 2) ** (1 / 3))


def test_spearman_is_scipys() -> None:
    rows = np.random.default_rng(1).integers(0, 6, (40, 2)).astype(float)
    assert metrics.value("spearman", rows) == pytest.approx(float(stats.spearmanr(*rows.T).statistic))
    index = np.random.default_rng(2).integers(0, 40, (5, 40))
    drawn = metrics.resampled("spearman", rows)(index)
    assert drawn == pytest.approx([float(stats.spearmanr(*rows[each].T).statistic) for each in index])
    assert metrics.value("spearman", np.ones((4, 2))) == 0.0


def test_cosine() -> None:
    assert metrics.cosine(np.array([1.0, 0.0]), np.array([1.0, 1.0])) == pytest.approx(math.sqrt(0.5))
    assert metrics.cosine(np.zeros(2), np.ones(2)) == 0.0


# -- words -------------------------------------------------------------------------------------------------------------


def test_answers_are_normalised_as_the_official_script_does() -> None:
    assert metrics_text.normalized("The  Quick, brown-fox!") == "quick brownfox"
    assert metrics_text.exact_match("the Eiffel Tower.", ["Eiffel tower", "Paris"]) == 1.0
    assert metrics_text.exact_match("Eiffel", ["Eiffel tower"]) == 0.0
    assert metrics_text.word_f1("in the Eiffel tower", ["Paris", "Eiffel Tower"]) == pytest.approx(0.8)
    assert metrics_text.word_f1("", []) == metrics_text.exact_match("", []) == 1.0
    assert metrics_text.word_f1("something", []) == metrics_text.exact_match("something", []) == 0.0
    assert metrics_text.word_f1("the", ["a"]) == 1.0, "both are nothing once normalised"


def test_bleu_is_sacrebleus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    rng = np.random.default_rng(3)
    words = "the a cat sat on mat, dog ran fast. over 3.5 lazy it's".split()
    for _ in range(30):
        texts = [[" ".join(rng.choice(words, rng.integers(0, 12))) for _ in range(6)] for _ in range(2)]
        rows = np.array([metrics_text.bleu_counts(ours, theirs) for ours, theirs in zip(*texts, strict=True)])
        assert metrics.value("bleu", rows) == pytest.approx(sacrebleu.corpus_bleu(texts[0], [texts[1]]).score, abs=1e-9)


def test_bleu_without_sacrebleu_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    metrics_text._bleu.cache_clear()
    with pytest.raises(MissingPackage, match=r"needs sacrebleu: pip install 'nlpconvert\[bleu\]'"):
        metrics_text.bleu_counts("a", "b")
    metrics_text._bleu.cache_clear()


# -- two models on one sample ------------------------------------------------------------------------------------------


def right(count: int, rows: int, first: int = 0) -> np.ndarray:
    """Rows of accuracy: `count` right ones from `first` on."""
    found = np.zeros((rows, 2))
    found[first : first + count, 0] = found[:, 1] = 1
    return found


def test_right_and_wrong_rows_are_judged_exactly() -> None:
    pair = Paired(ACCURACY, right(90, 100), right(92, 100, first=3))  # rows 0-2 only ours, 90-94 only theirs
    assert pair.binary
    assert pair.discordant == (5, 3)
    scored = pair.scored()
    assert (scored.candidate, scored.reference, scored.difference) == (0.9, 0.92, pytest.approx(-0.02))
    assert scored.interval == statistics.share_interval(90, 100)
    assert scored.difference_interval == statistics.paired_shares(5, 3, 100)
    assert scored.chance == statistics.mcnemar(5, 3)
    assert scored.detectable == statistics.detectable_share(100, 8)
    assert pair.worsening == pytest.approx(0.02)


def test_graded_rows_are_resampled() -> None:
    rng = np.random.default_rng(4)
    counts = rng.integers(5, 30, 150).astype(float)
    reference = np.stack([counts * 3 + rng.normal(0, 2, 150), counts], axis=1)
    worse = reference + np.stack([counts * 0.05 + rng.normal(0, 0.3, 150), 0 * counts], axis=1)
    pair = Paired(PERPLEXITY, worse, reference)
    assert not pair.binary and pair.discordant is None
    scored = pair.scored()
    assert scored.difference is not None and scored.difference_interval is not None and scored.chance is not None
    assert 0 < scored.difference_interval.low < scored.difference < scored.difference_interval.high
    assert scored.chance < 1e-3 and pair.worsening == pytest.approx(scored.difference)
    assert scored.detectable is not None and 0 < scored.detectable < scored.difference
    needed = pair.rows_for(scored.detectable / 2)
    assert needed == pytest.approx(600, rel=1e-6), "half the change takes four times the rows"
    better = Paired(PERPLEXITY, reference, worse)
    assert better.worsening < 0 and better.chance_of_worsening() > 0.99


def test_rows_that_all_stayed_tell_no_detectable_change() -> None:
    rows = np.abs(np.random.default_rng(5).normal(size=(50, 3)))
    pair = Paired(metrics.METRICS["f1"].scores[0], rows, rows)
    assert pair.detectable() is None and pair.rows_for(0.01) is None
    assert pair.chance_of_worsening() == 1.0
    same = Paired(ACCURACY, right(90, 100), right(90, 100))
    assert same.detectable() == pytest.approx(0.06, abs=0.005), "a share is bounded even so"
    assert same.difference_interval().high > 0.01


def test_a_score_alone() -> None:
    pair = Paired(ACCURACY, right(90, 100))
    assert pair.difference is None
    assert pair.scored().difference is None
    assert pair.chance_of_passing(0.9) > 0.4
    assert pair.chance_of_passing(0.99) < 1e-5
    with pytest.raises(ValueError, match="at least one"):
        Paired(ACCURACY, np.zeros((0, 2)))
    with pytest.raises(ValueError, match="same rows"):
        Paired(ACCURACY, right(1, 2), right(1, 3))


def test_changed_decisions() -> None:
    found = paired.changed([1, 2, 3, 4], [1, 2, 0, 4])
    assert found is not None and (found.count, found.rows) == (1, 4)
    assert found.interval == statistics.share_interval(1, 4)
    assert paired.changed([None, None], [None, None]) is None


def test_scores_become_plain_data_and_come_back() -> None:
    answers = Answers()
    for n in range(20):
        answers.add({"accuracy": (n % 3 > 0, 1)}, n % 3)
    found = paired.pairs((ACCURACY,), answers, answers)["accuracy"].scored()
    scores = Scores(
        "onnx-int8", "accuracy", "scored", rows=20, scores=(found,), changed=paired.changed([1, 2], [1, 3]),
        fail_if=(Tripped("accuracy below 0.9", "fails", "it is 0.6"),), notes=("a note",), warnings=("a warning",),
    )  # fmt: skip
    data = scores.to_dict()
    assert data["fail_if"][0]["failed"] is True
    older = {**data, "fail_if": [{"text": "accuracy below 0.9", "failed": True, "reason": "it is 0.6", "warning": ""}]}
    assert Scores.from_dict(older) == scores, "of before there was a status"
    assert Scores.from_dict({**data, "something new": 1}) == scores
    assert scores.failed and data["failed"] and scores.exit_code == 1
    assert Scores("onnx", "accuracy", "not run", "no runtime").exit_code == 4
    assert Scores("onnx", "accuracy", "drift", "changed").exit_code == 1
    assert Scores("onnx", "accuracy", "scored").exit_code == 0


def test_formulas_are_the_table_s() -> None:
    for row in metrics.METRICS.values():
        for score in row.scores:
            assert isinstance(score, Score)
            rows = np.ones((3, {"bleu": 10, "f1": 3}.get(score.formula, 2)))
            assert np.isfinite(metrics.value(score.formula, rows))

"""What is measured of a model that writes, on hand-made logits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nlpconvert.errors import UsageError
from nlpconvert.passages import Free, Passage, Seeing, Seen, best_two, places, shares
from nlpconvert.validators import written, written_why
from nlpconvert.validators.tolerance import Tolerance, parse
from nlpconvert.validators.written import Phase
from nlpconvert.validators.written_texts import ALLOWED, Difference, Perplexity, Texts, allowed

REL = parse("rel<=1e-4")[0]
KL = parse("kl<=0.01")[0]


def _passage(rows: int = 2, pads: tuple[int, ...] = (0, 2), prompt: int = 4, total: int = 9) -> Passage:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 7, (rows, total))
    mask = np.ones((rows, prompt), np.int64)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
        tokens[row, :pad] = 0
    return Passage("p", "", {"input_ids": tokens[:, :prompt], "attention_mask": mask}, tokens, prompt)


def _seen(passage: Passage, logits: np.ndarray) -> Seen:
    seeing = Seeing(passage, np.argwhere(passage.real))
    seeing.add(0, logits.astype(np.float32))
    return seeing.seen()


def _logits(passage: Passage, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(*passage.tokens.shape, 7))


def _phase(passage: Passage, logits: np.ndarray, other: np.ndarray, tolerance: Tolerance = REL) -> Phase:
    phase = Phase("steps", 1.0, tolerance, 1e-6)
    phase.add(passage, _seen(passage, logits), _seen(passage, other), np.ones(passage.tokens.shape, bool))
    return phase


# -- one pass ----------------------------------------------------------------------------------------------------------


def test_what_is_kept_of_logits_is_what_they_say() -> None:
    passage = _passage()
    logits = _logits(passage)
    seen = _seen(passage, logits)
    assert seen.top.tolist() == logits.argmax(-1).tolist()
    ordered = np.sort(logits, axis=-1)
    np.testing.assert_allclose(seen.margin, ordered[..., -1] - ordered[..., -2], rtol=1e-5)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    following = np.take_along_axis(probability[:, :-1], passage.tokens[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(seen.loss[:, :-1], -np.log(following), rtol=1e-5)
    assert np.isnan(seen.loss[:, -1]).all() and seen.finite.all() and seen.there.all()


def test_rows_and_pieces_may_come_in_any_order() -> None:
    passage = _passage()
    logits = _logits(passage).astype(np.float32)
    whole = _seen(passage, logits)
    seeing = Seeing(passage, whole.index)
    rows = np.array([1, 0])
    seeing.add(3, logits[rows, 3:], rows)
    seeing.add(0, logits[:1, :3], [0])
    seeing.add(0, logits[1:, :3], [1])
    np.testing.assert_array_equal(seeing.seen().values, whole.values)
    np.testing.assert_array_equal(seeing.seen().top, whole.top)
    with pytest.raises(ValueError, match="no logits"):
        Seeing(passage, whole.index).seen()


def test_of_equal_scores_the_first_is_best() -> None:
    assert best_two(np.array([1.0, 3.0, 3.0, 0.0])) == (1, 2)
    assert best_two(np.array([2.0, 1.0])) == (0, 1)


def test_places_hold_each_rows_ends_and_the_change_of_phase_first() -> None:
    passage = _passage(total=40)
    few = {tuple(each) for each in places(passage, 10).tolist()}
    assert {(0, 3), (1, 3), (0, 4), (1, 4), (0, 39), (1, 39), (0, 0), (1, 2)} <= few and len(few) == 10
    assert all(passage.real[row, place] for row, place in few)
    assert len(places(passage, 10**6)) == int(passage.real.sum())
    given = shares([passage, _passage()], vocabulary=100, budget=4 * 100 * 30)
    assert given == {"p": 14} or sum(given.values()) <= 30


# -- phases ------------------------------------------------------------------------------------------------------------


def test_the_worst_element_is_named_by_its_real_position_and_padding_never_counts() -> None:
    passage = _passage()
    logits, other = _logits(passage), _logits(passage)
    other[1, 0] += 100  # padding
    other[1, 5, 2] += 0.5
    found = _phase(passage, logits, other).found()
    assert not found.agrees and found.positions == found.kept == 16
    assert found.worst is not None
    assert (found.worst.row, found.worst.position, found.worst.token) == (1, 3, 2)
    assert found.worst.candidate - found.worst.reference == pytest.approx(0.5, abs=1e-5)
    assert found.measured == pytest.approx(0.5 / (1 + abs(logits[1, 5, 2])), rel=1e-4)
    assert found.used == pytest.approx(found.measured / 1e-4) and found.out_of_tolerance == 1
    sentence = written_why.problems([found], {"steps": _phase(passage, logits, other).off}, REL)[0]
    assert "1 of 16 positions are off, the earliest at position 3 of row 1 of p" in sentence


def test_a_changed_token_is_a_near_tie_only_where_the_runner_up_won_by_less_than_the_noise() -> None:
    passage = _passage(1, (0,))
    logits = np.zeros((1, 9, 7))
    logits[..., 1], logits[..., 2], logits[..., 3] = 1.0, 1.0 - 1e-7, 0.5
    near, far = logits.copy(), logits.copy()
    near[0, 4, 2] += 3e-7
    far[0, 4, 3] += 1
    found = _phase(passage, logits, near).found()
    assert (found.changed, found.near_ties) == (1, 1) and found.agrees
    found = _phase(passage, logits, far, parse("changed<=5%")[0]).found()
    assert (found.changed, found.near_ties) == (1, 0)
    assert found.measured == pytest.approx(1 / 9) and not found.agrees


def test_what_is_not_finite_never_agrees() -> None:
    passage = _passage()
    logits, other = _logits(passage), _logits(passage)
    other[0, 6, 1] = np.nan
    found = _phase(passage, logits, other).found()
    assert not found.agrees and found.nonfinite == 1 and math.isinf(found.used)
    assert found.first_nonfinite is not None and found.first_nonfinite.position == 6


def test_nothing_compared_does_not_agree() -> None:
    assert not Phase("steps", 1.0, REL, None).found().agrees


def test_one_passage_alone_may_decide_the_divergence() -> None:
    passage = _passage()
    logits, other = _logits(passage), _logits(passage)
    other[0, 6] = -other[0, 6]
    phase = Phase("steps", 1.0, KL, 1e-6)
    everywhere = np.ones(passage.tokens.shape, bool)
    for number in range(200):
        calm = Passage(f"calm-{number}", "", passage.inputs, passage.tokens, 4)
        phase.add(calm, _seen(passage, logits), _seen(passage, logits), everywhere)
    phase.add(passage, _seen(passage, logits), _seen(passage, other), everywhere)
    found = phase.found()
    assert found.decided_by == "p" and found.kl < 0.01 / 5 and found.measured > found.kl


# -- the curve ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "power, words, slope",
    [(0.0, "does not grow", 0.0), (1.0, "grows with the length: times 1.9", 1.0), (-0.5, "shrinks", -0.5)],
)
def test_the_curve_says_whether_the_error_grows(power: float, words: str, slope: float) -> None:
    found = written.curve([(at, (1e-6 * (at + 1) ** power) ** 2, 0.0) for at in range(256)])
    assert words in found.sentence
    assert found.slope == pytest.approx(slope, abs=0.1)
    assert [(each.first, each.last) for each in found.bins[:3]] == [(0, 7), (8, 15), (16, 31)]


def test_a_curve_of_too_little_says_so() -> None:
    assert "too few" in written.curve([(1, 1e-12, 0.0), (2, 1e-12, 0.0)]).sentence
    assert "no error" in written.curve([(at, 0.0, 0.0) for at in range(99)]).sentence
    assert written.curve([]).slope is None


# -- texts -------------------------------------------------------------------------------------------------------------


def _free(margin: float = 1.0) -> Free:
    tokens = np.array([[4, 5, 6, 1], [4, 5, 1, 0]])
    ones = np.ones(tokens.shape, np.float32)
    return Free(tokens, np.array([4, 3]), np.full(tokens.shape, 9), margin * ones, ones)


def test_free_texts_are_held_against_the_reference_up_to_their_first_difference() -> None:
    texts = Texts()
    texts.add("same", _free(), _free().tokens, [4, 3], 1.0, 1e-6)
    assert (texts.rows, texts.identical, texts.share) == (2, 2, 1.0) and not texts.too_few(1.0)
    other = _free().tokens.copy()
    other[0, 2:] = 9, 3
    texts.add("real", _free(), other, [4, 3], 1.0, 1e-6)
    texts.add("near", _free(1e-6), other, [4, 3], 1.0, 1e-6)
    first, second = texts.differences
    assert (first.row, first.position, first.reference, first.candidate, first.near_tie) == (0, 2, 6, 9, False)
    assert second.near_tie and len(texts.real) == 1
    assert texts.share == 4 / 5 and texts.too_few(1.0)


def test_a_text_that_ends_elsewhere_differs() -> None:
    texts = Texts()
    texts.add("short", _free(), _free().tokens, [3, 3], 1.0, None)
    assert texts.identical == 1 and texts.differences[0].position == 3 and texts.differences[0].candidate == -1


def test_a_near_tie_is_won_by_the_runner_up_alone() -> None:
    texts = Texts()
    other = _free().tokens.copy()
    other[0, 2] = 8
    texts.add("third", _free(1e-9), other, [4, 3], 1.0, 1e-6)
    assert not texts.differences[0].near_tie


def test_a_small_sample_is_not_blamed_for_chance() -> None:
    def wrong(count: int, rows: int) -> Texts:
        texts = Texts(rows=rows, identical=rows - count, judged=rows)
        texts.differences = [Difference("p", 0, 0, 1, 2, 1.0, False)] * count
        return texts

    assert not wrong(1, 6).too_few(0.99)  # one in six comes by chance in 6 % of samples
    assert wrong(2, 12).too_few(0.99)
    assert wrong(1, 5).too_few(1.0)
    assert not wrong(1, 200).too_few(0.99)


def test_perplexity_is_of_real_tokens_and_worse_above_one() -> None:
    passage = _passage()
    logits = _logits(passage)
    rows, places = np.indices(passage.tokens[:, 1:].shape)
    logits[rows, places, passage.tokens[:, 1:]] += 3  # a reference that has learnt something
    reference, worse = _seen(passage, logits), _seen(passage, logits / 5)
    same, found = Perplexity(), Perplexity()
    same.add(passage, reference, reference)
    found.add(passage, reference, worse)
    assert same.ratio == 1 and same.tokens == 14
    real = passage.real[:, :-1] & passage.real[:, 1:]
    difference = (worse.loss[:, :-1] - reference.loss[:, :-1])[real].mean()
    assert found.ratio == pytest.approx(math.exp(difference), rel=1e-5)
    assert math.isnan(Perplexity().ratio)
    assert "perplexity is" in written_why.text_problems(found, Texts(), allowed("int8", False))[0]
    guessed = Perplexity()
    guessed.add(passage, _seen(passage, -logits), worse)
    assert (guessed.tokens, guessed.left_out) == (0, 2)
    assert written_why.text_problems(guessed, Texts(), allowed("int8", False)) == []
    assert "perplexity is nan" in written_why.text_problems(Perplexity(), Texts(), allowed("int8", False))[0]


def test_the_table_knows_every_precision_and_a_lower_one_is_allowed_no_less() -> None:
    for encodes in (False, True):
        bounds = [allowed(each, encodes).perplexity for each in ("float16", "bfloat16", "int8", "int4")]
        assert bounds == sorted(bounds, key=lambda each: each or 0)
    assert allowed("int8", True).identical == 0.99 and allowed("int8", False).identical is None
    assert allowed("float32", True).identical == 1.0
    assert {row.precision for row in ALLOWED} == {"float32", "float16", "bfloat16", "int8", "int4"}
    with pytest.raises(UsageError, match="int2"):
        allowed("int2", False)

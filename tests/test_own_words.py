"""What a model writes itself as calibration, and how a search sees that a candidate would write otherwise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from nlpconvert import own_words
from nlpconvert.inputs import Case
from nlpconvert.models import Facts, OutputRow
from nlpconvert.own_words import Writes
from nlpconvert.validators.margins import TextMargins
from nlpconvert.validators.written_texts import SURE

VOCABULARY = 8
FACTS = Facts(
    model_type="t5",
    task="text2text-generation",
    inputs=("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"),
    outputs=(OutputRow("logits", ("batch", "decoder_sequence", "vocabulary"), "distribution"),),
    vocab_size=VOCABULARY,
    pad_id=0,
    eos_id=1,
    decoder_start_id=2,
    max_length=None,
    positions="own",
    type_vocab_size=0,
    constants=(),
    pairs=False,
)


def case(name: str, targets: np.ndarray, mask: np.ndarray | None = None) -> Case:
    ones = np.ones((len(targets), 3), np.int64)
    real = np.ones_like(targets) if mask is None else mask
    inputs = {"input_ids": ones, "attention_mask": ones, "decoder_input_ids": targets, "decoder_attention_mask": real}
    return Case(name, inputs)


def logits(margins: np.ndarray) -> np.ndarray:
    """Scores in which token 3 leads token 4 by `margins`, (rows, tokens)."""
    made = np.full((*margins.shape, VOCABULARY), -5.0, np.float32)
    made[:, :, 3], made[:, :, 4] = margins, 0
    return made


def test_what_was_written_is_read_behind_the_start_token() -> None:
    written = np.array([[5, 6, 1, -1], [7, 1, -1, -1]])
    made = own_words._answered(case("shipped-0001", np.zeros((2, 5), np.int64)), written, FACTS)
    assert own_words.is_own(made) and made.name == "shipped-0001-written"
    np.testing.assert_array_equal(made.inputs["decoder_input_ids"], [[2, 5, 6, 0], [2, 7, 0, 0]])
    np.testing.assert_array_equal(made.inputs["decoder_attention_mask"], [[1, 1, 1, 0], [1, 1, 0, 0]])


def test_source_and_target_are_never_of_one_length() -> None:
    """Whose tokens a tensor is about is told by its axes."""
    made = own_words._answered(case("a", np.zeros((1, 5), np.int64)), np.array([[5, 6, 1]]), FACTS)
    np.testing.assert_array_equal(made.inputs["decoder_attention_mask"], [[1, 1, 1, 0]])


def test_a_text_changes_with_its_first_token() -> None:
    seen = TextMargins()
    real = np.array([[True, True, True], [True, True, False]])
    margins = np.array([[1.0, 0.2, 2.0], [1.0, 1.0, 0.1]])
    seen.reference("a", logits(margins), real)
    same, other = seen.fresh(), seen.fresh()
    same.add("a", logits(margins))
    assert (same.changed, same.rows, same.expected()) == (0, 2, 0.0)
    other.add("a", logits(margins - 0.3))  # the padded place does not count
    assert (other.changed, other.rows) == (1, 2)
    # All margins move by 0.3: of the first text's one is smaller, in one direction of two.
    assert other.expected() == pytest.approx(0.25)
    broken = seen.fresh()
    broken.add("a", np.full((2, 3, VOCABULARY), np.nan, np.float32))
    assert broken.expected() == 1.0


def test_texts_that_the_reference_was_not_sure_of_are_left_out() -> None:
    seen = TextMargins()
    seen.reference("a", logits(np.array([[1.0, 0.2], [1.0, 1.0]])), np.ones((2, 2), bool), SURE)
    seen.add("a", logits(np.array([[-1.0, -1.0], [1.0, 1.0]])))
    assert (seen.changed, seen.rows) == (0, 1)


TARGETS = np.array([[2, 3, 3, 3]])
MARGINS = np.full((1, 4), 0.4)


@pytest.mark.parametrize(("names", "counts"), [(["shipped-0001-written"], False), (["data-0001-written"], True)])
def test_the_users_sources_count_always(names: list[str], counts: bool) -> None:
    cases = [case(name, TARGETS) for name in names]
    writes = Writes(cases, FACTS, "int8", keeps=True)
    for each in cases:
        writes.ask(each, {"logits": logits(MARGINS)})
    moved = writes.fresh()
    for each in cases:
        moved.add(each, {"logits": logits(-MARGINS)})
    assert (moved.used[0] > 1) is counts
    assert writes.fresh().used[0] == 0


def test_shipped_ones_stand_back_where_there_are_the_users() -> None:
    own, shipped = (case(f"{name}-0001-written", TARGETS) for name in ("data", "shipped"))
    writes = Writes([own, shipped], FACTS, "int8", keeps=True)
    for each in (own, shipped):
        writes.ask(each, {"logits": logits(5 * MARGINS)})
    moved = writes.fresh()
    moved.add(own, {"logits": logits(5 * MARGINS)})
    moved.add(shipped, {"logits": logits(-5 * MARGINS)})
    assert moved.used == (0.0, "texts 0.00%")


def test_perplexity_of_texts_that_stand_there() -> None:
    likely, garbage = case("data-0001", TARGETS), case("data-0002", np.array([[2, 5, 5, 5]]))
    writes = Writes([likely, garbage], FACTS, "int4", keeps=True)
    for each in (likely, garbage):
        writes.ask(each, {"logits": logits(np.full((1, 4), 2.0))})
    worse = writes.fresh()
    for each in (likely, garbage):
        worse.add(each, {"logits": logits(np.full((1, 4), 1.9))})

    def loss(margin: float) -> float:
        return math.log(math.exp(margin) + 1 + 6 * math.exp(-5)) - margin

    ratio = math.exp(loss(1.9) - loss(2.0))
    used, text = worse.used
    assert used == pytest.approx((ratio - 1) / 0.05, rel=1e-4)
    assert text == f"perplexity {ratio:.4f}"
    assert worse._perplexity.tokens == 3  # what the reference finds less likely than by chance tells nothing
    broken = writes.fresh()
    broken.add(likely, {"logits": np.full((1, 4, VOCABULARY), np.nan, np.float32)})
    assert broken.used[0] == math.inf


def test_a_decoder_alone_has_its_perplexity_only() -> None:
    facts = replace(FACTS, task="text-generation", inputs=("input_ids", "attention_mask"))
    text = Case("data-0001", {"input_ids": TARGETS, "attention_mask": np.array([[0, 1, 1, 1]])})
    writes = Writes([text], facts, "int8", keeps=True)
    writes.ask(text, {"logits": logits(MARGINS)})
    same = writes.fresh()
    same.add(text, {"logits": logits(MARGINS)})
    assert same.used == (0.0, "perplexity 1.0000") and same._perplexity.tokens == 2


def test_nothing_is_asked_of_what_keeps_no_cache() -> None:
    assert not Writes([case("data-0001", TARGETS)], FACTS, "int8", keeps=False).asks

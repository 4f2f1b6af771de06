"""Tests of validators/tolerance.py: what the flag takes and refuses, which bound judges what, the table's reach."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from nlpconvert.errors import UsageError
from nlpconvert.models import TASKS, OutputRow
from nlpconvert.validators.tolerance import (
    DEFAULTS,
    DIRECTIONS,
    JUDGED_BY,
    Tolerance,
    choose,
    default_for,
    parse,
    passing,
    provider_class,
)

EMBEDDING = OutputRow("sentence_embedding", ("batch", "hidden"), "embedding")
LABELS = OutputRow("logits", ("batch", "labels"), "decisions")
VOCABULARY = OutputRow("logits", ("batch", "sequence", "vocabulary"), "distribution")


@pytest.mark.parametrize(
    ("text", "measure", "value", "shown"),
    [
        ("cosine>=0.995", "cosine", 0.995, "cosine>=0.995"),
        (" cosine >= 0.99999999 ", "cosine", 0.99999999, "cosine>=0.99999999"),
        ("cosine>=1", "cosine", 1.0, "cosine>=1.0"),
        ("changed<=0.5%", "changed", 0.005, "changed<=0.5%"),
        ("changed<=0.005", "changed", 0.005, "changed<=0.5%"),
        ("changed<=0", "changed", 0.0, "changed<=0%"),
        ("kl<=0.02", "kl", 0.02, "kl<=0.02"),
        ("abs<=1e-3", "abs", 1e-3, "abs<=0.001"),
        ("rel<=5e-05", "rel", 5e-5, "rel<=5e-05"),
    ],
)
def test_a_bound_is_parsed_and_shown_so_that_it_parses_again(text: str, measure: str, value: float, shown: str) -> None:
    (found,) = parse(text)
    assert (found.measure, found.value, found.given, found.text) == (measure, value, True, shown)
    assert parse(found.text) == (found,)
    assert Tolerance.from_dict(found.to_dict()) == found


def test_several_bounds_are_separated_by_commas() -> None:
    assert [t.text for t in parse("cosine>=0.99, kl<=0.02")] == ["cosine>=0.99", "kl<=0.02"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosine<=0.99", "cosine is better when it is larger; write cosine>="),
        ("kl>=0.1", "kl is better when it is smaller; write kl<="),
        ("abs<1e-3", "write abs<="),
        ("changed=1%", "write changed<="),
        ("bleu>=0.3", "no such measure"),
        ("cosine>=nan", "must be a finite number"),
        ("kl<=inf", "must be a finite number"),
        ("abs<=-1", "must not be negative"),
        ("cosine>=1.01", "no cosine is above 1"),
        ("cosine>=-1", "answers of zeros would pass"),
        ("cosine>=0", "answers of zeros would pass"),
        ("changed<=100%", "every decision could change"),
        ("changed<=5", "write a share below 100%"),
        ("rel<=1", "answers of zeros would pass"),
        ("cosine>=99%", "only changed takes a percent sign"),
        ("abs<=much", "'much' is not a number"),
        ("0.99", "is not understood"),
        ("", "is not understood"),
        ("abs<=1e-3,", "is not understood"),
        ("abs<=1e-3,abs<=1e-4", "gives abs twice"),
    ],
)
def test_what_cannot_be_a_bound_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match="tolerance") as refused:
        parse(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_tolerance_cannot_be_built_with_the_wrong_direction_either() -> None:
    with pytest.raises(UsageError, match="write cosine>="):
        Tolerance("cosine", "<=", 0.99)


def test_nan_is_never_within_a_bound() -> None:
    for text in ("cosine>=0.5", "abs<=1e30"):
        (bound,) = parse(text)
        assert not bound.holds(math.nan)
        assert bound.used(math.nan) == math.inf


def test_how_far_from_turning() -> None:
    (cosine,), (kl,), (none,) = parse("cosine>=0.99"), parse("kl<=0.02"), parse("changed<=0")
    assert cosine.used(0.995) == pytest.approx(0.5)
    assert kl.used(0.04) == pytest.approx(2)
    assert (none.used(0.0), none.used(0.1)) == (0.0, math.inf)


def test_every_task_output_has_a_default_in_every_precision_and_provider() -> None:
    outputs = [output for task in TASKS.values() for output in task.outputs]
    outputs.append(OutputRow("logits", ("batch", "labels"), "score"))
    for precision in {row.precision for row in DEFAULTS}:
        for provider in ("CPUExecutionProvider", "cuda:0 NVIDIA H200", "TensorrtExecutionProvider", "tensorrt-rtx"):
            for output in outputs:
                bound = default_for(output, precision, provider)
                assert not bound.given
                assert bound.measure in (*JUDGED_BY[output.measure], "abs", "rel")


@pytest.mark.parametrize(
    ("output", "precision", "provider", "text"),
    [
        (EMBEDDING, "float32", "cpu", "rel<=5e-05"),
        (LABELS, "float32", "cuda", "rel<=0.0005"),
        (VOCABULARY, "float32", "tensorrt", "rel<=0.001"),
        (EMBEDDING, "float16", "cuda", "cosine>=0.9999"),
        (LABELS, "int8", "cpu", "changed<=0.5%"),
        (VOCABULARY, "int4", "cpu", "kl<=0.05"),
        (EMBEDDING, "bfloat16", "cuda", "cosine>=0.999"),
    ],
)
def test_the_table(output: OutputRow, precision: str, provider: str, text: str) -> None:
    assert default_for(output, precision, provider).text == text


def test_each_precision_is_wider_than_the_one_above() -> None:
    for output in (EMBEDDING, LABELS, VOCABULARY):
        bounds = [default_for(output, p, "cpu") for p in ("float16", "bfloat16", "int8", "int4")]
        for tighter, wider in itertools.pairwise(bounds):
            assert wider.holds(tighter.value)
            assert not tighter.holds(wider.value)


def test_no_row_no_default() -> None:
    with pytest.raises(UsageError, match=r"no default tolerance for logits .* in int2; give one with --tolerance"):
        default_for(LABELS, "int2", "cpu")
    with pytest.raises(UsageError, match="no default tolerance for the provider 'abacus'"):
        provider_class("abacus")


def test_a_given_bound_judges_the_outputs_it_fits_and_the_table_the_rest() -> None:
    hidden = OutputRow("encoder_last_hidden_state", ("batch", "sequence", "hidden"), "embedding")
    chosen = choose(parse("kl<=0.5"), (VOCABULARY, hidden), "int8", "cpu")
    assert {name: (t.text, t.given) for name, t in chosen.items()} == {
        "logits": ("kl<=0.5", True),
        "encoder_last_hidden_state": ("cosine>=0.95", False),
    }
    assert choose(parse("abs<=1e-3"), (VOCABULARY, hidden), "int8", "cpu")["logits"].text == "abs<=0.001"


def test_two_bounds_for_one_output_are_refused() -> None:
    with pytest.raises(UsageError, match=r"cosine>=0.9 and abs<=0.1 would both judge sentence_embedding"):
        choose(parse("cosine>=0.9,abs<=0.1"), (EMBEDDING,), "int8", "cpu")


def test_a_bound_that_judges_nothing_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"kl<=0.02 judges none of this model's outputs; judged are sentence_embedding"
    ):
        choose(parse("kl<=0.02"), (EMBEDDING,), "float32", "cpu")


def test_the_bound_that_is_offered_really_passes_and_is_tight() -> None:
    draw = random.Random(5)
    for measure in DIRECTIONS:
        for _ in range(300):
            size = 10 ** draw.uniform(-9, -0.1)
            measured = 1 - size if measure == "cosine" else size
            offered = passing(measure, measured)
            assert offered is not None, (measure, measured)
            (bound,) = parse(offered)
            assert bound.holds(measured), offered
            assert bound.used(measured) > 0.9, offered


def test_no_bound_is_offered_where_none_is_valid() -> None:
    assert passing("cosine", -0.2) is None
    assert passing("changed", 1.0) is None
    assert passing("rel", 3.0) is None
    assert passing("abs", math.inf) is None
    assert passing("cosine", 1.0) == "cosine>=1"
    assert passing("abs", 0.0) == "abs<=0.0e+00"
    assert passing("changed", 0.0033333) == "changed<=0.34%"

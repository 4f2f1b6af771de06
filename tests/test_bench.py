"""What a benchmark computes without a runtime: the clock's rules, batches of texts, questions, findings."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from nlpconvert.bench import asking, benching, policies, timing
from nlpconvert.bench.asking import Rows, Texts
from nlpconvert.bench.benching import Wishes
from nlpconvert.bench.findings import findings
from nlpconvert.bench.timing import Rule, Timed
from nlpconvert.errors import UsageError
from nlpconvert.inputs import Case
from nlpconvert.models import Facts, OutputRow

FACTS = Facts(
    model_type="bert",
    task="text-classification",
    inputs=("input_ids", "attention_mask"),
    outputs=(OutputRow("logits", ("batch", "labels"), "decisions"),),
    vocab_size=50,
    pad_id=0,
    eos_id=None,
    decoder_start_id=None,
    max_length=32,
    positions="own",
    type_vocab_size=0,
    constants=(),
    pairs=False,
    special_ids=(0, 1, 2),
)


# -- the clock ---------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only where a pass takes it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def turn(self, taken: float, log: list[str], name: str) -> timing.Turn:
        """A turn whose passes all take `taken` seconds."""

        def run() -> None:
            self.now += taken

        def turn(seconds: float, most: int) -> list[float]:
            log.append(name)
            return timing.passes(run, seconds, most, self)

        return turn


def test_a_turn_lasts_as_long_as_it_should_and_its_first_pass_is_left_out() -> None:
    clock, log = Clock(), list[str]()
    assert len(clock.turn(0.01, log, "a")(0.05, 400)) == pytest.approx(5, abs=1)
    assert clock.turn(0.2, log, "a")(0.05, 400) == pytest.approx([0.2])  # a long pass alone is counted
    assert len(clock.turn(0.01, log, "a")(0.05, 3)) == 2


def test_subjects_take_turns_in_another_order_each_round() -> None:
    clock, log = Clock(), list[str]()
    turns = {(name, "1x8"): clock.turn(0.2, log, name) for name in ("pytorch", "onnx")}
    timing.interleaved(turns, Rule(budget=1e9, enough=4), clock=clock)
    assert log == ["pytorch", "onnx"] + ["pytorch", "onnx", "onnx", "pytorch"] * 2


def test_what_is_steady_stops_when_its_median_is_known() -> None:
    clock, log = Clock(), list[str]()
    found = timing.interleaved({("onnx", "c"): clock.turn(0.01, log, "o")}, Rule(budget=1e9), clock=clock)
    assert found["onnx", "c"].ended == "stable"
    assert len(found["onnx", "c"].seconds) >= Rule().enough


def test_what_scatters_goes_on_until_the_budget_is_spent() -> None:
    clock = Clock()
    rng = np.random.default_rng(0)

    def turn(seconds: float, most: int) -> list[float]:
        taken = float(rng.lognormal(0, 1))
        clock.now += taken
        return [taken]

    found = timing.interleaved({("onnx", "c"): turn}, Rule(budget=60), clock=clock)["onnx", "c"]
    assert found.ended == "budget"
    assert clock.now >= 60


def test_a_budget_that_is_too_small_still_gives_each_cell_its_few_passes() -> None:
    clock, log = Clock(), list[str]()
    turns = {("onnx", cell): clock.turn(5.0, log, cell) for cell in ("a", "b")}
    found = timing.interleaved(turns, Rule(budget=1), clock=clock)
    assert [len(each.seconds) for each in found.values()] == [3, 3]
    assert {each.ended for each in found.values()} == {"budget"}


def test_a_subject_that_fails_is_out_and_the_others_go_on() -> None:
    clock, log = Clock(), list[str]()

    def broken(seconds: float, most: int) -> list[float]:
        raise RuntimeError("no kernel")

    found = timing.interleaved(
        {("trt", "c"): broken, ("onnx", "c"): clock.turn(0.01, log, "o")}, Rule(budget=1), clock=clock
    )
    assert found["trt", "c"].failed == "no kernel"
    assert found["onnx", "c"].ended
    assert timing.summary(found["trt", "c"], 1, 8) == {"failed": "no kernel"}


@pytest.mark.parametrize("count", [6, 15, 25, 60])
def test_the_interval_of_a_median_holds_it_in_95_of_100_cases(count: int) -> None:
    rng = np.random.default_rng(count)
    held = 0
    for _ in range(2000):
        low, high = timing.interval(rng.lognormal(0, 1, count).tolist())
        held += low <= 1.0 <= high
    assert 0.935 <= held / 2000 <= 0.99


def test_a_percentile_that_so_few_passes_cannot_show_is_not_told() -> None:
    told = timing.summary(Timed([0.01] * 50, "stable"), 4, 64)
    assert told["p90"] == 0.01
    assert told["p99"] is None
    assert timing.summary(Timed([0.01] * 100, "stable"), 4, 64)["p99"] == 0.01
    assert (told["rows_per_second"], told["tokens_per_second"]) == pytest.approx((400, 6400))


# -- texts in batches --------------------------------------------------------------------------------------------------

LENGTHS = (5, 30, 7, 12, 3, 31, 8, 16)


@pytest.mark.parametrize("policy", policies.POLICIES)
@pytest.mark.parametrize("padding", policies.PADDINGS)
def test_every_text_is_in_one_batch(policy: str, padding: str) -> None:
    planned = policies.plan(LENGTHS, 3, policy, padding, 64)
    assert Counter(place for rows in planned.rows for place in rows) == Counter(range(8))
    assert max(len(rows) for rows in planned.rows) <= 3
    assert planned.real == sum(LENGTHS)
    for rows, width in zip(planned.rows, planned.widths, strict=True):
        assert width == (64 if padding == "limit" else max(LENGTHS[place] for place in rows))


def test_padding_is_what_is_computed_beyond_the_texts() -> None:
    assert policies.plan((10, 30), 2, "as they come").waste == pytest.approx(1 / 3)
    assert policies.plan((10, 30), 1, "as they come").waste == 0
    assert policies.plan((10, 30), 2, "as they come", "limit", 40).waste == pytest.approx(0.5)


def test_sorted_wastes_least_and_buckets_keep_the_order_within_a_class() -> None:
    waste = {policy: policies.plan(LENGTHS, 2, policy).waste for policy in policies.POLICIES}
    assert waste["sorted"] < waste["as they come"]
    assert waste["buckets"] < waste["as they come"]
    assert policies.plan(LENGTHS, 8, "buckets").rows == ((0, 2, 4, 6), (3, 7), (1, 5))


def test_batches_stop_paying_where_no_larger_one_answers_more() -> None:
    assert policies.stops_paying({1: 100, 2: 180, 4: 300, 8: 310, 16: 290}) == 4
    assert policies.stops_paying({1: 100, 8: 90}) == 1
    assert policies.stops_paying({1: 100, 2: 200}) == 2


def test_flops_are_two_for_each_weight_wherever_it_hides() -> None:
    from onnx import TensorProto, helper

    def weight(name: str, *dims: int) -> Any:
        return helper.make_tensor(name, TensorProto.INT8, dims, bytes(int(np.prod(dims))), raw=True)

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
        helper.make_node("MatMul", ["a", "d"], ["b"]),
        helper.make_node("MatMul", ["a", "b"], ["c"]),  # of activations: not counted
        helper.make_node("MatMulNBits", ["b", "n"], ["e"], K=4, N=6),
    ]
    graph = helper.make_graph(nodes, "g", [], [], [weight("w", 3, 4), weight("q", 4, 5)])
    assert policies.flops_of_token([graph]) == 2 * (12 + 20 + 24)


# -- what is asked -----------------------------------------------------------------------------------------------------


def _case(name: str, *rows: list[int]) -> Case:
    width = max(map(len, rows))
    ids = np.array([[*row, *[0] * (width - len(row))] for row in rows], np.int64)
    mask = np.array([[*[1] * len(row), *[0] * (width - len(row))] for row in rows], np.int64)
    return Case(name, {"input_ids": ids, "attention_mask": mask})


def test_a_batch_of_any_size_is_made_of_real_tokens_and_always_the_same() -> None:
    rows = Rows(FACTS, [_case("a", [1, 7, 9, 2], [1, 11, 2])])
    batch = rows.batch(3, 20)
    assert batch["input_ids"].shape == (3, 20)
    assert set(np.unique(batch["input_ids"])) <= {7, 9, 11}
    assert batch["attention_mask"].all()
    np.testing.assert_array_equal(rows.batch(3, 20)["input_ids"], batch["input_ids"])


def test_lengths_past_the_limit_give_way_or_are_refused_where_they_were_named() -> None:
    assert asking.lengths_for(FACTS, (16, 64, 512), named=False) == (
        (16, 32),
        "lengths above the model's 32 tokens were measured at 32",
    )
    with pytest.raises(UsageError, match="--length 64: the model takes 32 tokens at most"):
        asking.lengths_for(FACTS, (16, 64), named=True)


def test_texts_lose_their_padding_and_get_that_of_a_plan() -> None:
    texts = Texts(FACTS, [_case("a", [1, 7, 9, 2], [1, 2]), _case("b", [1, 7, 9, 2])], distinct=True)
    assert texts.lengths == (4, 2)
    assert Texts(FACTS, [_case("a", [1, 2]), _case("b", [1, 2])]).lengths == (
        2,
        2,
    )  # the user's count as often as they come
    batch = texts.batches(policies.plan(texts.lengths, 2, "sorted", "limit", 6))[0]
    assert batch["input_ids"].tolist() == [[1, 2, 0, 0, 0, 0], [1, 7, 9, 2, 0, 0]]
    assert batch["attention_mask"].sum() == 6
    assert texts.some(1).lengths == (4,)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (Wishes(batches=[0, 2]), "--batch"),
        (Wishes(lengths=[]), "--length"),
        (Wishes(budget=0), "--budget 0"),
        (Wishes(arrivals=float("nan")), "--arrivals"),
        (Wishes(p99=0.05), "give --arrivals"),
        (Wishes(instances=[1, 2]), "give --arrivals"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wishes: Wishes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        wishes.check()


# -- findings ----------------------------------------------------------------------------------------------------------


def _cell(batch: int, seconds: float, ended: str = "stable") -> dict[str, Any]:
    return {
        "batch": batch, "length": 16, "p50": seconds, "p50_low": 0.9 * seconds, "p50_high": 1.1 * seconds,
        "ended": ended,
    }  # fmt: skip


def _subject(step: str, precision: str, *cells: dict[str, Any], dominated: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "step": step, "format": "onnx", "precision": precision, "cells": list(cells), "dominated_by": list(dominated),
        "reason": "", "changed": False,
    }  # fmt: skip


def _document(*subjects: dict[str, Any], load: float = 0.0) -> dict[str, Any]:
    return {
        "subjects": list(subjects), "host": {"load": load, "cpus": 2}, "rule": {"budget": 120.0, "narrow": 0.02},
        "batching": None,
    }  # fmt: skip


def test_int8_that_is_slower_is_said_aloud() -> None:
    plain = _subject("onnx", "float32", _cell(1, 0.01), _cell(8, 0.02))
    slow = _subject("onnx-int8", "int8", _cell(1, 0.02), _cell(8, 0.03))
    said = findings(_document(plain, slow))
    assert said == [
        "onnx-int8 is SLOWER than onnx: 1.73 times its latency on average, 2.00 times at batch 1, length 16"
    ]
    mixed = _subject("onnx-int8", "int8", _cell(1, 0.011), _cell(8, 0.008))
    assert findings(_document(plain, mixed)) == [
        "onnx-int8 is slower than onnx in 1 of 2 batches: 1.10 times at batch 1, length 16"
    ]
    assert findings(_document(plain, _subject("onnx-int8", "int8", _cell(1, 0.005), _cell(8, 0.005)))) == []


def test_a_busy_machine_and_a_spent_budget_are_said() -> None:
    said = findings(_document(_subject("onnx", "float32", _cell(1, 0.01, "budget"), _cell(8, 0.02)), load=3.0))
    assert said[0].startswith("other work ran meanwhile (a load of 3.0 on 2 processors)")
    assert said[1] == (
        "the budget of 120 s ended before 1 of 2 medians were known to 2%; "
        "the widest interval reaches 10% from its median"
    )


def test_what_another_beats_in_all_three_is_marked() -> None:
    said = findings(_document(_subject("onnx-int4", "int4", _cell(1, 0.01), dominated=("onnx-int8",))))
    assert said == ["onnx-int4 is slower, larger and further off than onnx-int8"]


def test_exit_codes() -> None:
    ran, missing = _subject("onnx", "float32", _cell(1, 0.01)), _subject("trt", "float32")
    missing["reason"] = "no NVIDIA GPU"
    assert benching.exit_code(_document(ran, missing)) == 0
    assert benching.exit_code(_document(ran, missing), ["trt"]) == 4
    assert benching.exit_code(_document(missing)) == 4
    assert benching.exit_code(_document(ran, {**missing, "changed": True})) == 1
    assert benching.exit_code({**_document(ran), "batching": {"met": False}}) == 1
    assert benching.exit_code({**_document(ran), "batching": {"met": None}}) == 0

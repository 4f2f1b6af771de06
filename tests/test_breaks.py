"""The table of breaks, and those of a running session, on a fake one: dict in, dict out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from nlpconvert import breaks
from nlpconvert.breaks import NotApplicable
from nlpconvert.convert import breaking
from nlpconvert.inputs import Case


class Fake:
    """Sums what it is given: an answer that depends on every input."""

    provider, precision = "CPUExecutionProvider", "float32"

    def run(self, batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        total = sum(array * weight for array, weight in zip(batch.values(), (1.0, 10.0, 100.0, 1000.0), strict=False))
        rows = np.asarray(total, np.float32).sum(axis=1)
        return {"start": np.stack([rows, rows + 1], 1), "end": np.stack([rows * 3, rows], 1)}

    def close(self) -> None:
        pass


def case(name: str, ids: list[list[int]], mask: list[list[int]], types: int = 0) -> Case:
    array = np.array(ids)
    positions = np.tile(np.arange(array.shape[1]), (len(array), 1))
    inputs = {"input_ids": array, "attention_mask": np.array(mask), "position_ids": positions}
    return Case(name, {**inputs, "token_type_ids": np.full_like(array, types)})


CASES = [
    case("alone", [[5, 6]], [[1, 1]], types=1),
    case("padded", [[7, 6], [9, 0]], [[1, 1], [1, 0]]),
    case("other", [[8, 6], [9, 4]], [[1, 1], [1, 1]]),
]


@pytest.mark.parametrize("name", sorted(breaks.SESSION))
def test_a_bent_session_answers_otherwise_and_closes_nothing(name: str) -> None:
    whole = Fake()
    session, done = breaks.bend(name, whole, CASES, "float32")
    assert done.what
    assert (session.provider, session.precision) == (whole.provider, whole.precision)
    kept = {each.name: {key: array.copy() for key, array in each.inputs.items()} for each in CASES}
    differs = []
    for each in CASES:
        before = whole.run(each.inputs)
        try:
            after = session.run(each.inputs)
        except ValueError as error:
            assert "frozen" in str(error)
            differs.append(each.name)
            continue
        same = set(before) == set(after) and all(np.array_equal(before[key], after[key]) for key in before)
        if not same:
            differs.append(each.name)
    # These sums are whole numbers, which float16 holds, and all reach the last position.
    if name not in ("answer-float16", "positions-shifted"):
        assert differs
    for each in CASES:
        assert all(np.array_equal(each.inputs[key], kept[each.name][key]) for key in each.inputs), "inputs are not ours"


def test_what_each_bend_touches() -> None:
    def run(name: str, index: int) -> dict[str, np.ndarray]:
        session, _ = breaks.bend(name, Fake(), CASES, "float32")
        return dict(session.run(CASES[index].inputs))

    whole = [Fake().run(each.inputs) for each in CASES]
    assert np.array_equal(run("mask-ignored", 0)["start"], whole[0]["start"])
    assert np.array_equal(run("mask-ignored", 1)["start"] - whole[1]["start"], [[0, 0], [10, 10]])
    assert np.array_equal(run("types-ignored", 0)["start"] - whole[0]["start"], [[-2000, -2000]])
    assert np.array_equal(run("scale-doubled", 2)["end"], 2 * whole[2]["end"])
    assert np.array_equal(run("outputs-swapped", 2)["end"], whole[2]["start"])
    assert list(run("output-missing", 2)) == ["end"]
    assert list(run("output-renamed", 2)) == ["start_0", "end"]
    assert np.isnan(run("nan", 0)["start"][0]).all()
    assert np.isfinite(run("nan", 1)["start"]).all()


def test_positions_go_no_further_than_they_are_asked_for() -> None:
    short = case("short", [[5]], [[1]])
    session, _ = breaks.bend("positions-shifted", Fake(), [*CASES, short], "float32")
    assert np.array_equal(session.run(short.inputs)["start"] - Fake().run(short.inputs)["start"], [[100, 100]])
    assert np.array_equal(session.run(CASES[0].inputs)["start"], Fake().run(CASES[0].inputs)["start"])


def test_a_stale_answer_is_of_the_same_shape() -> None:
    session, _ = breaks.bend("stale-answer", Fake(), CASES, "float32")
    answers = [session.run(each.inputs) for each in CASES]
    assert np.array_equal(answers[2]["start"], answers[1]["start"])
    assert np.array_equal(answers[0]["start"], Fake().run(CASES[0].inputs)["start"])


@pytest.mark.parametrize(
    ("name", "cases", "precision", "reason"),
    [
        ("mask-ignored", CASES[:1], "float32", "no case is padded"),
        ("mask-ignored", [Case("ids", {"input_ids": np.ones((1, 2), int)})], "float32", "takes no mask"),
        ("types-ignored", CASES[1:], "float32", "token types"),
        ("positions-shifted", [Case("ids", {"input_ids": np.ones((1, 2), int)})], "float32", "takes no positions"),
        ("batch-frozen", CASES[1:], "float32", "the same batch size"),
        ("answer-float16", CASES, "float16", "float16 itself rounds as much"),
        ("stale-answer", CASES[:2], "float32", "no two cases have the same shape"),
    ],
)
def test_a_bend_that_changes_nothing_is_not_applicable(
    name: str, cases: list[Case], precision: str, reason: str
) -> None:
    with pytest.raises(NotApplicable, match=reason):
        breaks.bend(name, Fake(), cases, precision)


def test_the_token_whose_row_is_zeroed_stands_in_most_places() -> None:
    assert breaks.token_to_zero(CASES, special=[]) == 6
    assert breaks.token_to_zero(CASES, special=[6]) == 9
    with pytest.raises(NotApplicable, match="special"):
        breaks.token_to_zero(CASES[:1], special=[5, 6])


def test_the_table_of_breaks_is_whole() -> None:
    for row in breaks.BREAKS:
        assert row.kind in ("graph", "session", "file")
        assert set(row.formats) <= set(breaks.ANY)
        if row.kind == "session":
            assert row.way in breaks.SESSION
        if row.kind == "graph":
            assert row.way in breaking.GRAPH
    assert len(breaks.ways("onnx")) >= 12
    assert len(breaks.ways("tensorrt")) >= 12
    assert [row.kind for row in breaks.ways("onnx")["scale-doubled"]] == ["graph", "session"]


def test_the_breaks_of_torchscript_are_those_of_the_table() -> None:
    from nlpconvert.convert import breaking_torchscript

    graphs = {row.way for row in breaks.BREAKS if row.kind == "graph" and "torchscript" in row.formats}
    assert graphs == set(breaking_torchscript.GRAPH)

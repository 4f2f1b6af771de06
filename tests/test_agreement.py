"""Tests of validators/agreement.py: each measure against what it is by hand."""

from __future__ import annotations

import numpy as np
import pytest

from nlpconvert.golden import Reference
from nlpconvert.inputs import Case
from nlpconvert.models import OutputRow
from nlpconvert.validators import agreement

START = OutputRow("start_logits", ("batch", "sequence"), "position")
END = OutputRow("end_logits", ("batch", "sequence"), "position")


def test_top_k_counts_what_both_have() -> None:
    counted = agreement.TopKs()
    reference = np.tile(np.arange(12.0), (2, 1))
    candidate = reference.copy()
    candidate[1, 7] = -1  # the fifth best of the second falls out, and 6 comes in
    counted.add(reference, candidate)
    found = counted.found()
    assert found is not None and (found.k, found.count) == (5, 2)
    assert found.agreement == pytest.approx((1 + 4 / 5) / 2)
    short = agreement.TopKs()
    short.add(reference[:, :9], candidate[:, :9])
    assert short.found() is None


def test_neighbours_that_change_and_ranks() -> None:
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((8, 16))
    near = agreement.Near()
    near.add(rows, rows * 3.0)
    found = near.found()
    assert found is not None and found.changed == 0 and found.worst == pytest.approx(1)
    moved = rows.copy()
    moved[2] = rows[5] + 1e-3  # becomes 5's neighbour
    near = agreement.Near()
    near.add(rows, moved)
    found = near.found()
    assert found is not None and found.changed >= 2 and found.worst < 0.9
    from scipy import stats

    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    other = moved / np.linalg.norm(moved, axis=1, keepdims=True)
    each = [stats.spearmanr(np.delete(unit @ unit[i], i), np.delete(other @ other[i], i)).statistic for i in range(8)]
    assert found.correlation == pytest.approx(np.mean(each)) and found.worst == pytest.approx(min(each))


def test_the_same_text_twice_is_nobodys_neighbour() -> None:
    draw = np.random.default_rng(1)
    rows = draw.standard_normal((5, 8))
    near = agreement.Near()
    near.add(np.concatenate([rows, rows[:2]]), np.concatenate([rows, rows[:2] + 1e-7]))
    found = near.found()
    assert found is not None and found.rows == 5
    few = agreement.Near()
    few.add(rows[:2], rows[:2])
    assert few.found() is None


def test_spans_change_when_either_end_does() -> None:
    case = Case("c", {"attention_mask": np.array([[1, 1, 1, 0], [1, 1, 1, 1]])})
    reference = {
        "start_logits": np.array([[3.0, 1, 0, 9], [0, 5, 1, 2]], np.float32),
        "end_logits": np.array([[0.0, 1, 4, 9], [0, 1, 2, 8]], np.float32),
    }
    answers = {name: Reference(array, array.shape) for name, array in reference.items()}
    spans = agreement.Spans((START, END))
    spans.add(case, answers, reference)
    candidate = {name: array.copy() for name, array in reference.items()}
    candidate["end_logits"][1, 2] = 9
    candidate["start_logits"][0, 3] = -100  # padding does not count
    spans.add(case, answers, candidate)
    found = spans.found()
    assert found is not None and (found.count, found.changed) == (4, 1)
    assert agreement.Spans((START,)).found() is None


def test_a_histogram_holds_every_element() -> None:
    histogram = agreement.Histogram()
    values = np.array([0.0, 0.0, 0.3, 0.26, 1e-6, 2.0, np.inf])
    histogram.add(values)
    found = histogram.found()
    assert found is not None and found["equal"] == 2 and sum(found["counts"]) == 4
    edges = 10 ** np.array(found["edges"])
    assert len(edges) == len(found["counts"]) + 1
    for value in (0.3, 1e-6, 2.0):
        place = int(np.searchsorted(edges * 1.001, value, side="left")) - 1
        assert found["counts"][max(place, 0)] or found["counts"][max(place, 0) + 1]
    nothing = agreement.Histogram()
    assert nothing.found() is None
    nothing.add(np.zeros(3))
    assert nothing.found() == {"edges": [], "counts": [], "equal": 3}

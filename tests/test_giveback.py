"""The path of mixes, and the search along it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from nlpconvert import giveback
from nlpconvert.search import Score

ENERGY = {"small": [0.1, 0.01, 0.0], "large": [10.0, 1.0, 0.0]}
COST = {"small": [1.0, 2.0, 4.0], "large": [1.0, 2.0, 4.0]}


def test_what_brings_most_for_its_cost_is_raised_first() -> None:
    path = giveback.path(ENERGY, COST)
    assert path[0] == {"small": 0, "large": 0}
    assert path[1] == {"small": 0, "large": 1}
    assert path[-1] in ({"small": 2, "large": 1}, {"small": 1, "large": 2})
    assert all(sum(after.values()) > sum(before.values()) for before, after in pairwise(path))


def test_one_name_has_a_path_that_ends_before_float() -> None:
    assert giveback.path({"only": [1.0, 0.5, 0.0]}, {"only": [1.0, 2.0, 4.0]}) == [{"only": 0}, {"only": 1}]
    assert giveback.path({"only": [1.0, 0.0]}, {"only": [1.0, 2.0]}) == [{"only": 0}]


def _scoring(used: list[float]) -> tuple[list[int], list[Mapping[str, int]], object]:
    asked: list[int] = []
    mixes = [{"n": n} for n in range(len(used))]

    def score(levels: Mapping[str, int]) -> Score:
        asked.append(levels["n"])
        return Score(used[levels["n"]], 0.0, "")

    return asked, list(mixes), score


@pytest.mark.parametrize("first_that_fits", [1, 5, 19])
def test_the_first_mix_that_fits_is_found(first_that_fits: int) -> None:
    asked, mixes, score = _scoring([1.0 if n < first_that_fits else 0.5 for n in range(20)])
    found = giveback.bisect(mixes, Score(1.0, 0.0, ""), score, 0.7)  # type: ignore[arg-type]
    assert min(n for n in found if found[n].used <= 0.7) == first_that_fits
    assert len(asked) <= 6
    assert len(set(asked)) == len(asked)


def test_where_nothing_fits_a_few_are_looked_at() -> None:
    asked, mixes, score = _scoring([1.0 - n / 100 for n in range(20)])
    found = giveback.bisect(mixes, Score(1.0, 0.0, ""), score, 0.7)  # type: ignore[arg-type]
    assert set(found) == {0, 19, 4, 9, 14}
    assert sorted(asked) == [4, 9, 14, 19]


def test_a_path_of_one_mix_asks_nothing() -> None:
    asked, mixes, score = _scoring([1.0])
    assert set(giveback.bisect(mixes, Score(1.0, 0.0, ""), score, 0.7)) == {0}  # type: ignore[arg-type]
    assert not asked

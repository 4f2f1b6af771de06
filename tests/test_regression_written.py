"""regression_written: each way of writing worse is seen, and what repeating explains is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from nlpconvert.validators import regression_written

NAME = "the baseline"


def written(measure: str = "rel", **more: Any) -> dict[str, Any]:
    """What a verdict holds of a step that writes: two phases, 40 texts, 100 tokens."""
    phase = {"worst_rel": 2e-6, "worst_abs": 4e-6, "kl": 1e-3, "not_judged": ""}
    return {
        "passages_sha256": "a" * 64,
        "noise": {"floor": 1e-6},
        "scale": 2.0,
        "tolerance": {"measure": measure},
        "phases": [{"name": "prompt", **phase}, {"name": "single steps", **phase}],
        "texts": {"judged": 40, "share": 1.0},
        "perplexity": {"tokens": 100, "ratio": 1.002},
        **more,
    }


def found(old: dict[str, Any] | None, new: dict[str, Any] | None) -> list[str]:
    return [each.text for each in regression_written.regressions(old, new, NAME)]


@pytest.mark.parametrize("measure", ["rel", "abs", "kl", "changed"])
def test_the_same_again_is_no_regression(measure: str) -> None:
    assert found(written(measure), written(measure)) == []
    assert found(None, written()) == []


@pytest.mark.parametrize(
    ("measure", "key", "value"), [("rel", "worst_rel", 1e-5), ("abs", "worst_abs", 3e-5), ("kl", "kl", 2e-3)]
)
def test_a_phase_that_moved_further_is_named(measure: str, key: str, value: float) -> None:
    new = copy.deepcopy(written(measure))
    new["phases"][1][key] = value
    (said,) = found(written(measure), new)
    assert said.startswith(f"while it writes, single steps: {measure} ") and said.endswith("worse than the baseline")
    new["phases"][1][key] = written()["phases"][1][key] * 1.4
    assert found(written(measure), new) == []


def test_other_texts_and_a_worse_perplexity_are_told() -> None:
    assert found(written(), written(texts={"judged": 40, "share": 0.9})) == []  # 4 of 40 may be chance
    (said,) = found(written(), written(texts={"judged": 40, "share": 0.8}))
    assert said == "0 -> 8 of 40 free texts are others than the reference's, worse than the baseline"
    (said,) = found(written(), written(perplexity={"tokens": 100, "ratio": 1.01}))
    assert "log perplexity ratio" in said


def test_what_is_no_longer_judged_is_a_regression() -> None:
    assert found(written(), None) == ["it is no longer judged while it writes, as it was in the baseline"]
    (said,) = found(written(), written(passages_sha256="b" * 64))
    assert "other passages" in said
    fewer = written()
    fewer["phases"] = fewer["phases"][:1]
    assert found(written(), fewer) == ["single steps is no longer measured, as it was in the baseline"]

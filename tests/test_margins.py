"""The expected share of changed decisions, against counting over very many."""

from __future__ import annotations

import numpy as np
import pytest

from nlpconvert.golden import Reference
from nlpconvert.inputs import Case
from nlpconvert.models import OutputRow
from nlpconvert.validators.margins import Margins

LABELS = OutputRow("logits", ("batch", "labels"), "decisions")


def found(reference: np.ndarray, candidate: np.ndarray) -> float:
    margins = Margins(LABELS)
    margins.add(Case("a", {}), Reference(reference, reference.shape), candidate)
    return margins.expected()


def test_it_is_what_counting_finds_in_the_long_run() -> None:
    random = np.random.default_rng(0)
    reference = random.normal(size=(40_000, 2)).astype(np.float32)
    candidate = reference + random.normal(scale=0.02, size=reference.shape).astype(np.float32)
    counted = float((reference.argmax(1) != candidate.argmax(1)).mean())
    assert found(reference[:4000], candidate[:4000]) == pytest.approx(counted, rel=0.25)
    assert found(reference, candidate) == pytest.approx(counted, rel=0.1)


def test_the_same_answers_change_nothing_and_broken_ones_everything() -> None:
    reference = np.array([[1.0, 2.0], [0.5, 0.1]], np.float32)
    assert found(reference, reference) == 0.0
    assert found(reference, reference * np.nan) == 1.0

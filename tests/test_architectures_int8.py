"""Every architecture of `tests/tiny.py` in static and dynamic int8: within the budget, and built by TensorRT-RTX.

What a verdict on random weights is worth: the arithmetic, the axes and the sharing are right. How well trained weights
keep their answers is measured on the fixtures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nlpconvert import pipeline, plan
from nlpconvert.artifact import Outcome
from nlpconvert.validators.findings import Comparison
from tests import tiny

QUICK = ("bert", "gpt2")
REFUSED = ("longformer", "funnel")


def rows() -> list[Any]:
    taken = [row for row in tiny.TINY if row.name not in REFUSED]
    return [pytest.param(row, id=row.name, marks=() if row.name in QUICK else pytest.mark.slow) for row in taken]


@pytest.mark.parametrize("row", rows())
def test_static_and_dynamic_int8(row: tiny.Tiny, tmp_path: Path) -> None:
    model, out = str(tiny.save(row, tmp_path / "model")), tmp_path / "out"
    options = plan.Options(threads=1, search_budget=30)
    found = pipeline.run(model, out, to=["onnx-qdq", "trt-int8"], options=options)
    found += pipeline.run(
        model, out, to=["onnx-int8"], options=plan.Options(threads=1, search_budget=30, int8_method="dynamic")
    )
    outcomes = {outcome.step: outcome for outcome in found}
    assert outcomes["trt-int8"].status in ("not run", "agrees"), outcomes["trt-int8"].reason
    engine = outcomes["trt-int8"].artifact
    assert engine is not None and all(path.stat().st_size > 10_000 for path in engine.graphs)
    for step, arithmetic in (("onnx-qdq", "int8"), ("onnx-int8", "int8")):
        outcome = outcomes[step]
        assert outcome.status == "agrees", (step, outcome.reason, wrong(outcome))
        assert outcome.verdict is not None
        assert outcome.verdict["products"]["share"][arithmetic] > 0.3
        assert outcome.verdict["comparison"]["cases"] > 25
    notes = outcomes["onnx-int8"].notes
    assert any("one scale for the whole padded batch" in note for note in notes), notes


def wrong(outcome: Outcome) -> list[str]:
    """What a person needs to see of a verdict that was not expected."""
    if outcome.verdict is None:
        return []
    outputs = Comparison.from_dict(outcome.verdict["comparison"]).outputs
    return [f"{each.name}: {each.tolerance.text}, measured {each.measured}, {each.problems}" for each in outputs]

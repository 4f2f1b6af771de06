"""What steps made from an ONNX artifact share: tapped copies, trials, and weights that do not fit into one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nlpconvert import pipeline, plan
from nlpconvert.backends import onnxruntime
from nlpconvert.convert import derived
from tests import asking, tiny


def test_a_tapped_copy_gives_inner_tensors_and_their_largest_values(tmp_path: Path) -> None:
    model = asking.loaded(tiny.ROWS["bert"], tmp_path)
    parent = asking.make("onnx", model, tmp_path / "onnx")
    program = derived.load(parent)
    inner = next(node.outputs[0].name for node in program.graph if node.op_type == "Gelu")
    assert inner is not None
    tapped = derived.tap(parent.path, tmp_path / "scratch", [inner], largest=[inner])
    assert not list(tapped.parent.glob("*.data")), "the weights stay where they are"
    session = onnxruntime.open_file(tapped, data=parent.directory)
    ids = np.array([[5, 6, 7, 8]])
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    found = session.tap(batch, [inner, f"{inner}/largest"])
    assert found[f"{inner}/largest"] == pytest.approx(np.abs(found[inner]).max())
    session.close()


@pytest.mark.parametrize("step", ["onnx-qdq", "onnx-int8", "onnx-fp16"])
def test_weights_past_one_file_go_through_every_step(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a model past 2 GB (bugs O-27), with the threshold brought down to nothing."""
    monkeypatch.setattr(derived, "INSIDE_LIMIT", 0)
    saved: list[Path] = []
    save = derived.onnx_graph.save
    monkeypatch.setattr(derived.onnx_graph, "save", lambda program, path: (saved.append(path), save(program, path))[1])
    source = tiny.save(tiny.ROWS["bert"], tmp_path / "model")
    options = plan.Options(threads=1, search_budget=5, int8_method="static" if step == "onnx-int8" else None)
    outcomes = pipeline.run(str(source), tmp_path / "out", to=[step], options=options)
    assert outcomes[-1].status == "agrees", outcomes[-1].reason
    assert [path for path in saved if path.name == "trial.onnx"], "no trial had a data file of its own"
    assert {file.name for file in (tmp_path / "out" / step).iterdir() if "onnx" in file.name} == {
        "model.onnx",
        "model.onnx.data",
    }
    assert not (tmp_path / "out" / step / ".scratch").exists()

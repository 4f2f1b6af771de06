"""Tests of validators/vocabulary.py: rows of the embedding table that no probe asks for are the checkpoint's too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from nlpconvert import disk, golden, manifest, pipeline, report
from nlpconvert.errors import DriftError
from nlpconvert.validators import structure, vocabulary

TABLE = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)


def file(tmp_path: Path, table: np.ndarray, *, transposed: bool = False, cast: bool = False) -> Path:
    """A graph that looks ids up in a table, kept as it is, the other way round, or cast."""
    kept = table.T if transposed else table
    nodes, name = [], "table"
    if transposed:
        nodes.append(helper.make_node("Transpose", [name], ["turned"], perm=[1, 0]))
        name = "turned"
    if cast:
        nodes.append(helper.make_node("Cast", [name], ["cast"], to=TensorProto.FLOAT))
        name = "cast"
    nodes.append(helper.make_node("Gather", [name, "input_ids"], ["out"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["b", "s", 16])],
        [numpy_helper.from_array(np.ascontiguousarray(kept), "table")],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph), str(path))
    return path


def tables(path: Path, rows: int = 50) -> list[tuple[str, np.ndarray]]:
    return vocabulary.tables(structure.onnx_graph(path), path.parent, rows)


def found(path: Path, precision: str = "float32") -> list[str]:
    return vocabulary.problems(tables(path), vocabulary.fingerprint(TABLE), precision)


def test_the_checkpoints_table_is_found_in_any_form(tmp_path: Path) -> None:
    assert len(tables(file(tmp_path, TABLE))) == 1 and found(tmp_path / "m.onnx") == []
    file(tmp_path, TABLE, transposed=True)
    assert len(tables(tmp_path / "m.onnx")) == 1 and found(tmp_path / "m.onnx") == []
    file(tmp_path, TABLE.astype(np.float16), cast=True)
    assert len(tables(tmp_path / "m.onnx")) == 1 and found(tmp_path / "m.onnx", "float16") == []
    file(tmp_path, TABLE * np.float32(4))  # the factor is the probes' to see
    assert found(tmp_path / "m.onnx") == []
    assert tables(tmp_path / "m.onnx", 51) == []


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.__setitem__(slice(20, 30), 0),
        lambda table: table.__setitem__(7, -table[7]),
        lambda table: table.__setitem__(3, np.nan),
        lambda table: table.__setitem__([4, 5], table[[5, 4]]),
    ],
    ids=["zeroed", "negated", "nan", "swapped"],
)
def test_a_changed_row_is_named(change: Callable[[np.ndarray], None], precision: str, tmp_path: Path) -> None:
    table = TABLE.copy()
    change(table)
    (said,) = found(file(tmp_path, table), precision)
    assert "rows of its embedding table table are not the checkpoint's, first that of id" in said


def rehash(out: Path, step: str) -> None:
    """As one who also edits the manifest would leave it."""
    data = json.loads((out / manifest.FILE).read_text())
    data["steps"][step]["artifact"]["files"] = disk.hash_tree(out / step)
    (out / manifest.FILE).write_text(json.dumps(data))


def test_ids_that_no_probe_asks_are_seen(classifier_out: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(classifier_out, out)
    cases, _ = golden.read(out / "golden")
    asked = {int(i) for case in cases for i in np.unique(case.inputs["input_ids"])}
    path = out / "onnx" / "model.onnx"
    model = onnx.load(str(path))
    rows = len(golden.vocabulary(out / "golden"))  # type: ignore[arg-type]
    table = next(t for t in model.graph.initializer if t.dims and t.dims[0] == rows and len(t.dims) == 2)
    values = numpy_helper.to_array(table).copy()
    unasked = [i for i in range(rows) if i not in asked]
    assert unasked, "the probes ask every id of this tokenizer: nothing is left to be missed"
    values[unasked] = 0
    table.CopyFrom(numpy_helper.from_array(values, table.name))
    for old in (out / "onnx").glob("model.onnx*"):
        old.unlink()
    onnx.save(model, str(path))
    rehash(out, "onnx")
    (outcome,) = pipeline.verify(out, steps=["onnx"])
    assert outcome.status == "drift" and outcome.verdict is not None
    assert all(o["agrees"] for o in outcome.verdict["comparison"]["outputs"])
    assert "rows of its embedding table" in "\n".join(report.verdict_lines(outcome))


def test_the_report_says_how_many_were_asked(classifier_out: Path) -> None:
    (outcome,) = pipeline.verify(classifier_out, steps=["onnx"])
    said = "\n".join(report.verdict_lines(outcome, verbose=True))
    assert "ids asked; the rest compared in its embedding table" in said


def test_a_damaged_table_is_a_drift(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"vocabulary": np.zeros((3, 4), np.float32)}, tmp_path / "tables.safetensors")
    with pytest.raises(DriftError, match="does not hold what it should"):
        golden.vocabulary(tmp_path)
    assert golden.vocabulary(tmp_path / "none") is None


def test_config_and_tokenizer_in_out_are_the_sources(classifier_out: Path, tmp_path: Path) -> None:
    """Even where the manifest's hash of the step was edited too: the source's own hash stands there as well."""
    for name in ("config.json", "tokenizer.json"):
        out = tmp_path / name
        shutil.copytree(classifier_out, out)
        words: dict[str, Any] = json.loads((out / "onnx" / name).read_text())
        words["added"] = True
        (out / "onnx" / name).write_text(json.dumps(words))
        rehash(out, "onnx")
        (outcome,) = pipeline.verify(out, steps=["onnx"])
        assert outcome.status == "drift" and outcome.reason.startswith(f"onnx/{name} is not the checkpoint's {name}")


def test_a_data_file_may_have_several_names_and_may_not_lead_out(tmp_path: Path) -> None:
    """Caches and snapshots hold hard links, which onnx's own reader refuses."""
    import os

    from nlpconvert.errors import UsageError

    model = onnx.load(str(file(tmp_path, TABLE)))
    path = tmp_path / "big.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="big.data", size_threshold=0)
    os.link(tmp_path / "big.data", tmp_path / "another name")
    assert found(path) == [] and len(tables(path)) == 1
    (tmp_path / "big.data").write_bytes(b"cut")
    with pytest.raises(ValueError, match="greater than file size"):
        tables(path)
    bad = onnx.load(str(path), load_external_data=False)
    for tensor in bad.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../big.data"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "bad.onnx").write_bytes(bad.SerializeToString())
    with pytest.raises(UsageError, match="is not a path inside"):
        tables(tmp_path / "sub" / "bad.onnx")

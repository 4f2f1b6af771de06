"""Tests of the published schemas: real made fit, wrong ones do not, and both files say the same of a verdict."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from nlpconvert import documents, manifest, pipeline, report
from nlpconvert.artifact import Outcome
from tests.test_report import DRIFTED, outcome

DATA = Path(report.__file__).parent / "data"
NAMES = ("verify", "manifest")


def schema(name: str) -> Any:
    return json.loads((DATA / f"{name}.schema.json").read_text("utf-8"))


def errors(name: str, document: Any) -> list[str]:
    """What does not fit, with its place."""
    found = jsonschema.Draft202012Validator(schema(name)).iter_errors(document)
    return [f"{error.json_path}: {error.message[:200]}" for error in found]


@pytest.fixture(scope="module")
def made(features_out: Path) -> dict[str, Any]:
    """A real manifest, and what `verify --json` writes of it beside steps that were not run, skipped and failed."""
    outcomes = [
        *pipeline.verify(features_out),
        Outcome("trt", "not run", reason="no GPU here", bytes=900),
        Outcome("trt-fp16", "skipped", reason="not installed"),
        Outcome("onnx-int8", "failed", reason="no memory", seconds=1.5),
        Outcome("onnx-fp16", "drift", reason="onnx-fp16/model.onnx has changed; it was not opened"),
    ]
    written = (features_out / manifest.FILE).read_text("utf-8")
    return {"verify": json.loads(documents.to_json(outcomes)), "manifest": json.loads(written)}


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_one(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_real_document_fits(made: dict[str, Any], name: str) -> None:
    assert errors(name, made[name]) == []


def test_a_drift_with_what_is_not_finite_fits() -> None:
    whole = {"structure": [], "products": None, "versions": {"numpy": "2.4.6"}, "host": {
        "platform": "Linux", "machine": "x86_64", "cpu": "", "cpu_flags": [], "cpus": 1, "python": "3.11.7",
    }}  # fmt: skip
    drifted = [outcome(DRIFTED, **whole), outcome({("left-padded", "logits", (1, 2, 0)): np.nan}, **whole)]
    assert [found.status for found in drifted] == ["drift", "drift"]
    assert errors("verify", json.loads(documents.to_json(drifted))) == []


def test_keys_may_be_added_where_a_verdict_may_grow(made: dict[str, Any]) -> None:
    document = copy.deepcopy(made["verify"])
    document["new"] = document["steps"][0]["new"] = document["steps"][0]["verdict"]["new"] = {"deep": [1]}
    document["steps"][0]["verdict"]["comparison"]["outputs"][0]["new"] = None
    assert errors("verify", document) == []


def _agreeing(document: Any) -> Any:
    return document["steps"][0] if isinstance(document["steps"], list) else document["steps"]["onnx"]


def _output(document: Any) -> Any:
    return _agreeing(document)["verdict"]["comparison"]["outputs"][0]


WRONG: dict[str, Callable[[Any], Any]] = {
    "no steps": lambda d: d.pop("steps"),
    "an unknown status": lambda d: _agreeing(d).update(status="fine"),
    "a verdict without a comparison": lambda d: _agreeing(d)["verdict"].pop("comparison"),
    "an output without what was measured": lambda d: _output(d).pop("measured"),
    "a number as another word": lambda d: _output(d).update(measured="large"),
    "a tolerance without direction": lambda d: _output(d)["tolerance"].update(direction="<"),
    "a negative count": lambda d: _output(d).update(elements=-1),
    "a case without its share": lambda d: next(iter(_output(d)["cases"].values())).pop("used"),
    "versions that are no texts": lambda d: _agreeing(d)["verdict"]["versions"].update(numpy=2),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_document_does_not_fit(made: dict[str, Any], name: str, wrong: str) -> None:
    document = copy.deepcopy(made[name])
    WRONG[wrong](document)
    assert errors(name, document) != []


def test_what_agrees_has_a_verdict_and_what_was_not_run_a_reason(made: dict[str, Any]) -> None:
    document = copy.deepcopy(made["verify"])
    _agreeing(document)["verdict"] = None
    assert errors("verify", document) != []
    document = copy.deepcopy(made["verify"])
    document["steps"][1]["reason"] = ""
    assert errors("verify", document) != []


MANIFEST_WRONG: dict[str, Callable[[Any], Any]] = {
    "another version of the schema": lambda d: d.update(schema=manifest.SCHEMA + 1),
    "a source without hash": lambda d: d["source"].pop("sha256"),
    "a hash that is none": lambda d: d["golden"]["files"].update({"golden.json": "00"}),
    "an unknown format": lambda d: d["steps"]["onnx"]["artifact"].update(format="pickle"),
    "no parent": lambda d: d["steps"]["onnx"]["artifact"].pop("parent"),
}


@pytest.mark.parametrize("wrong", MANIFEST_WRONG)
def test_a_wrong_manifest_does_not_fit(made: dict[str, Any], wrong: str) -> None:
    document = copy.deepcopy(made["manifest"])
    MANIFEST_WRONG[wrong](document)
    assert errors("manifest", document) != []


def test_both_files_say_the_same_of_a_verdict() -> None:
    verify, kept = (schema(name)["$defs"] for name in NAMES)
    shared = set(verify) & set(kept)
    assert {"verdict", "comparison", "output", "tolerance", "case"} <= shared
    assert {name for name in shared if verify[name] != kept[name]} == set()


def test_the_schema_is_of_this_version() -> None:
    assert schema("manifest")["properties"]["schema"] == {"const": manifest.SCHEMA}

"""recipe.json: what it says, that it is read back, that another's is refused, and that a replay gives the same."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from nlpconvert import calibration, cli, pipeline, plan, recipe, search
from nlpconvert.artifact import Outcome
from nlpconvert.errors import UsageError
from nlpconvert.integers import Preparation
from nlpconvert.recipe import Candidate, Layer, Recipe
from tests import test_search
from tests.test_fixtures import HOME

quantized = test_search.quantized
MODEL = "bert-text-classifier"
Outs = Callable[[str], tuple[Path, dict[str, Outcome]]]


def made() -> Recipe:
    """One site of two layers with a channel apart, one layer given back, one left."""
    arrays = [np.linspace(-1, 1, 8, dtype=np.float32), np.linspace(0.5, 2, 8, dtype=np.float32)]
    arrays[1][3] = 0
    site = Preparation(arrays[0], arrays[1], 0.0123, (3,), 0.65, 1.5e-4)
    return Recipe(
        step="onnx-qdq",
        kind="static",
        base="onnx",
        parent_sha256="a" * 64,
        layers=(
            Layer("encoder.query", "encoder.query", "int8", 0.25, 1e-4, bias=np.full(16, 0.5, np.float32)),
            Layer("encoder.key", "encoder.query", "int8", 0.25, 1e-4, bias=np.zeros(16, np.float32)),
            Layer("encoder.dense", "encoder.dense", "float32", 0.4, 0.7, "given back: it moved the most"),
            Layer("classifier", "classifier", "float32", 0.0, why="it has 2 outputs: nothing to gain"),
        ),
        sites={"encoder.query": site},
        candidates=(
            Candidate("static, 90%", "kl 0.02", 2.0, 0.0, 0.9, note="out of tolerance"),
            Candidate("static, 44%", "kl 0.001", 0.1, 0.62, 0.4375, chosen=True),
        ),
        search={"seconds": 1.5},
    )


def same(first: Recipe, second: Recipe) -> bool:
    """Field by field; arrays by value."""
    plain = [replace(each, layers=(), sites={}) for each in (first, second)]
    layers = [[replace(layer, bias=None) for layer in each.layers] for each in (first, second)]
    biases = [[None if x.bias is None else x.bias.tolist() for x in each.layers] for each in (first, second)]
    sites = [
        {n: (s.shift.tolist(), s.multiplier.tolist(), s.scale, s.outliers, s.strength, s.error) for n, s in x.items()}
        for x in (first.sites, second.sites)
    ]
    return all(each[0] == each[1] for each in (plain, layers, biases, sites))


# -- the file ----------------------------------------------------------------------------------------------------------


def test_it_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    recipe.write(made(), tmp_path)
    assert same(recipe.read(tmp_path / "recipe.json"), made())
    again = tmp_path / "again"
    again.mkdir()
    recipe.write(recipe.read(tmp_path / "recipe.json"), again)
    for name in ("recipe.json", "recipe.safetensors"):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes()


def test_a_person_can_read_it(tmp_path: Path) -> None:
    """A layer's path, precision, strength, scale and drift; the candidates; no wall of numbers."""
    recipe.write(made(), tmp_path)
    text = (tmp_path / "recipe.json").read_text()
    data = json.loads(text)
    assert data["layers"][0]["name"] == "encoder.query" and data["layers"][0]["precision"] == "int8"
    assert data["layers"][2]["why"] == "given back: it moved the most" and data["layers"][2]["drift"] == 0.7
    assert data["sites"]["encoder.query"] == {"scale": 0.0123, "strength": 0.65, "outliers": [3], "error": 1.5e-4}
    assert data["candidates"][1]["latency"] == 0.62 and data["candidates"][1]["chosen"]
    assert data["share"] == 0.4375  # half the FLOPs, an eighth of them with the channel apart
    assert text.count("\n") > 40 and max(map(len, text.splitlines())) < 120


def test_the_share_in_integers() -> None:
    assert made().share == pytest.approx(0.5 * 7 / 8)
    assert replace(made(), sites={}).share == pytest.approx(0.5)
    assert replace(made(), layers=made().layers[2:]).share == 0


def test_the_table_of_candidates() -> None:
    assert recipe.told(made().candidates) == [
        "static, 90%  kl 0.02    90.0% in integers  not timed  out of tolerance",
        "static, 44%  kl 0.001   43.8% in integers  0.62 x float32  <- chosen",
    ]
    assert recipe.told(()) == []


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="the recipe says nothing about decoder: it is another model's"):
        made().layer("decoder")


# -- what is refused ---------------------------------------------------------------------------------------------------


def edit(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "recipe.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def rewrite_arrays(directory: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Changed arrays with the hash that fits them, as if they had been written so."""
    path = directory / "recipe.safetensors"
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)
    edit(directory, lambda data: data.update(arrays_sha256=hashlib.sha256(path.read_bytes()).hexdigest()))


def cut_in_half(directory: Path) -> None:
    path = directory / "recipe.json"
    path.write_text(path.read_text()[:200])


def flip_a_bit(directory: Path) -> None:
    path = directory / "recipe.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (cut_in_half, "is no recipe that can be replayed"),
        (lambda d: (d / "recipe.json").write_text("[]"), "is no recipe that can be replayed"),
        (lambda d: (d / "recipe.json").write_text("[" * 100000), "is no recipe that can be replayed"),
        (lambda d: (d / "recipe.json").write_bytes(b"\xff\xfe\x00"), "is no recipe that can be replayed"),
        (lambda d: edit(d, lambda data: data.pop("layers")), "is no recipe that can be replayed"),
        (lambda d: edit(d, lambda data: data["layers"][0].update(colour=1)), "is no recipe that can be replayed"),
        (lambda d: edit(d, lambda data: data.update(schema=99)), "schema 99; this version reads 1"),
        (
            lambda d: edit(d, lambda data: data["layers"][0].update(precision="int3")),
            "encoder.query has the precision 'int3'",
        ),
        (flip_a_bit, "is not the file that recipe.json was written with; take both from one run"),
        (lambda d: (d / "recipe.safetensors").unlink(), "recipe.safetensors cannot be read: No such file"),
        (lambda d: rewrite_arrays(d, lambda a: a.pop("encoder.query/shift")), "is no recipe that can be replayed"),
        (lambda d: edit(d, lambda data: data["sites"]["encoder.query"].update(scale=0.0)), "are not sane"),
        (lambda d: edit(d, lambda data: data["sites"]["encoder.query"].update(scale=2e6)), "are not sane"),
        (lambda d: edit(d, lambda data: data["sites"]["encoder.query"].update(scale=float("nan"))), "are not sane"),
        (
            lambda d: rewrite_arrays(d, lambda a: a["encoder.query/multiplier"].__setitem__(0, np.inf)),
            "the scales of encoder.query are not sane",
        ),
    ],
)
def test_a_file_that_is_not_whole_is_one_line(change: Callable[[Path], object], expected: str, tmp_path: Path) -> None:
    recipe.write(made(), tmp_path)
    change(tmp_path)
    with pytest.raises(UsageError) as caught:
        recipe.read(tmp_path / "recipe.json")
    assert expected in str(caught.value) and "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


# -- replaying ---------------------------------------------------------------------------------------------------------


def nothing_is_measured(*_: object, **__: object) -> None:
    raise AssertionError("a replay measures and chooses nothing")


def forbid_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "runner", nothing_is_measured)
    monkeypatch.setattr(calibration, "cases", nothing_is_measured)
    monkeypatch.setattr(search, "Bench", nothing_is_measured)


@pytest.mark.parametrize("step", ["onnx-qdq", "onnx-int8"])
def test_a_replay_gives_the_same_bytes_and_measures_nothing(
    step: str, quantized: Outs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into another OUT; for one of them from the checkpoint on."""
    out, outcomes = quantized(MODEL)
    given = tmp_path / "committed"
    given.mkdir()
    for name in ("recipe.json", "recipe.safetensors"):
        shutil.copy(out / step / name, given / name)
    if step == "onnx-int8":
        test_search.parents(quantized, MODEL, tmp_path / "out")
    forbid_measuring(monkeypatch)
    options = plan.Options(recipe=given / "recipe.json", threads=1)
    outcome = pipeline.run(str(HOME / MODEL), tmp_path / "out", to=[step], options=options)[-1]
    assert outcome.status == "agrees", outcome.reason
    for name in ("model.onnx", "model.onnx.data", "recipe.json", "recipe.safetensors"):
        assert (tmp_path / "out" / step / name).read_bytes() == (out / step / name).read_bytes(), name
    before = outcomes[step].verdict
    assert before is not None and outcome.verdict is not None
    assert outcome.verdict["comparison"] == before["comparison"]


def another_model(directory: Path) -> None:
    def rename(data: dict[str, Any]) -> None:
        for layer in data["layers"]:
            layer["name"] = layer["name"].replace("bert.", "roberta.")

    edit(directory, rename)


def a_layer_less(directory: Path) -> None:
    edit(directory, lambda data: data["layers"].pop(0))


def narrower(directory: Path) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        name = next(name for name in arrays if name.endswith("/shift"))
        arrays[name] = arrays[name][:-1].copy()

    rewrite_arrays(directory, change)


def same_recipe(_: Path) -> None:
    """As it is."""


@pytest.mark.parametrize(
    ("step", "change", "expected"),
    [
        ("onnx-qdq", another_model, "it is another model's"),
        ("onnx-qdq", a_layer_less, "the recipe says nothing about bert.encoder.layer.0.attention.self.query"),
        ("onnx-qdq", narrower, "channels, it has 96"),
        ("onnx-qdq", flip_a_bit, "take both from one run"),
        ("onnx-qdq", cut_in_half, "is no recipe that can be replayed"),
        ("onnx-int8", same_recipe, "is a recipe for onnx-qdq, not for onnx-int8"),
        ("onnx-int4", same_recipe, "is a recipe for onnx-qdq (static), not for onnx-int4"),
    ],
)
def test_a_recipe_that_does_not_fit_is_exit_2(
    step: str,
    change: Callable[[Path], None],
    expected: str,
    quantized: Outs,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = test_search.parents(quantized, MODEL, tmp_path / "out")
    given = tmp_path / "given"
    given.mkdir()
    for name in ("recipe.json", "recipe.safetensors"):
        shutil.copy(quantized(MODEL)[0] / "onnx-qdq" / name, given / name)
    change(given)
    words = ["run", HOME / MODEL, "-o", out, "--to", step, "--recipe", given / "recipe.json", "--quiet"]
    assert cli._main([str(word) for word in words]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("nlpconvert:")]
    assert len(lines) == 1 and expected in lines[0]
    assert not (out / step).exists()
    assert not [path for path in out.iterdir() if path.name.startswith(f".{step}")]


@pytest.mark.slow
def test_a_recipe_of_another_checkpoint_of_this_shape_is_judged_anew(
    quantized: Outs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained a little further, the model has the same layers: the recipe applies, and the verdict says what of it."""
    from safetensors.torch import load_file as load_torch
    from safetensors.torch import save_file as save_torch

    model = tmp_path / "model"
    shutil.copytree(HOME / MODEL, model)
    weights = load_torch(model / "model.safetensors")
    for name in list(weights):
        if name.endswith("intermediate.dense.weight"):
            weights[name] = weights[name] * 40  # activations forty times as large as those that were calibrated
    save_torch(weights, model / "model.safetensors", metadata={"format": "pt"})
    options = plan.Options(recipe=quantized(MODEL)[0] / "onnx-qdq" / "recipe.json", threads=1)
    forbid_measuring(monkeypatch)
    outcome = pipeline.run(str(model), tmp_path / "out", to=["onnx-qdq"], options=options)[-1]
    assert outcome.status == "drift" and outcome.verdict is not None
    assert outcome.verdict["comparison"]["outputs"][0]["measured"] > 0.02

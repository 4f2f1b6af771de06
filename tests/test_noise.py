"""Tests of nlpconvert/noise.py and exact.py: the reference in other arithmetics, and the floor that is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nlpconvert import cli, exact, forward, manifest, noise, pipeline, probes, reference, source
from nlpconvert.errors import UsageError
from nlpconvert.plan import Options
from nlpconvert.progress import Silent
from nlpconvert.validators import tolerance
from tests import tiny

BUDGET = 1 << 24


def arithmetics(module: torch.nn.Module, by_layer: bool = False) -> noise.Arithmetics:
    how = exact.float64_by_layer if by_layer else exact.float64
    return noise.Arithmetics(lambda: how(module), exact.other_threads, by_layer)


def measured(model: source.Loaded, by_layer: bool = False, parameters: int | None = None) -> noise.Noise:
    cases = probes.probe_cases(model.facts, model.encode)
    call = lambda batch: forward.call(model.module, batch)  # noqa: E731
    asked = reference.ask(call, cases, model.facts.outputs, BUDGET, Silent())
    size = model.parameter_bytes // 4 if parameters is None else parameters
    return noise.measure(
        call, cases, asked.answers, model.facts.outputs, size, arithmetics(model.module, by_layer), Silent()
    )


@pytest.fixture(scope="module")
def loaded(classifier: Path) -> source.Loaded:
    return source.load(str(classifier))


@pytest.mark.parametrize("context", [exact.float64, exact.float64_by_layer])
def test_the_module_is_given_back_bit_by_bit(loaded: source.Loaded, context: Any) -> None:
    before = {name: value.clone() for name, value in loaded.module.state_dict().items()}
    places = {name: value.data_ptr() for name, value in loaded.module.named_parameters()}
    case = probes.probe_cases(loaded.facts, loaded.encode)[0]
    answer = forward.call(loaded.module, case.inputs)["logits"]
    with pytest.raises(RuntimeError, match="stopped inside"), context(loaded.module):
        wide = forward.call(loaded.module, case.inputs)["logits"]
        raise RuntimeError("stopped inside")
    for name, value in loaded.module.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name]), name
    # Not copies of them: those would take memory beside the file that they are mapped from.
    assert places == {name: value.data_ptr() for name, value in loaded.module.named_parameters()}
    assert np.array_equal(answer, forward.call(loaded.module, case.inputs)["logits"])
    assert not np.array_equal(answer, wide) and np.allclose(answer, wide, atol=1e-5)


def test_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with exact.other_threads():
        assert torch.get_num_threads() != before
    assert torch.get_num_threads() == before


def test_the_floor_is_the_largest_of_its_parts(loaded: source.Loaded) -> None:
    found = measured(loaded)
    parts = found.outputs["logits"]
    assert found.float64 == "the whole model"
    assert parts["floor"] == max(parts["float64"], parts["threads"], parts["companions"])
    assert 1e-8 < parts["float64"] < 1e-5  # a float32 is never exact over so many products, and never so bad
    assert noise.floors(found.to_dict()) == {"logits": parts["floor"]}
    assert noise.floors({}) == {}


def test_layer_by_layer_finds_most_of_it(loaded: source.Loaded) -> None:
    whole = measured(loaded).outputs["logits"]["float64"]
    layers = measured(loaded, by_layer=True)
    assert "layer by layer" in layers.float64
    assert whole / 5 < layers.outputs["logits"]["float64"] < whole * 5


def test_a_large_model_is_asked_less(loaded: source.Loaded) -> None:
    cases = len(measured(loaded).cases)
    assert len(measured(loaded, parameters=2 * 10**9).cases) < cases
    assert len(measured(loaded, parameters=10**12).cases) == 1


def test_what_a_model_does_by_itself_is_no_noise(tmp_path: Path) -> None:
    """XLNet's answer depends on the padding beside it: 0.4 of its size, where float32 is 1e-7 from float64."""
    model = source.load(str(tiny.save(tiny.ROWS["xlnet"], tmp_path / "model")))
    assert measured(model).outputs["logits"]["floor"] < 1e-5


def test_a_reference_without_float64_leaves_the_others(loaded: source.Loaded) -> None:
    def refuse() -> Any:
        raise TypeError("this operator knows no float64")

    cases = probes.probe_cases(loaded.facts, loaded.encode)
    call = lambda batch: forward.call(loaded.module, batch)  # noqa: E731
    asked = reference.ask(call, cases, loaded.facts.outputs, BUDGET, Silent())
    found = noise.measure(
        call,
        cases,
        asked.answers,
        loaded.facts.outputs,
        1000,
        noise.Arithmetics(refuse, exact.other_threads, False),
        Silent(),
    )
    assert found.float64 == "not measured: this operator knows no float64"
    assert found.outputs["logits"]["float64"] == 0


def test_float32_is_judged_in_multiples_of_it(classifier_out: Path, tmp_path: Path) -> None:
    record = manifest.read(classifier_out)
    floor = noise.floors(record.golden.noise)["logits"]
    (outcome,) = pipeline.verify(classifier_out, steps=["onnx"])
    assert outcome.verdict is not None
    output = outcome.verdict["comparison"]["outputs"][0]
    assert output["tolerance"]["multiple"] == 10
    assert output["tolerance"]["value"] == pytest.approx(10 * max(floor, tolerance.LEAST_NOISE), rel=0.05)
    assert output["noise"] == floor and 0 < output["used"] < 1
    (strict,) = pipeline.verify(classifier_out, steps=["onnx"], options=Options(tolerance="noise<=0.001"))
    assert strict.status == "drift"


def test_a_manifest_without_noise_is_judged_by_the_table(
    classifier_out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of schema 1 is: verify works, and says what to do where noise is asked for by name."""
    import json
    import shutil

    out = tmp_path / "out"
    shutil.copytree(classifier_out, out)
    data = json.loads((out / manifest.FILE).read_text())
    data["schema"] = 1
    del data["golden"]["noise"]
    (out / manifest.FILE).write_text(json.dumps(data))
    (outcome,) = pipeline.verify(out, steps=["onnx"])
    assert outcome.status == "agrees" and outcome.verdict is not None
    assert outcome.verdict["comparison"]["outputs"][0]["tolerance"]["value"] == 5e-5
    assert cli._main(["verify", str(out), "--step", "onnx", "--tolerance", "noise<=10"]) == 2
    assert "noise was not measured when the goldens were made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda noise: noise["outputs"]["logits"].update(floor=2), "noise is from 0 to below 1"),
        (lambda noise: noise["outputs"]["logits"].pop("floor"), "floor is missing"),
        (lambda noise: noise["outputs"]["logits"].update(floor="much"), "has to be a number"),
    ],
)
def test_a_manifest_with_another_noise_is_refused(edit: Any, said: str, classifier_out: Path, tmp_path: Path) -> None:
    import json

    data = json.loads((classifier_out / manifest.FILE).read_text())
    edit(data["golden"]["noise"])
    (tmp_path / manifest.FILE).write_text(json.dumps(data))
    with pytest.raises(UsageError, match=said):
        manifest.read(tmp_path)


def test_max_memory_decides_whether_by_layer(classifier: Path, tmp_path: Path) -> None:
    (outcome,) = pipeline.convert_step(
        "torchscript", str(classifier), tmp_path / "out", options=Options(max_memory=1000)
    )
    assert outcome.status == "agrees"
    assert "layer by layer" in manifest.read(tmp_path / "out").golden.noise["float64"]

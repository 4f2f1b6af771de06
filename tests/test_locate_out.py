"""`locate` on an OUT: what a step is held against, what is refused, derived steps, and a machine without torch."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from nlpconvert import locating, manifest, pipeline, plan
from nlpconvert.artifact import Artifact
from nlpconvert.errors import CannotRunHere, DriftError, UsageError
from nlpconvert.validators.located import NOISE
from tests import breaking
from tests.test_verify_alone import program

ONE = plan.Options(threads=1)


@pytest.fixture(scope="module")
def derived_out(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OUT of a tiny BERT with what is made from its ONNX file without a search."""
    out = tmp_path_factory.mktemp("derived") / "out"
    outcomes = pipeline.run(str(classifier), out, to=["onnx-fp16", "onnx-optimized", "onnx-qdq"], options=ONE)
    assert all(outcome.artifact is not None for outcome in outcomes), outcomes
    return out


def copied(out: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(out, tmp_path / "copy"))


def change(out: Path, step: str, how: breaking.Break) -> None:
    """Breaks a step of an OUT where it lies."""
    path = out / step / "model.onnx"
    model = onnx.load(str(path))
    how(model)
    path.with_name("model.onnx.data").unlink(missing_ok=True)
    onnx.save(model, str(path))


def test_a_fused_file_is_held_against_its_parent(derived_out: Path) -> None:
    found = locating.locate(derived_out, "onnx-optimized", options=ONE)
    assert (found.step, found.against, found.first) == ("onnx-optimized", "onnx", None)
    assert len(found.modules) > 25
    assert not found.unmatched


def test_half_precision_moves_every_module_a_little(derived_out: Path) -> None:
    found = locating.locate(derived_out, "onnx-fp16", options=ONE)
    assert not found.stands_out
    assert found.first == "bert.embeddings.word_embeddings"
    assert 1e-5 < max(each.introduced for each in found.modules) < 1e-2


def test_int8_moves_what_is_quantized_and_a_doubled_scale_stands_out(derived_out: Path, tmp_path: Path) -> None:
    found = locating.locate(derived_out, "onnx-qdq", options=ONE)
    moved = {each.module for each in found.modules if each.introduced > NOISE}
    assert "bert.encoder.layer.0.intermediate.dense" in moved
    assert not any(module.endswith("LayerNorm") for module in moved)
    assert not found.stands_out
    out = copied(derived_out, tmp_path)
    module = "bert.encoder.layer.1.attention.output.dense"
    change(out, "onnx-qdq", breaking.doubled_scale(f"{module}.weight"))
    found = locating.locate(out, "onnx-qdq", options=ONE)
    assert (found.first, found.most, found.stands_out) == (module, module, True)
    assert "onnx-qdq/model.onnx has changed since it was recorded" in found.notes


def test_a_broken_derived_file_is_located_against_the_model_too(
    classifier: Path, derived_out: Path, tmp_path: Path
) -> None:
    out = copied(derived_out, tmp_path)
    module = "bert.encoder.layer.0.attention.self.value"
    change(out, "onnx-optimized", breaking.nudged(f"{module}.weight.T", 0.01))
    for model in (None, str(classifier)):
        found = locating.locate(out, "onnx-optimized", model=model, options=ONE)
        assert (found.first, found.most) == (module, module)
    assert found.against == "pytorch"
    assert not found.unmatched, "a product whose bias was fused into what follows has it from the model"
    found = locating.locate(out, "onnx-optimized", against="onnx-qdq", cases=["left-padded"], options=ONE)
    assert found.cases == ("left-padded",)
    assert found.against == "onnx-qdq"


def test_a_bias_that_was_fused_into_what_follows_is_still_its_own_modules(derived_out: Path, tmp_path: Path) -> None:
    out = copied(derived_out, tmp_path)
    module = "bert.encoder.layer.0.output.dense"
    change(out, "onnx-optimized", breaking.zeroed(f"{module}.bias"))
    found = locating.locate(out, "onnx-optimized", options=ONE)
    assert (found.first, found.most) == (module, module)
    assert f"bert.encoder.layer.0.output: the weight {module}.bias differs by 1.0e+00 of its norm" in found.notes


def test_what_cannot_be_located_is_said_in_one_line(
    classifier: Path, features: Path, derived_out: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"onnx was made from the model itself: give the model with --model /"):
        locating.locate(derived_out, "onnx")
    with pytest.raises(UsageError, match=r"is checkpoint .*, not .*, from which the steps were made"):
        locating.locate(derived_out, "onnx", model=str(features))
    with pytest.raises(UsageError, match="there is no step 'onnx-int4'"):
        locating.locate(derived_out, "onnx-int4")
    with pytest.raises(UsageError, match="there is no step 'nowhere'"):
        locating.locate(derived_out, "onnx-fp16", against="nowhere")
    with pytest.raises(UsageError, match="that is the step itself"):
        locating.locate(derived_out, "onnx-fp16", against="onnx-fp16")
    with pytest.raises(UsageError, match="were both given"):
        locating.locate(derived_out, "onnx-fp16", against="onnx", model=str(classifier))
    with pytest.raises(UsageError, match="there is no case 'nothing'"):
        locating.locate(derived_out, "onnx-fp16", cases=["nothing"])
    out = copied(derived_out, tmp_path)
    (out / "golden" / "inputs.safetensors").write_bytes(b"")
    with pytest.raises(DriftError, match="since it was recorded, so nothing can be judged by it"):
        locating.locate(out, "onnx-fp16")
    shutil.rmtree(out / "onnx-fp16")
    with pytest.raises(DriftError, match="cannot be read as ONNX"):
        locating.between(artifact(out, "onnx-fp16"), artifact(out, "onnx"), [])


def artifact(out: Path, step: str) -> Artifact:
    return manifest.read(out).artifact(step, out)


def test_an_engine_names_the_step_to_look_at_instead(derived_out: Path) -> None:
    engine = replace(artifact(derived_out, "onnx-qdq"), step="trt-int8", format="tensorrt", parent="onnx-qdq")
    with pytest.raises(CannotRunHere, match=r"hides its inner tensors: locate onnx-qdq, from which trt-int8 was made"):
        locating.between(engine, artifact(derived_out, "onnx-qdq"), [])
    with pytest.raises(CannotRunHere, match="hides its inner tensors"):
        locating.with_model(engine, lambda: pytest.fail("the model is not loaded"), [])


def test_between_two_files_neither_torch_nor_the_model_is_needed(derived_out: Path, tmp_path: Path) -> None:
    out = tmp_path / "checkout" / "artifacts"
    shutil.copytree(derived_out, out)
    module = "bert.encoder.layer.1.intermediate.dense"
    change(out, "onnx-optimized", breaking.nudged(f"{module}.weight.T", 0.1))
    script = (
        "import json; from nlpconvert import locating, plan; "
        "found = locating.locate('artifacts', 'onnx-optimized', options=plan.Options(threads=1)); "
        "print(json.dumps(found.to_dict()))"
    )
    done = program(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["first"], found["most"]) == (module, module)
    assert f"{module}: the weight {module}.weight.T differs by 1.0e-01 of its norm" in found["notes"]

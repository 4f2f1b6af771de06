"""Every way in which a verdict could be worthless, each broken for real and seen to fail.

An artifact is edited on disk and its new hashes recorded, as if it had been made like that: so it is the measurement
that has to see it, not the hashes. Only the tests of tampering leave the hashes as they were.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from nlpconvert import cli, disk, golden, inputs, manifest, pipeline, report
from nlpconvert.artifact import Outcome
from nlpconvert.errors import DriftError

Edit = Callable[[onnx.ModelProto], None]


# -- tools: an artifact broken on disk ---------------------------------------------------------------------------------


def copy(out: Path, to: Path) -> Path:
    shutil.copytree(out, to / "out")
    return to / "out"


def rehash(out: Path, step: str = "onnx") -> None:
    """Records a step's files as they lie there now."""
    record = manifest.read(out)
    artifact = record.artifact(step, out)
    artifact = replace(artifact, files=disk.hash_tree(artifact.directory))
    record.with_step(replace(record.outcome(step, out), artifact=artifact)).write(out)


def rewrite(out: Path, edit: Edit) -> None:
    path = out / "onnx" / "model.onnx"
    model = onnx.load(str(path))
    edit(model)
    (out / "onnx" / "model.onnx.data").unlink()
    onnx.save(model, str(path))
    rehash(out)


def lines_of(outcome: Outcome) -> str:
    return "\n".join(report.verdict_lines(outcome))


def verified(out: Path, step: str = "onnx", cases: list[str] | None = None) -> Outcome:
    (outcome,) = pipeline.verify(out, steps=[step], cases=cases)
    return outcome


def weight(model: onnx.ModelProto, part: str) -> onnx.TensorProto:
    """The only initialiser whose name holds `part`."""
    (found,) = [tensor for tensor in model.graph.initializer if part in tensor.name]
    return found


def set_weight(tensor: onnx.TensorProto, array: np.ndarray) -> None:
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def read_instead(model: onnx.ModelProto, names: dict[str, str]) -> None:
    """Every node that reads a key reads its value instead."""
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


def prepend(model: onnx.ModelProto, *nodes: onnx.NodeProto) -> None:
    kept = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *kept])


def constant(name: str, value: Any, dtype: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value, dtype)))


def after_output(model: onnx.ModelProto, index: int, *nodes: onnx.NodeProto) -> None:
    """`nodes` read "before" and write "after", which takes the place of an output."""
    name = model.graph.output[index].name
    for node in model.graph.node:
        node.output[:] = ["before" if each == name else each for each in node.output]
        node.input[:] = ["before" if each == name else each for each in node.input]
    for node in nodes:
        node.output[:] = [name if each == "after" else each for each in node.output]
    model.graph.node.extend(nodes)


# -- the breaks --------------------------------------------------------------------------------------------------------


def one_weight_up_by_one_percent(model: onnx.ModelProto) -> None:
    tensor = weight(model, "encoder.layer.1.intermediate.dense.weight")
    set_weight(tensor, numpy_helper.to_array(tensor) * np.float32(1.01))


def two_inputs_swapped(model: onnx.ModelProto) -> None:
    # Of the same type and shape, both zeros and ones: nothing raises.
    read_instead(model, {"attention_mask": "token_type_ids", "token_type_ids": "attention_mask"})


def length_frozen(model: onnx.ModelProto) -> None:
    """What lies beyond the example's seven tokens is not attended to: right at the export shape and nowhere else."""
    read_instead(model, {"attention_mask": "seen"})
    prepend(
        model,
        constant("zero", 0, np.int64),
        constant("one", 1, np.int64),
        constant("seven", 7, np.int64),
        helper.make_node("Shape", ["attention_mask"], ["mask_shape"]),
        helper.make_node("Gather", ["mask_shape", "one"], ["length"]),
        helper.make_node("Range", ["zero", "length", "one"], ["places"]),
        helper.make_node("Less", ["places", "seven"], ["within"]),
        helper.make_node("Cast", ["within"], ["within_int"], to=onnx.TensorProto.INT64),
        helper.make_node("Mul", ["attention_mask", "within_int"], ["seen"]),
    )


def input_axis_frozen(model: onnx.ModelProto) -> None:
    for value in model.graph.input:
        value.type.tensor_type.shape.dim[1].dim_value = 7


def dropout_left_on(model: onnx.ModelProto) -> None:
    after_output(
        model,
        0,
        constant("ratio", 0.1, np.float32),
        constant("training", True, np.bool_),
        helper.make_node("Dropout", ["before", "ratio", "training"], ["after"], seed=1),
    )


def times(factor: float, index: int = 0) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        after_output(
            model,
            index,
            constant("factor", factor, np.float32),
            helper.make_node("Mul", ["before", "factor"], ["after"]),
        )

    return edit


def positions_end_early(model: onnx.ModelProto) -> None:
    """The artifact raises in the few cases at the model's limit: four of 24."""
    tensor = weight(model, "position_embeddings")
    set_weight(tensor, numpy_helper.to_array(tensor)[:60])


def one_output_less(model: onnx.ModelProto) -> None:
    del model.graph.output[1]


def output_renamed(model: onnx.ModelProto) -> None:
    after_output(model, 1, helper.make_node("Identity", ["before"], ["pooled"]))
    model.graph.output[1].name = "pooled"


def output_in_half_precision(model: onnx.ModelProto) -> None:
    after_output(model, 0, helper.make_node("Cast", ["before"], ["after"], to=onnx.TensorProto.FLOAT16))
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (one_weight_up_by_one_percent, ["1 of 1 outputs out of tolerance", "would pass at    rel<="]),
        (two_inputs_swapped, ["1 of 1 outputs out of tolerance"]),
        (length_frozen, ["1 of 1 outputs out of tolerance"]),
        (input_axis_frozen, ["input input_ids: axis 1 (sequence) is frozen at 7", "the artifact failed where"]),
        (dropout_left_on, ["1 of 1 outputs out of tolerance"]),
        (times(0.0), ["1 of 1 outputs out of tolerance", "candidate 0 "]),
        (times(float("nan")), ["not finite", "first at"]),
        (positions_end_early, ["the artifact failed where the reference answers", "20 cases"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_classifier_is_seen(
    edit: Edit, expected: list[str], classifier_out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = copy(classifier_out, tmp_path)
    rewrite(out, edit)
    outcome = verified(out)
    assert outcome.status == "drift"
    words = lines_of(outcome)
    assert words.startswith("onnx disagrees with pytorch")
    for text in expected:
        assert text in words
    # The same on the command line, and in the documents that CI reads.
    junit = tmp_path / "junit.xml"
    assert cli._main(["verify", str(out), "--step", "onnx", "--junit", str(junit), "--json", "-"]) == 1
    assert '"exit_code": 1' in capfd.readouterr().out
    assert "<failure" in junit.read_text()


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (times(1.01), ["1 of 2 outputs out of tolerance", "last_hidden_state  float32", "pooler_output      float32"]),
        (times(0.0, 1), ["1 of 2 outputs out of tolerance", "pooler_output"]),
        (one_output_less, ["output pooler_output is missing", "the artifact does not give it"]),
        (
            output_renamed,
            ["output pooler_output is missing; pooled stands there instead", "the artifact gives pooled"],
        ),
        (output_in_half_precision, ["output last_hidden_state is float16, expected float32"]),
    ],
    ids=["one percent", "zeros", "one output less", "renamed", "half precision"],
)
def test_a_broken_token_level_model_is_seen(
    edit: Edit, expected: list[str], features_out: Path, tmp_path: Path
) -> None:
    out = copy(features_out, tmp_path)
    rewrite(out, edit)
    outcome = verified(out)
    assert outcome.status == "drift"
    for text in expected:
        assert text in lines_of(outcome)
    assert pipeline.exit_code([outcome]) == 1


def test_what_was_only_rewritten_agrees(classifier_out: Path, tmp_path: Path) -> None:
    """The tools above do not break anything by themselves."""
    out = copy(classifier_out, tmp_path)
    rewrite(out, times(1.0))
    assert verified(out).status == "agrees"


# -- files that are not the ones that were verified --------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda out: flip(out / "onnx" / "model.onnx"), "onnx/model.onnx has changed since it was verified"),
        (lambda out: flip(out / "onnx" / "model.onnx.data"), "onnx/model.onnx.data has changed"),
        (lambda out: (out / "onnx" / "tokenizer.json").write_text("{}"), "onnx/tokenizer.json has changed"),
        (lambda out: (out / "onnx" / "config.json").unlink(), "onnx/config.json is missing"),
        (lambda out: (out / "onnx" / "extra.json").write_text("{}"), "onnx/extra.json was added"),
    ],
    ids=["graph", "weights", "tokenizer", "missing", "added"],
)
def test_a_file_edited_after_verification_is_not_opened(
    break_it: Callable[[Path], Any], expected: str, classifier_out: Path, tmp_path: Path
) -> None:
    out = copy(classifier_out, tmp_path)
    break_it(out)
    outcome = verified(out)
    assert (outcome.status, outcome.verdict) == ("drift", None)
    assert expected in outcome.reason
    assert "it was not opened" in outcome.reason
    assert pipeline.exit_code([outcome]) == 1


def test_a_golden_that_was_edited_judges_nothing(
    classifier_out: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = copy(classifier_out, tmp_path)
    flip(out / "golden" / "outputs.safetensors")
    assert cli._main(["verify", str(out)]) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err == (
        f"nlpconvert: {out}: golden/outputs.safetensors has changed since it was recorded, so nothing can be judged by "
        "it; restore it\n"
    )


def test_a_step_whose_parent_was_replaced_is_stale(classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path)
    rewrite(out, times(1.0))
    outcome = verified(out, "trt")
    assert (outcome.status, outcome.verdict) == ("drift", None)
    assert outcome.reason == "it is stale: onnx, from which it was made, was replaced since"


def test_a_model_that_cannot_be_opened_is_drift(classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path)
    path = out / "onnx" / "model.onnx"
    path.write_bytes(path.read_bytes()[:1000])
    rehash(out)
    outcome = verified(out)
    assert outcome.status == "drift"
    assert "ONNX Runtime cannot open model.onnx" in outcome.reason


# -- nothing to compare ------------------------------------------------------------------------------------------------


def regolden(out: Path, keep: Callable[[str], bool], not_applicable: dict[str, str]) -> None:
    """The golden with fewer cases, recorded."""
    record = manifest.read(out)
    cases, answers = golden.read(out / "golden")
    cases = [case for case in cases if keep(case.name)]
    answers = {name: each for name, each in answers.items() if keep(name) and name not in not_applicable}
    shutil.rmtree(out / "golden")
    golden.write(out / "golden", cases, answers)
    kept = replace(
        record.golden,
        files=disk.hash_tree(out / "golden"),
        not_applicable=not_applicable,
        probe_sha256=inputs.cases_sha256(cases),
    )
    replace(record, golden=kept).write(out)


def test_a_golden_without_cases_compares_nothing(classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path)
    regolden(out, lambda name: False, {})
    outcome = verified(out)
    assert outcome.status == "drift"
    assert "nothing was compared" in lines_of(outcome)
    assert pipeline.exit_code([outcome]) == 1


def test_cases_that_pytorch_cannot_answer_compare_nothing(classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path)
    regolden(out, lambda name: name == "alone", {"alone": "the reference raised ValueError: no"})
    outcome = verified(out)
    assert outcome.status == "drift"
    assert "nothing was compared: none of the 1 cases is applicable" in lines_of(outcome)


def test_no_step_compares_nothing(classifier_out: Path, tmp_path: Path) -> None:
    out = copy(classifier_out, tmp_path)
    replace(manifest.read(out), steps={}).write(out)
    with pytest.raises(DriftError, match="holds no step yet, so nothing was compared"):
        pipeline.verify(out)


def test_not_run_is_never_a_pass(classifier_out: Path) -> None:
    outcome = verified(classifier_out, "trt")
    if outcome.status == "agrees":
        pytest.skip("there is a GPU here: the engine was run")
    assert outcome.status == "not run"
    assert "no NVIDIA GPU" in outcome.reason
    assert pipeline.exit_code([outcome]) == 4
    assert pipeline.exit_code([outcome], ["trt"]) == 4, "nothing at all was verified"
    assert pipeline.exit_code([outcome, Outcome("onnx", "agrees")], ["trt"]) == 0
    assert pipeline.exit_code([outcome, Outcome("onnx", "drift")], ["trt"]) == 1


# -- a reference that is none ------------------------------------------------------------------------------------------


def _loading(change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """`source.load` gives a model that `change` was called on."""
    from nlpconvert import source

    load = source.load

    def changed(*args: Any, **kwargs: Any) -> source.Loaded:
        loaded = load(*args, **kwargs)
        change(loaded.module)
        return loaded

    monkeypatch.setattr(source, "load", changed)


def test_a_reference_in_training_mode_is_refused(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _loading(lambda module: module.train(), monkeypatch)
    with pytest.raises(DriftError, match=r"can answer none of the .* cases: .* the reference is in training mode"):
        pipeline.run(str(classifier), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dropout_left_on_in_the_reference_is_refused(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model that drops in eval mode too, as some custom code does."""
    import torch

    def drop(module: Any) -> None:
        module.dropout.forward = lambda hidden: torch.nn.functional.dropout(hidden, 0.1, training=True)

    _loading(drop, monkeypatch)
    assert cli._main(["onnx", str(classifier), "-o", str(tmp_path / "out"), "--quiet"]) == 1
    said = capfd.readouterr().err
    assert said.startswith("nlpconvert: PyTorch is not deterministic: logits of case identical moved")
    assert "is dropout on" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_exporter_that_switches_to_training_is_seen(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nlpconvert.convert import onnx as to_onnx
    from nlpconvert.convert import torchscript

    trace, export = torchscript._trace, to_onnx._export_transformers

    def training(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args: call(module.train(), *args)

    monkeypatch.setattr(torchscript, "_trace", training(trace))
    monkeypatch.setattr(to_onnx, "_export_transformers", training(export))
    options = pipeline.Options(keep_going=True)
    traced, exported = pipeline.run(str(classifier), tmp_path / "out", to=["torchscript", "onnx"], options=options)
    assert traced.status == "drift"
    assert "1 of 1 outputs out of tolerance" in lines_of(traced)
    assert (exported.status, exported.reason) == ("failed", "the exporter left the model in training mode")
    assert pipeline.exit_code([traced, exported]) == 3
    assert not (tmp_path / "out" / "onnx").exists()


def test_the_reference_is_asked_before_any_exporter_touches_the_model(
    classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exporter that moves the weights: asked afterwards, the reference would have moved with them and agreed."""
    import torch

    from nlpconvert.convert import torchscript

    convert = torchscript.convert

    def moving(module: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            module.get_parameter("classifier.weight").mul_(1.01)
        return convert(module, *args, **kwargs)

    monkeypatch.setattr(torchscript, "convert", moving)
    first, second = pipeline.run(str(classifier), tmp_path / "out", to=["torchscript", "onnx"])
    assert first.status == "drift"
    assert "1 of 1 outputs out of tolerance" in lines_of(first)
    assert (second.status, second.reason) == ("skipped", "the line stopped at torchscript")
    # Measured by the recorded goldens again: what is wrong stays wrong.
    assert verified(tmp_path / "out", "torchscript").status == "drift"

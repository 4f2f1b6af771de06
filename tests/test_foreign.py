"""Tests of nlpconvert/foreign.py and renaming.py: files that other tools made, judged by the model they came from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import AutoModelForSequenceClassification

from nlpconvert import cli, foreign, pipeline, renaming, report
from nlpconvert.errors import DriftError, MissingPackage, UsageError
from nlpconvert.plan import Options


class Wrapped(torch.nn.Module):
    """A classifier as people wrap it for an export of their own: a tuple of logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Any, mask: Any = None, types: Any = None) -> Any:
        return (self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits,)


INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@pytest.fixture(scope="module")
def theirs(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of the tiny classifier as another exporter writes them."""
    folder = tmp_path_factory.mktemp("theirs")
    wrapped = Wrapped(AutoModelForSequenceClassification.from_pretrained(classifier)).eval()
    ids = torch.randint(3, 60, (2, 9))
    example = (ids, torch.ones_like(ids), torch.zeros_like(ids))
    axes = {name: {0: "b", 1: "s"} for name in INPUTS}

    def export(name: str, given: tuple[Any, ...], inputs: tuple[str, ...], output: str, dynamic: bool = True) -> None:
        torch.onnx.export(
            wrapped,
            given,
            str(folder / name),
            dynamo=False,
            input_names=list(inputs),
            output_names=[output],
            dynamic_axes={**{n: axes[n] for n in inputs if n in axes}, output: {0: "b"}} if dynamic else None,
            opset_version=17,
        )

    export("same.onnx", example, INPUTS, "logits")
    export("renamed.onnx", example, INPUTS, "scores")
    export("nomask.onnx", example[:1], INPUTS[:1], "logits")
    export("frozen.onnx", example, INPUTS, "logits", dynamic=False)
    torch.jit.trace(wrapped, example).save(str(folder / "traced.pt"))
    return folder


def judged(file: Path, model: Path, **more: Any) -> Any:
    (outcome,) = foreign.verify(file, str(model), **more)
    return outcome


def text(outcome: Any) -> str:
    return "\n".join(report.verdict_lines(outcome))


def test_names_that_fit_agree_and_the_directory_is_verified_alone(
    theirs: Path, classifier: Path, tmp_path: Path
) -> None:
    outcome = judged(theirs / "same.onnx", classifier, out=tmp_path / "out")
    assert outcome.status == "agrees", text(outcome)
    (again,) = pipeline.verify(tmp_path / "out")
    assert (again.step, again.status) == ("foreign", "agrees")
    with pytest.raises(UsageError, match="foreign exists; --force replaces it"):
        judged(theirs / "same.onnx", classifier, out=tmp_path / "out")
    # Changed afterwards it is not opened.
    (tmp_path / "out" / "foreign" / "same.onnx").write_bytes(b"other")
    (again,) = pipeline.verify(tmp_path / "out")
    assert again.status == "drift" and "has changed" in again.reason


def test_a_renamed_output_has_to_be_mapped(theirs: Path, classifier: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it gives scores, the model logits; --map scores=logits says which it is"):
        judged(theirs / "renamed.onnx", classifier)
    outcome = judged(theirs / "renamed.onnx", classifier, mapping=["scores=logits"], out=tmp_path / "out")
    assert outcome.status == "agrees", text(outcome)
    (again,) = pipeline.verify(tmp_path / "out")
    assert again.status == "agrees"


def test_a_trace_without_names_is_taken_in_the_models_order(theirs: Path, classifier: Path) -> None:
    mapping = ["ids=input_ids", "mask=attention_mask", "types=token_type_ids"]
    with pytest.raises(UsageError, match="the file reads ids, which cannot be matched"):
        judged(theirs / "traced.pt", classifier)
    outcome = judged(theirs / "traced.pt", classifier, mapping=mapping)
    assert outcome.status == "agrees", text(outcome)
    assert "taken as logits, in the model's order" in text(outcome)


def test_a_file_that_reads_no_mask_drifts_and_says_why(theirs: Path, classifier: Path) -> None:
    outcome = judged(theirs / "nomask.onnx", classifier)
    assert outcome.status == "drift"
    assert "the file does not read token_type_ids, attention_mask" in text(outcome)
    assert "logits: padding at the right must not matter, and differs by" in text(outcome)


def test_frozen_axes_are_named(theirs: Path, classifier: Path) -> None:
    outcome = judged(theirs / "frozen.onnx", classifier)
    assert outcome.status == "drift"
    assert "input input_ids: axis 1 (sequence) is frozen at 9" in text(outcome)


def test_a_changed_weight_is_seen(theirs: Path, classifier: Path, tmp_path: Path) -> None:
    model = onnx.load(str(theirs / "same.onnx"))
    weight = next(t for t in model.graph.initializer if len(t.dims) == 2 and min(t.dims) > 8)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
    onnx.save(model, str(tmp_path / "changed.onnx"))
    assert judged(tmp_path / "changed.onnx", classifier).status == "drift"


def test_another_tokenizer_beside_the_file_is_a_drift(theirs: Path, classifier: Path, tmp_path: Path) -> None:
    shutil.copyfile(theirs / "same.onnx", tmp_path / "model.onnx")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(classifier / name, tmp_path / name)
    outcome = judged(tmp_path, classifier)
    assert outcome.status == "agrees" and "gives the same ids as the model's" in text(outcome)
    words = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    one, two = list(vocabulary)[10:12]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    outcome = judged(tmp_path, classifier)
    assert outcome.status == "drift"
    assert "the tokenizer beside it gives other ids for" in text(outcome)
    assert pipeline.exit_code([outcome]) == 1


def test_external_data_comes_along_and_may_not_lead_out(theirs: Path, classifier: Path, tmp_path: Path) -> None:
    model = onnx.load(str(theirs / "same.onnx"))
    onnx.save(model, str(tmp_path / "big.onnx"), save_as_external_data=True, location="weights.bin", size_threshold=64)
    outcome = judged(tmp_path / "big.onnx", classifier, out=tmp_path / "out")
    assert outcome.status == "agrees" and set(outcome.artifact.files) == {"big.onnx", "weights.bin"}
    bad = onnx.load(str(tmp_path / "big.onnx"), load_external_data=False)
    for tensor in bad.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../weights.bin"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "bad.onnx").write_bytes(bad.SerializeToString())
    with pytest.raises(UsageError, match=r"weights\.bin"):
        judged(tmp_path / "sub" / "bad.onnx", classifier)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("same.onnx", {"mapping": ["scores=logits"]}, "the file has no scores; it has input_ids"),
        ("same.onnx", {"mapping": ["logits=pooler"]}, "the model has no pooler; it has input_ids"),
        ("same.onnx", {"mapping": ["logits"]}, "write theirs=ours"),
        ("same.onnx", {"mapping": ["logits=logits", "logits=logits"]}, "names logits twice"),
        ("same.onnx", {"precision": "int7"}, "--precision int7: it is one of float32"),
        ("none.onnx", {}, "no such file"),
        ("broken.onnx", {}, "is no ONNX model"),
        ("what.bin", {}, "cannot tell what this is"),
    ],
)
def test_bad_input_is_one_line(theirs: Path, classifier: Path, name: str, more: dict[str, Any], said: str) -> None:
    (theirs / "broken.onnx").write_bytes(b"\x08\x08nonsense")
    (theirs / "what.bin").write_bytes(b"1")
    with pytest.raises(UsageError, match=said):
        judged(theirs / name, classifier, **more)


@pytest.mark.parametrize("given", ["decoder_model.onnx", "."])
def test_half_of_a_pair_is_not_judged_by_itself(given: str, classifier: Path, tmp_path: Path) -> None:
    name, floats = "past_key_values.0.encoder.key", onnx.TensorProto.FLOAT
    value = onnx.helper.make_tensor_value_info(name, floats, ["batch", 2, "past", 4])
    logits = onnx.helper.make_tensor_value_info("logits", floats, ["batch", 2, "past", 4])
    node = onnx.helper.make_node("Identity", [name], ["logits"])
    graph = onnx.helper.make_graph([node], "decoder", [value], [logits])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "decoder_model.onnx")
    with pytest.raises(UsageError, match="judged only in a directory that nlpconvert has made"):
        foreign.verify(tmp_path / given, str(classifier))


def test_an_engine_without_a_gpu_is_not_run(classifier: Path, tmp_path: Path) -> None:
    from nlpconvert import engines

    if engines.runtime_here().gpu is not None:
        pytest.skip("there is a GPU here, and these bytes are no engine")
    (tmp_path / "model.engine").write_bytes(b"an engine")
    outcome = judged(tmp_path / "model.engine", classifier)
    assert outcome.status == "not run" and "GPU" in outcome.reason
    assert pipeline.exit_code([outcome]) == 4


def test_without_torch_the_extra_is_named(theirs: Path, classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nlpconvert.runtimes.lacks", lambda package: package == "torch")
    with pytest.raises(MissingPackage, match=r"nlpconvert\[cpu\]"):
        judged(theirs / "same.onnx", classifier)


def test_a_damaged_trace_is_a_drift_error(classifier: Path, tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"PK\x03\x04nothing")
    with pytest.raises(DriftError, match=r"torch cannot open m\.pt"):
        judged(tmp_path / "m.pt", classifier)


def test_an_int8_file_is_judged_as_int8(theirs: Path, classifier: Path, tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(theirs / "same.onnx", tmp_path / "q.onnx", weight_type=QuantType.QInt8, per_channel=True)
    assert foreign.look(tmp_path / "q.onnx").precision == "int8"
    outcome = judged(tmp_path / "q.onnx", classifier, options=Options(tolerance="changed<=50%"))
    assert outcome.artifact.precision == "int8" and outcome.verdict["products"]["count"]["int8"] > 0


def test_inputs_that_the_model_does_not_take_are_derived() -> None:
    facts = tiny_facts()
    found, notes = renaming.match_inputs({}, ("input_ids", "position_ids", "token_type_ids"), facts)
    assert found["position_ids"] == "position_ids"
    assert "the file does not read attention_mask" in notes[0]
    ids = np.array([[5, 6, 0]])
    batch = {"input_ids": ids, "attention_mask": np.array([[1, 1, 0]])}
    assert renaming.derive("position_ids", batch).tolist() == [[0, 1, 1]]
    assert renaming.derive("token_type_ids", batch).tolist() == [[0, 0, 0]]
    with pytest.raises(UsageError, match=r"past_key_values\.0\.key, which cannot be matched"):
        renaming.match_inputs({}, ("input_ids", "past_key_values.0.key"), facts)


def tiny_facts() -> Any:
    from nlpconvert.models import TASKS, Facts

    outputs = TASKS["feature-extraction"].outputs
    return Facts("bert", "feature-extraction", INPUTS[:2], outputs, 100, 0, None, None, 64, "own", 2, (), False)


def test_on_the_command_line(
    theirs: Path, classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["verify", str(theirs / "renamed.onnx"), "--reference", str(classifier), "--map", "scores=logits"]
    assert cli._main([*words, "-o", str(tmp_path / "out"), "--html", str(tmp_path / "v.html")]) == 0
    assert "foreign" in capsys.readouterr().out
    assert (tmp_path / "v.html").read_text().startswith("<!doctype html>")
    assert cli._main(["verify", str(theirs / "same.onnx")]) == 2
    assert "--reference MODEL" in capsys.readouterr().err
    assert cli._main(["verify", str(tmp_path / "out"), "--map", "a=b"]) == 2
    assert "nlpconvert's own" in capsys.readouterr().err
    assert cli._main([*words, "--prove"]) == 2
    assert "keep it with -o OUT" in capsys.readouterr().err
    for more in (["--baseline", "x"], ["--data", "x"], ["--fail-if", "x"], ["--columns", "x"]):
        assert cli._main([*words, *more]) == 2, more


def test_another_config_beside_the_file_is_a_drift(theirs: Path, classifier: Path, tmp_path: Path) -> None:
    """Labels exchanged, or another model's config: the answers are right, and are read wrongly."""
    shutil.copyfile(theirs / "same.onnx", tmp_path / "model.onnx")
    words = json.loads((classifier / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(words))
    assert judged(tmp_path, classifier).status == "agrees"
    words["model_type"] = "roberta"
    (tmp_path / "config.json").write_text(json.dumps(words))
    outcome = judged(tmp_path, classifier)
    assert outcome.status == "drift"
    assert 'config.json beside it has model_type "roberta", the model\'s has "bert"' in text(outcome)


def test_a_tokenizer_that_cuts_by_itself_is_a_drift(theirs: Path, classifier: Path, tmp_path: Path) -> None:
    """transformers sets truncation itself; a server that reads tokenizer.json gets what stands in it."""
    shutil.copyfile(theirs / "same.onnx", tmp_path / "model.onnx")
    words = json.loads((classifier / "tokenizer.json").read_text())
    words["truncation"] = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    shutil.copyfile(classifier / "tokenizer_config.json", tmp_path / "tokenizer_config.json")
    outcome = judged(tmp_path, classifier)
    assert outcome.status == "drift"
    assert "tokenizer.json beside it, read as it stands, gives other ids for" in text(outcome)


def test_settings_hold_for_a_foreign_file_too(theirs: Path, classifier: Path, tmp_path: Path) -> None:
    from nlpconvert import settings

    (tmp_path / "nlpconvert.toml").write_text('[steps.foreign]\ntolerance = "noise<=1e-9"\n')
    assert judged(theirs / "same.onnx", classifier, settings=settings.read(tmp_path)).status == "drift"

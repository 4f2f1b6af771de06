"""The step onnx-optimized: what is fused, that it answers alike under every mask, and that a wrong fusion is seen."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from nlpconvert import pipeline
from nlpconvert.artifact import Artifact, Outcome
from nlpconvert.convert import derived, onnx_graph, optimize
from nlpconvert.disk import hash_tree
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.plan import Options
from nlpconvert.source import Loaded
from tests import tiny
from tests.asking import CLOSE, ask, batch, loaded, make
from tests.conftest import FIXTURES
from tests.test_architectures import MORE, QUICK, REFUSED, wrong

# Architecture: attentions fused, of how many. Those that are not have the reason in REASONS.
ATTENTIONS = {
    **{row.name: (2, 2) for row in (*tiny.TINY, *MORE)},
    **dict.fromkeys(("t5", "bart", "bart-classifier", "marian", "m2m_100", "pegasus"), (6, 6)),
    **dict.fromkeys(("deberta", "deberta-v2", "xlnet", "gpt_neo", "bloom", "squeezebert", "xlm"), (0, 2)),
    "convbert": (0, 4),
    "fnet": (0, 0),
}
REASONS = {
    "deberta": "its scores come from Where",
    "xlm": "its scores come from Where",
    "gpt_neo": "its scores come from Add",
    "deberta-v2": "its weights go to Reshape",
    "bloom": "its weights go to Reshape",
    "xlnet": "its weights go to Einsum",
    "squeezebert": "the keys are not turned",
    "convbert": "the graph has 2 heads, config.json says 4",
}


def fused(parent: Artifact, directory: Path, target: str = "cpu") -> Artifact:
    """The optimized artifact of a parent, as the line would make it."""
    directory.mkdir()
    made = optimize.convert(parent, directory, target=target)
    return Artifact(
        step="onnx-optimized",
        path=directory / made.file,
        format="onnx",
        precision="float32",
        task=parent.task,
        inputs=made.inputs,
        outputs=made.outputs,
        files=hash_tree(directory),
        parent="onnx",
        parent_sha256=parent.sha256,
        made_by={**made.made_by, "notes": list(made.notes)},
    )


def graph_of(path: Path) -> onnx.GraphProto:
    return onnx.load(str(path), load_external_data=False).graph


def operators(path: Path) -> Counter[str]:
    return Counter(f"{node.domain}:{node.op_type}".lstrip(":") for node in graph_of(path).node)


def run(model: Path, out: Path, target: str = "cpu") -> Outcome:
    """The outcome of the step, by the whole line."""
    onnx_, outcome = pipeline.run(str(model), out, to=["onnx-optimized"], options=Options(optimize=target))
    assert onnx_.status == "agrees" and outcome.step == "onnx-optimized"
    return outcome


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Artifact]:
    folder = tmp_path_factory.mktemp("bert")
    model = loaded(tiny.ROWS["bert"], folder / "model")
    return model, make("onnx", model, folder / "onnx")


@pytest.fixture(scope="module")
def sentences(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """The real model's outcome for each target, by the whole line."""
    out = tmp_path_factory.mktemp("minilm") / "out"
    outcomes = {"cpu": run(minilm, out)}
    shutil.copytree(out, out.with_name("cuda"))
    shutil.rmtree(out.with_name("cuda") / "onnx-optimized")
    outcomes["cuda"] = run(minilm, out.with_name("cuda"), "cuda")
    return outcomes


def artifact_of(outcome: Outcome) -> Artifact:
    assert outcome.artifact is not None
    return outcome.artifact


# -- verdicts ----------------------------------------------------------------------------------------------------------


def agrees(outcome: Outcome) -> dict[str, Any]:
    """How it was made, of an outcome whose verdict is good."""
    assert outcome.status == "agrees", (outcome.reason, wrong(outcome))
    assert outcome.verdict is not None and outcome.verdict["comparison"]["cases"] >= 18
    made_by = dict(artifact_of(outcome).made_by)
    for name, (done, total) in made_by["fused"].items():
        assert done == total or any(reason.startswith(f"{name}: ") for reason in made_by["not_fused"])
    return made_by


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_real_model(sentences: dict[str, Outcome], target: str) -> None:
    outcome = sentences[target]
    made_by = agrees(outcome)
    assert made_by["fused"]["attention"] == [6, 6] and made_by["not_fused"] == []
    assert made_by["num_heads"] == [12] and made_by["hidden_size"] == 384
    assert made_by["target"] == target and made_by["level"] == "all"
    assert outcome.notes[0].startswith("fused: 6 of 6 attentions, 12 of 12 ")
    path = artifact_of(outcome).path
    if target == "cpu":
        assert made_by["fused"]["residual"] == [12, 12]
        assert operators(path)["Attention"] == 6 and not any(":" in name for name in operators(path))
    else:
        assert made_by["fused"]["skip_norm"] == [12, 12]
        assert operators(path)["com.microsoft:MultiHeadAttention"] == 6
        assert operators(path)["com.microsoft:SkipLayerNormalization"] == 12


def rows() -> list[Any]:
    taken = [row for row in (*tiny.TINY, *MORE) if row.name not in REFUSED]
    return [pytest.param(row, id=row.name, marks=() if row.name in QUICK else pytest.mark.slow) for row in taken]


@pytest.mark.parametrize("row", rows())
def test_every_architecture_agrees_under_every_mask(row: tiny.Tiny, tmp_path: Path) -> None:
    outcome = run(tiny.save(row, tmp_path / "model"), tmp_path / "out")
    made_by = agrees(outcome)
    assert tuple(made_by["fused"]["attention"]) == ATTENTIONS[row.name], made_by["not_fused"]
    if row.name in REASONS:
        assert any(REASONS[row.name] in note for note in outcome.notes), outcome.notes
    else:
        assert made_by["not_fused"] == []
    assert made_by["fused"]["rms_norm"][0] == made_by["fused"]["rms_norm"][1]


@pytest.mark.slow
@pytest.mark.parametrize("row", rows())
def test_every_architecture_agrees_fused_for_cuda(row: tiny.Tiny, tmp_path: Path) -> None:
    """Judged on the CPU: every operator that is used has a kernel there too."""
    made_by = agrees(run(tiny.save(row, tmp_path / "model"), tmp_path / "out", "cuda"))
    assert tuple(made_by["fused"]["attention"]) == ATTENTIONS[row.name], made_by["not_fused"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "llama-lm" else pytest.mark.slow) for name in FIXTURES]
)
def test_trained_models_agree(name: str, fixtures_dir: Path, tmp_path: Path) -> None:
    made_by = agrees(run(fixtures_dir / name, tmp_path / "out"))
    config = json.loads((fixtures_dir / name / "config.json").read_text())
    if name == "t5-seq2seq":  # a layer of the decoder has two
        count = config["num_layers"] + 2 * config["num_decoder_layers"]
    else:
        count = config.get("num_hidden_layers") or config["n_layer"]
    assert made_by["fused"]["attention"] == [count, count]


# -- a wrong fusion is seen --------------------------------------------------------------------------------------------

Edit = Callable[[onnx.ModelProto], None]


def without_mask(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Attention":
            del node.input[3:]


def right_padding(model: onnx.ModelProto) -> None:
    """The bias becomes a number of keys, counted from the left: what fusions that assume right padding do."""
    helper = onnx.helper
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis_1"))
    counted = [
        helper.make_node("ReduceSum", ["attention_mask", "axis_1"], ["real"], keepdims=0),
        helper.make_node("Cast", ["real"], ["lengths"], to=onnx.TensorProto.INT32),
    ]
    for node in model.graph.node:
        if node.op_type == "MultiHeadAttention":
            node.input[4], node.input[5] = "lengths", ""
    nodes = [*counted, *model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def attribute(operator: str, name: str, change: Callable[[Any], Any]) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for index, each in enumerate(node.attribute):
                if node.op_type == operator and each.name == name:
                    value = change(onnx.helper.get_attribute_value(each))
                    node.attribute[index].CopyFrom(onnx.helper.make_attribute(name, value))

    return edit


def without_bias(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Sum":
            del node.input[1]


def two_heads_as_four(model: onnx.ModelProto) -> None:
    for name in ("q_num_heads", "kv_num_heads"):
        attribute("Attention", name, lambda _: 2)(model)


@pytest.mark.parametrize(
    ("target", "edit"),
    [
        pytest.param("cpu", without_mask, id="without-mask"),
        pytest.param("cuda", right_padding, id="right-padding"),
        pytest.param("cpu", attribute("Attention", "scale", lambda scale: scale * 1.02), id="scale"),
        pytest.param("cpu", two_heads_as_four, id="heads"),
        pytest.param("cuda", attribute("MultiHeadAttention", "num_heads", lambda _: 2), id="heads-cuda"),
        pytest.param("cpu", without_bias, id="without-bias"),
        pytest.param("cuda", attribute("SkipLayerNormalization", "epsilon", lambda _: 1e-2), id="epsilon"),
    ],
)
def test_a_wrong_fusion_drifts(
    target: str, edit: Edit, classifier: Path, classifier_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = optimize.convert

    def convert(parent: Artifact, directory: Path, **options: Any) -> Any:
        made = right(parent, directory, **options)
        model = onnx.load(str(directory / made.file), load_external_data=False)
        before = model.SerializeToString()
        edit(model)
        assert model.SerializeToString() != before
        onnx.save(model, str(directory / made.file))
        return made

    monkeypatch.setattr(optimize, "convert", convert)
    shutil.copytree(classifier_out, tmp_path / "out")
    outcome = run(classifier, tmp_path / "out", target)
    assert outcome.status == "drift" and outcome.exit_code == 1
    assert pipeline.exit_code([outcome]) == 1


# -- parents -----------------------------------------------------------------------------------------------------------


def test_o33_a_fused_parent(bert: tuple[Loaded, Artifact], tmp_path: Path) -> None:
    model, parent = bert
    for_cuda = fused(parent, tmp_path / "cuda", "cuda")
    with pytest.raises(ConversionError, match="is fused already: it holds MultiHeadAttention, SkipLayerNormalization"):
        fused(for_cuda, tmp_path / "twice")
    again = fused(fused(parent, tmp_path / "cpu"), tmp_path / "again")
    assert again.made_by["notes"] == [
        "nothing could be fused: the file computes as its parent does",
        "2 attentions stand in the parent as one operator already",
    ]
    rows = batch(model.facts, [9, 4])
    np.testing.assert_allclose(ask(again, rows)["logits"], ask(parent, rows)["logits"], **CLOSE)


def test_another_target(bert: tuple[Loaded, Artifact], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no fusion for npu: only for cpu and cuda"):
        optimize.convert(bert[1], tmp_path, target="npu")
    assert not any(tmp_path.iterdir())


def test_a_parent_that_cannot_be_read(bert: tuple[Loaded, Artifact], tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    broken = Artifact(**{**vars(bert[1]), "path": tmp_path / "model.onnx"})
    with pytest.raises(ConversionError, match="cannot be read"):
        fused(broken, tmp_path / "fused")


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_weights_and_module_paths_stay(sentences: dict[str, Outcome], target: str) -> None:
    """Later steps quantize this graph: they look for MatMuls and their weights by name."""
    made = artifact_of(sentences[target])
    parent = made.directory.with_name("onnx") / "model.onnx"

    def weights(path: Path) -> dict[str, tuple[int, ...]]:
        large = {tensor.name: tuple(tensor.dims) for tensor in graph_of(path).initializer}
        return {name: shape for name, shape in large.items() if np.prod(shape) * 4 >= onnx_graph.INSIDE_BYTES}

    def projections(path: Path) -> set[str]:
        names = {tensor.name for tensor in graph_of(path).initializer}
        products = (node for node in graph_of(path).node if node.op_type == "MatMul")
        return {node.input[1] for node in products if node.input[1] in names}

    assert weights(made.path) == weights(parent)
    assert projections(made.path) == projections(parent) and len(projections(made.path)) == 36
    for node in graph_of(made.path).node:
        kept = {prop.key: prop.value for prop in node.metadata_props}
        assert set(kept) <= {onnx_graph.SCOPES} and not node.doc_string
        if node.op_type in ("Attention", "MultiHeadAttention"):
            assert ".attention.self'" in kept[onnx_graph.SCOPES]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_o27_external_data_stays_beside_the_file(
    sentences: dict[str, Outcome], target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = artifact_of(sentences[target])
    parent = made.directory.with_name("onnx")
    outside = [tensor for tensor in graph_of(made.path).initializer if tensor.data_location == 1]
    assert len(outside) > 50
    assert {each.value for tensor in outside for each in tensor.external_data if each.key == "location"} == {
        "model.onnx.data"
    }
    assert derived.size(made.directory) <= derived.size(parent)
    assert {file.name for file in made.directory.iterdir()} == {file.name for file in parent.iterdir()}
    shutil.copytree(made.directory, tmp_path / "elsewhere")
    monkeypatch.chdir("/")
    onnxruntime.InferenceSession(str(tmp_path / "elsewhere" / "model.onnx"), providers=["CPUExecutionProvider"])


def test_shared_weights_stay_shared(tmp_path: Path) -> None:
    parent = make("onnx", loaded(tiny.ROWS["albert"], tmp_path / "model"), tmp_path / "onnx")
    made = fused(parent, tmp_path / "fused")
    data = [each.directory / "model.onnx.data" for each in (made, parent)]
    assert data[0].stat().st_size <= data[1].stat().st_size


def test_the_runtime_does_not_fuse_what_was_kept_apart(sentences: dict[str, Outcome], tmp_path: Path) -> None:
    """The reason for `residual`: SkipLayerNormalization is slow on the CPU, and ONNX Runtime puts it in by itself."""

    def opened(path: Path) -> Counter[str]:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "opened.onnx")
        options.log_severity_level = 4
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return operators(tmp_path / "opened.onnx")

    made = artifact_of(sentences["cpu"])
    plain, better = opened(made.directory.with_name("onnx") / "model.onnx"), opened(made.path)
    assert plain["com.microsoft:SkipLayerNormalization"] == 12
    assert better["com.microsoft:SkipLayerNormalization"] == 0 and better["Attention"] == 6
    assert better["com.microsoft:BiasGelu"] == plain["com.microsoft:BiasGelu"] == 6


# -- what it brought ---------------------------------------------------------------------------------------------------


def test_gain_is_a_ratio_of_medians() -> None:
    assert 0.3 < optimize.gain(lambda: time.sleep(0.004), lambda: time.sleep(0.002), rounds=5) < 0.8
    calls: list[str] = []
    optimize.gain(lambda: calls.append("parent"), lambda: calls.append("fused"), rounds=2)
    assert calls == ["parent", "fused"] * 3


@pytest.mark.slow
def test_the_real_model_is_faster(sentences: dict[str, Outcome]) -> None:
    """Measured 0.89 of the parent's time at 16 x 16 and 16 x 128, 0.90 at 1 x 16, one thread."""
    made = artifact_of(sentences["cpu"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    paths = (made.directory.with_name("onnx") / "model.onnx", made.path)
    parent, better = (onnxruntime.InferenceSession(str(path), options) for path in paths)
    ids = np.random.default_rng(0).integers(1000, 20000, (16, 32))
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    assert optimize.gain(lambda: parent.run(None, feed), lambda: better.run(None, feed), rounds=9) < 1

"""The ONNX converter: names, axes, sizes, what lies in the files and what does not, and its two exporters."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers

from nlpconvert import forward, pipeline, probes
from nlpconvert.artifact import Artifact
from nlpconvert.convert import onnx as converter
from nlpconvert.convert import onnx_graph
from nlpconvert.errors import ConversionError, UsageError
from nlpconvert.source import Loaded
from tests import tiny
from tests.asking import CLOSE, ask, batch, loaded, make

DYNAMIC = {"batch", "sequence", "decoder_sequence", "choices"}
ALBERT = tiny.Tiny(
    "albert",
    "AlbertModel",
    "AlbertConfig",
    {
        "vocab_size": 120,
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        "embedding_size": 16,
        "max_position_embeddings": 64,
    },
)
MASKED = tiny.Tiny(
    "bert",
    "BertForMaskedLM",
    "BertConfig",
    {**tiny.S, "hidden_size": 64, "vocab_size": 5000, "max_position_embeddings": 64},
)


@pytest.fixture(scope="module")
def minilm_loaded(minilm: Path) -> Loaded:
    from nlpconvert import source

    return source.load(str(minilm))


@pytest.fixture(scope="module")
def sentences(minilm_loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The real model's artifact; never written to."""
    return make("onnx", minilm_loaded, tmp_path_factory.mktemp("minilm") / "onnx")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return loaded(tiny.ROWS["bert"], tmp_path_factory.mktemp("bert") / "model")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Artifact]:
    folder = tmp_path_factory.mktemp("t5")
    model = loaded(tiny.ROWS["t5"], folder / "model")
    return model, make("onnx", model, folder / "onnx")


def graph_of(artifact: Artifact) -> Any:
    return onnx.load(str(artifact.path), load_external_data=False)


def symbols(graph: Any) -> set[str]:
    """Every name of an axis anywhere in the graph's values, also inside expressions."""
    values = (*graph.input, *graph.output, *graph.value_info)
    words = [dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim if dim.dim_param]
    return {word for text in words for word in text.replace("(", " ").replace(")", " ").replace("*", " ").split()}


def opset(artifact: Artifact) -> int:
    return {each.domain: each.version for each in graph_of(artifact).opset_import}[""]


# -- names and axes ----------------------------------------------------------------------------------------------------


def test_inputs_outputs_and_one_symbol_an_axis(sentences: Artifact) -> None:
    graph = graph_of(sentences).graph
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes == {
        "input_ids": ["batch", "sequence"],
        "token_type_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
        "sentence_embedding": ["batch", 384],
        "last_hidden_state": ["batch", "sequence", 384],
    }
    assert {value.type.tensor_type.elem_type for value in graph.input} == {onnx.TensorProto.INT64}
    assert {value.type.tensor_type.elem_type for value in graph.output} == {onnx.TensorProto.FLOAT}
    assert [(spec.name, spec.dtype) for spec in sentences.inputs] == [
        (name, "int64") for name in ("input_ids", "token_type_ids", "attention_mask")
    ]
    assert {each for each in symbols(graph) if not each.isdigit()} <= DYNAMIC | {"+", "-"}


def test_axes_of_encoder_and_decoder(t5: tuple[Loaded, Artifact]) -> None:
    graph = graph_of(t5[1]).graph
    shapes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    assert shapes["attention_mask"] == ["batch", "sequence"]
    assert shapes["decoder_input_ids"] == shapes["decoder_attention_mask"] == ["batch", "decoder_sequence"]
    assert shapes["logits"] == ["batch", "decoder_sequence", 120]
    assert shapes["encoder_last_hidden_state"] == ["batch", "sequence", 32]
    assert not [each for each in symbols(graph) if each[0] == "s" and each[1:].isdigit()]


def test_facts_stand_in_the_file(sentences: Artifact) -> None:
    said = {each.key: each.value for each in graph_of(sentences).metadata_props}
    assert said["nlpconvert.task"] == "sentence-embedding" and said["nlpconvert.max_length"] == "512"
    assert said["nlpconvert.model_type"] == "bert"


def test_module_paths_stay_on_the_nodes(sentences: Artifact) -> None:
    nodes = graph_of(sentences).graph.node
    scopes = [prop.value for node in nodes for prop in node.metadata_props if prop.key == onnx_graph.SCOPES]
    assert len(scopes) > 0.9 * len(nodes)
    assert any("'encoder.layer.5.output.dense'" in each for each in scopes)
    names = {tensor.name for tensor in graph_of(sentences).graph.initializer}
    assert "encoder.layer.0.output.dense.weight.T" in names
    assert not [name for name in names if name.startswith("onnx::")]


# -- opset -------------------------------------------------------------------------------------------------------------


def test_opset(sentences: Artifact, bert: Loaded, tmp_path: Path) -> None:
    assert opset(sentences) == converter.DEFAULT_OPSET == 20
    older = make("onnx", bert, tmp_path, opset=18)
    assert opset(older) == 18 and older.made_by["opset"] == 18


@pytest.mark.parametrize("number", [0, 17, 24, 99])
def test_opset_out_of_range(number: int, bert: Loaded, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"--opset {number} is not between 18 and 23"):
        make("onnx", bert, tmp_path, opset=number)
    assert not any(tmp_path.iterdir())


# -- weights -----------------------------------------------------------------------------------------------------------


def test_external_data_under_a_bare_name_and_small_tensors_inside(sentences: Artifact) -> None:
    external = onnx.TensorProto.EXTERNAL
    for tensor in graph_of(sentences).graph.initializer:
        items = int(np.prod(list(tensor.dims)))
        size = items * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).itemsize
        assert (tensor.data_location == external) == (size >= onnx_graph.INSIDE_BYTES), (tensor.name, size)
        if tensor.data_location == external:
            assert {each.key: each.value for each in tensor.external_data}["location"] == "model.onnx.data"
    assert {"model.onnx", "model.onnx.data"} <= set(sentences.files)


@pytest.mark.parametrize(
    ("row", "most"),
    [(MASKED, 1.02), (ALBERT, 1.05), ("gpt2", 1.05), ("t5", 1.05)],
    ids=["bert-masked", "albert", "gpt2", "t5"],
)
def test_o25_o26_every_shared_weight_once(row: Any, most: float, t5: tuple[Loaded, Artifact], tmp_path: Path) -> None:
    """Tied heads (BERT, GPT-2, T5) and shared layers (ALBERT) come out of exporters up to 4.8 times."""
    if row == "t5":
        model, artifact = t5
    else:
        model = loaded(tiny.ROWS[row] if isinstance(row, str) else row, tmp_path / "model")
        artifact = make("onnx", model, tmp_path / "onnx")
    data = artifact.path.with_name("model.onnx.data").stat().st_size
    assert data <= most * model.parameter_bytes, data / model.parameter_bytes
    # The rest is the graph itself.
    assert artifact.path.stat().st_size < 600_000
    assert row != ALBERT or artifact.made_by["weights_shared"] >= 20  # some exporters share a tied head themselves
    rows = batch(model.facts, [9, 4])
    reference = forward.call(model.module, rows)
    for name, answer in ask(artifact, rows).items():
        np.testing.assert_allclose(answer, reference[name], **CLOSE)


def test_a_file_that_grew_is_flagged(tmp_path: Path) -> None:
    model = loaded(MASKED, tmp_path / "model")
    artifact = make("onnx", model, tmp_path / "onnx", parameter_bytes=model.parameter_bytes // 10)
    notes = artifact.made_by["notes"]
    assert any("10." in note and "times the unique parameters" in note for note in notes), artifact.made_by


# -- nothing of this machine -------------------------------------------------------------------------------------------


def test_no_path_of_the_machine(sentences: Artifact, t5: tuple[Loaded, Artifact]) -> None:
    machine = ("site-packages", "/tmp", "/home/", "/root/", "/usr/", str(Path.cwd()), str(Path(torch.__file__).parent))
    for artifact in (sentences, t5[1]):
        content = artifact.path.read_bytes()
        assert [word for word in (*machine, str(artifact.directory)) if word.encode() in content] == []


# -- the directory -----------------------------------------------------------------------------------------------------


def test_checker_passes(sentences: Artifact, t5: tuple[Loaded, Artifact]) -> None:
    for artifact in (sentences, t5[1]):
        onnx.checker.check_model(str(artifact.path), full_check=True)


def test_an_invalid_graph_is_refused(tmp_path: Path) -> None:
    node = onnx.helper.make_node("NoSuchOperator", ["x"], ["y"])
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([node], "g", [value], [])
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "model.onnx"))
    with pytest.raises(ConversionError, match="invalid graph: No Op registered for NoSuchOperator"):
        converter.check(tmp_path / "model.onnx")


def test_companions_and_the_same_ids(sentences: Artifact, minilm: Path) -> None:
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"} <= set(sentences.files)
    texts = ["A plain sentence.", "", "naïve café 東京 🙂", "word " * 300]
    ours, own = (transformers.AutoTokenizer.from_pretrained(each) for each in (sentences.directory, minilm))
    assert ours(texts)["input_ids"] == own(texts)["input_ids"]
    assert transformers.AutoConfig.from_pretrained(sentences.directory).model_type == "bert"


OPEN = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
ids = numpy.arange(1000, 1014).reshape(2, 7)
feed = {"input_ids": ids, "attention_mask": numpy.ones_like(ids), "token_type_ids": numpy.zeros_like(ids)}
numpy.save(sys.argv[2], session.run(["sentence_embedding"], feed)[0])
"""


def test_o28_moved_and_opened_from_elsewhere(sentences: Artifact, minilm_loaded: Loaded, tmp_path: Path) -> None:
    """In a process that has never heard of us, after the directory was moved, by a relative path."""
    shutil.copytree(sentences.directory, tmp_path / "first" / "model")
    (tmp_path / "first").rename(tmp_path / "second")
    (tmp_path / "cwd").mkdir()
    relative = os.path.relpath(tmp_path / "second" / "model" / "model.onnx", tmp_path / "cwd")
    subprocess.run([sys.executable, "-c", OPEN, relative, "answer.npy"], cwd=tmp_path / "cwd", check=True)
    ids = np.arange(1000, 1014).reshape(2, 7)
    feed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    expected = forward.call(minilm_loaded.module, feed)["sentence_embedding"]
    np.testing.assert_allclose(np.load(tmp_path / "cwd" / "answer.npy"), expected, **CLOSE)


def test_o27_no_step_needs_the_weights_inside_the_model(
    bert: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past 2 GB a model with its weights inside cannot be written or checked; so none is ever made, at any size."""
    monkeypatch.setattr(onnx_graph, "INSIDE_BYTES", 64)

    def refused(*args: Any, **options: Any) -> None:
        raise AssertionError("external data was read into a model")

    monkeypatch.setattr("onnx.external_data_helper.load_external_data_for_model", refused)
    monkeypatch.setattr("onnx.load_external_data_for_model", refused)
    outcomes = pipeline.run(str(bert.directory), tmp_path / "out", to=["onnx", "trt"])
    assert outcomes[0].status == "agrees", outcomes[0].reason
    assert outcomes[1].status in ("agrees", "not run"), outcomes[1].reason
    graph = onnx.load(str(tmp_path / "out" / "onnx" / "model.onnx"), load_external_data=False).graph
    assert sum(len(tensor.raw_data) for tensor in graph.initializer) < 3000


# -- exporters ---------------------------------------------------------------------------------------------------------


def no_exporter(*args: Any, **options: Any) -> Any:
    raise RuntimeError("data-dependent guard\nand a whole graph")


def test_the_older_exporter_takes_over_and_says_why(
    bert: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converter, "_export_transformers", no_exporter)
    artifact = make("onnx", bert, tmp_path / "onnx")
    assert artifact.made_by["exporter"] == "torch.onnx (TorchScript)"
    assert artifact.made_by["fallback_reason"] == "RuntimeError: data-dependent guard"
    (note,) = artifact.made_by["notes"]
    assert note == (
        "exported by torch.onnx (TorchScript), because transformers.exporters failed: "
        "RuntimeError: data-dependent guard"
    )
    assert [spec.shape for spec in artifact.inputs] == [("batch", "sequence")] * 3
    rows = batch(bert.facts, [23, 4, 1], left=True)
    np.testing.assert_allclose(ask(artifact, rows)["logits"], forward.call(bert.module, rows)["logits"], **CLOSE)
    content = artifact.path.read_bytes()
    assert b"site-packages" not in content and str(tmp_path).encode() not in content


def test_both_exporters_fail(bert: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "_export_transformers", no_exporter)
    monkeypatch.setattr(torch.onnx, "export", no_exporter)
    outcomes = pipeline.run(str(bert.directory), tmp_path / "out", to=["onnx"])
    (outcome,) = outcomes
    assert outcome.status == "failed" and pipeline.exit_code(outcomes) == 3
    assert outcome.reason == (
        "no exporter could turn BertForSequenceClassification into ONNX: RuntimeError: data-dependent guard"
    )
    left = {each.name for each in (tmp_path / "out").iterdir() if not each.name.startswith(".")}
    assert left == {"nlpconvert.json", "golden", "logs"}


@pytest.mark.parametrize("exporter", ["_export_transformers", "_export_legacy"])
def test_o17_the_model_is_left_in_eval_mode(
    exporter: str, t5: tuple[Loaded, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older exporter puts the whole model into its wrapper's mode: with dropout the reference is drawn."""
    model = t5[0]
    if exporter == "_export_legacy":
        monkeypatch.setattr(converter, "_export_transformers", no_exporter)
        make("onnx", model, tmp_path)
    assert [name for name, part in model.module.named_modules() if part.training] == []
    rows = batch(model.facts, [9, 4])
    first, second = (forward.call(model.module, rows)["logits"] for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_an_exporter_that_leaves_training_mode_is_refused(
    bert: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = converter._export_transformers

    def careless(module: torch.nn.Module, *args: Any) -> Any:
        program = own(module, *args)
        module.train()
        return program

    monkeypatch.setattr(converter, "_export_transformers", careless)
    try:
        with pytest.raises(ConversionError, match="left the model in training mode"):
            make("onnx", bert, tmp_path)
    finally:
        bert.module.eval()


def test_a_frozen_axis_is_refused(bert: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def static(module: torch.nn.Module, inputs: dict[str, torch.Tensor], facts: Any, opset: int) -> Any:
        exporter: Any = converter.OnnxExporter()  # type: ignore[no-untyped-call]
        return exporter.export(module, dict(inputs), converter.OnnxConfig(dynamic=False, opset_version=opset)).program

    monkeypatch.setattr(converter, "_export_transformers", static)
    with pytest.raises(ConversionError, match="froze axis 0 of input input_ids at 2: the artifact would answer at"):
        make("onnx", bert, tmp_path)


def test_weights_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxscript's rewrite rules are module globals that remember the last graph they saw, and with it all weights."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps every log record, and what
    # torch logs holds the model
    model = loaded(tiny.ROWS["bert"], tmp_path / "model")
    example = probes.export_example(model.facts, model.encode)
    (tmp_path / "onnx").mkdir()
    converter.convert(model.module, example, model.facts, tmp_path / "onnx")
    weight = weakref.ref(next(model.module.parameters()))
    storage = weakref.ref(model.module)
    del model, example
    gc.collect()
    assert storage() is None and weight() is None


# -- what attention answers over nothing -------------------------------------------------------------------------------


def test_a_decoder_over_a_fully_masked_encoder_row(t5: tuple[Loaded, Artifact]) -> None:
    """transformers.exporters would answer zeros there, PyTorch's T5 weighs all of the padding alike (off by 2)."""
    model, artifact = t5
    rows = batch(model.facts, [9, 5, 7])
    rows["input_ids"][1], rows["attention_mask"][1] = model.facts.pad_id, 0
    reference = forward.call(model.module, rows)
    for name, answer in ask(artifact, rows).items():
        np.testing.assert_allclose(answer, reference[name], **CLOSE)


def test_a_mask_of_minus_infinity_still_answers_zeros(tmp_path: Path) -> None:
    """There PyTorch answers zeros, and a plain softmax over nothing would be NaN."""

    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = transformers.BertConfig(vocab_size=40)
            self.embed = torch.nn.Embedding(40, 16)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
            state = self.embed(input_ids).unsqueeze(1)
            bias = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, -torch.inf)[:, None, None, :]
            mixed = torch.nn.functional.scaled_dot_product_attention(state, state, state, attn_mask=bias)
            return {"last_hidden_state": mixed.squeeze(1)}

    from tests.test_probes import facts

    module = Attention().eval().requires_grad_(False)
    ids = np.random.default_rng(0).integers(0, 40, (2, 7))
    rows = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    known = facts(task="feature-extraction", inputs=tuple(rows))
    converter.convert(module, rows, known, tmp_path)
    rows["attention_mask"][1] = 0
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, rows)
    expected = module(**{name: torch.tensor(array) for name, array in rows.items()})["last_hidden_state"].numpy()
    assert not expected[1].any()
    np.testing.assert_allclose(answer, expected, **CLOSE)

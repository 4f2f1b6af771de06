"""Public bug reports on shapes, tracing and control flow (A), and on size and files (E): what we answer instead.

Each was reproduced with a tiny model on the exporters we build on; each has a test here or elsewhere:

| report | what goes wrong | test |
|---|---|---|
| O-01 | Longformer: windows frozen | test_architectures.py::test_refused_by_name[longformer] |
| O-02 | Funnel: pooling positions frozen | test_architectures.py::test_refused_by_name[funnel] |
| O-03 | LongT5: number of global blocks frozen | test_o03_longt5_is_never_silently_wrong |
| O-04 | example of length 1, grouped-query attention | test_o04_*; test_probes.py::test_export_example* |
| O-05 | nn.TransformerEncoder in a custom head | test_o05_transformer_encoder |
| O-06 | traced without a mask | test_o06_the_mask_is_always_an_input |
| O-07 | DeBERTa's relative positions frozen | test_o07_both_sides_of_the_buckets; test_architectures.py[deberta] |
| O-08 | length limit not told | test_o08_the_true_limit_is_published; test_source.py::test_true_limit_of_roberta |
| O-25 | tied weights stored twice | test_onnx.py::test_o25_o26_every_shared_weight_once |
| O-26 | ALBERT's layers stored once each | test_onnx.py::test_o25_o26_every_shared_weight_once[albert] |
| O-27 | past 2 GB | test_onnx.py::test_o27_no_step_needs_the_weights_inside_the_model |
| O-28 | absolute path of the weights | test_onnx.py::test_o28_moved_and_opened_from_elsewhere |

The other architectures of that sweep are rows of test_architectures.py. B is test_bugs_inputs.py, C
test_bugs_reference.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from nlpconvert import forward, pipeline, probes, profiles
from nlpconvert.artifact import Artifact
from nlpconvert.convert import onnx as onnx_converter
from nlpconvert.convert import torchscript
from nlpconvert.inputs import case_axes
from nlpconvert.source import Loaded
from tests import tiny
from tests.asking import CLOSE, ask, batch, loaded, make
from tests.test_probes import facts

MISTRAL = tiny.Tiny(
    "mistral",
    "MistralForCausalLM",
    "MistralConfig",
    {**tiny.S, "num_key_value_heads": 2, "sliding_window": 4, "max_position_embeddings": 64, **tiny.PADS},
)
LONGT5 = tiny.Tiny(
    "longt5",
    "LongT5ForConditionalGeneration",
    "LongT5Config",
    {
        "vocab_size": 120,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 4,
        "local_radius": 4,
        "global_block_size": 4,
        "encoder_attention_type": "transient-global",
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    factor=1.0,
)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Artifact, Artifact]:
    """Grouped-query attention and a window of 4: the model, its TorchScript and its ONNX artifact."""
    folder = tmp_path_factory.mktemp("mistral")
    model = loaded(MISTRAL, folder / "model")
    return model, make("torchscript", model, folder / "torchscript"), make("onnx", model, folder / "onnx")


@pytest.mark.slow
def test_o03_longt5_is_never_silently_wrong(tmp_path: Path) -> None:
    """Made at 7 tokens, both artifacts open and run; what they answer at 9, 23, 33 and 40 is not PyTorch's."""
    model = tiny.save(LONGT5, tmp_path / "model")
    options = pipeline.Options(keep_going=True)
    outcomes = pipeline.run(str(model), tmp_path / "out", to=["torchscript", "onnx"], options=options)
    model_facts = loaded(LONGT5, tmp_path / "again").facts
    lengths = {case_axes(case)["sequence"] for case in probes.probe_cases(model_facts, None)}
    assert {9, 23, 33, 40} <= lengths and {3, 4, 5} <= lengths
    for outcome in outcomes:
        assert outcome.status in ("agrees", "drift", "failed"), outcome
        assert outcome.status == "agrees" or outcome.exit_code in (1, 3)
    assert [outcome.status for outcome in outcomes] == ["drift", "drift"]


@pytest.mark.parametrize("rows", [[1], [9, 4, 6], [1, 1], [33]], ids=str)
@pytest.mark.parametrize("step", ["torchscript", "onnx"])
def test_o04_grouped_query_attention(step: str, rows: list[int], mistral: tuple[Loaded, Artifact, Artifact]) -> None:
    model, artifact = mistral[0], mistral[1 if step == "torchscript" else 2]
    asked = batch(model.facts, rows)
    np.testing.assert_allclose(ask(artifact, asked)["logits"], forward.call(model.module, asked)["logits"], **CLOSE)


def test_o04_an_example_of_length_1_is_why(mistral: tuple[Loaded, Artifact, Artifact], tmp_path: Path) -> None:
    """Were the example 1x1, the trace would serve that length only; and ours is never that short."""
    model = mistral[0]
    example = probes.export_example(model.facts, model.encode)
    assert all(min(array.shape) >= 2 for array in example.values())
    made = torchscript.convert(model.module, batch(model.facts, [1]), model.facts, tmp_path)
    short = dataclasses.replace(mistral[1], path=tmp_path / made.file)
    asked = batch(model.facts, [9, 4, 6])
    reference = forward.call(model.module, asked)["logits"]
    try:
        answer = ask(short, asked)["logits"]
    except RuntimeError as error:
        assert "size" in str(error)
    else:
        assert answer.shape != reference.shape or np.abs(answer - reference).max() > 0.1


class CustomHead(torch.nn.Module):
    """Embedding, nn.TransformerEncoder with a padding mask, Linear."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.embedding = torch.nn.Embedding(120, 32)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        return {"logits": self.head(state)}


@pytest.mark.parametrize("step", ["torchscript", "onnx"])
def test_o05_transformer_encoder(step: str, tmp_path: Path) -> None:
    """PyTorch's fast path and its nested tensors block the older exporter; real tokens must come out right."""
    torch.manual_seed(0)
    module = tiny.scale(CustomHead(), 2.0).eval().requires_grad_(False)
    known = facts("token-classification", inputs=("input_ids", "attention_mask"), vocab_size=120, max_length=None)
    example = probes.export_example(known, None)
    converter = torchscript if step == "torchscript" else onnx_converter
    made = converter.convert(module, example, known, tmp_path)
    artifact = Artifact(
        step, tmp_path / made.file, step, "float32", known.task, made.inputs, made.outputs, {}, "source", ""
    )
    for lengths in ([1], [9, 4, 6], [33, 2]):
        asked = batch(known, lengths)
        reference = forward.call(module, asked)["logits"]
        real = asked["attention_mask"] == 1
        np.testing.assert_allclose(ask(artifact, asked)["logits"][real], reference[real], **CLOSE)


@pytest.mark.parametrize("name", [row.name for row in tiny.TINY if row.name not in ("longformer", "funnel")])
def test_o06_the_mask_is_always_an_input(name: str, tmp_path: Path) -> None:
    model = loaded(tiny.ROWS[name], tmp_path)
    assert "attention_mask" in model.facts.inputs
    example = probes.export_example(model.facts, None)
    assert (example["attention_mask"] == 0).any(), "an example without padding may lose the mask"


@pytest.mark.parametrize("step", [1, 2])
def test_o06_a_padded_row_answers_as_alone(step: int, mistral: tuple[Loaded, Artifact, Artifact]) -> None:
    facts, artifact = mistral[0].facts, mistral[step]
    padded, alone = (ask(artifact, batch(facts, lengths))["logits"][0] for lengths in ([5, 23], [5]))
    np.testing.assert_allclose(padded[:5], alone, **CLOSE)


def test_o07_both_sides_of_the_buckets(tmp_path: Path) -> None:
    """DeBERTa-v2 with 8 position buckets: a trace of 7 tokens, asked at 1 to 64."""
    model = loaded(tiny.ROWS["deberta-v2"], tmp_path / "model")
    artifact = make("torchscript", model, tmp_path / "torchscript")
    for length in (1, 7, 8, 9, 16, 17, 63, 64):
        asked = batch(model.facts, [length, max(length // 2, 1)])
        np.testing.assert_allclose(ask(artifact, asked)["logits"], forward.call(model.module, asked)["logits"], **CLOSE)
    asked = {case_axes(case)["sequence"] for case in probes.probe_cases(model.facts, None)}
    assert {7, 8, 9, 64} <= asked


@pytest.mark.parametrize(("asked_for", "length"), [(16, 16), (-1, 64), (200, 64)])
def test_o07_deberta_is_traced_at_the_reach_of_its_positions(asked_for: int, length: int, tmp_path: Path) -> None:
    """The first DeBERTa computes how far it looks in Python, at most max_relative_positions (-1: the limit)."""
    model = loaded(tiny.ROWS["deberta"], tmp_path, max_relative_positions=asked_for)
    assert model.facts.trace_length == length
    example = probes.export_example(model.facts, None, least=length)
    assert length <= example["input_ids"].shape[1] <= 64
    assert loaded(tiny.ROWS["deberta-v2"], tmp_path / "v2").facts.trace_length == 0


def test_o08_the_true_limit_is_published(tmp_path: Path) -> None:
    """RoBERTa counts positions from its pad id on: of 40 embeddings 38 are left."""
    model = loaded(tiny.ROWS["roberta"], tmp_path / "model", max_position_embeddings=40)
    artifact = make("onnx", model, tmp_path / "onnx")
    said = {each.key: each.value for each in onnx.load(str(artifact.path), load_external_data=False).metadata_props}
    assert said["nlpconvert.max_length"] == "38"
    axes = profiles.dynamic_axes(spec.shape for spec in artifact.inputs)
    profile = profiles.choose(None, None, None, axes, model.facts.max_length)
    assert dict(profile.max)["sequence"] == 38
    asked = batch(model.facts, [38, 5])
    np.testing.assert_allclose(ask(artifact, asked)["logits"], forward.call(model.module, asked)["logits"], **CLOSE)
    assert max(case_axes(case)["sequence"] for case in probes.probe_cases(model.facts, None)) == 38

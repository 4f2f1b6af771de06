"""training/graph, operators, gathers: the gradient graph's names and axes, what it carries, what is taken out."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

from nlpconvert.training import gathers, graph, operators
from tests import tiny
from tests.training.objectives import loaded, odd


def kinds(made: graph.GradientGraph) -> list[str]:
    return [node.op_type for node in made.model.graph.node]


def test_names_and_axes_are_derived(fixtures_dir: Path) -> None:
    objective = loaded(fixtures_dir / "t5-seq2seq")
    vocabulary = objective.model.config.vocab_size
    model = graph.trace(objective)
    axes = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
        if not value.name.startswith(graph.PREFIX)
    }
    assert axes == {
        "input_ids": ["batch", "sequence"],
        "attention_mask": ["batch", "sequence"],
        "decoder_input_ids": ["batch", "decoder_sequence"],
        "decoder_attention_mask": ["batch", "decoder_sequence"],
        "labels": ["batch", "decoder_sequence"],
        "dropout": [],
        "loss": [],
        "logits": ["batch", "decoder_sequence", vocabulary],
    }
    assert [(each.domain, each.version) for each in model.opset_import] == [("", graph.OPSET)]


def test_the_graph_carries_no_weights(fixtures_dir: Path) -> None:
    """So it stays far below the 2 GB of a protobuf, whatever the model's size, and no copy of the weights is made."""
    objective = loaded(fixtures_dir / "gpt2-lm")
    made = graph.build(objective, (gathers.take_out,))
    weights = sum(each.numel() for each in objective.parameters_trained.values()) * 4
    assert made.model.ByteSize() < weights / 5
    assert sum(len(each.raw_data) for each in made.model.graph.initializer) < 4096
    inputs = {each.name for each in made.model.graph.input}
    assert {graph.PREFIX + name for name in objective.parameters_trained} <= inputs
    assert made.model.ir_version <= graph.IR_VERSION


def test_the_module_is_left_as_it_was(fixtures_dir: Path) -> None:
    """The exporter leaves the flag of the outermost module on all of them; ours are on and off as before."""
    objective = loaded(fixtures_dir / "t5-seq2seq")
    objective.model.encoder.train()
    before = {name: part.training for name, part in objective.named_modules()}
    assert len(set(before.values())) == 2
    graph.trace(objective)
    assert {name: part.training for name, part in objective.named_modules()} == before
    assert objective.model.config._attn_implementation == "sdpa"


def test_there_is_one_gradient_for_each_parameter(fixtures_dir: Path) -> None:
    objective = loaded(fixtures_dir / "bert-text-classifier")
    made = graph.build(objective)
    assert set(made.gradients) == set(objective.parameters_trained)
    assert made.model.graph.output[0].name == "loss"
    assert {each.name for each in made.model.graph.output} == {"loss", *made.gradients.values()}


# -- GatherGrad --------------------------------------------------------------------------------------------------------


def test_gathers_are_taken_out(fixtures_dir: Path) -> None:
    objective = loaded(fixtures_dir / "bert-text-classifier")
    whole, made = graph.build(objective), graph.build(objective, (gathers.take_out,))
    assert kinds(made).count("GatherGrad") == kinds(whole).count("GatherGrad") - 3
    left = [node for node in made.model.graph.node if node.op_type == "GatherGrad"]
    assert {onnx.helper.get_node_attr_value(node, "axis") for node in left} == {1}  # of a state, not of a table
    tables = {f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")}
    assert {scatter.parameter for scatter in made.scatters} == tables
    assert set(whole.gradients) - set(made.gradients) == tables
    outputs = {each.name for each in made.model.graph.output}
    assert {scatter.values for scatter in made.scatters} <= outputs
    assert not outputs & {whole.gradients[name] for name in tables}


def test_a_table_that_is_tied_to_the_head_keeps_the_heads_share(fixtures_dir: Path) -> None:
    made = graph.build(loaded(fixtures_dir / "gpt2-lm"), (gathers.take_out,))
    assert sorted(scatter.parameter for scatter in made.scatters) == [
        "transformer.wpe.weight",
        "transformer.wte.weight",
    ]
    assert "transformer.wte.weight" in made.gradients
    assert "transformer.wpe.weight" not in made.gradients


def test_a_table_that_is_read_twice(tmp_path: Path) -> None:
    made = graph.build(loaded(tiny.save(tiny.ROWS["bart"], tmp_path / "model")), (gathers.take_out,))
    of_shared = [scatter for scatter in made.scatters if scatter.parameter == "model.shared.weight"]
    assert sorted(scatter.indices for scatter in of_shared) == ["decoder_input_ids", "input_ids"]
    assert "GatherGrad" not in kinds(made)


# -- what is checked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "unsure"),
    [
        ([["batch", "8"], ["8"]], False),
        ([["unk__1", "8"], ["unk__1", "8"]], False),
        ([["unk__1", "8"], ["8"]], False),
        ([["unk__1", "8"], ["1", "8"]], False),
        ([["unk__1", "8"], ["batch", "8"]], True),
        ([["unk__1"], ["unk__2"]], True),
        ([["batch"], ["sequence"]], False),
        ([[], ["unk__1"]], False),
    ],
)
def test_axes_of_unknown_size(shapes: list[list[str]], unsure: bool) -> None:
    assert operators._may_differ(shapes) is unsure


def test_a_where_of_equal_shapes_is_taken() -> None:
    objective = odd(lambda state: torch.where(state > 0, state, 0.1 * state))
    assert "Where" in kinds(graph.build(objective))


def test_the_runtime_says_nothing(fixtures_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    graph.build(loaded(fixtures_dir / "bert-text-classifier"), (gathers.take_out,))
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_every_node_has_a_path_to_be_named_by(fixtures_dir: Path) -> None:
    model = graph.trace(loaded(fixtures_dir / "bert-text-classifier"))
    (loss,) = [node for node in model.graph.node if node.op_type == "SoftmaxCrossEntropyLoss"]
    assert onnx.helper.get_node_attr_value(loss, "ignore_index") == -100
    assert any(node.name.startswith("/model/bert/encoder/layer.0/attention/self/") for node in model.graph.node)

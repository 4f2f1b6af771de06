"""What ONNX Runtime's tools for training get wrong, most of it without a word: each fault is really there.

Either building refuses with the reason, or the verdict on the gradients names the parameter. Where building refuses,
the guard is taken away as well, to see that what it keeps out is wrong.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from nlpconvert.errors import ConversionError, DriftError
from nlpconvert.training import Batch, gathers, gradients, graph, losses, operators
from nlpconvert.training.eager import EagerEngine
from nlpconvert.training.graph import GradientGraph
from nlpconvert.training.losses import Objective
from nlpconvert.training.ort import OrtEngine
from nlpconvert.validators import metrics
from tests import tiny
from tests.training.objectives import judged, loaded, maker, odd, scale

POSITIONS = "bert.embeddings.position_embeddings.weight"


def wrong(objective: Objective, batch: Batch | None = None, **keywords: Any) -> dict[str, str]:
    """What the verdict says of each parameter that is wrong; the verdict raises."""
    verdict = judged(objective, batch, **keywords)
    with pytest.raises(DriftError, match="nothing was trained: train with --engine torch"):
        gradients.require(verdict)
    return {row.name: row.problem for row in verdict.rows if row.problem}


# -- shapes ------------------------------------------------------------------------------------------------------------


def onnx_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """onnx's own inference: with batch and length both dynamic it does not see that positions are repeated."""
    return onnx.shape_inference.infer_shapes(model)


def test_shapes_of_onnxs_own_inference_are_refused(fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "infer", onnx_shapes)
    with pytest.raises(
        ConversionError, match=r"the shapes at Add \(at /model/bert/embeddings/Add_1 and .* not be told"
    ):
        judged(loaded(fixtures_dir / "bert-text-classifier"))


WITHOUT_THE_GUARD = """
import sys
from pathlib import Path
from nlpconvert.training import graph, operators
from tests.training.objectives import judged, loaded
from tests.training.test_traps import onnx_shapes

graph.infer = onnx_shapes
operators.check = lambda *_: None
objective = loaded(Path(sys.argv[1]))
verdict = judged(objective, objective.example(rows=3, tokens=7), hooks=())
print(*(f"{row.name}: {row.problem}" for row in verdict.rows if row.problem), sep="\\n", flush=True)
"""


def test_what_they_would_lead_to(fixtures_dir: Path) -> None:
    """In a process of its own, as memory past a buffer is written: it ends with a wrong gradient, or with a crash."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_GUARD, str(fixtures_dir / "bert-text-classifier")],
        capture_output=True,
        text=True,
        check=False,
    )
    said = dict(line.split(": ", 1) for line in ended.stdout.splitlines() if ": " in line)
    assert POSITIONS in said or ended.returncode < 0, ended.stderr[-500:]


@pytest.mark.parametrize("attention", ["fused", "plain"])
def test_a_where_that_broadcasts(fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    objective = loaded(fixtures_dir / "t5-seq2seq")
    assert objective.model.config._attn_implementation == "sdpa"
    if attention == "plain":
        assert judged(objective).agrees
        assert objective.model.config._attn_implementation == "sdpa"
        return
    monkeypatch.setattr(graph, "_eager_attention", lambda model: contextlib.nullcontext())
    with pytest.raises(ConversionError, match=r"gradient of Where is wrong where it broadcasts, as Where \(at /model/"):
        judged(objective)


def test_what_the_where_would_lead_to(fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_eager_attention", lambda model: contextlib.nullcontext())
    monkeypatch.setattr(operators, "check", lambda *_: None)
    with pytest.raises((ConversionError, DriftError)):
        gradients.require(judged(loaded(fixtures_dir / "t5-seq2seq")))


# -- operators ---------------------------------------------------------------------------------------------------------

ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "CumSum": lambda state: state.cumsum(1),
    "Einsum": lambda state: torch.einsum("bsh,bsh->bsh", state, state),
    "Softplus": torch.nn.functional.softplus,
    "Elu": torch.nn.functional.elu,
    "ReduceMax": lambda state: state - state.amax(dim=-1, keepdim=True),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_operator_without_a_gradient_is_named(kind: str) -> None:
    with pytest.raises(
        ConversionError, match=rf"has no gradient for {kind} \(at /model/{kind}\): train with --engine torch"
    ):
        judged(odd(ODD[kind]))


def test_all_that_are_missing_are_named_at_once() -> None:
    with pytest.raises(
        ConversionError, match=r"no gradient for CumSum \(at .*\), Elu \(at .* and 1 more\) and Softplus \("
    ):
        elu = torch.nn.functional.elu
        judged(odd(lambda state: torch.nn.functional.softplus(elu(elu(state.cumsum(1))))))


def test_one_that_the_loss_does_not_flow_through_is_none() -> None:
    assert judged(odd(lambda state: state * state.detach().amax().gt(-1e9))).agrees


def test_an_operator_whose_gradient_cannot_be_run_here() -> None:
    kernel = torch.ones(8, 8, 1)
    objective = odd(lambda state: torch.nn.functional.conv_transpose1d(state.transpose(1, 2), kernel).transpose(1, 2))
    with pytest.raises(ConversionError, match=r"ConvTranspose.*train with --engine torch"):
        judged(objective)


@pytest.mark.parametrize("kind", ["LayerNormalization", "Dropout"])
def test_operators_that_do_not_save_what_their_gradient_reads(
    classifier: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def drop(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == kind:
                del node.output[1:]

    monkeypatch.setattr(graph, "_save_statistics", drop)
    with pytest.raises(ConversionError, match=r"gradient builder .* failed"):
        judged(loaded(classifier))


def test_dropout_off_by_its_own_switch(fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass heeds the switch and the gradient does not: what it gives is scaled by 1 / (1 - share)."""

    def by_the_switch(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            if node.op_type == "Dropout":
                node.input[2] = "off"
        off = onnx.numpy_helper.from_array(np.array(False), "off")
        model.graph.initializer.append(off)

    monkeypatch.setattr(graph, "_ask_for_dropout", by_the_switch)
    said = wrong(loaded(fixtures_dir / "gpt2-lm"))
    assert "transformer.wte.weight" in said
    assert "loss" not in said


def test_the_row_of_the_padding_token(tmp_path: Path) -> None:
    """PyTorch leaves its gradient at 0, ONNX Runtime's GatherGrad does not; a decoder of Marian starts with it."""
    objective = loaded(tiny.save(tiny.ROWS["marian"], tmp_path / "model"))
    batch = objective.example()
    batch.inputs["decoder_input_ids"][:, 0] = objective.facts.pad_id
    assert judged(objective, batch).agrees
    said = wrong(objective, batch, hooks=())
    assert list(said) == ["model.shared.weight"]
    assert f"worst at [{objective.facts.pad_id}, " in said["model.shared.weight"]


def test_layers_that_are_skipped_at_random(tmp_path: Path) -> None:
    objective = loaded(tiny.save(tiny.ROWS["bart"], tmp_path / "model", decoder_layerdrop=0.5))
    with pytest.raises(ConversionError, match=r"decoder_layerdrop 0\.5 in config\.json.*set it to 0"):
        judged(objective)


# -- what a hand can do to a graph -------------------------------------------------------------------------------------

KEY, VALUE = (f"bert.encoder.layer.0.attention.self.{name}.weight" for name in ("key", "value"))


def test_a_gradient_that_a_hook_scales(classifier: Path) -> None:
    said = wrong(loaded(classifier), hooks=(gathers.take_out, scale(KEY, 1.0001)))
    assert list(said) == [KEY]
    assert "off by 0.01% of its size" in said[KEY]


def test_gradients_in_each_others_place(classifier: Path) -> None:
    def swap(made: GradientGraph) -> None:
        made.gradients[KEY], made.gradients[VALUE] = made.gradients[VALUE], made.gradients[KEY]

    assert set(wrong(loaded(classifier), hooks=(gathers.take_out, swap))) == {KEY, VALUE}


def test_a_weight_in_anothers_place(classifier: Path) -> None:
    def swap(made: GradientGraph) -> None:
        other = {graph.PREFIX + KEY: graph.PREFIX + VALUE, graph.PREFIX + VALUE: graph.PREFIX + KEY}
        for node in made.model.graph.node:
            for place, name in enumerate(node.input):
                node.input[place] = other.get(name, name)

    said = wrong(loaded(classifier), hooks=(gathers.take_out, swap))
    assert {KEY, VALUE, "loss"} <= set(said)


def test_a_weight_that_is_not_the_parameters(classifier: Path) -> None:
    """As an engine would have it that kept a copy of the weights."""
    objective = loaded(classifier)
    stale = objective.parameters_trained[KEY].detach().numpy().copy()

    def keep(made: GradientGraph) -> None:
        proto = made.model.graph
        for node in proto.node:
            for place, name in enumerate(node.input):
                node.input[place] = "stale" if name == graph.PREFIX + KEY else name
        proto.initializer.append(onnx.numpy_helper.from_array(stale, "stale"))

    engine = OrtEngine(objective, threads=1, hooks=(gathers.take_out, keep))
    reference = EagerEngine(objective)
    assert gradients.verify(engine, reference, objective.example()).agrees
    with torch.no_grad():
        objective.parameters_trained[KEY].mul_(1.01)
    assert not gradients.verify(engine, reference, objective.example()).agrees


def lose(made: GradientGraph) -> None:
    node = maker(made, made.gradients[KEY])
    made.model.graph.node.remove(node)


def lose_output(made: GradientGraph) -> None:
    kept = [each for each in made.model.graph.output if each.name != made.gradients[KEY]]
    del made.model.graph.output[:]
    made.model.graph.output.extend(kept)


def forget(made: GradientGraph) -> None:
    del made.gradients[KEY]


def lose_loss(made: GradientGraph) -> None:
    maker(made, "loss").output[0] = "elsewhere"


def lose_scatter(made: GradientGraph) -> None:
    gathers.take_out(made)
    kept = [each for each in made.model.graph.output if each.name != made.scatters[0].values]
    del made.model.graph.output[:]
    made.model.graph.output.extend(kept)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (lose, f"after the hook lose the graph does not give model.{KEY}_grad, the gradient of {KEY}"),
        (lose_output, f"after the hook lose_output the graph does not give model.{KEY}_grad"),
        (forget, f"after the hook forget nothing holds the gradient of {KEY}"),
        (lose_loss, "after the hook lose_loss the graph has no loss"),
        (lose_scatter, "after the hook lose_scatter the graph does not give .*, part of bert.embeddings"),
    ],
)
def test_a_hook_that_breaks_the_graph(classifier: Path, hook: graph.Hook, said: str) -> None:
    with pytest.raises(ConversionError, match=said):
        judged(loaded(classifier), hooks=(hook,))


def test_a_hook_that_makes_a_graph_that_cannot_be_run(classifier: Path) -> None:
    def spoil(made: GradientGraph) -> None:
        maker(made, made.gradients[KEY]).op_type = "NoSuchOperator"

    with pytest.raises(ConversionError, match=r"cannot run the gradient graph: .*NoSuchOperator"):
        judged(loaded(classifier), hooks=(spoil,))


# -- losses ------------------------------------------------------------------------------------------------------------


def test_labels_that_are_shifted_twice(fixtures_dir: Path) -> None:
    objective = loaded(fixtures_dir / "gpt2-lm")
    row = objective._row

    def twice(answers: losses.Tensors, labels: losses.Tensors) -> torch.Tensor:
        shifted = torch.nn.functional.pad(labels["labels"][:, 1:], (0, 1), value=metrics.IGNORED)
        return row.loss(answers, {"labels": shifted})

    objective._row = SimpleNamespace(**{**vars(row), "loss": twice})  # type: ignore[assignment]
    engine = OrtEngine(objective, threads=1)
    objective._row = row
    verdict = gradients.verify(engine, EagerEngine(objective), objective.example())
    said = {row.name for row in verdict.rows if row.problem}
    assert {"loss", "transformer.wte.weight"} <= said

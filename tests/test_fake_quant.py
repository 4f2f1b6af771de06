"""The model that is trained computes what ONNX Runtime computes of the artifact, before training and after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nlpconvert import source
from nlpconvert.artifact import Artifact
from nlpconvert.backends import onnxruntime as backend
from nlpconvert.convert import derived, optimize, retrained, static_int8
from nlpconvert.errors import ConversionError, DriftError, UsageError
from nlpconvert.models import OutputRow
from nlpconvert.recipe import Recipe
from nlpconvert.training import distil
from nlpconvert.training.fake_quant import FakeQuantized, quantized_layers, rounded
from tests import asking
from tests.test_qdq import Model, model_of  # noqa: F401  # the models that its files are made of

SAME = 1e-5
"""Relative difference of a layer in two float32 computations; a value that is rounded otherwise moves one row."""


@pytest.fixture
def student_of(model_of: Callable[[str], Model]) -> Iterator[Callable[..., tuple[Model, FakeQuantized, Recipe]]]:  # noqa: F811
    made: list[FakeQuantized] = []

    def get(name: str, level: int = 0, activation: str = "int8", largest: int = 127) -> Any:
        model = model_of(name)
        recipe = model.recipe(level, activation, largest)
        made.append(FakeQuantized(source.load(str(model.directory / "model")).module, recipe))
        return model, made[-1], recipe

    yield get
    for each in made:
        each.close()


def layers_apart(
    model: Model, student: FakeQuantized, made: Recipe, path: Path, base: Artifact | None = None
) -> dict[str, float]:
    """By layer, how far its answers in PyTorch are from ONNX Runtime's on the same input: the median row's difference
    over the root mean square of all."""
    names = {layer.name for layer in quantized_layers(made)}
    inner = retrained.values(derived.load(replace(model.parent, path=path)).graph)
    places = retrained.places(derived.load(base or model.parent).graph, names)
    places = [each for each in places if each.input in inner and each.output in inner]
    wanted = sorted({name for each in places for name in (each.input, each.output)})
    tapped = derived.tap(path, model.directory / "tapped-student", wanted)
    session = backend.open_file(tapped, threads=1, data=path.parent)
    values = session.tap(asking.batch(model.facts, [7, 3, 12]), wanted)
    session.close()
    found = {}
    for each in places:
        reference, candidate = values[each.output], student.layer(each.layer, values[each.input], each.biased)
        moved = np.abs(candidate - reference).max(-1)
        found[each.layer] = float(np.median(moved) / np.sqrt(np.square(reference).mean()))
    return found


# -- the simulation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "level", "activation", "largest"),
    [
        ("bert", 0, "int8", 127),
        ("bert", 1, "uint8", 63),
        ("gpt2", 0, "int8", 127),
        pytest.param("albert", 1, "int8", 127, marks=pytest.mark.slow),
    ],
)
def test_every_layer_is_what_onnx_runtime_computes(
    name: str, level: int, activation: str, largest: int, student_of: Callable[..., Any]
) -> None:
    """Signed and unsigned activations, channels apart, layers that share a weight, weights stored the other way."""
    model, student, made = student_of(name, level, activation, largest)
    apart = layers_apart(model, student, made, model.file(level, activation, largest))
    assert len(apart) >= 0.9 * len(quantized_layers(made)) and max(apart.values()) < SAME


def test_layers_of_a_fused_graph(student_of: Callable[..., Any], tmp_path: Path) -> None:
    """Where a bias went into a fused node, the product is compared without it."""
    model, student, made = student_of("bert", 1, "uint8", 127)
    fused = optimize.convert(model.parent, tmp_path, target="cpu")
    base = replace(model.parent, path=tmp_path / fused.file)
    program = derived.load(base)
    static_int8.apply(program.graph, made)
    (tmp_path / "made").mkdir()
    derived.write(program, model.parent, tmp_path / "made")
    apart = layers_apart(model, student, made, tmp_path / "made" / "model.onnx", base)
    assert len(apart) >= 0.6 * len(quantized_layers(made)) and max(apart.values()) < SAME


def test_what_was_trained_is_what_is_written(student_of: Callable[..., Any], tmp_path: Path) -> None:
    """Every number moved, mean inputs looked at: recipe and weights make a file that computes the student's layers."""
    model, student, made = student_of("bert", 1)
    before = student.trained()
    assert retrained.present(derived.load(model.parent).graph, before) == set(before)
    student.center([asking.batch(model.facts, [9, 4]), asking.batch(model.facts, [20])])
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [*student.weights(), *(each for each, _ in student.scales())]:
            size = parameter.square().mean().sqrt().clamp_min(0.01)
            parameter += 0.03 * size * torch.randn(parameter.shape, generator=generator)
    program = derived.load(model.parent)
    retrained.put(program.graph, before, student.trained())
    trained = student.recipe()
    static_int8.apply(program.graph, trained)
    derived.write(program, model.parent, tmp_path)
    apart = layers_apart(model, student, trained, tmp_path / "model.onnx")
    assert len(apart) >= 0.9 * len(quantized_layers(made)) and max(apart.values()) < SAME
    moved = layers_apart(model, student, trained, model.file(1))
    assert min(moved.values()) > 100 * SAME  # and the file before it is another
    batch = asking.batch(model.facts, [12, 5, 30])
    session = backend.open_file(tmp_path / "model.onnx", threads=1)
    given, simulated = session.run(batch)["logits"], student.run(batch)["logits"]
    reference = student.reference({name: torch.from_numpy(array) for name, array in batch.items()})["logits"].numpy()
    assert np.abs(simulated - given).max() < 0.5 * np.abs(given - reference).max()


def test_what_was_not_trained_is_the_recipe_to_the_bit(student_of: Callable[..., Any]) -> None:
    _, student, made = student_of("bert", 1)
    again = student.recipe()
    for name, site in made.sites.items():
        np.testing.assert_array_equal(again.sites[name].shift, site.shift)
        np.testing.assert_array_equal(again.sites[name].multiplier, site.multiplier)
        assert again.sites[name].scale == pytest.approx(site.scale, rel=1e-7)
    for before, after in zip(made.layers, again.layers, strict=True):
        if before.bias is not None:
            np.testing.assert_array_equal(after.bias, before.bias)


def test_looking_at_the_mean_moves_nothing_and_holds_it(student_of: Callable[..., Any]) -> None:
    """Before training the answers are the same; when weights move, what rounding moves on average stays taken off."""
    model, student, made = student_of("bert")
    batch = asking.batch(model.facts, [7, 12])
    before = student.run(batch)["logits"]
    student.center([batch])
    np.testing.assert_array_equal(student.run(batch)["logits"], before)
    name = quantized_layers(made)[0].name
    layer: Any = student.layers[name.replace(".", "/")]
    (site,) = layer._site
    with torch.no_grad():
        exact = (site.mean - site.shift) @ layer.weight
        first = site.middle() @ layer._rounded() - torch.tensor(layer.taken_off()) - exact
        layer.weight += 0.05 * layer.weight.square().mean().sqrt() * torch.randn(layer.weight.shape)
        exact = (site.mean - site.shift) @ layer.weight
        after = site.middle() @ layer._rounded() - torch.tensor(layer.taken_off()) - exact
    torch.testing.assert_close(after, first, rtol=0, atol=1e-5)


def test_the_model_answers_as_itself_meanwhile_and_afterwards(student_of: Callable[..., Any]) -> None:
    model, student, _ = student_of("bert")
    batch = {name: torch.from_numpy(array) for name, array in asking.batch(model.facts, [7, 12]).items()}
    fresh = source.load(str(model.directory / "model")).module
    with torch.no_grad():
        wanted = fresh(**batch)["logits"]
        torch.testing.assert_close(student.reference(batch)["logits"], wanted, rtol=0, atol=0)
        assert (student.answers(batch)["logits"] - wanted).abs().max() > 1e-3
        own = student._model[0]
        student.close()
        torch.testing.assert_close(own(**batch)["logits"], wanted, rtol=0, atol=0)
    assert [name for name, part in own.named_modules() if name and "forward" in vars(part)] == []


# -- rounding ----------------------------------------------------------------------------------------------------------


def test_rounding_is_to_even_and_clipped() -> None:
    values = torch.tensor([0.5, 1.5, -0.5, 2.4, 300.0, -300.0]) * 0.25
    given = rounded(values, torch.tensor(0.25), -128, 127) / 0.25
    assert given.tolist() == [0, 2, 0, 2, 127, -128]


def test_gradients_go_straight_through_and_to_the_scale_as_lsq_has_them() -> None:
    values = torch.tensor([0.3, -1.7, 40.0], requires_grad=True)
    scale = torch.tensor(0.25, requires_grad=True)
    rounded(values, scale, -128, 127).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1, 1, 0]
    inside = [float(np.rint(v / 0.25) - v / 0.25) for v in (0.3, -1.7)]
    assert scale.grad is not None and float(scale.grad) == pytest.approx(sum(inside) + 127, rel=1e-5)


# -- what cannot be trained --------------------------------------------------------------------------------------------


def test_a_layer_that_is_no_module_is_refused(model_of: Callable[[str], Model]) -> None:  # noqa: F811
    model = model_of("bert")
    module, made = source.load(str(model.directory / "model")).module, model.recipe(0)
    first = quantized_layers(made)[0]

    def named(name: str) -> Recipe:
        return replace(made, layers=(replace(first, name=name),))

    with pytest.raises(UsageError, match=r"bert.nowhere is no module of the model"):
        FakeQuantized(module, named("bert.nowhere"))
    with pytest.raises(UsageError, match=r"bert.embeddings.LayerNorm is a LayerNorm, no linear layer"):
        FakeQuantized(module, named("bert.embeddings.LayerNorm"))
    with pytest.raises(UsageError, match="are for 32 channels, not for these"):
        FakeQuantized(module, named("bert.encoder.layer.0.output.dense"))


def test_weights_that_the_graph_does_not_have_are_refused(model_of: Callable[[str], Model]) -> None:  # noqa: F811
    graph = derived.load(model_of("bert").parent).graph
    other = {"bert.encoder.layer.0.output.dense": np.zeros((64, 32), np.float32)}
    assert retrained.present(graph, other) == frozenset()
    with pytest.raises(ConversionError, match=r"no weight bert.encoder.layer.0.output.dense as the checkpoint has it"):
        retrained.put(graph, other, other)


# -- training ----------------------------------------------------------------------------------------------------------


class Line:
    """A student of one matrix that has to become another."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.zeros(4, 3))
        self.target = torch.randn(4, 3)

    def answers(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"out": batch["x"] @ self.weight}

    def reference(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"out": batch["x"] @ self.target}


def drawn() -> Iterator[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    while True:
        yield {"x": random.standard_normal((8, 4)).astype(np.float32)}


SCORE = (OutputRow("out", ("batch", "labels"), "score"),)


def test_training_ends_where_the_score_was_best() -> None:
    student = Line()
    seen: list[torch.Tensor] = []

    def score() -> float:
        seen.append(student.weight.detach().clone())
        return float((seen[-1] - student.target).abs().max()) if len(seen) < 4 else 9.0

    groups = [distil.Group([student.weight], 0.1)]
    found = distil.train(student, groups, drawn(), SCORE, distil.Plan(50, 10), score=score)
    assert [each.step for each in found.scores] == [0, 10, 20, 30, 40, 50] and found.best == 20
    torch.testing.assert_close(student.weight.detach(), seen[2], rtol=0, atol=0)
    assert found.scores[2].score < 0.5 * found.scores[0].score and len(found.losses) == 50


def test_a_loss_that_is_no_number_ends_it_with_the_best_so_far() -> None:
    student = Line()
    batches = drawn()

    def broken() -> Iterator[dict[str, np.ndarray]]:
        for _ in range(5):
            yield next(batches)
        yield {"x": np.full((8, 4), np.nan, np.float32)}

    with pytest.raises(DriftError, match=r"the loss is no number at step 6 of 20 \(loss nan, gradient nan\)"):
        distil.train(
            student, [distil.Group([student.weight], 0.1)], broken(), SCORE, distil.Plan(20, 5),
            score=lambda: float((student.weight.detach() - student.target).abs().max()),
        )  # fmt: skip
    assert torch.isfinite(student.weight).all() and student.weight.abs().max() > 0


def test_distances() -> None:
    reference, candidate = torch.tensor([[2.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    far = distil.distance(OutputRow("o", ("batch", "hidden"), "embedding"), reference, candidate, None)
    torch.testing.assert_close(far, torch.tensor([0.125, 0.0]))
    far = distil.distance(OutputRow("o", ("batch", "vocabulary"), "distribution"), reference, candidate, None)
    p = 1 / (1 + math.exp(-2))
    q = 1 / (1 + math.exp(-1))
    assert float(far[0]) == pytest.approx(p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)), rel=1e-5)
    assert float(far[1]) == 0


def test_padding_has_no_part_in_it() -> None:
    mask = torch.tensor([[True, True, False]])
    reference, candidate = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    candidate[:, :2] = reference[:, :2]
    row = OutputRow("o", ("batch", "sequence", "hidden"), "embedding")
    assert float(distil.distance(row, reference, candidate, mask).abs().max()) < 1e-6
    assert distil.scored(row, {"attention_mask": mask.long()}) is not None
    start = OutputRow("o", ("batch", "sequence"), "position")
    far = distil.distance(start, reference[..., 0], candidate[..., 0], mask)
    assert far.shape == (1,) and float(far.abs().max()) < 1e-6


def test_a_transformers_layers_are_found(model_of: Callable[[str], Model]) -> None:  # noqa: F811
    module = source.load(str(model_of("bert").directory / "model")).module
    assert [type(each).__name__ for each in distil.blocks(module)] == ["BertLayer", "BertLayer"]

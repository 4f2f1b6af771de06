"""Public bug reports on quantization in ONNX (F, and what of H lies in the file): what we answer instead.

| report | what goes wrong | test |
|---|---|---|
| O-29 | pairs of 8-bit products overflow 16 bits without VNNI | test_o29_*; test_search.py::test_o29_* |
| O-30 | a weight of three axes, per channel: the file does not open | test_o30_a_weight_of_three_axes |
| O-31 | mask arithmetic is quantized, scales are infinite | test_o31_*; test_qdq.py::test_every_property_of_the_file |
| O-32 | the calibration's ranges collapse, or are one-sided | test_o32_*; test_integers.py |
| O-33 | nothing is quantized, and nobody says so | test_o33_* |
| O-34 | cosine near 0 at normal norms | test_broken_files_are_seen (the task's measure decides) |
| O-T3 | uint8 activations, Q/DQ on biases, scales of another shape | test_ot3_*; test_qdq.py::test_every_property_* |

Below them, what else could make an int8 file worthless: a broken file, and models that are hard to quantize.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from safetensors.torch import load_file, save_file

from nlpconvert import cli, integers, pipeline, plan, recipe, report
from nlpconvert.artifact import Outcome
from nlpconvert.convert import static_int8
from nlpconvert.integers import INT8, SATURATING, Sampler
from tests import test_qdq, test_search, tiny
from tests.test_fixtures import HOME
from tests.test_qdq import Model, Quantized, asked, drawn, graph_of, recipe_of, rows
from tests.test_verdicts import rehash

quantized = test_search.quantized
model_of = test_qdq.model_of
Outs = Callable[[str], tuple[Path, dict[str, Outcome]]]


# -- O-29: saturation --------------------------------------------------------------------------------------------------


def pairwise(inputs: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, float]:
    """What vpmaddubsw and vpaddd make of uint8 (tokens, channels) and int8 (channels, outputs): two neighbouring
    products are added in 16 bits, saturating; and the share of pairs that saturate."""
    products = inputs.astype(np.int64)[:, :, None] * weights.astype(np.int64)[None]
    pairs = products[:, 0::2] + products[:, 1::2]
    held = np.clip(pairs, -(2**15), 2**15 - 1)
    return held.sum(1), float((held != pairs).mean())


@pytest.mark.parametrize("kind", ["even", "one-sided", "at the limits"])
def test_o29_seven_bit_weights_never_saturate(kind: str) -> None:
    """Full-range ones do; 63 is the largest that never can: 255 * 63 * 2 < 2**15."""
    rng = np.random.default_rng(0)
    sample = rng.standard_normal((64, 48)).astype(np.float32)
    if kind == "one-sided":
        sample = np.maximum(sample, -0.1)
    if kind == "at the limits":
        sample = np.where(rng.random(sample.shape) < 0.5, np.float32(-3), np.float32(3))
    weight = rng.standard_normal((48, 32)).astype(np.float32)
    seen = Sampler(48, 1000)
    seen.add(sample)
    for largest in (INT8, SATURATING):
        prepared = integers.prepare(seen.sample(), weight, largest=largest)
        whole, _ = integers.round_weight(integers.folded(prepared, weight), largest)
        stored = np.rint((sample - prepared.shift) * prepared.multiplier / prepared.scale).clip(-128, 127) + 128
        held, share = pairwise(stored, whole)
        exact = stored.astype(np.int64) @ whole.astype(np.int64)
        assert (share > 0) == (largest == INT8)
        assert np.array_equal(held, exact) == (largest == SATURATING)
    assert 255 * SATURATING * 2 < 2**15 <= 255 * (SATURATING + 2) * 2


def test_o29_the_machine_is_recorded(quantized: Outs) -> None:
    """What the weights' largest integer is, and the processor it was chosen for."""
    _, outcomes = quantized("gpt2-lm")
    for step in ("onnx-int8", "onnx-qdq"):
        artifact = outcomes[step].artifact
        assert artifact is not None
        assert artifact.made_by["largest_weight"] in (127, 63)
        assert "cpu_flags" in artifact.made_by["cpu"]


# -- O-30, O-31, O-32, O-33, O-T3 --------------------------------------------------------------------------------------


def test_o30_a_weight_of_three_axes() -> None:
    """It is left and named, what stands beside it is quantized, and the file opens and runs."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="dense"),
        helper.make_node("Unsqueeze", ["h", "axis"], ["u"]),
        helper.make_node("MatMul", ["u", "heads"], ["y"], name="heads"),
    ]
    weights = {"w": drawn(32, 32), "heads": drawn(3, 32, 16), "axis": np.array([1])}
    x = rows(3)
    reference = asked(graph_of(nodes, 3, **weights), x)
    program = graph_of(nodes, 3, **weights)
    made = recipe_of(program, x)
    assert (made.layer("heads").precision, made.layer("heads").why) == ("float32", "its weight has 3 axes")
    assert made.share == pytest.approx(32 * 32 / (32 * 32 + 3 * 32 * 16))
    static_int8.apply(program.graph, made)
    assert {"heads", "w.int8"} <= set(program.graph.initializers)
    moved = asked(program, x) - reference
    assert 0 < np.sqrt(np.square(moved).mean() / np.square(reference).mean()) < 0.05


def test_o31_the_masks_arithmetic_is_left_alone(model_of: Callable[[str], Model]) -> None:
    """What is computed from the mask, up to the softmax and to what clears a row without a real token."""
    graph = onnx.load(str(model_of("bert").file(0))).graph
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            users.setdefault(name, []).append(node)
    todo, passed, ends = ["attention_mask"], set[str](), set[str]()
    while todo:
        for node in users.get(todo.pop(), []):
            if node.op_type in ("Softmax", "Where", "MatMul"):
                ends.add(node.op_type)
            elif node.output[0] not in passed:
                assert node.op_type not in ("QuantizeLinear", "DequantizeLinear", "Sub"), node.name
                passed.add(node.output[0])
                todo += node.output
    assert len(passed) > 3 and ends and "MatMul" not in ends


def test_o31_padding_changes_no_row(quantized: Outs) -> None:
    """Static scales: a row's answer does not depend on its companions, whatever is padded."""
    _, outcomes = quantized("gpt2-lm")
    for step in ("onnx-qdq", "onnx-int8"):
        verdict = outcomes[step].verdict
        assert verdict is not None and not verdict["rows"]["problems"]
        # A decoder's positions come from the mask: padding at either side is nobody's business, here or in PyTorch.
        found = {each["kind"]: each for each in verdict["rows"]["outputs"]}
        assert {"company", "identical", "permuted", "padding", "padding-left", "repeat"} <= set(found)
        assert sum(each["pairs"] for each in found.values()) > 5
        assert all(each["cosine"] > 0.9999 and not each["own"] for each in found.values()), found


def test_o32_ranges_are_those_of_all_texts(model_of: Callable[[str], Model]) -> None:
    """Neither a percentile nor one-sided: every value that calibration saw lies inside, with a tenth to spare."""
    model = model_of("bert")
    made = model.recipe(0)
    for name, sample in model.static.samples.items():
        site = made.sites[name]
        reach = site.scale * INT8 / site.multiplier
        assert (site.shift + reach >= sample.high).all() and (site.shift - reach <= sample.low).all()
        assert sample.seen > 100


def test_o33_nothing_to_quantize_is_a_failure_with_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A model of layers so narrow that nothing is gained."""
    model = tmp_path / "model"
    narrow = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    tiny.save(tiny.ROWS["bert"], model, **narrow)
    words = ["run", model, "-o", tmp_path / "out", "--to", "onnx-qdq,onnx-int8", "--keep-going"]
    assert cli._main([str(word) for word in words]) == 3
    told = capfd.readouterr().out
    assert (
        "no layer can go to int8: bert.encoder.layer.0.attention.self.query: it has 8 outputs: nothing to gain" in told
    )
    assert not (tmp_path / "out" / "onnx-qdq").exists() and not (tmp_path / "out" / "onnx-int8").exists()


def test_o33_what_is_in_integers_is_counted(quantized: Outs) -> None:
    """Layers and the share of FLOPs, in the manifest and in the file alike."""
    for name in ("gpt2-lm", "bert-text-classifier"):
        _, outcomes = quantized(name)
        for step, activation in (("onnx-qdq", "int8"), ("onnx-int8", "uint8")):
            artifact = outcomes[step].artifact
            assert artifact is not None
            found = Quantized(artifact.path, activation)
            made = recipe.read(artifact.directory / "recipe.json")
            assert len(found.weights) == artifact.made_by["layers"]["int8"] > 0
            assert artifact.made_by["share_of_linear_flops"] == pytest.approx(made.share, abs=1e-3)
            assert made.share > 0.5 and sum(layer.share for layer in made.layers) <= 1 + 1e-6
            assert artifact.made_by["size_over_parent"] < 0.6


def test_the_cpus_file_multiplies_integers_and_is_faster(quantized: Outs, tmp_path: Path) -> None:
    """ONNX Runtime makes a Gemm of a product and the Add behind it, and computes that in floating point whatever stands
    around it: the bias of such a product is subtracted."""
    for name in ("gpt2-lm", "bert-text-classifier"):
        _, outcomes = quantized(name)
        artifact = outcomes["onnx-int8"].artifact
        assert artifact is not None
        products = len(Quantized(artifact.path, "uint8").products)
        assert test_qdq.integer_products(artifact.path, tmp_path) == products


def test_ot3_signed_activations_and_float_biases(quantized: Outs) -> None:
    """Of the file for TensorRT: int8 alone, one scale an activation, zero point 0, biases in float32."""
    _, outcomes = quantized("gpt2-lm")
    artifact = outcomes["onnx-qdq"].artifact
    assert artifact is not None
    found = Quantized(artifact.path)
    assert {array.dtype.name for array in found.constants.values()} <= {"float32", "int8", "int64", "bool", "float64"}
    for node in found.nodes:
        for index, name in enumerate(node.input):
            if name in found.constants and ".bias" in name:
                assert found.constants[name].dtype == np.float32
                assert node.op_type in ("Add", "LayerNormalization"), (node.op_type, index)


# -- broken files ------------------------------------------------------------------------------------------------------


Change = Callable[[onnx.GraphProto, dict[str, np.ndarray], Quantized], None]


def edit_file(out: Path, step: str, change: Change) -> None:
    """Changes a step's file and records its new hashes, as if it had been made like that."""
    path = out / step / "model.onnx"
    found = Quantized(path)
    model = onnx.load(str(path))
    arrays = {each.name: numpy_helper.to_array(each).copy() for each in model.graph.initializer}
    change(model.graph, arrays, found)
    del model.graph.initializer[:]
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    (path.parent / "model.onnx.data").unlink()
    onnx.save(model, str(path))
    rehash(out, step)


def weight_of(found: Quantized, layer: str) -> str:
    (name,) = [name for name in found.weights if layer in name]
    return name.removesuffix(".int8")


def instead(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], index: int, change: Callable[[Any], Any]) -> None:
    """Every input is dequantized with another scale (1) or zero point (2) than it was quantized with."""
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] not in arrays:
            old = node.input[index]
            arrays[f"{old}.changed"] = np.asarray(change(arrays[old]), arrays[old].dtype)
            node.input[index] = f"{old}.changed"


def a_block_of_a_weight(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], found: Quantized) -> None:
    array = arrays[f"{weight_of(found, 'h.0.mlp.c_fc')}.int8"]
    array[:32, :128] = array[:32, :128][::-1].copy()


def scales_half_as_large_again(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], found: Quantized) -> None:
    instead(graph, arrays, 1, lambda scale: scale * 1.5)


def zero_points(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], found: Quantized) -> None:
    instead(graph, arrays, 2, lambda zero: zero + 5)


def a_weights_scale(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], found: Quantized) -> None:
    arrays[f"{weight_of(found, 'h.0.mlp.c_fc')}.scale"] *= np.float32(1.5)


def a_weights_zero_point(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], found: Quantized) -> None:
    """Of every other column: the same offset in all of them would be taken out by the next normalization."""
    arrays[f"{weight_of(found, 'h.0.mlp.c_proj')}.zero_point"][::2] += 20


def two_scales_swapped(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], found: Quantized) -> None:
    names = [node.input[1] for node in found.nodes if node.op_type == "QuantizeLinear"]
    low, high = min(names, key=lambda name: arrays[name]), max(names, key=lambda name: arrays[name])
    arrays[low], arrays[high] = arrays[high], arrays[low]


def scales_of_two_columns_swapped(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], found: Quantized) -> None:
    """The least and the largest of every weight."""
    for name in found.weights:
        scale = arrays[f"{name.removesuffix('.int8')}.scale"]
        low, high = scale.argmin(), scale.argmax()
        scale[low], scale[high] = scale[high], scale[low]


def the_shift(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], found: Quantized) -> None:
    for name in arrays:
        if name.endswith(".shift"):
            arrays[name] *= 0


def nothing(graph: onnx.GraphProto, arrays: dict[str, np.ndarray], found: Quantized) -> None:
    """The tools break nothing by themselves."""


BROKEN = (
    a_block_of_a_weight,
    scales_half_as_large_again,
    zero_points,
    a_weights_scale,
    a_weights_zero_point,
    two_scales_swapped,
    scales_of_two_columns_swapped,
    the_shift,
)


QUICK = (a_block_of_a_weight, scales_half_as_large_again, two_scales_swapped, the_shift)


@pytest.mark.parametrize(
    "change",
    [pytest.param(each, id=each.__name__, marks=() if each in QUICK else pytest.mark.slow) for each in BROKEN],
)
def test_broken_files_are_seen(
    change: Change, quantized: Outs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(quantized("gpt2-lm")[0], out)
    edit_file(out, "onnx-qdq", change)
    assert cli._main(["verify", str(out), "--step", "onnx-qdq"]) == 1
    told = capfd.readouterr().out
    assert told.startswith("onnx-qdq disagrees with pytorch: 1 of 1 outputs out of tolerance")
    assert "would pass at    kl<=" in told


def test_a_file_that_was_only_rewritten_agrees(quantized: Outs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(quantized("gpt2-lm")[0], out)
    edit_file(out, "onnx-qdq", nothing)
    assert pipeline.verify(out, steps=["onnx-qdq"])[0].status == "agrees"


# -- models that are hard to quantize ----------------------------------------------------------------------------------


def changed(name: str, directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A fixture with other weights."""
    shutil.copytree(HOME / name, directory)
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def past_half(weights: dict[str, torch.Tensor]) -> None:
    """The same function, with activations between the MLP's layers past 65504."""
    for name, array in weights.items():
        if name.endswith("up_proj.weight"):
            weights[name] = array * 1e6
        if name.endswith("down_proj.weight"):
            weights[name] = array / 1e6


def one_row_200_times(weights: dict[str, torch.Tensor]) -> None:
    """The embedding of one piece, in a language model of which that is the head too: the most frequent one."""
    weights["transformer.wte.weight"][11] *= 200


def verdict_of(model: Path, out: Path, step: str = "onnx-qdq", **options: Any) -> Outcome:
    outcome = pipeline.run(str(model), out, to=[step], options=plan.Options(threads=1, **options))[-1]
    # The verdict is the measurement's, and says what it rests on.
    assert outcome.status in ("agrees", "drift") and outcome.verdict is not None, outcome.reason
    found = outcome.verdict["comparison"]["outputs"]
    print(outcome.status, [(each["name"], each["measured"]) for each in found], outcome.notes)
    if outcome.status == "drift":
        assert any("out of tolerance" in line for line in report.verdict_lines(outcome))
    return outcome


@pytest.mark.slow
def test_activations_past_half_precision_are_no_trouble(tmp_path: Path, quantized: Outs) -> None:
    """Every channel has its multiplier: what half precision cannot hold makes no difference to int8."""
    model = changed("llama-lm", tmp_path / "model", past_half)
    outcome = verdict_of(model, tmp_path / "out")
    assert outcome.status == "agrees" and outcome.verdict is not None and outcome.artifact is not None
    before = quantized("llama-lm")[1]["onnx-qdq"].verdict
    assert before is not None
    measured = [each["comparison"]["outputs"][0]["measured"] for each in (before, outcome.verdict)]
    assert measured[1] < 1.2 * measured[0]
    made = recipe.read(outcome.artifact.directory / "recipe.json")
    assert max(np.abs(site.shift).max() for site in made.sites.values()) > 65504
    assert all(0 < site.scale < 1e6 for site in made.sites.values())


@pytest.mark.slow
@pytest.mark.parametrize("step", ["onnx-qdq", "onnx-int8"])
def test_an_embedding_row_of_200_times_the_rest(step: str, tmp_path: Path) -> None:
    model = changed("gpt2-lm", tmp_path / "model", one_row_200_times)
    outcome = verdict_of(model, tmp_path / "out", step, **({"int8_method": "static"} if step == "onnx-int8" else {}))
    assert outcome.artifact is not None
    made = recipe.read(outcome.artifact.directory / "recipe.json")
    assert all(0 < site.scale < 1e6 and np.isfinite(site.multiplier).all() for site in made.sites.values())
    if outcome.status == "drift":
        assert "would pass at" in "\n".join(report.verdict_lines(outcome))
    else:
        assert json.loads((outcome.artifact.directory / "recipe.json").read_text())["share"] > 0.1


def test_a_wide_row_stays_apart_or_gives_its_width_to_the_weight() -> None:
    """200 times the rest in two channels: the error without either would be that of a scale 200 times as large."""
    x = rows(3)
    x[..., 7] *= 200
    reference = asked(graph_of(test_qdq.FORMS["matmul"][1], 3, w=drawn(32, 48)), x)
    moved = []
    for outliers in (0, 2):
        program = graph_of(test_qdq.FORMS["matmul"][1], 3, w=drawn(32, 48))
        static_int8.apply(program.graph, recipe_of(program, x, outliers))
        apart = np.square(asked(program, x) - reference).mean() / np.square(reference).mean()
        moved.append(float(np.sqrt(apart)))
    assert moved[1] < moved[0] < 0.05

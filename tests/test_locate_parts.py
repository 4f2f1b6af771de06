"""What `locate` stands on: drift over real tokens, which modules stand out, pieces of a graph, the choice of cases."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest

from nlpconvert import locating, pieces, report_located
from nlpconvert.convert import matching, tapping
from nlpconvert.inputs import Case
from nlpconvert.validators import located
from nlpconvert.validators.located import Drift, Located, Moved

MASK = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
CASE = Case("masked", {"input_ids": MASK, "attention_mask": MASK})


def drift(reference: np.ndarray, candidate: np.ndarray, module: str = "encoder.layer.0") -> Drift:
    found = Drift()
    found.add(CASE, module, reference, candidate)
    return found


# -- one tensor --------------------------------------------------------------------------------------------------------


def test_padding_is_left_out_of_a_drift() -> None:
    reference = np.ones((3, 3, 2), np.float32)
    candidate = reference.copy()
    candidate[0, 2], candidate[2] = 99, 99
    found = drift(reference, candidate)
    assert (found.relative, found.elements) == (0.0, 10)
    candidate[1, 2, 1] = 2
    found = drift(reference, candidate)
    assert found.relative == pytest.approx(1 / math.sqrt(10))
    assert (found.worst, found.index, found.case, found.shape) == (1.0, (1, 2, 1), "masked", (3, 3, 2))


@pytest.mark.parametrize(
    ("shape", "scored"),
    [((3, 3, 4), 5 * 4), ((9, 4), 5 * 4), ((3, 4), 2 * 4), ((3, 7, 4), 2 * 7 * 4), ((1, 3, 4), 12), ((5,), 5)],
    ids=["tokens", "flat", "rows", "other axis", "positions", "vector"],
)
def test_places_that_count_by_shape(shape: tuple[int, ...], scored: int) -> None:
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    found = drift(values, values + 1)
    assert found.elements == scored
    assert found.worst == 1


def test_a_decoder_is_scored_by_its_own_mask() -> None:
    decoder = np.array([[1, 0, 0], [1, 0, 0], [1, 0, 0]])
    case = Case("two", {"attention_mask": MASK, "decoder_attention_mask": decoder})
    assert located.real_places(case, "model.decoder.layers.0", (3, 3, 8)).sum() == 3
    assert located.real_places(case, "model.encoder.layers.0", (3, 3, 8)).sum() == 5


def test_blocks_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    reference, candidate = rng.normal(size=(2, 3, 3, 50)).astype(np.float32)
    whole = drift(reference, candidate)
    monkeypatch.setattr(located, "BLOCK", 60)
    parts = drift(reference, candidate)
    assert parts.relative == pytest.approx(whole.relative)
    assert (parts.worst, parts.index, parts.elements) == (whole.worst, whole.index, whole.elements)


def test_what_is_not_finite_on_one_side_is_an_infinite_drift() -> None:
    reference = np.ones((3, 3, 2), np.float32)
    candidate = reference.copy()
    candidate[0, 0, 0] = np.nan
    found = drift(reference, candidate)
    assert (found.relative, found.nonfinite) == (math.inf, 1)
    assert drift(candidate, candidate).relative == 0
    smallest = np.full((3, 3, 2), np.finfo(np.float32).min)
    assert drift(smallest, np.full_like(smallest, -np.inf)).relative == 0, "both stand for minus infinity"
    assert drift(np.zeros_like(reference), reference).relative == math.inf


# -- what stands out ---------------------------------------------------------------------------------------------------


def moved(*drifts: float) -> list[Moved]:
    return [Moved(f"m{at}", f"t{at}", (1,), value, value) for at, value in enumerate(drifts)]


def found(*drifts: float) -> Located:
    return located.located("onnx", "pytorch", ["c"], moved(*drifts), {})


@pytest.mark.parametrize(
    ("drifts", "first", "most", "stands_out"),
    [
        ((1e-7, 2e-7, 1e-7, 1e-7), None, None, False),
        ((1e-7, 1e-2, 1e-7, 1e-7), "m1", "m1", True),
        ((1e-7, 1e-3, 1e-7, 1e-1), "m1", "m3", True),
        ((1e-7, 1e-2, 2e-2, 1e-2, 1e-2, 1e-2), "m1", "m2", False),
        ((1e-7, 1e-2, 2e-2, 5e-1, 1e-2, 1e-2), "m3", "m3", True),
        ((math.inf, 1e-7, 1e-7), "m0", "m0", True),
        ((), None, None, False),
    ],
    ids=["noise", "one", "two", "quantized", "quantized and broken", "not finite", "nothing"],
)
def test_which_modules_stand_out(
    drifts: tuple[float, ...], first: str | None, most: str | None, stands_out: bool
) -> None:
    answer = found(*drifts)
    assert (answer.first, answer.most, answer.stands_out) == (first, most, stands_out)


def test_an_answer_goes_through_json() -> None:
    answer = located.located("onnx", "pytorch", ["c"], moved(1e-7, math.inf), {"logits": math.inf}, ["x"], ["a note"])
    data = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert Located.from_dict(data) == answer
    data["later"] = data["modules"][0]["later"] = 1
    assert Located.from_dict(data) == answer


# -- words and plot ----------------------------------------------------------------------------------------------------


def test_the_words_for_a_broken_module() -> None:
    answer = located.located(
        "onnx", "pytorch", ["left"], moved(1e-7, 2e-2, *[1e-7] * 20), {"logits": 3e-2}, ["encoder.rotary"], ["a note"]
    )
    text = "\n".join(report_located.lines(answer))
    assert text.startswith("onnx against pytorch: m1 moved first\n")
    assert "12 more that moved less" in text
    assert "  first to move    m1 (introduced 2.0e-02 of it; worst 0 at [] of [1], case )" in text
    assert "  at the outputs   logits 3.0e-02 of their size" in text
    assert "  not matched      1 module, of which nothing can be said: encoder.rotary" in text
    assert "  note             a note" in text
    assert "  asked            1 case: left" in text
    assert report_located.first_to_move(answer) == "m1 (introduced 2.0e-02 of it)"
    assert len(list(report_located.lines(answer, verbose=True))) == len(text.splitlines()) + 12 - 1


def test_the_words_where_nothing_moved_and_where_all_did() -> None:
    assert next(iter(report_located.lines(found(1e-7, 1e-7)))) == (
        "onnx against pytorch: nothing moved, in 2 tensors none introduced more than 5.0e-06 of its size"
    )
    answer = found(1e-2, 2e-2, 1e-2, 1e-2)
    assert next(iter(report_located.lines(answer))) == (
        "onnx against pytorch: 4 of 4 tensors moved, none far more than its peers; most in m1"
    )
    assert report_located.first_to_move(answer) == "m0 (introduced 1.0e-02 of it), most in m1 (2.0e-02)"
    assert next(iter(report_located.lines(found()))).startswith("onnx against pytorch: nothing moved")


@pytest.mark.parametrize("drifts", [(1e-7, 2e-2), (math.inf, 0.0), ()])
def test_the_plot_is_svg_with_every_module_by_name(drifts: tuple[float, ...]) -> None:
    answer = found(*drifts)
    text = report_located.plot(answer)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert text == report_located.plot(answer), "the same data give the same bytes"
    assert all(each.module in text for each in answer.modules)


# -- pieces of a graph -------------------------------------------------------------------------------------------------


def three_layers(path: Path, names: tuple[str, str, str] = ("a", "b", "c")) -> tapping.Graph:
    """x -> MatMul -> Cast to half, Relu -> MatMul with the first layer's output, each in a module of its own."""
    helper, kind = onnx.helper, onnx.TensorProto
    a, b, c = names
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], [a]),
        helper.make_node("Cast", [a], [f"{a}.half"], to=kind.FLOAT16),
        helper.make_node("Relu", [f"{a}.half"], [b]),
        helper.make_node("Cast", [b], [f"{b}.float"], to=kind.FLOAT),
        helper.make_node("MatMul", [f"{b}.float", "w2"], [f"{c}.product"]),
        helper.make_node("Add", [f"{c}.product", a], [c]),
    ]
    for node, module in zip(nodes, ("first", "act", "act", "second", "second", ""), strict=True):
        node.metadata_props.add(key=tapping.SCOPES, value=f"['', '{module}', 'op']" if module else "['', 'op']")
    weights = [onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32) * n, f"w{n}") for n in (1, 2)]
    shape = ["batch", 4]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind.FLOAT, shape)],
        [helper.make_tensor_value_info(c, kind.FLOAT, shape)],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
    return tapping.read(path)


def test_taps_are_what_leaves_a_module(tmp_path: Path) -> None:
    graph = three_layers(tmp_path / "m.onnx")
    assert [(tap.name, tap.module) for tap in graph.taps] == [
        ("a", "first"),
        ("b", "act"),
        ("c.product", "second"),
        ("c", ""),
    ]
    assert graph.outputs() == ("c",)


def test_a_piece_takes_what_is_given_and_holds_its_own_weights_alone(tmp_path: Path) -> None:
    from nlpconvert.backends import onnxruntime

    graph = three_layers(tmp_path / "m.onnx")
    path, inputs = graph.piece(["c.product", "c"], {"a", "b", "c.product", "c"}, tmp_path / "scratch")
    assert inputs == {"a": "a/given", "b": "b/given", "c.product": "c.product/given"}
    assert {tensor.name for tensor in onnx.load(str(path)).graph.initializer} == {"w2"}
    session = onnxruntime.open_file(path, threads=1)
    one = np.ones((1, 4), np.float32)
    answers = session.run({"a/given": 5 * one, "b/given": 3 * one, "c.product/given": 10 * one})
    assert answers["c.product/tap"].tolist() == [[6.0] * 4], "from what is given, not from what it is given itself"
    assert answers["c/tap"].tolist() == [[15.0] * 4]
    session.close()
    assert graph.weight_bytes(["c"], {"c.product", "a"}) == 0
    assert graph.weight_bytes(["a"], set()) > 64


def test_tensors_match_by_name_else_by_module(tmp_path: Path) -> None:
    ours = three_layers(tmp_path / "ours.onnx")
    pairs, lacking = matching.match(ours, three_layers(tmp_path / "theirs.onnx", ("p", "q", "c")))
    assert [(p.reference, p.candidate) for p in pairs] == [
        ("a", "p"),
        ("b", "q"),
        ("c.product", "c.product"),
        ("c", "c"),
    ]
    assert not lacking
    program = onnx.load(str(tmp_path / "ours.onnx"))
    del program.graph.node[5].input[1]
    program.graph.node[5].op_type = "Identity"
    for node in program.graph.node[1:4]:
        node.output[0] = {"b": "fused"}.get(node.output[0], node.output[0])
        node.input[0] = {"b": "fused"}.get(node.input[0], node.input[0])
        node.metadata_props[0].value = "['', 'second', 'op']"
    onnx.save(program, str(tmp_path / "fused.onnx"))
    pairs, lacking = matching.match(ours, tapping.read(tmp_path / "fused.onnx"))
    assert [pair.module for pair in pairs] == ["first", "second", ""]
    assert lacking == ["act"], "what was fused away is named"


def test_arrays_past_the_limit_lie_on_disk_until_they_are_dropped(tmp_path: Path) -> None:
    store = pieces.Store(tmp_path, limit=100)
    arrays = {name: np.full(10, at, np.float32) for at, name in enumerate("abc")}
    for name, array in arrays.items():
        store.keep(("who", name), array)
    assert len(list(tmp_path.glob("*.npy"))) == 1
    assert all(np.array_equal(store.get(("who", name)), array) for name, array in arrays.items())
    store.drop("who")
    assert not list(tmp_path.iterdir())
    assert not store.has(("who", "a"))


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ((2, 3, 8), (2, 3, 8), True),
        ((2, 3, 8), (2, 3, 2, 4), True),
        ((2, 3, 8), (6, 8), True),
        ((2, 3, 8), (3, 2, 8), False),
        ((2, 3, 8), (2, 2, 3, 4), False),
        ((2, 3, 8), (2, 3, 9), False),
    ],
)
def test_two_views_of_the_same_rows(ours: tuple[int, ...], theirs: tuple[int, ...], same: bool) -> None:
    assert pieces.same_numbers(ours, theirs) is same


# -- which cases -------------------------------------------------------------------------------------------------------


def batch(name: str, rows: int, length: int, padded: bool) -> Case:
    mask = np.ones((rows, length), np.int64)
    mask[0, -1] = 0 if padded else 1
    return Case(name, {"input_ids": mask, "attention_mask": mask})


def test_the_worst_case_is_asked_and_padded_ones_of_middle_size() -> None:
    cases = [batch(f"p{length}", 2, length, True) for length in (4, 8, 16, 32, 600)]
    cases += [batch("single", 1, 10, False), batch("long", 1, 5000, False)]
    assert [case.name for case in locating.choose(cases, None)] == ["p4", "p8", "p16"]
    drifts = {"long": {"used": 3.0}, "p4": {"used": 0.5}, "gone": {"used": 9.0}}
    verdict = {"comparison": {"outputs": [{"cases": drifts}]}}
    assert [case.name for case in locating.choose(cases, verdict)] == ["long", "p8", "p16"]
    assert [case.name for case in locating.choose(cases[-1:], None)] == ["long"], "better than none"

"""Tests of validators/parity.py (and the tally, measures and baseline it is made of): each broken candidate fails.

The reference is drawn at random and stands for a model's answers; a candidate is that reference, spoilt in one way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from nlpconvert.artifact import TensorSpec
from nlpconvert.golden import Answers, Reference
from nlpconvert.inputs import Case
from nlpconvert.models import OutputRow
from nlpconvert.validators.parity import Comparison, Judge, OutputDiff, scales
from nlpconvert.validators.structure import check_specs
from nlpconvert.validators.tolerance import Tolerance, choose, parse, passing

HIDDEN = OutputRow("hidden", ("batch", "sequence", "hidden"), "embedding")
POOLED = OutputRow("pooled", ("batch", "hidden"), "embedding")
LABELS = OutputRow("labels", ("batch", "labels"), "decisions")
TAGS = OutputRow("tags", ("batch", "sequence", "labels"), "decisions")
WORDS = OutputRow("words", ("batch", "sequence", "vocabulary"), "distribution")
START = OutputRow("start", ("batch", "sequence"), "position")
SIZES = {"hidden": 8, "labels": 3, "vocabulary": 50}

Outputs = dict[str, np.ndarray]
Spoil = Callable[[str, Outputs], Outputs]

MASKS = {
    "alone": [[1, 1, 1, 1, 1]],
    "right-padded": [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]],
    "left-padded": [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
    "holed": [[1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 1, 0]],
    "masked-row": [[1, 1, 1, 1], [0, 0, 0, 0]],
}


def make_cases(masks: Mapping[str, list[list[int]]] = MASKS) -> list[Case]:
    draw = np.random.default_rng(3)
    cases = []
    for name, rows in masks.items():
        mask = np.array(rows, dtype=np.int64)
        cases.append(Case(name, {"input_ids": draw.integers(5, 90, mask.shape), "attention_mask": mask}))
    return cases


def make_answers(cases: list[Case], *outputs: OutputRow, size: float = 3.0) -> dict[str, Outputs]:
    draw = np.random.default_rng(4)
    answers: dict[str, Outputs] = {}
    for case in cases:
        batch, sequence = case.inputs["input_ids"].shape
        sizes = {"batch": batch, "sequence": sequence, **SIZES}
        answers[case.name] = {
            o.name: (size * draw.standard_normal([sizes[a] for a in o.axes])).astype(np.float32) for o in outputs
        }
    return answers


def whole(answers: Mapping[str, Outputs]) -> dict[str, Answers]:
    return {case: {n: Reference(a, a.shape) for n, a in found.items()} for case, found in answers.items()}


def judge(
    *outputs: OutputRow,
    spoil: Spoil = lambda _, found: found,
    tolerance: str | None = None,
    precision: str = "float32",
    cases: list[Case] | None = None,
    answers: dict[str, Outputs] | None = None,
    references: dict[str, Answers] | None = None,
    expected: tuple[OutputRow, ...] = (),
) -> Comparison:
    """The whole way: tolerances chosen, scales computed, every case added, and the findings through JSON and back."""
    cases = make_cases() if cases is None else cases
    answers = make_answers(cases, *outputs) if answers is None else answers
    references = whole(answers) if references is None else references
    rows = expected or outputs
    judged = Judge(
        rows, scales(rows, cases, references), choose(parse(tolerance) if tolerance else (), rows, precision, "cpu")
    )
    for case in cases:
        copies = {name: array.copy() for name, array in answers[case.name].items()}
        judged.add(case, references[case.name], spoil(case.name, copies))
    found = judged.comparison()
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert json.dumps(Comparison.from_dict(json.loads(text)).to_dict()) == text
    assert json.loads(text)["agrees"] == found.agrees
    return found


def only(found: Comparison) -> OutputDiff:
    (output,) = found.outputs
    return output


def everywhere(change: Callable[[np.ndarray], np.ndarray]) -> Spoil:
    return lambda _, found: {name: change(array) for name, array in found.items()}


def at(case: str, index: tuple[int, ...], value: float) -> Spoil:
    """One element of every output of one case."""

    def spoil(name: str, found: Outputs) -> Outputs:
        if name == case:
            for array in found.values():
                array[index] = value
        return found

    return spoil


# -- agreement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [HIDDEN, POOLED, LABELS, TAGS, WORDS, START], ids=lambda o: o.name)
@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "int4"])
def test_the_same_answers_agree(output: OutputRow, precision: str) -> None:
    found = judge(output, precision=precision)
    assert found.agrees
    assert only(found).used == 0
    assert only(found).problems == ()
    assert found.cases == len(MASKS)


def test_rounding_within_the_default_agrees_and_is_measured() -> None:
    found = judge(HIDDEN, spoil=everywhere(lambda a: a * np.float32(1 + 1e-6)))
    output = only(found)
    assert found.agrees
    assert output.worst is not None
    assert 0 < output.worst.difference < 2e-5
    assert output.used < 0.1
    assert output.relative_l2 == pytest.approx(1e-6, rel=0.1)
    assert output.cosine is not None
    assert output.cosine.worst == pytest.approx(1)
    assert output.elements == 8 * sum(sum(map(sum, rows)) for rows in MASKS.values())
    assert found.worst_headline() == ("abs", output.worst.difference)


def test_scale_is_the_root_mean_square_of_scored_elements_and_no_unit_enters_the_rule() -> None:
    cases = make_cases()
    answers = make_answers(cases, HIDDEN)
    scored = np.concatenate([answers[c.name]["hidden"][c.inputs["attention_mask"] == 1] for c in cases])
    expected = float(np.sqrt(np.mean(scored.astype(np.float64) ** 2)))
    assert scales([HIDDEN], cases, whole(answers))["hidden"] == pytest.approx(expected, rel=1e-12)
    used = [
        only(judge(HIDDEN, answers=make_answers(cases, HIDDEN, size=size), spoil=everywhere(lambda a: a * 1.0001))).used
        for size in (1e-6, 1.0, 1e6)
    ]
    assert used[0] == pytest.approx(used[1], rel=1e-2) == pytest.approx(used[2], rel=1e-2)


# -- each of these must fail -------------------------------------------------------------------------------------------


def swap_rows(name: str, found: Outputs) -> Outputs:
    return {key: array[::-1].copy() for key, array in found.items()} if name == "left-padded" else found


def test_weights_scaled_by_one_percent() -> None:
    output = only(judge(HIDDEN, spoil=everywhere(lambda a: a * np.float32(1.01))))
    assert not output.agrees
    assert output.out_of_tolerance > 0.9 * output.elements
    assert output.used > 50


@pytest.mark.parametrize("output", [HIDDEN, POOLED, LABELS, TAGS, WORDS, START], ids=lambda o: o.name)
@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "int4"])
@pytest.mark.parametrize(
    "spoil",
    [everywhere(np.zeros_like), everywhere(np.negative), swap_rows],
    ids=["zeros", "negated", "rows swapped"],
)
def test_gross_faults_fail_in_every_measure(output: OutputRow, precision: str, spoil: Spoil) -> None:
    found = judge(output, spoil=spoil, precision=precision)
    assert not found.agrees
    assert only(found).used > 1


def test_one_element_is_named_with_index_values_and_case() -> None:
    output = only(judge(HIDDEN, spoil=at("left-padded", (0, 3, 5), 9.5)))
    assert not output.agrees
    assert output.out_of_tolerance == 1
    assert output.worst is not None
    assert (output.worst.index, output.worst.case, output.worst.candidate) == ((0, 3, 5), "left-padded", 9.5)
    assert output.worst.reference == float(make_answers(make_cases(), HIDDEN)["left-padded"]["hidden"][0, 3, 5])
    assert output.worst.shape == (2, 6, 8)
    assert output.worst_case == "left-padded"
    assert output.cases["left-padded"].used > 1 > output.cases["alone"].used == 0


def test_the_deciding_element_of_rel_need_not_be_the_largest_difference() -> None:
    def spoil(name: str, found: Outputs) -> Outputs:
        if name == "alone":
            found["hidden"][0, 0, 0] = 1000.5  # 0.05% off, the largest difference
            found["hidden"][0, 1, 1] = 0.4  # the worse one for its size
        return found

    cases = make_cases()
    answers = make_answers(cases, HIDDEN)
    answers["alone"]["hidden"][0, 0, 0] = 1000.0
    answers["alone"]["hidden"][0, 1, 1] = 0.0
    output = only(judge(HIDDEN, cases=cases, answers=answers, spoil=spoil, tolerance="rel<=5e-3"))
    assert not output.agrees
    assert output.worst is not None and output.worst.index == (0, 0, 0)
    assert output.furthest is not None and output.furthest.index == (0, 1, 1)
    assert output.out_of_tolerance == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("precision", ["float32", "int4"])
def test_one_scored_element_that_is_not_finite(value: float, precision: str) -> None:
    for row, index in ((HIDDEN, (1, 2, 4)), (WORDS, (1, 2, 4)), (LABELS, (1, 2)), (START, (1, 2))):
        output = only(judge(row, spoil=at("right-padded", index, value), precision=precision))
        assert not output.agrees
        assert output.nonfinite == 1
        assert output.first_nonfinite is not None
        assert (output.first_nonfinite.index, output.first_nonfinite.case) == (index, "right-padded")
        assert output.would_pass_at == {}
        assert output.worst_case == "right-padded"


def test_nan_in_padding_is_reported_and_does_not_fail() -> None:
    found = judge(HIDDEN, spoil=at("right-padded", (1, 5), np.nan))
    assert found.agrees
    assert only(found).padded_nonfinite == 8
    assert only(found).nonfinite == 0


def test_a_difference_in_padding_is_reported_apart() -> None:
    found = judge(HIDDEN, spoil=at("right-padded", (1, 5, 2), 7.0))
    assert found.agrees
    padded = only(found).padded
    assert padded is not None
    assert (padded.index, padded.candidate) == ((1, 5, 2), 7.0)
    assert only(found).worst is not None and only(found).worst.difference == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("output", [HIDDEN, POOLED, START], ids=lambda o: o.name)
def test_a_fully_masked_row_must_be_finite(output: OutputRow) -> None:
    index = (1, 2, 3)[: len(output.axes)]
    finite = judge(output, spoil=at("masked-row", index, 1e3))
    assert finite.agrees  # any finite value is as good as another there
    found = only(judge(output, spoil=at("masked-row", index, np.nan)))
    assert not found.agrees
    assert found.problems == ("not finite in a fully masked row: row 1 (case masked-row)",)
    assert found.first_nonfinite is not None and found.first_nonfinite.index == index
    assert found.worst_case == "masked-row"


def test_a_reference_that_is_not_finite_in_a_fully_masked_row_asks_nothing_of_the_candidate() -> None:
    cases = make_cases()
    answers = make_answers(cases, HIDDEN)
    answers["masked-row"]["hidden"][1] = np.nan
    assert judge(HIDDEN, cases=cases, answers=answers).agrees


def test_minus_infinity_on_both_sides_agrees_and_on_one_side_fails() -> None:
    cases = make_cases()
    answers = make_answers(cases, WORDS)
    for found in answers.values():
        found["words"][..., 0] = -np.inf
    assert judge(WORDS, cases=cases, answers=answers).agrees
    assert judge(WORDS, cases=cases, answers=answers, precision="int8").agrees
    output = only(judge(WORDS, cases=cases, answers=answers, spoil=at("alone", (0, 1, 0), -5.0)))
    assert output.problems == (
        "the reference itself is not finite where it is scored, and the candidate differs (case alone)",
    )


def test_one_output_less() -> None:
    found = judge(HIDDEN, POOLED, spoil=lambda _, o: {"hidden": o["hidden"]})
    assert not found.agrees
    assert [o.agrees for o in found.outputs] == [True, False]
    assert found.outputs[1].problems == ("the artifact does not give it (in 5 cases, first alone)",)
    assert found.ranked[0].name == "pooled"


def test_a_renamed_output() -> None:
    found = judge(POOLED, spoil=lambda _, o: {"output_0": o["pooled"]})
    assert only(found).problems == (
        "the artifact does not give it: it gives output_0 instead (in 5 cases, first alone)",
    )
    assert found.problems == (
        "the artifact gives output_0, which the reference does not have (in 5 cases, first alone)",
    )
    assert not found.agrees


def test_an_output_more() -> None:
    found = judge(POOLED, spoil=lambda _, o: {**o, "present": o["pooled"]})
    assert only(found).agrees
    assert not found.agrees


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[:, :-1], "its shape is not the reference's: (1, 7), not (1, 8) (in 5 cases, first alone)"),
        (lambda a: a[..., None], "(1, 8, 1), not (1, 8)"),
        (lambda a: a.reshape(-1), "(8,), not (1, 8)"),
        (lambda a: a.astype(np.int64), "its type is int64, not a floating one"),
        (lambda a: a > 0, "its type is bool, not a floating one"),
    ],
)
def test_another_shape_or_type(change: Callable[[np.ndarray], np.ndarray], message: str) -> None:
    output = only(judge(POOLED, spoil=everywhere(change)))
    assert not output.agrees
    (problem,) = output.problems
    assert message in problem
    assert output.cases["alone"].used == np.inf


def test_a_shape_that_is_wrong_in_one_case_only() -> None:
    output = only(judge(POOLED, spoil=lambda name, o: {"pooled": o["pooled"][:1]} if name == "holed" else o))
    assert output.problems == ("its shape is not the reference's: (1, 8), not (2, 8) (case holed)",)
    assert output.worst_case == "holed"


def test_half_precision_outputs_are_floating() -> None:
    found = judge(POOLED, spoil=everywhere(lambda a: a.astype(np.float16)), precision="float16")
    assert found.agrees
    assert only(found).dtype == "float16"


def test_swapped_outputs() -> None:
    rows = (POOLED, OutputRow("second", ("batch", "hidden"), "embedding"))
    for precision in ("float32", "int4"):
        found = judge(*rows, spoil=lambda _, o: {"pooled": o["second"], "second": o["pooled"]}, precision=precision)
        assert [o.agrees for o in found.outputs] == [False, False]


# -- nothing compared --------------------------------------------------------------------------------------------------


def test_no_cases() -> None:
    found = judge(POOLED, cases=[], answers={})
    assert not found.agrees
    assert found.problems == ("nothing was compared: no cases",)
    assert found.worst_headline() is None


def test_no_outputs() -> None:
    judged = Judge((), {}, {})
    (case,) = make_cases({"alone": [[1]]})
    judged.add(case, {}, {})
    assert not judged.comparison().agrees


def test_no_case_is_applicable() -> None:
    judged = Judge((POOLED,), {"pooled": 1.0}, choose((), (POOLED,), "float32", "cpu"))
    judged.not_applicable("empty", "the reference raised RuntimeError")
    found = judged.comparison()
    assert not found.agrees
    assert found.not_applicable == (("empty", "the reference raised RuntimeError"),)
    assert found.problems == ("nothing was compared: none of the 1 cases is applicable",)


def test_a_case_at_which_the_artifact_failed_is_a_failure_of_every_output() -> None:
    cases = make_cases()
    answers = make_answers(cases, HIDDEN, POOLED)
    rows, references = (HIDDEN, POOLED), whole(answers)
    judged = Judge(rows, scales(rows, cases, references), choose((), rows, "float32", "cpu"))
    judged.add(cases[0], references["alone"], answers["alone"])
    assert judged.comparison().agrees
    judged.raised("holed", "RuntimeError: index out of range")
    found = judged.comparison()
    assert not found.agrees
    problem = "the artifact failed where the reference answers: RuntimeError: index out of range (case holed)"
    assert [o.problems for o in found.outputs] == [(problem,), (problem,)]
    assert found.outputs[0].worst_case == "holed"


def test_an_artifact_that_failed_at_every_case() -> None:
    judged = Judge((POOLED,), {"pooled": 1.0}, choose((), (POOLED,), "float32", "cpu"))
    judged.raised("alone", "RuntimeError: no")
    found = judged.comparison()
    assert not found.agrees
    assert found.problems == ("nothing was compared: the artifact failed at all 1 cases",)


def test_no_scored_element_in_one_output() -> None:
    decoder = OutputRow("decoded", ("batch", "decoder_sequence", "hidden"), "embedding")
    case = Case(
        "alone",
        {"input_ids": np.ones((2, 3), np.int64), "decoder_attention_mask": np.zeros((2, 4), np.int64)},
    )
    array = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    found = judge(decoder, cases=[case], answers={"alone": {"decoded": array}})
    assert not found.agrees
    assert only(found).problems == ("nothing was compared: no element of it is scored in any case",)


def test_empty_arrays_are_fine_beside_others() -> None:
    masks: dict[str, list[list[int]]] = {"nothing": [[]], **MASKS}
    assert judge(HIDDEN, POOLED, START, cases=make_cases(masks)).agrees
    assert not judge(HIDDEN, cases=make_cases({"nothing": [[]]})).agrees


def test_all_is_scored_where_the_model_takes_no_mask() -> None:
    cases = [Case(c.name, {"input_ids": c.inputs["input_ids"]}) for c in make_cases()]
    output = only(judge(HIDDEN, cases=cases, spoil=at("right-padded", (1, 5, 2), 7.0)))
    assert not output.agrees
    assert output.padded is None


def test_a_mask_that_does_not_fit_is_named() -> None:
    (case,) = make_cases({"alone": [[1, 1, 1]]})
    array = np.random.default_rng(0).standard_normal((1, 4, 8)).astype(np.float32)
    found = judge(HIDDEN, cases=[case], answers={"alone": {"hidden": array}})
    assert only(found).problems == ("attention_mask (1, 3) does not fit hidden (1, 4, 8) (case alone)",)


def test_a_reference_without_an_answer_is_named() -> None:
    cases = make_cases()
    found = judge(POOLED, references={c.name: {} for c in cases})
    assert only(found).problems == ("the reference has no answer for it (in 5 cases, first alone)",)


# -- a reference that could not tell -----------------------------------------------------------------------------------


def test_a_reference_of_zeros() -> None:
    cases = make_cases()
    answers = {c: {"pooled": np.zeros_like(a["pooled"])} for c, a in make_answers(cases, POOLED).items()}
    judged = only(judge(POOLED, cases=cases, answers=answers, precision="int8"))
    assert judged.problems == ("the reference is zero everywhere: it does not depend on its input",)
    by_element = only(judge(POOLED, cases=cases, answers=answers))
    assert by_element.agrees
    assert by_element.notes == judged.problems
    moved = judge(POOLED, cases=cases, answers=answers, spoil=everywhere(lambda a: a + np.float32(1e-9)))
    assert not moved.agrees


@pytest.mark.parametrize(("output", "fails"), [(POOLED, True), (WORDS, True), (LABELS, False)])
def test_a_reference_that_ignores_its_input(output: OutputRow, fails: bool) -> None:
    cases = make_cases()
    answers = make_answers(cases, output)
    first = answers["alone"][output.name][:1]
    same = first[:, :1] if output is WORDS else first
    for found in answers.values():
        found[output.name][:] = same
    judged = only(judge(output, cases=cases, answers=answers, precision="int8"))
    said = judged.problems if fails else judged.notes
    assert len(said) == 1
    assert said[0].startswith(
        "the reference hardly depends on its input: an artifact that always gave the first answer"
    )
    assert judged.agrees is not fails


def test_a_bound_wider_than_the_reference_itself() -> None:
    output = only(judge(POOLED, tolerance="abs<=100", spoil=everywhere(np.zeros_like)))
    assert not output.agrees
    assert output.problems[0].endswith("answers of zeros would pass abs<=100.0")


def test_a_given_bound_that_a_dead_artifact_passes() -> None:
    cases = make_cases({"many": [[1, 1]] * 40})
    answers = make_answers(cases, LABELS)
    answers["many"]["labels"][:, 0] += 100.0 * (np.arange(40) < 28)  # 70 % of the answers are the first label

    def first(array: np.ndarray) -> np.ndarray:
        return np.repeat(array[:1], len(array), axis=0)

    output = only(judge(LABELS, cases=cases, answers=answers, tolerance="changed<=50%", spoil=everywhere(first)))
    assert not output.agrees
    assert "an artifact that always gave the first answer would pass" in " ".join(output.problems)


@pytest.mark.parametrize(("row", "name"), [(LABELS, "labels"), (WORDS, "words")])
def test_one_value_per_answer_has_no_decision(row: OutputRow, name: str) -> None:
    cases = make_cases()
    answers = {c: {name: a[name][..., :1]} for c, a in make_answers(cases, row).items()}
    output = only(judge(row, cases=cases, answers=answers, precision="int8"))
    assert not output.agrees
    assert "there is no decision to change" in output.problems[0]


# -- the measures ------------------------------------------------------------------------------------------------------


def test_decisions_changes_and_near_ties() -> None:
    cases = make_cases({"many": [[1, 1]] * 40})
    answers = make_answers(cases, LABELS)
    logits = answers["many"]["labels"]
    logits[0] = [1.0, 1.00001, -1.0]  # a near tie: within what the reference itself may move by
    logits[1] = [2.0, -1.0, 0.0]

    def spoil(_: str, found: Outputs) -> Outputs:
        found["labels"][0, 0] = 1.0002
        found["labels"][1, 2] = 3.0
        return found

    output = only(judge(LABELS, cases=cases, answers=answers, spoil=spoil, precision="int8"))
    assert not output.agrees
    assert output.decisions is not None
    assert (output.decisions.count, output.decisions.changed, output.decisions.near_ties) == (40, 2, 1)
    assert output.measured == 1 / 40  # near ties stand apart
    assert judge(LABELS, cases=cases, answers=answers, spoil=spoil, tolerance="changed<=5%").agrees


def test_a_tied_candidate_has_not_decided() -> None:
    def spoil(_: str, found: Outputs) -> Outputs:
        found["labels"][:] = 1.0
        return found

    output = only(judge(LABELS, spoil=spoil, precision="int8"))
    assert output.measured == 1.0


def test_position_is_argmax_over_the_scored_part_of_the_row() -> None:
    cases = make_cases({"padded": [[1, 1, 1, 0]] * 30})
    answers = make_answers(cases, START)
    answers["padded"]["start"][:, 3] = 99.0  # padding never wins
    answers["padded"]["start"][4] = [0.0, 5.0, 1.0, 99.0]
    assert judge(START, cases=cases, answers=answers, spoil=at("padded", (4, 3), -99.0), precision="int8").agrees
    output = only(judge(START, cases=cases, answers=answers, spoil=at("padded", (4, 0), 6.0), precision="int8"))
    assert not output.agrees
    assert output.decisions is not None
    assert (output.decisions.count, output.decisions.changed) == (30, 1)


def test_divergence_is_scipys() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    scipy_special = pytest.importorskip("scipy.special")
    cases = make_cases({"one": [[1, 1, 1]]})
    answers = make_answers(cases, WORDS)
    noise = np.random.default_rng(9).standard_normal((1, 3, 50)).astype(np.float32) / 10
    output = only(judge(WORDS, cases=cases, answers=answers, spoil=everywhere(lambda a: a + noise), precision="int4"))
    reference = answers["one"]["words"].astype(np.float64)
    candidate = (answers["one"]["words"] + noise).astype(np.float64)
    expected = scipy_stats.entropy(
        scipy_special.softmax(reference, axis=-1), scipy_special.softmax(candidate, axis=-1), axis=-1
    )
    assert output.kl is not None
    assert output.kl.mean == pytest.approx(expected.mean(), rel=1e-9)
    assert output.kl.worst == pytest.approx(expected.max(), rel=1e-9)
    assert output.kl.index == (0, int(expected.argmax()))
    assert output.measured == output.kl.mean


@pytest.mark.parametrize("output", [TAGS, WORDS], ids=lambda o: o.name)
def test_one_broken_case_does_not_drown_among_thousands_of_tokens(output: OutputRow) -> None:
    cases = make_cases({"long": [[1] * 4000], "left-padded-8": [[0] * 8 + [1] * 8]})
    found = only(
        judge(
            output,
            cases=cases,
            spoil=lambda name, o: {output.name: o[output.name][:, ::-1].copy()} if name == "left-padded-8" else o,
            precision="int8",
        )
    )
    assert not found.agrees
    assert found.worst_case_score is not None
    assert found.worst_case_score[0] == found.worst_case == "left-padded-8"


def test_two_flips_in_a_short_case_are_scatter() -> None:
    cases = make_cases({"long": [[1] * 1000], "short": [[1, 1, 1]]})

    def spoil(name: str, found: Outputs) -> Outputs:
        if name == "short":
            found["tags"][0, :2] *= -1
        return found

    assert judge(TAGS, cases=cases, spoil=spoil, precision="int8").agrees


# -- the edge of the tolerance -----------------------------------------------------------------------------------------


def noisy(size: float) -> Spoil:
    draw = np.random.default_rng(8)
    return everywhere(lambda a: (a + size * draw.standard_normal(a.shape)).astype(np.float32))


@pytest.mark.parametrize(
    ("output", "measure"),
    [
        (HIDDEN, "abs"),
        (HIDDEN, "rel"),
        (HIDDEN, "cosine"),
        (POOLED, "cosine"),
        (WORDS, "kl"),
        (WORDS, "changed"),
        (TAGS, "changed"),
        (START, "rel"),
    ],
)
def test_would_pass_at_passes_and_a_hair_less_fails(output: OutputRow, measure: str) -> None:
    seen = only(judge(output, spoil=noisy(0.9)))
    assert not seen.agrees
    edge = seen.would_pass_at[measure]
    cases, answers = make_cases(), make_answers(make_cases(), output)

    def verdict(value: float) -> bool:
        direction = ">=" if measure == "cosine" else "<="
        bound = {output.name: Tolerance(measure, direction, value, given=True)}
        references = whole(answers)
        judged = Judge((output,), scales((output,), cases, references), bound)
        spoil = noisy(0.9)
        for case in cases:
            judged.add(case, references[case.name], spoil(case.name, answers[case.name]))
        return judged.comparison().agrees

    assert verdict(edge)
    assert not verdict(float(np.nextafter(edge, 1.0 if measure == "cosine" else 0.0)))
    offered = passing(measure, edge)
    assert offered is not None
    assert verdict(parse(offered)[0].value)


# -- sampled references ------------------------------------------------------------------------------------------------


def sample(answers: Mapping[str, Outputs], keep: Mapping[str, list[tuple[int, int]]]) -> dict[str, Answers]:
    found: dict[str, Answers] = {}
    for case, outputs in answers.items():
        index = np.array(keep[case], dtype=np.int64).reshape(-1, 2)
        found[case] = {n: Reference(a[index[:, 0], index[:, 1]], a.shape, index) for n, a in outputs.items()}
    return found


KEPT = {
    "alone": [(0, 1), (0, 4)],
    "right-padded": [(0, 6), (1, 0), (1, 5)],
    "left-padded": [(0, 1), (0, 2), (1, 3)],
    "holed": [(0, 3)],
    "masked-row": [(0, 0), (1, 1)],
}


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("size", [1e-6, 0.5])
def test_a_sampled_reference_says_on_its_positions_what_the_whole_one_says(precision: str, size: float) -> None:
    cases = make_cases()
    answers = make_answers(cases, WORDS)
    draw = np.random.default_rng(1)
    moved = {
        c: (a["words"] + size * draw.standard_normal(a["words"].shape)).astype(np.float32) for c, a in answers.items()
    }
    by_sample = only(
        judge(
            WORDS,
            cases=cases,
            references=sample(answers, KEPT),
            spoil=lambda c, _: {"words": moved[c]},
            precision=precision,
        )
    )
    # The whole reference, with every other position masked out.
    masked = []
    for case in cases:
        mask = np.zeros_like(case.inputs["attention_mask"])
        for place in KEPT[case.name]:
            mask[place] = case.inputs["attention_mask"][place]
        masked.append(Case(case.name, {**case.inputs, "attention_mask": mask}))
    by_whole = only(
        judge(WORDS, cases=masked, answers=answers, spoil=lambda c, _: {"words": moved[c]}, precision=precision)
    )
    for field in ("agrees", "scale", "measured", "elements", "vectors", "out_of_tolerance", "worst", "furthest", "kl"):
        assert getattr(by_sample, field) == getattr(by_whole, field), field
    assert by_sample.decisions == by_whole.decisions
    assert by_sample.padded is not None


def test_what_a_sampled_reference_did_not_keep_must_be_finite_all_the_same() -> None:
    cases = make_cases()
    answers = make_answers(cases, WORDS)
    references = sample(answers, KEPT)
    assert judge(WORDS, cases=cases, references=references, spoil=at("right-padded", (1, 6), np.nan)).agrees  # padding
    output = only(judge(WORDS, cases=cases, references=references, spoil=at("right-padded", (0, 2, 7), np.nan)))
    assert not output.agrees
    assert output.first_nonfinite is not None and output.first_nonfinite.index == (0, 2, 7)
    masked = only(judge(WORDS, cases=cases, references=references, spoil=at("masked-row", (1, 3, 0), np.nan)))
    assert masked.problems == ("not finite in a fully masked row: row 1 (case masked-row)",)


def test_a_sampled_reference_cannot_judge_a_position() -> None:
    cases = make_cases()
    answers = make_answers(cases, START)
    output = only(judge(START, cases=cases, references=sample(answers, KEPT)))
    assert not output.agrees
    assert output.problems[0].startswith("a reference of sampled positions cannot judge it")


def test_chunks_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_piece = judge(WORDS, spoil=noisy(0.1), precision="int8").to_dict()
    monkeypatch.setattr("nlpconvert.validators.scored.CHUNK", 120)
    pieces = judge(WORDS, spoil=noisy(0.1), precision="int8").to_dict()
    for key in ("agrees", "out_of_tolerance", "worst", "furthest", "decisions", "elements"):
        assert pieces["outputs"][0][key] == whole_piece["outputs"][0][key]
    assert pieces["outputs"][0]["measured"] == pytest.approx(whole_piece["outputs"][0]["measured"], rel=1e-12)


# -- structure ---------------------------------------------------------------------------------------------------------

IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"))
MASK = TensorSpec("attention_mask", "int64", ("batch", "sequence"))
STATE = TensorSpec("last_hidden_state", "float32", ("batch", "sequence", 384))


def test_specs_that_fit_under_any_names_of_axes_and_in_any_order() -> None:
    inputs = [TensorSpec("attention_mask", "int64", ("s41", "s18")), TensorSpec("input_ids", "int64", (-1, -1))]
    outputs = [TensorSpec("last_hidden_state", "float32", ("s41", "s18", 384))]
    assert check_specs([IDS, MASK], [STATE], inputs, outputs) == []


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([IDS], [STATE], "input attention_mask is missing"),
        ([IDS, TensorSpec("mask", "int64", (-1, -1))], [STATE], "input attention_mask is missing; mask stands there"),
        ([IDS, MASK, TensorSpec("x", "int64", (-1,))], [STATE], "input x is not expected"),
        (
            [IDS, TensorSpec("attention_mask", "int64", ("b", 16))],
            [STATE],
            "attention_mask: axis 1 (sequence) is frozen at 16",
        ),
        (
            [IDS, TensorSpec("attention_mask", "int32", ("b", "s"))],
            [STATE],
            "input attention_mask is int32, expected int64",
        ),
        ([IDS, MASK], [TensorSpec("last_hidden_state", "float32", ("b", "s"))], "has 2 axes ('b', 's'), expected 3"),
        ([IDS, MASK], [TensorSpec("last_hidden_state", "float32", ("b", "s", 768))], "axis 2 is 768, expected 384"),
        ([IDS, IDS, MASK], [STATE], "two inputs have the same name"),
        ([IDS, MASK], [], "output last_hidden_state is missing"),
    ],
)
def test_specs_that_do_not_fit(inputs: list[TensorSpec], outputs: list[TensorSpec], message: str) -> None:
    (problem,) = check_specs([IDS, MASK], [STATE], inputs, outputs)
    assert message in problem

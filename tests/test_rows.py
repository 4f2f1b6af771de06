"""Tests of validators/rows.py: a row that answers by its company is found, and told apart from a model that does."""

from __future__ import annotations

import json

import numpy as np

from nlpconvert.golden import Answers, Reference
from nlpconvert.inputs import Case, Twin
from nlpconvert.models import OutputRow
from nlpconvert.validators.rows import Rows, RowsReport, row_differences

HIDDEN = OutputRow("hidden", ("batch", "sequence", "hidden"), "embedding")
LABELS = OutputRow("labels", ("batch", "labels"), "decisions")
START = OutputRow("start", ("batch", "sequence"), "position")
OUTPUTS = (HIDDEN, LABELS, START)
SCALES = {"hidden": 1.0, "labels": 1.0, "start": 1.0}


def case(name: str, rows: list[list[int]], *twins: Twin) -> Case:
    """Ids, 0 for padding."""
    ids = np.array(rows, dtype=np.int64)
    return Case(name, {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}, twins=twins)


ALONE = case("alone", [[5, 6, 7]])
COMPANY = case("company", [[8, 9, 8, 9, 8], [5, 6, 7, 0, 0]], Twin(1, "alone", 0))
LEFT = case("left", [[0, 0, 0, 5, 6, 7]], Twin(0, "alone", 0))
CASES = (ALONE, COMPANY, LEFT)


def answer(one: Case, company: float = 0.0) -> dict[str, np.ndarray]:
    """A model that answers token by token, with something of the row's company where asked to; noise in padding."""
    ids, mask = one.inputs["input_ids"], one.inputs["attention_mask"]
    added = company * (ids.shape[1] - 3)
    hidden = np.stack([np.sin(ids * k) + added for k in (1.0, 2.0, 3.0)], axis=-1)
    hidden[mask == 0] = 77.0
    labels = np.stack([(np.sin(ids * k) * mask).sum(axis=1) + added for k in (1.0, 2.0)], axis=-1)
    return {
        "hidden": hidden.astype(np.float32),
        "labels": labels.astype(np.float32),
        "start": hidden[..., 0].astype(np.float32),
    }


def references(one: Case, company: float = 0.0) -> Answers:
    return {name: Reference(array, array.shape) for name, array in answer(one, company).items()}


def report(candidate: float, own: float = 0.0, cases: tuple[Case, ...] = CASES) -> RowsReport:
    found = row_differences(
        cases,
        OUTPUTS,
        SCALES,
        {c.name: answer(c, candidate) for c in cases},
        {c.name: references(c, own) for c in cases},
    )
    assert RowsReport.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    return found


def test_rows_that_do_not_depend_on_their_company() -> None:
    found = report(0.0)
    assert not found.flagged
    assert found.pairs == 2
    assert found.problems == ()
    assert [o.name for o in found.outputs] == ["hidden", "labels", "start"]
    assert all(o.worst_abs < 1e-6 and o.pairs == 2 for o in found.outputs)
    assert all(o.cosine > 1 - 1e-12 for o in found.outputs)


def test_an_artifact_that_answers_by_company_is_flagged_with_the_worst_pair() -> None:
    found = report(0.01)
    assert found.flagged
    for output in found.outputs:
        assert output.flagged == 2
        assert (output.case, output.row, output.twin, output.twin_row) == ("alone", 0, "left", 0)
        assert abs(output.worst_abs - 0.03) < 1e-6
        assert output.reference_abs is not None and output.reference_abs < 1e-6
        assert output.cosine < 1


def test_a_dependence_of_the_models_own_is_not_the_artifacts() -> None:
    found = report(0.01, own=0.01)
    assert not found.flagged
    assert abs((found.outputs[0].reference_abs or 0) - 0.03) < 1e-6


def test_an_answer_that_is_not_finite_in_one_company_is_flagged() -> None:
    spoilt = answer(COMPANY)
    spoilt["labels"][1, 0] = np.nan
    rows = Rows(CASES, OUTPUTS, SCALES)
    rows.add(ALONE, answer(ALONE))
    rows.add(COMPANY, spoilt)
    found = rows.report()
    assert [o.flagged for o in found.outputs] == [0, 1, 0]
    assert json.dumps(found.to_dict(), allow_nan=False)


def test_pairs_are_found_in_any_order_and_once_when_named_from_both_sides() -> None:
    both = (case("alone", [[5, 6, 7]], Twin(0, "company", 1)), COMPANY)
    assert report(0.01, cases=both).pairs == 1
    assert report(0.01, cases=both[::-1]).outputs == report(0.01, cases=both).outputs


def test_a_case_that_never_comes_leaves_nothing_compared() -> None:
    found = report(0.01, cases=(COMPANY, LEFT))
    assert (found.pairs, found.outputs, found.flagged) == (0, (), False)


def test_twins_that_hold_other_tokens_are_a_problem_and_not_compared() -> None:
    wrong = case("wrong", [[5, 6, 8]], Twin(0, "alone", 0))
    found = report(0.0, cases=(ALONE, wrong))
    assert found.pairs == 0
    assert found.problems == ("row 0 of alone and row 0 of wrong hold other tokens",)


def test_without_references_the_floor_alone_holds() -> None:
    found = row_differences(CASES, OUTPUTS, SCALES, {c.name: answer(c, 0.01) for c in CASES})
    assert found.flagged
    assert found.outputs[0].reference_abs is None


def test_a_sampled_reference_tells_its_own_where_both_rows_kept_a_token() -> None:
    def sampled(one: Case, *kept: tuple[int, int]) -> Answers:
        whole = answer(one, 0.01)["hidden"]
        index = np.array(kept, dtype=np.int64).reshape(-1, 2)
        return {"hidden": Reference(whole[index[:, 0], index[:, 1]], whole.shape, index)}

    candidates = {c.name: {"hidden": answer(c, 0.01)["hidden"]} for c in (ALONE, LEFT)}
    # The second real token: position 1 alone, position 4 under left padding.
    same = {"alone": sampled(ALONE, (0, 1), (0, 0)), "left": sampled(LEFT, (0, 4), (0, 1))}
    other = {"alone": sampled(ALONE, (0, 0)), "left": sampled(LEFT, (0, 4))}
    found = row_differences((ALONE, LEFT), (HIDDEN,), SCALES, candidates, same)
    assert abs((found.outputs[0].reference_abs or 0) - 0.03) < 1e-6
    assert not found.flagged
    unknown = row_differences((ALONE, LEFT), (HIDDEN,), SCALES, candidates, other)
    assert unknown.outputs[0].reference_abs is None


def test_nothing_is_held_longer_than_it_is_needed() -> None:
    rows = Rows(CASES, OUTPUTS, SCALES)
    for one in CASES:
        rows.add(one, answer(one))
    assert rows._held == {}
    lonely = Rows((ALONE,), OUTPUTS, SCALES)
    lonely.add(ALONE, answer(ALONE))
    assert lonely._held == {}

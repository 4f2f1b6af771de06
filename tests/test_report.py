"""Tests of nlpconvert/report.py: the exact words of a passing and a failing report, the table, JSON and JUnit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from nlpconvert import documents, report, wording
from nlpconvert.artifact import Artifact, Outcome
from nlpconvert.golden import Reference
from nlpconvert.inputs import Case, Twin
from nlpconvert.models import OutputRow
from nlpconvert.validators.findings import Comparison
from nlpconvert.validators.parity import Judge, scales
from nlpconvert.validators.rows import row_differences
from nlpconvert.validators.tolerance import choose, parse

STATE = OutputRow("last_hidden_state", ("batch", "sequence", "hidden"), "embedding")
LOGITS = OutputRow("logits", ("batch", "sequence", "labels"), "decisions")
WORDS = OutputRow("logits", ("batch", "sequence", "vocabulary"), "distribution")

Moved = Mapping[tuple[str, str, tuple[int, ...]], float]
"""Case, output and index, and the value that stands there instead."""

CASES = (
    Case("alone", {"input_ids": np.array([[5, 6]]), "attention_mask": np.array([[1, 1]])}),
    Case(
        "left-padded",
        {"input_ids": np.array([[0, 5, 6], [7, 8, 9]]), "attention_mask": np.array([[0, 1, 1], [1, 1, 1]])},
        twins=(Twin(0, "alone", 0),),
    ),
)
ANSWERS = {
    "alone": {
        "last_hidden_state": np.array([[[1.0, 2.0], [3.0, -4.0]]], np.float32),
        "logits": np.array([[[4.0, 1.0, 0.0], [0.0, 2.0, 1.0]]], np.float32),
    },
    "left-padded": {
        "last_hidden_state": np.array([[[9.0, 9.0], [1.0, 2.0], [3.0, -4.0]], [[1, 0], [0, 1], [-2, 5]]], np.float32),
        "logits": np.array([[[9, 9, 9], [4, 1, 0], [0, 2, 1]], [[0, 1, 1.001], [5, 0, 0], [0, 3, 2]]], np.float32),
    },
}


def verdict(moved: Moved, rows: tuple[OutputRow, ...], given: str, precision: str) -> dict[str, Any]:
    references = {
        case: {name: Reference(array, array.shape) for name, array in found.items()} for case, found in ANSWERS.items()
    }
    tolerances = choose(parse(given) if given else (), rows, precision, "cpu")
    scale = scales(rows, CASES, references)
    judge = Judge(rows, scale, tolerances)
    candidates = {c: {o.name: ANSWERS[c][o.name].copy() for o in rows} for c in ANSWERS}
    for (where, name, index), value in moved.items():
        if name in candidates[where]:
            candidates[where][name][index] = value
    for case in CASES:
        judge.add(case, references[case.name], candidates[case.name])
    judge.not_applicable("empty-string", "the reference raised RuntimeError: no tokens")
    comparison = judge.comparison()
    return {
        "comparison": comparison.to_dict(),
        "rows": row_differences(CASES, rows, scale, candidates, references).to_dict(),
        "provider": "CPUExecutionProvider",
        "precision": "float32",
        "cases": comparison.cases,
        "tokens": 5812,
    }


def outcome(
    moved: Moved | None = None,
    *,
    rows: tuple[OutputRow, ...] = (STATE, LOGITS),
    given: str = "",
    precision: str = "float32",
    **more: Any,
) -> Outcome:
    found = verdict(moved or {}, rows, given, precision)
    status = "agrees" if found["comparison"]["agrees"] else "drift"
    return Outcome("onnx", status, verdict={**found, **more}, seconds=3.21, bytes=90_400_000)


DRIFTED: Moved = {
    ("left-padded", "logits", (1, 0, 1)): 1.031,
    ("left-padded", "last_hidden_state", (0, 0, 0)): 8.5,  # padding
    ("alone", "last_hidden_state", (0, 1, 1)): -4.00001,
}

FAILING = """\
onnx disagrees with pytorch: 1 of 2 outputs out of tolerance

  logits             float32 (2, 3, 3)  DRIFT
    allowed          |candidate - reference| <= 5.0e-05 * (2 + |reference|)   2: the reference's root mean square
    out of tolerance 1 of 21 elements (4.762%)
    worst            3.1e-02 at [1, 0, 1]   reference 1   candidate 1.031   case left-padded
    on average       1.5e-03, relative L2 3.4e-03, SQNR 49 dB, worst 2.1e-02 of the reference's spread
    cosine           0.9998835 at worst of token [1, 0]   case left-padded   0.9999834 on average
    decisions        top-1 changed in 1 of 7 tokens, 0 of them near ties
    label sequences  changed in 1 of 3 rows
    KL               1.7e-05 nats on average, 1.2e-04 at worst of token [1, 0]   case left-padded
    used             207 times what is allowed
    would pass at    rel<=1.1e-02
  last_hidden_state  float32 (1, 2, 2)  agrees  worst 1.0e-05, 3% of what is allowed

  row alone or in company  differs by 1.0e-05 at most (PyTorch's own 0), 2 pairs
  ran on                   CPUExecutionProvider, float32
  tried                    2 cases, 5,812 tokens
  not applicable           case empty-string: the reference raised RuntimeError: no tokens

Again: nlpconvert verify out --step onnx --case left-padded"""

PASSING = """\
onnx agrees with pytorch: 2 outputs within tolerance, 2 cases, 5,812 tokens

  last_hidden_state  float32 (1, 2, 2)  agrees  worst 1.0e-05, 3% of what is allowed
  logits             float32 (1, 2, 3)  agrees  worst 0, 0% of what is allowed

  row alone or in company  differs by 1.0e-05 at most (PyTorch's own 0), 2 pairs
  ran on                   CPUExecutionProvider, float32
  not applicable           case empty-string: the reference raised RuntimeError: no tokens"""


def text(found: Outcome, **options: Any) -> str:
    return "\n".join(report.verdict_lines(found, out="out", **options))


def agreeing() -> Outcome:
    return outcome({key: value for key, value in DRIFTED.items() if key[1] != "logits"})


def test_the_words_of_a_failing_report() -> None:
    assert text(outcome(DRIFTED)) == FAILING


def test_the_words_of_a_passing_report() -> None:
    assert text(agreeing()) == PASSING


def test_verbose_gives_the_details_of_what_agrees_and_padding_apart() -> None:
    found = text(agreeing(), verbose=True)
    assert "    padded positions differ by 5.0e-01 at most; not judged\n" in found
    assert "    out of tolerance 0 of 14 elements\n" in found
    assert "would pass at" not in found
    assert "    decisions        top-1 changed in 0 of 7 tokens\n" in found


def test_below_float32_the_measure_decides_and_is_worded() -> None:
    found = text(outcome(DRIFTED, precision="int8"))
    assert (
        "last_hidden_state  float32 (1, 2, 2)  agrees  cosine 0.9999999, allowed cosine>=0.95, under 1% of what is "
        "allowed, worst 1.0e-05"
    ) in found
    assert "    allowed          top-1 changed in <= 0.5% of the tokens\n" in found
    assert "    out of tolerance 1 of 7 decisions (14.286%)\n" in found
    assert "    would pass at    changed<=15%\n" in found


def test_a_divergence_is_worded() -> None:
    found = text(outcome({**DRIFTED, ("alone", "logits", (0, 0, 1)): 4.5}, rows=(WORDS,), given="kl<=1e-3"))
    assert "    allowed          mean KL(reference || candidate) <= 0.001 nats\n" in found
    assert "    KL               1.1e-01 nats on average, 7.5e-01 at worst of token [0, 0]   case alone\n" in found
    assert "    would pass at    kl<=1.1e-01\n" in found


def test_what_would_pass_is_what_passes() -> None:
    for rows, given, precision in (((LOGITS,), "", "float32"), ((LOGITS,), "", "int8"), ((WORDS,), "kl<=1e-6", "int8")):
        line = next(
            s for s in text(outcome(DRIFTED, rows=rows, given=given, precision=precision)).splitlines() if "would" in s
        )
        offered = line.removeprefix("    would pass at    ")
        assert outcome(DRIFTED, rows=rows, given=offered, precision=precision).status == "agrees"


def test_what_is_not_finite_is_named_and_no_tolerance_is_offered() -> None:
    found = text(outcome({("left-padded", "logits", (1, 2, 0)): np.nan}))
    assert (
        "    not finite       1 element, first at [1, 2, 0]   reference 0   candidate nan   case left-padded\n" in found
    )
    assert "would pass at    no tolerance\n" in found
    assert found.endswith("--case left-padded")


def test_the_parent_the_structure_and_notes_are_told() -> None:
    parent = outcome(DRIFTED).verdict
    assert parent is not None
    found = agreeing()
    assert found.verdict is not None
    artifact = Artifact("onnx-int8", Path("model.onnx"), "onnx", "int8", "fill-mask", (), (), {}, "onnx", "0")
    more = {"parent_comparison": parent["comparison"]}
    lines = text(
        Outcome("onnx-int8", "agrees", artifact=artifact, verdict={**found.verdict, **more}, notes=("fell back",))
    )
    assert "  against its parent       onnx: abs 3.1e-02\n" in lines
    assert lines.endswith("  note                     fell back")
    frozen = ["input input_ids: axis 1 (sequence) is frozen at 16"]
    lines = text(Outcome("onnx", "drift", reason="its shape is frozen", verdict={**found.verdict, "structure": frozen}))
    assert lines.startswith("onnx disagrees with pytorch: its shape is frozen\n\n  input input_ids: axis 1")


def test_a_row_that_answers_by_its_company_is_told() -> None:
    found = text(outcome({("left-padded", "logits", (0, 1, 0)): 4.1}, given="abs<=0.5", rows=(LOGITS,)))
    assert (
        "  row alone or in company  differs by 1.0e-01 at most (PyTorch's own 0), beyond the model's own in 1 of 1 "
        "pair: logits, row 0 of alone and row 0 of left-padded\n"
    ) in found


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ("not run", "trt: not run: no GPU here"),
        ("skipped", "trt: skipped: no GPU here"),
        ("failed", "trt: FAILED: no GPU here"),
        ("drift", "trt: DRIFT: no GPU here"),
    ],
)
def test_what_has_no_verdict_says_why(status: str, line: str) -> None:
    assert text(Outcome("trt", status, reason="no GPU here")) == line


def test_nothing_compared_is_told() -> None:
    judge = Judge((), {}, {})
    empty = {**(agreeing().verdict or {}), "comparison": judge.comparison().to_dict(), "rows": None, "cases": 0}
    found = text(Outcome("onnx", "drift", verdict=empty))
    assert found.startswith("onnx disagrees with pytorch: nothing was compared: no cases\n")
    assert report.table_rows([Outcome("onnx", "drift", verdict=empty)])[0]["worst"] == "nothing compared"


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table() -> None:
    rows = report.table_rows(
        [
            outcome(DRIFTED),
            outcome(DRIFTED, rows=(STATE,), precision="int8"),
            Outcome("trt", "not run", reason="no GPU here", bytes=900),
            Outcome("torchscript", "agrees", verdict=agreeing().verdict, reused=True, bytes=1_234_000_000),
        ]
    )
    assert all(tuple(row) == report.HEADER for row in rows)
    assert [tuple(row.values()) for row in rows] == [
        ("onnx", "90.4 MB", "DRIFT", "abs 3.1e-02", "2 cases, 5,812 tokens", "3.2"),
        ("onnx", "90.4 MB", "agrees", "cosine 0.9999999", "2 cases, 5,812 tokens", "3.2"),
        ("trt", "900 B", "not run: no GPU here", "", "", "0.0"),
        ("torchscript", "1.2 GB", "agrees", "abs 1.0e-05", "2 cases, 5,812 tokens", "reused"),
    ]


def test_sizes() -> None:
    assert [wording.size(n) for n in (0, 999, 1000, 99_949, 123_456, 999_600, 5_700_000_000)] == [
        "0 B", "999 B", "1.0 kB", "99.9 kB", "123 kB", "1.0 MB", "5.7 GB",
    ]  # fmt: skip


# -- documents ---------------------------------------------------------------------------------------------------------


def test_json_holds_the_whole_verdict_even_where_it_is_not_finite() -> None:
    found = outcome({("left-padded", "logits", (1, 2, 0)): np.nan})
    data = json.loads(documents.to_json([found, Outcome("trt", "not run", reason="no GPU here")]))
    onnx, trt = data["steps"]
    assert (onnx["step"], onnx["status"], onnx["exit_code"]) == ("onnx", "drift", 1)
    assert Comparison.from_dict(onnx["verdict"]["comparison"]).outputs[1].nonfinite == 1
    assert (trt["status"], trt["exit_code"], trt["reason"], trt["verdict"]) == ("not run", 4, "no GPU here", None)


def cases_of(document: str) -> dict[str, str]:
    """Test case -> what it holds ("" for a pass)."""
    return {
        case.get("name", ""): ",".join(child.tag for child in case)
        for case in ElementTree.fromstring(document).iter("testcase")
    }


def test_junit_names_step_output_and_case() -> None:
    document = documents.junit([outcome(DRIFTED)], out="out")
    assert cases_of(document) == {
        "onnx": "failure",
        "last_hidden_state": "",
        "last_hidden_state[alone]": "",
        "last_hidden_state[left-padded]": "",
        "logits": "failure",
        "logits[alone]": "",
        "logits[left-padded]": "failure",
        "[empty-string]": "skipped",
    }
    root = ElementTree.fromstring(document)
    assert root.find(".//failure") is not None
    assert root.find(".//failure").text == FAILING  # type: ignore[union-attr]
    assert {key: root.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "8",
        "failures": "3",
        "errors": "0",
        "skipped": "1",
    }


def test_junit_fails_the_output_where_no_case_alone_is_at_fault() -> None:
    swapped: Moved = {("left-padded", "logits", (1, 0, 1)): 1.5}
    assert cases_of(documents.junit([outcome(swapped, given="changed<=14%", rows=(LOGITS,))]))["logits"] == "failure"


def test_junit_an_agreeing_output_has_no_failing_case() -> None:
    swapped: Moved = {("left-padded", "logits", (1, 0, 1)): 1.5}  # 1 of 5 in this case, 1 of 7 over all
    found = outcome(swapped, given="changed<=15%", rows=(LOGITS,))
    assert found.status == "agrees"
    assert set(cases_of(documents.junit([found])).values()) == {"", "skipped"}


@pytest.mark.parametrize(
    ("status", "tag"), [("not run", "skipped"), ("skipped", "skipped"), ("failed", "error"), ("drift", "error")]
)
def test_junit_without_a_verdict(status: str, tag: str) -> None:
    document = documents.junit([Outcome("trt", status, reason="cannot be opened: \x1b[31mno\x00")])
    assert cases_of(document) == {"trt": tag}
    assert "cannot be opened" in document


def test_junit_a_missing_output_fails() -> None:
    references = {c: {"logits": Reference(a["logits"], a["logits"].shape)} for c, a in ANSWERS.items()}
    judge = Judge((LOGITS,), scales((LOGITS,), CASES, references), choose((), (LOGITS,), "float32", "cpu"))
    for case in CASES:
        judge.add(case, references[case.name], {})
    found = Outcome("onnx", "drift", verdict={**(agreeing().verdict or {}), "comparison": judge.comparison().to_dict()})
    cases = cases_of(documents.junit([found]))
    assert cases == {
        "onnx": "failure",
        "logits": "failure",
        "logits[alone]": "failure",
        "logits[left-padded]": "failure",
    }


def test_the_doctor() -> None:
    facts = {
        "cpu": "A processor",
        "cpus": 2,
        "int8": "VNNI: 8-bit products are exact",
        "gpu": None,
        "no_gpu": "no NVIDIA GPU with a driver here",
        "python": "3.11.7",
        "platform": "Linux",
        "packages": {"numpy": "2.4.6", "onnx": "1.23.2"},
    }
    lines = list(report.doctor_lines(facts, [("onnx", "yes", "yes, on the CPU"), ("trt", "yes", "no: no GPU")]))
    assert lines == [
        "CPU       A processor, 2 cores; VNNI: 8-bit products are exact",
        "GPU       no NVIDIA GPU with a driver here",
        "Python    3.11.7 on Linux",
        "packages  numpy 2.4.6, onnx 1.23.2",
        "",
        "onnx  made here  yes",
        "      run here   yes, on the CPU",
        "trt   made here  yes",
        "      run here   no: no GPU",
    ]
    with_gpu = {**facts, "gpu": {"name": "A card", "compute_capability": "8.9"}}
    assert list(report.doctor_lines(with_gpu, []))[1] == "GPU       A card, compute capability 8.9"

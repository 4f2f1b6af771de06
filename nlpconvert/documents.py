"""Floor 4: outcomes as documents for machines: JSON (data/verify.schema.json) and JUnit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.etree import ElementTree

import nlpconvert
from nlpconvert import report, report_output, wording
from nlpconvert.artifact import Outcome
from nlpconvert.validators.findings import Comparison

SCHEMA = 1
"""Of the JSON document: data/verify.schema.json."""


def to_json(outcomes: Sequence[Outcome]) -> str:
    """All outcomes as one JSON document: status, reason, verdict, file hashes and exit code of each step."""
    steps = [
        {
            "step": o.step,
            "status": o.status,
            "reason": o.reason,
            "exit_code": o.exit_code,
            "seconds": round(o.seconds, 3),
            "bytes": o.bytes,
            "reused": o.reused,
            "notes": list(o.notes),
            "files": dict(o.artifact.files) if o.artifact else {},
            "verdict": o.verdict,
        }
        for o in outcomes
    ]
    document = {"nlpconvert": nlpconvert.__version__, "schema": SCHEMA, "steps": steps}
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def junit(outcomes: Sequence[Outcome], reference: str = "pytorch", *, out: str = "OUT") -> str:
    """All outcomes as JUnit XML, a suite for each step: the step as a whole, each output, each case of each output.

    Drift is a failure; what was not run, skipped or not applicable is skipped; what failed to convert, or drifted
    without a measured verdict (it cannot be opened, or is not the file its hash says), is an error.
    """
    root = ElementTree.Element("testsuites", name="nlpconvert")
    for outcome in outcomes:
        suite = ElementTree.SubElement(root, "testsuite", name=outcome.step, time=f"{outcome.seconds:.3f}")
        _step_case(suite, outcome, reference, out)
        if outcome.verdict is not None:
            _output_cases(suite, outcome.step, Comparison.from_dict(outcome.verdict["comparison"]))
        for kind, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(kind, str(sum(1 for _ in suite.iter(tag))))
    for kind in ("tests", "failures", "errors", "skipped"):
        root.set(kind, str(sum(int(suite.get(kind, "0")) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _step_case(suite: ElementTree.Element, outcome: Outcome, reference: str, out: str) -> None:
    case = _testcase(suite, outcome.step, outcome.step, f"{outcome.seconds:.3f}")
    lines = list(report.verdict_lines(outcome, reference, out=out))
    if outcome.status in ("not run", "skipped"):
        ElementTree.SubElement(case, "skipped", message=_xml(f"{outcome.status}: {outcome.reason}"))
    elif outcome.status == "failed" or (outcome.status == "drift" and outcome.verdict is None):
        ElementTree.SubElement(case, "error", message=_xml(outcome.reason)).text = _xml("\n".join(lines))
    elif outcome.status == "drift":
        ElementTree.SubElement(case, "failure", message=_xml(lines[0])).text = _xml("\n".join(lines))


def _output_cases(suite: ElementTree.Element, step: str, comparison: Comparison) -> None:
    for output in comparison.outputs:
        case = _testcase(suite, step, report_output.name(output))
        if not output.agrees:
            message = output.problems[0] if output.problems else f"out of tolerance: {report_output.short(output)}"
            failure = ElementTree.SubElement(case, "failure", message=_xml(message))
            failure.text = _xml("\n".join((*output.problems, *report_output.details(output))))
        for name, drift in output.cases.items() if not output.only else ():
            case = _testcase(suite, step, f"{output.name}[{name}]")
            # Within an agreeing output no case fails: two decisions of a short text may flip where 0.5% may change.
            if not output.agrees and drift.used > 1:
                used = f"{drift.used:.3g} times what {output.tolerance.text} allows"
                message = f"worst {wording.drift(drift.worst_abs)}, {used}"
                if drift.used == float("inf"):
                    message = "not finite, or not to be held against the reference at all"
                ElementTree.SubElement(case, "failure", message=_xml(message))
    for name, reason in comparison.not_applicable:
        case = _testcase(suite, step, f"[{name}]")
        ElementTree.SubElement(case, "skipped", message=_xml(f"not applicable: {reason}"))


def _testcase(suite: ElementTree.Element, step: str, name: str, seconds: str = "0.000") -> ElementTree.Element:
    return ElementTree.SubElement(suite, "testcase", classname=f"nlpconvert.{step}", name=_xml(name), time=seconds)


def _xml(text: str) -> str:
    """Without the control characters that XML 1.0 cannot hold: a reason may quote a terminal."""
    return "".join(c if c in "\t\n" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)

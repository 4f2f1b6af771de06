"""Floor 4: outcomes as lines for a person, rows for a table, JSON and JUnit for machines.

Pure: data in, lines and documents out. Nothing here prints, measures or decides. An Outcome's verdict is plain data:

    comparison         Comparison.to_dict(), against the reference
    parent_comparison  the same against the parent step (optional)
    rows               RowsReport.to_dict() (optional)
    structure          sentences of structure.check_specs and compute.problems (optional)
    products           Products.to_dict(), of an ONNX file (optional)
    provider, precision  what really ran
    cases, tokens      how much was compared: batches, and tokens in them
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from nlpconvert import report_located, report_proof, report_scores
from nlpconvert.artifact import Outcome
from nlpconvert.inputs import KINDS
from nlpconvert.proofs import Proof
from nlpconvert.validators.findings import Comparison, Element, OutputDiff
from nlpconvert.validators.located import Located
from nlpconvert.validators.rows import RowDiff, RowsReport
from nlpconvert.validators.scores import Scores
from nlpconvert.validators.tolerance import passing

STATUS_WORDS: dict[str, str] = {
    "agrees": "agrees",
    "drift": "DRIFT",
    "failed": "FAILED",
    "not run": "not run",
    "skipped": "skipped",
}

HEADER: tuple[str, ...] = ("step", "size", "verdict", "worst", "tried", "seconds")


# -- lines -------------------------------------------------------------------------------------------------------------


def verdict_lines(
    outcome: Outcome, reference: str = "pytorch", *, out: str = "OUT", verbose: bool = False
) -> Iterator[str]:
    """The report on one step, line by line, worst output first. `verbose` gives the details of agreeing outputs too."""
    if outcome.verdict is None:
        reason = f": {outcome.reason}" if outcome.reason else ""
        yield f"{outcome.step}: {STATUS_WORDS[outcome.status]}{reason}"
        yield from _notes(outcome)
        return
    verdict = outcome.verdict
    comparison = Comparison.from_dict(verdict["comparison"])
    agrees = outcome.status == "agrees"
    yield _headline(outcome, comparison, reference)
    yield ""
    worse = [found["text"] for found in verdict.get("regressions", ())]
    for problem in (*comparison.problems, *verdict.get("structure", ()), *worse):
        yield f"  {problem}"
    names = max((len(_name(o)) for o in comparison.outputs), default=0)
    shapes = max((len(_kind(o)) for o in comparison.outputs), default=0)
    for output in comparison.ranked:
        head = f"  {_name(output):<{names}}  {_kind(output):<{shapes}}"
        yield f"{head}  agrees  {_short(output)}" if output.agrees else f"{head}  DRIFT"
        if verbose or not output.agrees:
            yield from _detail("problem", output.problems)
            yield from _details(output)
        yield from _detail("note", output.notes)
    if comparison.outputs:
        yield ""
    yield from _surroundings(outcome, comparison, verdict)
    yield from _notes(outcome)
    yield from _asked(verdict, out)
    case = next((o.worst_case for o in comparison.ranked if not o.agrees and o.worst_case), "")
    if not agrees:
        step = "" if " --reference " in out else f" --step {outcome.step}"
        yield ""
        yield f"Again: nlpconvert verify {out}{step}{f' --case {case}' if case else ''}"


def _asked(verdict: Mapping[str, Any], out: str) -> Iterator[str]:
    """What was asked for besides the goldens: scores on labelled rows, and the proof that the gate trips."""
    if verdict.get("scores"):
        yield ""
        yield from report_scores.lines(Scores.from_dict(verdict["scores"]), out=out)
    if verdict.get("proof"):
        yield ""
        yield from report_proof.lines(Proof.from_dict(verdict["proof"]))


def warnings(outcome: Outcome) -> Iterator[str]:
    """What a person should know of a step that agrees: why its verdict may be worth less than it looks."""
    if outcome.verdict is not None:
        for output in Comparison.from_dict(outcome.verdict["comparison"]).outputs:
            for note in output.notes:
                yield f"{outcome.step}: {output.name}: note: {note}"


def _headline(outcome: Outcome, comparison: Comparison, reference: str) -> str:
    total = len(comparison.outputs)
    bad = sum(not o.agrees for o in comparison.outputs)
    if outcome.status == "agrees":
        return f"{outcome.step} agrees with {reference}: {_count(total, 'output')} within tolerance, {_tried(outcome)}"
    if outcome.status != "drift":
        reason = f": {outcome.reason}" if outcome.reason else ""
        return f"{outcome.step}: {STATUS_WORDS[outcome.status]}{reason}"
    if comparison.agrees and (outcome.verdict or {}).get("regressions"):
        return f"{outcome.step} is worse than its baseline: {outcome.reason}"
    if bad:
        return f"{outcome.step} disagrees with {reference}: {bad} of {total} outputs out of tolerance"
    said = (*comparison.problems, outcome.reason, *(outcome.verdict or {}).get("structure", ()))
    first = next((text for text in said if text), "its structure is not the expected one")
    return f"{outcome.step} disagrees with {reference}: {first}"


def _name(output: OutputDiff) -> str:
    return f"{output.name}[{output.only}]" if output.only else output.name


def _kind(output: OutputDiff) -> str:
    """Type and shape (of the case with the worst element)."""
    if output.worst is None:
        return output.dtype or "not given"
    return f"{output.dtype} ({', '.join(str(n) for n in output.worst.shape)})"


def _short(output: OutputDiff) -> str:
    """An agreeing output in a few words: the deciding number and the worst element."""
    worst = f"worst {_drift(output.worst.difference)}" if output.worst else ""
    used = f", {_used(output.used)}" if output.elements and math.isfinite(output.used) else ""
    if output.tolerance.measure in ("abs", "rel"):
        return f"{worst}{used}"
    return f"{_measured(output.tolerance.measure, output.measured)}, allowed {output.tolerance.text}{used}, {worst}"


def _used(share: float) -> str:
    """How far a verdict is from turning: "41% of what is allowed"; past the bound "2.3 times what is allowed"."""
    if share > 1:
        return f"{share:.3g} times what is allowed"
    return f"{'0%' if share == 0 else 'under 1%' if share < 0.01 else f'{share:.0%}'} of what is allowed"


def _details(output: OutputDiff) -> Iterator[str]:
    """What is known of one output, a line each."""
    yield from _detail("allowed", [_allowed(output)])
    measure = output.tolerance.measure
    if output.elements:
        total, unit = {
            "abs": (output.elements, "elements"),
            "rel": (output.elements, "elements"),
            "changed": (output.decisions.count if output.decisions else 0, "decisions"),
        }.get(measure, (output.vectors, f"{output.unit}s"))
        share = _share(output.out_of_tolerance, total)
        yield from _detail("out of tolerance", [f"{output.out_of_tolerance:,} of {total:,} {unit}{share}"])
    if output.first_nonfinite is not None:
        first = _place(output.first_nonfinite)
        yield from _detail("not finite", [f"{_count(output.nonfinite, 'element')}, first at {first}"])
    if output.worst is not None:
        yield from _detail("worst", [f"{_drift(output.worst.difference)} at {_place(output.worst)}"])
        if measure == "rel" and output.furthest and output.furthest.index != output.worst.index:
            furthest = f"{_drift(output.furthest.difference)} at {_place(output.furthest)}"
            yield from _detail("furthest out", [f"{furthest}   (for its size)"])
        yield from _detail("on average", [_average(output)])
    if output.cosine is not None and (measure == "cosine" or output.unit == "token"):
        score = output.cosine
        where = f"of {output.unit} {list(score.index)}   case {score.case}"
        yield from _detail("cosine", [f"{_cosine(score.worst)} at worst {where}   {_cosine(score.mean)} on average"])
    if output.decisions is not None:
        found = output.decisions
        near = f", {found.near_ties:,} of them near ties" if found.changed else ""
        yield from _detail(
            "decisions", [f"top-1 changed in {found.changed:,} of {_count(found.count, output.unit)}{near}"]
        )
        if measure == "changed":
            yield from _detail("so many tell", [_certainty(output)] if output.detectable is not None else [])
    yield from _agreement(output)
    if output.kl is not None:
        kl = output.kl
        worst = f"{_drift(kl.worst)} at worst of {output.unit} {list(kl.index)}   case {kl.case}"
        yield from _detail("KL", [f"{_drift(kl.mean)} nats on average, {worst}"])
    if output.worst_case_score is not None:
        name, alone = output.worst_case_score
        yield from _detail("one case", [f"{_measured(measure, alone)} in case {name} alone: it decides"])
    if output.padded_nonfinite or (output.padded is not None and output.padded.difference > 0):
        yield from _detail("padded positions", [_padded(output)])
    if output.elements and math.isfinite(output.used):
        yield from _detail("used", [_used(output.used)])
    if not output.agrees:
        value = output.would_pass_at.get(measure)
        bound = None if value is None else passing(measure, value)
        if bound is not None:
            yield from _detail("would pass at", [bound])
        elif not output.problems and output.elements:
            yield from _detail("would pass at", ["no tolerance"])


def _average(output: OutputDiff) -> str:
    noise = "" if math.isinf(output.sqnr_db) else f", SQNR {output.sqnr_db:.0f} dB"
    spread = f", worst {_drift(output.normalised)} of the reference's spread" if output.spread else ""
    return f"{_drift(output.mean_abs)}, relative L2 {_drift(output.relative_l2)}{noise}{spread}"


def _certainty(output: OutputDiff) -> str:
    """What a count of changed decisions can say at all."""
    assert output.detectable is not None
    inside = "" if output.interval is None else f"95% interval {output.interval[0]:.2%} to {output.interval[1]:.2%}; "
    return f"{inside}so few {output.unit}s cannot show a change of less than {output.detectable:.2%}"


def _agreement(output: OutputDiff) -> Iterator[str]:
    if output.top_k is not None:
        top = output.top_k
        yield from _detail(f"top-{top.k}", [f"{_percent(top.agreement)} of the reference's are among the candidate's"])
    if output.sequences is not None:
        found = output.sequences
        yield from _detail("label sequences", [f"changed in {found.changed:,} of {_count(found.count, 'row')}"])
    if output.neighbours is not None:
        near = output.neighbours
        ranks = f"rank correlation {_cosine(near.correlation)}, {_cosine(near.worst)} at worst"
        yield from _detail(
            "nearest", [f"neighbour changed for {near.changed:,} of {_count(near.rows, 'text')}; {ranks}"]
        )


def _percent(share: float) -> str:
    """What is not all never reads as all."""
    return "100%" if share == 1 else f"{min(share, 0.99999):.3%}"


def _detail(label: str, values: Sequence[str]) -> Iterator[str]:
    for value in values:
        yield f"    {label:<16} {value}"


def _allowed(output: OutputDiff) -> str:
    """The rule in force, as a formula or a sentence."""
    tolerance = output.tolerance
    if tolerance.measure == "rel":
        mean = f"{output.scale:.3g}"
        rule = f"|candidate - reference| <= {tolerance.value:.1e} * ({mean} + |reference|)"
        if tolerance.multiple is not None:
            return f"{rule}   {tolerance.multiple:g} times the reference's own noise"
        return f"{rule}   {mean}: the reference's root mean square"
    rules = {
        "abs": f"|candidate - reference| <= {tolerance.value:.1e}",
        "cosine": f"cosine of every {output.unit} >= {tolerance.value!r}",
        "changed": f"top-1 changed in <= {tolerance.text.removeprefix('changed<=')} of the {output.unit}s",
        "kl": f"mean KL(reference || candidate) <= {tolerance.value!r} nats",
    }
    return rules[tolerance.measure]


def _place(element: Element) -> str:
    return (
        f"{list(element.index)}   reference {element.reference:.5g}   candidate {element.candidate:.5g}   "
        f"case {element.case}"
    )


def _padded(output: OutputDiff) -> str:
    bad = f", {_count(output.padded_nonfinite, 'element')} not finite" if output.padded_nonfinite else ""
    worst = _drift(output.padded.difference) if output.padded else "0"
    return f"differ by {worst} at most{bad}; not judged"


def _surroundings(outcome: Outcome, comparison: Comparison, verdict: Mapping[str, Any]) -> Iterator[str]:
    """What holds for the step as a whole: rows, the parent, what ran, what could not be asked."""
    if comparison.spans is not None:
        spans = comparison.spans
        yield f"  answer spans             changed in {spans.changed:,} of {_count(spans.count, 'row')}"
    if verdict.get("rows"):
        rows = RowsReport.from_dict(verdict["rows"])
        told = set(rows.broken()) & set(verdict.get("structure", ()))
        yield from (f"  {line}" for line in _rows(rows, told=bool(told)))
    if verdict.get("localisation"):
        where = Located.from_dict(verdict["localisation"])
        yield f"  first to move            {report_located.first_to_move(where)}, against {where.against}"
    if verdict.get("parent_comparison"):
        parent = outcome.artifact.parent if outcome.artifact else ""
        moved = _worst(Comparison.from_dict(verdict["parent_comparison"]))
        yield f"  against its parent       {parent}{': ' if parent else ''}{moved}"
    if verdict.get("provider"):
        yield f"  ran on                   {verdict['provider']}, {verdict['precision']}"
    lower = _products(verdict.get("products"))
    if lower:
        yield f"  products with a weight   {lower}"
    if outcome.status != "agrees":
        yield f"  tried                    {_tried(outcome)}"
    for name, reason in comparison.not_applicable:
        yield f"  not applicable           case {name}: {reason}"


def _rows(rows: RowsReport, told: bool) -> Iterator[str]:
    """Invariances, a line each: company and order, padding, repetition; what is the model's own is said apart.

    `told`: those that are broken stand among the problems.
    """
    label = "row alone or in company"
    if not rows.outputs:
        yield f"{label}  not compared: no text stands in two cases that could be run"
        return
    for worst in (o for o in rows.outputs if o.flagged and not told):
        places = f"row {worst.row} of {worst.case} and row {worst.twin_row} of {worst.twin}"
        yield (
            f"{KINDS[worst.kind]:<23}  {_apart(worst)}, beyond the model's own in {worst.flagged:,} of "
            f"{_count(worst.pairs, 'pair')}: {worst.name}, {places}"
        )
    same = [o for o in rows.outputs if not o.flagged and not o.own]
    if same:
        worst = max(same, key=lambda o: o.worst_abs)
        kinds = ", ".join(KINDS[kind] for kind in dict.fromkeys(o.kind for o in same) if kind != "company")
        also = f"; so {kinds}" if kinds else ""
        yield f"{label}  {_apart(worst)}, {_count(sum(o.pairs for o in same), 'pair')}{also}"
    for worst in (o for o in rows.outputs if o.own and not o.flagged):
        yield f"{KINDS[worst.kind]:<23}  {_apart(worst)}: {worst.name} depends on it in the model itself"


def _apart(found: RowDiff) -> str:
    own = "" if found.reference_abs is None else f" (PyTorch's own {_drift(found.reference_abs)})"
    return f"differs by {_drift(found.worst_abs)} at most{own}"


def _products(products: Mapping[str, Any] | None) -> str:
    """ "60 int8 (95.2% of the FLOPs), 3 float32 (4.8%)"; nothing where all are float32."""
    if not products or set(products["count"]) <= {"float32"}:
        return ""
    ordered = sorted(products["count"].items(), key=lambda item: -products["share"].get(item[0], 0.0))
    parts = [f"{number:,} {name} ({products['share'].get(name, 0.0):.1%})" for name, number in ordered]
    return f"{', '.join(parts)} of the FLOPs"


def _notes(outcome: Outcome) -> Iterator[str]:
    for note in outcome.notes:
        yield f"  note                     {note}"


# -- the machine -------------------------------------------------------------------------------------------------------


def doctor_lines(facts: Mapping[str, Any], steps: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """What this machine is, and for each step (name, made here, run here): "yes", or why not and what brings it.

    `facts`: "cpu", "cpus", "int8", "gpu" (None or its name and compute capability), "no_gpu", "python", "platform",
    "packages".
    """
    gpu = facts["gpu"]
    yield f"CPU       {facts['cpu']}, {_count(facts['cpus'], 'core')}; {facts['int8']}"
    yield (
        f"GPU       {gpu['name']}, compute capability {gpu['compute_capability']}"
        if gpu
        else f"GPU       {facts['no_gpu']}"
    )
    yield f"Python    {facts['python']} on {facts['platform']}"
    yield f"packages  {', '.join(f'{name} {version}' for name, version in facts['packages'].items()) or 'none'}"
    yield ""
    width = max((len(name) for name, _, _ in steps), default=0)
    for name, make, run in steps:
        yield f"{name:<{width}}  made here  {make}"
        yield f"{'':<{width}}  run here   {run}"


# -- the table ---------------------------------------------------------------------------------------------------------


def table_rows(outcomes: Sequence[Outcome]) -> list[dict[str, str]]:
    """One row a step, under HEADER."""
    return [
        {
            "step": outcome.step,
            "size": size(outcome.bytes) if outcome.bytes else "",
            "verdict": STATUS_WORDS[outcome.status] + (f": {outcome.reason}" if _unmeasured(outcome) else ""),
            "worst": _worst(Comparison.from_dict(outcome.verdict["comparison"])) if outcome.verdict else "",
            "tried": _tried(outcome) if outcome.verdict else "",
            "seconds": "reused" if outcome.reused else f"{outcome.seconds:.1f}",
        }
        for outcome in outcomes
    ]


def _unmeasured(outcome: Outcome) -> bool:
    return outcome.verdict is None and bool(outcome.reason)


def size(count: int) -> str:
    """Bytes for a person, in decimal units as file managers show them."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def _worst(comparison: Comparison) -> str:
    headline = comparison.worst_headline()
    return "nothing compared" if headline is None else _measured(*headline)


def _tried(outcome: Outcome) -> str:
    verdict = outcome.verdict or {}
    cases = _count(int(verdict.get("cases", 0)), "case")
    tokens = verdict.get("tokens")
    return cases if tokens is None else f"{cases}, {_count(int(tokens), 'token')}"


# -- numbers -----------------------------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _share(part: int, whole: int) -> str:
    """A share in brackets; what is not none never reads as none."""
    if not part or not whole:
        return ""
    return f" ({part / whole:.3%})" if part / whole >= 1e-5 else " (under 0.001%)"


def _drift(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _cosine(value: float) -> str:
    """What is not exactly 1 never reads as 1."""
    return "1" if value == 1 else f"{min(value, 0.9999999):.7f}"


def _measured(measure: str, value: float) -> str:
    if measure == "cosine":
        return f"cosine {_cosine(value)}"
    if measure == "changed":
        return f"changed {value:.2%}"
    if measure == "nonfinite":
        return f"{_count(int(value), 'element')} not finite"
    return f"{measure} {_drift(value)}"


# -- documents ---------------------------------------------------------------------------------------------------------


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
    return json.dumps({"steps": steps}, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


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
    lines = list(verdict_lines(outcome, reference, out=out))
    if outcome.status in ("not run", "skipped"):
        ElementTree.SubElement(case, "skipped", message=_xml(f"{outcome.status}: {outcome.reason}"))
    elif outcome.status == "failed" or (outcome.status == "drift" and outcome.verdict is None):
        ElementTree.SubElement(case, "error", message=_xml(outcome.reason)).text = _xml("\n".join(lines))
    elif outcome.status == "drift":
        ElementTree.SubElement(case, "failure", message=_xml(lines[0])).text = _xml("\n".join(lines))


def _output_cases(suite: ElementTree.Element, step: str, comparison: Comparison) -> None:
    for output in comparison.outputs:
        case = _testcase(suite, step, _name(output))
        if not output.agrees:
            message = output.problems[0] if output.problems else f"out of tolerance: {_short(output)}"
            failure = ElementTree.SubElement(case, "failure", message=_xml(message))
            failure.text = _xml("\n".join((*output.problems, *_details(output))))
        for name, drift in output.cases.items() if not output.only else ():
            case = _testcase(suite, step, f"{output.name}[{name}]")
            # Within an agreeing output no case fails: two decisions of a short text may flip where 0.5% may change.
            if not output.agrees and drift.used > 1:
                message = f"worst {_drift(drift.worst_abs)}, {drift.used:.3g} times what {output.tolerance.text} allows"
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

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

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nlpconvert import report_located, report_output, report_proof, report_scores, report_written, wording
from nlpconvert.artifact import FOREIGN, Outcome
from nlpconvert.inputs import KINDS
from nlpconvert.proofs import Proof
from nlpconvert.validators.findings import Comparison
from nlpconvert.validators.located import Located
from nlpconvert.validators.rows import RowDiff, RowsReport
from nlpconvert.validators.scores import Scores

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
    names = max((len(report_output.name(o)) for o in comparison.outputs), default=0)
    shapes = max((len(report_output.kind(o)) for o in comparison.outputs), default=0)
    for output in comparison.ranked:
        head = f"  {report_output.name(output):<{names}}  {report_output.kind(output):<{shapes}}"
        yield f"{head}  agrees  {report_output.short(output)}" if output.agrees else f"{head}  DRIFT"
        if verbose or not output.agrees:
            yield from report_output.detail("problem", output.problems)
            yield from report_output.details(output)
        yield from report_output.detail("note", output.notes)
    if comparison.outputs:
        yield ""
    if verdict.get("written"):
        yield from report_written.lines(verdict["written"], verbose=verbose or not agrees)
        yield ""
    yield from _surroundings(outcome, comparison, verdict)
    yield from _notes(outcome)
    yield from _asked(verdict)
    case = next((o.worst_case for o in comparison.ranked if not o.agrees and o.worst_case), "")
    if not agrees:
        step = "" if outcome.step == FOREIGN and " --reference " in out else f" --step {outcome.step}"
        all_cases = " --baseline " in out or out.endswith(" --prove")
        yield ""
        yield f"Again: nlpconvert verify {out}{step}{f' --case {case}' if case and not all_cases else ''}"


def _asked(verdict: Mapping[str, Any]) -> Iterator[str]:
    """What was asked for besides the goldens: scores on labelled rows, and the proof that the gate trips."""
    if verdict.get("scores"):
        yield ""
        yield from report_scores.lines(Scores.from_dict(verdict["scores"]))
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
        within = f"{wording.count(total, 'output')} within tolerance"
        return f"{outcome.step} agrees with {reference}: {within}, {_tried(outcome)}"
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


def _surroundings(outcome: Outcome, comparison: Comparison, verdict: Mapping[str, Any]) -> Iterator[str]:
    """What holds for the step as a whole: rows, the parent, what ran, what could not be asked."""
    if comparison.spans is not None:
        spans = comparison.spans
        yield f"  answer spans             changed in {spans.changed:,} of {wording.count(spans.count, 'row')}"
    if verdict.get("rows"):
        rows = RowsReport.from_dict(verdict["rows"])
        told = set(rows.broken()) & set(verdict.get("structure", ()))
        yield from (f"  {line}" for line in _rows(rows, told=bool(told)))
    if verdict.get("localisation"):
        where = Located.from_dict(verdict["localisation"])
        yield f"  first to move            {report_located.first_to_move(where)}, against {where.against}"
    looked_up = verdict.get("vocabulary")
    if looked_up and looked_up["of"]:
        rest = (
            "the rest compared in its embedding table"
            if looked_up["tables"]
            else "the other rows of its embedding table were not looked at"
        )
        yield f"  vocabulary               {looked_up['asked']:,} of {looked_up['of']:,} ids asked; {rest}"
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
            f"{wording.count(worst.pairs, 'pair')}: {worst.name}, {places}"
        )
    same = [o for o in rows.outputs if not o.flagged and not o.own]
    if same:
        worst = max(same, key=lambda o: o.worst_abs)
        kinds = ", ".join(KINDS[kind] for kind in dict.fromkeys(o.kind for o in same) if kind != "company")
        also = f"; so {kinds}" if kinds else ""
        yield f"{label}  {_apart(worst)}, {wording.count(sum(o.pairs for o in same), 'pair')}{also}"
    for worst in (o for o in rows.outputs if o.own and not o.flagged):
        yield f"{KINDS[worst.kind]:<23}  {_apart(worst)}: {worst.name} depends on it in the model itself"


def _apart(found: RowDiff) -> str:
    own = "" if found.reference_abs is None else f" (PyTorch's own {wording.drift(found.reference_abs)})"
    return f"differs by {wording.drift(found.worst_abs)} at most{own}"


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
    yield f"CPU       {facts['cpu']}, {wording.count(facts['cpus'], 'core')}; {facts['int8']}"
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
            "size": wording.size(outcome.bytes) if outcome.bytes else "",
            "verdict": STATUS_WORDS[outcome.status] + (f": {outcome.reason}" if _unmeasured(outcome) else ""),
            "worst": _worst_of(outcome.verdict) if outcome.verdict else "",
            "tried": _tried(outcome) if outcome.verdict else "",
            "seconds": "reused" if outcome.reused else f"{outcome.seconds:.1f}",
        }
        for outcome in outcomes
    ]


def _unmeasured(outcome: Outcome) -> bool:
    return outcome.verdict is None and bool(outcome.reason)


def _worst_of(verdict: Mapping[str, Any]) -> str:
    """The worst of the outputs; where they agree and what is written does not, the worst of that."""
    comparison = Comparison.from_dict(verdict["comparison"])
    written = report_written.worst(verdict.get("written", {}))
    return written if written and comparison.agrees else _worst(comparison)


def _worst(comparison: Comparison) -> str:
    headline = comparison.worst_headline()
    return "nothing compared" if headline is None else wording.measured(*headline)


def _tried(outcome: Outcome) -> str:
    verdict = outcome.verdict or {}
    cases = wording.count(int(verdict.get("cases", 0)), "case")
    tokens = verdict.get("tokens")
    tried = cases if tokens is None else f"{cases}, {wording.count(int(tokens), 'token')}"
    texts = verdict.get("written", {}).get("texts", {}).get("rows", 0)
    return f"{tried}, {wording.count(texts, 'text')} written" if texts else tried

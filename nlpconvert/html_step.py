"""Floor 4: one step's part of the HTML report, as plain values for the template. Data in, data out.

What a verdict may hold is told in `report`; keys that are not known there are shown as tables (`values`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nlpconvert import html_asked, html_written, plots, report, values, wording
from nlpconvert.artifact import Outcome
from nlpconvert.html_output import number, output_view
from nlpconvert.inputs import KINDS
from nlpconvert.validators.findings import Comparison

# A status has a word, a sign and a tone; what was not run is never in the tone of what agrees.
TONES = {"agrees": "good", "drift": "bad", "failed": "bad", "not run": "open", "skipped": "quiet"}
SIGNS = {"agrees": "✓", "drift": "✗", "failed": "✗", "not run": "?", "skipped": "–"}

# What the page has its own place for; every other key of a verdict or an output goes to a table.
VERDICT_KEYS = frozenset(
    "comparison parent_comparison structure rows provider precision products cases tokens probe_sha256 versions host "
    "noise localisation regressions baseline proof scores written".split()
)
MODULES_SHOWN = 12


def step(
    outcome: Outcome,
    place: int,
    *,
    out: str,
    reference: str,
    recorded: Mapping[str, Any] | None,
    cases: Mapping[str, Mapping[str, Any]],
    recipe: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What the template shows of one step.

    `place`: the step's among all, from 1. `recorded`: the step as the manifest has it. `cases`: the golden's rows by
    name. `recipe`: recipe.json beside it.
    """
    lines = list(report.verdict_lines(outcome, reference, out=out))
    verdict = outcome.verdict or {}
    comparison = Comparison.from_dict(verdict["comparison"]) if verdict else None
    raw = verdict["comparison"]["outputs"] if verdict else []
    before = {_key(each): each for each in _outputs(recorded)}
    anchor = f"s{place}-{slug(outcome.step)}"
    pairs = list(zip(comparison.outputs, raw, strict=True)) if comparison else []
    pairs.sort(key=lambda pair: (pair[0].agrees, -pair[0].used))
    return {
        "name": outcome.step,
        "id": anchor,
        "word": report.STATUS_WORDS[outcome.status],
        "tone": TONES[outcome.status],
        "sign": SIGNS[outcome.status],
        "headline": lines[0],
        "reason": outcome.reason,
        "again": "\n".join(line.removeprefix("Again: ") for line in lines if line.startswith("Again: ")),
        "text": "\n".join(lines),
        "problems": [*(comparison.problems if comparison else ()), *verdict.get("structure", ())],
        "notes": list(outcome.notes),
        "outputs": [
            output_view(output, plain, f"{anchor}-{place}", before.get(_key(plain)), cases)
            for place, (output, plain) in enumerate(pairs, 1)
        ],
        "facts": _facts(outcome, comparison),
        "rows": _rows(verdict.get("rows")),
        "products": _products(verdict.get("products")),
        "not_applicable": list(comparison.not_applicable) if comparison else [],
        "located": _located(verdict.get("localisation"), anchor),
        "candidates": _candidates(recipe),
        "written": html_written.written(verdict.get("written"), anchor),
        "proof": html_asked.proof(verdict.get("proof")),
        "scores": html_asked.scores(verdict.get("scores")),
        "regressions": [str(each.get("text", "")) for each in verdict.get("regressions") or ()],
        "more": [
            named
            for key, value in {**verdict, "answer spans": _spans(verdict)}.items()
            if key not in VERDICT_KEYS and values.worth_showing(value)
            for named in values.tables(values.title(key), value)
        ],
    }


def slug(text: str) -> str:
    """A text as part of an id of the page."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower()


def latency(outcome: Outcome, recipe: Mapping[str, Any] | None) -> float | None:
    """The measured latency over the plain float32 file's, where there is one."""
    made_by = outcome.artifact.made_by if outcome.artifact else {}
    found = made_by.get("latency_ratio")
    if found is None:
        found = next((each.get("latency") for each in candidates(recipe) if each.get("chosen")), None)
    ratio = number(found)
    return ratio if ratio and ratio > 0 else None


def moved(outcome: Outcome) -> float | None:
    """The largest relative L2 of an output: the one measure that every precision has. None without any."""
    if outcome.verdict is None:
        return None
    found = [o.relative_l2 for o in Comparison.from_dict(outcome.verdict["comparison"]).outputs if o.elements]
    found = [value for value in found if math.isfinite(value)]
    return max(found, default=None)


def _key(plain: Mapping[str, Any]) -> tuple[str, str]:
    return str(plain.get("name")), str(plain.get("only", ""))


def _outputs(recorded: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    found = mapping(mapping(mapping(recorded).get("verdict")).get("comparison")).get("outputs")
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def mapping(value: Any) -> Mapping[str, Any]:
    """A value that has to be an object; an empty one where it is none: what was recorded may be a stranger's."""
    return value if isinstance(value, Mapping) else {}


def candidates(recipe: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The candidates of a recipe, those that are objects."""
    found = mapping(recipe).get("candidates")
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


def _spans(verdict: Mapping[str, Any]) -> Any:
    return (verdict.get("comparison") or {}).get("spans")


def _facts(outcome: Outcome, comparison: Comparison | None) -> list[tuple[str, str]]:
    """What holds for the step as a whole, as pairs of words."""
    verdict, artifact = outcome.verdict or {}, outcome.artifact
    found: list[tuple[str, str]] = []
    if comparison is not None:
        ran = " and ".join(str(each) for each in (verdict.get("provider"), verdict.get("precision")) if each)
        found.append(("ran on", ran or "not told"))
        tokens = verdict.get("tokens")
        found.append(("tried", f"{comparison.cases:,} cases" + (f", {tokens:,} tokens" if tokens else "")))
    if artifact is not None:
        found.append(("file", f"{artifact.step}/{artifact.path.name}: {artifact.format}, {artifact.precision}"))
        found.append(("made from", f"{artifact.parent} {artifact.parent_sha256[:12]}".strip()))
    if outcome.bytes:
        found.append(("size", wording.size(outcome.bytes)))
    if verdict.get("parent_comparison") and artifact is not None:
        worst = Comparison.from_dict(verdict["parent_comparison"]).worst_headline()
        if worst is not None:
            found.append((f"against {artifact.parent}", wording.measured(*worst)))
    baseline = verdict.get("baseline")
    if baseline:
        told = "" if baseline.get("compared", True) else f": not compared, {baseline.get('reason', '')}"
        found.append(("held against", f"{baseline.get('path', 'a baseline')}{told}"))
    found.append(("took", "reused" if outcome.reused else f"{outcome.seconds:.1f} s"))
    return found


# -- around it ---------------------------------------------------------------------------------------------------------


def _rows(data: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A row alone against the same row in company: a table, and what could not be asked."""
    if not data:
        return None
    rows = [
        (
            KINDS.get(each.get("kind", "company"), str(each.get("kind"))),
            str(each["name"]),
            wording.drift(float(each["worst_abs"])),
            "not known" if each["reference_abs"] is None else wording.drift(float(each["reference_abs"])),
            f"{each['flagged']:,} of {each['pairs']:,}" + (" (the model's own)" if each.get("own") else ""),
            f"row {each['row']} of {each['case']} and row {each['twin_row']} of {each['twin']}",
        )
        for each in data["outputs"]
    ]
    return {"rows": rows, "flagged": bool(data.get("flagged")), "problems": list(data.get("problems", ()))}


def _products(data: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    if not data:
        return []
    shares = data.get("share", {})
    ordered = sorted(data["count"].items(), key=lambda item: -float(shares.get(item[0], 0.0)))
    return [(name, f"{count:,}", f"{float(shares.get(name, 0.0)):.1%}") for name, count in ordered]


def _located(data: Any, anchor: str) -> dict[str, Any] | None:
    """Drift by layer: the plot, the modules that introduce most, and what could not be matched."""
    if not isinstance(data, Mapping) or not data.get("modules"):
        return None
    modules: Sequence[Mapping[str, Any]] = data["modules"]
    introduced = [_size(module.get("introduced")) for module in modules]
    first, most = (str(data.get(key) or "") for key in ("first", "most"))
    # A module may hold several tensors: the mark stands at the one that introduced most.
    places = {name: _place_of(name, modules, introduced) for name in (first, most) if name}
    shown = sorted(sorted(range(len(modules)), key=lambda place: -introduced[place])[:MODULES_SHOWN])
    largest = max((size for size in introduced if size < math.inf), default=0.0)
    answer = _answer(first, most, bool(data.get("stands_out", True)), introduced, places)
    return {
        "answer": answer,
        "first": first,
        "against": str(data.get("against", "")),
        "line": bool(number(data.get("threshold"))),
        "svg": plots.layers(
            modules,
            f"{anchor}-layers",
            f"Drift by layer over {len(modules)} tensors. {answer}",
            number(data.get("threshold")),
        ),
        "rows": [
            {
                "place": place + 1,
                "module": str(modules[place].get("module", "")),
                "introduced": _drift_or(modules[place].get("introduced")),
                "arrives": _drift_or(modules[place].get("arrives")),
                "share": 1.0 if introduced[place] == math.inf else introduced[place] / largest if largest else 0.0,
                "mark": "first to move" if place == places.get(first) else "most" if place == places.get(most) else "",
            }
            for place in shown
        ],
        "left": len(modules) - len(shown),
        "unmatched": [str(name) for name in data.get("unmatched") or ()],
        "notes": [str(note) for note in data.get("notes") or ()],
    }


def _answer(
    first: str, most: str, stands_out: bool, introduced: Sequence[float], places: Mapping[str, int | None]
) -> str:
    """Which module moved first, in a sentence."""

    def of_it(name: str) -> str:
        place = places.get(name)
        return "" if place is None else f" (introduced {_drift_or(introduced[place])} of it)"

    if not first:
        return "First to move: none stands out."
    if not stands_out:
        return f"Many moved, none far more than its peers; most in {most or first}{of_it(most or first)}."
    other = f"; most in {most}{of_it(most)}" if most and most != first else ""
    return f"First to move: {first}{of_it(first)}{other}."


def _place_of(name: str, modules: Sequence[Mapping[str, Any]], introduced: Sequence[float]) -> int | None:
    found = [place for place, module in enumerate(modules) if module.get("module") == name]
    return max(found, key=lambda place: introduced[place], default=None)


def _size(value: Any) -> float:
    """A drift as a number; 0 for what is none, infinity where it is not finite."""
    if value in ("inf", "nan"):
        return math.inf
    return number(value) or 0.0


def _drift_or(value: Any) -> str:
    if value is None:
        return "-"
    if value in ("inf", "nan", math.inf):
        return "not finite"
    found = number(value)
    return str(value) if found is None else wording.drift(found)


def _candidates(recipe: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """What the search tried, as recipe.json has it."""
    return [
        {
            "name": str(each.get("name", "")),
            "drift": str(each.get("drift", "")),
            "used": f"{float(each['used']):.0%}" if number(each.get("used")) is not None else "",
            "latency": f"{float(each['latency']):.2f} x" if number(each.get("latency")) else "not timed",
            "share": f"{float(each['share']):.1%}" if number(each.get("share")) is not None else "",
            "note": "chosen" if each.get("chosen") else str(each.get("note", "")),
            "chosen": bool(each.get("chosen")),
        }
        for each in candidates(recipe)
    ]

"""Floor 4: all outcomes as one HTML file that opens offline: no script, nothing from elsewhere. Data in, text out.

The template is data/report.html.j2, which escapes whatever it is given; a step's part is `html_step`, plots are
`plots`. The page is for the engineer who was paged: what moved, where, since when, how to see it again; then the rest.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nlpconvert
from nlpconvert import html_step, plots, report, wording
from nlpconvert.artifact import Outcome
from nlpconvert.errors import EXIT_CODES, MissingPackage
from nlpconvert.validators.findings import Comparison

TEMPLATE = Path(__file__).parent / "data" / "report.html.j2"
RECIPE = "recipe.json"
RUNS = {"onnx": "onnxruntime", "torchscript": "torch", "tensorrt": "tensorrt"}
"""The packages that run a format, by how their names begin."""


def check() -> None:
    """MissingPackage, with the extra that brings it, when no report can be made here. For before any work."""
    for package in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(
                f"the HTML report needs {package}, which is not installed: pip install 'nlpconvert[verify]'"
            )


def recipes(outcomes: Sequence[Outcome]) -> dict[str, Mapping[str, Any]]:
    """recipe.json of each artifact that has one, by step: the candidates of a search and their latency.

    One that cannot be read is left out: it is no part of a verdict.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for outcome in outcomes:
        if outcome.artifact is None or RECIPE not in outcome.artifact.files:
            continue
        try:
            data = json.loads((outcome.artifact.directory / RECIPE).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(data, dict):
            found[outcome.step] = data
    return found


def render(
    outcomes: Sequence[Outcome],
    *,
    out: str = "OUT",
    title: str = "",
    reference: str = "pytorch",
    recorded: Mapping[str, Any] | None = None,
    recipes: Mapping[str, Mapping[str, Any]] | None = None,
    exit_code: int | None = None,
    when: str = "",
) -> str:
    """The report as one HTML document.

    `out`: as the user typed it, for commands to type again. `recorded`: the manifest as plain JSON
    (`Manifest.to_json`), where there is one: source, cases, and what was measured when it was made. `recipes`: as the
    function of that name has them. `exit_code`: what the run ends in. `when`: the time of this run, for people.
    Raises MissingPackage without jinja2 or matplotlib.
    """
    check()
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # The plots are ours, and their letters are escaped where they are made.
    environment.filters["svg"] = lambda text: markupsafe.Markup(text)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = _page(outcomes, out, title, reference, recorded or {}, recipes or {}, exit_code, when)
    return template.render(page=page) + "\n"


def _page(
    outcomes: Sequence[Outcome],
    out: str,
    title: str,
    reference: str,
    recorded: Mapping[str, Any],
    recipes: Mapping[str, Mapping[str, Any]],
    exit_code: int | None,
    when: str,
) -> dict[str, Any]:
    source = recorded.get("source", {})
    cases = {str(case.get("name")): case for case in recorded.get("golden", {}).get("cases", ())}
    kept: Mapping[str, Any] = recorded.get("steps", {})
    steps = [
        html_step.step(
            outcome,
            place,
            out=out,
            reference=reference,
            recorded=kept.get(outcome.step),
            cases=cases,
            recipe=recipes.get(outcome.step),
        )
        for place, outcome in enumerate(outcomes, 1)
    ]
    word, tone = _overall(outcomes)
    named = {row.code: row for row in EXIT_CODES}
    return {
        "title": title or f"nlpconvert: {word}",
        "word": word,
        "tone": tone,
        "out": out,
        "when": _moment(when),
        "version": nlpconvert.__version__,
        "model": str(source.get("model", "")),
        "task": str(source.get("task", "")),
        "created": _moment(str(recorded.get("created", ""))),
        "exit_code": exit_code,
        "exit_name": named[exit_code].name if exit_code in named else "",
        "exit_meaning": named[exit_code].meaning if exit_code in named else "",
        "summary": [_summary(outcome, step) for outcome, step in zip(outcomes, steps, strict=True)],
        "failing": [step for step in steps if step["tone"] == "bad"],
        "steps": sorted(steps, key=lambda step: ("bad", "open", "good", "quiet").index(step["tone"])),
        "unmeasured": [step for step in steps if step["tone"] in ("open", "quiet")],
        "not_asked": _not_asked(steps),
        "changed": _changed(outcomes, kept),
        "compared_with_record": any((kept.get(o.step) or {}).get("verdict") and o.verdict for o in outcomes),
        "against": _against(outcomes, recipes),
        "provenance": _provenance(outcomes, recorded),
        "files": _files(outcomes),
    }


def _overall(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """One sentence on all steps together, and its tone."""
    count = {status: sum(o.status == status for o in outcomes) for status in html_step.TONES}
    how = [_drifted(outcome) for outcome in outcomes if outcome.status == "drift"]
    bad, measured = count["drift"] + count["failed"], count["agrees"] + len(how) - how.count("refused")
    total = f"{len(outcomes)} artifacts" if len(outcomes) != 1 else "1 artifact"
    if not bad and not measured:
        return "nothing was verified", "open" if outcomes else "bad"
    told = [
        (how.count("disagrees"), f"of {total} disagree{{}} with PyTorch"),
        (how.count("worse"), f"of {total} agree{{}} with PyTorch and got worse than the baseline"),
        (how.count("fails"), f"of {total} agree{{}} with PyTorch and did not pass what else was asked"),
        (how.count("refused"), "refused before anything was measured"),
        (count["failed"], "could not be made"),
        (0 if bad else count["agrees"], f"of {total} agree{{}} with PyTorch"),
        (count["not run"], "not run"),
    ]
    words = ", ".join(f"{number} {text.format('s' if number == 1 else '')}" for number, text in told if number)
    return words, "bad" if bad else "open" if count["not run"] else "good"


def _drifted(outcome: Outcome) -> str:
    """What a drift is: "refused" (another file than was recorded, stale, or it cannot be opened), "disagrees", "worse"
    (than its baseline), or "fails" (scores on data, a proof)."""
    if outcome.verdict is None:
        return "refused"
    if outcome.verdict.get("structure") or not Comparison.from_dict(outcome.verdict["comparison"]).agrees:
        return "disagrees"
    return "worse" if outcome.verdict.get("regressions") else "fails"


def _moment(text: str) -> str:
    """An ISO time as a person reads it."""
    return text.replace("T", " ", 1).replace("+00:00", " UTC")


def _summary(outcome: Outcome, step: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the table on top: the output that is nearest to its bound, or furthest past it."""
    first = step["outputs"][0] if step["outputs"] else None
    row = report.table_rows([outcome])[0]
    return {
        **{key: step[key] for key in ("name", "id", "word", "tone", "sign")},
        "output": first["name"] if first else "",
        "measured": first["measured"] if first else "",
        "bound": first["bound"] if first else "",
        "used": first["used_short"] if first else "",
        "share": first["share"] if first else 0.0,
        "over": first is not None and first["tone"] == "bad",
        "reason": outcome.reason,
        "size": row["size"],
        "tried": row["tried"],
        "seconds": row["seconds"],
    }


def _not_asked(steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Cases that were not applicable: case, reason, and the steps it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for step in steps:
        for case, reason in step["not_applicable"]:
            found.setdefault((case, reason), []).append(step["name"])
    return [(case, reason, ", ".join(names)) for (case, reason), names in found.items()]


def _changed(outcomes: Sequence[Outcome], kept: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """What is another than when the verdicts were recorded: what, then, now, and the steps it holds for."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for outcome in outcomes:
        before = html_step.mapping(html_step.mapping(kept.get(outcome.step)).get("verdict"))
        if not before or outcome.verdict is None:
            continue
        then, now = _circumstances(before), _circumstances(outcome.verdict)
        runs = RUNS.get(outcome.artifact.format if outcome.artifact else "", "")
        for key in dict.fromkeys((*then, *now)):
            # A gate has fewer packages than the machine that converted: one that is on one side only counts if it runs.
            told = (key in then and key in now) or (runs and key.startswith(runs))
            if told and then.get(key) != now.get(key):
                found.setdefault((key, then.get(key, "not there"), now.get(key, "not there")), []).append(outcome.step)
    return [(*key, ", ".join(names)) for key, names in found.items()]


def _circumstances(verdict: Mapping[str, Any]) -> dict[str, str]:
    """What may move an answer without any file changing."""
    found = {str(name): str(version) for name, version in html_step.mapping(verdict.get("versions")).items()}
    host = html_step.mapping(verdict.get("host"))
    for key in ("cpu", "cpus", "machine", "platform", "python"):
        if key in host:
            found[{"cpu": "processor", "cpus": "cores"}.get(key, key)] = str(host[key])
    if "cpu_flags" in host:
        found["processor's flags"] = " ".join(map(str, host["cpu_flags"] or ()))
    for key, name in (("provider", "provider"), ("precision", "precision that ran"), ("probe_sha256", "probe set")):
        if verdict.get(key):
            found[name] = str(verdict[key])
    return found


def _against(outcomes: Sequence[Outcome], recipes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Drift against size and, where it was measured, speed; None with fewer than two artifacts that were measured."""
    rows, sizes, speeds = [], [], []
    for outcome in outcomes:
        drift = html_step.moved(outcome)
        if drift is None:
            continue
        speed = html_step.latency(outcome, recipes.get(outcome.step))
        if outcome.bytes:
            sizes.append(plots.Point(outcome.step, outcome.bytes / 1e6, drift, outcome.status))
        if speed is not None:
            speeds.append(plots.Point(outcome.step, speed, drift, outcome.status))
        rows.append(
            {
                "name": outcome.step,
                "size": wording.size(outcome.bytes) if outcome.bytes else "",
                "drift": wording.drift(drift),
                "speed": "" if speed is None else f"{speed:.2f} x",
                "status": report.STATUS_WORDS[outcome.status],
            }
        )
    if len(rows) < 2:
        return None
    said = "; ".join(f"{row['name']} {row['size']}, {row['drift']}" for row in rows)
    figures = []
    if len(sizes) > 1:
        figures.append(plots.scatter(sizes, "size, MB", "drift-size", f"Drift against size: {said}"))
    if speeds:
        across = "time, in times the plain float32 file's"
        said = "; ".join(f"{row['name']} {row['speed']}, {row['drift']}" for row in rows if row["speed"])
        figures.append(plots.scatter(speeds, across, "drift-speed", f"Drift against time: {said}"))
    return {"rows": rows, "figures": figures, "timed": bool(speeds)}


def _provenance(outcomes: Sequence[Outcome], recorded: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of pairs: the source, the probe set, this machine, the versions."""
    verdict = next((o.verdict for o in outcomes if o.verdict is not None), None) or {}
    source, golden = recorded.get("source", {}), recorded.get("golden", {})
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    about = [
        (words, str(source[key]))
        for key, words in (
            ("model", "model"), ("revision", "revision"), ("class", "class"), ("task", "task"), ("dtype", "stored in"),
            ("sha256", "sha256"),
        )
        if source.get(key)
    ]  # fmt: skip
    if source.get("parameters"):
        about.insert(-1, ("parameters", f"{int(source['parameters']):,}"))
    if recorded:
        about.append(
            ("recorded", f"{_moment(str(recorded.get('created', '')))} by nlpconvert {recorded.get('nlpconvert', '')}")
        )
    groups.append(("source", about))
    probe = verdict.get("probe_sha256") or golden.get("probe_sha256")
    cases = golden.get("cases", ())
    groups.append(
        ("probes", [*([("cases", f"{len(cases):,}")] if cases else []), *([("sha256", probe)] if probe else [])])
    )
    host = verdict.get("host") or recorded.get("host", {})
    machine = [(key, str(host[key])) for key in ("cpu", "cpus", "platform", "python") if host.get(key)]
    if host.get("cpu_flags"):
        machine.append(("flags", " ".join(host["cpu_flags"])))
    groups.append(("machine" if verdict else "machine, when recorded", machine))
    versions = verdict.get("versions") or recorded.get("versions", {})
    groups.append(("versions", [(str(name), str(version)) for name, version in versions.items()]))
    return [group for group in groups if group[1]]


def _files(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Every file that a verdict holds for, and its sha256."""
    return [
        (f"{outcome.step}/{name}", sha256)
        for outcome in outcomes
        if outcome.artifact is not None
        for name, sha256 in outcome.artifact.files.items()
    ]

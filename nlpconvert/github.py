"""Floor 4: outcomes as GitHub shows them: Markdown for a job's summary, workflow commands for its annotations.

Pure: data in, text and lines out; who prints them or appends them to a file is the command line. GitHub reads commands
from either stream, shows ten errors and ten warnings of a step, and takes a summary of one MiB.
"""

# `annotations` is GitHub's word and a function here: the import of that name from __future__ is left out.

import re
from collections.abc import Iterator, Mapping, Sequence

from nlpconvert import report, wording
from nlpconvert.artifact import Outcome
from nlpconvert.validators.findings import Comparison, OutputDiff

SUMMARY = "GITHUB_STEP_SUMMARY"
"""The variable that names the file to append a summary to."""
LIMIT = 1_000_000
"""Bytes of a summary; GitHub refuses 1 MiB."""
SIGNS = {"agrees": "✅", "drift": "❌", "failed": "❌", "not run": "⚠️", "skipped": "➖"}


def here(environ: Mapping[str, str]) -> bool:
    """Whether this runs in a GitHub workflow."""
    return environ.get("GITHUB_ACTIONS") == "true"


def summary(outcomes: Sequence[Outcome], *, out: str = "OUT", reference: str = "pytorch", title: str = "") -> str:
    """Markdown: the table, then the failure text of each step that failed, then what was not run.

    A text too long for GitHub is cut at a line, and says so.
    """
    lines = [f"## {_text(title)}" if title else f"## nlpconvert verify {_code(out)}", "", *_table(outcomes)]
    for outcome in outcomes:
        if outcome.status in ("drift", "failed"):
            failure = "\n".join(report.verdict_lines(outcome, reference, out=out))
            fence = _fence(failure)
            lines += ["", f"### {SIGNS[outcome.status]} {_text(outcome.step)}", "", f"{fence}text", failure, fence]
    rest = [o for o in outcomes if o.status in ("not run", "skipped")]
    if rest:
        lines += ["", "### Not run", ""]
        lines += [f"- {_code(o.step)}: {o.status}{_text(f', {o.reason}' if o.reason else '')}" for o in rest]
    asked = _not_applicable(outcomes)
    if asked:
        lines += ["", "<details><summary>Cases that were not applicable</summary>", ""]
        lines += [f"- {_code(case)}: {_text(reason)}" for case, reason in asked]
        lines += ["", "</details>"]
    return _cut("\n".join(lines) + "\n")


def annotations(
    outcomes: Sequence[Outcome], *, forgiven: Sequence[str] = (), file: str = "", reference: str = "pytorch"
) -> list[str]:
    """Workflow commands: an error for each output that fails (for the step where none does), a warning for what was
    not run; the furthest past its bound first, for GitHub shows ten.

    `forgiven`: steps that may be "not run"; they get no warning. `file`: the repository's file to show them at.
    """
    errors = [found for outcome in outcomes for found in _errors(outcome, reference)]
    errors.sort(key=lambda error: -error[0])
    place = f"file={_property(file)}," if file else ""
    lines = [f"::error {place}title={_property(title)}::{_message(message)}" for _, title, message in errors]
    for outcome in outcomes:
        if outcome.status == "not run" and outcome.step not in forgiven:
            words = f"{outcome.step}: not run"
            lines.append(
                f"::warning {place}title={_property(words)}::{_message(outcome.reason or 'no reason is known')}"
            )
    return lines


def _errors(outcome: Outcome, reference: str) -> Iterator[tuple[float, str, str]]:
    """How far past its bound, title and message of each failing output; of the step where no output fails by itself."""
    if outcome.status not in ("drift", "failed"):
        return
    lines = list(report.verdict_lines(outcome, reference))
    comparison = None if outcome.verdict is None else Comparison.from_dict(outcome.verdict["comparison"])
    failing = [] if comparison is None else [output for output in comparison.outputs if not output.agrees]
    for output in failing:
        yield output.used, f"{outcome.step}: {output.name} drifted from {reference}", _sentence(output)
    problems = () if comparison is None else comparison.problems
    if not failing or problems:
        told = [*problems, *(outcome.verdict or {}).get("structure", ()), outcome.reason]
        message = "; ".join(dict.fromkeys(each for each in told if each)) or lines[0]
        yield float("inf"), f"{outcome.step}: {report.STATUS_WORDS[outcome.status]}", message


def _sentence(output: OutputDiff) -> str:
    """One failing output in a sentence: measured, allowed, the worst element."""
    if output.problems:
        return "; ".join(output.problems)
    if output.first_nonfinite is not None:
        first = output.first_nonfinite
        return f"{output.nonfinite:,} elements not finite, first at {list(first.index)} in case {first.case}"
    found = f"{wording.measured(output.tolerance.measure, output.measured)}, allowed {output.tolerance.text}"
    if output.worst is None:
        return found
    worst = output.worst
    return (
        f"{found}; worst {wording.drift(worst.difference)} at {list(worst.index)} (reference {worst.reference:.5g}, "
        f"candidate {worst.candidate:.5g}) in case {output.worst_case or worst.case}"
    )


def _table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The report's table as Markdown; the verdict has a sign and its word."""
    if not outcomes:
        yield "Nothing was verified."
        return
    yield f"| {' | '.join(report.HEADER)} |"
    yield f"|{'|'.join(' --- ' for _ in report.HEADER)}|"
    for outcome, row in zip(outcomes, report.table_rows(outcomes), strict=True):
        cells = {**row, "verdict": f"{SIGNS[outcome.status]} {row['verdict']}"}
        yield f"| {' | '.join(_text(cells[name]) for name in report.HEADER)} |"


def _not_applicable(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    """Cases and reasons, each once."""
    found = (Comparison.from_dict(o.verdict["comparison"]).not_applicable for o in outcomes if o.verdict is not None)
    return list(dict.fromkeys(pair for pairs in found for pair in pairs))


def _text(text: str) -> str:
    """Words that Markdown and HTML leave as they are, on one line: a reason may quote anything."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]#|~@])", r"\\\1", " ".join(escaped.split()))


def _code(text: str) -> str:
    """A name in code style, whatever it holds."""
    line = " ".join(text.split())
    ticks = "`" * (1 + max((len(run) for run in re.findall(r"`+", line)), default=0))
    inner = f" {line} " if line.startswith("`") or line.endswith("`") else line
    return f"{ticks}{inner}{ticks}"


def _fence(text: str) -> str:
    """A fence that the text cannot close."""
    return "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))


def _message(text: str) -> str:
    """A message as workflow commands take it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """A property's value as workflow commands take it."""
    return _message(text).replace(":", "%3A").replace(",", "%2C")


def _cut(text: str) -> str:
    """At most LIMIT bytes, cut at a line; a fence or details left open do no harm at the end."""
    data = text.encode()
    if len(data) <= LIMIT:
        return text
    kept = data[:LIMIT].decode(errors="ignore").rpartition("\n")[0]
    return f"{kept}\n\n(cut here: the whole text is in the job's log)\n"

"""Floor 4: what scoring on labelled data has found, as lines for a person.

Pure: data in, lines out. The numbers and what they mean are `validators.scores`; what decides is `validators.fail_if`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePath

from nlpconvert.validators.scores import Changed, Scored, Scores
from nlpconvert.validators.statistics import Interval

_LABEL = 15


def lines(scores: Scores) -> Iterator[str]:
    """The report on one step: each score beside the reference's, what the rows can say, and each condition.

    Warnings about the data are not in it: they stand among the step's own notes.
    """
    if scores.status != "scored":
        word = {"drift": "DRIFT", "not run": "not run"}[scores.status]
        yield f"{scores.step}: {word} on {_data(scores)}: {scores.reason}"
        return
    yield _headline(scores)
    yield ""
    for each in scores.scores:
        yield from _score(each)
    if scores.changed is not None:
        yield from _detail("decisions", _changed(scores.changed))
        unseen = percent(scores.changed.unseen)
        yield from _detail("unseen", f"{_rows(scores.changed.rows)} cannot see a change below {unseen}")
    yield from _detail("reference", scores.reference or "none: there is the score alone")
    yield from _detail("ran on", f"{scores.provider}, {scores.precision}")
    for note in scores.notes:
        yield from _detail("note", note)
    if scores.fail_if:
        yield ""
    words = ["FAILS" if tripped.failed else tripped.status for tripped in scores.fail_if]
    width = max(map(len, words), default=0)
    for word, tripped in zip(words, scores.fail_if, strict=True):
        yield f"  {word:<{width}} {tripped.text}: {tripped.reason}"
        if tripped.warning:
            yield f"  {'':<{width}} warning: {tripped.warning}"


def warnings(scores: Scores) -> Iterator[str]:
    """What a person should know of a step that passes: why that may be worth less than it looks."""
    for warning in scores.warnings:
        yield f"{scores.step}: {warning}"


def _headline(scores: Scores) -> str:
    failed = [each.text for each in scores.fail_if if each.failed]
    if failed:
        return f"{scores.step} FAILS on {_data(scores)}: {', '.join(failed)}"
    statuses = {each.status for each in scores.fail_if} - {"not judged"}
    word = "scored" if not statuses else "passes" if statuses == {"passes"} else "does not fail"
    return f"{scores.step} {word} on {_data(scores)}: " + ", ".join(
        f"{each.name} {number(each.candidate, each)}" for each in scores.scores
    )


def _data(scores: Scores) -> str:
    rows = f" ({_rows(scores.rows)})" if scores.rows else ""
    return f"{PurePath(scores.data).name or 'the data'}{rows}"


def _score(each: Scored) -> Iterator[str]:
    beside = "" if each.reference is None else f"   reference {number(each.reference, each)}"
    average = f"   {each.average}" if each.average else ""
    yield f"  {each.name:<{_LABEL}}  {number(each.candidate, each)}{beside}{average}"
    if each.labels:
        yield from _detail("labels", each.labels)
    yield from _detail("interval", interval(each.interval, each))
    if each.difference is None or each.difference_interval is None or each.chance is None:
        return
    span = each.difference_interval
    if span.low == span.high == 0:
        yield from _detail("difference", "none, however these rows are drawn, so there is no interval of it")
    else:
        yield from _detail("difference", f"{moved(each.difference, each)}, {interval(span, each, signed=True)}")
    if each.worse is not None and each.better is not None:
        yield from _detail("discordant", _discordant(each.worse, each.better))
    if _worse(each):
        yield from _detail("by chance", f"so bad a difference comes about in {percent(each.chance)} of samples")
    if each.detectable is not None:
        drop = "drop" if each.better_is == "higher" else "rise"
        least = moved(each.detectable, each, signed=False)
        yield from _detail("could show", f"a {drop} of {least} or more (at {percent(each.level)}, four times of five)")


def _discordant(worse: int, better: int) -> str:
    return f"the reference alone is right in {_rows(worse)}, the step alone in {better:,}"


def _worse(each: Scored) -> bool:
    difference = each.difference or 0.0
    return difference < 0 if each.better_is == "higher" else difference > 0


def _changed(changed: Changed) -> str:
    share = percent(changed.count / changed.rows)
    span = f"{percent(changed.interval.low)} to {percent(changed.interval.high)} at {percent(changed.interval.level)}"
    return f"changed in {changed.count:,} of {_rows(changed.rows)} ({share}, {span})"


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def interval(span: Interval, each: Scored, *, signed: bool = False) -> str:
    ends = (
        f"{moved(span.low, each)} to {moved(span.high, each)}"
        if signed
        else f"{number(span.low, each)} to {number(span.high, each)}"
    )
    return f"{ends} at {percent(span.level)} ({span.method})"


def number(value: float, each: Scored) -> str:
    """A score: four places where it runs to 1, else two."""
    return f"{value:.4f}" if each.top == 1 else f"{value:.2f}"


def moved(value: float, each: Scored, *, signed: bool = True) -> str:
    """A difference: in percentage points of a score that runs to 1, else in its own unit."""
    sign = "+" if signed else ""
    if each.top == 1:
        return f"{0.0 if abs(value) < 5e-6 else 100 * value:{sign}.2f} %"
    return f"{value:{sign}.2g}" if value else "0"


def percent(share: float) -> str:
    """At least two figures: 0.05 %, 1.5 %, 12 %, 99.9 %; 0 % only for nothing."""
    number = 100 * share
    if number >= 10:
        return f"{number:.1f}".removesuffix(".0") + " %"
    return f"{number:.2g} %" if math.isfinite(number) else "?"


def _detail(label: str, text: str) -> Iterator[str]:
    yield f"    {label:<{_LABEL - 2}}  {text}"

"""Floor 4: the difference of two manifests as lines for a person. Nothing is read or decided here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from nlpconvert.report import STATUS_WORDS
from nlpconvert.wording import size

if TYPE_CHECKING:
    from nlpconvert.comparing import Change, Difference, OutputChange, StepChange

HEADER = ("step", "status", "size", "output", "measured", "of its bound", "files")


def lines(difference: Difference) -> Iterator[str]:
    """All of it: what the two are, a table with a row for each output, worst first, and what is to be said aloud."""
    yield f"old       {difference.old}   {difference.created[0]}"
    yield f"new       {difference.new}   {difference.created[1]}"
    yield from _surroundings(difference)
    yield ""
    yield from table(difference)
    said = list(aloud(difference))
    if said:
        yield ""
        yield from said


def _surroundings(difference: Difference) -> Iterator[str]:
    task, checkpoint, probes = difference.task, difference.checkpoint, difference.probes
    if task.before == task.after and checkpoint.before == checkpoint.after:
        yield f"source    the same checkpoint {_hash(checkpoint.before)}, {task.before}"
    else:
        what = "another task and checkpoint" if task.before != task.after else "another checkpoint"
        pair = f"{task.before} {_hash(checkpoint.before)} -> {task.after} {_hash(checkpoint.after)}"
        yield f"source    {what}: {pair}"
    other = [step for step in difference.steps if step.other_probes]
    if probes.before != probes.after:
        text = f"probes    others: {_cases(probes, old=True)} -> {_cases(probes)}"
        yield f"{text}; the numbers cannot be compared" if any(step.shared is None for step in other) else text
    elif other:
        yield f"probes    the same, {_cases(probes)}, but measured with others: {', '.join(s.step for s in other)}"
    else:
        yield f"probes    the same, {_cases(probes)}"
    yield f"versions  {_changes(difference.versions)}"
    yield f"host      {_changes(difference.host)}"


def _hash(text: str | None) -> str:
    return (text or "none")[:12]


def _cases(probes: Change, old: bool = False) -> str:
    """ "24 cases" of "<hash> (24 cases)"."""
    text = (probes.before if old else probes.after) or ""
    return text.partition("(")[2].rstrip(")") or "none"


def _changes(changes: Sequence[Change]) -> str:
    if not changes:
        return "the same"
    return ", ".join(
        f"{each.name} {each.before}"
        if each.after is None and each.name.startswith("cpu flags")
        else f"{each.name} {each.after}"
        if each.before is None and each.name.startswith("cpu flags")
        else f"{each.name} {_or_none(each.before)} -> {_or_none(each.after)}"
        for each in changes
    )


def _or_none(text: str | None) -> str:
    return "none" if text is None else text


# -- the table ---------------------------------------------------------------------------------------------------------


def table(difference: Difference) -> Iterator[str]:
    """Aligned columns under HEADER; a step's own cells stand in its first row."""
    rows = [HEADER, *(row for step in difference.steps for row in _rows(step))]
    if len(rows) == 1:
        yield "neither holds a step"
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _rows(step: StepChange) -> Iterator[tuple[str, ...]]:
    head = (step.step, _pair(_status(step.status_before), _status(step.status_after)), _sizes(step))
    files = _files(step)
    if not step.outputs:
        yield (*head, "", "", "", files)
    for number, output in enumerate(step.outputs):
        own = (*head, files) if number == 0 else ("", "", "", "")
        yield (*own[:3], output.name, _measured(output), _used(output), own[3])


def _status(status: str | None) -> str:
    return "not there" if status is None else STATUS_WORDS.get(status, status.upper())


def _pair(before: str, after: str) -> str:
    return before if before == after else f"{before} -> {after}"


def _sizes(step: StepChange) -> str:
    before, after = (None if each is None else size(each) for each in (step.bytes_before, step.bytes_after))
    return "" if before is None and after is None else _pair(before or "none", after or "none")


def _files(step: StepChange) -> str:
    if step.files is None:
        return ""
    if not step.files:
        return "the same bytes"
    return step.files[0] + (f" and {len(step.files) - 1} more" if len(step.files) > 1 else "")


def _measured(output: OutputChange) -> str:
    sides = ((output.bound_before, output.measured_before), (output.bound_after, output.measured_after))
    before, after = (None if bound is None else (_measure(bound), value) for bound, value in sides)
    if before is None or after is None:
        there = before or after
        assert there is not None
        text = f"{there[0]} {_number(*there)}"
        return f"not compared -> {text}" if before is None else f"{text} -> not compared"
    first, second = _number(*before), _number(*after)
    if before[0] != after[0]:
        return f"{before[0]} {first} -> {after[0]} {second}"
    return f"{before[0]} {_pair(first, second) if before[1] != after[1] else second}"


def _measure(bound: str) -> str:
    """ "cosine" of "cosine>=0.99"; a multiple of the noise is measured in the unit of `rel`."""
    found = bound.partition(">=" if ">=" in bound else "<=")[0]
    return "rel" if found == "noise" else found


def _number(measure: str, value: float | None) -> str:
    if value is None:
        return "nothing"
    if measure == "cosine":
        return f"{value:.7f}" if value < 0.9999999 or value == 1 else f"1 - {1 - value:.1e}"
    return f"{value:.2%}" if measure == "changed" else f"{value:.2g}"


def _used(output: OutputChange) -> str:
    """How far each side was from turning; a bound that is not the same is shown with it."""
    sides = ((output.used_before, output.bound_before), (output.used_after, output.bound_after))
    same = output.bound_before == output.bound_after
    cells = ["" if used is None else f"{_share(used)} of {bound}" for used, bound in sides]
    if same:
        used = _pair(_share(output.used_before), _share(output.used_after))
        return f"{used} of {output.bound_after}"
    return _pair(cells[0] or "none", cells[1] or "none")


def _share(used: float | None) -> str:
    if used is None:
        return ""
    return "fails" if used == float("inf") else f"{used:.0%}" if used < 100 else f"{used:.0f} times"


# -- what is to be said aloud ------------------------------------------------------------------------------------------


def aloud(difference: Difference) -> Iterator[str]:
    """A line for everything that is worse, was loosened or cannot be compared, worst step first."""
    for step in difference.steps:
        if step.lost:
            now = _status(step.status_after)
            yield f"{step.step}: it agreed, and is {now} now{f': {step.reason}' if step.reason else ''}"
        if step.unreadable:
            yield f"{step.step}: {step.unreadable}"
        if step.other_probes:
            pair = f"{_cases(step.probes, old=True)} in the old one, {_cases(step.probes)} in the new one"
            yield f"{step.step}: measured with other probes, {pair}: {_held(step.shared)}"
        for each in step.worse:
            if each.kind != "probes" or not step.other_probes:  # said above
                yield f"{step.step}: {each.text}"


def _held(shared: int | None) -> str:
    if shared is None:
        return "the numbers cannot be compared"
    return f"compared over the {f'{shared} cases' if shared > 1 else 'one case'} that both have"

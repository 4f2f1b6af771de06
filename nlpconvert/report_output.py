"""Floor 4: one output of a verdict as lines: a few words where it agrees, all that is known where it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nlpconvert import wording
from nlpconvert.validators.findings import OutputDiff
from nlpconvert.validators.tolerance import passing


def name(output: OutputDiff) -> str:
    return f"{output.name}[{output.only}]" if output.only else output.name


def kind(output: OutputDiff) -> str:
    """Type and shape (of the case with the worst element)."""
    if output.worst is None:
        return output.dtype or "not given"
    return f"{output.dtype} ({', '.join(str(n) for n in output.worst.shape)})"


def short(output: OutputDiff) -> str:
    """An agreeing output in a few words: the deciding number and the worst element."""
    worst = f"worst {wording.drift(output.worst.difference)}" if output.worst else ""
    used = f", {wording.used(output.used)}" if output.elements and math.isfinite(output.used) else ""
    if output.tolerance.measure in ("abs", "rel"):
        return f"{worst}{used}"
    return (
        f"{wording.measured(output.tolerance.measure, output.measured)}, allowed {output.tolerance.text}{used}, {worst}"
    )


def details(output: OutputDiff) -> Iterator[str]:
    """What is known of one output, a line each."""
    yield from detail("allowed", [wording.allowed(output)])
    measure = output.tolerance.measure
    if output.elements:
        total, unit = {
            "abs": (output.elements, "elements"),
            "rel": (output.elements, "elements"),
            "changed": (output.decisions.count if output.decisions else 0, "decisions"),
        }.get(measure, (output.vectors, f"{output.unit}s"))
        share = wording.share(output.out_of_tolerance, total)
        yield from detail("out of tolerance", [f"{output.out_of_tolerance:,} of {total:,} {unit}{share}"])
    if output.first_nonfinite is not None:
        first = wording.place(output.first_nonfinite)
        yield from detail("not finite", [f"{wording.count(output.nonfinite, 'element')}, first at {first}"])
    if output.worst is not None:
        yield from detail("worst", [f"{wording.drift(output.worst.difference)} at {wording.place(output.worst)}"])
        if measure == "rel" and output.furthest and output.furthest.index != output.worst.index:
            furthest = f"{wording.drift(output.furthest.difference)} at {wording.place(output.furthest)}"
            yield from detail("furthest out", [f"{furthest}   (for its size)"])
        yield from detail("on average", [average(output)])
    if output.cosine is not None and (measure == "cosine" or output.unit == "token"):
        score = output.cosine
        where = f"of {output.unit} {list(score.index)}   case {score.case}"
        yield from detail(
            "cosine", [f"{wording.cosine(score.worst)} at worst {where}   {wording.cosine(score.mean)} on average"]
        )
    if output.decisions is not None:
        found = output.decisions
        near = f", {found.near_ties:,} of them near ties" if found.changed else ""
        yield from detail(
            "decisions", [f"top-1 changed in {found.changed:,} of {wording.count(found.count, output.unit)}{near}"]
        )
        if measure == "changed":
            yield from detail("so many tell", [certainty(output)] if output.detectable is not None else [])
    yield from agreement(output)
    if output.kl is not None:
        kl = output.kl
        worst = f"{wording.drift(kl.worst)} at worst of {output.unit} {list(kl.index)}   case {kl.case}"
        yield from detail("KL", [f"{wording.drift(kl.mean)} nats on average, {worst}"])
    if output.worst_case_score is not None:
        name, alone = output.worst_case_score
        yield from detail("one case", [f"{wording.measured(measure, alone)} in case {name} alone: it decides"])
    if output.padded_nonfinite or (output.padded is not None and output.padded.difference > 0):
        yield from detail("padded positions", [padded(output)])
    if output.elements and math.isfinite(output.used):
        yield from detail("used", [wording.used(output.used)])
    if not output.agrees:
        value = output.would_pass_at.get(measure)
        bound = None if value is None else passing(measure, value)
        if bound is not None:
            yield from detail("would pass at", [bound])
        elif not output.problems and output.elements:
            yield from detail("would pass at", ["no tolerance"])


def average(output: OutputDiff) -> str:
    noise = "" if math.isinf(output.sqnr_db) else f", SQNR {output.sqnr_db:.0f} dB"
    spread = f", worst {wording.drift(output.normalised)} of the reference's spread" if output.spread else ""
    return f"{wording.drift(output.mean_abs)}, relative L2 {wording.drift(output.relative_l2)}{noise}{spread}"


def certainty(output: OutputDiff) -> str:
    """What a count of changed decisions can say at all."""
    assert output.detectable is not None
    inside = "" if output.interval is None else f"95% interval {output.interval[0]:.2%} to {output.interval[1]:.2%}; "
    return f"{inside}so few {output.unit}s cannot show a change of less than {output.detectable:.2%}"


def agreement(output: OutputDiff) -> Iterator[str]:
    if output.top_k is not None:
        top = output.top_k
        yield from detail(
            f"top-{top.k}", [f"{wording.percent(top.agreement)} of the reference's are among the candidate's"]
        )
    if output.sequences is not None:
        found = output.sequences
        yield from detail("label sequences", [f"changed in {found.changed:,} of {wording.count(found.count, 'row')}"])
    if output.neighbours is not None:
        near = output.neighbours
        ranks = f"rank correlation {wording.cosine(near.correlation)}, {wording.cosine(near.worst)} at worst"
        yield from detail(
            "nearest", [f"neighbour changed for {near.changed:,} of {wording.count(near.rows, 'text')}; {ranks}"]
        )


def detail(label: str, values: Sequence[str]) -> Iterator[str]:
    for value in values:
        yield f"    {label:<16} {value}"


def padded(output: OutputDiff) -> str:
    bad = f", {wording.count(output.padded_nonfinite, 'element')} not finite" if output.padded_nonfinite else ""
    worst = wording.drift(output.padded.difference) if output.padded else "0"
    return f"differ by {worst} at most{bad}; not judged"

"""Floor 1, validators: is an artifact worse than it was before, by more than repetition explains? Two verdicts in.

Both verdicts are plain data, as a manifest keeps them: the baseline's and a fresh one's, of the same step on the same
probes. Whether the fresh one is within its own tolerance is `parity`'s question and already answered.

An output's loss L, in the measure of the baseline's tolerance, is the number that is held against the tolerance (for
cosine 1 - cosine). It is a regression where

    L_new > FACTOR * L_old + slack

`slack` is what the same arithmetic in another order moves, on another processor or with other threads. With
e = SLACK * noise, where noise is the reference's own noise in the unit of `rel`, as the baseline has it (NOISE where it
was not measured): a noise that was measured larger since excuses nothing.

    rel, noise   e
    abs          e * (scale + |reference|), at the worst element
    cosine       sqrt(2 L_old) * e + e^2 / 2: a relative error d makes 1 - cosine = d^2 / 2, and d grows by e
    kl           the same with e * scale: an error of the logits with standard deviation d makes KL = d^2 / 2
    changed      none: counts are held against each other instead

Counts: of k_old and k_new decisions that really changed (near ties stand apart), were both artifacts as good as each
other, each decision that only one of them changed would be as likely to be either's (McNemar 1947). Which decisions
changed is not kept, so that none is shared is assumed, which sees the least: a regression where
P[Binomial(k_old + k_new, 1/2) >= k_new] < ALPHA. Few texts have few decisions to change, so for such outputs the size
of the drift counts too: |candidate - reference| / |reference|, of all elements together, by the first formula with e.

Verdicts on other probes that share cases are held against each other over those (`overlap`). Then the drift of such
outputs is the largest absolute difference of a case, on average, by the formula of `abs`; and where the scales of all
cases, which are in the unit of `rel`, are more than SCALES apart, `abs` stands for `rel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nlpconvert.errors import UsageError
from nlpconvert.inputs import KINDS
from nlpconvert.validators import overlap, regression_written
from nlpconvert.validators.findings import Comparison, OutputDiff
from nlpconvert.validators.overlap import Cases, Probes
from nlpconvert.validators.regression_rules import ALPHA, FACTOR, NOISE, SCALES, SLACK, Regression, scatter
from nlpconvert.validators.rows import RowsReport
from nlpconvert.validators.tolerance import Tolerance, provider_class


def regressions(
    old: Mapping[str, Any], new: Mapping[str, Any], baseline: str = "the baseline", *, same_source: bool = True
) -> tuple[Regression, ...]:
    """All that is worse in `new` than in `old`, two verdicts of one step; what counts most first.

    `baseline` is how the old one is called in the sentences. Verdicts on other probes are compared over the cases that
    both have; where they share none, or one asks something else, or the providers are of another kind, the numbers
    cannot be compared, and that is a regression too: it must not pass for agreement. `same_source`: both are of the
    same checkpoint, so that the same probes have the same noise. Raises UsageError for a verdict that cannot be read.
    """
    try:
        before, after = (overlap.read(verdict) for verdict in (old, new))
        return _regressions(old, before, new, after, baseline, same_source)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{baseline}: its verdict cannot be read ({type(error).__name__}: {error}); make it again with this version"
        ) from error


def loosened(old: Tolerance, new: Tolerance, *, same_noise: bool = False) -> bool:
    """Whether `new` allows more. Bounds that were asked for in multiples of the noise are compared as such, and where
    the noise should be the same (`same_noise`) by what they came to as well, which may be FACTOR times as much. Of two
    different measures neither can be told to allow more, and it is False."""
    if old.measure != new.measure:
        return False
    if old.multiple is not None and new.multiple is not None:
        return new.multiple > old.multiple or (same_noise and new.value > FACTOR * old.value)
    return new.value < old.value if old.direction == ">=" else new.value > old.value


def noise_of(output: OutputDiff) -> float:
    """The noise of an output's reference in the unit of `rel`; NOISE where it was not measured."""
    return NOISE if output.noise is None else output.noise


# ---- the whole step -------------------------------------------------------------------------------------------------


def _regressions(
    old: Mapping[str, Any],
    before: Comparison,
    new: Mapping[str, Any],
    after: Comparison,
    baseline: str,
    same_source: bool,
) -> tuple[Regression, ...]:
    asked = overlap.probes(old, new)
    found = list(_incomparable(old, new, asked, baseline))
    numbers = not found
    same_noise = same_source and numbers and asked.shared is None
    lost = [case for case in _cases(before.outputs) if case not in _cases(after.outputs)]
    if numbers and lost and after.outputs:
        reasons = dict(after.not_applicable)
        why = f" ({reasons[lost[0]]})" if lost[0] in reasons else ""
        text = f"{_first(lost)} no longer compared{why}, as it was in {baseline}"
        found.append(
            Regression("cases", "", text, *map(float, (len(_cases(before.outputs)), len(_cases(after.outputs)))))
        )
    for name in dict.fromkeys(output.name for output in before.outputs):
        ours, theirs = ([o for o in side.outputs if o.name == name] for side in (before, after))
        if not theirs:
            found.append(Regression("output", name, f"{name} is no longer compared, as it was in {baseline}"))
            continue
        if numbers:
            found += _scope(ours, theirs, lost, asked.shared, baseline)
        for new_diff in theirs:
            # A case that has a bound of its own now had the output's before.
            old_diff = next((o for o in ours if o.only == new_diff.only), None)
            bound = old_diff or next((o for o in ours if not o.only), None)
            if bound is not None:
                found += _bound(bound, new_diff, same_noise, baseline)
            if numbers and old_diff is not None:
                found += _numbers(old_diff, new_diff, asked, baseline)
    if numbers:
        found += _whole(old, before, new, after, asked.shared, baseline)
        found += regression_written.regressions(old.get("written"), new.get("written"), baseline)
    return tuple(sorted(found, key=lambda each: (_RANK.index(each.kind), -each.times)))


_RANK = (
    "probes",
    "provider",
    "nonfinite",
    "problem",
    "output",
    "cases",
    "elements",
    "unmeasured",
    "rows",
    "changed",
    "loss",
    "tolerance",
)


def _incomparable(old: Mapping[str, Any], new: Mapping[str, Any], asked: Probes, baseline: str) -> Iterator[Regression]:
    if asked.why_not:
        text = f"{baseline} {asked.why_not}, so the numbers cannot be compared; make it again with these"
        yield Regression("probes", "", text)
    providers = old["provider"], new["provider"]
    if _kind(providers[0]) != _kind(providers[1]):
        text = f"{baseline} ran on {providers[0]} and this on {providers[1]}, so the numbers cannot be compared"
        yield Regression("provider", "", text)


def _kind(provider: str) -> str:
    try:
        return provider_class(provider)
    except UsageError:
        return provider


def _whole(
    old: Mapping[str, Any], before: Comparison, new: Mapping[str, Any], after: Comparison, over: Cases, baseline: str
) -> Iterator[Regression]:
    """What fails the step as a whole and did not, and answers that depend on what they did not depend on."""
    was = (*before.problems, *(old.get("structure") or ()))
    for problem in (*after.problems, *(new.get("structure") or ())):
        if not was:
            yield Regression("problem", "", f"{problem}; not so in {baseline}")
    if not old.get("rows") or not new.get("rows"):
        return
    calm = {(o.name, o.kind) for o in RowsReport.from_dict(old["rows"]).outputs if not o.flagged}
    for row in RowsReport.from_dict(new["rows"]).outputs:
        asked = over is None or {row.case, row.twin} <= over
        if row.flagged and (row.name, row.kind) in calm and asked:
            places = f"row {row.row} of {row.case} and row {row.twin_row} of {row.twin} differ by {row.worst_abs:.1e}"
            text = (
                f"{row.name}: {KINDS.get(row.kind, row.kind)}: {places}, beyond the model's own; not so in {baseline}"
            )
            yield Regression("rows", row.name, text, 0.0, float(row.flagged))


def _cases(outputs: Sequence[OutputDiff]) -> dict[str, None]:
    """The cases that were compared in any of some outputs, in order."""
    return {name: None for output in outputs for name in output.cases}


def _first(cases: Sequence[str]) -> str:
    more = len(cases) - 1
    return f"case {cases[0]}" + (f" and {more} more are" if more else " is")


def _label(output: OutputDiff) -> str:
    return f"{output.name} in case {output.only}" if output.only else output.name


# ---- one output -----------------------------------------------------------------------------------------------------


def _scope(
    old: Sequence[OutputDiff], new: Sequence[OutputDiff], lost: Sequence[str], over: Cases, baseline: str
) -> Iterator[Regression]:
    """What is no longer compared of one output; `lost` are the cases that are in no output any more.

    Of a large output other probes keep other samples: how many elements that are is no matter over shared cases.
    """
    name = old[0].name
    here = [case for case in _cases(old) if case not in _cases(new) and case not in lost]
    before, after = (sum(each.elements for each in side) for side in (old, new))
    if here:
        text = f"{name}: {_first(here)} no longer compared, as it was in {baseline}"
        yield Regression("cases", name, text, float(len(_cases(old))), float(len(_cases(new))))
    elif after < before and not lost and over is None:
        text = f"{name}: {_many(after, 'element')} compared; {before:,} in {baseline}"
        yield Regression("elements", name, text, float(before), float(after))


def _bound(old: OutputDiff, new: OutputDiff, same_noise: bool, baseline: str) -> Iterator[Regression]:
    before, after = old.tolerance, new.tolerance
    if loosened(before, after, same_noise=same_noise):
        first, second = before.text, after.text
        if first == second:
            first, second = (f"{each.text} (rel<={each.value:g})" for each in (before, after))
        text = f"{_label(new)}: the tolerance was loosened, {first} in {baseline} and {second} now"
        yield Regression("tolerance", old.name, text, before.value, after.value)
    elif before.measure != after.measure:
        pair = f"judged by {after.text}, and by {before.text} in {baseline}"
        text = f"{_label(new)}: {pair}: which of them allows more cannot be told"
        yield Regression("tolerance", old.name, text)


def _numbers(old: OutputDiff, new: OutputDiff, asked: Probes, baseline: str) -> Iterator[Regression]:
    over = asked.shared
    if not overlap.broken_elsewhere(new, over):
        yield from _broken(old, new, over, baseline)
    # What fails whatever its numbers are has none that could be compared.
    if old.problems or new.problems or old.nonfinite or new.nonfinite or not old.elements or not new.elements:
        return
    measure = old.tolerance.measure
    if measure == "changed" and old.decisions is not None:
        if new.decisions is None:
            yield _unmeasured(old, asked, baseline)
            return
        yield from _decisions(old, new, asked, baseline)
        if over is None:
            pair = old.relative_l2, new.relative_l2
            yield from _loss(old, new, "relative L2", pair, SLACK * noise_of(old), asked, baseline)
        else:
            pair = overlap.drift(old, over), overlap.drift(new, over)
            yield from _loss(old, new, "largest difference", pair, _slack(old, "abs", 0.0), asked, baseline)
        return
    if not math.isfinite(old.measured):
        return
    scales = sorted((old.scale, new.scale))
    if measure == "rel" and over is not None and scales[1] > SCALES * scales[0]:
        measure = "abs"
    was, now = (overlap.measured(each, measure, over) for each in (old, new))
    if was is None or now is None or not math.isfinite(now):
        yield _unmeasured(old, asked, baseline)
        return
    yield from _loss(old, new, measure, (was, now), _slack(old, measure, was), asked, baseline)


def _broken(old: OutputDiff, new: OutputDiff, over: Cases, baseline: str) -> Iterator[Regression]:
    name = _label(new)
    if new.nonfinite > old.nonfinite:
        case = f", first in case {new.first_nonfinite.case}" if new.first_nonfinite else ""
        text = f"{name}: {_many(new.nonfinite, 'element')} not finite{case}; {old.nonfinite:,} in {baseline}"
        yield Regression("nonfinite", old.name, text, float(old.nonfinite), float(new.nonfinite))
    # In which cases is not kept.
    if new.padded_nonfinite and not old.padded_nonfinite and over is None:
        many = _many(new.padded_nonfinite, "element")
        text = f"{name}: {many} at padded positions not finite; none in {baseline}"
        yield Regression("nonfinite", old.name, text, 0.0, float(new.padded_nonfinite))
    if new.problems and not old.problems:
        yield Regression("problem", old.name, f"{name}: {new.problems[0]}; not so in {baseline}")


def _unmeasured(old: OutputDiff, asked: Probes, baseline: str) -> Regression:
    text = f"{_label(old)}: {old.tolerance.measure}, which {baseline} is judged by, is not measured {asked.words}"
    return Regression("unmeasured", old.name, text.rstrip())


def _slack(old: OutputDiff, measure: str, was: float) -> float:
    """What repetition explains, in the unit of the baseline's loss; the module's docstring has the formulas."""
    e = SLACK * noise_of(old)
    if measure == "abs":
        return e * (old.scale + (abs(old.worst.reference) if old.worst else 0.0))
    if measure in ("cosine", "kl"):
        e *= old.scale if measure == "kl" else 1.0
        lost = max(_lost(old.tolerance.direction, was), 0.0)
        return math.sqrt(2 * lost) * e + e * e / 2
    return e


def _lost(direction: str, measured: float) -> float:
    return 1 - measured if direction == ">=" else measured


def _loss(
    old: OutputDiff, new: OutputDiff, measure: str, pair: Sequence[float], slack: float, asked: Probes, baseline: str
) -> Iterator[Regression]:
    direction, (was, now) = old.tolerance.direction, pair
    before, after = max(_lost(direction, was), 0.0), max(_lost(direction, now), 0.0)
    if after <= FACTOR * before + slack:
        return
    times = after / before if before else math.inf
    many = "there was none" if math.isinf(times) else f"{_times(times)} times the loss"
    numbers = f"{_shown(direction, was, was, now)} -> {_shown(direction, now, was, now)}"
    told = f"{many}{_where(new, measure, asked.shared)}{asked.words and ', ' + asked.words}"
    text = f"{_label(new)}: {measure} {numbers} ({told}), {_inside(new)} worse than {baseline}"
    yield Regression("loss", old.name, text, was, now, times)


def _times(times: float) -> str:
    return f"{times:.2g}" if times < 10 else f"{times:,.0f}"


def _decisions(old: OutputDiff, new: OutputDiff, asked: Probes, baseline: str) -> Iterator[Regression]:
    counts = [overlap.decisions(each, asked.shared) for each in (old, new)]
    if counts[0] is None or counts[1] is None:
        return  # `overlap.uncounted` tells
    # Near ties are the reference's own: it might decide them either way itself.
    (before, _), (after, of) = counts[0], counts[1]
    if after <= before or scatter(before, after) >= ALPHA:
        return
    numbers = f"{before:,} -> {after:,} of {_many(of, 'decision')} changed{asked.words and ' ' + asked.words}"
    text = f"{_label(new)}: {numbers}, {_inside(new)} worse than {baseline}"
    yield Regression("changed", old.name, text, float(before), float(after), after / before if before else math.inf)


def _inside(new: OutputDiff) -> str:
    return f"inside the tolerance {new.tolerance.text} but" if new.agrees else f"outside {new.tolerance.text} and"


def _where(new: OutputDiff, measure: str, over: Cases) -> str:
    if over is not None:
        case = overlap.worst_case(new, over) if measure == new.tolerance.measure else ""
        return case and f", worst in case {case}"
    found = {"cosine": new.cosine, "kl": new.kl, "rel": new.furthest, "abs": new.worst}.get(measure)
    return f", worst in case {found.case}" if found is not None and found.case else ""


def _shown(direction: str, value: float, *both: float) -> str:
    """A number with as many digits as tell the two apart: of a cosine, three of what is lacking to 1."""
    if direction != ">=":
        return f"{value:.3g}"
    least = min((1 - each for each in both if each < 1), default=1e-5)
    return f"{value:.{min(max(5, 2 - math.floor(math.log10(least))), 12)}f}"


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

"""Floor 1, validators: the conditions of `--fail-if`, and what a sample says to them.

    accuracy drops by 0.5%              the score is 0.5 points (0.005) or more below the reference's on these rows
    accuracy drops by 0.5% at 95%       and, at 95 % confidence, it is a drop: rows chosen by chance do not explain it
    perplexity rises by 2% at 95%       the same where less is better; a percentage is one of the reference's perplexity
    accuracy below 0.9 [at 95%]         the score itself, whatever the reference's; also `perplexity above 40`

Several are separated by commas; any of them fails the step. A percentage of a score that runs from 0 to 1 (accuracy,
f1, exact_match, spearman) or from 0 to 100 (bleu) is so many points of it; without the sign the number is in the
score's own unit (0.005; for bleu 0.5). `squad` stands for the F1 of question answering.

"at C%" asks for more, never for less: a drop that fails is as large as was said *and* significant in a one-sided paired
test at that level (McNemar's exact test where a row is right or wrong, else the bootstrap). So an artifact that is as
good as the reference fails in at most 100 - C % of samples, and one that really dropped does not fail where the sample
is too small to tell: then the condition is "not shown", with the rows it would take. A gate that cannot fail at all is
none, and is refused: by its words (`parse`), by the number of rows (`check`), by the reference's own score (`judge`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nlpconvert.errors import UsageError
from nlpconvert.validators.metrics import METRICS, Score
from nlpconvert.validators.paired import Paired
from nlpconvert.validators.scores import Tripped
from nlpconvert.validators.statistics import LEVEL

EXAMPLE = '"accuracy drops by 0.5% at 95%"'
LEVELS = (0.5, 0.999)
MOST_WITHOUT_SIGN = 0.1
"""A drop above this of a score that runs to 1, written without %, has more likely lost its sign."""
HARDLY = 0.5
"""A drop of this share of the scale: a gate so wide says nothing of a conversion."""
ALIASES: Mapping[str, str] = {"squad": "f1"}

_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)"
_FORM = re.compile(
    rf"(?P<name>[a-z0-9_]+)\s+(?:(?P<moves>drops|rises)\s+by|(?P<bound>below|above))\s+(?P<value>{_NUMBER})"
    rf"(?:\s+at\s+(?P<level>{_NUMBER}))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Condition:
    """One condition. `kind`: "moves" (worse than the reference by `value`) or "bound" (worse than `value` itself).

    `value` is in the score's own unit, or, where `relative`, a share of the reference's score. `level` None: the number
    alone decides.
    """

    text: str
    score: str
    kind: str
    value: float
    relative: bool = False
    level: float | None = None
    bound: str = ""
    """How a condition on the score itself begins, as an example: "accuracy below 0.9"."""


def parse(text: str, metric: str) -> tuple[Condition, ...]:
    """The conditions of a flag, for a metric. UsageError for anything that is not one, or could never be met."""
    parts = [" ".join(part.split()) for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f"--fail-if is empty; give something like {EXAMPLE}")
    return tuple(_condition(part, METRICS[metric].scores, metric) for part in parts)


def _condition(text: str, scores: Iterable[Score], metric: str) -> Condition:
    found = _FORM.fullmatch(text)
    if found is None:
        raise UsageError(f'--fail-if: cannot read "{text}"; write it like {EXAMPLE} or "accuracy below 0.9"')
    known = {score.name: score for score in scores}
    name = found["name"].lower()
    name = ALIASES.get(name, name) if name == metric else name
    if name not in known:
        raise UsageError(f"--fail-if is about {name}, and --metric {metric} measures {' and '.join(known)}")
    score = known[name]
    up = score.better == "higher"
    word = (found["moves"] or found["bound"]).lower()
    right = {"drops": "drops by" if up else "rises by", "rises": "drops by" if up else "rises by"}.get(
        word, "below" if up else "above"
    )
    if word != right.split()[0]:
        better = "higher" if up else "lower"
        raise UsageError(f'--fail-if: for {name} {better} is better, so "{text}" would fail a good one; say "{right}"')
    number, percent = re.fullmatch(_NUMBER, found["value"]).groups()  # type: ignore[union-attr]
    top = score.top
    value = float(number)
    if percent:
        value *= (1.0 if top is None else top) / 100
    if found["bound"] and percent and top is None:
        raise UsageError(f'--fail-if: "{text}": {name} has no percentage of its own; give a number')
    if not value > 0:
        raise UsageError(f'--fail-if: "{text}": the number has to be above 0')
    if top is not None and value > top:
        advice = "" if percent else f"; {number}% is {float(number) / 100 * top:g}"
        raise UsageError(f'--fail-if: "{text}" says nothing: {name} runs from 0 to {top:g}{advice}')
    if found["moves"] and top is not None:
        _check_size(text, value, top, number, bool(percent))
    return Condition(
        text,
        name,
        "moves" if found["moves"] else "bound",
        value,
        bool(percent) and top is None,
        _level(text, found["level"]),
        f"{name} {'below' if up else 'above'} {'0.9' if top == 1 else '30'}",
    )


def _check_size(text: str, value: float, top: float, number: str, percent: bool) -> None:
    """UsageError for a drop of a bounded score that has lost its sign, or is so large that it hardly can fail."""
    if top == 1 and not percent and value > MOST_WITHOUT_SIGN:
        meant = f"{number}%" + (f" or {100 * value:g}%" if value < HARDLY else "")
        raise UsageError(f'--fail-if: "{text}" has no % and would be a drop of {100 * value:g} points: write {meant}')
    if value >= HARDLY * top:
        raise UsageError(
            f'--fail-if: "{text}" hardly can fail: a model that lost {100 * value / top:g} % of the scale is no longer '
            f"the same; write something like {EXAMPLE}"
        )


def _level(text: str, said: str | None) -> float | None:
    if said is None:
        return None
    number, percent = re.fullmatch(_NUMBER, said).groups()  # type: ignore[union-attr]
    level = float(number) / (100 if percent else 1)
    if not LEVELS[0] < level <= LEVELS[1]:
        raise UsageError(f'--fail-if: "{text}": confidence lies between 50% and 99.9%, as in {EXAMPLE}')
    return level


def needs_reference(conditions: Sequence[Condition]) -> Condition | None:
    """The first condition that asks how far a score moved; None when all are about the score itself."""
    return next((each for each in conditions if each.kind == "moves"), None)


def least_rows(level: float) -> int:
    """The fewest rows of which a paired test at `level` can say anything.

    Were neither model better, all of n rows would turn for the worse in 0.5**n of samples: n >= ln(1 - level) / ln 0.5,
    5 at 95 %.
    """
    return next(rows for rows in range(1, 64) if 0.5**rows <= 1 - level)


def check(conditions: Sequence[Condition], rows: int) -> None:
    """UsageError for a condition that cannot fail on so few rows, whatever the step answers."""
    for each in conditions:
        if each.kind == "moves" and each.level is not None and rows < least_rows(each.level):
            raise UsageError(
                f'--fail-if "{each.text}" cannot fail on {_rows(rows)}: were all of them lost, it could still be '
                f"chance; at {_percent(each.level)} it takes {least_rows(each.level)} rows at least, and more "
                "to show a small change"
            )


def judge(condition: Condition, pair: Paired) -> Tripped:
    """Whether the condition is met, why, and what a sample so small leaves open.

    How far the reference itself has moved is no question: such a condition is "not judged". UsageError for a condition
    that cannot be met, whatever the step answers, because the reference is itself right in too few rows.
    """
    if condition.kind == "moves" and pair.reference is None:
        return Tripped(condition.text, "not judged", "it is what the others are held against")
    _check_reach(condition, pair)
    if not math.isfinite(pair.candidate):
        return Tripped(condition.text, "fails", f"the {condition.score} is not finite")
    return _moved(condition, pair) if condition.kind == "moves" else _bounded(condition, pair)


def _check_reach(condition: Condition, pair: Paired) -> None:
    """UsageError where even a step that answers everything wrongly would not meet the condition."""
    level = condition.level
    if condition.kind == "bound":
        if level is None or not pair.binary or pair.score.better != "higher" or condition.value >= 1:
            return
        needed = math.ceil(math.log(1 - level) / math.log(1 - condition.value) - 1e-9)
        if pair.rows < needed:
            raise UsageError(
                f'--fail-if "{condition.text}" cannot fail on {_rows(pair.rows)}: were all of them wrong, it could '
                f"still be chance; at {_percent(level)} it takes {needed:,} rows at least"
            )
        return
    assert pair.reference is not None
    floor = pair.score.top is not None and pair.score.formula != "spearman"  # a correlation may fall below 0
    if floor and pair.reference < condition.value * (1 - 1e-9):
        at = f"{pair.reference:.4f}" if pair.score.top == 1 else f"{pair.reference:.2f}"
        raise UsageError(
            f'--fail-if "{condition.text}" cannot fail: the reference\'s own {condition.score} is {at}, so it cannot '
            "drop so far; are these labels this model's?"
        )
    if level is not None and pair.binary:
        right = round(pair.reference * pair.rows)
        if right < least_rows(level):
            raise UsageError(
                f'--fail-if "{condition.text}" cannot fail: the reference itself is right in {right:,} of '
                f"{_rows(pair.rows)}, and were all of these lost, it could still be chance; at {_percent(level)} "
                f"it takes {least_rows(level)}: give more rows, or the labels that are this model's"
            )


def _moved(condition: Condition, pair: Paired) -> Tripped:
    assert pair.reference is not None
    limit = condition.value * (pair.reference if condition.relative else 1.0)
    level = condition.level or LEVEL
    large = pair.worsening >= limit * (1 - 1e-9)  # 0.005 is no binary fraction
    chance = pair.chance_of_worsening()
    failed = large and (condition.level is None or chance <= 1 - condition.level)
    drop, dropped = ("drop", "dropped") if pair.score.better == "higher" else ("rise", "rose")
    moved = f"it {dropped} by {_amount(pair.worsening, condition, pair)}" if pair.worsening > 0 else f"no {drop}"
    if large:
        moved += f", which chance alone does in {_percent(chance)} of samples"
    warning = "" if failed else _too_small(condition, pair, limit, level)
    return Tripped(condition.text, "fails" if failed else "not shown" if warning else "passes", moved, warning)


def _too_small(condition: Condition, pair: Paired, limit: float, level: float) -> str:
    """The sentence that says that the sample could not have shown this, and how many rows would."""
    least = pair.detectable(level)
    word = "drop" if pair.score.better == "higher" else "rise"
    if least is None:
        return (
            f"the {condition.score} is the reference's however rows are drawn from the {pair.rows:,}, so they do not "
            f"tell how small a {word} they could show"
        )
    if least <= limit:
        return ""
    needed = pair.rows_for(limit, level)
    more = f": give about {_round_up(needed):,} rows" if needed is not None else ""
    return (
        f"{_rows(pair.rows)} cannot show a {word} below {_amount(least, condition, pair)} at {_percent(level)}, "
        f"and {_amount(limit, condition, pair)} was asked for{more}"
    )


def _bounded(condition: Condition, pair: Paired) -> Tripped:
    worse = pair.candidate < condition.value if pair.score.better == "higher" else pair.candidate > condition.value
    reason = f"it is {pair.candidate:.4f}" if pair.score.top == 1 else f"it is {pair.candidate:.2f}"
    if not worse or condition.level is None:
        return Tripped(condition.text, "fails" if worse else "passes", reason)
    chance = pair.chance_of_passing(condition.value)
    reason += f"; chance alone does that in {_percent(chance)} of samples"
    if chance <= 1 - condition.level:
        return Tripped(condition.text, "fails", reason)
    return Tripped(
        condition.text,
        "not shown",
        reason,
        f"{_rows(pair.rows)} cannot show at {_percent(condition.level)} that a score so near is not on the right side",
    )


def _amount(value: float, condition: Condition, pair: Paired) -> str:
    """A change in the unit in which the condition was given."""
    if condition.relative and pair.reference:
        return _percent(value / pair.reference)
    return _percent(value) if pair.score.top == 1 else f"{value:.3g}"


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _percent(share: float) -> str:
    """At least two figures: 0.05 %, 1.5 %, 12 %."""
    number = 100 * share
    return f"{number:.2g} %" if number < 10 else f"{number:.0f} %" if number == round(number) else f"{number:.1f} %"


def _round_up(rows: float) -> int:
    """To two figures: a sample size is an estimate."""
    unit = int(10 ** max(math.floor(math.log10(rows)) - 1, 0))
    return math.ceil(rows / unit) * unit

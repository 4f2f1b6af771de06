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
good as the reference fails in at most 100 - C % of samples, and one that really dropped passes where the sample is too
small to tell: that is said with the rows it would take, for a gate that cannot fail is none.
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
    return Condition(
        text,
        name,
        "moves" if found["moves"] else "bound",
        value,
        bool(percent) and top is None,
        _level(text, found["level"]),
        f"{name} {'below' if up else 'above'} {'0.9' if top == 1 else '30'}",
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


def judge(condition: Condition, pair: Paired) -> Tripped:
    """Whether the condition is met, why, and what a sample so small leaves open.

    How far the reference itself has moved is no question: such a condition is not met, in those words.
    """
    if not math.isfinite(pair.candidate):
        return Tripped(condition.text, True, f"the {condition.score} is not finite")
    if condition.kind == "moves" and pair.reference is None:
        return Tripped(condition.text, False, "not judged: it is what the others are held against")
    return _moved(condition, pair) if condition.kind == "moves" else _bounded(condition, pair)


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
    return Tripped(condition.text, failed, moved, "" if failed else _too_small(condition, pair, limit, level))


def _too_small(condition: Condition, pair: Paired, limit: float, level: float) -> str:
    """The sentence that says that the sample could not have shown this, and how many rows would."""
    least = pair.detectable(level)
    word = "drop" if pair.score.better == "higher" else "rise"
    if least is None:
        return (
            f"the {condition.score} is the reference's however these {pair.rows:,} rows are drawn, so they do not tell "
            f"how small a {word} they could show"
        )
    if least <= limit:
        return ""
    needed = pair.rows_for(limit, level)
    more = f": give about {_round_up(needed):,} rows" if needed is not None else ""
    return (
        f"{pair.rows:,} rows cannot show a {word} below {_amount(least, condition, pair)} at {_percent(level)}, "
        f"and {_amount(limit, condition, pair)} was asked for{more}"
    )


def _bounded(condition: Condition, pair: Paired) -> Tripped:
    worse = pair.candidate < condition.value if pair.score.better == "higher" else pair.candidate > condition.value
    reason = f"it is {pair.candidate:.4f}" if pair.score.top == 1 else f"it is {pair.candidate:.2f}"
    failed = worse
    if worse and condition.level is not None:
        chance = pair.chance_of_passing(condition.value)
        failed = chance <= 1 - condition.level
        reason += f"; chance alone does that in {_percent(chance)} of samples"
    return Tripped(condition.text, failed, reason)


def _amount(value: float, condition: Condition, pair: Paired) -> str:
    """A change in the unit in which the condition was given."""
    if condition.relative and pair.reference:
        return _percent(value / pair.reference)
    return _percent(value) if pair.score.top == 1 else f"{value:.3g}"


def _percent(share: float) -> str:
    """At least two figures: 0.05 %, 1.5 %, 12 %."""
    number = 100 * share
    return f"{number:.2g} %" if number < 10 else f"{number:.0f} %" if number == round(number) else f"{number:.1f} %"


def _round_up(rows: float) -> int:
    """To two figures: a sample size is an estimate."""
    unit = int(10 ** max(math.floor(math.log10(rows)) - 1, 0))
    return math.ceil(rows / unit) * unit

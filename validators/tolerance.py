"""Floor 1, validators: how far an answer may move: the flag's grammar and the table of defaults. Measures nothing.

A tolerance has its direction in it: "cosine>=0.995", "changed<=0.5%", "kl<=0.02", "abs<=1e-3", "rel<=5e-5". In words:

    cosine   every scored vector (over the last axis) of an embedding has at least this cosine with the reference's
    changed  at most this share of the decisions (argmax over the last axis, or over the sequence) differs
    kl       mean KL(reference || candidate) over the scored positions, softmax over the last axis, in nats
    abs      every scored element: |candidate - reference| <= abs
    rel      every scored element: |candidate - reference| <= rel * (scale + |reference|), where scale is the root mean
             square of the reference's scored elements in that output over all cases: no unit enters the rule
    noise    rel in multiples of the reference's own noise: how far PyTorch's float32 answers are from its float64 ones,
             and move with threads and batch companions, on the same probes (see `noise`)

For `changed` and `kl` a single broken case must not drown in the mean; `parity` says how it counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from types import MappingProxyType
from typing import Any

from nlpconvert.errors import UsageError
from nlpconvert.models import OutputRow

DIRECTIONS: dict[str, str] = {"cosine": ">=", "changed": "<=", "kl": "<=", "abs": "<=", "rel": "<=", "noise": "<="}

ELEMENTWISE = ("abs", "rel", "noise")
"""They judge every element, and any output."""

# Which tolerances can judge an output of a task measure, beside the elementwise ones.
JUDGED_BY: dict[str, tuple[str, ...]] = {
    "embedding": ("cosine",),
    "decisions": ("changed",),
    "position": ("changed",),
    "distribution": ("kl", "changed"),
    "score": (),
}

_HELP = 'write for example "cosine>=0.995", "changed<=0.5%", "kl<=0.02", "abs<=1e-3", "rel<=1e-3" or "noise<=10"'
LEAST_NOISE = 2 * 2.0**-23
"""Two roundings of float32: no floor is taken to be less."""

NOT_MEASURED: Mapping[str, float] = MappingProxyType({})
"""Noise floors by output where none were measured."""

_FORM = re.compile(r"\s*([A-Za-z_]\w*)\s*(>=|<=|==|=|<|>)\s*([^\s%]+)\s*(%?)\s*")


@dataclass(frozen=True)
class Tolerance:
    """One bound on one measure. Raises UsageError when it is none: a wrong direction, or a value that cannot fail.

    `value` is a number in the measure's own unit (`changed` as a share: 0.005 is 0.5%). `given` is True when a person
    asked for it, False when it comes from the table. `multiple`: a `rel` that was asked for as this many times the
    reference's noise.
    """

    measure: str
    direction: str
    value: float
    given: bool = False
    multiple: float | None = None

    def __post_init__(self) -> None:
        problem = _problem(self.measure, self.direction, self.value)
        if problem:
            raise UsageError(f"tolerance {self.measure}{self.direction}{self.value:g}: {problem}")

    @property
    def text(self) -> str:
        """As the flag takes it: parse(t.text) has the same value."""
        if self.multiple is not None:
            return f"noise<={self.multiple:g}"
        if self.measure == "changed":
            return f"changed<={_plain(Decimal(repr(self.value)) * 100)}%"
        return f"{self.measure}{self.direction}{self.value!r}"

    def holds(self, measured: float) -> bool:
        """Whether a measured value is within the bound. Not a number never is."""
        return measured >= self.value if self.direction == ">=" else measured <= self.value

    def used(self, measured: float) -> float:
        """Share of the bound that `measured` uses up: 0 is no drift, 1 the edge, more is out of tolerance.

        measured / value, and for cosine (1 - measured) / (1 - value): how far the verdict is from turning.
        """
        if math.isnan(measured):
            return math.inf
        spent, allowed = (1 - measured, 1 - self.value) if self.direction == ">=" else (measured, self.value)
        if allowed > 0:
            return spent / allowed
        return math.inf if spent > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        data = {"measure": self.measure, "direction": self.direction, "value": self.value, "given": self.given}
        return data if self.multiple is None else {**data, "multiple": self.multiple}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tolerance:
        """The reverse of to_dict."""
        multiple = data.get("multiple")
        return cls(
            data["measure"],
            data["direction"],
            float(data["value"]),
            bool(data["given"]),
            None if multiple is None else float(multiple),
        )

    def asked(self) -> Tolerance:
        """As it was asked for: a multiple of the noise again, where `value` is what that came to."""
        return self if self.multiple is None else Tolerance("noise", "<=", self.multiple, self.given)

    def on(self, floor: float | None) -> Tolerance:
        """What it comes to on an output whose noise floor is `floor` (in the unit of `rel`): `noise` becomes `rel`."""
        if self.measure != "noise":
            return self
        if floor is None:
            raise UsageError(
                f"tolerance {self.text}: the reference's noise was not measured when the goldens were made; give "
                "rel<=... instead, or convert again"
            )
        value = float(f"{self.value * max(floor, LEAST_NOISE):.2g}")
        if value >= 1:
            raise UsageError(f"tolerance {self.text} is rel<={value:g} here: answers of zeros would pass; give less")
        return Tolerance("rel", "<=", value, self.given, self.value)


def _problem(measure: str, direction: str, value: float) -> str:
    """What is wrong with a bound, in one sentence; empty when nothing is."""
    if measure not in DIRECTIONS:
        return f"no such measure; {_HELP}"
    if direction != DIRECTIONS[measure]:
        better = "larger" if DIRECTIONS[measure] == ">=" else "smaller"
        return f"{measure} is better when it is {better}; write {measure}{DIRECTIONS[measure]}..."
    if math.isnan(value) or math.isinf(value):
        return "the value must be a finite number"
    if measure == "cosine":
        if value > 1:
            return "no cosine is above 1"
        return "answers of zeros would pass; give a value above 0, such as 0.99" if value <= 0 else ""
    if value < 0:
        return "the value must not be negative"
    if measure == "changed" and value >= 1:
        return "every decision could change and it would pass; write a share below 100%, such as 0.5% or 0.005"
    if measure == "rel" and value >= 1:
        return "answers of zeros would pass; give a value below 1, such as 1e-3"
    return ""


def parse(text: str) -> tuple[Tolerance, ...]:
    """The flag's value, one or several bounds separated by commas. Raises UsageError with one line."""
    found: dict[str, Tolerance] = {}
    for part in text.split(","):
        match = _FORM.fullmatch(part)
        if match is None:
            raise UsageError(f"tolerance {part.strip()!r} is not understood; {_HELP}")
        measure, direction, number, percent = match.groups()
        if percent and measure != "changed":
            raise UsageError(f"tolerance {part.strip()!r}: only changed takes a percent sign; {_HELP}")
        try:
            value = float(Decimal(number) / 100) if percent else float(number)
        except (ValueError, ArithmeticError):
            raise UsageError(f"tolerance {part.strip()!r}: {number!r} is not a number; {_HELP}") from None
        problem = _problem(measure, direction, value)
        if problem:
            raise UsageError(f"tolerance {part.strip()}: {problem}")
        if measure in found:
            raise UsageError(f"tolerance {text.strip()!r} gives {measure} twice; give it once")
        found[measure] = Tolerance(measure, direction, value, given=True)
    return tuple(found.values())


@dataclass(frozen=True)
class Default:
    """One row: what is allowed where nothing was asked for. "*" stands for any."""

    precision: str
    provider: str
    measure: str  # of the output, models.OutputRow.measure; "token" for an embedding of every token
    allowed: str


DEFAULTS: tuple[Default, ...] = (
    # The same arithmetic in another order; on CUDA with TF32 off, TensorRT with its own kernels and fusions.
    # On this CPU an unbroken export is within 0.6 to 2 times the noise (26 architectures, six trained models, MiniLM).
    Default("float32", "cpu", "*", "noise<=10"),
    Default("float32", "cuda", "*", "noise<=100"),
    Default("float32", "tensorrt", "*", "noise<=200"),
    Default("float32 of unknown noise", "cpu", "*", "rel<=5e-5"),
    Default("float32 of unknown noise", "cuda", "*", "rel<=5e-4"),
    Default("float32 of unknown noise", "tensorrt", "*", "rel<=1e-3"),
    Default("float16", "*", "embedding", "cosine>=0.9999"),
    Default("float16", "*", "token", "cosine>=0.999"),
    Default("float16", "*", "decisions", "changed<=0.1%"),
    Default("float16", "*", "position", "changed<=0.1%"),
    Default("float16", "*", "distribution", "kl<=1e-4"),
    Default("float16", "*", "score", "rel<=1e-2"),
    Default("bfloat16", "*", "embedding", "cosine>=0.999"),
    Default("bfloat16", "*", "token", "cosine>=0.99"),
    Default("bfloat16", "*", "decisions", "changed<=0.3%"),
    Default("bfloat16", "*", "position", "changed<=0.3%"),
    Default("bfloat16", "*", "distribution", "kl<=1e-3"),
    Default("bfloat16", "*", "score", "rel<=3e-2"),
    Default("int8", "*", "embedding", "cosine>=0.99"),
    Default("int8", "*", "token", "cosine>=0.95"),
    Default("int8", "*", "decisions", "changed<=0.5%"),
    Default("int8", "*", "position", "changed<=0.5%"),
    Default("int8", "*", "distribution", "kl<=0.01"),
    Default("int8", "*", "score", "rel<=0.1"),
    Default("int4", "*", "embedding", "cosine>=0.95"),
    Default("int4", "*", "token", "cosine>=0.8"),
    Default("int4", "*", "decisions", "changed<=2%"),
    Default("int4", "*", "position", "changed<=2%"),
    Default("int4", "*", "distribution", "kl<=0.05"),
    Default("int4", "*", "score", "rel<=0.2"),
)


def provider_class(provider: str) -> str:
    """ "cpu", "cuda" or "tensorrt", from a session's provider ("CPUExecutionProvider", "cuda:0 NVIDIA ...")."""
    lowered = provider.lower()
    for known, found in (("cpu", "cpu"), ("cuda", "cuda"), ("tensorrt", "tensorrt"), ("nvtensorrt", "tensorrt")):
        if lowered.startswith(known):
            return found
    raise UsageError(f"no default tolerance for the provider {provider!r}; give one with --tolerance")


def default_for(output: OutputRow, precision: str, provider: str, floor: float | None = None) -> Tolerance:
    """The table's row for an output, a precision class and a provider. Raises UsageError where there is none.

    `floor`: the output's noise floor, None where it was not measured.
    """
    found = provider_class(provider)
    if precision == "float32" and floor is None:
        precision = "float32 of unknown noise"
    # The worst of thousands of tokens is another number than the worst of some texts.
    measure = "token" if output.measure == "embedding" and len(output.axes) > 2 else output.measure
    for row in DEFAULTS:
        if row.precision == precision and row.provider in ("*", found) and row.measure in ("*", measure):
            (tolerance,) = parse(row.allowed)
            return Tolerance(tolerance.measure, tolerance.direction, tolerance.value).on(floor)
    raise UsageError(
        f"no default tolerance for {output.name} ({output.measure}) in {precision}; give one with --tolerance"
    )


def choose(
    given: Sequence[Tolerance],
    outputs: Sequence[OutputRow],
    precision: str,
    provider: str,
    noise: Mapping[str, float] = NOT_MEASURED,
) -> dict[str, Tolerance]:
    """One tolerance for each output: the given one that can judge it, else the table's.

    `noise`: noise floors by output, as far as they were measured.

    Below float32 a given `cosine`, `changed` or `kl` is meant for what the task is for, not for a secondary output.

    What was given must be used: UsageError when two given ones judge the same output, or when one judges none.
    """
    chosen: dict[str, Tolerance] = {}
    used: set[str] = set()
    for output in outputs:
        judged_by = () if output.secondary and precision != "float32" else JUDGED_BY[output.measure]
        fitting = [t for t in given if t.measure in (*judged_by, *ELEMENTWISE)]
        floor = noise.get(output.name)
        if len(fitting) > 1:
            both = " and ".join(t.text for t in fitting)
            raise UsageError(f"tolerance: {both} would both judge {output.name}; give one of them")
        used.update(t.measure for t in fitting)
        default = fitting[0].on(floor) if fitting else default_for(output, precision, provider, floor)
        chosen[output.name] = default
    for tolerance in given:
        if tolerance.measure not in used:
            takes = ", ".join(f"{o.name} by {', '.join((*JUDGED_BY[o.measure], *ELEMENTWISE))}" for o in outputs)
            raise UsageError(f"tolerance {tolerance.text} judges none of this model's outputs; judged are {takes}")
    return chosen


def passing(measure: str, measured: float) -> str | None:
    """The tightest short bound that `measured` passes, as the flag takes it; None when no valid bound does.

    Two significant digits (of 1 - cosine for cosine), rounded to the passing side where rounding to the nearest fails.
    """
    if not math.isfinite(measured):
        return None
    exact = Decimal(measured)
    if measure == "cosine":
        gap = 1 - exact
        unit = Decimal(1).scaleb(gap.adjusted() - 1) if gap > 0 else Decimal(1)
        numbers = [_plain(exact.quantize(unit)), _plain(exact.quantize(unit, rounding=ROUND_FLOOR))]
    else:
        exact = exact * 100 if measure == "changed" else exact
        unit = Decimal(1).scaleb(exact.adjusted() - 1) if exact else Decimal(1)
        rounded = (exact.quantize(unit), exact.quantize(unit, rounding=ROUND_CEILING))
        numbers = [f"{_plain(n)}%" if measure == "changed" else f"{float(n):.1e}" for n in rounded]
    for number in numbers:
        try:
            (bound,) = parse(f"{measure}{DIRECTIONS[measure]}{number}")
        except UsageError:
            continue  # outside what can be a bound at all: the caller is told by None
        if bound.holds(measured):
            return f"{measure}{DIRECTIONS[measure]}{number}"
    return None


def _plain(number: Decimal) -> str:
    """A decimal without exponent and without trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

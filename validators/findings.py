"""Floor 1, validators: what was found, as data: frozen, plain-JSON both ways. How it is worded is `report`'s.

The manifest keeps these; JSON has no NaN and no infinity, so those stand in it as the words "nan", "inf", "-inf".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from nlpconvert.validators.agreement import Neighbours, TopK, Units
from nlpconvert.validators.tolerance import Tolerance


def plain(value: Any) -> Any:
    """Dataclasses, tuples, mappings and floats as JSON has them."""
    if isinstance(value, Tolerance):
        return value.to_dict()
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@dataclass(frozen=True)
class Element:
    """One element of an output: where it is, in the full output's coordinates, and both values."""

    index: tuple[int, ...]
    reference: float
    candidate: float
    difference: float
    case: str
    shape: tuple[int, ...]  # of the output in that case

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Element:
        """The reverse of `plain`."""
        return cls(
            tuple(data["index"]),
            float(data["reference"]),
            float(data["candidate"]),
            float(data["difference"]),
            data["case"],
            tuple(data["shape"]),
        )


@dataclass(frozen=True)
class Score:
    """A measure over vectors: mean, worst, and where the worst is (the index of the vector)."""

    count: int
    mean: float
    worst: float
    case: str
    index: tuple[int, ...]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Score:
        """The reverse of `plain`."""
        return cls(data["count"], float(data["mean"]), float(data["worst"]), data["case"], tuple(data["index"]))


@dataclass(frozen=True)
class Decisions:
    """Top-1 decisions: how many, how many changed, and how many of those were near ties: the reference's own margin is
    within twice its noise, so that the reference itself might decide either way."""

    count: int
    changed: int
    near_ties: int

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Decisions:
        """The reverse of `plain`."""
        return cls(data["count"], data["changed"], data["near_ties"])


@dataclass(frozen=True)
class CaseDrift:
    """One case in one output: worst absolute difference, and the share of the tolerance it alone uses up."""

    worst_abs: float
    used: float
    scored: int  # elements

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CaseDrift:
        """The reverse of `plain`."""
        return cls(float(data["worst_abs"]), float(data["used"]), data["scored"])


@dataclass(frozen=True)
class OutputDiff:
    """How far one output moved, over all cases, and whether that is allowed."""

    name: str
    dtype: str  # the candidate's
    unit: str  # what a vector is: "token" or "row"
    tolerance: Tolerance
    scale: float
    """Root mean square of the reference's scored elements, in the output's own unit."""
    agrees: bool
    measured: float
    """The number that was held against the tolerance, in its measure."""
    used: float
    """Share of the tolerance that `measured` uses up; 1 is where the verdict turns."""
    would_pass_at: Mapping[str, float]
    """By measure, the tightest value that would have passed; empty when no tolerance could help."""
    elements: int
    vectors: int
    out_of_tolerance: int
    """abs, rel: elements; cosine, kl: vectors past the value; changed: decisions."""
    worst: Element | None = None
    """The largest absolute difference."""
    furthest: Element | None = None
    """For rel, the largest difference as a share of what is allowed there: the element that decides."""
    mean_abs: float = 0.0
    relative_l2: float = 0.0
    """|candidate - reference| / |reference| over all scored elements together."""
    cosine: Score | None = None
    decisions: Decisions | None = None
    kl: Score | None = None
    worst_case_score: tuple[str, float] | None = None
    """Case and its own mean KL or share of changed decisions, where one case alone decided."""
    padded: Element | None = None
    """The largest difference at padded positions, which is not judged."""
    padded_nonfinite: int = 0
    nonfinite: int = 0
    """Scored elements (and elements of fully masked rows) where the candidate alone is not finite."""
    first_nonfinite: Element | None = None
    cases: Mapping[str, CaseDrift] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    """What makes this output fail whatever its numbers are."""
    notes: tuple[str, ...] = ()
    only: str = ""
    """The one case that this judges, where a case has a tolerance of its own."""
    noise: float | None = None
    """The reference's noise floor in this output, in the unit of `rel`; None where it was not measured."""
    spread: float = 0.0
    """Standard deviation of the reference's scored elements."""
    normalised: float = 0.0
    """The worst absolute difference over `spread`."""
    sqnr_db: float = math.inf
    """Signal to quantization noise, 10 log10(sum reference**2 / sum (candidate - reference)**2), in decibels."""
    top_k: TopK | None = None
    neighbours: Neighbours | None = None
    sequences: Units | None = None
    interval: tuple[float, float] | None = None
    """Of the share of changed decisions: the exact 95 % interval (Clopper and Pearson 1934)."""
    detectable: float | None = None
    """The smallest share of changed decisions that so many would have shown with 95 % probability."""
    histogram: Mapping[str, Any] | None = None
    """Of the absolute differences; `agreement.Histogram`."""

    @property
    def worst_case(self) -> str:
        """The case to look at first: with the non-finite element, else the one that uses up most of the tolerance."""
        if self.first_nonfinite is not None:
            return self.first_nonfinite.case
        return max(self.cases, key=lambda name: self.cases[name].used, default="")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OutputDiff:
        """The reverse of `plain`."""

        def part(name: str, kind: Any) -> Any:
            return None if data.get(name) is None else kind.from_dict(data[name])

        def number(name: str, default: float | None) -> Any:
            return default if data.get(name) is None else float(data[name])

        single = data["worst_case_score"]
        return cls(
            name=data["name"],
            dtype=data["dtype"],
            unit=data["unit"],
            tolerance=Tolerance.from_dict(data["tolerance"]),
            scale=float(data["scale"]),
            agrees=data["agrees"],
            measured=float(data["measured"]),
            used=float(data["used"]),
            would_pass_at={key: float(value) for key, value in data["would_pass_at"].items()},
            elements=data["elements"],
            vectors=data["vectors"],
            out_of_tolerance=data["out_of_tolerance"],
            worst=part("worst", Element),
            furthest=part("furthest", Element),
            mean_abs=float(data["mean_abs"]),
            relative_l2=float(data["relative_l2"]),
            cosine=part("cosine", Score),
            decisions=part("decisions", Decisions),
            kl=part("kl", Score),
            worst_case_score=None if single is None else (single[0], float(single[1])),
            padded=part("padded", Element),
            padded_nonfinite=data["padded_nonfinite"],
            nonfinite=data["nonfinite"],
            first_nonfinite=part("first_nonfinite", Element),
            cases={key: CaseDrift.from_dict(value) for key, value in data["cases"].items()},
            problems=tuple(data["problems"]),
            notes=tuple(data["notes"]),
            only=data.get("only", ""),
            noise=number("noise", None),
            spread=number("spread", 0.0),
            normalised=number("normalised", 0.0),
            sqnr_db=number("sqnr_db", math.inf),
            top_k=part("top_k", TopK),
            neighbours=part("neighbours", Neighbours),
            sequences=part("sequences", Units),
            interval=None if data.get("interval") is None else (float(data["interval"][0]), float(data["interval"][1])),
            detectable=number("detectable", None),
            histogram=data.get("histogram"),
        )


@dataclass(frozen=True)
class Comparison:
    """All outputs of one artifact against a reference. Holding no diffs, it does not agree."""

    outputs: tuple[OutputDiff, ...]
    cases: int
    not_applicable: tuple[tuple[str, str], ...] = ()
    """Case and reason: the reference itself could not answer, or the case is not one the artifact is made for."""
    problems: tuple[str, ...] = ()
    spans: Units | None = None
    """Question answering: answer spans, and those of which start or end changed."""

    @property
    def agrees(self) -> bool:
        """Whether something was compared and all of it is within tolerance."""
        return bool(self.outputs) and self.cases > 0 and not self.problems and all(o.agrees for o in self.outputs)

    @property
    def ranked(self) -> tuple[OutputDiff, ...]:
        """The outputs, worst first."""
        return tuple(sorted(self.outputs, key=lambda o: (o.agrees, -o.used)))

    def worst_headline(self) -> tuple[str, float] | None:
        """Measure and value for one cell of a table, of the output that is nearest to (or furthest past) its bound.

        ("nonfinite", count) where the candidate is not finite; ("abs", worst) for outputs judged by element; None
        when nothing was compared.
        """
        compared = [o for o in self.ranked if o.elements]
        if not compared:
            return None
        output = compared[0]
        if output.nonfinite:
            return "nonfinite", float(output.nonfinite)
        if output.tolerance.measure in ("abs", "rel"):
            return "abs", output.worst.difference if output.worst else 0.0
        return output.tolerance.measure, output.measured

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as the manifest keeps it."""
        return {**plain(self), "agrees": self.agrees}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Comparison:
        """The reverse of to_dict."""
        return cls(
            outputs=tuple(OutputDiff.from_dict(o) for o in data["outputs"]),
            cases=data["cases"],
            not_applicable=tuple((name, reason) for name, reason in data["not_applicable"]),
            problems=tuple(data["problems"]),
            spans=None if data.get("spans") is None else Units.from_dict(data["spans"]),
        )

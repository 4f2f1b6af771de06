"""Floor 1, validators: running sums and worst places of one output; `parity` says what is measured and why."""

from __future__ import annotations

import math

import numpy as np

from nlpconvert.golden import Reference
from nlpconvert.inputs import Case
from nlpconvert.models import OutputRow
from nlpconvert.validators.agreement import Histogram, Near, Sequences, TopKs
from nlpconvert.validators.baseline import Baseline
from nlpconvert.validators.findings import CaseDrift, Decisions, Element, OutputDiff
from nlpconvert.validators.measures import cosines, divergences, largest, ratio, share, ties, tops
from nlpconvert.validators.running import CaseScore, Problems, Running, element
from nlpconvert.validators.scored import Block, Bools, Floats, blocks, scored_by, token_axis
from nlpconvert.validators.tolerance import Tolerance

WIDE_CHANGE = 0.1
"""A bound that lets a tenth of the decisions change has to be one that a constant answer does not pass."""

CASE_FACTOR = 10
SCATTER = 2
NEAR_TIE = 2
"""A changed decision is a near tie where the reference's own margin is within so many times its noise: each of the two
scores may move by it."""
UNKNOWN_NOISE = 5e-6
"""What stands for the noise in near ties, in the unit of `rel`, where it was not measured."""
GROSS = 0.5
"""No cosine and no argmax sees an answer that is doubled, or zero: past this relative L2 a measure of the task excuses
nothing."""


class Tally:
    """Running sums and worst places of one output. `noise` is its noise floor in the unit of `rel`, None if unknown;
    `only` the one case that is judged here, where it has a tolerance of its own."""

    def __init__(
        self, output: OutputRow, scale: float, tolerance: Tolerance, noise: float | None = None, only: str = ""
    ) -> None:
        self.output = output
        self.scale = scale
        self.tolerance = tolerance
        self.noise = noise
        self.only = only
        self.unit = "token" if token_axis(output) and output.measure != "position" else "row"
        self.dtype = ""
        self.elements = self.vectors = self.out = 0
        self.sum_abs = self.sum_square = self.sum_reference = self.sum_plain = 0.0
        self.worst: Element | None = None
        self.furthest: Element | None = None
        self.furthest_ratio = 0.0
        self.cosine = Running(np.argmin)
        self.kl = Running(np.argmax)
        self.decisions = self.changed = self.near_ties = 0
        self.padded: Element | None = None
        self.padded_nonfinite = self.nonfinite = 0
        self.first_nonfinite: Element | None = None
        self.cases: dict[str, CaseDrift] = {}
        # By measure and case: what the case weighs, and its own plain score.
        self.case_scores: dict[str, dict[str, tuple[float, float]]] = {"changed": {}, "kl": {}}
        self.problems = Problems()
        self.broken: set[str] = set()  # cases with a problem, or not finite
        self.baseline = Baseline(scale, tolerance)
        self.top_k = TopKs()
        self.near = Near() if output.measure == "embedding" and len(output.axes) == 2 else None
        self.sequences = Sequences() if output.measure == "decisions" and token_axis(output) else None
        self.histogram = Histogram()

    def problem(self, text: str, case: str, detail: str = "") -> None:
        """Something that fails whatever the numbers are."""
        self.broken.add(case)
        self.problems.add(text, case, detail)

    def add(self, case: Case, reference: Reference, candidate: np.ndarray) -> None:
        """Hold one case's answer against the reference's, after checking that the two can be held side by side."""
        if not self._comparable(case, reference, candidate):
            return
        try:
            mask = scored_by(case, self.output, reference)
        except ValueError as error:
            self.problem(str(error), case.name)
            return
        self._finite(case, reference, candidate, mask)
        score = CaseScore()
        for block in blocks(self.output, reference, candidate, mask):
            self._block(case.name, reference.shape, block, score)
        if self.sequences is not None:
            self.sequences.add(mask, score.rows_changed)
        empty = np.zeros_like(mask)
        empty[_empty_rows(mask)] = True
        for block in blocks(self.output, reference, candidate, ~mask & ~empty):
            self._padded(case.name, reference.shape, block, count=True)
        for block in blocks(self.output, reference, candidate, empty):  # must be finite: `_finite` has counted there
            self._padded(case.name, reference.shape, block, count=False)
        self._close_case(case.name, score)

    def _comparable(self, case: Case, reference: Reference, candidate: np.ndarray) -> bool:
        self.dtype = self.dtype or candidate.dtype.name
        if candidate.dtype.kind != "f" and candidate.dtype.name != "bfloat16":
            self.problem(f"its type is {candidate.dtype.name}, not a floating one", case.name)
            return False
        if candidate.shape != reference.shape:
            self.problem("its shape is not the reference's", case.name, f"{candidate.shape}, not {reference.shape}")
            return False
        return True

    def _finite(self, case: Case, reference: Reference, candidate: np.ndarray, mask: Bools) -> None:
        """Fully masked rows, and the scored positions that a sampled reference did not keep, must be finite.

        Except where the reference is not finite itself; of a sampled one that is known by its last axes only.
        """
        empty = _empty_rows(mask)
        must = np.zeros_like(mask)
        must[empty] = True
        expected = np.isfinite(reference.values)
        if reference.index is not None:
            must |= mask
            must[reference.index[:, 0], reference.index[:, 1]] = False
            must[empty] = True
            expected = expected.all(axis=0)
        for place in np.argwhere(must):
            values = np.asarray(candidate[tuple(place)])
            bad = np.asarray(
                ~np.isfinite(values) & (expected if reference.index is not None else expected[tuple(place)])
            )
            if not bad.any():
                continue
            index = tuple(int(n) for n in (*place, *np.argwhere(bad)[0]))
            known = float(reference.values[index]) if reference.index is None else math.nan
            first = Element(index, known, float(candidate[index]), math.nan, case.name, reference.shape)
            self._not_finite(int(bad.sum()), first)
            if empty[place[0]]:
                self.problem("not finite in a fully masked row", case.name, f"row {place[0]}")

    def _not_finite(self, count: int, first: Element) -> None:
        self.broken.add(first.case)
        self.nonfinite += count
        self.first_nonfinite = self.first_nonfinite or first

    def _block(self, case: str, shape: tuple[int, ...], block: Block, score: CaseScore) -> None:
        """Add a block of scored vectors."""
        reference, candidate = block.reference, block.candidate
        self.elements += reference.size
        self.vectors += len(reference)
        score.scored += reference.size
        finite = np.isfinite(reference) & np.isfinite(candidate)
        whole = bool(finite.all())
        broken = np.zeros(len(reference), dtype=np.bool_)
        if not whole:  # the two may both be infinite, and the same
            differ = ~finite & (reference != candidate)
            broken = differ.any(axis=1)
            theirs = differ & np.isfinite(reference)
            if theirs.any():
                i, j = (int(n) for n in np.unravel_index(int(np.argmax(theirs)), theirs.shape))
                first = element(block, i, j, math.nan, case, shape)
                self._not_finite(int(theirs.sum()), first)
            if (differ & ~theirs).any():
                self.problem("the reference itself is not finite where it is scored, and the candidate differs", case)
        clean = np.where(finite, reference, 0.0) if not whole else reference
        answer = np.where(finite, candidate, 0.0) if not whole else candidate
        self._elements(case, shape, block, clean, answer, score)
        self._cosines(case, block, clean, answer, broken, score)
        if self.output.measure in ("decisions", "distribution", "position"):
            self._decisions(block, broken, score)
            self.top_k.add(reference, candidate)
        if self.output.measure in ("distribution", "decisions"):
            self._divergence(case, block, broken, score)
        if self.near is not None:
            self.near.add(clean, answer)
        self.baseline.add(clean)

    def _elements(
        self, case: str, shape: tuple[int, ...], block: Block, reference: Floats, candidate: Floats, score: CaseScore
    ) -> None:
        error = np.abs(candidate - reference)
        self.sum_abs += float(error.sum())
        self.sum_square += float(np.vdot(error, error))
        self.sum_reference += float(np.vdot(reference, reference))
        self.sum_plain += float(reference.sum())
        self.histogram.add(error)
        i, j, worst = largest(error)
        score.worst_abs = max(score.worst_abs, worst)
        if self.worst is None or worst > self.worst.difference:
            self.worst = element(block, i, j, worst, case, shape)
        if self.tolerance.measure == "abs":
            self.out += int((error > self.tolerance.value).sum())
        relative = share(error, self.scale + np.abs(reference))
        i, j, furthest = largest(relative)
        score.worst_rel = max(score.worst_rel, furthest)
        if self.furthest is None or furthest > self.furthest_ratio:
            self.furthest_ratio = furthest
            self.furthest = element(block, i, j, float(error[i, j]), case, shape)
        if self.tolerance.measure == "rel":
            self.out += int((relative > self.tolerance.value).sum())

    def _cosines(
        self, case: str, block: Block, reference: Floats, candidate: Floats, broken: Bools, score: CaseScore
    ) -> None:
        cosine = cosines(reference, candidate)
        cosine[broken] = -1.0
        i = self.cosine.add(cosine, case)
        if i is not None:
            self.cosine.index = self._vector_index(block, i)
        score.cosine = min(score.cosine, float(cosine.min()))
        if self.tolerance.measure == "cosine":
            self.out += int((cosine < self.tolerance.value).sum())

    def _decisions(self, block: Block, broken: Bools, score: CaseScore) -> None:
        """Top-1 over the vector. A candidate that ties for its top has not decided, unless the reference ties too."""
        if block.reference.shape[1] < 2:
            return
        reference, candidate = block.reference, block.candidate
        changed = tops(reference) != tops(candidate)
        changed |= ties(candidate) & ~ties(reference)
        changed |= broken
        top_two = np.partition(reference[changed], -2, axis=1)[:, -2:]
        noise = UNKNOWN_NOISE if self.noise is None else self.noise
        may_move = NEAR_TIE * noise * (self.scale + np.abs(top_two).max(axis=1, initial=0.0))
        near = np.diff(top_two, axis=1)[:, 0] <= may_move
        # Where the whole of it is not finite nothing is near anything.
        near &= ~broken[changed]
        if self.sequences is not None:
            score.rows_changed |= {block.at(int(i), 0)[0] for i in np.flatnonzero(changed)}
        self.decisions += len(reference)
        self.changed += int(changed.sum())
        self.near_ties += int(near.sum())
        score.decisions += len(reference)
        real = int(changed.sum()) - int(near.sum())
        score.changed += real
        if self.tolerance.measure == "changed":
            self.out += real

    def _divergence(self, case: str, block: Block, broken: Bools, score: CaseScore) -> None:
        if block.reference.shape[1] < 2:
            return
        divergence = np.full(len(broken), math.inf)
        divergence[~broken] = divergences(block.reference[~broken], block.candidate[~broken])
        i = self.kl.add(divergence, case)
        if i is not None:
            self.kl.index = self._vector_index(block, i)
        score.kl += float(divergence.sum())
        score.positions += len(divergence)
        if self.tolerance.measure == "kl":
            self.out += int((divergence > self.tolerance.value).sum())

    def _vector_index(self, block: Block, i: int) -> tuple[int, ...]:
        index = block.at(i, 0)
        return index[:1] if self.unit == "row" else index[:2]

    def _padded(self, case: str, shape: tuple[int, ...], block: Block, *, count: bool) -> None:
        """Positions that are not judged: kept apart, so that a difference there is known and not mistaken."""
        with np.errstate(invalid="ignore"):
            error = np.abs(block.candidate - block.reference)
        same = block.candidate == block.reference
        bad = ~np.isfinite(error) & ~same
        if count:
            self.padded_nonfinite += int((bad & np.isfinite(block.reference)).sum())
        error[~np.isfinite(error)] = 0.0
        i, j, worst = largest(error)
        if self.padded is None or worst > self.padded.difference:
            self.padded = element(block, i, j, worst, case, shape)

    def _close_case(self, case: str, score: CaseScore) -> None:
        """What this case alone uses up of the tolerance, and what it weighs in `changed` and `kl`."""
        if not score.scored:
            return
        measure = self.tolerance.measure
        alone = {"abs": score.worst_abs, "rel": score.worst_rel, "cosine": score.cosine, "changed": 0.0, "kl": 0.0}
        if score.decisions:
            alone["changed"] = score.changed / score.decisions
            weight = (score.changed - SCATTER) / score.decisions / CASE_FACTOR
            self.case_scores["changed"][case] = (weight, alone["changed"])
        if score.positions:
            alone["kl"] = score.kl / score.positions
            self.case_scores["kl"][case] = (alone["kl"] / CASE_FACTOR, alone["kl"])
        used = math.inf if case in self.broken else self.tolerance.used(alone[measure])
        self.cases[case] = CaseDrift(score.worst_abs, used, score.scored)

    def diff(self) -> OutputDiff:
        """What was found in this output."""
        problems = self.problems.worded()
        if not self.elements and not problems:
            problems.append("nothing was compared: no element of it is scored in any case")
        measured, single = self._measured()
        measure = self.tolerance.measure
        if self.elements and math.isnan(measured[measure]):
            problems.append(
                'it has one value per answer, so there is no decision to change; judge it with --tolerance "rel<=..."'
                if measure in ("changed", "kl")
                else "it could not be measured"
            )
        notes: list[str] = []
        verdict = self.baseline.verdict()
        if verdict:
            # A wide bound that a constant answer passes cannot fail where it should; under a narrow one every answer of
            # the reference is the same, which may be an honest sample and is only told.
            wide = measure == "changed" and self.tolerance.given and self.tolerance.value >= WIDE_CHANGE
            (problems if measure in ("cosine", "kl") or wide else notes).append(verdict)
        relative = ratio(math.sqrt(self.sum_square), math.sqrt(self.sum_reference))
        factor = gross(relative, measure)
        if factor:
            problems.append(factor)
        top = self.baseline.largest
        if self.elements and measure == "abs" and 0 < top <= self.tolerance.value:
            problems.append(f"no reference value is above {top:.1e}: answers of zeros would pass {self.tolerance.text}")
        curable = bool(self.elements) and not problems and not self.nonfinite
        return OutputDiff(
            name=self.output.name,
            dtype=self.dtype,
            unit=self.unit,
            tolerance=self.tolerance,
            scale=self.scale,
            agrees=curable and self.tolerance.holds(measured[measure]),
            measured=measured[measure],
            used=math.inf if not curable else self.tolerance.used(measured[measure]),
            would_pass_at={k: v for k, v in measured.items() if math.isfinite(v)} if curable else {},
            elements=self.elements,
            vectors=self.vectors,
            out_of_tolerance=self.out,
            worst=self.worst,
            furthest=self.furthest,
            mean_abs=self.sum_abs / self.elements if self.elements else 0.0,
            relative_l2=relative,
            cosine=self.cosine.score(),
            decisions=Decisions(self.decisions, self.changed, self.near_ties) if self.decisions else None,
            kl=self.kl.score(),
            worst_case_score=single,
            padded=self.padded,
            padded_nonfinite=self.padded_nonfinite,
            nonfinite=self.nonfinite,
            first_nonfinite=self.first_nonfinite,
            cases=self.cases | {c: CaseDrift(math.nan, math.inf, 0) for c in sorted(self.broken - set(self.cases))},
            problems=tuple(problems),
            notes=tuple(notes),
            only=self.only,
            noise=self.noise,
            spread=(spread := self._spread()),
            normalised=ratio(self.worst.difference, spread) if self.worst else 0.0,
            sqnr_db=math.inf if not self.sum_square else _decibels(self.sum_reference / self.sum_square),
            top_k=self.top_k.found(),
            neighbours=self.near.found() if self.near else None,
            sequences=self.sequences.found() if self.sequences else None,
            histogram=self.histogram.found(),
        )

    def _spread(self) -> float:
        """Standard deviation of the reference's scored elements."""
        if not self.elements:
            return 0.0
        return math.sqrt(max(self.sum_reference / self.elements - (self.sum_plain / self.elements) ** 2, 0.0))

    def _measured(self) -> tuple[dict[str, float], tuple[str, float] | None]:
        """Each measure's number, as the module's docstring has it; and the case that decided, where one alone did."""
        none = math.nan
        found = {
            "abs": self.worst.difference if self.worst else none,
            "rel": self.furthest_ratio if self.furthest else none,
            "cosine": self.cosine.worst if self.cosine.count and self.output.measure == "embedding" else none,
            "changed": (self.changed - self.near_ties) / self.decisions if self.decisions else none,
            "kl": self.kl.total / self.kl.count if self.kl.count else none,
        }
        single: tuple[str, float] | None = None
        for measure, scores in self.case_scores.items():
            if not scores:
                continue
            name, (weight, alone) = max(scores.items(), key=lambda item: item[1][0])
            if weight > found[measure]:
                found[measure] = weight
                single = (name, alone) if measure == self.tolerance.measure else single
        return found, single


def _decibels(ratio: float) -> float:
    return 10 * math.log10(ratio) if ratio > 0 else -math.inf


def _empty_rows(mask: Bools) -> Bools:
    """Rows that are fully masked, (batch,)."""
    return np.array([not row.any() for row in mask], dtype=np.bool_)


def gross(relative: float, measure: str) -> str:
    """What a measure that sees no factor lets pass, in one sentence; "" where there is nothing of the kind."""
    if measure not in ("cosine", "changed") or not relative > GROSS:
        return ""
    return f"its values are {relative:.0%} off (relative L2), which {measure} does not see: a factor, or another scale?"

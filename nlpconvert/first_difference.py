"""Floor 3: two writers' texts to the same prompts: are they the same, and where not, was the first difference a near
tie.

Greedy texts are held against each other as a verdict does it (`validators.written_texts`). What was drawn, penalised or
searched with beams has no margin: there both writers read what they had in common once more, and a difference is
excused where their scores agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from nlpconvert import passages
from nlpconvert.errors import DriftError
from nlpconvert.generation import Settings, Written
from nlpconvert.models import OutputRow
from nlpconvert.passages import Free
from nlpconvert.validators import tolerance
from nlpconvert.validators.measures import share
from nlpconvert.validators.tally import NEAR_TIE, UNKNOWN_NOISE
from nlpconvert.validators.written_texts import Texts
from nlpconvert.writer import Writer

LOGITS = OutputRow("logits", ("batch", "sequence", "vocabulary"), "distribution")
BEFORE = 8
"""Tokens that both wrote before a difference, for a person to find the place by."""

Show = Callable[[Sequence[int], Sequence[int]], str]
"""Tokens before, and tokens: the text of the latter."""


@dataclass(frozen=True)
class Difference:
    """The first token of a row that is another. `position` counts new tokens from 0; tokens are None where a text had
    ended.

    `margin` and `candidate_margin`: between the best token and the next, of the reference's scores and the candidate's;
    None where the text was not written greedily. `moved`: then the worst difference of the scores in the unit of `rel`.
    `near_tie`: rounding alone may have made it; what follows is not judged. Texts are of the row from there on.
    """

    position: int
    reference: int | None
    candidate: int | None
    before: str
    reference_text: str
    candidate_text: str
    margin: float | None
    candidate_margin: float | None
    moved: float | None
    near_tie: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: what is not finite is None."""
        data = asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in data.items()}


@dataclass
class Watch:
    """What is kept of the scores while a batch is written: `see` is an `on_step` of `generation.generate`. `scaled`:
    their scale too."""

    scaled: bool = False
    second: list[list[int]] = field(default_factory=list)
    margin: list[list[float]] = field(default_factory=list)
    peak: list[list[float]] = field(default_factory=list)
    squares: float = 0.0
    count: int = 0

    def see(self, logits: np.ndarray, _: np.ndarray) -> None:
        """One step's logits (batch, vocabulary)."""
        best = [passages.best_two(row) for row in logits]
        scores = [(float(row[top]), float(row[other])) for row, (top, other) in zip(logits, best, strict=True)]
        self.second.append([other for _, other in best])
        self.margin.append([first - other for first, other in scores])
        self.peak.append([max(abs(first), abs(other)) for first, other in scores])
        if self.scaled:
            finite = logits[np.isfinite(logits)].astype(np.float64)
            self.squares += float((finite**2).sum())
            self.count += finite.size

    @property
    def scale(self) -> float:
        """Root mean square of the logits that were seen."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def free(self, written: Written) -> Free:
        """What was written, with the margins of every token."""
        return Free(
            written.tokens,
            np.array(written.lengths, np.int64),
            np.array(self.second, np.int64).T,
            np.array(self.margin, np.float32).T,
            np.array(self.peak, np.float32).T,
        )


@dataclass(frozen=True)
class Judge:
    """How differences are judged: `noise` is the reference's floor (None: not known) and `scale` that of its logits
    (None: of those that are seen)."""

    precision: str
    noise: float | None = None
    scale: float | None = None


def greedy(
    judge: Judge, reference: tuple[Written, Watch], candidate: tuple[Written, Watch], show: Sequence[Show]
) -> list[Difference | None]:
    """By row of one batch, None where both wrote the same. `show`: by row."""
    (theirs, watched), (ours, other) = reference, candidate
    texts = Texts()
    scale = watched.scale if judge.scale is None else judge.scale
    texts.add("", watched.free(theirs), ours.tokens, ours.lengths, scale, judge.noise)
    found: list[Difference | None] = [None] * len(ours.lengths)
    margins = other.free(ours).margin
    for each in texts.differences:
        place = min(each.position, margins.shape[1] - 1)
        found[each.row] = _difference(
            each.position,
            theirs.tokens[each.row, : theirs.lengths[each.row]].tolist(),
            ours.tokens[each.row, : ours.lengths[each.row]].tolist(),
            show[each.row],
            margin=each.margin,
            candidate_margin=float(margins[each.row, place]),
            near_tie=bool(each.near_tie),
        )
    return found


def otherwise(
    judge: Judge,
    how: Settings,
    prompts: Mapping[str, np.ndarray],
    reference: tuple[Writer, Written],
    candidate: tuple[Writer, Written],
    show: Sequence[Show],
) -> list[Difference | None]:
    """As `greedy`, of texts that were drawn, penalised or searched: excused where both writers' scores agree within
    what a verdict allows on what leads to the difference, or within the noise."""
    (reader, theirs), (other, ours) = reference, candidate
    found: list[Difference | None] = [None] * len(ours.lengths)
    for row in range(len(ours.lengths)):
        ids = [made.tokens[row, : made.lengths[row]].tolist() for made in (theirs, ours)]
        if ids[0] == ids[1]:
            continue
        at = next((i for i, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
        # A search looks at every place up to its end; a draw at the last one.
        read = ids[0][:-1] if how.beams > 1 else ids[0][:at]
        moved = _moved(judge, prompts, row, read, reader, other, whole=how.beams > 1)
        near = moved <= _allowed(judge, other.provider)
        found[row] = _difference(at, ids[0], ids[1], show[row], moved=moved, near_tie=near)
    return found


def _difference(at: int, theirs: list[int], ours: list[int], show: Show, **more: Any) -> Difference:
    return Difference(
        position=at,
        reference=theirs[at] if at < len(theirs) else None,
        candidate=ours[at] if at < len(ours) else None,
        before=show(theirs[: max(at - BEFORE, 0)], theirs[max(at - BEFORE, 0) : at]),
        reference_text=show(theirs[:at], theirs[at:]),
        candidate_text=show(theirs[:at], ours[at:]),
        **{"margin": None, "candidate_margin": None, "moved": None, **more},
    )


def _moved(
    judge: Judge,
    prompts: Mapping[str, np.ndarray],
    row: int,
    tokens: Sequence[int],
    reader: Writer,
    other: Writer,
    *,
    whole: bool,
) -> float:
    """The worst difference of two writers' scores after a row's prompt and `tokens`, in the unit of `rel`.

    `whole`: of every place from the prompt's end on. What one of them gives that is not finite is infinitely far.
    """
    kept = prompts["attention_mask"][row] != 0
    alone = {name: array[row : row + 1, kept] for name, array in prompts.items()}
    given = []
    for writer in (reader, other):
        state = writer.begin(alone)
        first = state.first.shape[1]
        said = np.concatenate([state.first, np.array([tokens], np.int64).reshape(1, -1)], axis=1)
        logits = writer.step(state, said)[0].astype(np.float64)
        given.append(logits[first - 1 :] if whole else logits[-1:])
    theirs, ours = given
    if theirs.shape != ours.shape:
        raise DriftError(f"the artifact scores {ours.shape[-1]:,} tokens and the model {theirs.shape[-1]:,}")
    apart = theirs != ours  # a score that both rule out is minus infinity
    theirs, ours = theirs[apart], ours[apart]
    if not (np.isfinite(theirs) & np.isfinite(ours)).all():
        return math.inf
    finite = given[0][np.isfinite(given[0])]
    scale = math.sqrt(float((finite**2).mean())) if judge.scale is None else judge.scale
    return float(share(np.abs(ours - theirs), scale + np.abs(theirs)).max(initial=0.0))


def _allowed(judge: Judge, provider: str) -> float:
    """What a verdict allows in float32; twice the noise where that is more, or where the verdict is by another
    measure."""
    noise = {} if judge.noise is None else {"logits": judge.noise}
    bound = tolerance.choose((), [LOGITS], judge.precision, provider, noise)["logits"]
    least = NEAR_TIE * (UNKNOWN_NOISE if judge.noise is None else judge.noise)
    return max(bound.value, least) if bound.measure == "rel" else least

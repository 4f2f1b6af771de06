"""Floor 1: the ways in which an artifact is broken on purpose, as rows, and those that bend a running session.

A gate is worth what it catches: `proving` breaks an artifact in each of these ways and looks whether the verdict turns.
Breaks of a graph are `convert/breaking` and `convert/breaking_torchscript`; here are the table and the breaks that any
artifact can suffer, engines included: what goes in or what comes out is changed, dict in, dict out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from nlpconvert.backends import Batch, Session
from nlpconvert.inputs import Case

ANY = ("onnx", "torchscript", "tensorrt")
EDITED = ("onnx", "torchscript")
EVERY = ("*",)
FLOAT32 = ("float32",)

EPSILON = 0.1
"""What a normalization's epsilon becomes: a tenth of the variance that a normalized layer has."""


class NotApplicable(Exception):
    """This break cannot be done to this artifact, or changes nothing in it; the message says why."""


@dataclass(frozen=True)
class Break:
    """One row: a way to break an artifact. `words` are for a person; `kind` is "graph", "session" or "file".

    `formats` are those it is done to in this way. `gross` names the precisions ("*": any) in which every gate worth its
    name has to see it. `factor` is what a weight is multiplied by.
    """

    name: str
    words: str
    kind: str
    formats: tuple[str, ...]
    gross: tuple[str, ...] = ()
    factor: float = 1.0

    @property
    def way(self) -> str:
        """What it is called where it is done: nudges of any size are one way."""
        return NUDGE if self.name.startswith(NUDGE) else self.name

    def is_gross(self, precision: str) -> bool:
        """Whether a gate that does not see it in an artifact of this precision is none."""
        return "*" in self.gross or precision in self.gross


@dataclass(frozen=True)
class Broken:
    """What was done: the module that was broken, as the checkpoint names it ("" where none is, or none is recorded).

    `path` is the broken file, where there is one; what of it is not changed stays in the original's data file.
    """

    what: str
    module: str = ""
    path: Path | None = None


@dataclass(frozen=True)
class Asked:
    """What a break of a graph is done with: the `factor` of a nudge, the `token` whose row is zeroed, the frozen
    `batch`."""

    factor: float = 1.0
    token: int = 0
    batch: int = 1


NUDGE = "weight-nudged"

BREAKS: tuple[Break, ...] = (
    Break(f"{NUDGE}-0.1%", "a weight 0.1 % larger", "graph", EDITED, factor=1.001),
    Break(f"{NUDGE}-1%", "a weight 1 % larger", "graph", EDITED, factor=1.01),
    Break(f"{NUDGE}-10%", "a weight 10 % larger", "graph", EDITED, FLOAT32, factor=1.1),
    Break("heads-swapped", "two heads swapped in one projection", "graph", EDITED, FLOAT32),
    Break("bias-dropped", "a bias dropped", "graph", EDITED),
    Break("mask-ignored", "the mask ignored", "session", ANY, EVERY),
    Break("mask-unread", "the mask ignored by one attention", "graph", ("onnx",), FLOAT32),
    Break("positions-shifted", "positions shifted by one", "graph", EDITED, FLOAT32),
    Break("positions-shifted", "positions shifted by one", "session", ANY, FLOAT32),
    Break("epsilon-changed", f"a normalization's epsilon made {EPSILON:g}", "graph", EDITED),
    Break("batch-frozen", "the batch frozen", "graph", ("onnx",), EVERY),
    Break("batch-frozen", "the batch frozen", "session", ANY, EVERY),
    Break("scale-doubled", "a weight's scale doubled", "graph", ("onnx",), EVERY),
    Break("scale-doubled", "every answer doubled", "session", ANY, EVERY),
    Break("answer-float16", "the answer cast to float16 and back", "session", ANY),
    Break("row-zeroed", "one token's embedding zeroed", "graph", EDITED, FLOAT32),
    Break("truncated", "the file cut off in the middle", "file", ANY, EVERY),
    Break("data-truncated", "the data file cut off in the middle", "file", ("onnx",), EVERY),
    Break("nan", "not a number in one text's answer", "session", ANY, EVERY),
    Break("output-missing", "an output missing", "session", ANY, EVERY),
    Break("output-renamed", "an output under another name", "session", ANY, EVERY),
    Break("outputs-swapped", "two answers in each other's place", "session", ANY, FLOAT32),
    Break("types-ignored", "token types ignored", "session", ANY),
    Break("stale-answer", "the answer of an earlier batch of the same shape", "session", ANY, FLOAT32),
)


def ways(format_: str) -> dict[str, tuple[Break, ...]]:
    """The rows for an artifact of this format, by name: the first way that applies is the one taken."""
    found: dict[str, tuple[Break, ...]] = {}
    for row in BREAKS:
        if format_ in row.formats:
            found[row.name] = (*found.get(row.name, ()), row)
    return found


# ---- breaks of a running session ------------------------------------------------------------------------------------


Answers = dict[str, np.ndarray]
Before = Callable[[Batch], Batch]
After = Callable[[Batch, Answers], Answers]


@dataclass
class Bent:
    """A session whose inputs or answers are changed on the way. A batch that needs no change goes through as it is."""

    base: Session
    before: Before = lambda batch: batch
    after: After = lambda _, answers: answers
    provider: str = field(init=False)
    precision: str = field(init=False)

    def __post_init__(self) -> None:
        self.provider, self.precision = self.base.provider, self.base.precision

    def run(self, batch: Batch) -> Answers:
        """The base's answers to the changed batch, changed."""
        return self.after(batch, dict(self.base.run(self.before(batch))))

    def close(self) -> None:
        """The base is closed by whoever opened it."""


def bend(name: str, session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    """The session broken in the way `name`, and what was done. `cases` are those it will be asked.

    `precision` is the artifact's. Raises NotApplicable where the cases or the answers give no room for it.
    """
    return SESSION[name](session, cases, precision)


def _masks_ignored(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    names = sorted({name for case in cases for name in case.inputs if name.endswith("attention_mask")})
    if not names:
        raise NotApplicable("it takes no mask")
    if not any((case.inputs[name] == 0).any() for case in cases for name in names if name in case.inputs):
        raise NotApplicable("no case is padded, so the mask is 1 everywhere")
    return Bent(session, _replacing(names, np.ones_like)), Broken(f"{' and '.join(names)} all ones")


def _types_ignored(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    name = "token_type_ids"
    if not any(case.inputs[name].any() for case in cases if name in case.inputs):
        raise NotApplicable("it takes no token types, or they are 0 in every case")
    return Bent(session, _replacing([name], np.zeros_like)), Broken(f"{name} all zeros")


def _positions_shifted(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    name = "position_ids"
    given = [case.inputs[name] for case in cases if name in case.inputs]
    if not given:
        raise NotApplicable("it takes no positions, and no table of them was found")
    last = max(int(array.max()) for array in given if array.size)

    def shifted(array: np.ndarray) -> np.ndarray:
        # A table ends somewhere: rows that reach the last position that is asked for stay as they are.
        reach = array.max(axis=-1, keepdims=True, initial=0) >= last
        moved: np.ndarray = np.where(reach, array, array + 1)
        return moved

    return Bent(session, _replacing([name], shifted)), Broken(f"{name} + 1")


def _replacing(names: Sequence[str], change: Callable[[np.ndarray], np.ndarray]) -> Before:
    def before(batch: Batch) -> Batch:
        changed = {name: change(batch[name]) for name in names if name in batch}
        same = all(np.array_equal(array, batch[name]) for name, array in changed.items())
        return batch if same else {**batch, **changed}

    return before


def _batch_frozen(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    size = frozen_at(cases)

    def before(batch: Batch) -> Batch:
        for name, array in batch.items():
            if array.shape[0] != size:
                raise ValueError(f"{name} has a batch of {array.shape[0]}, and it is frozen at {size}")
        return batch

    return Bent(session, before), Broken(f"batch frozen at {size}")


def frozen_at(cases: Sequence[Case]) -> int:
    """The size at which a batch is frozen: that of most cases. NotApplicable where all have the same."""
    sizes = Counter(array.shape[0] for case in cases for array in case.inputs.values())
    if len(sizes) < 2:
        raise NotApplicable("every case has the same batch size")
    return int(sizes.most_common(1)[0][0])


def _doubled(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    def after(_: Batch, answers: Answers) -> Answers:
        return {name: array * array.dtype.type(2) for name, array in answers.items()}

    return Bent(session, after=after), Broken("every answer times 2")


def _cast(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    if precision != "float32":
        raise NotApplicable(f"{precision} itself rounds as much")

    def after(_: Batch, answers: Answers) -> Answers:
        with np.errstate(over="ignore"):
            return {name: array.astype(np.float16).astype(array.dtype) for name, array in answers.items()}

    return Bent(session, after=after), Broken("every answer cast to float16 and back")


def _not_a_number(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    for case in cases:
        row = next((int(row) for row in _real_rows(case)), None)
        if row is not None:
            break
    else:
        raise NotApplicable("no case holds a real token")

    def after(batch: Batch, answers: Answers) -> Answers:
        if batch is not case.inputs:
            return answers
        answers = {name: np.array(array) for name, array in answers.items()}
        for array in answers.values():
            array[row] = np.nan
        return answers

    return Bent(session, after=after), Broken(f"NaN in row {row} of case {case.name}")


def _real_rows(case: Case) -> np.ndarray:
    ids = case.inputs.get("input_ids", next(iter(case.inputs.values())))
    mask = case.inputs.get("attention_mask", np.ones_like(ids))
    return np.flatnonzero(mask.reshape(len(mask), -1).any(axis=1))


def _missing(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    def after(_: Batch, answers: Answers) -> Answers:
        return dict(list(answers.items())[1:])

    return Bent(session, after=after), Broken("the first output is not given")


def _renamed(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    def after(_: Batch, answers: Answers) -> Answers:
        first = next(iter(answers))
        return {(f"{name}_0" if name == first else name): array for name, array in answers.items()}

    return Bent(session, after=after), Broken("the first output is given under another name")


def _swapped(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    """Two outputs of one shape, else the two last-axis columns 0 and 1 of every output."""
    first = session.run(cases[0].inputs)
    names = list(first)
    pair = next(((a, b) for i, a in enumerate(names) for b in names[i + 1 :] if first[a].shape == first[b].shape), None)
    if pair is not None:
        one, other = pair

        def after(_: Batch, answers: Answers) -> Answers:
            return {**answers, one: answers[other], other: answers[one]}

        return Bent(session, after=after), Broken(f"{one} and {other} in each other's place")
    if not any(array.ndim > 1 and array.shape[-1] > 1 for array in first.values()):
        raise NotApplicable("it gives one output of one number")

    def columns(_: Batch, answers: Answers) -> Answers:
        return {name: _first_two_swapped(array) for name, array in answers.items()}

    return Bent(session, after=columns), Broken("the first two columns of the answer in each other's place")


def _first_two_swapped(array: np.ndarray) -> np.ndarray:
    if array.ndim < 2 or array.shape[-1] < 2:
        return array
    order = np.arange(array.shape[-1])
    order[:2] = 1, 0
    return array[..., order]


def _stale(session: Session, cases: Sequence[Case], precision: str) -> tuple[Session, Broken]:
    shapes = Counter(tuple(sorted((name, array.shape) for name, array in case.inputs.items())) for case in cases)
    if shapes.most_common(1)[0][1] < 2:
        raise NotApplicable("no two cases have the same shape")
    held: dict[tuple[tuple[str, tuple[int, ...]], ...], Answers] = {}

    def after(batch: Batch, answers: Answers) -> Answers:
        shape = tuple(sorted((name, array.shape) for name, array in batch.items()))
        return held.setdefault(shape, answers)

    return Bent(session, after=after), Broken("the first answer of a shape is given to every batch of it")


SESSION: Mapping[str, Callable[[Session, Sequence[Case], str], tuple[Session, Broken]]] = {
    "mask-ignored": _masks_ignored,
    "types-ignored": _types_ignored,
    "positions-shifted": _positions_shifted,
    "batch-frozen": _batch_frozen,
    "scale-doubled": _doubled,
    "answer-float16": _cast,
    "nan": _not_a_number,
    "output-missing": _missing,
    "output-renamed": _renamed,
    "outputs-swapped": _swapped,
    "stale-answer": _stale,
}


# ---- what the breaks of a graph have to know ------------------------------------------------------------------------


def token_to_zero(cases: Sequence[Case], special: Sequence[int]) -> int:
    """The token that stands in most of the cases' real places, special ones left out. NotApplicable without any."""
    counts: Counter[int] = Counter()
    for case in cases:
        ids = case.inputs.get("input_ids")
        if ids is not None:
            mask = case.inputs.get("attention_mask", np.ones_like(ids))
            counts.update(int(each) for each in ids[mask != 0])
    for token, _ in counts.most_common():
        if token not in special:
            return token
    raise NotApplicable("the cases hold no token but special ones")


class Product(Protocol):
    """A product with a constant weight, of whatever format."""

    @property
    def inputs(self) -> int:
        """Rows of the weight."""
        ...

    @property
    def outputs(self) -> int:
        """Its columns."""
        ...


P = TypeVar("P", bound=Product)


def middle(products: Sequence[P]) -> P:
    """The one to break: in the middle of those that lead back into the residual stream (fewer outputs than inputs, and
    as many as most products take), else of all. NotApplicable where there is none."""
    if not products:
        raise NotApplicable("no product with a constant weight was found")
    stream = Counter(each.inputs for each in products).most_common(1)[0][0]
    chosen = [each for each in products if stream == each.outputs < each.inputs] or products
    return chosen[len(chosen) // 2]

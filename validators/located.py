"""Floor 1, validators: which module moved first, and by how much.

For each tensor that two computations share, two numbers, both |candidate - reference| / |reference| in the Euclidean
norm over real tokens (mask 1) of all cases asked:

    arrives     against the reference's own tensor: what stands there, whoever moved it
    introduced  against what the reference computes from the candidate's own inputs: what was moved right here

Data only. Where the tensors come from is `locating`'s business, how it is worded `report_located`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlpconvert.inputs import Case
from nlpconvert.validators.findings import plain

NOISE = 5e-6
"""Two float32 computations of one module differ by less: rounding, in another order. Of 21 architectures, MiniLM, five
trained fixtures and a GPT-Neo of 125 million parameters, PyTorch against ONNX Runtime, the largest is 8.4e-7 (T5).
"""
OUTSTANDING = 10.0
"""A module stands out whose introduced drift is so many times that of its peers."""
PEERS = 4
"""So many modules that moved are each other's peers; fewer are held against all, moved or not."""
BLOCK = 1 << 20
"""Numbers that are looked at in float64 at once."""
SENTINEL = 1e30
"""Values of this size stand for minus infinity in a mask; two that agree in sign do not differ."""


@dataclass(frozen=True)
class Moved:
    """One tensor: the module of the checkpoint that made it (where none is recorded, the tensor's own name), its name
    in the candidate, its shape in the case with the worst element, both drifts, and the worst element of the
    introduced one.
    """

    module: str
    tensor: str
    shape: tuple[int, ...]
    arrives: float
    introduced: float
    worst_abs: float = 0.0
    worst_index: tuple[int, ...] = ()
    worst_case: str = ""
    elements: int = 0
    nonfinite: int = 0
    """Elements that are finite on one side only; both drifts are then infinite."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Moved:
        """The reverse of `plain`; keys that are not known are passed over."""
        return cls(
            module=data["module"],
            tensor=data["tensor"],
            shape=tuple(data["shape"]),
            arrives=float(data["arrives"]),
            introduced=float(data["introduced"]),
            worst_abs=float(data["worst_abs"]),
            worst_index=tuple(data["worst_index"]),
            worst_case=data["worst_case"],
            elements=data["elements"],
            nonfinite=data["nonfinite"],
        )


@dataclass(frozen=True)
class Located:
    """Every tensor that was held against its counterpart, in order of execution, and which stand out.

    `first` and `most` are modules: the first that introduced drift, and the one that introduced most; None where
    nothing moved past `threshold` (and, where `stands_out` is false, past NOISE). `outputs` gives the drift that
    arrives at the outputs. `unmatched`: modules of the reference for which the candidate has no tensor.
    """

    step: str
    against: str
    cases: tuple[str, ...]
    modules: tuple[Moved, ...]
    first: str | None
    most: str | None
    threshold: float
    stands_out: bool
    outputs: Mapping[str, float]
    unmatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, module: str | None) -> Moved | None:
        """A module's tensor that introduced most."""
        found = [each for each in self.modules if each.module == module]
        return max(found, key=lambda each: each.introduced, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, as a verdict keeps it."""
        data: dict[str, Any] = plain(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Located:
        """The reverse of to_dict."""
        return cls(
            step=data["step"],
            against=data["against"],
            cases=tuple(data["cases"]),
            modules=tuple(Moved.from_dict(each) for each in data["modules"]),
            first=data["first"],
            most=data["most"],
            threshold=float(data["threshold"]),
            stands_out=data["stands_out"],
            outputs={name: float(value) for name, value in data["outputs"].items()},
            unmatched=tuple(data["unmatched"]),
            notes=tuple(data["notes"]),
        )


# -- one tensor --------------------------------------------------------------------------------------------------------


class Drift:
    """Adds up the difference between two tensors over cases, in float64."""

    def __init__(self) -> None:
        self._difference = 0.0
        self._reference = 0.0
        self.worst = 0.0
        self.index: tuple[int, ...] = ()
        self.case = ""
        self.shape: tuple[int, ...] = ()
        self.elements = 0
        self.nonfinite = 0

    def add(self, case: Case, module: str, reference: np.ndarray, candidate: np.ndarray) -> None:
        """One case's tensors, of the same shape. Entries that are not finite on both sides alike are left out."""
        if not self.shape:
            self.shape, self.case = tuple(reference.shape), case.name
        places = np.argwhere(real_places(case, module, reference.shape))
        step = max(1, BLOCK // max(1, math.prod(reference.shape[places.shape[1] :])))
        for start in range(0, len(places), step):
            self._add_block(case, places[start : start + step], reference, candidate)

    def _add_block(self, case: Case, places: np.ndarray, reference: np.ndarray, candidate: np.ndarray) -> None:
        leading = tuple(places.T)
        ours, theirs = _sized(reference[leading]), _sized(candidate[leading])
        alike = np.isfinite(ours) & np.isfinite(theirs)
        same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        self.nonfinite += int(np.count_nonzero(~alike & ~same))
        self.elements += ours.size
        if not ours.size:
            return
        ours[~alike], theirs[~alike] = 0.0, 0.0
        self._reference += float(np.vdot(ours, ours))
        difference = np.abs(theirs - ours)
        self._difference += float(np.vdot(difference, difference))
        at = int(difference.argmax())
        if difference.flat[at] > self.worst:
            self.worst, self.case, self.shape = float(difference.flat[at]), case.name, tuple(reference.shape)
            inner = difference.shape[1:]
            row, rest = divmod(at, math.prod(inner))
            self.index = tuple(int(place) for place in (*places[row], *np.unravel_index(rest, inner)))

    @property
    def relative(self) -> float:
        """|candidate - reference| / |reference|; infinite where one side alone is not finite."""
        if self.nonfinite:
            return math.inf
        if self._reference == 0.0:
            return 0.0 if self._difference == 0.0 else math.inf
        return math.sqrt(self._difference / self._reference)


def _sized(values: np.ndarray) -> np.ndarray:
    """A float64 copy in which what stands for infinity is infinite."""
    copy = values.astype(np.float64)
    huge = np.abs(copy) > SENTINEL
    copy[huge] = np.copysign(np.inf, copy[huge])
    return copy


def real_places(case: Case, module: str, shape: Sequence[int]) -> np.ndarray:
    """Which leading places of a tensor are scored, as booleans over its first axis or its first two.

    (batch, sequence, ...) and (batch * sequence, ...): where the mask is 1; (batch, ...): rows that are not fully
    masked; anything else: all. Of two masks the decoder's is a decoder's module's.
    """
    masks = [array.reshape(-1, array.shape[-1]) for name, array in case.inputs.items() if name.endswith("mask")]
    if "decoder" in module.split("."):
        masks.reverse()
    for mask in masks:
        if len(shape) > 2 and tuple(shape[:2]) == mask.shape:
            return np.asarray(mask == 1)
        if len(shape) == 2 and shape[0] == mask.size and mask.shape[1] > 1:
            return np.asarray(mask.reshape(-1) == 1)
    for mask in masks:
        if len(shape) > 1 and shape[0] == len(mask):
            return np.asarray((mask == 1).any(axis=1))
    return np.ones(tuple(shape[:1]), bool)


# -- all of them -------------------------------------------------------------------------------------------------------


def moved(module: str, tensor: str, arrives: Drift, introduced: Drift) -> Moved:
    """What was added up for one tensor."""
    return Moved(
        module=module,
        tensor=tensor,
        shape=introduced.shape,
        arrives=arrives.relative,
        introduced=introduced.relative,
        worst_abs=introduced.worst,
        worst_index=introduced.index,
        worst_case=introduced.case,
        elements=introduced.elements,
        nonfinite=introduced.nonfinite,
    )


def located(
    step: str,
    against: str,
    cases: Iterable[str],
    modules: Sequence[Moved],
    outputs: Mapping[str, float],
    unmatched: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> Located:
    """Which modules stand out. `modules` in order of execution.

    What stands out introduces OUTSTANDING times the median of its peers, and more than NOISE. Where several moved, and
    none stands out (every module of an int8 artifact does), the first is the first that moved at all.
    """
    drifts = [each.introduced for each in modules]
    peers = [drift for drift in drifts if drift > NOISE]
    threshold = max(NOISE, OUTSTANDING * _median(peers if len(peers) >= PEERS else drifts))
    outstanding = [each for each in modules if each.introduced > threshold]
    candidates = outstanding or [each for each in modules if each.introduced > NOISE]
    most = max(candidates, key=lambda each: each.introduced, default=None)
    return Located(
        step=step,
        against=against,
        cases=tuple(cases),
        modules=tuple(modules),
        first=candidates[0].module if candidates else None,
        most=most.module if most is not None else None,
        threshold=threshold,
        stands_out=bool(outstanding),
        outputs=dict(outputs),
        unmatched=tuple(unmatched),
        notes=tuple(notes),
    )


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2] if ordered else 0.0

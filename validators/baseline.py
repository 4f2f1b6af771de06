"""Floor 1, validators: could this reference tell a model from an artifact that ignores its input?

A tolerance that such an artifact would pass says nothing, whatever the candidate scores.
"""

from __future__ import annotations

import math

import numpy as np

from nlpconvert.validators.measures import cosines, divergences, share, tops
from nlpconvert.validators.scored import Floats
from nlpconvert.validators.tolerance import Tolerance

DIFFERS = 1e-3
"""Answers differ from text to text where they do by more than this share of the scale."""


class Baseline:
    """What an artifact that always gives the reference's first answer would score: a verdict must tell it apart."""

    def __init__(self, scale: float, tolerance: Tolerance) -> None:
        self.scale = scale
        self.tolerance = tolerance
        self.first: Floats | None = None
        self.count = 0
        self.largest = 0.0
        self.apart = 0.0  # the largest difference of an answer from the first
        self.worst = math.nan  # of abs, rel or cosine
        self.total = 0.0  # of kl or changed
        self.told_apart = False

    def add(self, reference: Floats) -> None:
        """Add a block of the reference's scored vectors."""
        self.largest = max(self.largest, float(np.abs(reference).max()))
        if self.first is None:
            self.first = reference[:1].copy()
        self.count += len(reference)
        if self.told_apart or reference.shape[1] != self.first.shape[1]:
            self.told_apart = True
            return
        measure = self.tolerance.measure
        constant = np.broadcast_to(self.first, reference.shape)
        self.apart = max(self.apart, float(np.abs(reference - constant).max()))
        if measure == "cosine":
            self._worst(float(cosines(reference, constant).min()))
        elif measure == "abs":
            self._worst(float(np.abs(reference - constant).max()))
        elif measure == "rel":
            self._worst(float(share(np.abs(reference - constant), self.scale + np.abs(reference)).max()))
        elif measure == "kl":
            self.total += float(divergences(reference, constant).sum())
        else:
            self.total += float((tops(reference) != tops(constant)).sum())

    def _worst(self, value: float) -> None:
        pick = min if self.tolerance.direction == ">=" else max
        self.worst = value if math.isnan(self.worst) else pick(value, self.worst)
        self.told_apart = not self.tolerance.holds(self.worst)

    def verdict(self) -> str:
        """One sentence where the constant answer would pass; empty where it would not, or one vector says nothing."""
        if not self.count:
            return ""
        if self.largest == 0:
            return "the reference is zero everywhere: it does not depend on its input"
        if self.told_apart or self.count < 2:
            return ""
        measure = self.tolerance.measure
        score = self.total / self.count if measure in ("kl", "changed") else self.worst
        if not self.tolerance.holds(score):
            return ""
        shown = f"{measure} {1 - score:.1e} below 1" if measure == "cosine" else f"{measure} {score:.1e}"
        # Answers that differ and all decide the same do not depend on the input in what is judged.
        differs = self.apart > DIFFERS * self.scale and (measure != "changed" or score > 0)
        why = (
            "this bound is wider than the answers differ from text to text"
            if differs
            else "the reference hardly depends on its input"
        )
        return f"{why}: an artifact that always gave the first answer would pass ({shown}, over {self.count:,} answers)"

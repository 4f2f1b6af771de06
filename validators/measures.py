"""Floor 1, validators: the arithmetic of comparing rows of float64. No masks, no tolerances, no state."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from nlpconvert.validators.scored import Bools, Floats


def cosines(reference: Floats, candidate: Floats) -> Floats:
    """Cosine of each pair of rows, (vectors,): 1 where the two are equal, 0 where just one of them is zero."""
    dots: Floats = np.einsum("ij,ij->i", reference, candidate)
    norms = np.linalg.norm(reference, axis=1) * np.linalg.norm(candidate, axis=1)
    found: Floats = np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)
    found = np.clip(found, -1.0, 1.0)
    found[(reference == candidate).all(axis=1)] = 1.0
    return found


def divergences(reference: Floats, candidate: Floats) -> Floats:
    """KL(softmax(reference) || softmax(candidate)) of each pair of rows, (vectors,), in nats.

    Where both are minus infinity the term is 0.
    """
    if not len(reference):
        return np.zeros(0)
    p = _log_softmax(reference)
    q = _log_softmax(candidate)
    weight = np.exp(p)
    with np.errstate(invalid="ignore"):
        terms = np.where(weight > 0, weight * (p - q), 0.0)
    found: Floats = np.maximum(terms.sum(axis=1), 0.0)
    return found


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    normal: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normal


def tops(values: Floats) -> npt.NDArray[np.intp]:
    """Index of the largest value of each row."""
    found: npt.NDArray[np.intp] = np.argmax(values, axis=1)
    return found


def ties(values: Floats) -> Bools:
    """Rows whose largest value stands there twice."""
    return np.asarray((values == values.max(axis=1, keepdims=True)).sum(axis=1) > 1)


def share(part: Floats, whole: Floats) -> Floats:
    """part / whole; 0 where both are zero, infinity where only the whole is."""
    found = np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)
    found[(whole == 0) & (part > 0)] = math.inf
    return found


def ratio(part: float, whole: float) -> float:
    """`share` of two numbers."""
    if whole > 0:
        return part / whole
    return math.inf if part > 0 else 0.0


def largest(values: Floats) -> tuple[int, int, float]:
    """Row, column and value of the largest entry."""
    i, j = (int(n) for n in np.unravel_index(int(values.argmax()), values.shape))
    return i, j, float(values[i, j])

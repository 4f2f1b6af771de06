"""Floor 1: another tool's names for inputs and outputs, matched to ours. What cannot be matched is named, no guess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nlpconvert.errors import UsageError
from nlpconvert.inputs import positions_from_mask
from nlpconvert.models import Facts

DERIVED = ("position_ids", "token_type_ids", "attention_mask")
"""Inputs that can be made from those a model takes: positions from the mask, types and mask as a model assumes them."""


def parse(mapping: Sequence[str]) -> dict[str, str]:
    """--map's values, "theirs=ours" each. UsageError for another form or a name given twice."""
    found: dict[str, str] = {}
    for text in mapping:
        theirs, equals, ours = (part.strip() for part in text.partition("="))
        if not (equals and theirs and ours):
            raise UsageError(f"--map {text!r} is not understood; write theirs=ours, such as --map output_0=logits")
        if theirs in found:
            raise UsageError(f"--map names {theirs} twice")
        if ours in found.values():
            raise UsageError(f"--map gives {ours} twice")
        found[theirs] = ours
    return found


def check(names: Mapping[str, str], theirs: Sequence[str], facts: Facts) -> None:
    """UsageError for a mapping that is about no input or output of the file, or none of the model."""
    known = (*facts.inputs, *(row.name for row in facts.outputs))
    for name, ours in names.items():
        if name not in theirs:
            raise UsageError(f"--map {name}={ours}: the file has no {name}; it has {_few(theirs)}")
        if ours not in (*known, *DERIVED):
            raise UsageError(f"--map {name}={ours}: the model has no {ours}; it has {_few(known)}")


def match_inputs(
    names: Mapping[str, str], theirs: Sequence[str], facts: Facts
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Their inputs to ours, by `names`, else by name; and what a person should know.

    UsageError, naming both sides, for an input that nothing can be fed to.
    """
    found: dict[str, str] = {}
    for name in theirs:
        ours = names.get(name, name)
        if ours not in facts.inputs and ours not in DERIVED:
            raise UsageError(
                f"the file reads {name}, which cannot be matched: the model takes {', '.join(facts.inputs)}; "
                f"--map {name}=OURS says which it is"
            )
        found[name] = ours
    notes = []
    unread = [name for name in facts.inputs if name not in found.values()]
    if unread:
        notes.append(f"the file does not read {', '.join(unread)}")
    derived = [name for name in found.values() if name not in facts.inputs]
    if derived:
        notes.append(f"the model does not take {', '.join(derived)}: the file is given the usual values")
    return found, tuple(notes)


def match_outputs(
    names: Mapping[str, str], theirs: Sequence[str], facts: Facts
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Their outputs to ours, by `names`, else by name; and what a person should know.

    Outputs without names ("0", "1", ... of a tuple) are the model's in their order where there are as many.
    UsageError when none can be matched.
    """
    ours = [row.name for row in facts.outputs]
    found = {name: names.get(name, name) for name in theirs if names.get(name, name) in ours}
    notes = []
    if not found and all(name.isdigit() for name in theirs) and len(theirs) == len(ours):
        found = dict(zip(theirs, ours, strict=True))
        notes.append(f"its outputs have no names: taken as {', '.join(ours)}, in the model's order")
    if not found:
        raise UsageError(
            f"no output of the file can be matched: it gives {_few(theirs)}, the model {', '.join(ours)}; "
            f"--map {theirs[0] if theirs else 'THEIRS'}={ours[0]} says which it is"
        )
    left = [name for name in theirs if name not in found]
    if left:
        notes.append(f"not compared, the model has no such output: {_few(left)}")
    return found, tuple(notes)


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return f"{shown} and {len(names) - 6} more" if len(names) > 6 else shown


def derive(name: str, batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """An input of DERIVED from the others: positions count the mask's ones, types are 0, the mask is 1."""
    ids = batch["input_ids"]
    if name == "token_type_ids":
        return np.zeros_like(ids)
    mask = batch.get("attention_mask", np.ones_like(ids))
    return positions_from_mask(mask) if name == "position_ids" else mask

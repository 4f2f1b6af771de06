"""Floor 3: which fault a cache has, found by trying: the artifact is asked again with one fault undone at a time.

Where single steps are off and the whole text at once agrees, some states between two steps are not what the next one
takes them for. If the steps agree as soon as the positions are moved by one, or two layers' caches are exchanged, then
that is the fault.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from nlpconvert.cache_names import KINDS, PAST, name
from nlpconvert.passages import Asked, Passage, Seeing
from nlpconvert.validators.written import Phase
from nlpconvert.validators.written_why import STEPS, WHOLE
from nlpconvert.writer import State, Writer

TRIED = 3
"""Single steps of each trial."""
PAIRS = 500
"""Pairs of layers that are tried at most, neighbours first."""

Amend = Callable[[State], None]


def repaired(writer: Writer, asked: Asked, phases: Mapping[str, Phase]) -> list[str]:
    """A sentence for the fault whose undoing makes the steps agree; nothing where there is none, or it is not in the
    steps, or the writer's cache cannot be looked into."""
    if phases[WHOLE].off or not phases[STEPS].off or not hasattr(writer, "replace"):
        return []
    names = {each.passage for each in phases[STEPS].off}
    fitting = [
        each
        for each in asked.passages
        if each.name in names and each.tokens.shape[1] - each.prompt >= 2 and not each.padded.any()
    ]
    for passage in sorted(fitting, key=lambda each: (each.tokens.size, each.name))[:1]:
        for sentence, amend in _hypotheses(writer, passage):
            try:
                if _used(writer, asked, passage, phases[STEPS], amend) <= 1:
                    return [sentence]
            except Exception:  # a runtime raises whatever it likes at what is tried on it
                continue
        if passage.encodes and _blind(writer, passage):
            return [
                "single steps answer the same whatever the cross-attention's cache holds: it is made anew, or not read"
            ]
    return []


def _blind(writer: Any, passage: Passage) -> bool:
    """Whether a step after the prompt answers the same with another cache over the source."""
    answers = []
    for other in (1, -2):
        state = writer.begin(passage.inputs)
        writer.step(state, passage.tokens[:, : passage.prompt])
        held = {
            each: array + array.dtype.type(other) for each, array in writer.cache(state).items() if ".encoder." in each
        }
        writer.replace(state, held)
        answers.append(writer.step(state, passage.tokens[:, passage.prompt : passage.prompt + 1]))
    return np.array_equal(*answers)


def _used(writer: Writer, asked: Asked, passage: Passage, like: Phase, amend: Amend) -> float:
    """How much of what is allowed the worst of some steps uses up, with `amend` before each."""
    seen = asked.known[passage.name].seen
    seeing = Seeing(passage, seen.index)
    state = writer.begin(passage.inputs)
    writer.step(state, passage.tokens[:, : passage.prompt])
    for place in range(passage.prompt, min(passage.prompt + TRIED, passage.tokens.shape[1])):
        amend(state)
        seeing.add(place, writer.step(state, passage.tokens[:, place : place + 1]))
    trial = like.fresh()
    trial.add(passage, seen, seeing.seen(), np.ones(passage.tokens.shape, bool))
    found = trial.found()
    if not found.kept:
        return math.inf
    return max([found.used, *(each.used for each in trial.off)])


def _hypotheses(writer: Any, passage: Passage) -> Iterator[tuple[str, Amend]]:
    """Sentences and what would undo the fault they name, the likely ones first."""
    if "position_ids" in writer.facts.inputs:
        for shift in (-1, 1, -2, 2):
            side, cure = ("large", "less") if shift < 0 else ("small", "more")
            yield (
                f"positions after the prompt are too {side} by {abs(shift)}: with so much {cure} the steps agree",
                _shifted(shift),
            )
        yield (
            "positions start again at 0 after the prompt: counted on from it the steps agree",
            _shifted(passage.prompt),
        )
    state = writer.begin(passage.inputs)
    writer.step(state, passage.tokens[:, : passage.prompt])
    held = writer.cache(state)
    part = "decoder" if passage.encodes else ""
    every = range(next(number for number in itertools.count() if name(PAST, number, KINDS[0], part) not in held))

    def pair(one: str, other: str) -> dict[str, str]:
        return {one: other, other: one}

    def kinds(number: int) -> dict[str, str]:
        return pair(*(name(PAST, number, kind, part) for kind in KINDS))

    def both(first: int, second: int) -> dict[str, str]:
        swapped: dict[str, str] = {}
        for kind in KINDS:
            swapped |= pair(name(PAST, first, kind, part), name(PAST, second, kind, part))
        return swapped

    whole: dict[str, str] = {}
    for number in every:
        whole |= kinds(number)
    yield "keys and values of all layers are swapped: exchanged before each step they agree", _swapped(writer, whole)
    for number in every:
        yield (
            f"key and value of layer {number} are swapped: exchanged before each step they agree",
            _swapped(writer, kinds(number)),
        )
    pairs = sorted(itertools.combinations(every, 2), key=lambda each: each[1] - each[0])
    for first, second in pairs[:PAIRS]:
        yield (
            f"the caches of layers {first} and {second} are swapped: exchanged before each step they agree",
            _swapped(writer, both(first, second)),
        )
        for kind in KINDS:
            yield (
                f"the {kind}s of layers {first} and {second} are swapped: exchanged before each step they agree",
                _swapped(writer, pair(name(PAST, first, kind, part), name(PAST, second, kind, part))),
            )
    if passage.encodes:
        begun = writer.cache(writer.begin(passage.inputs)) or held
        source = {each: array for each, array in begun.items() if ".encoder." in each}
        yield (
            "the cross-attention's cache is lost after the first step: given again before each step they agree",
            lambda state: writer.replace(state, source),
        )


def _shifted(shift: int) -> Amend:
    def amend(state: State) -> None:
        state.shift = shift

    return amend


def _swapped(writer: Any, names: Mapping[str, str]) -> Amend:
    def amend(state: State) -> None:
        held = writer.cache(state)
        writer.replace(state, {one: held[other] for one, other in names.items()})

    return amend

"""Floor 1, validators: what is wrong with a model that writes, in sentences: by how much, and which fault it is.

A broken cache leaves a pattern: which phases are off, from which position on, in which rows. What a pattern cannot tell
(positions, or one layer's cache for another's) is tried out on the artifact by `writing_why`, on floor 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nlpconvert.passages import Asked, Passage, Seen
from nlpconvert.validators.tolerance import Tolerance, passing
from nlpconvert.validators.written import Off, PhaseDrift
from nlpconvert.validators.written_texts import LEAST_TOKENS, Allowed, Perplexity, Texts

# The phases, by the names that they are told under.
PROMPT, STEPS, CHUNKED, WHOLE = "prompt", "single steps", "chunks", "the whole text at once"
MOVED, ALONE, CACHED, COMPANY = "rows that changed places", "rows alone", "cached against uncached", "a row in company"

MOST = 0.8
FEWEST = 3
"""Past an edge this share of the positions has to be off, and on either side of it so many have to be known."""


# -- by how much -------------------------------------------------------------------------------------------------------


def problems(found: Iterable[PhaseDrift], off: Mapping[str, Sequence[Off]], bound: Tolerance) -> list[str]:
    """One sentence for each phase that does not agree."""
    return [
        _problem(each, off[each.name], bound) for each in found if (each.kept or each.nonfinite) and not each.agrees
    ]


def _problem(phase: PhaseDrift, off: Sequence[Off], bound: Tolerance) -> str:
    if phase.nonfinite:
        first = phase.first_nonfinite
        assert first is not None
        return (
            f"{phase.name}: not finite at {phase.nonfinite:,} positions, first at position {first.position} of row "
            f"{first.row} of {first.passage}"
        )
    words = f"{phase.name}: {bound.measure} {phase.measured:.1e}, allowed {bound.text}"
    if phase.decided_by:
        words += f", by {phase.decided_by} alone"
    first_off = min(off, key=lambda each: (each.position, each.row), default=None)
    if first_off is not None:
        words += (
            f"; {phase.out_of_tolerance:,} of {phase.kept:,} positions are off, the earliest at position "
            f"{first_off.position} of row {first_off.row} of {first_off.passage}"
        )
    pass_at = passing(bound.measure, phase.measured)
    return words if pass_at is None else f"{words}; would pass at {pass_at}"


def text_problems(perplexity: Perplexity, texts: Texts, row: Allowed) -> list[str]:
    """What is wrong with perplexity and free texts."""
    told = []
    nothing = perplexity.tokens < LEAST_TOKENS and perplexity.left_out
    if row.perplexity is not None and not nothing and not perplexity.ratio <= row.perplexity:
        told.append(
            f"perplexity is {perplexity.ratio:.4f} times the reference's over {perplexity.tokens:,} tokens, allowed "
            f"{row.perplexity:g} times"
        )
    if row.identical is not None and texts.too_few(row.identical):
        first = texts.real[0]
        told.append(
            f"{len(texts.real)} of {texts.judged} free texts are not the reference's, allowed "
            f"{'none' if row.identical >= 1 else f'{1 - row.identical:.0%}'}: first row {first.row} of {first.passage} "
            f"at new token {first.position}, {first.candidate} instead of {first.reference}, and no near tie (the "
            f"reference's margin is {first.margin:.2g})"
        )
    return told


# -- which fault -------------------------------------------------------------------------------------------------------


def signs(
    asked: Asked,
    passes: Mapping[str, Mapping[str, Seen]],
    off: Mapping[str, Sequence[Off]],
    found: Mapping[str, PhaseDrift],
) -> list[str]:
    """The faults that the pattern speaks of, a sentence each; nothing where it speaks of none."""
    passages = {each.name: each for each in asked.passages if each.name in passes}
    told = [
        _not_finite(passages, found),
        _source(passages, asked, passes, off),
        _padding(passages, off, found),
        _window(passages, asked, off),
        _rows(found),
    ]
    return [each for each in told if each][:1]


def _not_finite(passages: Mapping[str, Passage], found: Mapping[str, PhaseDrift]) -> str:
    for name in (STEPS, PROMPT, CHUNKED, WHOLE, MOVED, ALONE):
        first = found[name].first_nonfinite
        if first is None:
            continue
        passage = passages[first.passage]
        place = first.position + int(passage.pads[first.row])
        step = place - passage.prompt + 1
        where = f"single step {step} after the prompt" if name == STEPS and step > 0 else name
        rest = "" if found[WHOLE].nonfinite else ", while the whole text at once stays finite"
        return f"the logits are not finite from {where} on (position {first.position}, {first.passage}){rest}"
    return ""


def _source(
    passages: Mapping[str, Passage],
    asked: Asked,
    passes: Mapping[str, Mapping[str, Seen]],
    off: Mapping[str, Sequence[Off]],
) -> str:
    """Rows of other sources and one target that answer alike."""
    for name, passage in passages.items():
        same = passage.encodes and len(passage.tokens) > 1 and bool((passage.tokens == passage.tokens[0]).all())
        if not same or not any(each.passage == name for each in (*off[STEPS], *off[WHOLE])):
            continue
        theirs, ours = (_spread(each) for each in (asked.known[name].seen, passes[name][STEPS]))
        if len(theirs) < 2:
            continue
        blind = (ours < theirs / 100) & (theirs > 0)
        if blind[-1] and blind.any():
            start = int(len(blind) - np.argmin(blind[::-1])) if not blind.all() else 0
            since = "from the first token on" if start == 0 else f"from single step {start - passage.prompt + 1} on"
            return (
                f"{since}, rows of {name} with other sources answer alike: the cross-attention's cache is not what the "
                "encoder gave"
            )
    return ""


def _spread(seen: Seen) -> np.ndarray:
    """How far the rows are from each other at every place, by what is known of all: (total - 1,)."""
    values = np.stack([seen.loss[:, :-1], seen.margin[:, :-1], seen.peak[:, :-1]])
    return np.asarray(np.ptp(values, axis=1).max(axis=0))


def _padding(passages: Mapping[str, Passage], off: Mapping[str, Sequence[Off]], found: Mapping[str, PhaseDrift]) -> str:
    """Only padded rows are off, and the same rows without padding are not."""
    if not off[WHOLE] or off[ALONE] or not found[ALONE].kept:
        return ""
    if any(not passages[each.passage].padded[each.row] for each in off[WHOLE]):
        return ""
    return "only rows with padding are off, and without it the same rows agree: the mask over the padding is ignored"


def _window(passages: Mapping[str, Passage], asked: Asked, off: Mapping[str, Sequence[Off]]) -> str:
    """All agrees up to one position, and nearly nothing from there on, whole or by steps."""
    for phase, words in ((WHOLE, ""), (STEPS, " by single steps")):
        if not off[phase]:
            continue
        edge = min(each.position for each in off[phase])
        before, past = 0, set()
        for name, passage in passages.items():
            number = np.cumsum(passage.real, axis=1) - 1
            for row, place in asked.known[name].seen.index:
                if phase == STEPS and place < passage.prompt:
                    continue
                before += int(number[row, place] < edge)
                if number[row, place] > edge:
                    past.add((name, int(row), int(place)))
        hit = past & {(each.passage, each.row, each.place) for each in off[phase]}
        if edge >= 2 and before >= FEWEST and len(hit) >= max(MOST * len(past), FEWEST):
            return (
                f"all agrees up to position {edge - 1} and is off from {edge} on{words}: attention reaches back "
                f"{edge} tokens and no further, a window shorter than the text"
            )
    return ""


def _rows(found: Mapping[str, PhaseDrift]) -> str:
    """Only rows that changed places are off."""
    others = (found[name] for name in (PROMPT, STEPS, CHUNKED, WHOLE))
    if found[MOVED].kept and not found[MOVED].agrees and all(each.agrees for each in others if each.kept):
        return "rows that changed places do not go on from their own past: the reorder takes the cache of another row"
    return ""


def general(found: Mapping[str, PhaseDrift]) -> list[str]:
    """What can be said where no single fault is recognised."""

    def bad(name: str) -> bool:
        return bool(found[name].kept) and not found[name].agrees

    if bad(PROMPT) or bad(WHOLE):
        return ["the text read at once is off already: not the cache but the model itself; ask which layer moved first"]
    if bad(STEPS) and bad(CHUNKED):
        return [
            "the whole text at once agrees, what is read after a past does not: the cache, or the positions after it"
        ]
    if bad(CHUNKED):
        return ["single steps agree and chunks do not: several tokens after a past see each other wrongly"]
    if bad(STEPS):
        return ["chunks agree and single steps do not: a graph that takes one token goes wrong"]
    if bad(COMPANY) or bad(ALONE):
        return ["a row's answer depends on its company"]
    return []


def worst_used(found: Iterable[PhaseDrift]) -> float:
    """How much of what is allowed the worst judged phase uses up; not a number where none is judged."""
    return max((each.used for each in found if not each.not_judged and each.kept), default=math.nan)

"""Floor 3: a model that writes is asked the passages, and an artifact's answers are held against the reference's.

Both are `Writer`s; which runtime stands behind one is not known here. What the numbers mean is `validators.written` and
`validators.written_texts`; what a pattern of them speaks of `validators.written_why` and `writing_why`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nlpconvert import generation, host, passages, writing_why
from nlpconvert.errors import DriftError, OutOfProfile, UsageError, first_line
from nlpconvert.generation import Settings
from nlpconvert.inputs import Encode
from nlpconvert.models import OutputRow
from nlpconvert.noise import OWN, Arithmetics
from nlpconvert.passages import Asked, Free, Known, Passage, Seeing, Seen
from nlpconvert.progress import Progress
from nlpconvert.validators import tolerance, written, written_why
from nlpconvert.validators.measures import share
from nlpconvert.validators.tally import UNKNOWN_NOISE
from nlpconvert.validators.tolerance import Tolerance
from nlpconvert.validators.written import Phase
from nlpconvert.validators.written_texts import SURE, Perplexity, Texts, allowed
from nlpconvert.validators.written_why import ALONE, CACHED, CHUNKED, COMPANY, MOVED, PROMPT, STEPS, WHOLE
from nlpconvert.writer import Writer, encodes

LOGITS = OutputRow("logits", ("batch", "sequence", "vocabulary"), "distribution")
CHUNKS = (3, 1, 5, 2)
"""Tokens of the chunks, round and round; of a long prompt in eighths of it."""

REFUSALS = (RuntimeError, ValueError, IndexError, TypeError)


# -- passes ------------------------------------------------------------------------------------------------------------


def whole(writer: Writer, passage: Passage, index: np.ndarray) -> Seen:
    """All tokens at once: nothing is taken from a cache."""
    return _read(writer, passage, index, [passage.tokens.shape[1]])


def steps(writer: Writer, passage: Passage, index: np.ndarray) -> Seen:
    """The prompt at once, then single tokens."""
    return _read(writer, passage, index, [passage.prompt] + [1] * (passage.tokens.shape[1] - passage.prompt))


def chunks(writer: Writer, passage: Passage, index: np.ndarray) -> Seen:
    """Everything in chunks of unequal sizes."""
    left = passage.tokens.shape[1]
    pieces: list[int] = []
    unit = max(left // 64, 1)
    while left:
        pieces.append(min(CHUNKS[len(pieces) % len(CHUNKS)] * unit, left))
        left -= pieces[-1]
    return _read(writer, passage, index, pieces)


def moved(writer: Writer, passage: Passage, index: np.ndarray) -> Seen:
    """Prompt and one step; then every row takes the place of the one before it, as beams do, and all go on."""
    rows = np.roll(np.arange(len(passage.tokens)), -1)
    seeing = Seeing(passage, index)
    state = writer.begin(passage.inputs)
    at = passage.prompt
    writer.step(state, passage.tokens[:, :at])
    seeing.add(at, writer.step(state, passage.tokens[:, at : at + 1]))
    writer.reorder(state, rows)
    for place in range(at + 1, passage.tokens.shape[1]):
        seeing.add(place, writer.step(state, passage.tokens[rows, place : place + 1]), rows)
    return seeing.seen()


def alone(writer: Writer, passage: Passage, index: np.ndarray) -> Seen:
    """Every row by itself and without padding, all its tokens at once."""
    seeing = Seeing(passage, index)
    for row in range(len(passage.tokens)):
        kept = passage.inputs["attention_mask"][row] != 0
        inputs = {name: array[row : row + 1, kept] for name, array in passage.inputs.items()}
        pad = int(passage.pads[row])
        seeing.add(pad, writer.step(writer.begin(inputs), passage.tokens[row : row + 1, pad:]), [row])
    return seeing.seen()


def free(writer: Writer, passage: Passage, how: Settings) -> Free:
    """Greedy from the prompt on: `passage.new` tokens at most."""
    second: list[list[int]] = []
    margin: list[list[float]] = []
    peak: list[list[float]] = []

    def see(logits: np.ndarray, _: np.ndarray) -> None:
        best = [passages.best_two(row) for row in logits]
        scores = [(float(row[top]), float(row[next_])) for row, (top, next_) in zip(logits, best, strict=True)]
        second.append([next_ for _, next_ in best])
        margin.append([first - other for first, other in scores])
        peak.append([max(abs(first), abs(other)) for first, other in scores])

    made = generation.generate(writer, passage.inputs, replace(how, max_new_tokens=passage.new), on_step=see)
    return Free(
        made.tokens,
        np.array(made.lengths, np.int64),
        np.array(second, np.int64).T,
        np.array(margin, np.float32).T,
        np.array(peak, np.float32).T,
    )


def _read(writer: Writer, passage: Passage, index: np.ndarray, pieces: Sequence[int]) -> Seen:
    seeing = Seeing(passage, index)
    state = writer.begin(passage.inputs)
    at = 0
    for size in pieces:
        seeing.add(at, writer.step(state, passage.tokens[:, at : at + size]))
        at += size
    return seeing.seen()


def _movable(passage: Passage) -> bool:
    return len(passage.tokens) > 1 and passage.tokens.shape[1] - passage.prompt > 1


def _has_company(passage: Passage) -> bool:
    return len(passage.tokens) > 1 or bool(passage.padded.any())


# -- asking the reference ----------------------------------------------------------------------------------------------


def ask(
    reference: Writer,
    encode: Encode | None,
    progress: Progress,
    *,
    more: Sequence[Passage] = (),
    eos: Sequence[int] | None = None,
    budget: int = passages.DEFAULT_BUDGET,
    longest: int | None = None,
    arithmetics: Arithmetics | None = None,
) -> Asked:
    """The standard passages and `more` of the user's, with the reference's answers: all tokens at once, and greedy.

    `eos`: what ends a text, None for the facts' own. `budget`: bytes of kept logits. `longest`: tokens
    of the longest passage at most. `arithmetics`: in which the noise
    is measured besides what the reference's own cache and company move.

    Raises DriftError when the reference can answer none, or differs from itself; UsageError when it is not finite.
    """
    facts = reference.facts
    ends = tuple(eos) if eos is not None else () if facts.eos_id is None else (facts.eos_id,)
    asked = [*passages.standard(facts, encode, longest=longest), *more]
    how = Settings(eos=ends, pad=facts.pad_id)
    known: dict[str, Known] = {}
    refused: dict[str, str] = {}
    noise = _Noise()
    shares: dict[str, int] = {}
    progress.start("reference", len(asked))
    for passage in asked:
        progress.advance()
        try:
            if not shares:
                shares = passages.shares(asked, _vocabulary(reference, passage), budget)
            index = passages.places(passage, shares[passage.name])
            seen = whole(reference, passage, index)
            found = Known(seen, free(reference, passage, how) if passage.new else None)
            if not known and not np.array_equal(seen.values, whole(reference, passage, index).values, equal_nan=True):
                raise DriftError(
                    "PyTorch is not deterministic: the same tokens gave other logits, so nothing can be judged by it "
                    "(is dropout on?)"
                )
            noise.seen[passage.name] = (seen, steps(reference, passage, index))
            if _has_company(passage):
                noise.company[passage.name] = (seen, alone(reference, passage, index))
        except REFUSALS as error:
            refused[passage.name] = f"the reference raised {type(error).__name__}: {first_line(error)}"
            continue
        known[passage.name] = found
    if not known:
        reasons = next(iter(refused.values()), "there are no passages")
        raise DriftError(f"PyTorch itself can answer none of the {len(asked)} passages: {reasons}")
    if not any(each.seen.finite.any() for each in known.values()):
        raise UsageError("PyTorch's own logits are not finite anywhere: nothing can be judged by them")
    scale = written.scale_of({name: each.seen for name, each in known.items()})
    noise.other(reference, [each for each in asked if each.name in known], arithmetics, progress)
    floors, own = noise.found(scale)
    return Asked(asked, known, scale, floors, ends, refused, own, tuple(noise.notes))


def _vocabulary(writer: Writer, passage: Passage) -> int:
    state = writer.begin(passage.inputs)
    return int(writer.step(state, passage.tokens[:, : passage.prompt]).shape[-1])


class _Noise:
    """How far the reference moves by itself: pairs of passes by what is different between them."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Seen, Seen]] = {}
        self.company: dict[str, tuple[Seen, Seen]] = {}
        self.float64: dict[str, tuple[Seen, Seen]] = {}
        self.threads: dict[str, tuple[Seen, Seen]] = {}
        self.notes: list[str] = []

    def other(
        self, reference: Writer, asked: Sequence[Passage], arithmetics: Arithmetics | None, progress: Progress
    ) -> None:
        if arithmetics is None:
            return
        chosen = sorted(asked, key=lambda each: each.tokens.size)[: 2 if arithmetics.by_layer else 3]
        progress.start("noise floor", 2 * len(chosen))
        kinds = (
            (self.threads, arithmetics.other_threads, "other threads"),
            (self.float64, arithmetics.float64, "float64"),
        )
        for kept, context, words in kinds:
            try:
                with context():
                    for passage in chosen:
                        progress.advance()
                        seen = self.seen[passage.name][0]
                        kept[passage.name] = (seen, whole(reference, passage, seen.index))
            except Exception as error:  # a library raises whatever it likes, and the others stand without it
                self.notes.append(f"the noise of {words} was not measured: {first_line(error)}")

    def found(self, scale: float) -> tuple[dict[str, float], tuple[str, ...]]:
        """The parts and "floor"; and what moves so much more than the arithmetic that it is the model's own doing."""
        parts = {
            name: _apart(pairs, scale)
            for name, pairs in (("float64", self.float64), ("threads", self.threads))
            if pairs
        }
        base = max(parts.values(), default=0.0) or UNKNOWN_NOISE
        own = []
        for name, pairs in (("steps", self.seen), ("company", self.company)):
            moved_by = _apart(pairs, scale)
            parts[name] = moved_by
            if not moved_by <= OWN * base:
                own.append(name)
        parts["floor"] = max(value for name, value in parts.items() if name not in own)
        return parts, tuple(own)


def _apart(pairs: Mapping[str, tuple[Seen, Seen]], scale: float) -> float:
    """The worst difference, in the unit of `rel`."""
    worst = 0.0
    for first, second in pairs.values():
        theirs = first.values.astype(np.float64)
        found = share(np.abs(second.values - theirs), scale + np.abs(theirs))
        found = found[np.isfinite(found)]
        worst = max(worst, float(found.max(initial=0.0)))
    return worst


# -- judging an artifact -----------------------------------------------------------------------------------------------


def judge(
    writer: Writer,
    asked: Asked,
    precision: str,
    given: Sequence[Tolerance] = (),
    progress: Progress | None = None,
) -> tuple[bool, dict[str, Any]]:
    """(agrees, verdict as plain data). `precision`: the artifact's, which chooses what is allowed; `given`: tolerances
    asked for instead of the table's, of which one judges the logits.

    A passage that the artifact refuses or fails at, where PyTorch answered, counts against it.
    """
    floor = asked.noise.get("floor") or None
    noise = {} if floor is None else {"logits": floor}
    bound = tolerance.choose(given, [LOGITS], precision, writer.provider, noise)["logits"]
    phases = {name: Phase(name, asked.scale, bound, floor, _excused(name, asked.own)) for name in _ORDER}
    perplexity, texts = Perplexity(), Texts(0.0 if precision == "float32" else SURE)
    how = Settings(eos=asked.eos, pad=writer.facts.pad_id)
    problems: list[str] = []
    not_applicable = dict(asked.not_applicable)
    passes: dict[str, Mapping[str, Seen]] = {}
    tokens = 0
    if progress is not None:
        progress.start("verify", len(asked.known))
    for passage in asked.passages:
        if passage.name not in asked.known:
            continue
        if progress is not None:
            progress.advance()
        known = asked.known[passage.name]
        try:
            seen = _passes(writer, passage, known.seen)
            wrote = free(writer, passage, how) if known.free is not None else None
        except OutOfProfile as error:
            not_applicable[passage.name] = str(error)
            continue
        except Exception as error:
            # A runtime raises whatever it likes; where PyTorch answered, that is the artifact's failure.
            problems.append(f"{passage.name}: {type(error).__name__}: {first_line(error)}")
            continue
        tokens += int(passage.real.sum())
        passes[passage.name] = seen
        _add(phases, passage, known.seen, seen)
        perplexity.add(passage, known.seen, seen[STEPS])
        if wrote is not None and known.free is not None:
            texts.add(passage.name, known.free, wrote.tokens, wrote.lengths.tolist(), asked.scale, floor)
    found = {name: phase.found() for name, phase in phases.items()}
    row = allowed(precision, encodes(writer.facts))
    if not found[STEPS].kept or not found[WHOLE].kept:
        problems.append("nothing was compared: no passage was answered")
    problems += written_why.problems(found.values(), {name: phase.off for name, phase in phases.items()}, bound)
    problems += written_why.text_problems(perplexity, texts, row)
    why = written_why.signs(asked, passes, {name: phase.off for name, phase in phases.items()}, found)
    if problems and not why:
        why = writing_why.repaired(writer, asked, phases) or written_why.general(found)
    points = [*phases[PROMPT].points, *phases[STEPS].points]
    verdict: dict[str, Any] = {
        "problems": problems,
        "why": why if problems else [],
        "phases": [each.to_dict() for each in found.values() if each.kept or each.nonfinite],
        "curve": written.curve(points).to_dict(),
        "perplexity": perplexity.to_dict(),
        "texts": texts.to_dict(),
        "tolerance": bound.to_dict(),
        "allowed": {"perplexity": row.perplexity, "identical": row.identical},
        "scale": asked.scale,
        "noise": dict(asked.noise),
        "own": list(asked.own),
        "not_applicable": not_applicable,
        "passages": passages.describe(each for each in asked.passages if each.name in passes),
        "passages_sha256": passages.sha256(asked.passages),
        "tokens": tokens,
        "provider": writer.provider,
        "precision": writer.precision,
        "versions": host.versions(),
        "host": host.host_facts(),
    }
    return not problems, verdict


# The phases, in the order in which they are told.
_ORDER = (PROMPT, STEPS, CHUNKED, WHOLE, MOVED, ALONE, CACHED, COMPANY)


def _excused(phase: str, own: Sequence[str]) -> str:
    """Why a phase is measured and not judged; "" where it is judged."""
    if "steps" in own and phase in (STEPS, CHUNKED, MOVED, CACHED):
        return "the reference itself answers otherwise with its cache than without"
    if "company" in own and phase in (ALONE, COMPANY):
        return "in the reference, too, a row answers otherwise alone than in company"
    return ""


def _passes(writer: Writer, passage: Passage, reference: Seen) -> dict[str, Seen]:
    ways: dict[str, Callable[[Writer, Passage, np.ndarray], Seen]] = {WHOLE: whole, STEPS: steps, CHUNKED: chunks}
    if _movable(passage):
        ways[MOVED] = moved
    if _has_company(passage):
        ways[ALONE] = alone
    return {name: way(writer, passage, reference.index) for name, way in ways.items()}


def _add(phases: Mapping[str, Phase], passage: Passage, reference: Seen, seen: Mapping[str, Seen]) -> None:
    every = np.ones(passage.tokens.shape, bool)
    prompt = every.copy()
    prompt[:, passage.prompt :] = False
    phases[PROMPT].add(passage, reference, seen[STEPS], prompt)
    phases[STEPS].add(passage, reference, seen[STEPS], ~prompt)
    phases[CHUNKED].add(passage, reference, seen[CHUNKED], every)
    phases[WHOLE].add(passage, reference, seen[WHOLE], every)
    phases[CACHED].add(passage, seen[WHOLE], seen[STEPS], ~prompt)
    if MOVED in seen:
        later = every.copy()
        later[:, : passage.prompt + 1] = False
        phases[MOVED].add(passage, reference, seen[MOVED], later)
    if ALONE in seen:
        phases[ALONE].add(passage, reference, seen[ALONE], every)
        phases[COMPANY].add(passage, seen[ALONE], seen[WHOLE], every)

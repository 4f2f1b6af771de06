"""Floor 3: what a model that writes would write itself, as the decoder's input of texts that precision is chosen by.

A text without its target says what the encoder reads and not what the decoder will: fed with anything else the decoder
shows other activations than in use, and what is fitted to those clips what is written. So the float32 pair writes an
answer to each source, greedily, and reads that. Which texts there are is `calibration`'s.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlpconvert import generation
from nlpconvert.inputs import Case
from nlpconvert.validators import written_texts
from nlpconvert.validators.margins import TextMargins
from nlpconvert.writer import encodes

if TYPE_CHECKING:
    from nlpconvert.making import Work
    from nlpconvert.models import Facts
    from nlpconvert.writer import Writer

PAIR = "pair"
"""In the record of a merged artifact: paths of the decoder's and the encoder's own file."""

MOST_TOKENS = 64
"""Tokens that are written to a text at most."""

END, SHIPPED = "-written", "shipped"


def is_own(case: Case) -> bool:
    """Whether the decoder of a case reads what the model itself wrote."""
    return case.name.endswith(END)


def of(work: Work, part: str, cases: Sequence[Case]) -> list[Case]:
    """The cases again, each with what the parent writes to its sources; none where the parent is no merged pair.

    Written once for a part: it is kept beside the merged file, which is thrown away after use.
    """
    files = work.above.made_by.get(PAIR)
    if not encodes(work.facts) or not isinstance(files, Sequence):
        return []
    usable = [case for case in cases if case.inputs["attention_mask"].any(axis=1).all()]
    kept = work.above.directory / f".{part}{END}.npz"
    if not kept.is_file():
        decoder, encoder = map(Path, files)
        np.savez(kept, *_written(work, decoder, encoder, usable))
    with np.load(kept) as arrays:
        return [_answered(case, arrays[f"arr_{n}"], work.facts) for n, case in enumerate(usable)]


def _written(work: Work, decoder: Path, encoder: Path, cases: Sequence[Case]) -> list[np.ndarray]:
    """What is written to each case's rows, int64 (rows, n), -1 after a row's end."""
    from nlpconvert.backends import writing

    most = min(MOST_TOKENS, (work.facts.max_length or MOST_TOKENS + 1) - 1)
    how = generation.settings(work.facts, _config(work.above.directory), max_new_tokens=most)
    writer: Writer = writing.open_paths(decoder, encoder, work.facts, threads=work.options.threads)
    found = []
    work.progress.start(f"{work.row.name}: what the model writes to the texts it is fitted on", len(cases))
    try:
        for case in cases:
            work.progress.advance()
            prompts = {name: case.inputs[name] for name in ("input_ids", "attention_mask")}
            made = generation.generate(writer, prompts, how)
            inside = np.arange(made.tokens.shape[1])[None] < np.array(made.lengths)[:, None]
            found.append(np.where(inside, made.tokens, -1))
    finally:
        writer.close()
    return found


def _config(directory: Path) -> dict[str, Any]:
    """The generation config beside the parent, {} where there is none."""
    try:
        read = json.loads((directory / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _answered(case: Case, written: np.ndarray, facts: Facts) -> Case:
    """The case whose decoder reads `written`, shifted behind the start token."""
    if written.shape[1] == case.inputs["input_ids"].shape[1]:  # a tensor's axes tell whose tokens it is about
        written = np.concatenate([written, np.full((len(written), 1), -1)], axis=1)
    start = facts.pad_id if facts.decoder_start_id is None else facts.decoder_start_id
    mask = np.ascontiguousarray(written >= 0, dtype=np.int64)
    before = np.concatenate([np.full((len(written), 1), start), written[:, :-1]], axis=1)
    ids = np.where(mask == 1, before, facts.pad_id).astype(np.int64)
    inputs = {**case.inputs, "decoder_input_ids": ids, "decoder_attention_mask": mask}
    return replace(case, name=f"{case.name}{END}", inputs={name: inputs[name] for name in case.inputs})


class Writes:
    """How a candidate writes, in what the verdict on it allows: the share of texts that it writes otherwise, and the
    perplexity that it gives to texts as they stand.

    Texts are those of cases whose decoder reads what the model wrote. The user's own sources count where there are
    some; of the shipped ones, which may be what the model never learnt and answers with anything, those at which the
    reference was sure of every token, as the verdict has it. Perplexity is of texts that the reference finds likelier
    than by chance. Nothing is seen of a model that keeps no cache, and so writes nothing.
    """

    def __init__(self, cases: Sequence[Case], facts: Facts, precision: str, keeps: bool) -> None:
        own = [case for case in cases if is_own(case)] if keeps else []
        users = [case for case in own if not case.name.startswith(SHIPPED)]
        self._sure = 0.0 if users else written_texts.SURE
        self._allowed = written_texts.allowed(precision, encodes(facts)) if keeps else None
        judged = self._allowed is not None and self._allowed.identical is not None
        self._own = {case.name for case in (users or own if judged else ())}
        self._given = {case.name for case in cases if not is_own(case)} if keeps else set()
        self._margins, self._perplexity = TextMargins(), written_texts.Perplexity()
        self._losses: dict[str, list[np.ndarray]] = {}

    @property
    def asks(self) -> bool:
        """Whether the reference has to be asked anything."""
        return bool(self._own or self._given)

    def ask(self, case: Case, given: Mapping[str, np.ndarray]) -> None:
        """The reference's answers to a case."""
        if case.name in self._own:
            real = case.inputs["decoder_attention_mask"] != 0
            self._margins.reference(case.name, given["logits"], real, self._sure)
        if case.name in self._given:
            chance = math.log(given["logits"].shape[-1])
            lost = _losses(case, given["logits"])
            self._losses[case.name] = [each if each.sum() < chance * len(each) else each[:0] for each in lost]

    def fresh(self) -> Writes:
        """The same questions to another candidate."""
        found = copy.copy(self)
        found._margins, found._perplexity = self._margins.fresh(), written_texts.Perplexity()
        return found

    def add(self, case: Case, given: Mapping[str, np.ndarray]) -> None:
        """A candidate's answers to a case that the reference was asked."""
        if case.name in self._own:
            self._margins.add(case.name, given["logits"])
        if case.name in self._losses:
            for before, after in zip(self._losses[case.name], _losses(case, given["logits"]), strict=True):
                if len(before):
                    self._perplexity.tokens += len(before)
                    self._perplexity.reference_loss += float(before.sum())
                    self._perplexity.candidate_loss += float(after.sum())

    @property
    def changing(self) -> float:
        """Share of the texts that change: by the margins, or counted beyond a single one, which says nothing."""
        counted = max(self._margins.changed - 1, 0) / max(self._margins.rows, 1)
        return max(counted, self._margins.expected())

    @property
    def used(self) -> tuple[float, str]:
        """Share of what is allowed that is used up, and the measure as text."""
        found = [(0.0, "")]
        if self._allowed is not None and self._allowed.identical is not None and self._own:
            found.append((self.changing / (1 - self._allowed.identical), f"texts {self.changing:.2%}"))
        if self._allowed is not None and self._allowed.perplexity is not None and self._perplexity.tokens:
            ratio = self._perplexity.ratio if math.isfinite(self._perplexity.candidate_loss) else math.inf
            found.append(((ratio - 1) / (self._allowed.perplexity - 1), f"perplexity {ratio:.4f}"))
        return max(found)


def _losses(case: Case, logits: np.ndarray) -> list[np.ndarray]:
    """What the next real tokens of each row of a case cost, in nats."""
    name = "decoder_input_ids" if "decoder_input_ids" in case.inputs else "input_ids"
    ids, mask = case.inputs[name], case.inputs[name.replace("input_ids", "attention_mask")] != 0
    found = []
    for row, real in enumerate(mask[:, :-1] & mask[:, 1:]):
        scores = logits[row, :-1][real].astype(np.float32)
        top = scores.max(axis=1, keepdims=True)
        lost = np.log(np.exp(scores - top).sum(axis=1)) + top[:, 0]
        found.append(np.asarray(lost - scores[np.arange(len(scores)), ids[row, 1:][real]], np.float64))
    return found

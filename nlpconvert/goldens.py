"""Floor 3: what the reference is asked before anything is converted, and how that comes to lie in OUT/golden.

Which cases and passages there are is decided here; what is measured of them is `reference`, `writing` and `noise`, how
they lie on disk `golden` and `passages_files`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nlpconvert import disk, judging, manifest, models
from nlpconvert.judging import Probes
from nlpconvert.manifest import Manifest
from nlpconvert.plan import Options
from nlpconvert.progress import Progress, captured

if TYPE_CHECKING:
    import numpy as np

    from nlpconvert.inputs import Case
    from nlpconvert.noise import Arithmetics, Noise
    from nlpconvert.passages import Asked as Written
    from nlpconvert.passages import Passage
    from nlpconvert.reference import Asked
    from nlpconvert.source import Loaded

LARGE = 2 << 30
LONG_SHARE = 0.025
"""Of a large model's weights, in bytes, that logits and cache of its longest passage may be: they are held twice."""
LEAST_LONG = 64


def ask(
    record: Manifest | None, loaded: Loaded, lower: bool, out: Path, options: Options, progress: Progress
) -> tuple[Manifest, Probes]:
    """The goldens: those that lie in `out` where they fit, else asked of PyTorch now. `lower`: something below float32
    is judged."""
    return _Asking(loaded, lower, out, options, progress).goldens(record)


@dataclass(frozen=True)
class _Asking:
    loaded: Loaded
    lower: bool
    out: Path
    options: Options
    progress: Progress

    def goldens(self, record: Manifest | None) -> tuple[Manifest, Probes]:
        from nlpconvert import forward, golden, inputs, noise, passages_files, reference

        loaded, facts = self.loaded, self.loaded.facts
        kept_well = record is not None and not manifest.tampered(record, manifest.GOLDEN, self.out)
        there = self.out / manifest.GOLDEN
        before = golden.read(there)[0] if kept_well else []
        cases = self._cases(before)
        digest = inputs.cases_sha256(cases)
        writes = self._writes()
        if record is not None and kept_well and record.golden.probe_sha256 == digest:
            stored = judging.stored_probes(record, self.out)
            if stored.written is not None or not writes:
                return record, stored
        texts = passages_files.read(there).passages if kept_well and passages_files.there(there) else ()
        with captured(Path(os.devnull)):
            asked = reference.ask(
                lambda batch: forward.call(loaded.module, batch),
                cases,
                facts.outputs,
                self.options.golden_budget,
                self.progress,
            )
            floor = self._noise(cases, asked)
            vocabulary = self._vocabulary()
            written = self._written(texts) if writes else None
        for note in (*asked.notes, *(() if written is None else written.notes)):
            self.progress.line(note)
        with disk.building(self.out, manifest.GOLDEN) as new:
            golden.write(new, cases, asked.answers, vocabulary)
            if written is not None:
                passages_files.write(new, written)
            files = disk.hash_tree(new)
            disk.replace_directory(new, there)
        kept = manifest.Golden(
            files, tuple(golden.describe(cases, asked.answers)), digest, asked.not_applicable, floor.to_dict()
        )
        fresh = Manifest(loaded.description, asdict(facts), kept)
        if record is not None:
            fresh = replace(fresh, steps=record.steps, created=record.created)
        floors = noise.floors(kept.noise)
        return fresh, Probes(cases, asked.answers, asked.not_applicable, digest, floors, vocabulary, written)

    def _cases(self, before: Sequence[Case]) -> list[Case]:
        """The standard cases, the shipped texts and the user's own; `before`: what lies there already."""
        from nlpconvert import calibration, probes

        facts, encode = self.loaded.facts, self.loaded.encode
        cases = probes.probe_cases(facts, encode)
        lower_on_shipped = self.lower and (self.options.data is None or calibration.plain(facts.task))
        if lower_on_shipped or any(calibration.is_shipped(case) for case in before):
            # Below float32 a share of changed answers is judged, which a handful of texts cannot tell.
            cases += calibration.shipped_cases(facts, encode, "judge")
        if self.options.data is not None:
            # What is fitted or chosen on one part of the data is judged on another.
            return cases + calibration.data_cases(self.options, facts, encode, "judge" if self.lower else None)
        # A step that is added later is judged by the same text as those that lie there.
        return cases + [case for case in before if case.from_data]

    # -- a model that writes ------------------------------------------------------------------------------------------

    def _writes(self) -> bool:
        """Whether the model writes text with a cache of keys and values."""
        if self.loaded.facts.task not in models.WRITING:
            return False
        from nlpconvert.convert import cached

        return not cached.keeps_none(self.loaded.module, self.loaded.facts)

    def _written(self, before: Sequence[Passage]) -> Written:
        """Passages, with what PyTorch answers token by token through its own cache."""
        from nlpconvert import calibration, passages, writing
        from nlpconvert.backends.pytorch_writing import PytorchWriter

        facts, encode = self.loaded.facts, self.loaded.encode
        # As for the cases: a step that is added later is judged by the same texts as those that lie there.
        more = [each for each in before if each.name.startswith((f"{passages.DATA}-", f"{passages.SHIPPED}-"))]
        texts = [] if encode is None else calibration.written_texts(self.options, facts, self.lower)
        if encode is not None and texts and (self.options.data is not None or not more):
            stem = passages.SHIPPED if self.options.data is None else passages.DATA
            more = passages.from_texts(facts, encode, texts, new=calibration.WRITTEN_NEW, stem=stem)
        writer = PytorchWriter(self.loaded.module, facts)
        return writing.ask(
            writer, encode, self.progress, more=more, longest=self._longest(), arithmetics=self._arithmetics()
        )

    def _longest(self) -> int | None:
        """Tokens of a passage of a large model whose logits and cache are LONG_SHARE of its weights; None of others."""
        if self.loaded.parameter_bytes < LARGE:
            return None
        from nlpconvert import cache_names, writer
        from nlpconvert.convert import cached

        facts = self.loaded.facts
        pair = writer.encodes(facts)
        layers = cached.measured(self.loaded.module, cached.short_call(facts), "self_attention_cache" if pair else "")
        token = 4 * facts.vocab_size + cache_names.token_bytes(layers) * (2 if pair else 1)
        return max(int(LONG_SHARE * self.loaded.parameter_bytes) // token, LEAST_LONG)

    # -- what else is known of it -------------------------------------------------------------------------------------

    def _vocabulary(self) -> np.ndarray | None:
        """The fingerprint of the embedding table, where ids are looked up in a plain one."""
        from nlpconvert import forward
        from nlpconvert.validators import vocabulary

        table = forward.embedding(self.loaded.module)
        return None if table is None else vocabulary.fingerprint(table)

    def _noise(self, cases: Sequence[Case], asked: Asked) -> Noise:
        from nlpconvert import calibration, forward, noise

        return noise.measure(
            lambda batch: forward.call(self.loaded.module, batch),
            [case for case in cases if not calibration.is_shipped(case)],
            asked.answers,
            self.loaded.facts.outputs,
            self.loaded.parameter_bytes // 4,
            self._arithmetics(),
            self.progress,
        )

    def _arithmetics(self) -> Arithmetics:
        """The reference in float64, or layer by layer where twice its weights are more than --max-memory."""
        from nlpconvert import exact, noise

        by_layer = 2 * self.loaded.parameter_bytes > self.options.max_memory
        arithmetic = exact.float64_by_layer if by_layer else exact.float64
        return noise.Arithmetics(lambda: arithmetic(self.loaded.module), exact.other_threads, by_layer)

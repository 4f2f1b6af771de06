"""Floor 3: ONNX graphs run a piece at a time, their inner tensors kept, on disk past a limit.

What is kept of one pass is what the next piece, or the other graph, is given. Neither a whole model nor all its inner
tensors are ever in memory. Which tensors those are is `convert/tapping`'s, what becomes of them `locating`'s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nlpconvert.errors import DriftError, first_line
from nlpconvert.inputs import Case
from nlpconvert.plan import Options
from nlpconvert.progress import Progress
from nlpconvert.validators import located
from nlpconvert.validators.located import Drift

if TYPE_CHECKING:
    from nlpconvert.convert.tapping import Graph

PIECE = 256 << 20
"""Bytes of weights, and of tensors, in a piece of a graph that is run at once."""
IN_MEMORY = 256 << 20
"""Bytes of tensors that are kept in memory; the rest goes to disk."""


class Store:
    """Arrays by key, in memory up to a limit and then in files of a scratch directory."""

    def __init__(self, scratch: Path, limit: int = IN_MEMORY) -> None:
        self._scratch = scratch
        self._limit = limit
        self._held: dict[tuple[str, ...], np.ndarray | Path] = {}
        self._bytes = 0
        self._count = itertools.count()

    def keep(self, key: tuple[str, ...], array: np.ndarray) -> None:
        """Keeps an array, as a copy of its own."""
        if self._bytes + array.nbytes <= self._limit:
            self._bytes += array.nbytes
            self._held[key] = np.array(array)
            return
        path = self._scratch / f"{next(self._count)}.npy"
        np.save(path, array)
        self._held[key] = path

    def get(self, key: tuple[str, ...]) -> np.ndarray:
        """The array, read from disk where it lies there. KeyError where it was not kept."""
        held = self._held[key]
        if isinstance(held, Path):
            array: np.ndarray = np.load(held)
            return array
        return held

    def has(self, key: tuple[str, ...]) -> bool:
        """Whether it was kept."""
        return key in self._held

    def drop(self, who: str) -> None:
        """Forgets every array whose key starts with `who`."""
        for key in [key for key in self._held if key[0] == who]:
            held = self._held.pop(key)
            if isinstance(held, Path):
                held.unlink()
            else:
                self._bytes -= held.nbytes


def same_numbers(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether two shapes are two views of the same rows: equal, or with heads apart, (batch, sequence, 4, 8) for
    (batch, sequence, 32), or with batch and sequence in one axis.
    """
    if ours == theirs:
        return True
    if math.prod(ours) != math.prod(theirs) or not min(len(ours), len(theirs)):
        return False
    return (len(ours) > 2 and ours[:2] == theirs[:2]) or (2 in (len(ours), len(theirs)) and ours[-1] == theirs[-1])


class Tally:
    """Both drifts of one tensor, added up over cases."""

    def __init__(self, module: str, tensor: str) -> None:
        self.module, self.tensor = module, tensor
        self.arrives, self.introduced = Drift(), Drift()
        self.fits = True
        """Whether the candidate's tensor has had the reference's shape so far."""

    @property
    def label(self) -> str:
        """The module, else the tensor."""
        return self.module or self.tensor

    def add(self, drift: Drift, case: Case, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Adds one case to one of the two; another view of the same rows is taken as the reference's."""
        if not same_numbers(reference.shape, candidate.shape):
            self.fits = False
        if self.fits:
            drift.add(case, self.module, reference, candidate.reshape(reference.shape))

    def moved(self) -> located.Moved:
        """What was added up."""
        return located.moved(self.label, self.tensor, self.arrives, self.introduced)


class Work:
    """Graphs run in pieces over the cases that both sides answer."""

    def __init__(self, options: Options, progress: Progress, scratch: Path, cases: list[Case]) -> None:
        self.options, self.progress, self.scratch, self.cases = options, progress, scratch, cases
        self.store = Store(scratch)
        self.notes: list[str] = []

    def own(
        self,
        graph: Graph,
        names: Sequence[str],
        who: str,
        precision: str,
        seen: Callable[[str, Case, np.ndarray], None] | None = None,
    ) -> None:
        """A graph's own tensors, kept under (who, name, case): an undisturbed pass. `seen` is shown each."""
        for chunk in self._chunks(graph, sorted(names, key=graph.place)):
            given = frozenset(names) - set(chunk)
            for case, answers in self._run(graph, chunk, given, precision, who):
                for name, array in answers.items():
                    self.store.keep((who, name, case.name), array)
                    if seen is not None:
                        seen(name, case, array)
            self.progress.advance(len(chunk))

    def introduced(self, graph: Graph, tallies: dict[str, Tally], precision: str) -> None:
        """What a graph computes for each tensor when every other one is the candidate's, held against the candidate's.

        `tallies` by the graph's own name of the tensor; a tally names the candidate's.
        """
        names = list(tallies)
        theirs = {name: tally.tensor for name, tally in tallies.items()}
        for chunk in self._chunks(graph, names):
            for case, answers in self._run(graph, chunk, frozenset(names), precision, "candidate", theirs):
                for name, array in answers.items():
                    tally = tallies[name]
                    tally.add(tally.introduced, case, array, self.store.get(("candidate", tally.tensor, case.name)))
            self.progress.advance(len(chunk))

    def failed(self, case: Case, error: Exception, whose: str) -> None:
        """Leaves a case out from here on."""
        self.cases = [each for each in self.cases if each is not case]
        self.notes.append(f"case {case.name} is left out: {whose} raised {type(error).__name__}: {first_line(error)}")

    def answered(self, whose: str) -> None:
        """DriftError where no case is left."""
        if not self.cases:
            raise DriftError(f"{whose} answered none of the cases, so nothing can be located: {self.notes[-1]}")

    def _run(
        self,
        graph: Graph,
        chunk: Sequence[str],
        given: frozenset[str],
        precision: str,
        who: str,
        renamed: dict[str, str] | None = None,
    ) -> Iterator[tuple[Case, dict[str, np.ndarray]]]:
        """One piece over all cases: what it computes, by the graph's own names. Given tensors are those of `who`."""
        from nlpconvert.backends import onnxruntime
        from nlpconvert.convert import tapping

        path, inputs = graph.piece(chunk, given, self.scratch)
        options = self.options
        session = onnxruntime.open_file(
            path, precision=precision, device=options.provider, threads=options.threads, data=graph.path.parent
        )
        try:
            for case in self.cases:
                feed = {
                    place: self.store.get((who, (renamed or {}).get(name, name), case.name))
                    for name, place in inputs.items()
                }
                try:
                    answers = session.run({**case.inputs, **feed})
                except Exception as error:  # a runtime raises whatever it likes
                    self.failed(case, error, who)
                    continue
                yield case, {name: answers[name + tapping.TAP] for name in chunk}
        finally:
            session.close()

    def _chunks(self, graph: Graph, names: Sequence[str]) -> Iterator[list[str]]:
        """The names in order, in groups whose pieces hold at most PIECE bytes of weights and of tensors."""
        axes: dict[str, int] = {}
        for case in self.cases:
            for name, array in case.inputs.items():
                axis = "decoder_sequence" if name.startswith("decoder_") else "sequence"
                axes["batch"] = max(axes.get("batch", 1), array.shape[0])
                axes[axis] = max(axes.get(axis, 1), array.shape[-1])
        chunk: list[str] = []
        weights = tensors = 0
        for name in names:
            more, size = graph.weight_bytes([name], names), 4 * graph.floats(name, axes)
            if chunk and (weights + more > PIECE or tensors + size > PIECE):
                yield chunk
                chunk, weights, tensors = [], 0, 0
            chunk.append(name)
            weights, tensors = weights + more, tensors + size
        if chunk:
            yield chunk

"""Floor 3: an artifact's inner tensors held against the modules of the model in PyTorch.

The artifact is run first and closed; then the model is run with its tensors watched, and once more with each replaced
by the artifact's. A graph's tensors are told by the modules that its exporter recorded, a trace's by the order of its
operations; each match is confirmed by shape.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from nlpconvert import cache_names
from nlpconvert.artifact import Artifact
from nlpconvert.inputs import Case
from nlpconvert.pieces import PIECE, Tally, Work, same_numbers

if TYPE_CHECKING:
    import torch

    from nlpconvert.backends.pytorch_taps import Call, Passed, Point
    from nlpconvert.backends.torchscript_taps import Operation
    from nlpconvert.convert.matching import Pair
    from nlpconvert.convert.tapping import Graph


@dataclass(frozen=True)
class Named:
    """A tensor of the artifact and the module that made it; `biasless` where fusing left its product alone, and the
    bias is added elsewhere."""

    module: str
    tensor: str
    biasless: bool = False


@dataclass(frozen=True)
class Tapped:
    """An ONNX file's tensors, and the modules that it has none for. Of a derived file also itself, the exported one and
    the tensors that they share, for what the two files tell."""

    tensors: tuple[Named, ...] = ()
    unmatched: tuple[str, ...] = ()
    files: tuple[Graph, Graph, Sequence[Pair]] | None = None


def tapped(work: Work, candidate: Artifact, names: Artifact | None) -> Tapped:
    """Runs an ONNX file; its tensors are kept under ("candidate", name, case).

    `names`: the exported file that the candidate was derived from: what was fused or rewritten since still goes by the
    names that it had there.
    """
    from nlpconvert.convert import matching, tapping

    graph = tapping.read(candidate.path)
    unmatched: list[str] = []
    files = None
    if names is None:
        found = [Named(tap.module, tap.name) for tap in graph.taps if tap.module or graph.scoped]
        unmatched = [tap.name for tap in graph.taps if not tap.module and not graph.scoped]
    else:
        exported = tapping.read(names.path)
        leaving = {tap.name for tap in exported.taps}
        pairs, unmatched = matching.match(exported, graph)
        files = graph, exported, pairs
        found = []
        for pair in pairs:
            if pair.reference in leaving:
                found.append(Named(pair.module, pair.candidate))
            elif _lacks_its_bias(exported, pair):
                found.append(Named(pair.module, pair.candidate, biasless=True))
            else:  # what stands for a module's output is no output of it in PyTorch
                unmatched.append(pair.module)
    work.own(graph, [each.tensor for each in found], "candidate", candidate.precision)
    return Tapped(tuple(found), tuple(unmatched), files)


def _lacks_its_bias(exported: Graph, pair: Pair) -> bool:
    """Whether a tensor that stands for a module's output is that output but for one constant that is added to it."""
    taps = [tap.name for tap in exported.taps if tap.module == pair.module]
    if len(taps) != 1:
        return False
    nodes, weights = exported.parts(taps[0], [pair.reference])
    return [node.op_type for node in nodes] == ["Add"] and list(weights) == [f"{pair.module}.bias"]


@dataclass(frozen=True)
class Trace:
    """A TorchScript file's operations in order, and its tensors by the name of the output that they are."""

    operations: tuple[Operation, ...] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)


def traced(work: Work, candidate: Artifact) -> Trace:
    """Runs a TorchScript file; what its operations read and make is kept under ("candidate", name, case)."""
    from nlpconvert.backends import torchscript_taps

    session = torchscript_taps.open(candidate, threads=work.options.threads)
    try:
        names = list(dict.fromkeys([*torchscript_taps.names(session.operations), *session.outputs.values()]))
        for case in list(work.cases):
            per_pass = max(1, PIECE // (4 * session.largest(case.inputs)))
            try:
                for start in range(0, len(names), per_pass):
                    for name, array in session.tap(case.inputs, names[start : start + per_pass]).items():
                        work.store.keep(("candidate", name, case.name), array)
            except RuntimeError as error:
                work.failed(case, error, candidate.step)
            work.progress.advance()
        return Trace(session.operations, session.outputs)
    finally:
        session.close()


class Held:
    """Passes of a model over the cases, and what they came to: by `tensors` (a graph's) or a `trace`."""

    def __init__(self, work: Work, module: torch.nn.Module, tensors: Sequence[Named], trace: Trace) -> None:
        self._work = work
        self._module = module
        self._paths = {path for path, _ in module.named_modules()}
        self._tops = [path for path in self._paths if path and "." not in path]
        self._tensors = [self._unwrapped(each) for each in tensors]
        self._biasless = {each.tensor for each in tensors if each.biasless}
        self._trace = trace
        self._outputs: dict[str, str] = {}
        self._tallies: dict[str, Tally] = {}
        self._order: dict[str, int] = {}
        self._met: dict[str, None] = {}  # modules with weights of their own, as they were called

    def ask(self, case: Case) -> None:
        """One case: the model's modules are met, watched, then replaced."""
        from nlpconvert.backends import pytorch_taps

        work = self._work
        try:
            passed = pytorch_taps.run(self._module, case.inputs, lambda point, array: None)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            work.failed(case, error, "the model")
            return
        work.progress.advance()
        self._met.update(dict.fromkeys(call.module for call in passed.calls))
        matched = self._by_operation(passed, case) if self._trace.operations else self._by_module(passed, case)
        self._outputs = {name: matched[number].tensor for name, number in passed.outputs.items() if number in matched}
        for number, named in matched.items():
            self._tallies.setdefault(named.tensor, Tally(named.module, named.tensor))
            self._order.setdefault(named.tensor, number)

        def theirs(tally: Tally) -> np.ndarray:
            array = work.store.get(("candidate", tally.tensor, case.name))
            return array + self._bias(tally.module) if tally.tensor in self._biasless else array

        def watch(point: Point, array: np.ndarray) -> None:
            if point.number in matched:
                tally = self._tallies[matched[point.number].tensor]
                tally.add(tally.arrives, case, array, theirs(tally))

        def put(point: Point, array: np.ndarray) -> np.ndarray | None:
            if point.number not in matched:
                return None
            tally = self._tallies[matched[point.number].tensor]
            tally.add(tally.introduced, case, array, theirs(tally))
            return theirs(tally) if tally.fits else None

        for visit in (watch, put):
            pytorch_taps.run(self._module, case.inputs, visit)
            work.progress.advance()

    def tallies(self) -> list[Tally]:
        """What was held against each other, in the model's order of execution."""
        fitting = (tally for tally in self._tallies.values() if tally.fits)
        return sorted(fitting, key=lambda tally: self._order[tally.tensor])

    def at_outputs(self) -> dict[str, float]:
        """The drift that arrives at those of the model's outputs that were matched."""
        fitting = {tally.tensor: tally for tally in self.tallies()}
        return {
            name: fitting[at].arrives.relative
            for name, at in self._outputs.items()
            if at in fitting and not cache_names.is_present(name)
        }

    def unmatched(self) -> list[str]:
        """Modules that one side alone has: a graph's as recorded, of the model's those that are one operation."""
        matched = {tally.module for tally in self.tallies()}
        named = dict.fromkeys([*(each.module for each in self._tensors if each.module), *self._met])
        return [name for name in named if name not in matched]

    def _bias(self, module: str) -> np.ndarray:
        array: np.ndarray = self._module.get_parameter(f"{module}.bias").detach().float().cpu().numpy()
        return array

    def _unwrapped(self, named: Named) -> Named:
        """A module that someone wrapped before an export (`wrapper.bert.encoder`), or took out of a whole model
        (`encoder` of `bert.encoder`), under its own path."""
        path = named.module
        if not path or path in self._paths:
            return named
        parts = path.split(".")
        inner = [".".join(parts[first:]) for first in range(1, len(parts))]
        outer = [f"{top}.{path}" for top in self._tops]
        found = next((each for each in (*inner, *outer) if each in self._paths), path)
        return replace(named, module=found)

    def _shape(self, tensor: str, case: Case) -> tuple[int, ...]:
        shape: tuple[int, ...] = self._work.store.get(("candidate", tensor, case.name)).shape
        return shape

    def _by_module(self, passed: Passed, case: Case) -> dict[int, Named]:
        """Points by number: the n-th tensor of a shape that a module makes is the n-th of that shape in the graph.

        Only where there are as many on both sides. What is left is tried once more with other views of the same rows.
        """
        ours: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for point in passed.points:
            ours.setdefault((point.module, point.shape), []).append(point.number)
        theirs: dict[tuple[str, tuple[int, ...]], list[Named]] = {}
        for named in self._tensors:
            theirs.setdefault((named.module, self._shape(named.tensor, case)), []).append(named)
        matched: dict[int, Named] = {}
        for (module, shape), numbers in ours.items():
            others = theirs.get((module, shape), [])
            if not others:
                views = [key for key in theirs if key[0] == module and key not in ours and same_numbers(shape, key[1])]
                others = theirs[views[0]] if len(views) == 1 else []
            if len(others) == len(numbers):
                matched.update(zip(numbers, others, strict=True))
        return matched

    def _by_operation(self, passed: Passed, case: Case) -> dict[int, Named]:
        """Points by number: operations in order are calls in order, told by their weights.

        A trace leaves out what no output reads, and what it could compute beforehand. Tensors have to have as many
        numbers.
        """
        matched: dict[int, Named] = {}
        for kind in dict.fromkeys(operation.kind for operation in self._trace.operations):
            operations = [each for each in self._trace.operations if each.kind == kind]
            calls = [each for each in passed.calls if each.kind == kind]
            for operation, call in _aligned(operations, calls):
                for number, tensor in ((call.gives, operation.gives), (call.reads, operation.reads)):
                    if number is None or tensor is None or number in matched:
                        continue
                    point = passed.points[number]
                    shape = self._shape(tensor, case)
                    if same_numbers(point.shape, shape):
                        matched[number] = Named(point.module, tensor)
        for name, tensor in self._trace.outputs.items():
            number = passed.outputs.get(name)
            if number is not None and same_numbers(passed.points[number].shape, self._shape(tensor, case)):
                matched.setdefault(number, Named(passed.points[number].module, tensor))
        return matched


def _aligned(operations: Sequence[Operation], calls: Sequence[Call]) -> Iterator[tuple[Operation, Call]]:
    """Operations of one kind beside the calls they are.

    As many of both: in order. Else only those whose weight no other has, and what stands alone between two of them.
    """
    if len(operations) == len(calls):
        yield from (pair for pair in zip(operations, calls, strict=True) if pair[0].weight[:1] == pair[1].weight[:1])
        return
    ours, theirs = [each.weight for each in calls], [each.weight for each in operations]
    counts = Counter(ours), Counter(theirs)
    for tag, a, b, c, d in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if b - a != d - c:
            continue
        for operation, call in zip(operations[c:d], calls[a:b], strict=True):
            once = counts[0][call.weight] == counts[1][operation.weight] == 1
            strangers = not counts[1][call.weight] and not counts[0][operation.weight]
            if once and (tag == "equal" or (strangers and operation.weight[:1] == call.weight[:1])):
                yield operation, call
